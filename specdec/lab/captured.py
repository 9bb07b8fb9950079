"""A decoder's captured programs: whether a timed run captured any, and a draft's captured chain as a function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdec.graphs.chain import Chain
from specdec.graphs.programs import Programs
from specdec.graphs.ring_chain import RingChain


def keepers(*parts: Any) -> Iterator[Programs]:
    """The program caches of targets and drafts, and of the models that a draft holds, each once."""
    seen: list[Programs] = []
    for part in parts:
        for owner in (part, *vars(part).values()):
            for made in vars(owner).values() if hasattr(owner, "__dict__") else ():
                if isinstance(made, Programs) and all(made is not other for other in seen):
                    seen.append(made)
                    yield made


def captured(*parts: Any) -> list[Any]:
    """All programs captured by the parts, least recently used first."""
    return [program for programs in keepers(*parts) for program in programs.captured]


@dataclass(frozen=True)
class ReplayedChain:
    """A captured chain of ``forwards`` forwards as a function to be timed."""

    program: Any
    forwards: int

    def __call__(self) -> Any:
        return self.program.replay()


def replay_of_a_chain(draft: Any, batch: int, k: int) -> ReplayedChain | None:
    """The chain of ``k`` tokens that the draft has captured for ``batch`` rows, replayed; ``None`` if there is none.

    It reads the inputs of the last round and overwrites its outputs.
    """
    for program in reversed(captured(draft)):
        if not isinstance(program, Chain | RingChain):
            continue
        if program.shape.steps == k and batch <= program.shape.rows < 2 * max(batch, 1):
            earlier = isinstance(program, RingChain) and program.shape.earlier
            return ReplayedChain(program, k + int(earlier))
    return None
