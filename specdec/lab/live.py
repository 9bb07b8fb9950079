"""Decoders beside each other on one's own prompts and machine: speed, its ratio to a reference with an interval, and whether the texts agree."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.arguments import at_least, counts
from specdec.builder import Builder
from specdec.capabilities import DraftInfo
from specdec.decoder import Decoder
from specdec.generation import Generation
from specdec.lab import plots
from specdec.lab.bootstrap import FIGURES, mean_interval
from specdec.lab.clock import shuffled, sync
from specdec.lab.comparing import lossy
from specdec.lab.console import Framed, progress, table
from specdec.prompts import Prompts, rows_of, stop_rules
from specdec.stats import Stats
from specdec.verifiers import Coupled

COLUMNS = ("method", "batch", "tokens_per_second", "tau", *FIGURES[3:6], "same_text", "best")


@dataclass(frozen=True, eq=False)
class Live(Framed):
    """Rows of ``compare``; printed, it is a table with the best decoder at each batch below."""

    rows: list[dict[str, Any]]
    reference: str

    @property
    def best(self) -> dict[int, str]:
        """Batch -> the fastest decoder, lossy ones left out where there are others; none where one repeat shows no winner."""
        return {row["batch"]: row["method"] for row in self.rows if row["best"]}

    def __repr__(self) -> str:
        answers = [self._answer(row) for row in self.rows if row["best"]]
        once = any(row["repeats"] < 2 for row in self.rows)
        shows = "" if answers else " and shows no winner"
        note = f"one repeat gives no interval{shows}: raise repeats" if once else ""
        lines = (table(self.rows, COLUMNS), *answers, note, lossy(self.rows))
        return "\n".join(line for line in lines if line)

    def _answer(self, row: Mapping[str, Any]) -> str:
        said = f"best at batch {row['batch']}: {row['method']}"
        if row["method"] != self.reference:
            said += (
                f", {row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}] x {self.reference}"
            )
        return said + (f"; too close to call against {', '.join(row['close'])}" if row["close"] else "")

    def plot(self) -> Any:
        """A matplotlib figure: every decoder's speed over the reference's, by batch, with intervals."""
        figure, ((axes,),) = plots.panels(1, 1, (5.5, 3.5), bare=True, layout="constrained")
        for name in dict.fromkeys(row["method"] for row in self.rows):
            rows = [row for row in self.rows if row["method"] == name]
            known = [row for row in rows if row["ratio_low"] is not None]  # all, or none
            around = [
                [row["ratio"] - row["ratio_low"] for row in known],
                [row["ratio_high"] - row["ratio"] for row in known],
            ]
            axes.errorbar(
                [row["batch"] for row in rows],
                [row["ratio"] for row in rows],
                around if known else None,
                marker="o",
                capsize=3,
                label=name,
            )
        batches = sorted({row["batch"] for row in self.rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.set_xlabel("batch")
        axes.set_ylabel(f"speed over {self.reference}'s")
        axes.legend(frameon=False)
        return figure


def compare(
    decoders: Mapping[str, Decoder | Builder],
    prompts: Prompts,
    batches: int | Sequence[int] = (1, 8),
    repeats: int = 6,
    new_tokens: int = 64,
    reference: str | None = None,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | None = (),
) -> Live:
    """Decode the same prompts with every decoder and say which is fastest at which batch.

    The decoders run in turn, in another order each time, so that a slow moment of the machine affects all alike. Each repeat takes the next prompts and fresh seeds, the same for
    all; a first run of each, which compiles and warms up, is not counted. Speed is decoded tokens over the seconds of all rounds but the prefill.
    Speeds and ratios are geometric means, and ratios are paired by repeat. Their interval is a 95 % bootstrap over the repeats; of fewer than 5 it is their range, and one repeat has none, and
    shows no winner. It covers the noise of the machine and of the prompts drawn, and prompts that are reused count again. ``lab.decide`` computes τ
    without this noise. A decoder with a lossy verifier is marked in the column ``lossless``, and it is not named the best beside lossless ones.

    Args:
        decoders: by name, built or not. prompts: as for ``generate``; batches take them in turn.
        batches: rows decoded together. repeats: counted runs of each decoder and batch. new_tokens: the most of each row.
        reference: the decoder that ratios are to; default: the first that does not speculate, or the first.
        seed: of the first repeat. eos_token_id: ids that end a row, as for ``generate``: by default none, so that all rows without a grammar have ``new_tokens``; ``None`` takes
            the target's. Rows that end leave the batch, and none joins, so that this is the speed of a batch until its last row ends. Each repeat counts alike,
            however long its texts; one in which a decoder's rows all end with the prefill's token has no speed, and counts for none.
    Returns:
        ``Live``. ``same_text`` is the share of rows with the reference's text where these must agree (both greedy, or both ``Coupled``), else ``None``;
        ``prefill_ms`` is the mean time of the prefill, in which the target and the draft read the prompts.
    Raises:
        TypeError: decoders are no mapping of decoders. ValueError: there are none, no such reference, a number below 1, or a temperature for
            each request; before anything runs, a prompt that a decoder's models have no room for, as of ``generate``; every repeat ended with its first tokens.
    """
    if not isinstance(decoders, Mapping):
        raise TypeError(f"decoders is a {type(decoders).__name__}: give a mapping, {{'name': decoder, ...}}")
    if not decoders:
        raise ValueError("decoders is empty: give at least one, {'name': decoder}")
    built: dict[str, Decoder] = {}
    for name, one in decoders.items():
        if not isinstance(one, (Builder, Decoder)):
            raise TypeError(f"decoder {name!r} is a {type(one).__name__}: give sd.decoder(target).draft(...)")
        built[name] = made = one.build() if isinstance(one, Builder) else one
        if made.sampling.by_request or made.drafting.by_request:
            raise ValueError(
                f"decoder {name!r}, or its draft, has sampling settings for each request, and each repeat decodes other prompts: give one for all"
            )
    at_least(1, "repeats", repeats, "give at least 1")
    at_least(2, "new_tokens", new_tokens, "give at least 2: the prefill gives the first")
    sizes = counts("batches", batches)
    plain = [name for name, one in built.items() if DraftInfo.of(one.draft).longest == 0]
    reference = reference if reference is not None else [*plain, *built][0]
    if reference not in built:
        raise ValueError(f"reference is {reference!r}: there are {', '.join(built)}")
    for name, made in built.items():
        if made.sampling != built[reference].sampling:
            warnings.warn(
                f"decoder {name!r} samples otherwise than {reference!r}, so their speeds answer different questions: give all the same sampling",
                stacklevel=2,
            )
    ids = {name: rows_of(one.target, prompts) for name, one in built.items()}
    for name, made in built.items():  # a prompt that is too long would end a comparison half way
        used = ids[name][: repeats * max(sizes)]
        stop_rules(made, used, new_tokens, eos_token_id, (), (), max(sizes))
    rows: list[dict[str, Any]] = []
    for batch in sizes:
        rows += _at(batch, built, ids, repeats, new_tokens, reference, seed, eos_token_id)
    progress()
    return Live(rows, reference)


def _at(
    batch: int,
    built: Mapping[str, Decoder],
    ids: Mapping[str, list[list[int]]],
    repeats: int,
    new_tokens: int,
    reference: str,
    seed: int,
    eos_token_id: int | Sequence[int] | None,
) -> list[dict[str, Any]]:
    """The rows of one batch size."""
    runs: dict[str, list[Generation]] = {name: [] for name in built}
    for repeat in range(-1, repeats):
        for name, one in shuffled(built.items(), repeat, batch):
            progress(f"{name}, batch {batch}, repeat {repeat + 1} of {repeats}")
            first = max(repeat, 0) * batch
            some = [ids[name][(first + i) % len(ids[name])] for i in range(batch)]
            keys = [seed + first + i for i in range(batch)]
            out = one.generate(some, new_tokens, seed=keys, eos_token_id=eos_token_id)
            sync()
            if repeat >= 0:
                runs[name].append(out)
    decoded = [
        all(out.stats.tokens > out.stats.prefill_tokens for out in outs) for outs in zip(*runs.values())
    ]
    if not any(decoded):
        raise ValueError(
            f"eos_token_id is {eos_token_id}, and at batch {batch} every repeat has a decoder whose rows all end with their first token, so that there is "
            "no speed: give (), more repeats, or other prompts"
        )
    prefill = {name: np.mean([out.stats.seconds["prefill"] for out in outs]) for name, outs in runs.items()}
    runs = {name: [out for out, some in zip(outs, decoded) if some] for name, outs in runs.items()}
    repeats = sum(decoded)
    speed = {name: np.array([out.stats.tokens_per_second for out in outs]) for name, outs in runs.items()}
    kept = [name for name, one in built.items() if one.verifying.lossless]
    best = max(kept or built, key=lambda name: np.log(speed[name]).mean())
    named = repeats > 1 or len(built) == 1  # one run of each shows no winner
    made = []
    for name, outs in runs.items():
        ratio = speed[name] / speed[reference]
        low, high = np.exp(mean_interval(np.log(ratio))).tolist() if repeats > 1 else (None, None)
        row: dict[str, Any] = {
            "method": name,
            "batch": batch,
            "tokens_per_second": float(np.exp(np.log(speed[name]).mean())),
        }
        row |= {
            "tau": sum((out.stats for out in outs), Stats()).tau,
            "ratio": float(np.exp(np.log(ratio).mean())),
        }
        row |= {"ratio_low": low, "ratio_high": high, "repeats": repeats}
        row["prefill_ms"] = 1e3 * float(prefill[name])
        row["same_text"] = _same(built[name], built[reference], outs, runs[reference])
        row |= {"lossless": built[name].verifying.lossless, "best": named and name == best}
        others = [other for other in kept or built if other != name] if row["best"] else []
        row["close"] = [o for o in others if mean_interval(np.log(speed[o] / speed[name]))[1] >= 0]
        made.append(row)
    return made


def _same(
    mine: Decoder, other: Decoder, outs: Sequence[Generation], theirs: Sequence[Generation]
) -> float | None:
    """The share of rows with equal ids, where these must be equal; else ``None``."""
    greedy = mine.sampling.greedy and other.sampling.greedy
    coupled = isinstance(mine.verifier, Coupled) and isinstance(other.verifier, Coupled)
    if not (greedy or coupled) or mine.sampling != other.sampling:
        return None
    equal = [a == b for out, their in zip(outs, theirs) for a, b in zip(out.ids, their.ids)]
    return sum(equal) / len(equal)
