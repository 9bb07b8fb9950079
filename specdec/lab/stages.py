"""A profile of rounds: exclusive seconds of specdec's functions while a decoder runs, without patching any of them.

Python reports every call to a profiler (``sys.setprofile``). The time of a function of the package includes the calls that it makes
outside of the package (PyTorch, transformers), and excludes those inside.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

import torch

from specdec.decoder import Decoder
from specdec.lab.clock import sync
from specdec.lab.prefill import Group
from specdec.lab.steady import steady

PACKAGE = Path(__file__).resolve().parents[1]
LEAST = 0.01  # functions below this share of a round are not shown


class Stages:
    """Exclusive seconds and calls by (side, function), while watching and counting.

    Args:
        sides: the side (draft, target) of a function and all of its calls, by the function's code (``sides``); the outermost one
            counts, and everything else is ``rest``.
        waits: wait for the device where a function begins and ends, so that its seconds include the device's work.
    Attributes:
        seconds, calls: by (side, name); a name is module and function, ``models.hf: HFModel.score``.
    """

    def __init__(self, sides: Mapping[CodeType, str] | None = None, waits: bool = False):
        self.sides, self.waits = dict(sides or {}), waits
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: Counter[tuple[str, str]] = Counter()
        self._on = False
        self._names: dict[CodeType, str | None] = {}
        self._stack: list[tuple[str, str]] = []
        self._since = 0.0

    def clock(self, runs: bool) -> None:
        """Start or stop counting."""
        self._spent()
        self._on = runs

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread's calls in the body; an earlier profiler is restored afterwards."""
        before = sys.getprofile()
        self._stack, self._since = [], perf_counter()
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        name = self._names[code] if code in self._names else self._named(code)
        if name is None:
            return
        if self.waits:
            sync()
        self._spent()
        if event == "call":
            side = self._stack[-1][0] if self._stack else "rest"
            side = self.sides.get(code, side) if side == "rest" else side
            self._stack.append((side, name))
            if self._on:
                self.calls[side, name] += 1
        elif self._stack:  # calls entered before watching are not on the stack
            self._stack.pop()

    def _spent(self) -> None:
        """Charge the time since the last event to the current function."""
        now = perf_counter()
        if self._on and self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def _named(self, code: CodeType) -> str | None:
        """A function's name; ``None`` if it is neither the package's nor the beginning of a side."""
        file, name = Path(code.co_filename), None
        if file.is_relative_to(PACKAGE) and not file.is_relative_to(PACKAGE / "lab"):
            name = f"{'.'.join(file.relative_to(PACKAGE).with_suffix('').parts)}: {code.co_qualname}"
        elif code in self.sides:
            name = f"{file.stem}: {code.co_qualname}"
        self._names[code] = name
        return name


def sides(decoder: Decoder) -> dict[CodeType, str]:
    """The two sides of a decoder: its draft's ``propose`` and ``observe``, and its target's ``score``."""
    draft = dict.fromkeys(("propose", "observe"), "draft")
    found: dict[CodeType, str] = {}
    for part, names in ((decoder.draft, draft), (decoder.target, {"score": "target"})):
        for kind in type(part).__mro__:
            for name in names.keys() & vars(kind).keys():
                found[inspect.unwrap(vars(kind)[name]).__code__] = names[name]
    return found


def profile(method: str, decoder: Decoder, groups: Sequence[Group], new_tokens: int) -> Stages:
    """Print the parts of a round, in milliseconds, and a plain run's time, which shows the profiler's overhead.

    Args:
        method: the decoder's name. groups, new_tokens: as for ``steady``.
    """
    steady(decoder, groups, new_tokens)
    plain = steady(decoder, groups, new_tokens)
    stages = Stages(sides(decoder), waits=torch.cuda.is_initialized())
    with stages.watching():
        run = steady(decoder, groups, new_tokens, stages.clock)
    rounds, whole = run.rounds, run.seconds / run.rounds
    print(
        f"\n{method}, k = {decoder.length if method != 'plain' else 0}: {plain.round_seconds * 1e3:.2f} ms a round, "
        f"{whole * 1e3:.2f} when watched; tau {plain.stats.tau:.2f}, {plain.speed:.0f} tokens/s"
    )
    shown = 0.0
    for (side, name), seconds in sorted(stages.seconds.items(), key=lambda kv: (kv[0][0], -kv[1])):
        share = seconds / rounds / whole
        if share >= LEAST:
            shown += seconds / rounds
            calls = stages.calls[side, name] / rounds
            print(
                f"  {side:<6} {name:<52} {seconds / rounds * 1e3:8.3f} ms  {calls:5.1f} calls  {share:6.1%}"
            )
    rest = f"functions below {LEAST:.0%}"
    print(f"  {'':<6} {rest:<52} {(whole - shown) * 1e3:8.3f} ms               {1 - shown / whole:6.1%}")
    return stages
