"""The forward of llama-like models on a GPU in half precision, with one launch for the operators between two products (``kernels.pointwise``).

Besides attention, a block has seven products, two norms that include the residual before them, one launch that rotates queries and keys
and stores keys and values, and SwiGLU: 11 launches, or 8 where products of the same input are one (``forward.merged``). Transformers'
modules launch every operator by itself, and a captured step of a small batch waits for each launch.

The results equal the modules' up to rounding: values that the modules round after every operator are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.forward.block import Angles, Block, Eager
from specdec.forward.families import positions_of
from specdec.forward.llama_eager import LlamaEager
from specdec.forward.merged import Merged, room_for
from specdec.forward.rotary_table import RotaryTable
from specdec.kernels import pointwise
from specdec.kernels.attention import AttentionPlan
from specdec.kernels.pointwise import Place


class Launches(Eager):
    """``kernels.pointwise`` between PyTorch's products, for tensors ``[T, ...]``; ``merged``: products that are one."""

    stores = True

    def __init__(self, merged: Merged | None = None):
        self.merged = merged

    @staticmethod
    def of(blocks: Sequence[Block], merged: bool | None = None) -> Launches:
        """For ``blocks``. ``merged``: whether products of the same input are one, on copies of their weights; ``None``: where the copies are small."""
        copies = Merged([group for b in blocks for group in ((b.query, b.key, b.value), (b.gate, b.up))])
        wanted = room_for(copies, blocks[0].out.weight.device) if merged is None else merged
        return Launches(copies) if wanted else LAUNCHES

    def refreshed(self) -> Launches:
        """These, with copies that equal their weights; without copies where there is no memory for them."""
        if self.merged is not None:
            try:
                self.merged.refresh()
            except torch.OutOfMemoryError:
                return LAUNCHES
        return self

    def products(self, x: Tensor, *projections: Any) -> list[Tensor]:
        together = None if self.merged is None else self.merged.products(x, projections)
        return super().products(x, *projections) if together is None else together

    def add_norm(self, x: Tensor, more: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        if more is None:
            return x, pointwise.add_norm(x, None, norm.weight, norm.variance_epsilon)
        return more, pointwise.add_norm(more, x, norm.weight, norm.variance_epsilon)

    def rotate(
        self, b: Block, query: Tensor, key: Tensor, value: Tensor, angles: Angles, place: Place | None
    ) -> tuple[Tensor, Tensor]:
        norms = None
        if b.query_norm is not None:
            norms = (b.query_norm.weight, b.key_norm.weight, b.query_norm.variance_epsilon)
        pointwise.apply_rotary(query, key, *angles, norms=norms, value=value, place=place)
        return query, key

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return pointwise.silu_mul(gate, up)


LAUNCHES = Launches()


class LlamaTriton(LlamaEager):
    """As ``LlamaEager``, for models on a GPU in float16 or bfloat16, with Triton and without gradients."""

    ops: Launches

    def __init__(self, model: Any, backend: str = "auto", merged: bool | None = None):
        """``merged``: as for ``Launches.of``."""
        super().__init__(model, backend)
        self.ops = Launches.of(self.blocks, merged)
        self.table = RotaryTable(self.body, positions_of(model.config))

    def check(self) -> None:
        """As ``Runner.check``: copies follow their weights. The table of cosines is made before a step is captured."""
        self.table.hold(self.head.weight)
        self.ops = self.ops.refreshed()

    @staticmethod
    def suits(model: Any, dtype: torch.dtype | None = None) -> bool:
        """Whether this path supports the model."""
        found = {(p.device, p.dtype) for p in model.parameters()}
        if len(found) != 1:
            return False
        device, dtype = found.pop()
        if dtype is torch.float32 or pointwise.why_not(device, dtype) or not LlamaEager.suits(model, dtype):
            return False
        return model.config.hidden_size <= pointwise.MOST and all(
            block.self_attn.head_dim in range(2, 513, 2) for block in model.model.layers
        )

    @property
    def usable(self) -> bool:
        return super().usable and not torch.is_grad_enabled()

    def angles(self, x: Tensor, positions: Tensor, plan: AttentionPlan) -> Angles:
        """As ``LlamaEager.angles``. Where slots are positions, a plan's longest row tells the host whether the table has them all; in a captured
        ring it must have all that the model has."""
        rows = self.table.rows
        if rows is not None and plan.ordered and max(plan.length) <= rows.shape[1]:
            cos, sin = rows.index_select(1, positions).unbind(0)
        elif rows is not None and plan.bounded and self.table.limit <= rows.shape[1]:
            cos, sin = rows.index_select(1, positions.clamp(max=rows.shape[1] - 1)).unbind(0)
        else:
            cos, sin = (t[0].contiguous() for t in self.body.rotary_emb(x, positions[None]))
        return cos, sin
