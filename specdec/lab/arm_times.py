"""A pool's drafts by name, and the seconds of their rounds, measured alone and alternately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from specdec import zoo
from specdec.builder import as_draft
from specdec.builder import decoder as builder
from specdec.capabilities import DraftPart
from specdec.cost.arms import weights
from specdec.drafts import Model, NGram
from specdec.drafts.spire.load import is_spire
from specdec.lab.pipeline import timed
from specdec.lab.selection import RoundTimes
from specdec.models.hf import HFModel
from specdec.types import Context

POOL = ("pocket-140k", "pocket-360k", "pocket-600k", "pocket-1100k", "pocket-2100k")
"""The drafts from which selectors choose, the smallest first."""


def load_pool(names: Sequence[str], bf16_weights: bool | None = None) -> dict[str, Any]:
    """Drafts by name: pocket models, ``ngram``, and ``none``, the arm that does not speculate.

    Raises:
        SystemExit: an unknown name.
    """
    made: dict[str, Any] = {}
    for name in names:
        if name not in (*zoo.names(), "ngram", "none"):
            raise SystemExit(
                f"no draft {name!r} for the pool: there are {', '.join(zoo.names())}, ngram and none"
            )
        if name in ("ngram", "none"):
            made[name] = NGram() if name == "ngram" else None
            continue
        model, tokenizer = zoo.load(name)
        spire = is_spire(model)
        made[name] = (
            as_draft(model, name) if spire else Model(HFModel(model, tokenizer, bf16_weights=bf16_weights))
        )
    return made


def measured(
    target: Any,
    arms: Mapping[str, Any],
    k: int,
    prompts: Sequence[Sequence[int]],
    rounds: int = 8,
    repeats: int = 3,
    seed: int = 0,
) -> RoundTimes:
    """Fit the seconds of rounds to serial rounds of all prompts, of half and of a quarter of them, each arm alone.

    Models of one size share their measurements: a difference between them is noise, which a selector would take for an advantage. Verification is
    fitted to rounds of drafts that always propose k tokens, and to plain rounds. Reading is timed for drafts with a model of their own, on the
    first prompt. Drafts that read with the target's pass have no such cost.

    Args:
        arms: name -> draft; ``None`` does not speculate. k: tokens that a draft proposes. prompts: ids; at least 2. rounds: timed rounds of a
            run. repeats: runs of each arm and size, alternating, after one that is not counted.
    Raises:
        ValueError: fewer than 2 prompts.
    """
    if len(prompts) < 2:
        raise ValueError(f"there are {len(prompts)} prompts: rounds of two sizes need at least 2")
    base = builder(target)
    decoders = {
        name: (base if draft is None else base.draft(draft, k)).build() for name, draft in arms.items()
    }
    sizes = sorted({max(1, len(prompts) // part) for part in (1, 2, 4)})
    kind = {name: weights(d.model) if isinstance(d, Model) else name for name, d in arms.items()}
    parts: dict[tuple[Any, int], list[tuple[float, float]]] = {}
    reads: dict[Any, list[float]] = {}
    for turn in range(repeats + 1):
        for name, decoder in decoders.items():
            for size in sizes:
                found = timed(decoder, prompts[:: len(prompts) // size][:size], rounds, 1, seed + turn)[1]
                if turn:
                    parts.setdefault((kind[name], size), []).extend((p.draft, p.verify) for p in found)
            if turn:
                reads.setdefault(kind[name], []).append(_reading(decoder.draft, list(prompts[0])))
    draft = []
    for name, one in arms.items():
        middle = [median(d for d, _ in parts[kind[name], size]) for size in sizes]
        fixed, row = (0.0, 0.0) if one is None else _fitted([[1, size] for size in sizes], middle)
        draft.append((fixed / k, row / k))
    models = any(isinstance(one, Model) for one in arms.values())
    points = [
        (size, 0 if one is None else k, median(v for _, v in parts[kind[name], size]))
        for name, one in arms.items()
        if one is None or isinstance(one, Model) or not models
        for size in sizes
    ]
    fixed, row, token = _fitted([[1, size, size * d] for size, d, _ in points], [v for *_, v in points])
    return RoundTimes(tuple(draft), (fixed, row, token), tuple(median(reads[kind[name]]) for name in arms))


def _fitted(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none negative, of least relative squares."""
    scale = np.maximum(seconds, 1e-9)
    return nnls(np.array(features) / scale[:, None], np.array(seconds) / scale)[0].tolist()


def _reading(draft: Any, ids: list[int]) -> float:
    """Seconds for a draft to read one token of a prompt."""
    waits = DraftPart.of(draft).waits
    if waits is None:
        return 0.0
    context = Context.of([ids])
    with torch.inference_mode():
        state = waits.empty(context)
        began = perf_counter()
        waits.prepare(state, context, None)
    return (perf_counter() - began) / len(ids)
