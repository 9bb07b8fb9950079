"""The forward of Llama-like blocks on the CPU with everything but the products of prompts in C (``kernels.native``).

A step is one call for all blocks where its plan and its cache allow it, and one call an operator otherwise, with the same bits.
Over the same prompt's entries a token's logits are the same in a plain step and in a verification. Prompts are PyTorch's; with
``invariant`` everything is ours, and nothing depends on company.

Same numbers as ``lean.LlamaEager`` up to rounding. bfloat16 models are rounded less often than by PyTorch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.forward.families import positions_of
from specdec.forward.llama_eager import LlamaEager
from specdec.kernels.attention import AttentionPlan, attention
from specdec.kernels.attention.native import always, lowered, prompt, series
from specdec.kernels.native import library
from specdec.kernels.native.blocks import CAST, Blocks, Buffers
from specdec.kernels.native.narrow import Narrow
from specdec.kernels.native.ops import MOST, add_norm, linear_takes, silu_mul, tiles, turn
from specdec.kernels.native.ops import unchecked_linear as own
from specdec.kernels.native.step import Reader, Steps

STEP = 256  # tokens of a forward up to which it is a step, and not a prompt
FEW = 6  # the same in bfloat16 without matrix units, where PyTorch is faster from there on
TABLE = 8192  # positions whose cosines are computed beforehand, at least, where the model has as many
WIDE = 2048  # inputs of a product up to which ours is as fast
_FIXED = {"default", "linear", "llama3", "yarn"}  # rotary embeddings that depend on the position alone


def small(x: Tensor) -> bool:
    """Whether ``x [T, E]`` is few enough tokens, on the CPU and without gradients, for products in C."""
    return (
        x.dim() == 2
        and len(x) <= most(x.dtype)
        and x.is_cpu
        and x.is_contiguous()
        and not torch.is_grad_enabled()
    )


def most(dtype: torch.dtype) -> int:
    """Tokens of a step, at most, whose products C is faster at."""
    return {torch.float32: STEP, torch.bfloat16: STEP if tiles() else FEW}.get(dtype, 0)


class LlamaC(LlamaEager):
    """As ``LlamaEager``, for models on the CPU where there are C kernels."""

    def __init__(
        self, model: Any, backend: str = "auto", invariant: bool = False, bf16_weights: bool = False
    ):
        super().__init__(model, backend)
        rotary = self.body.rotary_emb
        self._fixed = getattr(rotary, "rope_type", None) in _FIXED
        self._table: tuple[Tensor, Tensor] | None = None
        self._positions = positions_of(model.config) or sys.maxsize
        self._always = invariant
        every_size = invariant or (bf16_weights and tiles())
        self._few = sys.maxsize if every_size else most(self.head.weight.dtype)
        self._projections = [
            [(p.weight, p.bias) for p in (b.query, b.key, b.value, b.out, b.gate, b.up, b.down)]
            for b in self.blocks
        ]
        every = [p for block in self._projections for p in block] + [(self.head.weight, self.head.bias)]
        self.narrow = Narrow(weight for weight, _ in every) if bf16_weights else None
        sizes = {linear_takes(*p) and (invariant or bf16_weights or p[0].shape[1] <= WIDE) for p in every}
        self._own = sizes == {True}
        self._shape = self.head.weight.shape
        self._weights = [p[0] for p in every]
        takes = self._own and backend in ("auto", "native") and Blocks.takes(self.blocks)
        ordered = [b.layer for b in self.blocks] == list(range(len(self.blocks)))
        self._whole = Blocks(self.blocks, self.narrow) if takes and ordered else None
        self.invariant = invariant and takes
        if self.invariant:
            self.backend = "native"  # nothing else may step in

    @staticmethod
    def suits(model: Any, dtype: torch.dtype | None = None) -> bool:
        """Whether the model is one that this path computes: llama-like, in float32 or bfloat16, on a CPU with C kernels."""
        found = {(p.device.type, p.dtype) for p in model.parameters()}
        plain = found in ({("cpu", torch.float32)}, {("cpu", torch.bfloat16)})
        if not plain or library() is None or not LlamaEager.suits(model, found.pop()[1]):
            return False
        return all(b.self_attn.head_dim <= MOST and b.self_attn.head_dim % 2 == 0 for b in model.model.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.head.weight.dtype

    def rotary(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[T, D]`` of ``positions [T]``."""
        if not self._fixed:
            cos, sin = self.body.rotary_emb(x, positions[None])
            return cos[0].float(), sin[0].float()
        table = self._table
        if table is None or (len(table[0]) < self._positions and len(table[0]) <= int(positions.max())):
            every = torch.arange(min(self._positions, max(2 * int(positions.max()) + 2, TABLE)))
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = self.body.rotary_emb(torch.empty(1, dtype=x.dtype), every[None])
                self._table = table = cos[0].float(), sin[0].float()
        try:
            return table[0].index_select(0, positions), table[1].index_select(0, positions)
        except IndexError:  # beyond what the model says that it can tell apart
            cos, sin = self.body.rotary_emb(x, positions[None])
            return cos[0].float(), sin[0].float()

    def forward(
        self,
        memo: Any,
        plan: AttentionPlan,
        ids: Tensor,
        positions: Tensor,
        keep: Any,
        caught: dict[int, list[Tensor]] | None = None,
    ) -> Tensor | None:
        """As ``LlamaEager.forward``."""
        T = len(ids)
        few = self._own and self._few >= T and ids.dtype == torch.long
        if self._always:
            always(plan)
        if few:
            reader = self.reader(memo, plan, positions, keep, caught)
            if reader is not None:
                logits = Steps([reader], T, T if reader.keep is None else len(reader.keep))(0, ids)
                for number, tap in (reader.taps or {}).items():
                    assert caught is not None
                    caught[number].append(tap)
                return None if keep is False else logits
        x = F.embedding(ids, self.body.embed_tokens.weight)
        linear: Any = own if few else F.linear
        assert plan.slots is not None
        if self.head.weight.dtype is not x.dtype or not self.head.weight.is_contiguous():
            raise RuntimeError(CAST)
        cos, sin = self.rotary(x, positions)
        if any(w.dtype is not x.dtype or not w.is_contiguous() for w in self._weights):
            raise RuntimeError(CAST)
        more: Tensor | None = None  # what the block before adds to x
        for number, (b, projections) in enumerate(zip(self.blocks, self._projections)):
            if few and self.narrow is not None:
                projections = [(self.narrow[w], bias) for w, bias in projections]
            query, key, value, out, gate, up, down = projections
            y = add_norm(x, more, b.before.weight, b.before.variance_epsilon)
            if caught and number in caught:
                caught[number].append(x.clone())
            q, k, v = linear(y, *query), linear(y, *key), linear(y, *value)
            if b.query_norm is not None:
                q = add_norm(q.view(-1, b.size), None, b.query_norm.weight, b.query_norm.variance_epsilon)
                k = add_norm(k.view(-1, b.size), None, b.key_norm.weight, b.key_norm.variance_epsilon)
                q, k = q.view(T, -1), k.view(T, -1)
            q, k, v = (
                t.view(1, T, -1, b.size).transpose(1, 2)
                for t in (turn(q, cos, sin, b.size), turn(k, cos, sin, b.size), v)
            )
            keys, values = memo.append(b.layer, plan.slots, k, v)
            seen = attention(q, keys, values, plan, scale=b.scale, window=b.window, backend=self.backend)
            y = add_norm(x, linear(seen.reshape(T, -1), *out), b.after.weight, b.after.variance_epsilon)
            more = linear(silu_mul(linear(y, *gate), linear(y, *up)), *down)
        if more is not None:
            x += more
        if caught and len(self.blocks) in caught:
            caught[len(self.blocks)].append(x)
        return self._logits(x, keep, linear)

    def _logits(self, x: Tensor, keep: Any, linear: Any) -> Tensor | None:
        if keep is False:
            return None
        if keep is not None:
            x = x[keep]
        norm = self.body.norm
        if self.head.weight.shape != self._shape:
            raise RuntimeError(CAST)
        y = add_norm(x, None, norm.weight, norm.variance_epsilon)
        head = self.head.weight
        return linear(
            y, head if linear is not own or self.narrow is None else self.narrow[head], self.head.bias
        )

    def at_once(self, tokens: int) -> bool:
        """Whether forwards of so many tokens can be one call each, whatever their positions."""
        whole = self._whole
        ready = whole is not None and whole.plain and self._laid and self.usable
        return ready and self._fixed and self._few >= tokens

    @property
    def _laid(self) -> bool:
        """Whether the weights around the blocks lie as the kernels take them."""
        around = (self.body.embed_tokens.weight, self.body.norm.weight)
        return all(w.is_contiguous() for w in around)

    def reader(
        self,
        memo: Any,
        plan: AttentionPlan,
        positions: Tensor,
        keep: Any,
        caught: dict[int, list[Tensor]] | None = None,
    ) -> Reader | None:
        """A forward of few tokens as ``kernels.native.step`` takes it, or ``None`` where memo or plan do not allow it."""
        held, whole = getattr(memo, "buffers", None), self._whole
        if held is None or whole is None or plan.watch is not None or plan.attend is not None:
            return None
        if not whole.plain or self._few < len(positions) or not self._laid:
            return None
        if keep is not None and keep is not False:
            if not isinstance(keep, Tensor) or keep.dtype != torch.long:
                return None
            keep = keep.contiguous()
        first = self.blocks[0]
        group = first.query.out_features // first.key.out_features
        if prompt(plan, group) or not _inside(plan, memo, self.dtype, len(positions)):
            return None
        assert plan.slots is not None
        plans = {w: lowered(plan, w) for w in {b.window for b in self.blocks}}
        wide = self.body.embed_tokens.weight.shape[1]
        return self._reader(
            *(positions, plan.slots, held, [plans[b.window] for b in self.blocks], plan),
            keep=None if keep is None else torch.empty(0, dtype=torch.long) if keep is False else keep,
            taps={number: torch.empty(len(positions), wide, dtype=self.dtype) for number in caught or ()},
        )

    def chain(
        self,
        rows: list[int],
        first: list[int],
        steps: int,
        positions: Tensor,
        slots: Tensor,
        held: Buffers,
        every: bool,
        table: list[list[int]] | None = None,
        page: int = 0,
    ) -> Reader:
        """``steps`` forwards of one token of each of ``rows``, the first at slots ``first``; ``at_once`` says whether it can be.

        Args:
            positions, slots: ``[steps * rows]``. every: whether ``rows`` are all of the batch. table, page: pages of each row.
        """
        made = {w: series(rows, first, steps, w, table, page) for w in {b.window for b in self.blocks}}
        mine = None if every else torch.tensor(rows)
        plans = [made[b.window][0] for b in self.blocks]
        return self._reader(positions, slots, held, plans, made, source=mine, rows=mine)

    def _reader(
        self, positions: Tensor, slots: Tensor, held: Buffers, plans: list[Any], alive: Any, **which: Any
    ) -> Reader:
        whole, head, norm, table = self._whole, self.head, self.body.norm, self.body.embed_tokens.weight
        assert whole is not None
        cos, sin = self.rotary(head.weight, positions)
        last = (norm.weight, norm.variance_epsilon, head.weight, head.bias)
        copy = None if self.narrow is None else self.narrow[head.weight]
        return Reader(whole, table, *last, cos, sin, slots, held, plans, alive, narrow=copy, **which)


def _inside(plan: AttentionPlan, memo: Any, dtype: torch.dtype, tokens: int) -> bool:
    """Whether a plan speaks of rows, slots and pages that ``memo`` has; where not, attention itself says what is wrong."""
    keys = memo.layers[0][0]
    rows, slots = keys.shape[:2]
    if keys.dtype != dtype or sum(plan.counts) != tokens:
        return False
    if plan.table is None:
        return max(plan.rows) < rows and max(plan.length) <= slots
    return plan.page == slots and slots % 16 == 0 and max(map(max, plan.table)) < rows
