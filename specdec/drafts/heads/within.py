"""A head's logits where the text is known: there they follow processors and grammars, as the target's do."""

from __future__ import annotations

from torch import Tensor

from specdec.drafts.draw import LOWEST, fitted
from specdec.drafts.heads.model import HeadModel
from specdec.sampling import Sampling, logits_of
from specdec.types import Context, Proposal


def within(
    head: HeadModel,
    logits: Tensor,
    context: Context,
    sampling: Sampling,
    proposal: Proposal | None = None,
    first: int = -1,
) -> Tensor:
    """``logits [R, n, outputs]`` after the nodes from ``first`` on (-1: after the texts), with the lowest value for tokens that processors and grammars forbid."""
    if not sampling.reads_text:
        return logits
    with logits_of("a draft's "):
        whole = fitted(head.widened(logits.float()), None, sampling)
        allowed = sampling.constrained(whole, context, proposal, first)
    if allowed is whole:  # no row has a grammar or processors
        return logits
    return allowed.index_select(2, head.ids).clamp(min=LOWEST)
