"""Measured rounds of pipelined executors beside a time model that is fitted to serial rounds of other sizes in the same run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch

from specdec.arguments import at_least
from specdec.cost.pipeline import TimeModel
from specdec.decoder import Decoder
from specdec.executors import Pipelined, Serial
from specdec.lab.captured import captured
from specdec.lab.clock import shuffled
from specdec.types import Round


class Part(NamedTuple):
    """A round: its number of rows, the seconds of drafting and of verification, the tokens that were drafted (for ``each`` row, too), and when it ended."""

    rows: int
    draft: float
    verify: float
    drafted: int = 0
    ended: float = 0.0
    each: tuple[int, ...] = ()


class Mode(NamedTuple):
    """An executor's mode: ``serial``, ``steady`` or ``barrier``, the kind of worker, and the number of micro-batches."""

    name: str
    workers: str = ""
    micro_batches: int = 1


@dataclass(frozen=True)
class PipelineComparison:
    """Settings of a comparison.

    Attributes:
        micro_batches: numbers above the batch are left out. workers: ``processes`` and ``threads``. rounds: timed rounds per run.
            repeats: runs of each mode, alternating, after one to warm up.
    Raises:
        ValueError: fewer than 2 rounds, or no repeat.
    """

    micro_batches: tuple[int, ...] = (2, 4)
    workers: tuple[Literal["threads", "processes"], ...] = ("processes", "threads")
    rounds: int = 12
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(2, "rounds", self.rounds, "give 2 or more: runs of a part of the rows have half of them")
        at_least(1, "repeats", self.repeats, "give at least 1")

    def modes(self, batch: int) -> dict[Mode, Any]:
        """The executors by mode; the serial one comes first."""
        out: dict[Mode, Any] = {Mode("serial"): Serial()}
        for workers in self.workers:
            for m in self.micro_batches:
                if m <= batch:
                    out[Mode("steady", workers, m)] = Pipelined(m, workers=workers, ahead=False)
                    if workers == "processes":
                        out[Mode("barrier", workers, m)] = Pipelined(
                            m, workers=workers, ahead=False, barrier=True
                        )
        return out

    def rows(self, name: str, decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """A row for every mode: milliseconds of a round of all prompts, measured and predicted, and the gain over serial rounds.

        Args:
            name: of the draft. prompts: ids.
        Raises:
            ValueError: fewer than 4 prompts.
        """
        at_least(
            4,
            "the batch",
            len(prompts),
            "give 4 rows or more: the time model is fitted to a half and a quarter of them",
        )
        batch, modes = len(prompts), self.modes(len(prompts))
        times: dict[Mode, list[float]] = defaultdict(list)
        parts: dict[Mode, list[Part]] = defaultdict(list)
        samples: list[Part] = []
        sizes = sorted({max(1, batch // part) for part in (2, 4, 8)})
        serial = replace(decoder, executor=Serial())
        alone = {size: waited(for_some(serial, batch, size)) for size in sizes}
        for turn in range(self.repeats + 1):
            for size in sizes:
                found = timed(alone[size], spread(prompts, size), self.rounds // 2, 1, self.seed + turn)[1]
                samples += found if turn else []
            for mode, executor in shuffled(modes.items(), turn, name, batch):
                made = replace(decoder, executor=executor)
                seconds, found = self._run(made, prompts, mode.micro_batches, self.seed + turn)
                if turn:
                    times[mode].append(seconds)
                    parts[mode] += found
        model = TimeModel.fit(part[:3] for part in samples)
        return [self._row(name, batch, mode, model, times, parts[mode]) for mode in modes]

    def _run(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], micro_batches: int, seed: int
    ) -> tuple[float, list[Part]]:
        """``timed``, again if steps were captured meanwhile: other modes may have taken the place of this one's."""
        for _ in range(3):
            before = captured(decoder.target, decoder.draft)
            found = timed(decoder, prompts, self.rounds, micro_batches, seed)
            if all(any(p is q for q in before) for p in captured(decoder.target, decoder.draft)):
                break
        return found

    @staticmethod
    def _row(
        name: str, batch: int, mode: Mode, model: TimeModel, times: dict[Mode, list[float]], parts: list[Part]
    ) -> dict[str, Any]:
        m, serial, seconds = mode.micro_batches, times[Mode("serial")], times[mode]
        predicted = {
            "serial": lambda: model.serial(batch),
            "barrier": lambda: model.barrier(batch, m),
            "steady": lambda: model.steady(batch, m),
        }[mode.name]()
        measured, said = median(seconds), model.serial(batch) / predicted
        gain = median(a / b for a, b in zip(serial, seconds))
        return {
            "draft": name, "batch": batch, "mode": mode.name, "workers": mode.workers or None,
            "micro_batches": m, "milliseconds": 1e3 * measured, "predicted": 1e3 * predicted,
            "ratio": measured / predicted, "gain": gain, "predicted_gain": said,
            "share_of_gain": (gain - 1) / (said - 1) if said > 1.001 else None,
            "draft_slowdown": median(p.draft for p in parts) / model.d(batch / m),
            "verify_slowdown": median(p.verify for p in parts) / model.v(batch / m),
            "serial_milliseconds": 1e3 * median(serial), "draft_model": list(model.draft),
            "verify_model": list(model.verify),
        }  # fmt: skip


class _Enough(Exception):
    """Ends a run after the timed rounds."""


def spread(rows: Sequence[Any], size: int) -> list[Any]:
    """``size`` of the rows: one of each part of equal length, at another place than in the part before, so that rows that alternate still do."""
    step = len(rows) // size
    return [rows[i * step + i % step] for i in range(size)]


def for_some(decoder: Decoder, batch: int, size: int) -> Decoder:
    """The decoder for ``size`` of ``batch`` prompts, spread by ``spread``: where each request has a temperature, with theirs.

    Raises:
        ValueError: there are fewer temperatures than prompts, or the decoder has other settings for each request.
    """
    for name in decoder.sampling.own.keys() - {"temperature"}:
        raise ValueError(f"the decoder has a {name} for each request: give one for all")
    temperature = decoder.sampling.temperature
    if not isinstance(temperature, tuple):
        return decoder
    if len(temperature) < batch:
        raise ValueError(
            f"temperature has {len(temperature)} entries and there are {batch} prompts: give one for each prompt"
        )
    return decoder.with_sampling(replace(decoder.sampling, temperature=spread(temperature[:batch], size)))


def timed(
    decoder: Decoder, prompts: Sequence[Sequence[int]], rounds: int, micro: int, seed: int
) -> tuple[float, list[Part]]:
    """Seconds of a round of all rows, over the middle of a run in which no row ends, and its parts.

    Args:
        rounds: number of timed rounds. micro: micro-batches of a round.
    """
    marks: list[float] = []
    parts: list[Part] = []

    def mark(round: Round) -> None:
        if round.number > 1:
            marks.append(perf_counter())
            s = round.seconds
            each = tuple(round.proposal.size.tolist())
            parts.append(Part(len(each), s["draft"], s["target"] + s["verify"], sum(each), marks[-1], each))
        if len(marks) > rounds * micro:
            raise _Enough

    tokens = (decoder.length + 1) * (rounds + 4)
    with suppress(_Enough):
        decoder.generate([list(p) for p in prompts], tokens, seed=seed, eos_token_id=(), on_round=mark)
    return (marks[-1] - marks[0]) / (len(marks) - 1) * micro, parts[1:]


class _Waited:
    """Mixed into a draft: ``propose`` waits for the device, so that its seconds include the device's work."""

    def propose(self, *args: Any) -> Any:
        answer = super().propose(*args)  # type: ignore[misc]
        torch.cuda.synchronize()
        return answer


def waited(decoder: Decoder) -> Decoder:
    """A decoder whose stage seconds are right on a GPU, too, where ``propose`` otherwise returns before the device is done."""
    if torch.device(getattr(decoder.target, "device", "cpu")).type != "cuda":
        return decoder
    draft: Any = object.__new__(
        type("Waited" + type(decoder.draft).__name__, (_Waited, type(decoder.draft)), {})
    )
    vars(draft).update(vars(decoder.draft))
    return replace(decoder, draft=draft)
