"""Drafts and generators with mistakes that need several rounds to be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.audit.planted import PositionKeyed
from specdec.rng import ACCEPT, DRAFT, Key, Rng
from specdec.types import Context, Proposal, Round


class AcceptanceByPosition(PositionKeyed):
    """The numbers that accept tokens are keyed by position alone; all others are fresh."""

    def rekeyed(self, key: Key) -> Key:
        return super().rekeyed(key) if key.stream == ACCEPT else key


class DraftByPosition(PositionKeyed):
    """The numbers that draft tokens are keyed by position alone; all others are fresh."""

    def rekeyed(self, key: Key) -> Key:
        return super().rekeyed(key) if key.stream == DRAFT else key


@dataclass(frozen=True, eq=False)
class Confident:
    """Draws ``k`` tokens from ``distribution [V]``, and submits as many as confidences make worthwhile.

    A token is believed to be accepted with probability 0.9 after a 0 and 0.6 after another token, and ``length`` maps the expected
    accepted tokens of every length, ``survival [B, k]``, to the number that is submitted.

    Args:
        lag: 0: by the confidences of the same tokens; 1: by those of the block before; 2: of the block before that.
        first: stop at the first length that is no better than the one before it, instead of comparing all.
        cost: of verifying drafted tokens, however many; verifying none costs 1.
    """

    distribution: Tensor
    lag: int = 1
    first: bool = False
    k: int = 3
    cost: float = 2.85
    name = "adaptive verification"

    def nodes(self, length: int) -> int:
        return self.k

    def init(self, context: Context, target_cache: Any) -> Tensor:
        return torch.ones(context.batch, max(self.lag, 1), self.k, dtype=torch.float64)

    def propose(self, state: Tensor, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Tensor]:
        B, depth = context.batch, torch.arange(self.k)
        q = self.distribution.expand(B, self.k, -1)
        tokens = rng.categorical(q, Key(context.length[:, None], depth.expand(B, self.k)))
        last = context.tokens[torch.arange(B), context.length - 1]
        before = torch.cat([last[:, None], tokens[:, :-1]], 1)
        survival = torch.where(before == 0, 0.9, 0.6).double().cumprod(1)
        size = self._size(state[:, 0] if self.lag else survival).minimum(budget)
        return Proposal.chain(tokens, size, q, "sampled"), torch.cat([state[:, 1:], survival[:, None]], 1)

    def _size(self, survival: Tensor) -> Tensor:
        """``[B]`` the length with the most tokens for its cost."""
        cost = torch.full((self.k + 1,), self.cost, dtype=torch.float64).index_fill(0, torch.tensor([0]), 1)
        worth = torch.cat([torch.ones_like(survival[:, :1]), 1 + survival.cumsum(1)], 1) / cost
        if self.first:
            return (worth[:, 1:] > worth[:, :-1]).long().cumprod(1).sum(1)
        return worth.argmax(1)

    def observe(self, state: Tensor, round: Round) -> Tensor:
        return state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]
