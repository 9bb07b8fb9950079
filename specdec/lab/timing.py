"""Seconds of a whole round, measured on this machine: decoders in turn, by batch and context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from specdec.arguments import at_least, counts
from specdec.builder import Builder
from specdec.decoder import Decoder
from specdec.lab import plots
from specdec.lab.clock import middle, shuffled, sync
from specdec.lab.console import Framed, progress, table
from specdec.prompts import Prompts, rows_of
from specdec.types import Round


@dataclass(frozen=True, eq=False)
class Times(Framed):
    """Measured round times.

    Attributes:
        rounds: (method, k, batch, context) -> the seconds of a round in each repeat, as in ``clock.middle``.
    """

    rounds: Mapping[tuple[str, int, int, int], Sequence[float]]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The measured batches and contexts."""
        return sorted({key[2:] for key in self.rounds})

    def seconds(self, method: str, batch: int, context: float, k: int) -> float:
        """The seconds of a round, as in ``clock.middle``.

        Raises:
            ValueError: it was not measured.
        """
        return float(middle(self.repeats(method, batch, context, k)))

    def repeats(self, method: str, batch: int, context: float, k: int) -> Sequence[float]:
        """The seconds of a round in each repeat; errors as for ``seconds``."""
        found = self.rounds.get((method, k, batch, int(context)))
        if found is None:
            raise ValueError(
                f"no time of {method} with k = {k} at batch {batch} and context {context:g}: give lab.time a decoder of this name and length, and "
                "this batch and context"
            )
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each method and place, with the least and the greatest of the repeats."""
        names = ("method", "k", "batch", "context")
        return [
            dict(zip(names, key)) | {"seconds": float(middle(some)), "least": min(some), "most": max(some)}
            for key, some in self.rounds.items()
        ]

    def plot(self) -> Any:
        """A matplotlib figure: milliseconds of a round of every method, and the range of the repeats; a panel for each batch and context."""
        places = self.places
        names = list(dict.fromkeys(f"{r['method']} {r['k']}" if r["k"] else r["method"] for r in self.rows))
        figure, (row_of_panels,) = plots.panels(
            1, len(places), (1.6 + 2.6 * len(places), 1.2 + 0.3 * len(names)), bare=True, sharey=True
        )
        for axes, place in zip(row_of_panels, places):
            for r in (r for r in self.rows if (r["batch"], r["context"]) == place):
                at = names.index(f"{r['method']} {r['k']}" if r["k"] else r["method"])
                axes.barh(at, 1e3 * r["seconds"], color="#1f77b4")
                axes.plot([1e3 * r["least"], 1e3 * r["most"]], [at, at], color="black", lw=1)
            axes.set_title(f"batch {place[0]}, context {place[1]}", loc="left")
            axes.set_xlabel("milliseconds a round")
            axes.set_yticks(range(len(names)), names)
        row_of_panels[0].invert_yaxis()
        figure.tight_layout()
        return figure

    def __repr__(self) -> str:
        rows = [{**row, "milliseconds": 1e3 * row["seconds"]} for row in self.rows]
        return table(rows, ("method", "k", "batch", "context", "milliseconds"))


def time(
    decoders: Mapping[str, Decoder | Builder] | Sequence[tuple[str, Decoder | Builder]],
    prompts: Prompts,
    batches: int | Sequence[int] = (1, 8),
    contexts: int | Sequence[int] = (256,),
    rounds: int = 12,
    repeats: int = 5,
    seed: int = 0,
) -> Times:
    """Time whole rounds of decoders: drafting, verification, bookkeeping.

    All decoders run in turn, so that a slow moment of the machine affects all alike, with fresh random numbers in every repeat. A first run of
    each, which compiles and warms up, is not counted. The number of threads is the caller's (``torch.set_num_threads``).

    Args:
        decoders: by name, or pairs of a name and a decoder where one method has several lengths, built or not; include plain decoding as
            ``"plain"``.
        prompts: as for ``generate``; each batch takes the first ``context`` tokens of long enough ones, in turn.
        batches, contexts: rows decoded together, and tokens of their prompts. rounds: timed in each repeat, after the prefill.
    Raises:
        ValueError: there are no decoders, no prompt has a context's tokens, or a number is below 1. TypeError: a decoder is none.
    """
    named: list[tuple[str, Decoder]] = []
    for name, one in decoders.items() if isinstance(decoders, Mapping) else decoders:
        if not isinstance(one, (Builder, Decoder)):
            raise TypeError(f"decoder {name!r} is a {type(one).__name__}: give sd.decoder(target).draft(...)")
        named.append((name, one.build() if isinstance(one, Builder) else one))
    if not named:
        raise ValueError("decoders is empty: give at least one, {'name': decoder}")
    for name, value in {"rounds": rounds, "repeats": repeats}.items():
        at_least(1, name, value, "give at least 1")
    sizes, ids = counts("batches", batches), rows_of(named[0][1].target, prompts)
    made: dict[tuple[str, int, int, int], list[float]] = {}
    for context in counts("contexts", contexts):
        long = [row[:context] for row in ids if len(row) >= context]
        if not long:
            raise ValueError(f"no prompt has {context} tokens: give longer prompts, or smaller contexts")
        for batch in sizes:
            rows = [long[i % len(long)] for i in range(batch)]
            places = [
                (name, 0 if one.drafting.info.longest == 0 else one.length, batch, context)
                for name, one in named
            ]
            made |= {place: [] for place in places}
            for repeat in range(-1, repeats):
                for place, (name, decoder) in shuffled(zip(places, named), repeat, batch, context):
                    progress(
                        f"{name} k = {decoder.length}, batch {batch}, context {context}, repeat {repeat + 1} of {repeats}"
                    )
                    spent = _rounds(decoder, rows, rounds if repeat >= 0 else 2, seed + 1000 * (repeat + 1))
                    if repeat >= 0:
                        made[place].append(float(middle(spent)))
    progress()
    return Times(made)


class _Enough(Exception):
    """Enough rounds were timed."""


def _rounds(decoder: Decoder, rows: list[list[int]], count: int, seed: int) -> list[float]:
    """Seconds of ``count`` rounds of all rows, while all are active. In a pipeline each micro-batch reports its own rounds; one of each is a round of
    all rows."""
    marks: list[float] = []
    parts = prefills = 0

    def mark(round: Round) -> None:
        nonlocal parts, prefills
        if parts < 2:  # in a pipeline the device may be drafting for another micro-batch
            sync()
        marks.append(perf_counter())
        if not round.number:
            parts, prefills = parts + 1, len(marks)
        if len(marks) - prefills >= count * parts:
            raise _Enough

    budget = 2 + (count + 1) * (decoder.length + 1)
    seeds = [seed + i for i in range(len(rows))]
    with suppress(_Enough):
        decoder.generate(rows, budget, seed=seeds, eos_token_id=(), on_round=mark)
    ends = torch.tensor(marks[max(prefills - 1, 0) :: max(parts, 1)], dtype=torch.float64)
    return ends.diff().tolist()
