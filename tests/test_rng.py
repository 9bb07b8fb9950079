"""Philox on its published answers; draws that depend on their key alone and follow the distributions they are asked for."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import specdec.rng as module
from specdec.graphs.recorded import record
from specdec.kernels.philox import reference
from specdec.kernels.philox.reference import pick_in_blocks
from specdec.rng import (
    ACCEPT,
    BONUS,
    DRAFT,
    SELECT,
    TARGET,
    Key,
    Philox,
    philox4x32,
    pick,
    race_arrivals,
    seeds,
)

ONES = 0xFFFFFFFF
KNOWN = [  # kat_vectors of Random123: philox4x32, 10 rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_its_known_answers_on_ints_arrays_and_tensors(counter, key, answer):
    assert tuple(philox4x32(counter, key)) == answer
    with np.errstate(over="ignore"):
        arrays = philox4x32([np.array([c, c]) for c in counter], [np.array([k, k]) for k in key])
    assert [a.tolist() for a in arrays] == [[a, a] for a in answer]
    tensors = philox4x32([torch.tensor([c, c]) for c in counter], [torch.tensor([k, k]) for k in key])
    assert [t.tolist() for t in tensors] == [[a, a] for a in answer]


@given(st.lists(st.integers(0, ONES), min_size=6, max_size=6))
def test_philox_agrees_between_ints_arrays_and_tensors(words):
    exact = philox4x32(words[:4], words[4:])
    arrays = philox4x32([np.array([w]) for w in words[:4]], [np.array([w]) for w in words[4:]])
    tensors = philox4x32([torch.tensor([w]) for w in words[:4]], [torch.tensor([w]) for w in words[4:]])
    assert [int(a[0]) for a in arrays] == exact == [int(t[0]) for t in tensors]


@given(st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_one_seed_is_spread_over_rows_by_philox(seed, rows):
    words = [philox4x32((row, 0, 0, 0x5EED), (seed & ONES, seed >> 32)) for row in range(rows)]
    assert seeds(seed, rows).tolist() == [w[0] | (w[1] >> 2 << 32) for w in words]


def plain(seed: torch.Tensor, key: Key) -> torch.Tensor:
    """What ``uniform`` says in words, number by number, with Python's integers."""
    fields = torch.broadcast_tensors(*(torch.as_tensor(f) for f in key[:3]))
    if not fields[0].dim():
        fields = [f[None] for f in fields]
    rows = seed.view(-1, *[1] * (fields[0].dim() - 1))
    shape = torch.broadcast_shapes(rows.shape, fields[0].shape)
    made = []
    for at, depth, sibling, s in zip(*(f.expand(shape).flatten().tolist() for f in (*fields, rows))):
        counter = (at, depth | sibling << 16, key.stream | key.attempt << 8, 0)
        w = philox4x32(counter, (s & ONES, s >> 32))
        made.append(((w[0] >> 5) << 26 | w[1] >> 6) * 2.0**-53)
    return torch.tensor(made, dtype=torch.float64).view(shape)


@st.composite
def requests(draw, rows: int):
    """A key such as drafts, verifiers and others ask for, at one of few places, so that blocks are met again and left."""
    number = st.integers(0, 70)
    at = torch.arange(rows) * 3 + draw(st.sampled_from([0, 0, 0, 1, 7]))
    width = draw(st.integers(0, 6))
    some = st.lists(st.integers(0, 9), min_size=width, max_size=width).map(lambda v: torch.tensor(v).long())
    each = st.lists(number, min_size=rows, max_size=rows).map(torch.tensor)
    shapes = {
        "depth": lambda: (at, draw(st.integers(0, 70)), 0),
        "depth of each row": lambda: (at, draw(each), 0),
        "depths": lambda: (at[:, None], draw(some), 0),
        "column": lambda: (at[:, None], draw(st.integers(0, 9)), 0),
        "tree": lambda: (at[:, None], draw(some).expand(rows, -1), draw(some).expand(rows, -1)),
        "sibling": lambda: (at, 2, draw(st.integers(0, 3))),
        "narrow": lambda: (at.int(), 1, 0),
        "numpy": lambda: (at, np.int64(draw(st.integers(0, 9))), 0),
        "one place": lambda: (draw(number), 2, 0),
    }
    key = shapes[draw(st.sampled_from(sorted(shapes)))]()
    stream = draw(st.sampled_from([DRAFT, ACCEPT, BONUS, TARGET, SELECT]))
    return Key(*key, stream, draw(st.sampled_from([0, 0, 0, 1, 5])))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 2**63 - 1))
def test_uniforms_are_those_of_their_keys_whatever_was_asked_before(data, rows, seed):
    rng = Philox(torch.tensor([(seed + 2**40 * b) % 2**63 for b in range(rows)]))
    for _ in range(data.draw(st.integers(1, 8))):
        key = data.draw(requests(len(rng.seed)))
        got, expected = rng.uniform(key), plain(rng.seed, key)
        assert got.shape == expected.shape
        assert torch.equal(got, expected)
        got.zero_()  # nobody else's numbers
        if data.draw(st.integers(0, 5)) == 0:
            keep = data.draw(st.permutations(range(len(rng.seed))))
            rng = rng.select(torch.tensor(keep[: data.draw(st.integers(1, len(keep)))]))


def test_a_large_batch_and_a_copy_from_another_process_have_the_same_numbers():
    rows = 300  # more than are kept in blocks
    rng, key = Philox(seeds(4, rows)), Key(torch.arange(rows)[:, None], torch.arange(3), 0, ACCEPT)
    assert torch.equal(rng.uniform(key), plain(rng.seed, key))
    few = rng.select(torch.arange(4))
    key = Key(torch.arange(4), 1)
    u = few.uniform(key)
    there = pickle.dumps(few)
    assert len(there) < len(pickle.dumps(few.seed)) + 200  # seeds travel, numbers do not
    assert torch.equal(pickle.loads(there).uniform(key), u)


def test_certain_acceptances_need_no_luck():
    rng, key = Philox(seeds(0, 5)), Key(torch.arange(5))
    prob = torch.tensor([1.0, 2.0, 0.0, -1.0, float("nan")])
    assert rng.accept(prob, key).tolist() == [True, True, False, False, False]
    assert rng.accept(torch.full((5,), float("inf")), key).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tile", [4, 64, 1 << 14])
@pytest.mark.parametrize("kernels", [True, False])
def test_races_are_the_same_tile_by_tile_as_number_by_number(kernels, tile, dtype, monkeypatch):
    monkeypatch.setattr(module, "_TILE", tile)
    if not kernels:
        monkeypatch.setattr(module, "library", lambda: None)
    for rows, shape in ((3, (3, 50)), (2, (2, 4, 33)), (1, (1, 1)), (5, (5, 1, 7))):
        seed, place = (
            seeds(tile, rows),
            torch.arange(rows).view(-1, *[1] * (len(shape) - 2)).expand(shape[:-1]),
        )
        distribution = torch.rand(shape, generator=torch.Generator().manual_seed(tile), dtype=dtype)
        sparse = torch.where(torch.arange(shape[-1]) % 12 == 0, distribution, 0)
        for p in (distribution, sparse, torch.where(distribution > 0.5, distribution, 0) + sparse):
            expected = torch.zeros(shape[:-1], dtype=torch.long)
            for at in np.ndindex(*shape[:-1]):
                times = []
                for token in range(shape[-1]):
                    s = int(seed[at[0]])
                    w = philox4x32((int(place[at]), token, TARGET, 0), (s & ONES, s >> 32))
                    u = torch.tensor(((w[0] >> 5) << 26 | w[1] >> 6) + 0.5, dtype=torch.float64) * 2.0**-53
                    times.append(-u.log() / p[at][token].double())
                expected[at] = torch.stack(times).argmin()
                got = race_arrivals(p[at][None], seed[at[0]][None], place[at][None])
                assert torch.equal(got[0], torch.stack(times))
            assert torch.equal(Philox(seed).race(p, place), expected)


def _grid(seed: int = 0, rows: int = 8, at: int = 500) -> torch.Tensor:
    return Philox(seeds(seed, rows)).uniform(Key(torch.arange(at).expand(rows, at)))


def test_uniforms_are_uniform():
    u = _grid()
    assert u.dtype == torch.float64
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3


def test_every_field_of_a_key_and_the_seed_give_another_independent_number():
    rng, at = Philox(seeds(1, 1)), torch.arange(4000)[None]
    base = rng.uniform(Key(at, 2, 3, DRAFT, 4))
    others = [
        rng.uniform(Key(at + 4000, 2, 3, DRAFT, 4)),
        rng.uniform(Key(at, 3, 3, DRAFT, 4)),
        rng.uniform(Key(at, 2, 4, DRAFT, 4)),
        rng.uniform(Key(at, 2, 3, ACCEPT, 4)),
        rng.uniform(Key(at, 2, 3, BONUS, 4)),
        rng.uniform(Key(at, 2, 3, DRAFT, 5)),
        rng.uniform(Key(at, 3, 2, DRAFT, 4)),
        Philox(seeds(2, 1)).uniform(Key(at, 2, 3, DRAFT, 4)),
    ]
    for other in others:
        assert not bool((other == base).any())
        table = np.histogram2d(base[0].numpy(), other[0].numpy(), bins=4, range=[[0, 1]] * 2)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_a_key_that_is_asked_again_answers_from_the_same_number():
    rng, key = Philox(seeds(3, 2)), Key(torch.tensor([5, 6]))
    u = rng.uniform(key)
    assert torch.equal(u, rng.uniform(key))
    assert rng.accept(u + 1e-12, key).all()
    assert not rng.accept(u, key).any()


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 6))
def test_decisions_do_not_depend_on_batch_mates_or_their_order(order, keep):
    rows = torch.tensor(order[:keep])
    probs = torch.rand(6, 4, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs /= probs.sum(-1, keepdim=True)
    at, lane = torch.arange(6)[:, None] * 3, torch.arange(4).expand(6, 4)
    whole, part = Philox(seeds(7, 6)), Philox(seeds(7, 6)).select(rows)
    key, some = Key(at, 1, lane), Key(at[rows], 1, lane[rows])
    assert torch.equal(whole.uniform(key)[rows], part.uniform(some))
    assert torch.equal(whole.categorical(probs, key)[rows], part.categorical(probs[rows], some))
    assert torch.equal(whole.accept(probs[..., 0], key)[rows], part.accept(probs[rows][..., 0], some))
    assert torch.equal(whole.race(probs, at + lane)[rows], part.race(probs[rows], (at + lane)[rows]))


def test_seeds_are_one_a_row_and_an_int_spreads_over_rows_that_do_not_depend_on_the_batch():
    assert seeds([3, 4, 5], 3).tolist() == [3, 4, 5]
    assert torch.equal(seeds(9, 5)[:3], seeds(9, 3))
    assert len(set(seeds(9, 1000).tolist())) == 1000
    torch.manual_seed(0)
    first = seeds(None, 4)
    torch.manual_seed(0)
    assert torch.equal(first, seeds(None, 4))
    with pytest.raises(ValueError, match="seed has 2 entries for 3 rows"):
        seeds([1, 2], 3)


def test_pick_never_picks_what_has_no_probability():
    distribution = torch.tensor([0, 0.3, 0, 0, 0.7, 0, 0], dtype=torch.float64)
    u = torch.tensor([0, 1e-300, 0.3 - 1e-16, 0.3, 0.5, 1 - 2**-53])
    assert set(pick(distribution.expand(6, 7), u).tolist()) <= {1, 4}
    assert pick(distribution, torch.tensor(0.0)) == 1
    assert pick(distribution, torch.tensor(1 - 2**-53)) == 4


@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-12, 0.1, 1 / 3, 0.5]), min_size=2, max_size=9).filter(any),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_pick_stays_in_the_support(distribution, u, dtype):
    probs = torch.tensor(distribution, dtype=dtype)
    assert probs[pick(probs, torch.tensor(u, dtype=torch.float64))] > 0


def test_categorical_and_race_follow_the_distribution():
    rows, distribution = 20_000, torch.tensor([0.05, 0.45, 0.0, 0.3, 0.2], dtype=torch.float64)
    rng = Philox(seeds(11, rows))
    at = torch.full((rows,), 17)
    for drawn in (
        rng.categorical(distribution.expand(rows, 5), Key(at)),
        rng.race(distribution.expand(rows, 5), at),
    ):
        count = torch.bincount(drawn, minlength=5).numpy()
        assert count[2] == 0
        here = distribution.numpy() > 0
        assert stats.chisquare(count[here], rows * distribution.numpy()[here]).pvalue > 1e-3


def test_races_of_two_distributions_with_one_key_agree_as_often_as_promised():
    rows = 20_000
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    rng, at = Philox(seeds(5, rows)), torch.zeros(rows, dtype=torch.long)
    agree = (rng.race(p.expand(rows, 3), at) == rng.race(q.expand(rows, 3), at)).double().mean()
    apart = 0.5 * (p - q).abs().sum()
    assert (1 - apart) / (1 + apart) - 0.02 <= agree <= 1 - apart + 0.02


def test_races_do_not_share_numbers_with_other_decisions():
    rows, distribution = 4000, torch.tensor([0.5, 0.5], dtype=torch.float64)
    rng, at = Philox(seeds(6, rows)), torch.full((rows,), 9)
    raced = rng.race(distribution.expand(rows, 2), at)
    for stream in (DRAFT, ACCEPT, BONUS, TARGET):
        drawn = rng.categorical(distribution.expand(rows, 2), Key(at, 1, 1, stream))
        table = np.histogram2d(raced.numpy(), drawn.numpy(), bins=2)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("V", [5, 8, 23, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_at_quantiles_block_by_block(V, dtype):
    """As in the order of the vocabulary, except where a quantile is on a border; tokens without probability are never picked."""
    draw = torch.Generator().manual_seed(V)
    probs = torch.rand(6, V, generator=draw, dtype=dtype)
    probs[torch.rand(6, V, generator=draw) < 0.4] = 0
    probs[:, V // 2] += 0.1
    probs[1] = torch.nn.functional.one_hot(torch.tensor(V - 1), V)  # all in the last, shorter block
    probs[2, 3:] = 0
    probs[2, 2] = 1
    inner = torch.rand(6, 40, generator=draw, dtype=torch.float64)
    u = torch.cat([torch.zeros(6, 1), inner, torch.full((6, 1), 1 - 2.0**-53)], 1)
    got = pick_in_blocks(probs, u, block=8)
    expected = pick(probs[:, None].expand(-1, u.shape[1], -1), u)
    assert torch.equal(got, expected)
    assert bool((probs.gather(1, got) > 0).all())
    # On borders: of a block, and within one.
    cdf = probs.double().cumsum(1)
    border = pick_in_blocks(probs, (cdf / cdf[:, -1:]).clamp(max=1 - 2.0**-53), block=8)
    assert bool((probs.gather(1, border) > 0).all())


def test_quantiles_block_by_block_of_what_is_no_distribution():
    probs = torch.full((2, 20), float("nan"))
    u = torch.tensor([[0.0, 0.9]] * 2, dtype=torch.float64)
    for wrong in (probs, torch.zeros(2, 20)):
        token = pick_in_blocks(wrong, u, block=8)
        assert bool(((token >= 0) & (token < 20)).all())
    tiny = torch.full((1, 20), 0.0, dtype=torch.float64)
    tiny[0, 0], tiny[0, 17] = 1.0, 2.0**-60  # lost beside the first token
    assert pick_in_blocks(tiny, torch.full((1, 1), 1 - 2.0**-53, dtype=torch.float64), block=8).tolist() == [
        [0]
    ]


def test_picking_block_by_block_can_be_captured():
    probs, u = torch.rand(3, 40), torch.rand(3, 2, dtype=torch.float64)
    with torch.inference_mode():
        replay = record(lambda: pick_in_blocks(probs, u, block=16))
        u.copy_(torch.rand(3, 2, dtype=torch.float64))
        assert torch.equal(replay(), pick_in_blocks(probs, u, block=16))


def test_a_device_picks_block_by_block(monkeypatch):
    """The choice is by where the probabilities are."""
    asked = []
    monkeypatch.setattr(reference, "pick_in_blocks", lambda probs, u: asked.append(u.shape) or u.long())
    probs, u = torch.rand(2, 5), torch.tensor([0.5, 0.25], dtype=torch.float64)
    assert pick(probs, u).shape == (2,)
    assert asked == []
    assert pick(probs.to("meta"), u.to("meta")).shape == (2,)
    assert asked == [(2, 1)]
