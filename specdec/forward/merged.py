"""Products of the same input as one: copies of their weights, one below the other, for steps of which every launch takes time.

A block of llama multiplies its input by the weights of queries, keys and values, and later by those of gate and up. Together these are two
products instead of five.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHARE = 8  # copies may take this part of a device's memory: one in eight


class Merged:
    """Copies of the weights of ``groups`` of projections (modules with ``weight`` and ``bias``), each group of one input."""

    def __init__(self, groups: Sequence[tuple[Any, ...]]):
        self._groups = groups
        # By projection: the weights, biases and sizes from it to the end of its group.
        self._copies: dict[int, tuple[Tensor, Tensor | None, list[int]]] = {}

    @property
    def bytes(self) -> int:
        """Memory of the copies."""
        return sum(p.weight.nbytes for group in self._groups for p in group)

    def refresh(self) -> None:
        """Make the copies, or bring them up to date with their weights, at the same addresses."""
        with torch.inference_mode(False), torch.no_grad():
            for group in self._groups:
                if any((p.bias is None) != (group[0].bias is None) for p in group):
                    continue
                if id(group[0]) not in self._copies:
                    self._make(group)
                wide, bias, _ = self._copies[id(group[0])]
                torch.cat([p.weight for p in group], out=wide)
                if bias is not None:
                    torch.cat([p.bias for p in group], out=bias)

    def _make(self, group: tuple[Any, ...]) -> None:
        sizes, first = [p.weight.shape[0] for p in group], 0
        wide = group[0].weight.new_empty(sum(sizes), group[0].weight.shape[1])
        bias = None if group[0].bias is None else group[0].bias.new_empty(sum(sizes))
        for i, p in enumerate(group):
            self._copies[id(p)] = wide[first:], None if bias is None else bias[first:], sizes[i:]
            first += sizes[i]

    def products(self, x: Tensor, projections: Sequence[Any]) -> list[Tensor] | None:
        """``x [T, E]`` times the weights of each of a group, or of the last of a group, as views of one result; ``None`` for other projections, or
        before ``refresh``."""
        made = self._copies.get(id(projections[0]))
        if made is None or len(projections) != len(made[2]):
            return None
        return list(F.linear(x, made[0], made[1]).split(made[2], -1))


def room_for(merged: Merged, device: torch.device) -> bool:
    """Whether the copies are small beside the device's memory; on a CPU they bring nothing."""
    if device.type != "cuda":
        return False
    return small(merged.bytes, torch.cuda.get_device_properties(device).total_memory)


def small(bytes: int, memory: int) -> bool:
    """Whether copies of so many bytes are made on a device with so much memory."""
    return SHARE * bytes <= memory
