"""Two drafts merged into one tree: lossless with numbers of their own, biased when they share them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import specdec as sd
from specdec.audit.certify import certify
from specdec.rng import Attempt


@dataclass(frozen=True)
class Both:
    """Each of two drafts proposes a chain."""

    a: sd.drafts.Model
    b: sd.drafts.Model
    shared: bool = False
    name = "both"
    trees = True

    def nodes(self, length):
        return 2 * length

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
