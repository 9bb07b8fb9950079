"""Truncated distributions of the target: every interval has the exact value in it, and is a point when everything is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.audit.between import between
from specdec.audit.rounds import efficiency
from specdec.audit.siblings import distinct_chances, sibling_chances
from specdec.audit.truncated import Bounds, Known, distinct_bounds, sibling_bounds

ROUNDING = 1e-12


def laws(*shape, seed, sharpness=2.0, zeros=0.0):
    draw = torch.Generator().manual_seed(seed)
    made = torch.rand(*shape, generator=draw, dtype=torch.float64) ** sharpness
    made = made * (torch.rand(*shape, generator=draw) >= zeros) + 1e-9 * (zeros == 0)
    made[..., 0] += 1e-3
    return made / made.sum(-1, keepdim=True)


def exact(p, q, token, m, distinct):
    if distinct:
        return distinct_chances(p, q, token, m)
    return sibling_chances(p, q[..., None, :].expand(*q.shape[:-1], m, -1), token)


@settings(max_examples=150, deadline=None)
@given(
    V=st.integers(2, 40),
    M=st.integers(1, 40),
    m=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    distinct=st.booleans(),
    zeros=st.sampled_from([0.0, 0.5]),
    sharpness=st.sampled_from([0.5, 2.0, 12.0]),
    copy=st.booleans(),
)
def test_the_exact_chance_is_between_the_bounds(V, M, m, seed, distinct, zeros, sharpness, copy):
    p = laws(8, V, seed=seed, sharpness=sharpness, zeros=zeros)
    q = p.clone() if copy else laws(8, V, seed=seed + 1, sharpness=sharpness, zeros=zeros)
    token = torch.randint(0, V, (8,), generator=torch.Generator().manual_seed(seed + 2))
    m = min(m, 2) if distinct else m
    value, known = exact(p, q, token, m, distinct), Known.largest(p, token, min(M, V))
    made = distinct_bounds(known, q, m) if distinct else sibling_bounds(known, q, m)
    chance = p.gather(1, token[:, None])
    possible = (chance > 0).expand_as(value)
    # The exact chance is a probability over that of the token, whose rounding error is divided by it, too.
    room = ROUNDING + 8 * torch.finfo(chance.dtype).eps / chance
    assert bool(((made.low <= value + room) & (value <= made.high + room))[possible].all())
    assert float(made.low.min()) >= 0
    assert float(made.high.max()) <= 1
    if M >= V:
        torch.testing.assert_close(made.low, made.high, rtol=0, atol=1e-9)
    if not distinct:
        whole = sibling_bounds(known, q, m, together=True)
        sums = value.cumsum(-1)
        assert bool(((whole.low <= sums + room) & (sums <= whole.high + room))[possible].all())


@pytest.mark.parametrize("distinct", [False, True])
def test_intervals_shrink_to_points(distinct):
    p, q = laws(64, 200, seed=0, sharpness=8), laws(64, 200, seed=0, sharpness=6)
    token = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    widths = []
    for M in (5, 20, 60, 120, 200):
        known = Known.largest(p, token, M)
        low, high = (distinct_bounds if distinct else sibling_bounds)(known, q, 2)
        widths.append(float((high - low).mean()))
        assert bool((high[:, 0] - low[:, 0] < 1e-12).all())  # the first sibling is a chain's
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0.01
    assert widths[-1] < 1e-12


def test_bounds_that_forget_the_rest_are_seen():
    """Without the mass that is not known, the exact value is outside."""
    p, q = laws(200, 30, seed=1), laws(200, 30, seed=2)
    token = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    known, value = Known.largest(p, token, 5), exact(p, q, token, 3, False)
    for wrong in (known._replace(rest=torch.zeros(200)), known._replace(own=known.own * 0.9)):
        made = sibling_bounds(wrong, q, 3)
        assert not bool(((made.low <= value + 1e-9) & (value <= made.high + 1e-9)).all())


def case(seed, C=4, n=6, K=2, V=6):
    p, q = laws(C, n, K, V, seed=seed), laws(C, n, K, V, seed=seed + 1)
    return p, q, torch.randint(0, V, (C, n, K), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("widths", [(2, 1), (1, 2), (2, 2)])
def test_rounds_and_tokens_are_between_their_bounds(widths, replacement):
    """Of trees in which all nodes of a depth have as many children, by depth, as ``lab.recorder`` takes them."""
    p, q, tokens = case(3)
    parts = [(p[:, :, d], q[:, :, d], tokens[:, :, d], m) for d, m in enumerate(widths)]
    value = torch.stack([exact(*part, not replacement).sum(-1) for part in parts], -1)
    lengths = torch.randint(0, 3, (4, 6), generator=torch.Generator().manual_seed(1))
    n, widest = torch.tensor([6, 5, 3, 6]), []
    for M in (1, 3, 6):
        each = [
            sibling_bounds(Known.largest(p, x, M), q, m, together=True)
            if replacement
            else Bounds(*(bound.cumsum(-1) for bound in distinct_bounds(Known.largest(p, x, M), q, m)))
            for p, q, x, m in parts
        ]
        low, high = (torch.stack([bound[..., -1] for bound in bounds], -1) for bounds in zip(*each))
        assert bool(((low <= value + ROUNDING) & (value <= high + ROUNDING)).all())
        for settings_ in ({"cut": True}, {"n": n, "lengths": lengths, "cut": n < 6}, {"k": 1}, {}):
            found = between(low, high, **settings_)
            mean = efficiency(value, **settings_)
            assert bool((found.rounds_low <= mean.rounds + ROUNDING).all())
            assert bool((mean.rounds <= found.rounds_high + ROUNDING).all())
            assert bool((found.tokens_low <= mean.tokens + ROUNDING).all())
            assert bool((mean.tokens <= found.tokens_high + ROUNDING).all())
            assert found.tau[0] <= mean.tau + ROUNDING <= found.tau[1] + 2 * ROUNDING
        widest.append(found.tau[1] - found.tau[0])
    assert widest[0] > widest[1] > widest[2]
    assert widest[2] < 1e-9


def test_bounds_of_rounds_are_those_of_all_chances_between():
    """Bounds that are reached: the chances at every corner of a small box."""
    draw = torch.Generator().manual_seed(0)
    low = torch.rand(1, 3, 2, generator=draw, dtype=torch.float64) / 2
    high = low + torch.rand(1, 3, 2, generator=draw, dtype=torch.float64) / 2
    corners = [
        torch.where(torch.tensor([bits >> i & 1 for i in range(6)]).view(1, 3, 2) > 0, high, low)
        for bits in range(64)
    ]
    for cut in (False, True):
        rounds = [float(efficiency(corner, cut=cut).rounds) for corner in corners]
        found = between(low, high, cut=cut)
        assert float(found.rounds_low) == pytest.approx(min(rounds), abs=1e-12)
        assert float(found.rounds_high) == pytest.approx(max(rounds), abs=1e-12)
    mean = efficiency(low)
    same = between(low, low)
    for one in (same.rounds_low, same.rounds_high):
        torch.testing.assert_close(one, mean.rounds, rtol=0, atol=1e-12)
    for one in (same.tokens_low, same.tokens_high):
        torch.testing.assert_close(one, mean.tokens, rtol=0, atol=1e-12)


def test_more_acceptance_is_not_always_fewer_rounds():
    """So the bounds of rounds are not the rounds of the bounds."""
    low = torch.tensor([[[0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]], dtype=torch.float64)
    high = low.clone()
    high[0, 0, 0] = 1
    assert float(efficiency(high, cut=True).rounds) > float(efficiency(low, cut=True).rounds)
    found = between(low, high, cut=True)
    assert float(found.rounds_high) == float(efficiency(high, cut=True).rounds)
    assert float(found.rounds_low) == float(efficiency(low, cut=True).rounds)


def test_bad_input():
    p, q, tokens = case(5)
    known = Known.largest(p, tokens, 3)
    with pytest.raises(ValueError, match="m is 3: without replacement there are bounds for 1 or 2"):
        distinct_bounds(known, q, 3)
    a, b = torch.full((1, 3, 2), 0.4), torch.full((1, 3, 2), 0.5)
    for low, high, message in (
        (b, a, "high has entries below low"),
        (a, b + 1, "above 1"),
        (a, b * torch.nan, "high has entries"),
        (a - 1, b, "accept has entries outside"),
        (a, b[:, :2], r"low has shape \[1, 3, 2\] and high \[1, 2, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            between(low, high)
    assert between(a, b).tau[0] < efficiency(a).tau < between(a, b).tau[1] + 1e-9
