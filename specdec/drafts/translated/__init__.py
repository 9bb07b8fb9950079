"""Drafts with another tokenizer than the target's."""

from specdec.drafts.translated.model import Translated
from specdec.drafts.translated.text import TextMatch

__all__ = ["TextMatch", "Translated"]
