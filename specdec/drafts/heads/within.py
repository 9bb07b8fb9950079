"""A head's logits where the text is known: there they follow processors and grammars, as the target's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from specdec.drafts.draw import LOWEST, fitted
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import SlotAnchors
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


def check_marginal(tree: str, head: HeadModel) -> None:
    """Raise ValueError for a head without marginal distributions, from which a ``tree`` is grown."""
    if not head.marginal:
        raise ValueError(
            f"{tree} takes one distribution for each depth, and those of this {type(head).__name__} depend on the tokens before: use "
            "Chain or DynamicTree"
        )


def marginals(
    head: HeadModel,
    at: SlotAnchors,
    memo: Any,
    given: Tensor,
    context: Context,
    depth: int,
    sampling: Sampling,
) -> Iterator[Tensor]:
    """The logits ``[R, outputs]`` of each of ``depth`` depths after the tokens ``given``, for heads whose distributions are marginal."""
    first = given.shape[1] - 1
    for n in range(first + depth):
        logits, memo = head.step(n, memo, given[:, min(n, first)], at)
        if n == first:
            logits = within(head, logits[:, None], context, sampling)[:, 0]
        if n >= first:
            yield logits
