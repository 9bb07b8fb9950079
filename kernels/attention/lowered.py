"""A plan in device memory for kernels: a few integers per row, copied to the device once per forward.

They determine what a query sees: slots below its row's ``root`` up to its own, and of the slots from ``root`` on those whose bit
is set in its word of ancestors (one word, so a tree has at most 64 nodes). Other plans are written out slot by slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach
from specdec.kernels.device import to_device

NODES = 64  # of a tree whose ancestors fit into one word


class RingSight(NamedTuple):
    """What the only query of each row sees in slots that are a ring: slot p holds position p below ``sinks``, the others hold the latest positions.

    Attributes:
        position: ``[R]`` int64, of the query. size: slots of the ring, after ``sinks`` others.
        window: positions in the ring are seen less than this far behind the query. far: and the first ones less than this far.
    """

    position: Tensor
    sinks: int
    size: int
    window: int
    far: int


@dataclass(frozen=True)
class Lowered:
    """A plan as kernels read it: int32 tensors on one device, unless noted otherwise.

    Attributes:
        starts: ``[R + 1]`` first packed query of each row, cumulative counts.
        length: ``[R]`` slots in use, the new ones included.
        rows: ``[R]`` buffer row.
        root: ``[R]`` slot of node 0; without a tree ``length``, so that no slot is a node.
        words: ``[T]`` int64, bit m is set if node m is the query itself or an ancestor; 0 for a query below the root. ``None``
            without a tree, or with ``seen``.
        depth: ``[R, N]`` of each node; ``None`` where ``words`` is.
        table: ``[R, P]`` pages of each row, 0 beyond its last; ``None`` for slots.
        seen: ``[1 or Hq, T, S]`` uint8, which slots of its row each query sees, windows included, if that does not follow from the
            rest (slots in arbitrary order; trees of more than 64 nodes). ``S`` is ``max_length``.
        ring: the slots are a ring, and each row has one query: neither words nor ``seen`` are needed then.
        max_count, max_length: upper bounds of a row's queries and slots, on the host. Loose bounds let one captured launch serve
            many steps.
    """

    starts: Tensor
    length: Tensor
    rows: Tensor
    root: Tensor
    words: Tensor | None
    depth: Tensor | None
    table: Tensor | None
    seen: Tensor | None
    max_count: int
    max_length: int
    ring: RingSight | None = None


def lower(plan: AttentionPlan, device: torch.device | str, window: Reach = None) -> Lowered:
    """``plan`` on ``device``, cached in ``plan.known``; only ``seen`` depends on ``window``."""
    device = torch.device(device)
    known = plan.known.get(("lowered", device))
    if known is None:
        known = plan.known["lowered", device] = _numbers(plan, device)
    if not written_out(plan):
        return known
    layer = plan.layer  # only the latest layer's mask is cached
    key = ("lowered", device, window)
    if key not in plan.known or plan.known[key][0] != layer:
        plan.known[key] = layer, replace(known, seen=_seen(plan, window, device))
    return plan.known[key][1]


def written_out(plan: AttentionPlan) -> bool:
    """Whether visibility must be written out slot by slot."""
    return not plan.ordered or _nodes(plan) > NODES


def _nodes(plan: AttentionPlan) -> int:
    """Nodes of the largest tree; entries beyond these are never read."""
    if plan.tree is None:
        return 0
    used = max(n - int(root) for n, root in zip(plan.length, plan.tree.root))
    return max(0, min(used, plan.tree.depth.shape[1]))


def _numbers(plan: AttentionPlan, device: torch.device) -> Lowered:
    counts, length = np.asarray(plan.counts), np.asarray(plan.length)
    parts: dict[str, np.ndarray] = {}
    if plan.tree is not None and not written_out(plan):
        nodes = max(1, _nodes(plan))
        parts["words"] = _words(plan, nodes)
        parts["depth"] = np.asarray(plan.tree.depth)[:, :nodes]
    parts["starts"] = np.concatenate([[0], np.cumsum(counts)])
    parts["length"] = length
    parts["rows"] = np.asarray(plan.rows)
    parts["root"] = length if plan.tree is None else np.asarray(plan.tree.root)
    if plan.table is not None:
        parts["table"] = np.zeros((len(plan.table), max(map(len, plan.table))), dtype=np.int32)
        for row, pages in zip(parts["table"], plan.table):
            row[: len(pages)] = pages
    made: dict[str, Any] = {"words": None, "depth": None, "table": None}
    made.update(_copy(parts, device))
    return Lowered(**made, seen=None, max_count=int(counts.max()), max_length=int(length.max()))


def _words(plan: AttentionPlan, nodes: int) -> np.ndarray:
    """``[T]`` int64."""
    assert plan.tree is not None
    bits = np.zeros((*plan.tree.ancestors.shape[:2], NODES), dtype=bool)
    bits[:, :, :nodes] = plan.tree.ancestors[:, :, :nodes]
    words = np.packbits(bits, axis=-1, bitorder="little").view("<i8")[..., 0]  # [R, N]
    row = np.repeat(np.arange(len(plan.rows)), plan.counts)
    slot = np.concatenate([np.arange(f, f + n) for f, n in zip(plan.first, plan.counts)])
    node = slot - np.asarray(plan.tree.root)[row]
    return np.where(node < 0, 0, words[row, node.clip(0, words.shape[1] - 1)])


def _copy(parts: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """All arrays in one copy; each begins at a multiple of 16 bytes, for which kernels are specialised."""
    ints = {
        name: np.ascontiguousarray(part, dtype=np.int64 if name == "words" else np.int32)
        for name, part in parts.items()
    }
    ends = np.cumsum([-(-part.nbytes // 16) * 4 for part in ints.values()])
    packed = np.zeros(int(ends[-1]), dtype=np.int32)
    begins = [0, *ends[:-1].tolist()]
    for begin, part in zip(begins, ints.values()):
        flat = part.reshape(-1).view(np.int32)
        packed[begin : begin + len(flat)] = flat
    there = to_device(torch.from_numpy(packed), device)
    made = {}
    for begin, (name, part) in zip(begins, ints.items()):
        own = there[begin : begin + part.nbytes // 4]
        made[name] = (own.view(torch.int64) if name == "words" else own).view(part.shape)
    return made


def _seen(plan: AttentionPlan, window: Reach, device: torch.device) -> Tensor:
    """``[1 or Hq, T, S]`` uint8."""
    wide = max(plan.length)
    parts = []
    for s in plan.runs():
        seen = torch.as_tensor(plan.visible(s, window)).to(torch.uint8)  # [R, q, n] or [R, Hq, q, n]
        seen = seen[:, None] if seen.dim() == 3 else seen
        seen = seen.transpose(0, 1).reshape(seen.shape[1], -1, seen.shape[-1])
        parts.append(torch.nn.functional.pad(seen, (0, wide - seen.shape[-1])))
    return to_device(parts[0] if len(parts) == 1 else torch.cat(parts, 1), device).contiguous()
