"""Where a round's time goes: exclusive seconds of specdec's own functions while a decoder runs, without touching any of them.

Python tells the profiler of every call (``sys.setprofile``). What a function of the package takes is its own time, with what it calls
outside of the package (PyTorch, transformers), and without what it calls inside of it.
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
LEAST = 0.01  # share of a round that a function takes to be shown


class Stages:
    """Exclusive seconds and calls by (side, function), while it watches and is on.

    Args:
        sides: the side that a function and all that it calls belong to, by its code (``sides``); the outermost one counts, and
            ``rest`` is everything else's.
        waits: the device is waited for where a function begins and ends, so that its seconds are the device's work, too.
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
        """Count from now on, or not."""
        self._spent()
        self._on = runs

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the body runs, this thread's calls are watched; a profiler that was there before comes back afterwards."""
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
        elif self._stack:  # what was entered before it was watched is not on it
            self._stack.pop()

    def _spent(self) -> None:
        """Charge the time since the last event to the function that runs."""
        now = perf_counter()
        if self._on and self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def _named(self, code: CodeType) -> str | None:
        """A function's name, ``None`` for one that is neither the package's nor the beginning of a side."""
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
    """Print the parts of a round, in milliseconds; a plain run before says what watching itself costs.

    Args:
        method: what the decoder is called. groups, new_tokens: as for ``steady``.
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
