"""Attention problems for the GPU suite: random tensors and a plan, their bytes and FLOPs, and the float64 result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.gpu.stage import Stage
from specdec import tree
from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.graphs.ring_plan import FAR
from specdec.kernels.attention import (
    AttentionPlan,
    ExplicitPlan,
    Tree,
    attention,
    native,
    reference,
    triton_backend,
)
from specdec.kernels.attention.lowered import Lowered, RingSight, lower
from specdec.kernels.attention.reach import Reach, reach
from specdec.lab.errors import worst

PARENTS = (-1, 0, 0, 1, 1, 2, 5)  # of a tree's nodes; the last committed token is fed before them
LARGE = (-1, 0, *(i // 2 for i in range(2, 70)))  # more nodes than bits in a word


@dataclass
class Heads:
    """Query heads, KV heads and their size."""

    query: int
    kv: int
    size: int


LLAMA_8B = Heads(32, 8, 128)
TOY = Heads(4, 2, 32)
TINY = Heads(2, 1, 16)


@dataclass
class Problem:
    """A call of ``kernels.attention`` and its sizes.

    Attributes:
        seen: slots that any query of their row sees, summed over rows. pairs: visible (query, slot) pairs. kv: attention is given keys and
            values in this dtype, in which they are exact; ``None``: as they are. sight: what the Triton kernel is to compute from positions,
            as a captured chain does, in place of the plan's mask.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    plan: AttentionPlan
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    initial: int = 0
    seen: int = 0
    pairs: int = 0
    kv: torch.dtype | None = None
    sight: RingSight | None = None

    def __post_init__(self) -> None:
        for s in self.plan.runs(alone=True):
            visible = np.asarray(self.plan.visible(s, self.reach)[0])
            self.seen += int(visible.reshape(-1, visible.shape[-1]).any(0).sum())
            self.pairs += int(visible.sum())

    @property
    def reach(self) -> Reach:
        """The window and the first positions beside it."""
        return reach(self.window, self.initial)

    @cached_property
    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values as attention is given them, converted once: runs that are timed only read them."""
        dtype = self.kv or self.keys.dtype
        return self.keys.to(dtype), self.values.to(dtype)

    def copy(self) -> Problem:
        """The same call, whose tensors may be replaced; the plan is shared."""
        made = object.__new__(Problem)
        vars(made).update({name: value for name, value in vars(self).items() if name != "held"})
        return made

    @property
    def bytes(self) -> int:
        """Bytes of the visible slots' keys and values, queries and outputs, each counted once, in its own dtype."""
        _, heads, tokens, size = self.query.shape
        both = size + self.values.shape[-1]
        slots = self.seen * self.keys.shape[2] * both * (self.kv or self.keys.dtype).itemsize
        return slots + tokens * heads * both * self.query.element_size()

    @property
    def flops(self) -> int:
        return 2 * self.pairs * self.query.shape[1] * (self.query.shape[-1] + self.values.shape[-1])

    @cached_property
    def _lowered(self) -> Lowered:
        return replace(lower(self.plan, self.query.device), seen=None, ring=self.sight)

    def run(self, backend: str) -> Tensor:
        if self.sight is not None and backend == "triton":
            return triton_backend.launch(self.query, *self.held, self._lowered, self.query.shape[-1] ** -0.5)
        return attention(
            self.query,
            *self.held,
            self.plan,
            window=self.window,
            softcap=self.softcap,
            sink_logits=self.sinks,
            initial=self.initial,
            backend=backend,
        )

    def settings(self) -> tuple[Any, ...]:
        """Arguments of ``choice.why_not`` after the backend's name."""
        return self.query, *self.held, self.plan, self.reach, self.softcap, self.sinks

    def exact(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The packed queries of some rows, and the reference's outputs in float64."""
        starts = np.concatenate([[0], np.cumsum(self.plan.counts)])
        at = torch.from_numpy(np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows]))
        chosen = at.to(self.query.device)
        keys, values = self.keys, self.values
        if self.plan.table is None:
            where = torch.tensor([self.plan.rows[r] for r in rows], device=keys.device)
            keys, values = keys[where], values[where]
        out = reference.attend(
            self.query[:, :, chosen].double(),
            keys.double(),
            values.double(),
            _some(self.plan, rows, at),
            self.query.shape[-1] ** -0.5,
            self.reach,
            self.softcap,
            None if self.sinks is None else self.sinks.double(),
        )
        return chosen, out

    def error(self, out: Tensor, rows: Sequence[int]) -> float:
        """The largest relative error of a head of a query of some rows."""
        at, exact = self.exact(rows)
        return worst(out[:, at], exact)

    def again(self, stage: Stage) -> Problem:
        """The same call with other random tensors; the plan is shared."""
        made = self.copy()
        made.query = _query(stage, self.query.shape, self.query.dtype)
        made.keys, made.values = (
            stage.normal(t.shape[0], t.shape[2], t.shape[1], t.shape[3], dtype=t.dtype).transpose(1, 2)
            for t in (self.keys, self.values)
        )
        return made


def _query(stage: Stage, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``[1, H, T, D]`` in the memory layout of a projection's output, token by token."""
    return stage.normal(1, shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)


def _some(plan: AttentionPlan, rows: Sequence[int], at: Tensor) -> AttentionPlan:
    """The plan of some rows, over buffers that hold these rows only (or the same pages)."""
    counts = [plan.counts[r] for r in rows]
    if isinstance(plan, ExplicitPlan):
        distance = None if plan.distance is None else plan.distance[at]
        return ExplicitPlan(range(len(rows)), counts, plan.seen[at], distance, torch.arange(len(at)))
    picked = list(rows)
    shape = None if plan.tree is None else Tree(*(t[picked] for t in plan.tree))
    table = None if plan.table is None else [plan.table[r] for r in rows]
    first = [plan.first[r] for r in rows]
    return AttentionPlan(
        range(len(rows)), first, counts, plan.capacity, shape, table=table, page=plan.page, fragment=plan.fragment
    )  # fmt: skip


def slots(
    stage: Stage,
    heads: Heads,
    dtype: torch.dtype,
    first: Sequence[int],
    counts: Sequence[int],
    *,
    branching: bool = False,
    parents: Sequence[int] = PARENTS,
    page: int = 0,
    fragment: int | None = None,
    window: int | None = None,
    initial: int = 0,
    softcap: float | None = None,
    sinks: bool = False,
    kv: torch.dtype | None = None,
) -> Problem:
    """Queries after ``first [R]`` slots in use, over slots or pages.

    Args:
        branching: the queries of a row, after its first, are a tree (``parents``). sinks: with a sink logit per head.
    """
    R, length = len(first), [f + c for f, c in zip(first, counts)]
    shape, table = None, None
    if branching:
        above = torch.tensor([parents] * R)
        root = np.array(first) + 1
        shape = Tree(root, tree.ancestors(above).numpy(), tree.depths(above).numpy())
    B, S = R, max(length) + 3  # including some unwritten slots
    if page:
        need = [-(-n // page) for n in length]
        order = np.random.default_rng(stage.seed).permutation(sum(need) + 2).tolist()
        table = [[order.pop() for _ in range(n)] for n in need]
        B, S = sum(need) + 2, page
    plan = AttentionPlan(
        range(R), list(first), list(counts), S, shape, table=table, page=page, fragment=fragment
    )
    keys, values = (stage.normal(B, heads.kv, S, heads.size, dtype=dtype).transpose(1, 2) for _ in range(2))
    if kv is not None:
        keys, values = (t.to(kv).to(dtype) for t in (keys, values))
    query = _query(stage, (1, heads.query, sum(counts), heads.size), dtype)
    logits = stage.normal(heads.query, dtype=dtype) if sinks else None
    return Problem(query, keys, values, plan, window, softcap, logits, initial, kv=kv)


def intervals(
    stage: Stage, heads: Heads, dtype: torch.dtype, first: Sequence[int], counts: Sequence[int], window: int
) -> Problem:
    """Each query sees a few ranges of slots: the first ones, some in between, and the latest."""
    R, S = len(first), max(f + c for f, c in zip(first, counts)) + 3
    host = np.random.default_rng(stage.seed)
    ranges = []
    for p in (f + i for f, n in zip(first, counts) for i in range(n)):
        ends = np.unique([0, *host.integers(1, max(2, p - window), 3), max(0, p + 1 - window), p + 1])
        ranges.append([(int(a), int(b)) for a, b in list(pairwise(ends))[::-2]][::-1])
    keys, values = (stage.normal(R, heads.kv, S, heads.size, dtype=dtype).transpose(1, 2) for _ in range(2))
    query = _query(stage, (1, heads.query, sum(counts), heads.size), dtype)
    return Problem(query, keys, values, ExplicitPlan.of_intervals(range(R), list(counts), ranges, S))


def ring(
    stage: Stage,
    heads: Heads,
    dtype: torch.dtype,
    first: Sequence[int],
    counts: Sequence[int],
    sinks: int,
    window: int,
    masked: bool = False,
) -> Problem:
    """Sinks and a window in constant memory (SPIRe, MagicDec): slots in arbitrary order.

    Args:
        masked: the Triton kernel reads a mask by slot. Without, and with one query a row, it computes from positions what the query sees.
    """
    R = len(first)
    held = Ring(
        [KVShape(heads.kv, heads.size, heads.size, dtype, stage.device)], R, sinks, window, max(counts)
    )
    for buffer in held.layers[0]:
        buffer.copy_(stage.normal(*buffer.shape, dtype=dtype))
    at = np.concatenate([np.arange(f, f + n) for f, n in zip(first, counts)])
    where = held.at(torch.from_numpy(np.repeat(range(R), counts)), torch.from_numpy(at))
    plan = ExplicitPlan(range(R), list(counts), held.visible(at), at[:, None] - held.held(at), where)
    query = _query(stage, (1, heads.query, len(at), heads.size), dtype)
    sight = None
    if max(counts) == 1 and not masked:
        sight = RingSight(torch.from_numpy(at).to(stage.device), sinks, held.size, held.window, FAR)
    return Problem(query, *held.layers[0], plan, sight=sight)


# These never read slots that no query sees; the other backends read them with weight 0 and require finite values.
NEVER_READ = ("triton", "reference", "native", "torch_flash", "flash_attn")


def poisoned(problem: Problem, backend: str) -> Problem:
    """A copy with NaN in slots that a backend must not read, and large values in those that it may read with weight 0."""
    plan = problem.plan
    if (
        backend == "native"
        and max(plan.counts) * problem.query.shape[1] // problem.keys.shape[2] > native.PROMPT
    ):
        backend = "cpu"  # prompts go to PyTorch there
    unseen = torch.ones(problem.keys.shape[:2], dtype=torch.bool)
    for r, s in enumerate(plan.runs(alone=True)):
        used = np.ones(s.keys, dtype=bool)
        if backend in NEVER_READ:
            visible = np.asarray(plan.visible(s, problem.reach)[0])
            used = visible.reshape(-1, s.keys).any(0)
        at = np.flatnonzero(used)
        if plan.table is None:
            unseen[plan.rows[r], at] = False
        else:
            pages = np.array(plan.table[r])
            unseen[pages[at // plan.page], at % plan.page] = False
    value = float("nan") if backend in NEVER_READ else 50.0
    made = problem.copy()
    marked = unseen.to(problem.keys.device)
    made.keys, made.values = problem.keys.clone(), problem.values.clone()
    made.keys[marked], made.values[marked] = value, value
    return made
