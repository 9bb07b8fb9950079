"""What all masks share: ``&``, ``|`` and ``show()``. The call is FlexAttention's ``mask_mod`` (Dong et al., arXiv 2412.05496)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any, ClassVar

from torch import Tensor

from specdec.masks.lower import MaskMod
from specdec.masks.reach import Reach, of_both, of_either
from specdec.masks.show import Picture, picture


class Mask(ABC):
    """Which keys a query sees: ``mask(b, h, q_position, kv_position) -> bool``, elementwise on ints or broadcasting tensors.

    ``b`` counts rows and ``h`` heads. In a full cache slots are positions; for a compact one, or a tree, see
    ``OriginalText`` and ``InCache``. A mask is a frozen dataclass that defines the call, and nothing else is needed.
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
        raise TypeError("a mask is neither true nor false: join masks by & and |, not by 'and' and 'or'")

    def parts(self) -> Iterator[Mask]:
        """The mask itself and all that it is made of."""
        yield self
        for value in vars(self).values():
            if isinstance(value, Mask):
                yield from value.parts()

    @property
    def reach(self) -> Reach | None:
        """How far back a causal query sees; ``None``: without a bound, so that a cache has to hold the whole text."""
        return None

    @property
    def slots(self) -> int:
        """How many slots the mask's own tensors speak of; 0 where it has none."""
        return 0

    @property
    def extent(self) -> int:
        """How many positions show what is particular to this mask; for pictures."""
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
    """Sees what both see."""

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
    """Sees what either sees."""

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


def check_masks(*masks: Any) -> None:
    """Refuse what is no mask, and no function that could be one."""
    for mask in masks:
        if isinstance(mask, type):
            raise TypeError(f"{mask.__name__} is a class: give an object, such as {mask.__name__}(...)")
        if not callable(mask):
            raise TypeError(
                f"a {type(mask).__name__} is no mask: join masks, or functions (b, h, q_position, kv_position) -> bool"
            )


def _reach(mask: MaskMod) -> Reach | None:
    """Of a plain function none is known."""
    return mask.reach if isinstance(mask, Mask) else None


def _short(value: Any) -> str:
    """A plain function by its name."""
    if callable(value) and not isinstance(value, Mask):
        return value.__name__ if isinstance(value, FunctionType) else type(value).__name__
    return repr(value)
