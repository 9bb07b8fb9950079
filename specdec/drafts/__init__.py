"""Drafts: who proposes. One algorithm a file."""

from specdec.drafts.function import FunctionDraft, chain_draft
from specdec.drafts.model import Model
from specdec.drafts.ngram import NGram
from specdec.drafts.nothing import Nothing
from specdec.drafts.pool import Pool
from specdec.drafts.self_speculative import MagicDec
from specdec.drafts.spire import Spire
from specdec.drafts.stacked import Stacked
from specdec.drafts.tree import Tree

__all__ = [
    "FunctionDraft",
    "MagicDec",
    "Model",
    "NGram",
    "Nothing",
    "Pool",
    "Spire",
    "Stacked",
    "Tree",
    "chain_draft",
]
