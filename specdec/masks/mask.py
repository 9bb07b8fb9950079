"""The base class of masks: ``&``, ``|`` and ``show()``. The call is FlexAttention's ``mask_mod`` (Dong et al., arXiv 2412.05496)."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.masks.lower import MaskMod
from specdec.masks.reach import Reach, of_both, of_either
from specdec.masks.show import Picture, picture


class Mask(ABC):
    """Which keys a query sees: ``mask(b, h, q_position, kv_position) -> bool``, elementwise on ints or broadcasting tensors.

    ``b`` is the row and ``h`` the head. In a full cache slots are positions; for a compact one, or a tree, see
    ``OriginalText`` and ``InCache``. A new mask is a frozen dataclass that defines the call; nothing else is needed.
    """

    no_intervals: ClassVar[str] = ""  # why ``intervals`` refuses this mask, and the remedy

    @abstractmethod
    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any: ...

    def __and__(self, other: MaskMod) -> And:
        return And(self, other)

    def __rand__(self, other: MaskMod) -> And:
        return And(other, self)

    def __or__(self, other: MaskMod) -> Or:
        return Or(self, other)

    def __ror__(self, other: MaskMod) -> Or:
        return Or(other, self)

    def __bool__(self) -> bool:
        if not torch.compiler.is_dynamo_compiling() and _asked_by_dynamo():
            return True
        raise TypeError("a mask is neither true nor false: join masks by & and |, not by 'and' and 'or'")

    def parts(self) -> Iterator[Mask]:
        """The mask itself and all masks that it is made of."""
        yield self
        for value in vars(self).values():
            if isinstance(value, Mask):
                yield from value.parts()

    @property
    def reach(self) -> Reach | None:
        """How far back a causal query sees; ``None``: no bound, so a cache must hold the whole text."""
        return None

    @property
    def slots(self) -> int:
        """How many slots the mask's tensors describe; 0 if it has none."""
        return 0

    @property
    def extent(self) -> int:
        """How many positions ``show`` draws by default: enough to show the mask's structure."""
        parts = list(self.parts())
        sizes = [size for part in parts for size in vars(part).values() if isinstance(size, int)]
        return max((part.slots for part in parts), default=0) or max(16, *(2 * size for size in sizes), 0)

    def show(self, length: int | None = None, row: int = 0, head: int = 0) -> Picture:
        """A picture of the first ``length`` positions as text: queries down, keys across, at most 24 cells each way.

        Args:
            length: by default enough to see the largest size in the mask.
        Raises:
            ValueError: length below 1.
        """
        return picture(self, self.extent if length is None else length, row, head)

    def __repr__(self) -> str:
        made = {field.name for field in fields(self) if not field.init} if is_dataclass(self) else ()
        shown = ((k, v) for k, v in vars(self).items() if k not in made)
        words = (f"{k}{list(v.shape)}" if isinstance(v, Tensor) else _short(v) for k, v in shown)
        return f"{type(self).__name__}({', '.join(words)})"


@dataclass(frozen=True, repr=False)
class And(Mask):
    """A query sees what both masks show."""

    a: MaskMod
    b: MaskMod

    def __post_init__(self) -> None:
        check_masks(self.a, self.b)

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return self.a(b, h, q_position, kv_position) & self.b(b, h, q_position, kv_position)

    @property
    def reach(self) -> Reach | None:
        return of_both(_reach(self.a), _reach(self.b))

    def __repr__(self) -> str:
        return " & ".join(f"({_short(p)})" if isinstance(p, Or) else _short(p) for p in (self.a, self.b))

    @staticmethod
    def example(model: Any) -> And:
        return And(lambda b, h, q, kv: kv <= q, lambda b, h, q, kv: kv > q - 3)


@dataclass(frozen=True, repr=False)
class Or(Mask):
    """A query sees what either mask shows."""

    a: MaskMod
    b: MaskMod

    def __post_init__(self) -> None:
        check_masks(self.a, self.b)

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return self.a(b, h, q_position, kv_position) | self.b(b, h, q_position, kv_position)

    @property
    def reach(self) -> Reach | None:
        return of_either(_reach(self.a), _reach(self.b))

    def __repr__(self) -> str:
        return " | ".join(f"({_short(p)})" if isinstance(p, And) else _short(p) for p in (self.a, self.b))

    @staticmethod
    def example(model: Any) -> Or:
        return Or(lambda b, h, q, kv: kv < 2, lambda b, h, q, kv: kv == q)


def _asked_by_dynamo() -> bool:
    """Whether ``__bool__`` was called by Dynamo itself: in torch 2.11 it asks this of everything that traced code calls."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("torch._dynamo.")


def check_masks(*masks: Any) -> None:
    """Raise TypeError for anything but masks and functions."""
    for mask in masks:
        if isinstance(mask, type):
            raise TypeError(f"{mask.__name__} is a class: give an object, such as {mask.__name__}(...)")
        if not callable(mask):
            raise TypeError(
                f"a {type(mask).__name__} is no mask: join masks, or functions (b, h, q_position, kv_position) -> bool"
            )


def _reach(mask: MaskMod) -> Reach | None:
    """The mask's reach; ``None`` for a plain function."""
    return mask.reach if isinstance(mask, Mask) else None


def _short(value: Any) -> str:
    """The ``repr`` of a mask, the name of a plain function."""
    if callable(value) and not isinstance(value, Mask):
        return value.__name__ if isinstance(value, FunctionType) else type(value).__name__
    return repr(value)
