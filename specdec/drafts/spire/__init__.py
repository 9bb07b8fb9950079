"""SPIRe (arXiv 2504.06419): a few of the target's blocks, sparse attention and feedback memory."""

from specdec.drafts.spire.draft import Spire
from specdec.drafts.spire.model import SpireModel

__all__ = ["Spire", "SpireModel"]
