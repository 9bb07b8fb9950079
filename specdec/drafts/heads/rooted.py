"""The first level of a tree, whose text is known: there a head's logits follow processors and grammars."""

from __future__ import annotations

from torch import Tensor

from specdec.drafts.draw import LOWEST, fitted
from specdec.drafts.heads.model import HeadModel
from specdec.sampling import Sampling, logits_of
from specdec.types import Context


def at_root(head: HeadModel, logits: Tensor, context: Context, sampling: Sampling) -> Tensor:
    """``logits [R, outputs]`` after the texts themselves, with the lowest value for tokens that processors and grammars forbid."""
    if not sampling.reads_text:
        return logits
    with logits_of("a draft's "):
        whole = fitted(head.widened(logits.float()), None, sampling)[:, None]
        allowed = sampling.constrained(whole, context, None, -1)[:, 0]
    return allowed.index_select(1, head.ids).clamp(min=LOWEST)
