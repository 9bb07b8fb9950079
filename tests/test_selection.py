"""Selection on recorded requests: expectations against enumeration, replays against expectations, and what a selector is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import lab, selectors
from specdec.audit.tau import efficiency
from specdec.capabilities import SelectorInfo
from specdec.lab.selection import Requests, RoundTimes, fixed_seconds, ratio, round_oracle, worth
from specdec.lab.selection_costs import costs
from specdec.lab.selection_runs import Follow, SelectorReplay

TIMES = RoundTimes(
    ((2e-4, 1e-4), (5e-4, 2e-4), (0.0, 1e-5), (0.0, 0.0)), (2e-3, 8e-4, 1e-4), (2e-5, 4e-5, 0.0, 0.0)
)
EVERY = [
    selectors.Fixed(1), selectors.Random(), selectors.EpsilonGreedy(), selectors.UCB1(), selectors.Thompson(spread=0.2),
    selectors.EXP3(), selectors.UCBSpec(3), selectors.EXP3Spec(3), selectors.Hedge(), selectors.Spin(2),
    selectors.Hedge(pool="global"), selectors.Spin(2, pool="global", learn="always"),
]  # fmt: skip


def requests(C: int = 12, n: int = 24, seed: int = 0) -> Requests:
    """Two drafts, of which each is good for half of the requests, one that is bad for all, and no speculation."""
    draw = torch.Generator().manual_seed(seed)
    mean = torch.tensor([[0.85, 0.4], [0.5, 0.95], [0.1, 0.1], [0.0, 0.0]])[:, torch.arange(C) % 2]
    noise = torch.rand(4, C, n, 3, generator=draw, dtype=torch.float64) - 0.5
    later = torch.tensor([0.1, 0.0, -0.15])  # later tokens of a block are accepted less often
    accept = (mean[..., None, None] + 0.4 * noise + later).clamp(0, 1)
    names = ("small", "large", "n-gram", "none")
    return Requests(accept, (2, 3, 3, 0), np.arange(C) + 10, np.arange(C) // 2, names)


def enumerated(r: Requests, c: int, times: RoundTimes, batch: int, arms: list[int]) -> float:
    """Expected seconds of the best choices among ``arms``, by trying all of them from every state, one outcome after the other."""
    n, (fixed, row, token) = int(r.new_tokens[c]), times.verify

    def left(s: int, read: frozenset[int]) -> float:
        if s >= n:
            return 0.0
        totals = []
        for a in arms:
            d = min(r.lengths[a] if r.size is None else int(r.size[a, c, s]), n - s - 1)
            of_draft, of_row = times.draft[a]
            total = fixed / batch + row + d * (of_draft / batch + of_row + token)
            total += 0 if a in read else times.read[a] * (int(r.prompt[c]) + s)
            reached = 1.0
            for j in range(d):
                p = float(r.accept[a, c, s, j])
                total += reached * (1 - p) * left(s + j + 1, read | {a})
                reached *= p
            totals.append(total + reached * left(s + d + 1, read | {a}))
        return min(totals)

    return left(0, frozenset())


CHEAP = replace(TIMES, read=(2e-6, 1e-6, 0.0, 0.0))


@pytest.mark.parametrize(("batch", "times"), [(1, TIMES), (7, CHEAP)])
def test_expectations_are_those_of_an_enumeration(batch, times):
    draw = torch.Generator().manual_seed(1)
    r = replace(requests(3, 5), accept=torch.rand(4, 3, 5, 3, generator=draw, dtype=torch.float64))
    if times is CHEAP:
        size = torch.tensor(r.lengths)[:, None, None].expand(4, 3, 5).clone()
        size[2, :, ::2] = 0  # an n-gram without a match
        r = replace(r, ends=np.array([5, 3, 4]), size=size).select([1, 0, 2])
    fixed, by_round = fixed_seconds(r, times, batch), round_oracle(r, times, batch).seconds
    for c in range(3):
        for a in range(4):
            assert fixed[a, c] == pytest.approx(enumerated(r, c, times, batch, [a]), rel=1e-12)
        assert by_round[c] == pytest.approx(enumerated(r, c, times, batch, [0, 1, 2, 3]), rel=1e-12)
    assert (by_round <= fixed.min(0) * (1 + 1e-12)).all()
    assert times is TIMES or (by_round < 0.999 * fixed.min(0)).any()  # it changes arms where reading is cheap


def test_rounds_are_those_of_the_texts_that_end():
    """With a second a round and nothing else, expected seconds are ``audit.tau``'s expected rounds."""
    r = requests()
    second = RoundTimes(((0.0, 0.0),) * 4, (0.0, 1.0, 0.0), (0.0,) * 4)
    for a, k in enumerate(r.lengths[:3]):
        rounds = efficiency(r.accept[a], k, cut=True).rounds.numpy()
        np.testing.assert_allclose(fixed_seconds(r, second, 4)[a], rounds, rtol=1e-12)
    assert (fixed_seconds(r, second, 4)[3] == 24).all()


def off(values: np.ndarray, expected: float) -> float:
    """How many standard errors the mean over repeats of the requests' sums is above what is expected."""
    sums = values.sum(1)
    return float((sums.mean() - expected) / (sums.std(ddof=1) / np.sqrt(len(sums))))


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_fixed_arms_replay_agrees_with_its_expectation(ragged):
    r = requests()
    if ragged:
        size = torch.tensor(r.lengths)[:, None, None].expand(4, 12, 24).clone()
        size[2, :, ::2] = 0
        r = replace(r, ends=np.arange(12) + 13, size=size)
    play = SelectorReplay(r, TIMES, batch=5, repeats=50)
    expected = fixed_seconds(r, TIMES, 5).sum(1)
    for a in range(3):
        played = play(selectors.Fixed(a))
        assert abs(off(played.seconds, expected[a])) <= 4
        assert (played.arms[:, a] == 1).all()
        # Planted: chances of rejection, those of a block in reverse order, and blocks that are a token longer or shorter.
        planted = [replace(r, accept=1 - r.accept), replace(r, accept=r.accept.flip(3))]
        planted += [replace(r, lengths=(3, 2, 2, 0), size=None)] if a < 2 else []
        for wrong in planted:
            assert abs(off(played.seconds, fixed_seconds(wrong, TIMES, 5).sum(1)[a])) > 4
    assert play(selectors.Fixed(3)).seconds.sum(1) == pytest.approx(expected[3])  # no draws at all


@pytest.mark.slow
def test_no_selector_beats_the_oracle_and_its_plan_comes_near():
    r = requests()
    play = SelectorReplay(r, TIMES, batch=5, repeats=30)
    oracle = round_oracle(r, TIMES, 5)
    best, some = oracle.seconds.sum(), replace(play, repeats=15)
    for selector in EVERY:
        played = some(selector)
        assert off(played.seconds, best) >= -4, selector
        # Sharing a batch with other arms costs no less than a batch of one's own arm.
        assert (played.elapsed.sum(1) >= played.seconds.sum(1) - 1e-9).all(), selector
    followed = play(Follow(oracle, r.prompt))
    assert off(followed.seconds, best) >= -4
    assert followed.seconds.sum(1).mean() < 1.01 * best  # catching up is all that the oracle leaves out
    free = replace(TIMES, read=(0.0,) * 4)
    oracle = round_oracle(r, free, 5)
    again = replace(play, times=free)(Follow(oracle, r.prompt))
    assert abs(off(again.seconds, oracle.seconds.sum())) <= 4
    assert off(again.seconds, 0.95 * oracle.seconds.sum()) > 4  # the test sees 5 %


@dataclass
class Told:
    """A selector that takes arms in turn and writes down what it is told."""

    feedback: list[Any] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    info: ClassVar[SelectorInfo] = SelectorInfo()

    def init(self, arms):
        return 0

    def select(self, state, context, capacities, rng):
        arm = (torch.arange(context.batch) + state) % len(capacities)
        return arm, torch.ones(context.batch), state + 1

    def update(self, state, feedback):
        self.feedback.append(feedback)
        return state

    def leave(self, state, gone):
        self.gone += gone.tolist()
        return state


@dataclass
class ToldAll(Told):
    info: ClassVar[SelectorInfo] = SelectorInfo(full_information=True)


@pytest.mark.parametrize("kind", [Told, ToldAll])
def test_a_selector_is_told_what_a_decoder_would_tell_it(kind):
    r, selector = requests(), kind()
    played = SelectorReplay(r, TIMES, batch=5, repeats=1, reward="tokens")(selector)
    assert sorted(selector.gone) == list(range(12))
    told = [torch.cat([getattr(f, name) for f in selector.feedback]) for name in ("arm", "tokens", "drafted")]
    arm, tokens, drafted = (t.numpy() for t in told)
    assert (drafted == np.array(r.lengths)[arm]).all()  # no block that the end of a request has shortened
    assert ((tokens >= 1) & (tokens <= drafted + 1)).all()
    assert len(arm) < played.rounds.sum()
    seconds = torch.cat([f.seconds for f in selector.feedback]).numpy()
    costs = TIMES.alone(5).seconds(torch.from_numpy(arm), torch.from_numpy(drafted)).numpy()
    np.testing.assert_allclose(seconds, costs)
    reward = torch.cat([f.reward for f in selector.feedback]).numpy()
    if kind is Told:
        np.testing.assert_allclose(reward, tokens / 4)
        assert len(arm) > 0.8 * played.rounds.sum()
    else:
        request = torch.cat([f.request for f in selector.feedback]).numpy()
        some = {tuple(np.round(row, 9)) for row in r.expected.transpose(1, 2, 0)[request].reshape(-1, 4) / 4}
        assert reward.shape == (len(arm), 4)
        assert all(tuple(row) in some for row in np.round(reward, 9))


def test_rewards_of_all_arms_come_when_their_text_is_committed():
    r, selector = requests(1, 24), ToldAll()
    r = replace(r, source=np.zeros(1), accept=torch.zeros_like(r.accept))  # one token a round
    SelectorReplay(r, TIMES, batch=1, repeats=1)(selector)
    # A block of 3 needs 3 tokens more: the one from 0 is told after the third round, and that from 20, the last whole one, after the 23rd.
    assert len(selector.feedback) == 21
    arms = torch.cat([f.arm for f in selector.feedback]).tolist()
    assert arms == [t % 4 for t in range(21)]


def test_goodput_is_charged_by_the_arms_own_round():
    r = requests(1)
    r = replace(r, source=np.zeros(1))
    by_tokens, by_start = SelectorReplay(r, TIMES, 4).rewards()
    assert by_tokens[np.arange(4), np.array(r.lengths) + 1].max() == pytest.approx(1)
    seconds = TIMES.alone(4).seconds(torch.arange(4), torch.tensor(r.lengths)).numpy()
    np.testing.assert_allclose(by_tokens[0, 1:3] / by_tokens[1, 1:3], seconds[1] / seconds[0])
    assert by_start.shape == (1, 24, 4)
    assert (by_start <= 1).all()


def test_capacities_hold_and_what_was_learned_is_kept():
    r = requests()
    play = SelectorReplay(r, TIMES, batch=6, repeats=2, capacities=(2, 2, 2, 6))
    played = play(selectors.Fixed(1))
    assert 0 < played.arms[:, 1].mean() < 0.7
    spin = selectors.Spin(2, growth=64, pool="global", warm=3)
    free = SelectorReplay(r, TIMES, batch=6, repeats=2)
    school = selectors.Spin(50, pool="global", warm=3, learn="always")
    taught = free.taught(school, 1)
    pulls = [free.taught(school, n).state.own.sums[..., 0].sum() for n in (1, 3)]
    assert 2.5 < pulls[1] / pulls[0] < 3.5  # what was learned before is kept
    known, cold = (free(spin, start).arms for start in (taught, None))
    assert known.max(1).mean() == 1  # no request explores
    assert cold.max(1).mean() < 1
    wall = replace(free, costs="wall")(Told()).seconds
    assert wall.shape == (2, 12)
    with pytest.raises(ValueError, match="capacities hold 3 rows"):
        replace(play, capacities=(1, 1, 1, 0))(selectors.Random())


def test_what_choices_are_worth_by_group():
    rows = worth(requests(24), TIMES, 6, ["a", "b"] * 12)
    assert [r["group"] for r in rows] == ["all", "a", "b"]
    every, a, b = rows
    assert (a["best_fixed"], b["best_fixed"]) == ("small", "large")
    assert a["share:small"] == b["share:large"] == 1
    assert every["share:small"] == every["share:large"] == 0.5
    assert a["request_oracle"] == b["request_oracle"] == 1
    assert 1 < every["request_oracle_low"] < every["request_oracle"] <= every["round_oracle"]
    assert every["request_oracle"] < every["request_oracle_high"]


def test_intervals_are_over_sources_and_repeats():
    noise = np.random.default_rng(0)
    top, bottom, source = noise.uniform(1, 2, (5, 30)), noise.uniform(1, 2, 30), np.arange(30) // 3
    value, low, high = ratio(top, bottom, source)
    assert value == pytest.approx(top.mean(0).sum() / bottom.sum())
    assert low < value < high
    thrice = ratio(np.tile(top, 3), np.tile(bottom, 3), np.tile(source, 3))
    assert thrice == pytest.approx((value, low, high))  # the same sources tell no more
    assert ratio(top, top, source) == pytest.approx((1, 1, 1))
    assert ratio(top, bottom, np.arange(30) % 4) == (value, None, None)  # four sources are too few


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accept": torch.full((4, 12, 24, 3), 1.5)}, "outside 0 .. 1"),
        ({"lengths": (2, 3, 4, 0)}, "lengths from 0 to 3"),
        ({"names": ("a", "b")}, "2 names"),
        ({"source": np.zeros(3)}, "3 sources"),
        ({"ends": np.full(12, 25)}, "1 to 24 new tokens"),
    ],
)
def test_requests_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(requests(), **change)


def test_requests_of_replays(tmp_path):
    target, other = (sd.HFModel(tiny("llama", seed, vocab_size=23)) for seed in (0, 1))
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8], [1, 2, 3]]
    trace = lab.record(target, prompts, tmp_path, new_tokens=6, k=3, eos_token_id=(), progress=False)
    model, ngram = lab.replay(trace, other, 2), lab.replay(trace, sd.drafts.NGram(), 3)
    r = Requests.of({"model": model, "none": None, "ngram": ngram})
    assert (r.lengths, r.names) == ((2, 0, 3), ("model", "none", "ngram"))
    assert r.prompt.tolist() == [5, 3, 3]
    assert r.new_tokens.tolist() == [6, 6, 6]
    assert r.tokens is not None
    assert r.tokens[1].tolist() == [6, 7, 8, 0, 0]
    assert len(set(r.source)) == 3
    torch.testing.assert_close(r.accept[0, ..., :2], model.accept)
    second = RoundTimes(((0.0, 0.0),) * 3, (0.0, 1.0, 0.0), (0.0,) * 3)
    rounds = efficiency(ngram.accept, cut=True).rounds.numpy()
    np.testing.assert_allclose(fixed_seconds(r, second, 2)[2], rounds)
    with pytest.raises(ValueError, match="at least one draft"):
        Requests.of({"none": None})
    both = Requests.of({"model": model, "short": model, "none": None, "ngram": ngram}, {"short": 1})
    assert both.lengths == (2, 1, 0, 3)
    assert both.accept.shape[3] == 3
    assert int(both.drafted[1].max()) == 1 < int(both.drafted[0].max())
    again = Requests.of({"short": lab.replay(trace, other, 1)})
    np.testing.assert_allclose(both.laws[1][..., :2], again.laws[0])  # a shorter replay of the same draft
    for wrong in ({"ngram": 4}, {"none": 1}, {"model": 0}):
        with pytest.raises(ValueError, match="lengths has"):
            Requests.of({"model": model, "none": None, "ngram": ngram}, wrong)
    tree = lab.replay(trace, sd.drafts.Tree(other, (2, 1)), 2)
    with pytest.raises(ValueError, match="'tree' proposes trees"):
        Requests.of({"model": model, "tree": tree})


def test_requests_of_several_traces():
    one, two = requests(8, seed=1), requests(6, seed=2)
    size = torch.full((4, 6, 24), 1)
    two = replace(two, ends=np.arange(6) + 5, size=size, tokens=torch.arange(18).reshape(6, 3))
    one = replace(one, size=torch.full((4, 8, 24), 2), tokens=torch.arange(16).reshape(8, 2))
    both = Requests.join([one, two], ["aabbccdd", "aaccee"])
    assert both.source.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 2, 2, 4, 4]
    for part, at in ((one, slice(0, 8)), (two, slice(8, 14))):
        for a in range(2):
            np.testing.assert_array_equal(
                fixed_seconds(part, TIMES, 4)[a], fixed_seconds(both, TIMES, 4)[a, at]
            )
    assert both.tokens is not None
    assert both.tokens[0].tolist() == [0, 1, 0]
    assert both.tokens[-1].tolist() == [15, 16, 17]
    with pytest.raises(ValueError, match="same arms"):
        Requests.join([one, replace(two, names=("a", "b", "c", "d"))], ["aabbccdd", "aaccee"])


def by_parity(context: Any) -> list[int]:
    """The kinds of ``requests``, each of which is best on another arm."""
    return (context.request % 2).tolist()


@pytest.mark.slow
def test_the_steps_of_a_head_rooms_loss():
    """Kinds that say which arm is good lose nothing; kinds that say nothing lose all; every cost is paid where it is planted."""
    learned, tested = requests(24, seed=3), requests(24, seed=4)
    stays = selectors.Spin(4, 64, by_parity, warm=30, learn="always")
    taught = replace(stays, exploration=8, growth=1, warm=None)

    def steps(
        times: RoundTimes, kind: Any = by_parity, whole: RoundTimes | None = None, **pool: Any
    ) -> dict[str, dict[str, Any]]:
        some = [replace(one, pool=kind, **pool) for one in (taught, stays)]
        found = costs(tested, learned, times, 6, [kind, kind], *some, repeats=10, pool=whole)
        return {r["step"]: r for r in found}

    free = replace(TIMES, read=(0.0,) * 4)
    known = steps(free)
    every, kinds, other, selector, read, batch, counting, emptied = (
        row["times_faster"] for row in known.values()
    )
    assert every == kinds == other > 1.05
    assert selector == read == pytest.approx(every, rel=0.02)
    assert batch < 0.97 * read  # two drafts are in use, each with its fixed costs
    assert counting > 0.99 * batch  # both are worth it
    assert emptied > 1
    best = fixed_seconds(tested, free, 6)[:3].sum(1).min()
    plain = fixed_seconds(tested, free, 6)[3].sum()
    for row in list(known.values())[:5]:
        assert row["over_plain"] / row["times_faster"] == pytest.approx(plain / best)
        assert row["low"] < row["times_faster"] < row["high"]
    blind = steps(free, lambda context: [0] * context.batch)
    assert blind["best arm of each request"]["times_faster"] == every
    assert blind["best arm of each kind"]["times_faster"] == pytest.approx(1)
    dear = steps(replace(free, draft=tuple((8 * f, r) for f, r in TIMES.draft)))
    batch, counting = (
        dear[step]["times_faster"] for step in ("selector, in its batches", "counting drafts in use")
    )
    assert batch < 0.95 < 0.99 < counting
    slow = steps(replace(TIMES, read=(1e-3, 1e-3, 0.0, 0.0)))
    assert slow["selector"]["times_faster"] < slow["best arm of each kind"]["times_faster"]
    emptied = "in batches that are not refilled"
    for longer, factor in ((1.0, 1.0), (1.5, 1.5)):  # two drafts are in use nearly always
        pooled = steps(free, whole=replace(free, several=longer))
        last = pooled["in the rounds of a pool"]["times_faster"]
        assert last == pytest.approx(pooled[emptied]["times_faster"] / factor, rel=0.05 * factor)
    apart = steps(replace(free, draft=tuple((0.0, f + r) for f, r in TIMES.draft)))
    shared = apart["selector, in its batches"]["times_faster"]
    assert shared == pytest.approx(apart["selector"]["times_faster"], rel=0.02)  # no fixed costs to pay twice


def test_a_batch_that_is_not_refilled_lasts_as_long_as_its_longest_request():
    """Eleven requests of 5 tokens and one of 20, without a draft, in batches of 4 whose rounds take a second with any rows."""
    some = replace(requests(12), ends=np.array([5] * 7 + [20] + [5] * 4))
    times = replace(TIMES, verify=(1.0, 0.0, 0.0))
    replay = SelectorReplay(some, times, 4, repeats=8, refilled=False)
    none = selectors.Fixed(3)
    assert replay(none).elapsed.sum(1) == pytest.approx([30.0] * 8)
    assert 20 <= replace(replay, refilled=True)(none).elapsed.sum(1).mean() < 30
    np.testing.assert_array_equal(
        replay(none).seconds, replace(replay, refilled=True)(none).seconds
    )  # each as in a full batch


def test_times_and_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="both for every arm"):
        RoundTimes(((0.0, 0.0),), (1.0, 1.0, 0.0), (0.0, 0.0))
    with pytest.raises(ValueError, match="negative"):
        RoundTimes(((0.0, -1.0),), (1.0, 1.0, 0.0), (0.0,))
    one = RoundTimes(((0.0, 0.0),), (1.0, 1.0, 0.0), (0.0,))
    with pytest.raises(ValueError, match="small, large, n-gram, none"):
        fixed_seconds(requests(), one, 4)
    for name in ("batch", "repeats"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            replace(SelectorReplay(requests(), TIMES, 4), **{name: 0})
    assert requests().select([3, 4]).new_tokens.tolist() == [24, 24]
