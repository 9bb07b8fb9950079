"""Acceptance of several candidates, against linear programs, all subsets and enumerated draws."""

from __future__ import annotations

from itertools import chain, combinations, permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from specdec.verifiers import acceptance

T3 = [0.45, 0.45, 0.1], [0.2, 0.3, 0.5]
T6 = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]


def tensors(pair):
    return [torch.tensor(one, dtype=torch.float64) for one in pair]


@st.composite
def pairs(draw, least=2, most=5):
    """Two distributions over a few tokens: zeros, ties, equal ones and disjoint supports are likely."""
    V = draw(st.integers(least, most))
    weights = st.lists(st.integers(0, 6), min_size=V, max_size=V).filter(any)
    p = np.array(draw(weights), dtype=float)
    q = p if draw(st.integers(0, 9)) == 0 else np.array(draw(weights), dtype=float)
    return torch.from_numpy(p / p.sum()), torch.from_numpy(q / q.sum())


def draws(q, k, replacement):
    """Every sequence of draws with its probability; without replacement there may be fewer than k."""
    if replacement:
        for x in product(range(len(q)), repeat=k):
            yield x, float(np.prod([q[v] for v in x]))
        return
    k = min(k, sum(v > 0 for v in q))
    for x in permutations(range(len(q)), k):
        left, weight = 1.0, 1.0
        for v in x:
            weight *= q[v] / left if left > 0 else 0
            left -= q[v]
        if weight > 0:
            yield x, weight


def program(p, q, k, replacement):
    """The linear program of optimal transport: the flow from every sequence of draws to its tokens."""
    p, q = p.tolist(), q.tolist()
    cases = [(set(x), w) for x, w in draws(q, k, replacement) if w > 0]
    arcs = [(i, y) for i, (x, _) in enumerate(cases) for y in sorted(x)]
    limits = np.zeros((len(cases) + len(p), len(arcs)))
    for a, (i, y) in enumerate(arcs):
        limits[i, a] = limits[len(cases) + y, a] = 1
    most = [w for _, w in cases] + p
    return -linprog(-np.ones(len(arcs)), limits, most, method="highs").fun


def by_subsets(p, q, k, replacement):
    V = len(p)
    some = list(draws(q.tolist(), k, replacement))
    sets = chain.from_iterable(combinations(range(V), n) for n in range(V + 1))
    return 1 + min(
        sum(float(p[v]) for v in S) - sum(w for x, w in some if set(x) <= set(S)) for S in map(set, sets)
    )


def by_enumeration(p, q, k, replacement):
    """Recursive rejection, draw by draw."""
    rejected = 0.0
    for x, weight in draws(q.tolist(), k, replacement):
        left, law = p.clone(), q.clone()
        for v in x:
            weight *= 1 - min(1.0, float(left[v] / law[v]))
            rest = (left - law).clamp(min=0)
            left = rest / rest.sum() if rest.sum() > 1e-14 else left
            if not replacement:
                law[v] = 0
                law = law / law.sum() if law.sum() > 0 else law
        rejected += weight
    return 1 - rejected


@pytest.mark.parametrize(
    ("pair", "one", "two", "kseq", "rho", "best", "distinct", "best_distinct", "greedy", "top"),
    [
        (T6, 0.6, 0.68, 0.7081, 1.5403, 0.76, 0.76, 0.885714, 0.8, 0.4),
        (T3, 0.6, 0.80, 0.8150, 1.4301, 0.85, 0.91, 1.0, 0.95, 0.55),
    ],
)
def test_known_pairs(pair, one, two, kseq, rho, best, distinct, best_distinct, greedy, top):
    p, q = tensors(pair)
    found = [
        acceptance.single(p, q),
        acceptance.recursive(p, q, 2),
        acceptance.kseq(p, q, 2),
        acceptance.kseq_scale(p, q, 2),
        acceptance.optimum(p, q, 2),
        acceptance.recursive(p, q, 2, replacement=False),
        acceptance.optimum(p, q, 2, replacement=False),
        acceptance.greedy_set(p, q, 2),
        acceptance.top_points(p, q, 2),
    ]
    expected = [one, two, kseq, rho, best, distinct, best_distinct, greedy, top]
    assert [float(x) for x in found] == pytest.approx(expected, abs=5e-5)


@settings(max_examples=60, deadline=None)
@given(pair=pairs(most=4), k=st.integers(1, 3), replacement=st.booleans())
def test_the_optimum_is_that_of_the_linear_program_and_of_all_subsets(pair, k, replacement):
    best = float(acceptance.optimum(*pair, k, replacement))
    assert best == pytest.approx(by_subsets(*pair, k, replacement), abs=1e-12)
    assert best == pytest.approx(program(*pair, k, replacement), abs=1e-8)


@settings(max_examples=60, deadline=None)
@given(pair=pairs(least=5, most=6), k=st.integers(2, 4))
def test_without_replacement_the_smallest_set_is_a_prefix_too(pair, k):
    """An integral gives all prefixes at once; here every set, and every sequence of draws."""
    best = float(acceptance.optimum(*pair, k, replacement=False))
    assert best == pytest.approx(by_subsets(*pair, k, False), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(pair=pairs(), k=st.integers(1, 4), replacement=st.booleans())
def test_recursive_rejection_is_that_of_enumerated_draws(pair, k, replacement):
    k = k if replacement else min(k, 3)
    found = float(acceptance.recursive(*pair, k, replacement))
    assert found == pytest.approx(by_enumeration(*pair, k, replacement), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(pair=pairs(), k=st.integers(1, 6))
def test_nothing_is_above_its_optimum(pair, k):
    p, q = pair
    one, best = acceptance.single(p, q), acceptance.optimum(p, q, k)
    token, blocks = acceptance.recursive(p, q, k), acceptance.kseq(p, q, k)
    distinct = acceptance.optimum(p, q, k, replacement=False)
    assert one - 1e-12 <= token <= best + 1e-12
    assert one - 1e-12 <= blocks <= best + 1e-12
    assert blocks >= (1 - (1 - 1 / k) ** k) * best - 1e-12
    assert best <= distinct + 1e-12
    assert distinct <= 1 + 1e-12
    assert (
        acceptance.recursive(p, q, min(k, 3), replacement=False)
        <= acceptance.optimum(p, q, min(k, 3), replacement=False) + 1e-12
    )
    if k == 1:
        for other in (token, blocks, best, distinct, acceptance.greedy_set(p, q, 1)):
            assert float(other) == pytest.approx(float(one), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(pair=pairs(), k=st.integers(1, 4))
def test_the_scale_of_kseq_is_the_smallest_with_a_residual(pair, k):
    p, q = pair
    rho = acceptance.kseq_scale(p, q, k)

    def rest(rho):
        accepted = torch.minimum(q, p / rho)
        beta = accepted.sum()
        return p - accepted * ((1 - (1 - beta) ** k) / beta if beta > 0 else 0)

    assert 1 <= rho <= k + 1e-12
    assert float(rest(rho).min()) >= -1e-12
    less = rho * 0.999
    if less > 1 and bool(((p > 0) & (less * q >= p)).any()):
        assert float(rest(less).min()) < 0


@settings(max_examples=60, deadline=None)
@given(pair=pairs(), k=st.integers(1, 3))
def test_greedy_sets_have_the_optimum_of_their_candidates(pair, k):
    """By all subsets, of k - 1 tokens that are always there and one that is drawn from the rest."""
    p, q = pair
    top = q.topk(min(k - 1, len(q))).indices.tolist()
    rest = [0.0 if v in top else float(q[v]) for v in range(len(q))]
    rest = [v / sum(rest) for v in rest] if sum(rest) > 0 else None
    cases = [({*top, v}, w) for v, w in enumerate(rest)] if rest else [(set(top), 1.0)]
    sets = chain.from_iterable(combinations(range(len(q)), n) for n in range(len(q) + 1))
    best = 1 + min(
        sum(float(p[v]) for v in S) - sum(w for x, w in cases if x <= set(S)) for S in map(set, sets)
    )
    assert float(acceptance.greedy_set(p, q, k)) == pytest.approx(best, abs=1e-12)
    assert acceptance.top_points(p, q, k) <= 1 + 1e-12


@pytest.mark.parametrize("k", [1, 2, 3])
def test_batches_are_their_rows(k):
    draw = torch.Generator().manual_seed(0)
    p, q = (torch.rand(2, 3, 6, generator=draw, dtype=torch.float64) ** 4 for _ in range(2))
    p[..., :2], q[0, 0, 3:] = 0, 0
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    for function in (
        acceptance.recursive,
        acceptance.kseq,
        acceptance.optimum,
        acceptance.greedy_set,
        acceptance.top_points,
        lambda p, q, k: acceptance.optimum(p, q, k, False),
        lambda p, q, k: acceptance.recursive(p, q, k, False),
    ):
        whole = function(p, q, k)
        assert whole.shape == (2, 3)
        assert whole.dtype == torch.float64
        rows = [function(p[a, b], q[a, b], k) for a in range(2) for b in range(3)]
        assert torch.allclose(whole, torch.stack(rows).view(2, 3), rtol=0, atol=5e-13)


def test_a_large_vocabulary():
    draw = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 10_000, generator=draw, dtype=torch.float64).mul(4).softmax(-1)
    with_replacement, distinct = (acceptance.optimum(p, q, 4, r) for r in (True, False))
    assert acceptance.recursive(p, q, 4) < acceptance.kseq(p, q, 4) < with_replacement < distinct < 1
    assert acceptance.recursive(p, q, 2, replacement=False) < acceptance.optimum(p, q, 2, replacement=False)


def test_what_does_not_fit_is_refused_by_name():
    p, q = tensors(T3)
    with pytest.raises(ValueError, match=r"k is 0: give the number of candidates"):
        acceptance.optimum(p, q, 0)
    with pytest.raises(TypeError, match=r"k is 1.5"):
        acceptance.kseq(p, q, 1.5)
    with pytest.raises(ValueError, match=r"p has shape \[3\] and q \[2\]"):
        acceptance.single(p, q[:2])
    with pytest.raises(ValueError, match=r"k is 4 without replacement for a vocabulary of 3: .* most is 8"):
        acceptance.recursive(p, q, 4, replacement=False, most=8)
