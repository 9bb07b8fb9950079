"""Timing that quickstart and bench share: decode time without prefill, bare forwards, peak memory, one row shape."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import specdec as sd


def quiet() -> None:
    """No progress bars and advice of transformers between the lines of a table."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def passing(line: str = "") -> None:
    """A line on a terminal that the next one takes the place of; nothing in a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


@dataclass
class Sample:
    """One timed run: decoded tokens and seconds, both from the end of the first round to the end of the last.

    ``full``: seconds, tokens and passes of rows of the rounds in which no row of the batch had ended, or was about to; ``stages``: what
    these rounds' seconds went to.
    """

    tokens: int
    seconds: float
    ids: list[list[int]]
    tau: float | None = None
    peak_bytes: int | None = None
    full: tuple[float, int, int] = (0.0, 0, 0)
    stages: Counter[str] = field(default_factory=Counter)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Case:
    """One line of a table, and its repeats."""

    engine: str
    method: str
    batch: int
    context: int
    temperature: float
    run: Callable[[], Sample]
    k: int | str | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return median(s.speed for s in self.samples)

    @property
    def tau(self) -> float | None:
        return self.samples[-1].tau

    def row(self, plain: Case | None, share: float | None = None) -> dict[str, Any]:
        peaks = [s.peak_bytes for s in self.samples if s.peak_bytes is not None]
        return {
            "engine": self.engine,
            "method": self.method,
            "batch": self.batch,
            "context": self.context,
            "temperature": self.temperature,
            "k": self.k,
            "tokens_per_second": self.speed,
            "tau": self.tau,
            "ratio_to_plain": None if plain is None else self.speed / plain.speed,
            "share_of_ideal": share,
            "peak_bytes": max(peaks) if peaks else None,
        }


def interleave(cases: Sequence[Case], repeats: int, tell: Callable[[str], None]) -> None:
    """Run all cases in turn, ``repeats`` times over, so that a slow minute of the machine falls on all of them alike."""
    for r in range(repeats):
        for case in cases:
            tell(f"{case.engine} {case.method} batch {case.batch} T={case.temperature:g} ({r + 1}/{repeats})")
            with Peak() as peak:
                sample = case.run()
            sample.peak_bytes = peak.bytes
            case.samples.append(sample)


def decode(
    decoder: sd.Decoder, prompts: Sequence[Sequence[int]], batch: int, new_tokens: int, seed: int
) -> Sample:
    """All prompts through ``decoder`` in batches, timed from the end of each batch's prefill round."""
    tokens, seconds, ids = 0, 0.0, []
    full_tokens = full_rounds = 0
    full, stages = (0.0, 0, 0), Counter[str]()
    for i in range(0, len(prompts), batch):
        marks: list[float] = []
        all_in: list[tuple[int, int]] = []  # of each round: tokens and passes, while all rows are in flight

        def look(round: sd.Round, marks: list = marks, all_in: list = all_in) -> None:
            marks.append(perf_counter())
            if round.context.batch == batch and not bool(round.finished.any()):
                all_in.append((int(round.kept.sum()), batch))
                if round.number:
                    parts = dict(round.seconds)
                    stages.update({**parts, "rounds": 1, "other": 2 * parts["total"] - sum(parts.values())})

        out = decoder.generate(
            [list(p) for p in prompts[i : i + batch]],
            new_tokens,
            seed=[seed + i + j for j in range(len(prompts[i : i + batch]))],
            eos_token_id=(),
            on_round=look,
        )
        seconds += marks[-1] - marks[0]
        n = len(all_in) - 1  # the first is the prefill
        if n > 0:
            more = (marks[n] - marks[0], *map(sum, zip(*all_in[1:])))
            full = tuple(a + b for a, b in zip(full, more))  # type: ignore[assignment]
        tokens += out.stats.tokens - out.stats.prefill_tokens
        full_tokens += out.stats.full_tokens
        full_rounds += out.stats.full_rounds
        ids += out.ids
    return Sample(
        tokens, seconds, ids, full_tokens / full_rounds if full_rounds else None, full=full, stages=stages
    )


def bare_forward(
    model: Any, batch: int, context: int, tokens: Sequence[int], repeats: int = 15
) -> list[float]:
    """Median seconds of ``bare_steps``, interleaved."""
    steps = bare_steps(model, batch, context, tokens)
    times: list[list[float]] = [[] for _ in tokens]
    with torch.inference_mode():
        for r in range(repeats + 2):
            for i, step in enumerate(steps):
                start = perf_counter()
                step()
                if r > 1:  # the first two warm up
                    times[i].append(perf_counter() - start)
    return [median(t) for t in times]


def bare_steps(model: Any, batch: int, context: int, tokens: Sequence[int]) -> list[Callable[[], Any]]:
    """Forwards that feed ``tokens[i]`` tokens to each of ``batch`` rows after ``context`` tokens.

    Nothing but the packed forward of the model (no sampling, no bookkeeping): ``HFModel.bare_step``.
    """
    with torch.inference_mode():
        widest = max(tokens)
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.vocab_size, (batch, context + widest), generator=draw)
        cache = model.cache(batch, context + 2 * widest)
        model.prefill(cache, sd.Context.of(ids[:, : context + 1].tolist(), capacity=context + widest))
        steps = []
        for n in tokens:
            text = sd.Context.of(ids[:, : context + 1].tolist(), capacity=context + widest)
            nodes = sd.Proposal.chain(
                ids[:, context + 1 : context + n], torch.full((batch,), n - 1, dtype=torch.long)
            )
            steps.append(model.bare_step(cache, text, nodes if n > 1 else None))
    return steps


class Peak:
    """Peak resident bytes above the start of the block, from the kernel's high-water mark (CUDA: the allocator's).

    ``bytes`` is ``None`` where the system does not tell.
    """

    bytes: int | None = None

    def __enter__(self) -> Peak:
        self.base = None
        if torch.cuda.is_initialized():  # something runs there
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")
                self.base = self._resident("VmRSS")
            except OSError:
                pass
        return self

    def __exit__(self, *error: object) -> None:
        if self.base is None:
            return
        if torch.cuda.is_initialized():
            self.bytes = torch.cuda.max_memory_allocated() - self.base
        else:
            self.bytes = max(0, self._resident("VmHWM") - self.base)

    @staticmethod
    def _resident(name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise OSError(name)


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text; numbers to three figures, ``-`` for what is not known."""

    def show(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
        return str(value)

    lines = [
        [c.replace("tokens_per_second", "tokens/s").replace("_", " ") for c in columns],
        *[[show(row.get(c)) for c in columns] for row in rows],
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def text(line: Sequence[str]) -> str:
        return "  ".join(v.ljust(w) if i < 2 else v.rjust(w) for i, (v, w) in enumerate(zip(line, widths)))

    return "\n".join([text(lines[0]), "  ".join("-" * w for w in widths), *map(text, lines[1:])])
