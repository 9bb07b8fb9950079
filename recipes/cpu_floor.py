"""A round's time beside its floor: its matrix products, and reading keys and values.

The floor of a round is measured in the same run, alternating with the rounds: the time of its matrix products alone (the models' own
weights, in order, with as many tokens) plus the bytes of keys and values that its queries see, over the bandwidth of a copy (bytes
read and written). Sampling, verification, Python and everything between the products come on top of the floor. Rounds are steady:
prompts are fed before the clock starts and no row leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import checkout  # noqa: F401
import torch
import torch.nn.functional as F

import specdec as sd
from specdec.data import prompts
from specdec.kernels.native import library, ops
from specdec.lab.clock import in_turn, seconds
from specdec.lab.console import progress, table
from specdec.lab.loading import load
from specdec.lab.options import option, parse
from specdec.lab.prefill import group, prefilled
from specdec.lab.recipe import Recipe
from specdec.lab.steady import capacity, steady


@dataclass(frozen=True)
class Settings(Recipe):
    target: str = option("pocket-target", "pocket model, hub id or folder")
    draft: str = option("pocket-vanilla", "the same for the draft")
    batches: tuple[int, ...] = option((1, 16), "rows at a time")
    contexts: tuple[int, ...] = option((1024,), "prompt tokens")
    length: int = option(4, "k, tokens drafted per round")
    new_tokens: int = option(24, "new tokens per row and repeat")
    repeats: int = option(5, "timed repeats")


def main(s: Settings) -> None:
    s.begin()
    (model, tokenizer), (small, _) = load(s.target, device="cpu"), load(s.draft, device="cpu")
    for m in (model, small):
        m.generation_config.eos_token_id = None
    target, draft = prefilled(sd.HFModel(model, tokenizer), taps=()), prefilled(sd.HFModel(small, tokenizer))
    decoders = {
        "plain": sd.decoder(target).build(),
        "vanilla": sd.decoder(target).draft(draft, length=s.length).build(),
    }
    rows = []
    for context in s.contexts:
        for batch in s.batches:
            some = long_enough(tokenizer, context, batch)
            room = capacity(context, s.new_tokens, s.length)
            fed = group(some, list(range(s.seed, s.seed + batch)), room, target, [draft])
            spent: dict[str, list[float]] = {}
            for repeat in range(s.repeats + 1):
                for name, decoder in decoders.items():
                    run = steady(decoder, [fed], s.new_tokens)
                    at = context + s.new_tokens // 2
                    floor = floors(target, draft, batch, at, s.length if name == "vanilla" else 0)
                    if repeat:  # the first is warm-up
                        for key, value in {"round": run.round_seconds, **floor}.items():
                            spent.setdefault(f"{name} {key}", []).append(value)
                        for stage in ("draft", "target", "verify", "other"):
                            spent.setdefault(f"{name} {stage}", []).append(run.stage(stage))
            for name in decoders:
                found = {key: median(spent[f"{name} {key}"]) for key in KEYS}
                floor_seconds = found["products"] + found["reading"]
                rows.append(
                    {
                        "method": name,
                        "batch": batch,
                        "context": context,
                        "k": s.length if name == "vanilla" else 0,
                        "round_ms": found["round"] * 1e3,
                        "floor_ms": floor_seconds * 1e3,
                        "times_floor": median(
                            r / (p + b)
                            for r, p, b in zip(*(spent[f"{name} {key}"] for key in ("round", *PARTS)))
                        ),
                        **{f"{key}_ms": found[key] * 1e3 for key in KEYS if key != "round"},
                    }
                )
                progress(f"{name}, batch {batch}, context {context}")
    progress()
    print(table(rows, tuple(rows[0])))
    s.save(rows)


PARTS = ("products", "reading")
KEYS = ("round", *PARTS, "draft", "target", "verify", "other")


def long_enough(tokenizer: Any, context: int, count: int) -> list[list[int]]:
    """``count`` prompts of ``context`` tokens: the evaluation prompts, the short ones repeated."""
    out = []
    for text in prompts(tokens=None):
        ids = tokenizer(text)["input_ids"]
        out.append((ids * (context // len(ids) + 1))[:context])
        if len(out) == count:
            break
    return out


def floors(target: Any, draft: Any, batch: int, length: int, k: int) -> dict[str, float]:
    """Seconds of a round's matrix products and of reading its keys and values; ``k`` drafted tokens a row, 0 without a draft."""
    seen = batch * (length + k) * target.bytes_per_token()
    products = multiply(target, batch * (k + 1))
    for step in range(
        k
    ):  # a draft's first step also feeds the target's token; the floor counts one token per step
        seen += batch * (length + step) * draft.bytes_per_token()
        products += multiply(draft, batch)
    return {"products": products, "reading": seen / copy_bandwidth(seen)}


def multiply(model: Any, tokens: int) -> float:
    """Seconds of all linear layers of a model on ``tokens`` tokens, in PyTorch or C, whichever is faster; in C with the weights that steps read."""
    layers = [(m.weight, m.bias) for m in model.clone.modules() if isinstance(m, torch.nn.Linear)]
    inputs = [torch.randn(tokens, weight.shape[1]) for weight, _ in layers]
    ways: list[tuple[Any, list[Any]]] = [(F.linear, layers)]
    if model.engine.bf16_weights:
        ways.append((ops.unchecked_linear, [(model.engine.lean.narrow[w], b) for w, b in layers]))
    elif library() is not None and all(ops.linear_takes(*layer) for layer in layers):
        ways.append((ops.linear, layers))

    def every(linear: Any, read: list[Any]) -> None:
        for x, layer in zip(inputs, read):
            linear(x, *layer)

    with torch.inference_mode():
        for way in ways:  # as in a round, the weights were read recently
            every(*way)
        return min(seconds(partial(every, *way)) for way in ways)


def copy_bandwidth(size: int) -> float:
    """Bytes read and written per second by copies of about ``size`` bytes."""
    here, there = (torch.ones(max(size // 8, 1 << 16)) for _ in range(2))  # half of the bytes each
    (spent,) = in_turn([lambda: there.copy_(here)], repeats=4, warmups=1)
    return 2 * here.numel() * here.element_size() / spent


if __name__ == "__main__":
    main(parse(Settings, __doc__))
