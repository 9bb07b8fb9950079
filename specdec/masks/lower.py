"""Lowers a mask to what an attention kernel takes: a boolean tensor, FlexAttention's ``BlockMask``, or intervals of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

MaskMod = Callable[[Any, Any, Any, Any], Any]


class Part(Protocol):
    """One of the masks that a mask is made of."""

    no_intervals: ClassVar[str]


@runtime_checkable
class HasParts(Protocol):
    """A mask that lists its parts, as ``Mask`` does; a plain function cannot."""

    def parts(self) -> Iterable[Part]: ...


def parts_of(mask: MaskMod) -> Iterable[Part]:
    """The mask itself and all masks that it is made of; nothing for a plain function."""
    return mask.parts() if isinstance(mask, HasParts) else ()


def dense(mask: MaskMod, q_positions: Tensor, kv_positions: Tensor, row: int = 0, head: int = 0) -> Tensor:
    """The mask as a boolean tensor. SDPA's ``attn_mask`` has a head dimension before the queries: pass ``[B, Q, K]`` as ``[:, None]``.

    Args:
        q_positions: ``[Q]`` for one row, or ``[B, Q]``. kv_positions: ``[K]``, or ``[B, K]``. Both are on the device of the
            mask's tensors, if it has any.
        row: the row to ask the mask about when neither argument has a dimension of rows. head: the head to ask about.
    Returns:
        ``[Q, K]``, or ``[B, Q, K]`` when either argument has rows.
    """
    q, kv = q_positions[..., :, None], kv_positions[..., None, :]
    shape = torch.broadcast_shapes(q.shape, kv.shape)
    b: Any = torch.tensor(row, device=q.device)
    if len(shape) == 3:
        b = torch.arange(shape[0], device=q.device)[:, None, None]
    seen = mask(b, torch.tensor(head, device=q.device), q, kv)
    return torch.as_tensor(seen, dtype=torch.bool, device=q.device).expand(shape)


def home(mask: MaskMod) -> torch.device:
    """The device of a mask's tensors; the CPU when it has none."""
    for part in parts_of(mask):
        for value in vars(part).values():
            if isinstance(value, Tensor):
                return value.device
    return torch.device("cpu")


def block_mask(
    mask: MaskMod,
    queries: int,
    keys: int,
    *,
    first: int = 0,
    rows: int | None = None,
    heads: int | None = None,
    device: Any = "cpu",
    block: int | tuple[int, int] = 128,
) -> BlockMask:
    """A ``BlockMask`` for ``flex_attention``: query i is at position (or slot) ``first + i``, key j at j.

    Args:
        rows, heads: how many the mask distinguishes; ``None`` if it treats all alike.
        block: positions per block, one number for queries and keys or one for each.
    Raises:
        ValueError: no queries or no keys.
    """
    if queries < 1 or keys < 1:
        raise ValueError(f"block_mask of {queries} queries and {keys} keys: both must be at least 1")
    return create_block_mask(_moved(mask, first), rows, heads, queries, keys, device=device, BLOCK_SIZE=block)


def _moved(mask: MaskMod, first: int) -> Callable[[Any, Any, Any, Any], Any]:
    # FlexAttention recognises a mask by its four arguments.
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return mask(b, h, q + first, kv)

    return mask_mod


def intervals(
    mask: MaskMod, q_position: int, slots: int | None = None, *, row: int = 0, head: int = 0, limit: int = 4
) -> list[tuple[int, int]]:
    """The slots that one query sees, as half-open intervals ``[start, end)``, ascending, with gaps between them.

    Sinks and a window give two. ``kernels.attention.ExplicitPlan.of_intervals`` makes a plan from the intervals of all queries.

    Args:
        slots: number of slots to consider; by default up to the query's own, which is all that a causal query can see.
        limit: the largest number of intervals allowed.
    Raises:
        ValueError: a tree, or more intervals than the limit.
    """
    for part in parts_of(mask):
        if part.no_intervals:
            raise ValueError(f"{mask!r} has no intervals: {part.no_intervals}")
    if q_position < 0:
        raise ValueError(f"q_position is {q_position}: positions are counted from 0")
    length = q_position + 1 if slots is None else slots
    device = home(mask)
    query, keys = torch.tensor([q_position], device=device), torch.arange(length, device=device)
    seen = dense(mask, query, keys, row, head)[0].to("cpu", torch.int8)
    edge = torch.nn.functional.pad(seen, (1, 1)).diff()
    found = list(zip((edge == 1).nonzero()[:, 0].tolist(), (edge == -1).nonzero()[:, 0].tolist()))
    if len(found) > limit:
        raise ValueError(
            f"{mask!r} gives the query at {q_position} {len(found)} intervals and the limit is {limit}: use dense or "
            "block_mask, or raise the limit"
        )
    return found
