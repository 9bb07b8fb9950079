"""What a decoder has captured: whether a timed run captured anything, and a draft's chain by itself, as rounds replay it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdec.graphs.chain import Chain
from specdec.graphs.programs import Programs
from specdec.graphs.ring_chain import RingChain


def keepers(*parts: Any) -> Iterator[Programs]:
    """The captured programs of targets and drafts, and of the models that a draft holds, each once."""
    seen: list[Programs] = []
    for part in parts:
        for owner in (part, *vars(part).values()):
            for made in vars(owner).values() if hasattr(owner, "__dict__") else ():
                if isinstance(made, Programs) and all(made is not other for other in seen):
                    seen.append(made)
                    yield made


def captured(*parts: Any) -> list[Any]:
    """Every program of the parts that is captured now, those used last at the end."""
    return [program for programs in keepers(*parts) for program in programs.captured]


@dataclass(frozen=True)
class Replay:
    """A captured chain as a function to be timed, which does so many ``forwards``."""

    program: Any
    forwards: int

    def __call__(self) -> Any:
        return self.program.replay()


def replay_of_a_chain(draft: Any, batch: int, k: int) -> Replay | None:
    """The chain of ``k`` tokens that the draft has captured for ``batch`` rows, replayed; ``None`` if there is none.

    It works on the numbers of the last round, and writes what that has written.
    """
    for program in reversed(captured(draft)):
        if not isinstance(program, Chain | RingChain):
            continue
        if program.shape.steps == k and batch <= program.shape.rows < 2 * max(batch, 1):
            earlier = isinstance(program, RingChain) and program.shape.earlier
            return Replay(program, k + int(earlier))
    return None
