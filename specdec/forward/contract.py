"""The contract of forwards: one call from packed tokens to logits."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from torch import Tensor

from specdec.cache.contract import KVStore

Keep: TypeAlias = Any
"""Which of the T tokens' logits are wanted: a tensor of ascending indices, ``None`` for all, ``False`` for none."""

Caught: TypeAlias = dict[int, list[Tensor]] | None
"""Layer -> a list to which its activations ``[T, E]`` are added; layer ``l`` is counted from 1, and 0 is the input of the first."""


class Forward(Protocol):
    """Runs a model's layers over packed tokens. ``tests/contracts/test_forward.py`` tests every implementation."""

    def forward(
        self, store: KVStore, plan: Any, ids: Tensor, positions: Tensor, keep: Keep, caught: Caught = None
    ) -> Tensor | None:
        """Feed ``ids [T]`` at ``positions [T]``.

        Args:
            store: where keys and values go. plan: an ``AttentionPlan`` for these tokens, or its stand-in in a captured step.
        Returns:
            logits ``[K, V]`` of the tokens that ``keep`` names, or ``None`` when none are wanted.
        """
        ...


class Runner(Forward, Protocol):
    """The ``Forward`` of one model, with its properties.

    Attributes:
        spare: slots that each row of a cache needs beyond its capacity, for padding.
        trees: whether nodes may branch. concurrent: whether several threads may call it at once.
        invariant: whether a row's logits are a function of that row alone, bit for bit. bf16_weights: whether it reads bfloat16 copies.
    """

    spare: int
    trees: bool
    concurrent: bool

    @property
    def invariant(self) -> bool: ...

    @property
    def bf16_weights(self) -> bool: ...

    def check(self) -> None:
        """Bring copies of weights up to date; called for every new cache. Raises RuntimeError where that is not possible."""
        ...

    def capturable(self) -> Forward | str:
        """The same forward in operators that can be captured, or the reason why there is none."""
        ...
