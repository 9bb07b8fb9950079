"""The steps of a chain after its first, on the CPU. Slots and positions are prepared once for all of them.

``HFModel.score`` works out at every token what to feed and where. In a chain of single tokens this is known after the first draw, and
a small model's step takes hardly longer than working it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache
from specdec.cache.paged import PagedCache
from specdec.cache.token_index import Row
from specdec.forward.llama_c import LlamaC
from specdec.forward.packed import Packed
from specdec.kernels.native.step import Steps
from specdec.models.hf import HFModel
from specdec.models.stacked import StackedModel


class CpuChain:
    """Forwards of node ``n - 1`` of every row that has one, for n = 1, 2, ... in this order; made by ``cpu_chain``.

    Args:
        leans, member: models, and the number ``[B]`` of the one that reads each row.
        length, budget: ``[B]`` committed tokens, all of which ``cache`` holds, and tokens to be drawn.
    """

    def __init__(
        self,
        leans: Sequence[LlamaC],
        member: Sequence[int],
        cache: Any,
        length: Sequence[int],
        budget: Sequence[int],
    ):
        self.leans, self.member = leans, member
        self.cache, self.length, self.budget = cache, length, budget
        self.batch = len(length)
        self.table: dict[int, list[int]] | None = None
        if isinstance(cache, PagedCache):
            self.table = cache.hold(
                [Row(b, n, n, n + k - 1) for b, (n, k) in enumerate(zip(length, budget)) if k > 1]
            )
        self.steps: list[tuple[Steps, int]] = []  # for each step, its ``Steps`` and its number there
        for k in sorted({k for k in budget if k > 1}):  # the shortest chains end first
            first, count = len(self.steps) + 1, k - 1 - len(self.steps)
            made = self._made([b for b, longest in enumerate(budget) if longest >= k], first, count)
            self.steps += [(made, n) for n in range(count)]

    def _made(self, rows: list[int], first: int, count: int) -> Steps:
        """Step ``first`` and the ``count - 1`` after it, of the same ``rows``."""
        of: dict[int, list[int]] = {}
        for b in rows:
            of.setdefault(self.member[b], []).append(b)
        readers = []
        for member, mine in of.items():
            at = [self.length[b] + first - 1 for b in mine]
            where = [(b, s + n) for n in range(count) for b, s in zip(mine, at)]
            page, pages = 0, None
            if self.table is None:
                flat = [b * self.cache.slots + s for b, s in where]
            else:
                page, pages = self.cache.page, [self.table[b] for b in mine]
                flat = [self.table[b][s // page] * page + s % page for b, s in where]
            positions, slots = torch.tensor([[s for _, s in where], flat]).unbind(0)
            every = len(mine) == self.batch
            lean, held = self.leans[member], self.cache.buffers
            readers.append(lean.chain(mine, at, count, positions, slots, held, every, pages, page))
        return Steps(readers, self.batch, self.batch, count)

    def __call__(self, n: int, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` after ``tokens [B]``, node ``n - 1`` of each row; zeros for rows without one."""
        steps, number = self.steps[n - 1]
        return steps(number, tokens)

    def remember(self) -> None:
        """Note what was fed; called after the last step."""
        for b, (n, k) in enumerate(zip(self.length, self.budget)):
            if k > 1:
                self.cache.remember(b, self.cache._tokens[b], n, n, k - 1)


def cpu_chain(model: Any, cache: Any, length: Tensor, budget: Tensor) -> CpuChain | None:
    """The steps after the first of chains of ``budget [B]`` tokens, or ``None`` where each token has to be scored.

    Args:
        cache: has just been fed all ``length [B]`` committed tokens of each row that has a budget.
    """
    if not isinstance(model, HFModel) or model.fast_chain != "slots":  # others are scored
        return None
    if model.steps is not None or int(budget.max()) < 2:
        return None
    path: Any = model._path
    member = [0] * len(length)
    if isinstance(model, StackedModel):
        leans, member = path.natives or [None], path.member
    else:
        leans = [path.lean if isinstance(path, Packed) else None]
    if not all(isinstance(lean, LlamaC) and lean.at_once(len(length)) for lean in leans):
        return None
    if type(cache) not in (SlotCache, PagedCache) or cache.buffers is None:
        return None  # in a ring, slots are not positions
    if isinstance(cache, PagedCache) and cache.page % 16:
        return None
    if int((length + budget).max()) - 1 > cache.capacity:
        return None  # ``score`` raises the error
    return CpuChain(leans, member, cache, length.tolist(), budget.tolist())
