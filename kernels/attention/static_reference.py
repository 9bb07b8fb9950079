"""Dense attention over ``[rows, slots]`` from the tensors of a ``Lowered`` alone: no shape and no branch depends on tensor values.

This is what a CUDA graph requires of a step, in plain PyTorch on any device. Captured steps use it where Triton's kernels do not run,
mostly in tests: every row is computed over ``max_length`` slots, whatever its length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.attention.lowered import Lowered
from specdec.kernels.attention.reach import Reach, near


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lowered: Lowered,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Arguments as for ``api.attention``, with the plan in tensors.

    ``query`` may have more tokens than the rows use, and ``lowered`` rows without a query (equal ``starts``). Slots that no query of a
    row sees may hold anything.

    Returns:
        ``[1, T, Hq, Dv]``; 0 for tokens of no row.
    Raises:
        ValueError: ``lowered.seen`` has a mask for each head.
    """
    if lowered.seen is not None and lowered.seen.shape[0] != 1:
        raise ValueError(f"lowered.seen has {lowered.seen.shape[0]} heads: give one mask for all of them")
    wide = torch.promote_types(query.dtype, torch.float32)
    heads, T = query.shape[1:3]
    group, C, S = heads // keys.shape[2], lowered.max_count, lowered.max_length
    starts, ends = lowered.starts[:-1].long(), lowered.starts[1:].long()
    packed = starts[:, None] + torch.arange(C, device=query.device)  # [R, C] the row's queries, then others
    live = packed < ends[:, None]
    at = packed.clamp(max=T - 1)
    seen = visible(lowered, at, window)  # [R, C, S]
    used = (seen & live[:, :, None]).any(1)[:, :, None, None]  # a weight of 0 times NaN would be NaN
    k, v = (
        _slots(t, lowered, S).to(wide).masked_fill(~used, 0).repeat_interleave(group, 2)
        for t in (keys, values)
    )
    q = query[0].transpose(0, 1)[at].to(wide)  # [R, C, Hq, D]
    scores = torch.einsum("rchd,rshd->rhcs", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    extra = query.new_full((heads,), float("-inf")) if sink_logits is None else sink_logits
    scores = torch.cat([scores, extra.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    blind = scores.amax(-1, keepdim=True) == float("-inf")
    weights = scores.softmax(-1).masked_fill(blind, 0)[..., :S]
    out = torch.einsum("rhcs,rshd->rchd", weights, v).to(query.dtype)
    into = query.new_zeros(T + 1, heads, values.shape[-1])  # the last entry takes results of no query
    return into.index_copy_(0, torch.where(live, packed, T).flatten(), out.flatten(0, 1))[None, :T]


def visible(lowered: Lowered, at: Tensor, window: Reach = None) -> Tensor:
    """``[R, C, S]`` bool: which slots the queries ``at [R, C]`` (packed) see, each as a query of its row."""
    if lowered.seen is not None:  # windows are included
        return lowered.seen[0][at] != 0
    if lowered.ring is not None:
        ring, q = lowered.ring, lowered.ring.position[:, None]
        s = torch.arange(lowered.max_length, device=q.device)
        behind = (q - s) % ring.size
        late = (behind < ring.window) & (q - behind >= ring.sinks)
        return torch.where(s < ring.sinks, (s <= q) & (q - s < ring.far), late)[:, None].expand(*at.shape, -1)
    slot = (lowered.length - lowered.starts[1:]).long()[:, None] + at  # [R, C] of each query
    key = torch.arange(lowered.max_length, device=at.device)
    seen = key <= slot[:, :, None]
    place, position = key.expand(slot.shape[0], -1), slot  # [R, S] of each slot, and [R, C] of each query
    if lowered.words is not None and lowered.depth is not None:
        root = lowered.root.long()[:, None]
        node, last = key - root, lowered.depth.shape[1] - 1  # [R, S]
        bit = (lowered.words[at][:, :, None] >> node.clamp(0, 63)[:, None]) & 1
        seen = torch.where((node >= 0)[:, None], (bit != 0) & (node < 64)[:, None], seen)
        depth = lowered.depth.long()
        place = torch.where(node >= 0, root + depth.gather(1, node.clamp(0, last)), place)
        mine = slot - root
        position = torch.where(mine >= 0, root + depth.gather(1, mine.clamp(0, last)), slot)
    if window is not None:
        seen = seen & near(position[:, :, None], place[:, None], window)
    return seen


def _slots(buffer: Tensor, lowered: Lowered, count: int) -> Tensor:
    """``[R, count, H, D]``: the first slots of every row, from a buffer of slots or of pages."""
    if lowered.table is None:
        return buffer[:, :count].index_select(0, lowered.rows)
    slot = torch.arange(count, device=buffer.device)
    page = lowered.table.long()[:, slot // buffer.shape[1]]
    return buffer[page, slot % buffer.shape[1]]
