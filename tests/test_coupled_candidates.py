"""``Coupled`` with several candidates: its acceptance by integration, and texts that do not depend on the draft."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import chisquare

import specdec as sd
from specdec.audit.certify import certify_coupled
from specdec.rng import Attempt, Key, Philox, _seed_of, race_arrivals, seeds
from specdec.verifiers.acceptance import optimum, single

ROWS = 40_000
T3, T6 = (([0.45, 0.45, 0.1], [0.2, 0.3, 0.5]), ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]))


def agreement(p, q, k):
    """The probability that one of k races over q has the winner of the first of all k races over p, by integrals over its time.

    Race i is won by token v at time m, with density p_v exp(-k m). Given this, every number of the races is E_u = m p_u + an exponential,
    except for E_v = m p_v in race i. So race i over q is won by v with probability ``own``, every other one with probability ``other``,
    independently.
    """

    def others(v, m):
        # E_v = m p_v + s: token u is slower if E_u > q_u E_v / q_v, which binds from the s at which this passes m p_u.
        kinks = sorted({0.0, *(max(0.0, m * (p[u] * q[v] / q[u] - p[v])) for u in range(len(p)) if q[u])})

        def density(s):
            slack = (max(0.0, q[u] / q[v] * (m * p[v] + s) - m * p[u]) for u in range(len(p)) if u != v)
            return np.exp(-s - sum(slack))

        parts = [quad(density, a, b, epsabs=1e-9)[0] for a, b in pairwise(kinks)]
        return sum(parts) + quad(density, kinks[-1], np.inf, epsabs=1e-9)[0]

    def at(v, m):
        slack = (max(0.0, q[u] * p[v] / q[v] - p[u]) for u in range(len(p)) if u != v)
        own = np.exp(-m * sum(slack))
        other = others(v, m) if k > 1 else 0.0
        return k * p[v] * np.exp(-k * m) * (1 - (1 - own) * (1 - other) ** (k - 1))

    tokens = [v for v in range(len(p)) if p[v] and q[v]]
    return sum(quad(lambda m, v=v: at(v, m), 0, np.inf, epsabs=1e-7)[0] for v in tokens)


def accepted(p, q, k, rows=ROWS, candidates=None):
    """The share of rows in which a node is accepted, and the tokens that are committed first."""
    verifier = sd.Coupled(candidates=k)
    rng, context = Philox(seeds(3, rows)), sd.Context.of([[0]] * rows)
    p, q = (torch.tensor(law, dtype=torch.float64) for law in (p, q))
    n = candidates or k
    key = Key(context.length[:, None], 0, torch.arange(n).expand(rows, n))
    tokens = verifier.for_draft(rng).categorical(q.expand(rows, n, -1), key)
    proposal = sd.Proposal(
        tokens, torch.full((rows, n), -1), torch.full((rows,), n), q.expand(rows, n, -1), "sampled"
    )
    verdict = verifier(proposal, p.expand(rows, n + 1, -1), context, rng)
    return float(verdict.accepted.double().mean()), verdict.tokens[:, 0], tokens


@pytest.mark.parametrize(
    ("pair", "k", "known"), [(T6, 1, None), (T6, 2, 0.6824), (T3, 2, None), (T6, 3, None)]
)
def test_acceptance_is_that_of_the_races(pair, k, known):
    share, first, _ = accepted(*pair, k)
    exact = agreement(*pair, k)
    if known is not None:
        assert exact == pytest.approx(known, abs=5e-5)
    assert share == pytest.approx(exact, abs=4 * 0.5 / ROWS**0.5)
    p, q = (torch.tensor(law, dtype=torch.float64) for law in pair)
    assert exact <= float(optimum(p, q, k)) + 1e-6
    assert exact > float(single(p, q)) - (k == 1)
    ratio = torch.maximum(q / q[:, None], p / p[:, None]) + (k - 1) * p / p[:, None]
    assert exact >= float((k / ratio.sum(1)).sum()) - 1e-6  # the paper's list matching lemma
    assert chisquare(torch.bincount(first, minlength=3).double(), p * ROWS).pvalue > 1e-3


def test_one_race_is_coupled_as_before():
    """By its closed form: the winners agree with probability sum_v 1 / sum_u max(p_u / p_v, q_u / q_v)."""
    p, q = T6
    exact = sum(1 / sum(max(p[u] / p[v], q[u] / q[v]) for u in range(3)) for v in range(3))
    assert agreement(p, q, 1) == pytest.approx(exact, abs=1e-6)


def test_candidates_are_independent_draws_and_a_draft_like_the_target_is_always_accepted():
    _, _, tokens = accepted(*T6, 2)
    table = np.histogram2d(*tokens.T.numpy(), bins=3)[0]
    expected = np.outer(T6[1], T6[1]) * len(tokens)
    assert chisquare(table.ravel(), expected.ravel()).pvalue > 1e-3
    assert accepted(T6[0], T6[0], 3, rows=2000)[0] == 1.0
    # In a race without a candidate the other's winner is the same by chance.
    alone = accepted(T6[0], T6[0], 2, candidates=1, rows=20_000)[0]
    assert alone == pytest.approx((1 + sum(x * x for x in T6[0])) / 2, abs=0.015)


def test_the_race_of_several_streams_is_the_first_arrival_of_all():
    """Against the definition: the token of the least time over streams, from each stream's arrival times."""
    rows, V = 50, 40
    draw = torch.Generator().manual_seed(0)
    p = torch.rand(rows, 2, V, generator=draw, dtype=torch.float64) ** 4
    p[:, 0, ::3] = 0
    p /= p.sum(-1, keepdim=True)
    rng, at = Philox(seeds(2, rows)), torch.arange(rows)[:, None] + torch.arange(2)
    alone = [rng.race(p, at, (k,)) for k in range(4)]
    assert torch.equal(alone[0], rng.race(p, at))
    assert len({tuple(one.flatten().tolist()) for one in alone}) == 4
    times = torch.stack(
        [race_arrivals(p[:, n], _seed_of(rng.seed, k), at[:, n]) for n in range(2) for k in range(4)]
    ).view(2, 4, rows, V)
    first = times.amin(1).argmin(-1).T
    assert torch.equal(rng.race(p, at, range(4)), first)
    some = torch.tensor([7, 3, 30])
    assert torch.equal(rng.select(some).race(p[some], at[some], range(4)), first[some])
    assert torch.equal(Attempt(rng, 1).race(p, at, range(4)), first)


TARGET, SMALL = sd.TableModel.random(6, 2, seed=0), sd.TableModel.random(6, 1, seed=1)
PROMPTS = [[0], [1, 2], [3, 4, 5, 0]]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    k=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    depth=st.integers(1, 3),
    temperature=st.sampled_from([0.5, 1.0]),
)
def test_texts_are_those_of_plain_decoding_with_the_same_candidates(k, seed, depth, temperature):
    base = sd.decoder(TARGET).sampling(temperature=temperature).verifier(sd.Coupled(candidates=k))
    budgets = [17, 5, 11]
    plain = base.build().generate(PROMPTS, budgets, seed=seed).ids
    for draft, length in (
        (sd.drafts.Tree(SMALL, (k,) * depth), depth),
        (sd.drafts.Tree(SMALL, (1, 3)), 2),
        (SMALL, 3),
        (sd.drafts.NGram(), 3),
    ):
        assert base.draft(draft, length).build().generate(PROMPTS, budgets, seed=seed).ids == plain
    each = seeds(seed, 3).tolist()
    alone = base.draft(sd.drafts.Tree(SMALL, (k,) * depth), depth).build()
    assert alone.generate([PROMPTS[1]], 5, seed=[each[1]]).ids == [plain[1]]


def test_other_numbers_of_candidates_give_other_texts():
    texts = {
        k: sd.decoder(TARGET).verifier(sd.Coupled(candidates=k)).build().generate(PROMPTS, 20, seed=0).ids
        for k in (1, 2, 3)
    }
    assert texts[1] != texts[2] != texts[3] != texts[1]
    assert texts[1] == sd.decoder(TARGET).verifier(sd.Coupled()).build().generate(PROMPTS, 20, seed=0).ids


def test_more_candidates_are_accepted_more_often():
    prompts = [[b % 6] for b in range(100)]
    taus = []
    for k in (1, 2, 3):
        decoder = (
            sd.decoder(TARGET).draft(sd.drafts.Tree(SMALL, (k, k)), 2).verifier(sd.Coupled(candidates=k))
        )
        taus.append(decoder.build().generate(prompts, 40, seed=0).stats.tau)
    assert taus[0] + 0.1 < taus[1] < taus[2] - 0.05


def test_certified_path_by_path():
    found = certify_coupled(
        sd.decoder(sd.TableModel.random(3, 1, seed=0)).verifier(sd.Coupled(candidates=2)).build(), nodes=2
    )
    assert found.lossless
    assert found.astray == 0


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_numbers_of_candidates_are_named(value, error):
    with pytest.raises(error, match=f"candidates is {value}"):
        sd.Coupled(candidates=value)
