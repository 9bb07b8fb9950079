"""Runs all branches of a decoder on some prompts, batch by batch, and adds up what they emit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from specdec.audit.plain import Ids, Numbered, Plain
from specdec.audit.walk import Branches, Walk, pack, race_key, take

Run = Callable[[Walk, np.ndarray], list[Ids]]


class Enumeration:
    """The branches of all prompts: those that are left, and what the others emitted.

    Args:
        run: the ids that each branch of a walk emits; the array is each branch's prompt. alone: each branch runs without others.
        plain, numbered: the targets' distributions of the prompts, and, for ``Coupled``, their numbers.
    Attributes:
        left: of each prompt, a stack of branches. masses: of each prompt, text -> the measures of its branches. astray: of each prompt, measures
            of branches off their paths. sample: some branches of every batch, their prompts and texts. done: of each prompt, the
            probability of the branches that ran; ``count`` is their number.
    """

    def __init__(self, run: Run, alone: bool, plain: list[Plain], numbered: Numbered | None):
        self.run, self.alone, self.plain, self.numbered = run, alone, plain, numbered
        self.left = [[Branches.root()] for _ in plain]
        self.masses: list[dict[Ids, list[float]]] = [defaultdict(list) for _ in plain]
        self.astray: list[list[float]] = [[] for _ in plain]
        self.sample: list[tuple[Branches, np.ndarray, list[Ids]]] = []
        self.done, self.count = [0.0 for _ in plain], 0

    @property
    def share(self) -> float:
        """The probability of the branches that ran."""
        return sum(self.done) / len(self.done)

    def go_on(self, batch: int) -> None:
        """Run up to ``batch`` branches. A finished prompt stays in the batch, so that every branch runs beside every prompt."""
        wanted = np.array([bool(stack) for stack in self.left])
        rows = len(self.left)
        here = [int(wanted.argmax())] if self.alone else list(range(rows))
        size = 1 if self.alone else max(1, batch // rows)
        parts = [take(self.left[row], size) if wanted[row] else Branches.root() for row in here]
        owner = np.repeat(here, [len(part) for part in parts])
        walk = Walk(Branches.join(parts), self.numbered)
        ids = self.run(walk, owner)
        measure = walk.branches.measure()
        self.count += int(wanted[owner].sum())
        self._add(owner, ids, measure, wanted)
        self._put_back(walk, owner, wanted)
        if self.numbered is not None:
            wrong = off_path(walk.branches, owner, ids, self.plain, self.numbered)
            for row in wanted.nonzero()[0]:
                self.astray[row].append(float(measure[wrong & (owner == row)].sum()))
        # If two distributions agree up to rounding, their residual is rounding error, and a branch of that measure depends on it.
        real = (measure > 1e-9).nonzero()[0]
        some = real[np.linspace(0, len(real) - 1, min(len(real), 64)).astype(int)] if len(real) else real
        self.sample.append((walk.branches.select(some), owner[some], [ids[b] for b in some]))

    def _add(self, owner: np.ndarray, ids: list[Ids], measure: np.ndarray, wanted: np.ndarray) -> None:
        """Add the texts of the prompts that are not finished."""
        for row, text, mass in zip(owner.tolist(), ids, measure.tolist()):
            if wanted[row]:
                self.masses[row][text].append(mass)
                self.done[row] += mass

    def _put_back(self, walk: Walk, owner: np.ndarray, wanted: np.ndarray) -> None:
        """Put the branches that a walk has left on the stacks of their prompts."""
        for from_row, scripts in walk.left:
            for row in wanted.nonzero()[0]:
                mine = (owner[from_row] == row).nonzero()[0]
                if len(mine):
                    self.left[row].append(scripts.select(mine))


def off_path(
    branches: Branches, owner: np.ndarray, ids: list[Ids], plain: list[Plain], numbered: Numbered
) -> np.ndarray:
    """``[R]`` whether what was committed differs from the target's draws along the path that they make."""
    wrong = np.zeros(len(owner), dtype=bool)
    every = np.arange(len(owner))
    for step in range(max(len(one) for one in ids)):
        here = np.array([step < len(one) for one in ids])
        number = np.array(
            [numbered.of[r].get(one[:step], -1) if h else 0 for r, one, h in zip(owner, ids, here)]
        )
        position = torch.tensor([len(plain[r].prompt) + step for r in owner])
        slot = branches.key == pack(race_key(position, number))[:, None]
        middle = 0.5 * (branches.low + branches.high)[every, slot.argmax(1)]
        cdf = np.stack(numbered.distributions)[number].cumsum(1)
        draw = (cdf <= (middle * cdf[:, -1])[:, None]).sum(1)
        said = np.array([one[step] if h else 0 for one, h in zip(ids, here)])
        wrong |= here & ((draw != said) | ~slot.any(1) | (number < 0))
    return wrong
