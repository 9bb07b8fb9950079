"""Masks made from functions: a function of a query and a key, or one of a query that returns the intervals which the query sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.masks.mask import Mask, MaskMod
from specdec.masks.reach import Reach


@dataclass(frozen=True)
class Function(Mask):
    """The mask of a plain ``mask_mod``, FlexAttention's (Dong et al., arXiv 2412.05496).

    Args:
        mask_mod: ``(b, h, q_position, kv_position) -> bool``, elementwise.
        sinks, window: a bound on what a causal query sees: positions below ``sinks`` and the latest ``window``, its own included.
            Without a window there is no bound, and caches hold the whole text.
    """

    mask_mod: MaskMod
    sinks: int = 0
    window: int | None = None

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return self.mask_mod(b, h, q_position, kv_position)

    @property
    def reach(self) -> Reach | None:
        return None if self.window is None else Reach(self.sinks, self.window)

    def __repr__(self) -> str:
        return getattr(self.mask_mod, "__name__", type(self.mask_mod).__name__)

    @staticmethod
    def example(model: Any) -> Function:
        return Function(lambda b, h, q, kv: (kv <= q) & (kv % 2 == 0), window=None)


@dataclass(frozen=True, repr=False, eq=False)
class Intervals(Mask):
    """The mask of a function that returns the intervals of positions a query sees. It is called once per position, at construction.

    Args:
        of: ``position -> [(start, end), ...]``, half-open. positions: how many positions the mask is defined for: the length of the longest
            text that a model may be given. Later queries exist in padding only, and see what the last position sees. sinks, window: as for
            ``Function``.
    Raises:
        ValueError: no positions, or an interval that is no pair.
    """

    of: Callable[[int], Sequence[tuple[int, int]]]
    positions: int
    sinks: int = 0
    window: int | None = None
    edges: Tensor = field(init=False)  # [positions, most intervals, 2]

    def __post_init__(self) -> None:
        remedy = "give the number of positions of the longest text"
        at_least(1, "Intervals.positions", self.positions, remedy)
        said = [list(self.of(q)) for q in range(self.positions)]
        edges = torch.zeros(self.positions, max(map(len, said)), 2, dtype=torch.long)
        for q, own in enumerate(said):
            if any(len(pair) != 2 for pair in own):
                raise ValueError(f"Intervals.of({q}) is {own}: give pairs (start, end)")
            if own:
                edges[q, : len(own)] = torch.tensor(own)
        object.__setattr__(self, "edges", edges)

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        query, key = torch.as_tensor(q_position), torch.as_tensor(kv_position)
        edges = self.edges.to(query.device if query.dim() else key.device)
        edges, key = edges[query.clamp(max=self.positions - 1)], key[..., None]
        return ((key >= edges[..., 0]) & (key < edges[..., 1])).any(-1)

    @property
    def reach(self) -> Reach | None:
        return None if self.window is None else Reach(self.sinks, self.window)

    @property
    def slots(self) -> int:
        return self.positions

    def __repr__(self) -> str:
        return f"Intervals({getattr(self.of, '__name__', type(self.of).__name__)})"

    @staticmethod
    def example(model: Any) -> Intervals:
        return Intervals(lambda q: [(0, 1), (max(q - 2, 1), q + 1)], positions=32)
