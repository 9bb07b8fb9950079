"""MagicDec (arXiv 2408.11049): the target drafts for itself over a view of its own KV."""

from specdec.drafts.magicdec.draft import MagicDec

__all__ = ["MagicDec"]
