"""Drafts propose tokens. There is one algorithm in each file or folder."""

from specdec.drafts.cascade import Cascade
from specdec.drafts.function import FunctionDraft, chain_draft
from specdec.drafts.heads.draft import Head
from specdec.drafts.jump_forward import JumpForward
from specdec.drafts.magicdec.draft import MagicDec
from specdec.drafts.model import Model
from specdec.drafts.ngram import NGram
from specdec.drafts.none import NoDraft
from specdec.drafts.paced import Paced
from specdec.drafts.parallel import Parallel
from specdec.drafts.pool import Pool
from specdec.drafts.recycling import Recycling
from specdec.drafts.retrieval import Corpus, Retrieval
from specdec.drafts.spire.draft import Spire
from specdec.drafts.stacked import Stacked
from specdec.drafts.suffix import Suffix
from specdec.drafts.translated.model import Translated
from specdec.drafts.translated.text import TextMatch
from specdec.drafts.tree import Tree

__all__ = [
    "Cascade",
    "Corpus",
    "FunctionDraft",
    "Head",
    "JumpForward",
    "MagicDec",
    "Model",
    "NGram",
    "NoDraft",
    "Paced",
    "Parallel",
    "Pool",
    "Recycling",
    "Retrieval",
    "Spire",
    "Stacked",
    "Suffix",
    "TextMatch",
    "Translated",
    "Tree",
    "chain_draft",
]
