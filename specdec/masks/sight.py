"""What the queries of a model see by a mask, and which masks a model can be given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.masks.function import Function
from specdec.masks.mask import Mask, check_masks
from specdec.masks.positions import InCache, OriginalText
from specdec.masks.reach import Reach
from specdec.masks.streaming import streaming
from specdec.masks.text import known
from specdec.masks.tree import Tree

FAR = (1_500, 4_095, 10_007, 32_768)  # queries that are asked about beyond the first ones
_HOW = "make it of operations on tensors that broadcast, (b, h, q_position, kv_position) -> bool, without if, and, or"
PROBED = (128, 1_024)  # how many first queries, at least and at most


class _Unsaid:
    """Stands for the row and the head, which a model's mask may not depend on: any use of it is an error."""

    def __init__(self, what: str):
        self.what = what

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"it looks at its argument {self.what}: a model's mask is the same for all rows and heads, so let it go by positions alone"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls("b or h")._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _refuse
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = (
        _refuse
    )
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __getitem__ = __neg__ = __invert__ = __abs__ = __array__ = __hash__ = _refuse  # type: ignore[assignment]


_ROW, _HEAD = _Unsaid("b, the row"), _Unsaid("h, the head")


def sees(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """Which positions ``keys`` queries at ``queries`` see, by the mask alone: bool, of the broadcast shape. Both are int64 on one device."""
    shape = torch.broadcast_shapes(queries.shape, keys.shape)
    found = mask(_ROW, _HEAD, queries, keys)
    return torch.as_tensor(found, dtype=torch.bool, device=queries.device).expand(shape)


def check_sight(mask: Mask, seen: Any, queries: Any) -> None:
    """Raise ValueError where a query sees nothing: ``seen [T, S]`` and the positions ``queries [T]`` are NumPy arrays or tensors."""
    blind = ~seen.any(-1)
    if blind.any():
        raise ValueError(_blind(mask, int(queries[blind][0])))


def longest(mask: Mask, positions: int | None = None) -> int | None:
    """How many positions a mask speaks of, at most ``positions``; ``None``: of any number."""
    known = [part.slots for part in mask.parts() if part.slots]
    return min([*known, *([] if positions is None else [positions])], default=None)


def check_length(mask: Mask, length: int) -> None:
    """Raise ValueError for a text of ``length`` tokens, of the last of which a mask says nothing."""
    limit = longest(mask)
    if limit is not None and length > limit:
        raise ValueError(
            f"{mask!r} speaks of {limit} positions and a text has {length}: make it with positions={length} or more, or give a shorter text"
        )


def for_model(mask: Any, name: str = "mask", positions: int | None = None) -> Mask:
    """A mask that a model's queries can see by, from a mask or from a function ``(b, h, q_position, kv_position) -> bool``.

    It is asked about the first positions, and about a few far ones, below ``positions``. What is beyond its reach is hidden.

    Raises:
        TypeError: it is neither.
        ValueError: it goes by rows, heads or slots; sees a later position; sees nothing from some position; or sees further back
            than its ``reach`` says.
    """
    if isinstance(mask, int):
        raise TypeError(f"{name} is {mask!r}: give a mask, such as Causal() & Window({mask})")
    check_masks(mask)
    if not isinstance(mask, Mask):
        mask = Function(mask)
    for part in mask.parts():
        if isinstance(part, (Tree, OriginalText, InCache)):
            raise ValueError(
                f"{name} is {mask!r}, and {type(part).__name__} goes by the slots of certain rows: give a mask that goes by positions (a "
                "model knows where its own slots and tree nodes stand)"
            )
    limit = longest(mask, positions or max(FAR) + 2)
    assert limit is not None
    first = torch.arange(min(max(PROBED[0], 2 * mask.extent), PROBED[1], limit))
    try:
        _probe(mask, first, first)
        for far in FAR:
            if far + 1 < limit:
                _probe(mask, torch.tensor([far]), torch.arange(far + 2))
    except Exception as error:
        how = "" if isinstance(error, ValueError) else f" ({_HOW})"
        raise ValueError(f"{name} cannot be used: {error}{how}") from error
    if mask.reach is None or known(mask):
        return mask
    return mask & streaming(max(mask.reach.window, 1), mask.reach.sinks)


def _probe(mask: Mask, queries: Tensor, keys: Tensor) -> None:
    seen = sees(mask, queries[:, None], keys)
    later = seen & (keys > queries[:, None])
    if later.any():
        q, p = (int(t[0]) for t in later.nonzero(as_tuple=True))
        raise ValueError(
            f"{mask!r} lets position {int(queries[q])} see position {int(keys[p])}, which comes later: join it with Causal(), as in "
            "Causal() & (...)"
        )
    if not seen.any(1).all():
        raise ValueError(_blind(mask, int(queries[~seen.any(1)][0])))
    if mask.reach is not None:
        far = seen & ~_within(mask.reach, queries[:, None], keys)
        if far.any():
            q, p = (int(t[0]) for t in far.nonzero(as_tuple=True))
            raise ValueError(
                f"{mask!r} says that its reach is {mask.reach}, and lets position {int(queries[q])} see position {int(keys[p])}: give it the "
                "reach of all that it sees, or None"
            )


def _within(reach: Reach, queries: Tensor, keys: Tensor) -> Tensor:
    return (keys < reach.sinks) | (keys > queries - reach.window)


def _blind(mask: Mask, query: int) -> str:
    return (
        f"{mask!r} lets position {query} see nothing: join it with what every position sees, such as Window(1), itself: "
        "Causal() & (... | Window(1))"
    )
