"""Tests an attention backend against the rules of ``contract``: small calls of every kind, compared with the reference in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.attention.api import attention
from specdec.kernels.attention.choice import why_not
from specdec.kernels.attention.explicit import ExplicitPlan
from specdec.kernels.attention.plan import AttentionPlan, Tree
from specdec.kernels.attention.reach import reach

FINITE = ("packed", "padded", "decomposed")  # need finite values everywhere on a GPU


class Broken(AssertionError):
    """A rule of ``contract`` is broken: ``rule`` is "output", "shape", "log-sum-exp" or "unseen" (slots that no query sees)."""

    def __init__(self, rule: str, said: str):
        super().__init__(said)
        self.rule = rule


class Case(NamedTuple):
    """One call: a plan, and the options of ``attention``."""

    name: str
    plan: AttentionPlan
    options: dict[str, Any]


def plans() -> dict[str, AttentionPlan]:
    """Chains, ragged rows, gaps between rows, rows out of order, trees, explicit masks, pages, prompts."""
    draw = np.random.default_rng(0)
    seen = draw.random((9, 24)) < 0.4
    seen[4] = seen[:, -1] = False  # a query that sees nothing, and a slot that no query sees
    ancestors = np.zeros((3, 7, 7), dtype=bool)
    depth = np.zeros((3, 7), dtype=int)
    for node, parent in enumerate([-1, 0, 0, 1, 1, 2, 5]):
        ancestors[:, node] = ancestors[:, parent] if parent >= 0 else False
        ancestors[:, node, node] = True
        depth[:, node] = depth[:, parent] + 1 if parent >= 0 else 0
    shape = Tree(np.array([11, 4, 7]), ancestors, depth)
    return {
        "decode": AttentionPlan([0, 1, 2], [12, 3, 9], [1, 1, 1], 24),
        "verify": AttentionPlan([0, 1, 2], [12, 3, 9], [4, 4, 4], 24),
        "ragged": AttentionPlan([0, 2, 3], [12, 0, 9], [3, 1, 5], 24),
        "out of order": AttentionPlan([3, 0, 2], [11, 7, 2], [2, 2, 1], 24),
        "first token": AttentionPlan([1], [0], [1], 24),
        "prompt": AttentionPlan([2], [0], [20], 24),
        "tree": AttentionPlan([0, 1, 2], [10, 3, 6], [8, 8, 8], 24, shape),
        "end of a tree": AttentionPlan([0, 1, 2], [16, 9, 12], [2, 2, 2], 24, shape),  # half of it is hidden
        "mask": ExplicitPlan([0, 1, 3], [4, 3, 2], seen),
        "mask and distances": ExplicitPlan([0, 1, 3], [4, 3, 2], seen, draw.integers(0, 9, (9, 24))),
        "pages": AttentionPlan([0, 1], [17, 21], [3, 3], 0, table=[[2, 0], [3, 1]], page=16),
    }


def cases(heads: int) -> Iterator[Case]:
    """Every plan, alone and with the options of layers."""
    for name, plan in plans().items():
        layers: list[dict[str, Any]] = [{}]
        if plan.ordered or name == "mask and distances":
            layers.append({"window": 3})
        if plan.ordered:
            layers.append({"window": 3, "initial": 2})
        for options in layers:
            yield Case(name, plan, options)
        yield Case(name, plan, {"softcap": 0.7})
        yield Case(name, plan, {"sink_logits": torch.linspace(-1, 2, heads)})


def buffers(
    plan: AttentionPlan, dtype: torch.dtype, device: Any, heads: int, size: int, seed: int = 0
) -> list[Tensor]:
    """A query, keys and values for a plan of at most 4 rows or pages."""
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, sum(plan.counts), heads, size, generator=draw).transpose(1, 2)]
    made += [torch.randn(4, plan.page or plan.capacity, 2, size, generator=draw) for _ in range(2)]
    return [t.to(device, dtype) for t in made]


def hide(plan: AttentionPlan, keys: Tensor, values: Tensor, options: dict[str, Any], poison: float) -> None:
    """Write ``poison`` to slots that no query of their row sees."""
    unseen = torch.ones(keys.shape[:2], dtype=torch.bool)
    for s in plan.runs(alone=True):
        within = reach(options.get("window"), options.get("initial", 0))
        at = torch.as_tensor(plan.visible(s, within)).flatten(0, -2).any(0).nonzero()[:, 0]
        if plan.table is None:
            unseen[s.b0, at] = False
        else:
            unseen[torch.tensor(plan.table[s.r0])[at // plan.page], at % plan.page] = False
    keys[unseen.to(keys.device)] = values[unseen.to(keys.device)] = poison


def check(
    backend: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    size: int = 16,
) -> list[str]:
    """Run calls of every kind through a backend (a name of ``BACKENDS``; see ``register``).

    Returns:
        a line for each call that it served.
    Raises:
        Broken: a rule of ``contract`` is broken; the message names the call and the rule.
        ValueError: the backend refuses a plain call of one token; the message says why.
    """
    device = torch.device(device)
    atol = max(2e-6, 8 * torch.finfo(dtype).eps) if dtype != torch.float64 else 1e-12
    served = []
    for name, plan, given in cases(heads):
        options: dict[str, Any] = {
            k: v.to(device, dtype) if isinstance(v, Tensor) else v for k, v in given.items()
        }
        query, keys, values = buffers(plan, dtype, device, heads, size)
        within = reach(options.get("window"), options.get("initial", 0))
        softcap, logits = options.get("softcap"), options.get("sink_logits")
        why = [
            why_not(backend, query, keys, values, plan, within, softcap, logits, lse) for lse in (False, True)
        ]
        if why[0] is not None:
            if name == "decode" and not options:
                raise ValueError(f"backend {backend!r} refuses a plain call: {why[0]}")
            continue
        said = f"{backend}, {name}, {', '.join(options) or 'plain'}"
        wide: dict[str, Any] = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
        expected, logs = attention(
            query.double(),
            keys.double(),
            values.double(),
            replace_plan(plan),
            **wide,
            lse=True,
            backend="reference",
        )
        poisons = [None] if device.type != "cpu" and backend in FINITE else [None, float("nan"), float("inf")]
        for poison in poisons:
            if poison is not None:
                keys, values = keys.clone(), values.clone()
                hide(plan, keys, values, options, poison)
            rule = "the output is the reference's"
            broken = "output"
            if poison is not None:
                rule, broken = f"{poison} that no query sees does not count", "unseen"
            _compare(
                attention(query, keys, values, replace_plan(plan), **options, backend=backend),
                expected,
                atol,
                dtype,
                broken,
                f"{said}: {rule}",
            )
            if why[1] is None:
                out, lse = attention(
                    query, keys, values, replace_plan(plan), **options, backend=backend, lse=True
                )
                full = torch.promote_types(dtype, torch.float32)
                _compare(out, expected, atol, dtype, broken, f"{said}: {rule}, with log-sum-exps")
                _compare(
                    lse,
                    logs,
                    4 * atol,
                    full,
                    "log-sum-exp",
                    f"{said}: log-sum-exps are natural, positive in sign, and -inf for no slots",
                )
        served.append(said)
    return served


def replace_plan(plan: AttentionPlan) -> AttentionPlan:
    """The same plan with empty caches."""
    if isinstance(plan, ExplicitPlan):
        return ExplicitPlan(plan.rows, plan.counts, plan.seen, plan.distance, plan.slots)
    return replace(plan)


def _compare(found: Tensor, expected: Tensor, atol: float, dtype: torch.dtype, rule: str, said: str) -> None:
    if found.shape != expected.shape or found.dtype != dtype:
        raise Broken(
            "shape",
            f"{said}: got {list(found.shape)} of {found.dtype}, not {list(expected.shape)} of {dtype}",
        )
    if not torch.allclose(found.double().cpu(), expected.cpu(), rtol=0, atol=atol):
        worst = (found.double().cpu() - expected.cpu()).abs().nan_to_num(float("inf")).max()
        raise Broken(rule, f"{said}: off by {float(worst):.1e}")
