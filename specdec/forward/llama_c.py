"""The forward of Llama-like blocks on the CPU with everything but most products of prompts in C (``kernels.native``).

A step is one call for all blocks where its plan and its cache allow it, and one call an operator otherwise, with the same bits.
Given the same entries of the prompt, a token's logits are the same in a plain step and in a verification of up to ``most`` tokens. The
products of larger forwards are PyTorch's, unless ``invariant`` asks for batch-invariant operators throughout.

The results equal ``LlamaEager``'s up to rounding. In bfloat16 there are fewer roundings than in PyTorch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.forward.block import Angles, Block, Eager
from specdec.forward.contract import Caught, Keep
from specdec.forward.families import positions_of
from specdec.forward.llama_eager import LlamaEager
from specdec.forward.rotary_table import RotaryTable
from specdec.kernels.attention import AttentionPlan
from specdec.kernels.attention.native import always, lowered, prompt
from specdec.kernels.native import library
from specdec.kernels.native.blocks import CAST, Blocks
from specdec.kernels.native.build import say_missing
from specdec.kernels.native.narrow import CHANGED, Narrow
from specdec.kernels.native.ops import (
    MOST,
    add_norm,
    apply_rotary,
    half_units,
    linear_takes,
    silu_mul,
    threaded,
    tiles,
    unchecked_linear,
)
from specdec.kernels.native.step import Reader, step
from specdec.kernels.pointwise import Place

STEP = 256  # tokens of a forward up to which it is a step, and not a prompt
FEW = 6  # the same in bfloat16 where PyTorch has products made for the processor, which are faster from there on
ALONE = 16  # the same where C has one thread and PyTorch more
WIDE = 2048  # inputs of a product up to which C's is as fast


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
    """The most tokens of a forward for which C's products are faster."""
    if dtype == torch.bfloat16 and not tiles():
        few = FEW if half_units() else sys.maxsize
    else:
        few = STEP if dtype in (torch.float32, torch.bfloat16) else 0
    return few if threaded() or torch.get_num_threads() == 1 else min(few, ALONE)


class Native(Eager):
    """``kernels.native.ops``, for contiguous tensors ``[T, ...]`` on the CPU; without gradients.

    Args:
        own: whether products are C's, too, and not PyTorch's. narrow: bfloat16 copies of weights, which C's products read.
    """

    def __init__(self, own: bool, narrow: Narrow | None):
        self.own, self.narrow = own, narrow

    def add_norm(self, x: Tensor, more: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        if more is None:
            return x, add_norm(x, None, norm.weight, norm.variance_epsilon)
        return more, add_norm(more, x, norm.weight, norm.variance_epsilon)

    def products(self, x: Tensor, *projections: Any) -> list[Tensor]:
        if not self.own:
            return super().products(x, *projections)
        narrow = self.narrow
        weights = [p.weight if narrow is None else narrow[p.weight] for p in projections]
        return [unchecked_linear(x, w, p.bias) for w, p in zip(weights, projections)]

    def rotate(
        self, b: Block, query: Tensor, key: Tensor, value: Tensor, angles: Angles, place: Place | None
    ) -> tuple[Tensor, Tensor]:
        if b.query_norm is not None:
            query = add_norm(query, None, b.query_norm.weight, b.query_norm.variance_epsilon)
            key = add_norm(key, None, b.key_norm.weight, b.key_norm.variance_epsilon)
        for heads in (query, key):
            apply_rotary(heads.flatten(1), *angles, b.size)
        return query, key

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu_mul(gate, up)


class LlamaC(LlamaEager):
    """As ``LlamaEager``, for models on the CPU where there are C kernels."""

    def __init__(
        self, model: Any, backend: str = "auto", invariant: bool = False, bf16_weights: bool | None = False
    ):
        super().__init__(model, backend)
        self.table = RotaryTable(self.body, positions_of(model.config))
        self._always, self._automatic = invariant, bf16_weights is None
        products = [*(p for b in self.blocks for p in b.products), self.head]
        self._products = [(p.weight, p.bias) for p in products]
        self._shape = self.head.weight.shape
        make = Narrow.where_exact if self._automatic else Narrow
        self._use(None if bf16_weights is False else make(p.weight for p in products))
        self.invariant = invariant and self._takes
        if self.invariant:
            self.backend = "native"  # no other backend may be used

    def _use(self, narrow: Narrow | None) -> None:
        """Compute from now on with these copies of the weights, or with the weights themselves."""
        self.narrow = narrow
        plain = self.dtype == torch.bfloat16 and not half_units()  # PyTorch's products are slow at any width
        wide = self._always or narrow is not None or plain
        self._own = all(linear_takes(*p) and (wide or p[0].shape[1] <= WIDE) for p in self._products)
        self._takes = self._own and self.backend in ("auto", "native") and Blocks.takes(self.blocks)
        ordered = [b.layer for b in self.blocks] == list(range(len(self.blocks)))
        self._whole = Blocks(self.blocks, narrow) if self._takes and ordered else None

    def check(self) -> None:
        """As ``Runner.check``: copies follow their weights, and automatic ones are given up where bfloat16 would round."""
        if self.narrow is not None and not self.narrow.refresh():
            if not self._automatic:
                raise RuntimeError(CHANGED)
            self._use(None)

    @staticmethod
    def suits(model: Any, dtype: torch.dtype | None = None) -> bool:
        """Whether the model is one that this path computes: llama-like, in float32 or bfloat16, on a CPU with C kernels."""
        found = {(p.device.type, p.dtype) for p in model.parameters()}
        plain = found in ({("cpu", torch.float32)}, {("cpu", torch.bfloat16)})
        if not plain or not LlamaEager.suits(model, found.pop()[1]):
            return False
        if any(b.self_attn.head_dim > MOST or b.self_attn.head_dim % 2 for b in model.model.layers):
            return False
        say_missing()
        return library() is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.head.weight.dtype

    def forward(
        self,
        store: KVStore,
        plan: AttentionPlan,
        ids: Tensor,
        positions: Tensor,
        keep: Keep,
        caught: Caught = None,
    ) -> Tensor | None:
        """As ``LlamaEager.forward``."""
        T = len(ids)
        few = self._own and self._few >= T and ids.dtype == torch.long
        if self._always:
            always(plan)
        if few:
            reader = self.reader(store, plan, positions, keep, caught)
            if reader is not None:
                logits = step([reader], ids, T if reader.keep is None else len(reader.keep))
                for number, tap in (reader.taps or {}).items():
                    assert caught is not None
                    caught[number].append(tap)
                return None if keep is False else logits
        x = F.embedding(ids, self.body.embed_tokens.weight)
        if any(w.dtype is not x.dtype or not w.is_contiguous() for w, _ in self._products):
            raise RuntimeError(CAST)
        if keep is not False and self.head.weight.shape != self._shape:
            raise RuntimeError(CAST)
        ops = Native(few, self.narrow)
        return self.run(ops, x, self.table.at(positions, x), store, plan, keep, caught)

    @property
    def _few(self) -> int:
        """The most tokens of a forward for which products are C's."""
        if self._always:
            return sys.maxsize
        few = most(self.dtype)
        return sys.maxsize if few >= STEP and self.narrow is not None and tiles() else few

    @property
    def _laid(self) -> bool:
        """Whether the weights around the blocks are laid out as the kernels need."""
        around = (self.body.embed_tokens.weight, self.body.norm.weight)
        return all(w.is_contiguous() for w in around)

    def reader(
        self, store: KVStore, plan: AttentionPlan, positions: Tensor, keep: Keep, caught: Caught = None
    ) -> Reader | None:
        """A forward of few tokens for ``kernels.native.step``, or ``None`` where store or plan do not allow it."""
        held, whole = store.buffers, self._whole
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
        if prompt(plan, group) or not _inside(plan, store, self.dtype, len(positions)):
            return None
        assert plan.slots is not None
        plans = {w: lowered(plan, w) for w in {b.window for b in self.blocks}}
        head, norm, table = self.head, self.body.norm, self.body.embed_tokens.weight
        cos, sin = self.table.at(positions, head.weight)
        shape = len(positions), table.shape[1]
        last = norm.weight, norm.variance_epsilon, head.weight, head.bias
        return Reader(
            *(whole, table, *last, cos, sin, plan.slots, held, [plans[b.window] for b in self.blocks]),
            keep=None if keep is None else torch.empty(0, dtype=torch.long) if keep is False else keep,
            taps={number: torch.empty(shape, dtype=self.dtype) for number in caught or ()},
            narrow=None if self.narrow is None else self.narrow[head.weight],
        )


def _inside(plan: AttentionPlan, store: KVStore, dtype: torch.dtype, tokens: int) -> bool:
    """Whether ``store`` has the rows, slots and pages of a plan; where it does not, attention raises the error."""
    assert store.direct is not None
    keys = store.direct[0][0]
    rows, slots = keys.shape[:2]
    if keys.dtype != dtype or sum(plan.counts) != tokens:
        return False
    if plan.table is None:
        return max(plan.rows) < rows and max(plan.length) <= slots
    return plan.page == slots and slots % 16 == 0 and max(map(max, plan.table)) < rows
