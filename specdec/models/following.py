"""The steps of a chain after its first, on the CPU: what can be known beforehand is made once for all of them.

``HFModel.score`` finds out at every token what to feed and where it goes. In a chain of single tokens that is known when the first is
drawn, and a small model's step is not much longer than finding out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.attention import AttentionPlan
from specdec.kernels.attention.native import PlanStruct, lowered
from specdec.kernels.native.ops import unchecked_linear
from specdec.models.feed import Row
from specdec.models.hf import HFModel
from specdec.models.native import Native
from specdec.models.paged import PagedCache
from specdec.models.stacked import StackedModel


class _Part(NamedTuple):
    """Rows of one step that one model reads: ``at [R]``, or ``None`` for all."""

    lean: Native
    at: Tensor | None
    cos: Tensor
    sin: Tensor
    slots: Tensor
    plans: list[PlanStruct]
    alive: AttentionPlan  # ``plans`` are addresses in what it remembers


class Following:
    """Forwards of node ``n - 1`` of every row that has one, for n = 1, 2, ..., one after the other; ``following`` makes it.

    Args:
        leans, member: models, and which of them reads each row ``[B]``.
        length, budget: ``[B]``: committed tokens, all of which ``cache`` holds, and tokens to be drawn.
    """

    def __init__(
        self,
        leans: Sequence[Native],
        member: Sequence[int],
        cache: Any,
        length: Sequence[int],
        budget: Sequence[int],
    ):
        self.leans, self.member = leans, member
        self.cache, self.length, self.budget = cache, length, budget
        self.batch = len(length)
        table = None
        if isinstance(cache, PagedCache):
            table = cache.hold(
                [Row(b, n, n, n + k - 1) for b, (n, k) in enumerate(zip(length, budget)) if k > 1]
            )
        self.buffers = cache.buffers
        self.steps = [self._parts(table, n) for n in range(1, max(budget))]

    def _parts(self, table: dict[int, list[int]] | None, n: int) -> list[_Part]:
        page = getattr(self.cache, "page", 0)
        of: dict[int, list[int]] = {}
        for b, k in enumerate(self.budget):
            if k > n:
                of.setdefault(self.member[b], []).append(b)
        parts = []
        for member, rows in of.items():
            lean = self.leans[member]
            at = [self.length[b] + n - 1 for b in rows]
            if table is None:
                flat = [b * self.cache.slots + s for b, s in zip(rows, at)]
                held = None
            else:
                flat = [table[b][s // page] * page + s % page for b, s in zip(rows, at)]
                held = [table[b] for b in rows]
            positions, slots = torch.tensor([at, flat]).unbind(0)
            plan = AttentionPlan(
                rows,
                at,
                [1] * len(rows),
                self.cache.capacity,
                slots=slots,
                table=held,
                page=page if held else 0,
            )
            plans = [lowered(plan, b.window) for b in lean.blocks]
            which = None if len(rows) == self.batch else torch.tensor(rows)
            cos, sin = lean.rotary(lean.head.weight, positions)
            parts.append(_Part(lean, which, cos, sin, slots, plans, plan))
        return parts

    def __call__(self, n: int, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` after ``tokens [B]``, node ``n - 1`` of each row; zeros for rows without one."""
        logits: Tensor | None = None
        with torch.inference_mode():
            for lean, at, cos, sin, slots, plans, _ in self.steps[n - 1]:
                x = F.embedding(tokens if at is None else tokens[at], lean.body.embed_tokens.weight)
                assert lean._whole is not None
                lean._whole(x, cos, sin, slots, self.buffers, plans)
                made = lean._logits(x, None, unchecked_linear)
                assert made is not None
                if at is None:
                    return made
                if logits is None:
                    logits = made.new_zeros(self.batch, made.shape[1])
                logits[at] = made
        assert logits is not None
        return logits

    def remember(self) -> None:
        """Note what was fed, when all steps are through."""
        for b, (n, k) in enumerate(zip(self.length, self.budget)):
            if k > 1:
                self.cache.remember(b, self.cache._tokens[b], n, n, k - 1)


def following(model: Any, cache: Any, length: Tensor, budget: Tensor) -> Following | None:
    """The steps after the first of a chain of ``budget [B]`` tokens each, or ``None`` where each has to be scored.

    Args:
        cache: has just been fed all ``length [B]`` committed tokens of each row that has a budget.
    """
    if type(model) not in (HFModel, StackedModel) or model.steps is not None or int(budget.max()) < 2:
        return None
    path: Any = model._path
    leans: list[Any] = [getattr(path, "lean", None)]
    member = [0] * len(length)
    if isinstance(model, StackedModel):
        leans, member = path.natives or [None], path.member
    if not all(isinstance(lean, Native) and lean.at_once(len(length)) for lean in leans):
        return None
    if getattr(cache, "buffers", None) is None or getattr(cache, "page", 0) % 16:
        return None
    if int((length + budget).max()) - 1 > cache.capacity:
        return None  # scoring says what is wrong
    return Following(leans, member, cache, length.tolist(), budget.tolist())
