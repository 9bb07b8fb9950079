"""The contract of KV pruners: their arguments and what they may return.

A pruner is ``(keys, values, length, budget, attention=None) -> kept [B, H, K]`` with ``K = min(budget, S)``. Row b uses its first
``length[b]`` slots; the others are never read. ``kept[b, h]`` holds slots of row b in ascending order, padded with -1 where the
row has fewer than the budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.arguments import at_least


@dataclass(frozen=True)
class Needs:
    """What a pruner needs besides keys and values; the caller computes nothing else.

    Args:
        attention: whether the pruner reads ``attention``, the last queries' weights on the slots.
    """

    attention: bool = False


@runtime_checkable
class Pruner(Protocol):
    """Chooses the KV entries of a smaller cache, or those that a draft sees beside its window."""

    @property
    def needs(self) -> Needs:
        """A class attribute will do: ``needs = Needs(attention=True)``."""
        ...

    def __call__(
        self, keys: Tensor, values: Tensor, length: Tensor, budget: int, attention: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            keys: ``[B, H, S, D]`` and values: ``[B, H, S, Dv]``, as the cache holds them. length: ``[B]`` slots in use.
            budget: the most slots to keep per head and row.
            attention: ``[B, Hq, Q, S]`` weights of the last Q queries of each row on the slots (``pruning.attention_weights``);
                Hq is a multiple of H. Where the caller passes only some of the slots (a draft leaves out those it sees anyway), S
                counts these only.
        Returns:
            ``[B, H, K]`` slots, ascending, -1 at the end.
        Raises:
            ValueError: shapes that do not fit, a budget below 1, or a missing input that the pruner needs.
        """
        ...


def check_pruner(pruner: Any) -> None:
    """Raise TypeError for an object that is not a pruner; the message names what is missing."""
    if isinstance(pruner, type):
        raise TypeError(f"pruner is the class {pruner.__name__}: give an instance, {pruner.__name__}()")
    if not isinstance(pruner, Pruner) or not callable(pruner) or not isinstance(pruner.needs, Needs):
        raise TypeError(
            f"pruner is {pruner!r}: give an object with the call of pruning.Pruner that declares what it reads, such as "
            "needs = pruning.Needs(attention=True)"
        )


def check(pruner: Any, keys: Tensor, values: Tensor, length: Tensor, budget: int) -> None:
    """Refuse invalid arguments of ``pruner``; errors name it.

    Raises:
        TypeError: a length that is not a tensor, or a budget that is not a whole number.
        ValueError: shapes, lengths or a budget that do not fit.
    """
    name = type(pruner).__name__
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"{name}: keys are {list(keys.shape)} and values {list(values.shape)}; they must be [B, H, S, D] with equal B, H and S"
        )
    B, _, S, _ = keys.shape
    if not isinstance(length, Tensor):
        raise TypeError(f"{name}: length is {length!r}: give a tensor [{B}], the slots in use of each row")
    at_least(1, f"{name}: budget", budget, "keep at least 1 slot")
    if length.shape != (B,):
        raise ValueError(
            f"{name}: length is {list(length.shape)}; it must be [{B}], the slots in use of each row"
        )
    for b, n in enumerate(length.tolist()):
        if not 0 <= n <= S:
            raise ValueError(f"{name}: length[{b}] is {n} and a row has {S} slots")


class Checked(ABC):
    """A pruner that is asked for its choice after the arguments were checked; for one that does not read values."""

    def __call__(
        self, keys: Tensor, values: Tensor, length: Tensor, budget: int, attention: Tensor | None = None
    ) -> Tensor:
        check(self, keys, values, length, budget)
        return self.choose(keys, length, budget, attention)

    @abstractmethod
    def choose(self, keys: Tensor, length: Tensor, budget: int, attention: Tensor | None) -> Tensor:
        """As ``Pruner.__call__`` with arguments that fit."""


def check_kept(pruner: Any, kept: Any, keys: Tensor, length: Tensor, budget: int) -> None:
    """Refuse what ``pruner`` returned unless it is existing slots, each at most once per head; their order does not matter.

    Raises:
        ValueError: another shape, dtype or device, a slot beyond its row's length, or the same slot twice.
    """
    name, (B, H) = type(pruner).__name__, keys.shape[:2]
    if not isinstance(kept, Tensor) or kept.dtype != torch.long:
        what = f"a tensor of {kept.dtype}" if isinstance(kept, Tensor) else f"a {type(kept).__name__}"
        raise ValueError(f"{name} returned {what}: return slot numbers, a tensor of torch.long")
    if kept.dim() != 3 or kept.shape[:2] != (B, H) or kept.shape[2] > budget:
        raise ValueError(
            f"{name} returned slots of shape {list(kept.shape)}: return [{B}, {H}, K] for {B} rows and {H} KV heads, with K at most "
            f"the budget of {budget}"
        )
    if kept.device != keys.device:
        raise ValueError(
            f"{name} returned slots on {kept.device} for keys on {keys.device}: return them on the keys' device"
        )
    ordered = kept.sort(-1).values
    outside = (ordered < -1) | (ordered >= length.to(kept.device)[:, None, None])
    twice = torch.zeros_like(outside)
    twice[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    wrong = (outside | twice).nonzero()[:1].tolist()
    if wrong:
        [[b, h, i]] = wrong
        slot, end = int(ordered[b, h, i]), int(length[b])
        why, remedy = (
            (
                f"and that row uses slots 0 to {end - 1}",
                "choose below length[b], and pad with -1 where a row has fewer slots",
            )
            if bool(outside[b, h, i])
            else ("twice", "return each slot once, and pad with -1")
        )
        raise ValueError(f"{name} returned slot {slot} for KV head {h} of row {b} {why}: {remedy}")
