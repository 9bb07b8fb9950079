"""Two drafts merged into one tree: lossless with numbers of their own, biased when they share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import specdec as sd
from specdec.audit.certify import certify
from specdec.rng import Attempt, Key


@dataclass(frozen=True)
class Both:
    """Each of two drafts proposes a chain."""

    a: Any
    b: Any
    shared: bool = False
    name = "both"
    trees = True

    def nodes(self, length):
        return sum(sd.DraftInfo.of(d).nodes(length) for d in (self.a, self.b))

    def init(self, context, target_cache):
        return self.a.init(context, target_cache), self.b.init(context, target_cache)

    def propose(self, state, context, budget, rng):
        keyed = (rng, rng) if self.shared else (Attempt(rng, 0), Attempt(rng, 1))
        one, _ = self.a.propose(state[0], context, budget, keyed[0])
        two, _ = self.b.propose(state[1], context, budget, keyed[1])
        return sd.tree.merge(one, two), state

    def observe(self, state, round):
        return state

    def select(self, state, rows):
        return tuple(d.select(s, rows) for d, s in zip((self.a, self.b), state))


@pytest.mark.parametrize("shared", [False, True])
def test_merged_drafts(shared):
    target, a, b = (sd.TableModel.random(vocab_size=3, order=1, seed=seed) for seed in range(3))
    draft = Both(sd.drafts.Model(a), sd.drafts.Model(b), shared)
    found = certify(sd.decoder(target).draft(draft, length=1).build(), [[0]], 3)
    assert (found.total_variation > 1e-3) if shared else (found.total_variation <= 1e-9)


def test_a_merge_of_merges_is_lossless():
    """Either draft may be a merge itself; the certifier finds the bias of two that share their numbers."""
    target, *three = (sd.TableModel.random(vocab_size=3, order=1, seed=seed) for seed in range(4))
    a, b, c = map(sd.drafts.Model, three)
    for draft in (Both(a, Both(b, c)), Both(Both(a, b), c)):
        found = certify(sd.decoder(target).draft(draft, length=1).build(), [[0]], 3)
        assert found.total_variation <= 1e-9
    shared = Both(a, Both(b, c, shared=True))
    assert certify(sd.decoder(target).draft(shared, length=1).build(), [[0]], 3).total_variation > 1e-3


def test_attempts_are_numbered_within_one_another():
    rng = sd.Philox(torch.tensor([5]))
    key = Key(torch.tensor([3]))
    numbers = [(0, 0), (0, 1), (1, 0), (1, 1), (7, 7)]
    drawn = [float(_uniform(Attempt(Attempt(rng, inner), outer), key)) for outer, inner in numbers]
    plain = [float(rng.uniform(key._replace(attempt=8 * outer + inner))) for outer, inner in numbers]
    assert drawn == plain
    assert float(_uniform(Attempt(rng, 1), key)) == plain[1]
    with pytest.raises(ValueError, match="three Attempts"):
        _uniform(Attempt(Attempt(Attempt(rng, 1), 1), 1), key)
    for wrong in (-1, 8):
        with pytest.raises(ValueError, match=f"attempt is {wrong}: give a number from 0 to 7"):
            Attempt(rng, wrong)


def _uniform(rng, key):
    """The uniform with which ``rng`` decides, found by bisection of acceptance."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        accepted = bool(rng.accept(torch.tensor([middle], dtype=torch.float64), key))
        low, high = (low, middle) if accepted else (middle, high)
    return low
