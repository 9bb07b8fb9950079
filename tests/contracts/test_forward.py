"""What every ``Forward`` promises: the logits and activations of the model's own dense forward, for any rows, chains and trees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from interpreted import interpreter
from tiny import tiny

from specdec import tree
from specdec.cache.contiguous import SlotCache
from specdec.cache.contract import KVStore
from specdec.cache.paged import PagedCache, PagePool
from specdec.cache.static import StaticStore
from specdec.cache.token_index import Row
from specdec.configs import blocks_of
from specdec.forward.llama_c import LlamaC
from specdec.forward.llama_eager import LlamaEager
from specdec.forward.llama_triton import LlamaTriton
from specdec.forward.packed import Packed
from specdec.forward.padded import Padded
from specdec.forward.probe import kv_shapes
from specdec.kernels.attention import AttentionPlan, Tree
from specdec.kernels.native import library, reason
from specdec.models.clone import structural_clone
from specdec.models.stacked import _Path as StackedPath

CPU = torch.device("cpu")
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9], [7, 9, 3, 2, 3, 8, 4]]
PARENTS = [-1, 0, 0, 1, 3]
NODES = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25], [31, 32, 33, 34, 35]]


class Case(NamedTuple):
    """A forward of one model.

    ``of``: makes it of a private copy. ``runner``: whether it is all of a ``Runner``, and not a part of one. ``taps``: whether it
    gives activations.
    """

    family: str
    of: Callable[[Any], Any]
    dtype: torch.dtype = torch.float32
    runner: bool = False
    taps: bool = True
    context: Callable[[], Any] = nullcontext


def by_operators(model: Any) -> LlamaC:
    """C without the call that computes all blocks at once."""
    made = LlamaC(model)
    made._whole = None
    return made


C = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
CASES = {
    "modules": Case("llama", lambda m: Packed(m, modules=True), torch.float64, runner=True),
    "modules of gemma2": Case("gemma2", lambda m: Packed(m), torch.float64, runner=True),
    "packed": Case("qwen3", lambda m: Packed(m), runner=True),
    "eager": Case("qwen2", LlamaEager),
    "eager with a window": Case("mistral", LlamaEager),
    "C, all blocks at once": Case("qwen3", LlamaC),
    "C, operator by operator": Case("mistral", by_operators),
    "C, bfloat16 copies": Case("llama", lambda m: LlamaC(m, bf16_weights=True)),
    "C, batch-invariant": Case("llama", lambda m: Packed(m, invariant=True), runner=True),
    "Triton": Case("qwen3", LlamaTriton, context=interpreter),
    "padded": Case("gptj", lambda m: Padded(m, trees=True), torch.float64, runner=True),
    "padded, chains only": Case("mpt", lambda m: Padded(m, trees=False), torch.float64, runner=True),
    "stacked": Case("llama", lambda m: StackedPath([m, m], [False, False]), runner=True, taps=False),
    "stacked, in float64": Case(
        "llama", lambda m: StackedPath([m, m], [False, False]), torch.float64, runner=True, taps=False
    ),
}


def over(names: Any) -> Any:
    marks = {name: [C] if name.startswith("C,") else [TRITON] if name == "Triton" else [] for name in names}
    return pytest.mark.parametrize(
        "case", [pytest.param(CASES[name], marks=marks[name], id=name) for name in names]
    )


every_forward = over(CASES)


class Bench:
    """A forward over a cache of ``TEXTS``' rows, and the model's own forward to compare with."""

    def __init__(self, case: Case, pages: bool = False, static: bool = False):
        sizes = (
            {"vocab_size": 96, "intermediate_size": 48}
            if case.family in ("llama", "qwen3", "mistral")
            else {}
        )
        model = tiny(case.family, 0, case.dtype, **sizes)
        if "copies" in next(name for name, one in CASES.items() if one is case):
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
        self.model, self.forward = model, case.of(structural_clone(model))
        spare = self.forward.spare if case.runner else 0
        self.trees = self.forward.trees if case.runner else True
        self.batch = len(TEXTS)
        probed = self.forward if case.runner else Packed(structural_clone(model), modules=True)
        shapes = kv_shapes(probed, None, CPU)
        if isinstance(self.forward, StackedPath):
            self.forward.member = [0, 1, 1]
        self.capacity = 24
        self.pages = pages
        self.cache: Any
        if pages:
            pool = PagePool(shapes, 16)
            pool.take(1)
            self.cache = PagedCache(pool, self.batch, self.capacity)
        else:
            self.cache = SlotCache(shapes, self.batch, self.capacity, spare)
        self.store: KVStore = StaticStore(self.cache) if static else self.cache
        self.eps = 2e-5 if case.dtype is torch.float32 else 2e-6  # transformers norms in float32

    def feed(
        self,
        rows: list[int],
        first: list[int],
        ids: list[list[int]],
        keep: Any = None,
        parents: Any = None,
        caught: Any = None,
    ) -> Any:
        """Feed ``ids`` of some rows from their slots ``first`` on; with ``parents`` the last of them are nodes of a tree."""
        counts = [len(one) for one in ids]
        shape, positions = None, [range(f, f + n) for f, n in zip(first, counts)]
        if parents is not None:
            table = torch.tensor([parents] * len(rows))
            root = [f + n - len(parents) for f, n in zip(first, counts)]
            depth = tree.depths(table)
            shape = Tree(np.array(root), tree.ancestors(table).numpy(), depth.numpy())
            positions = [[*range(f, r), *(r + d for d in depth[0].tolist())] for f, r in zip(first, root)]
        options: dict[str, Any] = {}
        slots = self.cache.capacity if self.pages else self.cache.slots
        if self.pages:
            table = self.cache.hold([Row(b, f, f + n, f + n) for b, f, n in zip(rows, first, counts)])
            flat = [
                table[b][s // 16] * 16 + s % 16
                for b, f, n in zip(rows, first, counts)
                for s in range(f, f + n)
            ]
            options = {"table": [table[b] for b in rows], "page": 16}
        else:
            flat = [b * slots + s for b, f, n in zip(rows, first, counts) for s in range(f, f + n)]
        plan = AttentionPlan(rows, first, counts, slots, shape, torch.tensor(flat), **options)
        if isinstance(self.store, StaticStore):
            self.store.begin()
        for b, f, n in zip(rows, first, counts):
            self.cache.remember(b, np.zeros(self.capacity, np.int64), f, f + n, 0)
        with torch.inference_mode():
            return self.forward.forward(
                self.store,
                plan,
                torch.tensor([token for one in ids for token in one]),
                torch.tensor([p for one in positions for p in one]),
                keep,
                caught,
            )

    def own(self, text: list[int]) -> torch.Tensor:
        """``[L, V]`` by the model's own dense forward."""
        with torch.inference_mode():
            return self.model(torch.tensor([text])).logits[0]

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.shape == expected.shape
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error < self.eps, f"{error:.1e}"


@every_forward
def test_prompts_and_steps_of_ragged_rows(case):
    with case.context():
        bench = Bench(case)
        cut = [6, 1, 4]
        logits = bench.feed([0, 1, 2], [0, 0, 0], [text[:n] for text, n in zip(TEXTS, cut)])
        bench.close(logits, torch.cat([bench.own(text[:n]) for text, n in zip(TEXTS, cut)]))
        logits = bench.feed([0, 1, 2], cut, [text[n:] for text, n in zip(TEXTS, cut)])
        bench.close(logits, torch.cat([bench.own(text)[n:] for text, n in zip(TEXTS, cut)]))
        logits = bench.feed([0, 2], [11, 7], [[12], [13]])  # a row that is not fed, and single tokens
        bench.close(logits, torch.stack([bench.own([*TEXTS[b], t])[-1] for b, t in ((0, 12), (2, 13))]))
        logits = bench.feed([1], [1], [[40, 41, 42]])  # rolled back: slots are written anew
        bench.close(logits, bench.own([8, 40, 41, 42])[1:])


@every_forward
def test_logits_that_are_wanted(case):
    with case.context():
        bench = Bench(case)
        expected = torch.cat([bench.own(text) for text in TEXTS])
        zero, keep = [0, 0, 0], torch.tensor([2, 10, 11, 19])
        bench.close(bench.feed([0, 1, 2], zero, TEXTS, keep=keep), expected[keep])
        assert bench.feed([0, 1, 2], zero, TEXTS, keep=False) is None
        bench.close(
            bench.feed([0, 1, 2], [11, 2, 7], [[1]] * 3), torch.stack([bench.own([*t, 1])[-1] for t in TEXTS])
        )


@every_forward
def test_trees_where_they_are_declared(case):
    with case.context():
        bench = Bench(case)
        if not bench.trees:
            assert case.family == "mpt"
            return
        bench.feed([0, 1, 2], [0, 0, 0], [text[:-1] for text in TEXTS])
        fed = [[text[-1], *nodes] for text, nodes in zip(TEXTS, NODES)]
        logits = bench.feed([0, 1, 2], [len(text) - 1 for text in TEXTS], fed, parents=PARENTS)
        expected = []
        for text, nodes in zip(TEXTS, NODES):
            expected.append(bench.own(text)[-1])
            for node in range(len(PARENTS)):
                path, at = list[int](), node
                while at >= 0:
                    path, at = [nodes[at], *path], PARENTS[at]
                expected.append(bench.own([*text, *path])[-1])
        bench.close(logits, torch.stack(expected))


@every_forward
def test_activations_of_tapped_layers(case):
    with case.context():
        bench = Bench(case)
        layers = len(blocks_of(bench.model))
        caught: dict[int, list[torch.Tensor]] = {tap: [] for tap in (0, 1, layers)}
        if not case.taps:
            with pytest.raises(ValueError, match="no layers to tap"):
                bench.feed([0], [0], [[1]], caught=caught)
            return
        bench.feed([0, 1, 2], [0, 0, 0], TEXTS, keep=False, caught=caught)
        for tap in caught:
            (found,) = caught[tap]
            expected = []
            block = blocks_of(bench.model)[max(tap - 1, 0)]
            for text in TEXTS:
                seen: list[Any] = []
                if tap:
                    hook = block.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
                else:
                    hook = block.register_forward_pre_hook(
                        lambda m, a, kw, seen=seen: seen.append(a[0] if a else kw["hidden_states"]),
                        with_kwargs=True,
                    )
                bench.own(text)
                hook.remove()
                expected.append((seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0])[0])
            bench.close(found, torch.cat(expected))


# Whose rows need slots of their own for padding.
@over([name for name in CASES if not name.startswith("padded")])
@pytest.mark.parametrize("kind", ["pages", "static"])
def test_other_stores_give_the_same(case, kind):
    with case.context():
        plain, other = Bench(case), Bench(case, **{kind: True})
        for first, ids in (([0, 0, 0], TEXTS), ([11, 2, 7], [[1, 2], [3], [4, 5]])):
            wanted, found = (bench.feed([0, 1, 2], first, ids) for bench in (plain, other))
            plain.close(found, wanted)


@over([name for name, case in CASES.items() if case.runner])
def test_what_a_runner_declares(case):
    with case.context():
        bench = Bench(case)
        made = bench.forward
        assert made.spare >= 0
        for ability in (made.trees, made.concurrent, made.invariant, made.bf16_weights):
            assert isinstance(ability, bool)
        made.check()
        other = made.capturable()
        if isinstance(other, str):
            assert other
            return
        expected = bench.feed([0, 1, 2], [0, 0, 0], TEXTS)
        bench.forward = other
        bench.close(bench.feed([0, 1, 2], [0, 0, 0], TEXTS), expected)
