"""The distribution of one round's text: all draws and decisions are enumerated, or the first tokens of seeded rows are tested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import chi2, chisquare
from torch import Tensor

from specdec.audit.walk import Branches, ScriptedRng, Walk
from specdec.models import TableModel
from specdec.protocols import Verifier
from specdec.testing.verifier_cases import Asked
from specdec.types import Context


class Races(Exception):
    """The verifier calls ``rng.race``, whose outcomes cannot be enumerated."""


class _NoRaces(ScriptedRng):
    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        raise Races

    def select(self, rows: Tensor) -> _NoRaces:
        return _NoRaces(self.walk, self.rows[rows.numpy()])


def off(verifier: Verifier, asked: Asked, table: TableModel, size: int, last: int) -> float:
    """The total variation from the target, of the text that one round commits and the target continues.

    If it is 0 for every round, the whole text has the target's distribution, by induction, because no round's random numbers are used again.

    Args:
        size: how many nodes of the shape exist. last: the committed token before them.
    Raises:
        Races: the verifier calls ``rng.race``.
    """
    N, V = len(asked.parents), table.vocab_size
    q = asked.distributions((N,), V)
    todo, masses = [Branches.root()], defaultdict[tuple[int, ...], float](float)
    while todo:
        walk = Walk(Branches.join(todo))
        R = len(walk.used)
        context = Context.of([[last]] * R)
        sizes = torch.full((R,), size)
        example = asked.of(verifier, table, context, _NoRaces(walk, np.arange(R)), sizes, q.expand(R, N, V))
        verdict = verifier(*example)
        measures = walk.branches.measure()
        for row, count, measure in zip(verdict.tokens.tolist(), verdict.accepted.tolist(), measures):
            masses[tuple(row[: count + 1])] += float(measure)
        todo = [scripts for _, scripts in walk.left]
    joint = table.joint([last], N + 1).numpy()
    found = np.zeros_like(joint)
    for text, mass in masses.items():
        found[text] += mass * table.joint([last, *text], N + 1 - len(text)).numpy()
    return float(0.5 * (np.abs(found - joint).sum() + abs(1 - sum(masses.values()))))


def first_token(verifier: Verifier, asked: Asked, table: TableModel, rows: int = 8_000) -> float:
    """The p-value of one test of the first tokens of seeded rows, by the last token of the context; 0 if an impossible token was seen."""
    proposal, probs, context, rng = asked.example(verifier, table, rows, seed=3)
    first = verifier(proposal, probs, context, rng).tokens[:, 0]
    last = context.tokens.gather(1, context.length[:, None] - 1)[:, 0]
    V = table.vocab_size
    seen = [torch.bincount(first[last == t], minlength=V).double() for t in range(V)]
    return p_value(torch.stack(seen), torch.stack([table.distribution([t]) for t in range(V)]))


def p_value(seen: Tensor, law: Tensor) -> float:
    """The p-value of the chi-square test of counts ``seen [..., V]``, whose rows are independent; 0 if an impossible token was seen."""
    statistic, freedom = 0.0, 0
    for counts, probs in zip(seen.reshape(-1, seen.shape[-1]), law.reshape(-1, law.shape[-1])):
        some = probs > 0
        if float(counts[~some].sum()):
            return 0.0
        statistic += float(chisquare(counts[some], probs[some] * counts.sum()).statistic)
        freedom += int(some.sum()) - 1
    return float(chi2.sf(statistic, freedom))
