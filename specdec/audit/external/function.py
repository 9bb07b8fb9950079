"""Certifies a whole foreign ``generate``, branch by branch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import fsum
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.audit.certify import Certificate
from specdec.audit.external.scripted import scripted
from specdec.audit.external.tape import Tape
from specdec.audit.external.verifier import ids
from specdec.audit.plain import Ids, Plain, total_variation
from specdec.audit.walk import Branches, Walk
from specdec.rng import Philox


def certify_function(
    run: Callable[[list[int], int], Any], plain: Plain, *, again: int = 16, limit: int = 100_000
) -> Certificate:
    """The exact distance of a foreign ``run(prompt, budget) -> ids`` from the target's distribution.

    ``run`` is called once for every outcome of its random decisions. Its random numbers are named as ``External`` says.

    Args:
        run: returns the new ids, without the prompt, at most ``budget`` of them, as a list or a tensor ``[m]`` or ``[1, m]``.
        plain: the target's distribution (``plain.enumerate_plain``); its prompt and its longest text are what ``run`` is given.
        again: finished branches that are run again in another order, to see that nothing but the random numbers decides.
        limit: the most branches.
    Raises:
        specdec.audit.external.CannotWalk: ``run`` does something with random numbers that cannot be enumerated.
        RuntimeError: more than ``limit`` branches, or ``run`` keeps state between calls.
        ValueError: ``run`` returns a token outside the vocabulary, or more than ``budget``.
    """
    start = perf_counter()
    budget = max(len(text) for text in plain.distribution)
    vocabulary = len(next(iter(plain.after.values())))
    stack, done = [Branches.root()], list[tuple[Branches, Ids]]()
    masses: dict[Ids, list[float]] = defaultdict(list)
    while stack:
        walk, text = _one(run, stack.pop(), plain.prompt, budget, vocabulary)
        masses[text].append(float(walk.branches.measure()[0]))
        done.append((walk.branches, text))
        stack += [scripts for _, scripts in walk.left]
        if len(done) > limit:
            raise RuntimeError(f"more than {limit} branches: use a smaller budget or vocabulary")
    order = np.random.default_rng(0).permutation(len(done))[:again]
    for n in order:
        branches, before = done[n]
        _, after = _one(run, branches, plain.prompt, budget, vocabulary)
        if before != after:
            raise _stateful(f"gave {list(before)} and then, in another order of calls, {list(after)}")
    found = {text: fsum(parts) for text, parts in masses.items()}
    return Certificate(
        total_variation(found, plain.distribution),
        abs(1 - fsum(found.values())),
        len(done),
        perf_counter() - start,
        (found,),
        (plain.distribution,),
    )


def impossible(run: Callable[[list[int], int], Any], plain: Plain) -> list[Ids]:
    """Texts of probability 0 that ``run`` returns when all its uniforms are exactly 0, or all are just below 1.

    ``certify_function`` takes uniforms for real numbers, for which both have probability 0. A float32 uniform is 0 once in 2 ** 24 draws, and
    ``u <= p / q`` then accepts a token with p = 0.
    """
    budget = max(len(text) for text in plain.distribution)
    texts = []
    for u in (0.0, 1 - 2.0**-24):
        with scripted(_Edge(u)):
            texts.append(tuple(ids(run(list(plain.prompt), budget), run)))
    return [text for text in texts if not plain.distribution.get(text, 0.0)]


class _Edge(Tape):
    """All uniforms are u. A draw of a token takes the first or the last one that is possible."""

    def __init__(self, u: float):
        super().__init__(
            Philox(torch.zeros(1, dtype=torch.long)), torch.zeros(1, dtype=torch.long), whole=True
        )
        self.u = u

    def below(self, names: Tensor, level: Tensor, closed: bool | Tensor = False) -> Tensor:
        return (self.u < level) | (torch.as_tensor(closed) & (level == self.u))

    def draw(self, names: Tensor, probs: Tensor) -> Tensor:
        laws = probs.reshape(*names.shape, -1)
        last = laws.shape[-1] - 1
        return (laws > 0).int().argmax(-1) if self.u == 0 else last - (laws.flip(-1) > 0).int().argmax(-1)

    def race(self, names: Tensor, weights: Tensor, flipped: bool = False) -> Tensor:
        return weights.argmax(-1)


def _stateful(what: str) -> RuntimeError:
    return RuntimeError(
        f"with the same random numbers the function {what}: it keeps state between calls, such as a generator that it does not make anew, "
        "so its distribution cannot be certified"
    )


class _Noted(Walk):
    """A walk that notes which keys were asked for."""

    def __init__(self, branches: Branches):
        super().__init__(branches)
        self.asked: set[int] = set()

    def decide(self, row: np.ndarray, code: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        self.asked.update(code.tolist())
        return super().decide(row, code, cuts)


def _one(
    run: Callable[[list[int], int], Any], branches: Branches, prompt: list[int], budget: int, vocabulary: int
) -> tuple[Walk, Ids]:
    walk = _Noted(branches)
    with scripted(Tape(walk.rng(), torch.zeros(1, dtype=torch.long), whole=True)):
        out = run(list(prompt), budget)
    text = tuple(ids(out, run))
    if not set(branches.key[branches.key >= 0].tolist()) <= walk.asked:
        raise _stateful("did not ask for a random number that it had asked for before")
    if len(text) > budget:
        raise ValueError(
            f"the function returned {len(text)} tokens with a budget of {budget}: return the new tokens only"
        )
    for token in text:
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"the function returned the token {token}, which is not in the vocabulary of {vocabulary}"
            )
    return walk, text
