"""What a decoder has captured: whether a timed run captured anything, and a draft's chain by itself, as rounds replay it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.graphs.chain import Chain
from specdec.graphs.programs import Programs
from specdec.graphs.ring_chain import RingChain


def keepers(*parts: Any) -> Iterator[Programs]:
    """The captured programs of targets and drafts, each once."""
    seen = set()
    for part in parts:
        for owner in (part, getattr(part, "model", None), getattr(part, "view", None)):
            for name in ("steps", "programs"):
                made = getattr(owner, name, None)
                if isinstance(made, Programs) and id(made) not in seen:
                    seen.add(id(made))
                    yield made


def captured(*parts: Any) -> list[Any]:
    """Every program that is captured now, those used last at the end."""
    return [
        p for programs in keepers(*parts) for storage in programs._storages for p in storage.programs.values()
    ]


def replay_of_a_chain(draft: Any, batch: int, k: int) -> Replay | None:
    """The chain of ``k`` tokens that the draft has captured for ``batch`` rows, replayed; ``None`` if there is none.

    It works on the numbers of the last round, and writes what that has written.
    """
    for program in reversed(captured(draft)):
        if not isinstance(program, Chain | RingChain):
            continue
        shape = program.shape
        if shape.steps == k and batch <= shape.rows < 2 * max(batch, 1):
            return Replay(program, k + bool(getattr(shape, "earlier", False)))
    return None


class Replay:
    """A captured chain as a function to be timed, which does so many ``forwards``."""

    def __init__(self, program: Any, forwards: int):
        self.program, self.forwards = program, forwards

    def __call__(self) -> Any:
        return self.program.replay()
