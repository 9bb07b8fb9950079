"""``sd.auto`` beside plain decoding and every fixed draft and length: is it never slower than plain, and close to the best in hindsight?

    python recipes/auto.py --json docs/results/auto.json

It measures its drafts on prompts of validation packages, and is then compared on test prompts: all decoders in turn, in another order and with fresh
prompts and seeds in every repeat. The seconds of a run are all of it without the target's reading of the prompts (as plain decoding has it in the same repeat), so what drafts
read counts. Rows `method, temperature, batch, tokens_per_second, ratio, ratio_low, ratio_high`: speed over plain decoding's, the geometric mean over
repeats with a 95 % bootstrap interval over them (an arithmetic mean of ratios is above 1 for two equal noisy things); `speeds`: tokens a second of
each repeat; `plain_share`: of rounds, counted by rows. `plain again` is plain decoding a second time: how far its ratio is from 1 is noise. `auto, fixed` is
`auto.fixed(batch)`, what `auto` found fastest, alone. Rows of part `hindsight` have `auto` and `auto, fixed` over the best fixed choice, plain decoding included:
`ratio` where this is chosen on one half of the repeats and compared on the other, in both ways; `naive` where it is chosen on the repeats on which it is compared, which luck favours. Rows of part `measured` are what `auto` itself measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import checkout  # noqa: F401
import numpy as np

import specdec as sd
from specdec import zoo
from specdec.lab.bootstrap import FIGURES, geometric
from specdec.lab.clock import shuffled
from specdec.lab.console import progress, table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe

AGAIN, ALONE = "plain again", "auto, fixed"


@dataclass(frozen=True)
class Settings(Recipe):
    draft: str = option("pocket-vanilla", "a pocket model, beside an n-gram lookup")
    lengths: tuple[int, ...] = option((1, 2, 4), "of the model's chains")
    lookups: tuple[int, ...] = option((2, 4, 8), "of the lookup's chains")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "of the sampling")
    batches: tuple[int, ...] = option((1, 4, 16), "rows at a time")
    context: int = option(256, "prompt tokens")
    tokens: int = option(96, "new tokens of each row")
    repeats: int = option(12, "counted runs of each decoder")
    split: Literal["test", "validation"] = option(
        "test", "packages of the prompts of the comparison; validation: to choose settings on"
    )
    calibration: int = option(3, "runs of each decoder that `auto` measures")


def main(s: Settings) -> list[dict[str, Any]]:
    s.begin()
    target, small = (sd.HFModel(*zoo.load(name)) for name in ("pocket-target", s.draft))
    learn, test = (
        target.tokenizer(sd.data.prompts(tokens=s.context, tokenizer=target.tokenizer, split=split))[
            "input_ids"
        ]
        for split in ("validation", s.split)
    )
    if s.split == "validation":  # neighbours are often of one file
        learn, test = learn[: len(learn) // 2], learn[len(learn) // 2 :]
    drafts = {"small": small, "lookup": sd.drafts.NGram(max_match=4, min_match=2)}
    rows: list[dict[str, Any]] = []
    for temperature in s.temperatures:
        base = sd.decoder(target).sampling(temperature=temperature)
        began = perf_counter()
        auto = sd.auto(
            base,
            drafts,
            [ids[: s.context] for ids in learn],
            {"small": s.lengths, "lookup": s.lookups},
            s.batches,
            s.tokens,
            s.calibration,
            seed=s.seed,
        )
        spent = perf_counter() - began
        print(f"\ntemperature {temperature:g}, measured in {spent:.0f} s\n{auto}")
        about = {"part": "measured", "temperature": temperature, "calibration_seconds": spent}
        rows += [{**about, "margin": auto.selector.margin, **row} for row in auto.rows]
        fixed = {
            f"{name}/{k}": base.draft(draft, k).build()
            for (name, draft), lengths in zip(drafts.items(), (s.lengths, s.lookups))
            for k in lengths
        }
        decoders = {"plain": base.build(), AGAIN: base.build(), "auto": auto.decoder, **fixed}
        for batch in s.batches:
            here = decoders | {ALONE: auto.fixed(batch)}
            rows += compared(s, here, [ids[: s.context] for ids in test], temperature, batch)
    columns = ["temperature", "batch", "method", "tau", "tokens_per_second", *FIGURES[3:6], "naive"]
    print("\n" + table([row for row in rows if row["part"] != "measured"], columns))
    s.save(rows)
    return rows


def compared(
    s: Settings, decoders: dict[str, Any], prompts: list[list[int]], temperature: float, batch: int
) -> list[dict[str, Any]]:
    """Rows of one temperature and batch."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    taus: dict[str, list[float]] = {name: [] for name in decoders}
    plainly: list[float] = []  # of ``auto``
    for repeat in range(-1, s.repeats):
        some = [prompts[(max(repeat, 0) * batch + i) % len(prompts)] for i in range(batch)]
        seeds = [s.seed + 10_000 + 1000 * repeat + i for i in range(batch)]
        reading = 0.0
        spent = {}
        for name in shuffled(decoders, repeat, temperature, batch):
            progress(
                f"temperature {temperature:g}, batch {batch}, repeat {repeat + 1} of {s.repeats}: {name}"
            )
            began = perf_counter()
            out = decoders[name].generate(some, s.tokens, seed=seeds, eos_token_id=())
            spent[name] = perf_counter() - began
            taus[name] += [out.stats.tau] if repeat >= 0 else []
            if name == "auto" and repeat >= 0:
                plainly.append(out.stats.arms[out.arms.index("none")] / out.stats.arms.total())
            if name == "plain":
                reading = out.stats.seconds["prefill"]
        for name, all_of_it in spent.items():
            seconds[name] += [all_of_it - reading] if repeat >= 0 else []
    progress()
    speed = {name: batch * (s.tokens - 1) / np.array(some) for name, some in seconds.items()}
    place = {"temperature": temperature, "batch": batch}
    rows = []
    for name, mine in speed.items():
        row = {"part": "speed", "method": name, **place, "tau": float(np.mean(taus[name]))}
        row["tokens_per_second"] = float(np.median(mine))
        row |= {"repeats": s.repeats, "speeds": mine.tolist()} | geometric(mine / speed["plain"])
        rows.append(row | ({"plain_share": float(np.mean(plainly))} if name == "auto" else {}))
    about = {"part": "hindsight", **place}
    over = [about | {"method": f"{name} over the best"} | hindsight(speed, name) for name in ("auto", ALONE)]
    return [*rows, *over]


def hindsight(speed: dict[str, np.ndarray], mine: str) -> dict[str, Any]:
    """``mine`` over the best fixed choice: chosen on one half of the repeats and compared on the other, and chosen where it is compared."""
    fixed = [name for name in speed if name not in ("auto", AGAIN, ALONE)]
    halves = np.arange(len(speed[mine])) % 2
    ratios = np.empty(len(halves))
    chosen = []
    for half in (0, 1):
        chosen.append(max(fixed, key=lambda name: speed[name][halves != half].mean()))
        ratios[halves == half] = (speed[mine] / speed[chosen[-1]])[halves == half]
    best = max(fixed, key=lambda name: speed[name].mean())
    naive = geometric(speed[mine] / speed[best])["ratio"]
    return geometric(ratios) | {"naive": naive, "best": best, "chosen": chosen}


if __name__ == "__main__":
    main(parse(Settings, __doc__))
