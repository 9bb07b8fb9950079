"""What the queries of a model see under a mask, and which masks a model accepts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.masks.function import Function
from specdec.masks.mask import Mask, check_masks
from specdec.masks.positions import InCache, OriginalText
from specdec.masks.streaming import streaming
from specdec.masks.text import known
from specdec.masks.tree import Tree

FAR = (1_500, 4_095, 10_007, 32_768)  # queries that are checked beyond the first ones
_HOW = "make it of operations on tensors that broadcast, (b, h, q_position, kv_position) -> bool, without if, and, or"
PROBED = (128, 1_024)  # how many first queries are checked, at least and at most


class _Unsaid:
    """A placeholder for the row and the head, which a model's mask may not depend on: any use of it raises an error."""

    def __init__(self, what: str):
        self.what = what

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"it looks at its argument {self.what}: a model's mask must be the same for all rows and heads: make it a function of positions only"
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
    """Whether queries at positions ``queries`` see positions ``keys``: bool, of the broadcast shape. Both are int64 on one device."""
    shape = torch.broadcast_shapes(queries.shape, keys.shape)
    found = mask(_ROW, _HEAD, queries, keys)
    return torch.as_tensor(found, dtype=torch.bool, device=queries.device).expand(shape)


def check_sight(mask: Mask, seen: Any, queries: Any) -> None:
    """Raise ValueError where a query sees nothing: ``seen [T, S]`` and the positions ``queries [T]`` are NumPy arrays or tensors."""
    blind = ~seen.any(-1)
    if blind.any():
        raise ValueError(_blind(mask, int(queries[blind][0])))


def longest(mask: Mask, positions: int | None = None) -> int | None:
    """How many positions a mask is defined for, at most ``positions``; ``None``: any number."""
    known = [part.slots for part in mask.parts() if part.slots]
    return min([*known, *([] if positions is None else [positions])], default=None)


def check_length(mask: Mask, length: int) -> None:
    """Raise ValueError if a mask is not defined for all positions of a text of ``length`` tokens."""
    limit = longest(mask)
    if limit is not None and length > limit:
        raise ValueError(
            f"{mask!r} is defined for {limit} positions and a text has {length}: make it with positions={length} or more, or give a shorter text"
        )


def for_model(mask: Any, name: str = "mask", positions: int | None = None) -> Mask:
    """A mask that a model can use, from a mask or a function ``(b, h, q_position, kv_position) -> bool``.

    It is checked at the first positions and at a few far ones below ``positions``. Positions beyond its reach are hidden.

    Raises:
        TypeError: ``mask`` is neither.
        ValueError: it depends on rows, heads or slots; shows a later position; shows nothing to some position; or shows more
            than its ``reach``.
    """
    if isinstance(mask, int):
        raise TypeError(f"{name} is {mask!r}: give a mask, such as Causal() & Window({mask})")
    check_masks(mask)
    if not isinstance(mask, Mask):
        mask = Function(mask)
    for part in mask.parts():
        if isinstance(part, (Tree, OriginalText, InCache)):
            raise ValueError(
                f"{name} is {mask!r}, and {type(part).__name__} depends on the slots of particular rows: give a mask of positions (the "
                "model maps its own slots and tree nodes to positions)"
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
        far = seen & ~((keys < mask.reach.sinks) | (keys > queries[:, None] - mask.reach.window))
        if far.any():
            q, p = (int(t[0]) for t in far.nonzero(as_tuple=True))
            raise ValueError(
                f"{mask!r} declares the reach {mask.reach} and lets position {int(queries[q])} see position {int(keys[p])}: declare a "
                "reach that covers all positions it shows, or None"
            )


def _blind(mask: Mask, query: int) -> str:
    return (
        f"{mask!r} lets position {query} see nothing: join it with a mask that shows every position something, such as Window(1): "
        "Causal() & (... | Window(1))"
    )
