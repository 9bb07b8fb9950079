"""A cache of states that cannot be cut: rolling back is going on from an older state.

A recurrent state has no length. Each row therefore keeps the state after committed tokens and, ahead of it, at most one that has read
proposed tokens too; a call goes on from the longest one whose tokens begin what is to be read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specdec.configs import setting
from specdec.types import Context, Verdict

_REPLACES = (
    DynamicLayer.update,
    DynamicSlidingWindowLayer.update,
)  # they make new tensors and never write into old ones


@dataclass(frozen=True, eq=False)
class State:
    """A model's memory after ``tokens``.

    Attributes:
        memory: transformers' cache, which a forward changes; ``None`` before the first token.
        logits: ``[V]`` after the last token; ``None`` before the first one.
    """

    tokens: tuple[int, ...] = ()
    memory: Any = None
    logits: Tensor | None = None

    @torch.inference_mode()  # as states are made
    def copy(self) -> State:
        """The same state with a memory of its own. Tensors that no forward writes into are shared."""
        layers = setting(self.memory, "layers") or ()
        shared = [t for x in layers if setting(type(x), "update") in _REPLACES for t in (x.keys, x.values)]
        return replace(self, memory=copy.deepcopy(self.memory, {id(t): t for t in shared if t is not None}))

    def begins(self, tokens: Sequence[int], known: int) -> bool:
        """Whether the logits after ``known`` and more of ``tokens`` can be computed from here."""
        n = len(self.tokens)
        return n <= known and self.tokens == tuple(tokens[:n])


class StateCache:
    """The states of each row: ``rows[b]`` has one, and behind it perhaps another that has read fewer tokens.

    Attributes:
        capacity: the most tokens of a row, nodes included. begun: for each row the weights that it is read with, as ``KeptStates`` knows them.
    """

    def __init__(self, rows: list[tuple[State, ...]], capacity: int, begun: Sequence[Any] = ()):
        self.rows, self.capacity, self.begun = rows, capacity, list(begun) or [None] * len(rows)

    @property
    def length(self) -> Tensor:
        """``[B]`` on the host: tokens that every state of a row has read."""
        return torch.tensor([len(states[0].tokens) for states in self.rows], dtype=torch.long)

    def sync(self, context: Context) -> Tensor:
        """``[B]`` how many tokens need not be read again; drops states that other tokens have entered."""
        held = []
        for b, states in enumerate(self.rows):
            text = context.row(b)
            self.rows[b] = tuple(s for s in states if s.tokens == tuple(text[: len(s.tokens)])) or (State(),)
            held.append(min(len(self.rows[b][-1].tokens), len(text) - 1))
        return torch.tensor(held, dtype=torch.long)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Nothing: the next call compares the tokens that a state has read with the text."""

    def select(self, rows: Tensor) -> StateCache:
        """The cache of some rows, in the given order; the old object must not be used again."""
        seen: set[int] = set()
        kept = []
        for b in rows.tolist():
            kept.append(tuple(s.copy() for s in self.rows[b]) if b in seen else self.rows[b])
            seen.add(b)
        return StateCache(kept, self.capacity, [self.begun[b] for b in rows.tolist()])

    def join(self, other: StateCache) -> StateCache:
        """The cache of both caches' rows, in order; neither may be used again."""
        begun = [*self.begun, *other.begun]
        return StateCache([*self.rows, *other.rows], max(self.capacity, other.capacity), begun)
