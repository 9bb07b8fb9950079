"""Chances between two bounds, where only the largest probabilities of the target's distribution were kept.

A chain needs only the probabilities of the text's own tokens, and stays exact. Several candidates at a node need sums over the vocabulary,
and of what the other tokens contribute only their mass is known. So these chances become intervals. They shrink to points as more of the
distribution is kept. ``audit/between.py`` makes intervals of rounds and tokens of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.verifiers.acceptance import left_without


class Known(NamedTuple):
    """What is known of the target's distributions: ``ids [..., M]``, distinct, and their probabilities ``p [..., M]``; ``rest [...]``, the
    mass of all other tokens; and ``own [...]``, the probability of ``token [...]``, the committed one, whether it is among ids or not."""

    ids: Tensor
    p: Tensor
    rest: Tensor
    token: Tensor
    own: Tensor

    @staticmethod
    def largest(p: Tensor, token: Tensor, M: int) -> Known:
        """The M largest probabilities of ``p [..., V]``, and the committed token's."""
        top = p.double().topk(M, -1)
        rest = (p.double().sum(-1) - top.values.sum(-1)).clamp(min=0)
        return Known(top.indices, top.values, rest, token, p.double().gather(-1, token[..., None])[..., 0])


class Bounds(NamedTuple):
    """The exact value is at least ``low`` and at most ``high``, up to rounding."""

    low: Tensor
    high: Tensor


def sibling_bounds(known: Known, q: Tensor, m: int, together: bool = False) -> Bounds:
    """``[..., m]``: bounds of ``sibling_chances`` for m siblings that were drawn independently from q.

    Before sibling i, ``max(p - c q, 0)`` is left of the target's distribution, where c is 0 for the first sibling and grows by the sum of
    what is left. Tokens that are not known leave at least their mass less c times the draft's mass there, and at most their mass. What is
    left falls with c by at most as much as c grows, so bounds of c give bounds of the next c.

    Args:
        q: ``[..., V]``. together: of the chance that one of the first i siblings was accepted, not of each.
    """
    tokens = _Tokens.of(known, q)
    low = high = torch.zeros_like(tokens.own)
    lows, highs = [], []
    for _ in range(m):
        (low_low, low_high), (high_low, high_high) = tokens.left(low), tokens.left(high)
        if not together:
            lows.append(torch.minimum((tokens.own - high * tokens.q).clamp(min=0), high_low * tokens.q))
            highs.append(torch.minimum((tokens.own - low * tokens.q).clamp(min=0), low_high * tokens.q))
        low, high = low + low_low, high + high_high
        if together:
            lows.append(torch.minimum(tokens.own, low * tokens.q))
            highs.append(torch.minimum(tokens.own, high * tokens.q))
    return tokens.given(lows, highs)


def distinct_bounds(known: Known, q: Tensor, m: int) -> Bounds:
    """``[..., m]``: bounds of ``distinct_chances`` for one or two siblings that were drawn from q without replacement.

    Raises:
        ValueError: more than two siblings.
    """
    if m not in (1, 2):
        raise ValueError(
            f"m is {m}: without replacement there are bounds for 1 or 2 siblings; record all of the target's distribution "
            "(distinct_chances), or draw siblings independently"
        )
    tokens = _Tokens.of(known, q)
    first = torch.minimum(tokens.own, tokens.q)
    if m == 1:
        return tokens.given([first], [first])
    more = (tokens.own - tokens.q).clamp(min=0)  # what is left of the committed token
    z_low, z_high = tokens.left(torch.ones_like(more))
    q = q.double()
    without = left_without(q)
    others = torch.where(without > 0, tokens.q[..., None] / without, 0).scatter(-1, known.token[..., None], 0)

    def second(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where z is left: of elder tokens that are known, of the others as if the target never took them, and the most of a unit of these."""
        share = torch.where(more > 0, more / z, 0)
        each = torch.minimum(share[..., None], others)
        of_known = each.gather(-1, known.ids)
        q_known = q.gather(-1, known.ids)
        sure = ((q_known - known.p.double()).clamp(min=0) * of_known).sum(-1)
        return sure, ((q * each).sum(-1) - (q_known * of_known).sum(-1)).clamp(min=0), share

    sure, rest, share = second(z_high)
    low = sure + (rest - known.rest.double() * share).clamp(min=0)
    sure, rest, _ = second(z_low)
    high = torch.minimum(sure + rest, tokens.own - first)
    return tokens.given([first, low], [first, high])


class _Tokens(NamedTuple):
    """``ps, qs [..., M + 1]`` of all tokens that are known, the committed one among them; ``rest, tail [...]``, what p and q have elsewhere;
    ``own, q [...]``, what they have at the committed token."""

    ps: Tensor
    qs: Tensor
    rest: Tensor
    tail: Tensor
    own: Tensor
    q: Tensor

    @staticmethod
    def of(known: Known, q: Tensor) -> _Tokens:
        own, mine = known.own.double(), q.gather(-1, known.token[..., None]).double()[..., 0]
        new = ~(known.ids == known.token[..., None]).any(-1)
        ps = torch.cat([known.p.double(), (own * new)[..., None]], -1)
        qs = torch.cat([q.gather(-1, known.ids).double(), (mine * new)[..., None]], -1)
        rest = (known.rest.double() - own * new).clamp(min=0)
        return _Tokens(ps, qs, rest, (q.sum(-1, dtype=torch.float64) - qs.sum(-1)).clamp(min=0), own, mine)

    def left(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of the sum of ``max(p - c q, 0)``."""
        some = (self.ps - c[..., None] * self.qs).clamp(min=0).sum(-1)
        return some + (self.rest - c * self.tail).clamp(min=0), some + self.rest

    def given(self, low: list[Tensor], high: list[Tensor]) -> Bounds:
        """Bounds of chances, given the committed token."""
        possible = self.own[..., None] > 0
        return Bounds(
            *(
                torch.where(possible, torch.stack(x, -1) / self.own[..., None], 0).clamp(0, 1)
                for x in (low, high)
            )
        )
