"""Drafts with another tokenizer than the target's."""

from specdec.drafts.translated.model import Translated

__all__ = ["Translated"]
