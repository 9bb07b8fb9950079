"""``sd.auto``: what it measures, what its decoder does, and what it refuses."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import specdec as sd
from specdec.arm_policy import Arm
from specdec.lab.auto_runs import FEW, DecoderRuns, drained, estimates, of_kind, share_once, spread_of
from specdec.lab.auto_seconds import Seconds, method_rows
from specdec.selectors.fixed import Fixed
from specdec.selectors.kinds import ByTemperature

BAD, GOOD = (sd.TableModel.random(vocab_size=6, order=1, seed=seed) for seed in (1, 0))
PROMPTS = [[0], [1, 2], [3], [4, 5, 1]]


class Clock:
    """What the library reads as the time here: only parts that say so take time, so that what is faster does not depend on the machine."""

    now = 0.0

    @classmethod
    def read(cls):
        cls.now += 1e-6
        return cls.now


@pytest.fixture(scope="module", autouse=True)
def clock():
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("specdec.") and "perf_counter" in vars(module):
                patch.setattr(module, "perf_counter", Clock.read)
        yield


class Slow(sd.TableModel):
    """A table whose passes take some milliseconds."""

    def __init__(self, seed, milliseconds):
        super().__init__(sd.TableModel.random(vocab_size=6, order=1, seed=seed).probs)
        self.seconds = 1e-3 * milliseconds

    def score(self, *arguments, **named):
        Clock.now += self.seconds
        return super().score(*arguments, **named)


@pytest.fixture(scope="module")
def found():
    base = sd.decoder(Slow(0, 4)).sampling(temperature=1.0)
    drafts = {"same": GOOD, "other": BAD}
    return sd.auto(
        base, drafts, PROMPTS, {"same": (1, 3), "other": 2}, batches=(1, 3), new_tokens=24, repeats=2
    )


def test_a_draft_that_is_always_right_is_chosen_and_another_is_not(found):
    assert found.best == {1: "same/3", 3: "same/3"}
    out = found.decoder.generate(PROMPTS[:3], 40, seed=0)
    rounds = dict(zip(out.arms, [out.stats.arms[a] for a in range(len(out.arms))]))
    assert rounds["same/3"] > 0.8 * sum(rounds.values())
    assert not rounds["other/2"]
    assert out.stats.tau > 3


def test_the_best_of_a_batch_alone(found):
    alone = found.fixed(3)
    assert alone.selecting is None
    assert (alone.draft, alone.length) == (found.builders["same/3"].build().draft, 3)
    out = alone.generate(PROMPTS[:3], 24, seed=0, eos_token_id=())
    assert out.stats.tau == 4
    assert out.arms == ()
    with pytest.raises(ValueError, match="batch 2 was not measured: give one of 1, 3"):
        found.fixed(2)


def test_tables_have_the_rounds_that_were_measured(found):
    rows = {(row["method"], row["batch"]): row for row in found.rows}
    assert rows["same/3", 3]["tau"] == 4
    assert rows["plain", 1]["ratio"] == 1
    assert 1 < rows["other/2", 1]["tau"] < 2.5
    assert rows["plain", 3]["milliseconds"] > 4
    (asked, proposed), *positions = found.selector.prior[0][0]
    assert asked == proposed == positions[0][0]
    tested, accepted = zip(*positions)
    assert tested == accepted  # the draft is the target
    assert tested[0] > tested[2] > 0
    assert found.selector.horizon == 24
    assert found.selector.table.sizes == (1, 3)
    assert len(found.frame()) == 10
    assert "batch 3: same/3" in repr(found)


def test_it_says_why_a_row_is_decoded_as_it_is(found):
    selection = found.decoder.begin(2)
    said = []
    found.decoder.generate(
        PROMPTS[:2],
        12,
        seed=0,
        selection=selection,
        on_round=lambda r: said.append(found.why(selection, 1)) if r.number == 1 else None,
    )
    assert said[0].startswith("same/3: the batch is expected to be ")
    assert "other/2" in said[0]


def test_where_no_draft_pays_rows_are_decoded_plainly():
    auto = sd.auto(
        sd.decoder(Slow(0, 1)), {"costly": Slow(1, 3)}, PROMPTS, 2, batches=2, new_tokens=12, repeats=1
    )
    assert auto.best == {2: "plain"}
    assert not auto.fixed(2).generate(PROMPTS[:2], 20, seed=3).stats.drafted
    assert "batch 2: do not speculate" in repr(auto)
    out = auto.decoder.generate(PROMPTS[:2], 20, seed=3)
    assert not out.stats.drafted
    assert auto.decoder.generate(PROMPTS, 20, seed=3).stats.drafted == 0  # more rows than were measured


class Sharp(sd.TableModel):
    """The most probable token of a table, with probability 0.95: always right about greedy rows, and often wrong about sampled ones."""

    def __init__(self, table):
        one = torch.nn.functional.one_hot(table.probs.argmax(-1), table.vocab_size)
        super().__init__(0.05 / table.vocab_size + 0.95 * one.to(table.probs))


def test_requests_of_each_temperature_have_chances_of_their_own():
    base = sd.decoder(GOOD).sampling(temperature=(1.0, 0.0, 0.0, 1.0))
    auto = sd.auto(base, {"sharp": Sharp(GOOD)}, PROMPTS, 1, batches=(1, 4), new_tokens=24, repeats=3)
    assert auto.selector.kinds == ("all", 0.0, 1.0)
    (everything, greedy, sampled) = (accepted / tested for ((_, (tested, accepted)),) in auto.selector.prior)
    assert greedy > 0.95  # 1, but for some rounds of all requests
    assert sampled < 0.7
    assert sampled < everything < greedy
    rows = sd.Context.of(PROMPTS, 30)
    now, rng = torch.tensor([4, 4]), sd.Philox(torch.zeros(4, dtype=torch.long))
    tokens = auto.selector.select(auto.selector.init(2), rows, now, rng)[2].plan.tokens[:, 1]
    assert (tokens > 1.9).tolist() == [temperature == 0 for temperature in base.build().sampling.temperature]


@pytest.fixture(scope="module")
def trees():
    """A chain and a tree of a poor draft, of which the tree accepts more, and chains that end by a rule."""
    drafts = {"chain": BAD, "tree": sd.drafts.Tree(BAD, (3, 2)), "ending": sd.drafts.Model(BAD, stop=0.4)}
    base = sd.decoder(Slow(0, 15)).sampling(temperature=1.0)
    lengths = {"chain": 2, "ending": (1, 3)}
    return sd.auto(base, drafts, PROMPTS, lengths, batches=3, new_tokens=24, repeats=2)


def test_a_tree_is_a_choice_with_its_depth(trees):
    arms = ["chain/2", "tree/2", "ending/1", "ending/3"]
    assert [row["method"] for row in trees.rows] == ["plain", "none", *arms]
    assert trees.best == {3: "tree/2"}
    out = trees.decoder.generate(PROMPTS[:3], 40, seed=0)
    rounds = dict(zip(out.arms, [out.stats.arms[a] for a in range(len(out.arms))]))
    assert rounds["tree/2"] > 0.8 * sum(rounds.values())
    tree, base = sd.drafts.Tree(BAD, (2, 1)), sd.decoder(GOOD)
    cut = sd.auto(base, {"tree": tree}, PROMPTS, {"tree": (1, 2)}, batches=1, new_tokens=8, repeats=1)
    assert [row["method"] for row in cut.rows] == ["plain", "none", "tree/1", "tree/2"]
    assert cut.selector.arms == (
        (-1, 0),
        (0, 1),
        (1, 2),
    )  # each with chances of its own, as a cut tree may be wider


def test_tokens_that_are_expected_are_those_that_trees_and_chains_with_an_end_had(trees):
    """Where a path ends early, the next depth counts as one at which no token was accepted."""
    plan = trees.selector.select(
        trees.selector.init(5),
        sd.Context.of([[0]], 30),
        torch.ones(5, dtype=torch.long),
        sd.Philox(torch.zeros(1, dtype=torch.long)),
    )[2].plan
    live = {row["method"]: row["tau"] for row in trees.rows}
    for name, expected in zip(trees.decoder.selecting.names[1:], plan.tokens[0, 1:]):
        assert expected == pytest.approx(live[name], rel=0.08), name
    assert live["ending/3"] < live["chain/2"]


def test_requests_of_kinds_that_the_user_tells_apart():
    auto = sd.auto(
        sd.decoder(GOOD), {"other": BAD}, PROMPTS, 1, batches=4, new_tokens=12, repeats=1,
        kind=lambda now: now.length > 2,  # prompts of one token have two now
    )  # fmt: skip
    assert auto.selector.kinds == ("all", False, True)
    rounds = [drafts[0][0][0] for drafts in auto.selector.prior]
    assert rounds[1] + rounds[2] == pytest.approx(rounds[0] + 2 * FEW)
    assert rounds[1] == pytest.approx(rounds[2], rel=0.7)


def test_a_kind_that_uses_the_number_of_a_request_is_asked_about_the_right_one():
    temperatures = (1.0, 0.0, 0.0, 1.0)
    base, by = sd.decoder(GOOD).sampling(temperature=temperatures), ByTemperature(temperatures)
    given, default = (
        sd.auto(base, {"sharp": Sharp(GOOD)}, PROMPTS, 1, batches=(1, 2), new_tokens=12, repeats=2, kind=kind)
        for kind in (by, None)
    )
    assert given.selector.prior == default.selector.prior
    assert by(sd.Context.of(PROMPTS * 2))[3:5] == [1.0, None]


def test_every_temperature_is_measured_or_it_is_said():
    base = sd.decoder(GOOD).sampling(temperature=(0.2, 0.4, 0.6))
    auto = sd.auto(base, {"a": BAD}, PROMPTS[:3], 1, batches=1, new_tokens=8, repeats=3)
    assert auto.selector.kinds == ("all", 0.2, 0.4, 0.6)
    with pytest.raises(
        ValueError, match="3 temperatures and 2 rows are measured of each draft: raise repeats"
    ):
        sd.auto(base, {"a": BAD}, PROMPTS, 1, batches=1, new_tokens=8, repeats=2)


def test_kinds_with_few_rows_are_like_all():
    one = np.array([[10.0, 10.0], [10.0, 6.0]])
    many = [("often", one * [1, 1]) for _ in range(40)]
    kinds, prior, spread = estimates([(0, [*many, ("once", one * [1, 0])])], 1, 1)
    assert kinds == ("all", "often", "once")
    (_, (tested, accepted)) = prior[2][0]
    assert tested == pytest.approx(10 + FEW)
    assert accepted == pytest.approx(FEW * 240 / 410)
    assert spread[2] == spread[0]


def test_the_spread_of_rows_is_found():
    draw = np.random.default_rng(0)
    rows, tested = 4000, 40
    for true in (2.0, 10.0, math.inf):
        factor = draw.gamma(true, 1 / true, rows) if true < math.inf else np.ones(rows)
        failed = draw.binomial(tested, (0.1 * factor).clip(0, 1))
        counts = np.stack([np.full(rows, tested), tested - failed], -1)[:, None].astype(float)
        found = spread_of(counts)
        assert found > 50 if true == math.inf else found == pytest.approx(true, rel=0.25)


@pytest.mark.parametrize(
    ("whole", "half", "rows", "fewer", "share"),
    [
        (8.0, 4.0, 8, 4, 0.0),  # in proportion to the rows
        (8.0, 8.0, 8, 4, 1.0),
        (8.0, 9.0, 8, 4, 1.0),  # noise
        (8.0, 3.0, 8, 4, 0.0),
        (8.0, 6.0, 8, 4, 0.5),
        (5.0, 4.0, 5, 2, 2 / 3),
        (5.0, 4.0, 5, 4.9, 0.0),  # too few rows less
        (0.0, 0.0, 5, 2, 0.0),
        (5.0, 4.0, 0.0, 0.0, 0.0),  # no row had a proposal
    ],
)
def test_what_is_taken_once_is_told_from_half_the_rows(whole, half, rows, fewer, share):
    assert share_once(whole, half, rows, fewer) == pytest.approx(share)


class Costly(sd.drafts.NGram):
    """A draft that takes ``once`` seconds in a round in which any row has a budget, and ``each`` for every such row."""

    once: float = 0.02
    each: float = 0.001

    def propose(self, state, context, budget, rng):
        if bool((budget > 0).any()):
            Clock.now += self.once + self.each * int((budget > 0).sum())
        return super().propose(state, context, budget, rng)


def test_drafting_that_costs_the_same_for_few_rows_and_many_is_found():
    auto = sd.auto(sd.decoder(Slow(0, 1)), {"costly": Costly()}, PROMPTS, 2, (1, 4), new_tokens=12, repeats=2)
    (_, (alone, four)), (_, (_, once)) = auto.selector.table.draft, auto.selector.table.draft_once
    assert alone == pytest.approx(0.021, abs=1e-4)
    assert four == pytest.approx(0.024, abs=1e-4)
    assert once == pytest.approx(0.02, abs=1e-4)


def test_rounds_with_a_proposal_and_without_one_are_trimmed_apart():
    """A slow kind of round that is rarer than what is trimmed still counts."""
    run = DecoderRuns(
        None,
        None,
        1,
        seconds={1: [(0.0, 1.0)] * 97 + [(2.0, 5.0)] * 3},
        proposals={1: [0.0] * 97 + [1.0] * 3},
    )
    assert run.mean(1) == pytest.approx((0.06, 1.12))
    run = DecoderRuns(
        None, None, 1, seconds={1: [(0.0, 1.0)] * 97 + [(9.0, 9.0)] * 3}, proposals={1: [0.0] * 100}
    )
    assert run.mean(1) == pytest.approx((0.0, 1.0))  # a slow moment of the machine


def test_what_a_draft_reads_counts():
    """The seconds of a round, and for each new token a share of those in which the prompt was read."""
    runs = {"a/2": DecoderRuns(sd.decoder(GOOD).build(), None, 2, tokens=20, rounds=10)}
    arms = {"a/2": Arm(sd.drafts.Model(BAD), 2)}
    draft, rest = {"a/2": (0.3,)}, {"none": (1.1,), "a/2": (1.2,)}
    for read, ratio in ((0.0, 2 / 1.5), (0.05, 2 / (1.5 + 2 * 0.25))):
        spent = Seconds((1.0,), draft, rest, {"a/2": read}, {}, {}, {}, {})
        plain, none, small = method_rows(arms, runs, (1,), spent, 5.0)
        assert (plain["ratio"], small["milliseconds"]) == (1, pytest.approx(1500))
        assert (none["ratio"], none["milliseconds"]) == (pytest.approx(1 / 1.1), pytest.approx(1100))
        assert small["ratio"] == pytest.approx(ratio)
    small = method_rows(arms, runs, (1,), replace(spent, idle={"a/2": [(0.5,)]}), 5.0)[2]
    assert (small["ratio"], small["milliseconds"]) == (pytest.approx(2 / 2.5), pytest.approx(1500))


def test_what_a_batch_loses_as_its_rows_end():
    """One row has 2 tokens a round and the other 1, by hand."""
    rows = [("all", np.array([[10.0, 10.0], [10.0, accepted]])) for accepted in (10.0, 0.0)]
    linear, constant = lambda n: 3.0 * n, lambda n: np.full(len(n), 4.0)
    for batch in (1, 2, 5):
        assert drained(rows, batch, linear) == pytest.approx(3 * batch)
    assert drained(rows, 1, constant) == pytest.approx(4)
    # Of two rows, drawn with replacement, the slower is of the slow kind in three of four batches: 0.5 * 1/4 + 1 * 3/4 rounds a token, and a row has 0.75.
    assert drained(rows, 2, constant) == pytest.approx(4 * 0.875 / 0.75, rel=0.02)
    same = [rows[0]] * 3
    assert drained(same, 4, constant) == pytest.approx(4)
    assert drained([("all", np.zeros((2, 2)))], 2, constant) == 4  # no whole round was seen


def test_rows_of_a_kind_are_those_or_where_they_are_few_all():
    rows = [(kind, np.zeros((2, 2))) for kind in ["a"] * FEW + ["b"] * (FEW - 1)]
    assert of_kind(rows, "a") == rows[:FEW]
    assert of_kind(rows, "b") == of_kind(rows, "all") == rows


@pytest.mark.parametrize(("refilled", "best"), [(True, "half/3"), (False, "plain")])
def test_a_batch_is_refilled_as_its_rows_end_or_not(refilled, best):
    """The draft is always right about half of the rows and always wrong about the others, which alone decide how long all take."""

    def slow(following, milliseconds):
        made = Slow(0, milliseconds)
        sd.TableModel.__init__(made, torch.eye(4)[following])
        return made

    base = sd.decoder(slow([1, 0, 3, 2], 24)).greedy()
    drafts, prompts = {"half": slow([1, 0, 2, 3], 0.25)}, [[0], [2]] * 4
    found = sd.auto(base, drafts, prompts, 3, batches=8, new_tokens=24, repeats=2, refilled=refilled)
    assert found.best == {8: best}
    out = found.decoder.generate(prompts, 24, seed=0)
    first = found.decoder.generate(prompts, 3, seed=0)
    assert (first.stats.drafted > 0) == (best != "plain")
    assert out.ids == base.build().generate(prompts, 24, seed=0).ids


def test_what_cannot_be_measured_is_refused_by_name():
    base = sd.decoder(GOOD)
    for call, kind, match in (
        (lambda: sd.auto(GOOD, {"a": BAD}, PROMPTS), TypeError, "base is a TableModel"),
        (lambda: sd.auto(base, {}, PROMPTS), TypeError, "drafts is"),
        (
            lambda: sd.auto(base, dict.fromkeys("abcdef", BAD), PROMPTS, (1, 2, 4)),
            ValueError,
            "18 pairs of a draft and a length can be combined in 4096 ways",
        ),
        (
            lambda: sd.auto(base, {"a": base.pool({"b": BAD}, Fixed(0)).build().draft}, PROMPTS),
            ValueError,
            "draft 'a' is a pool",
        ),
        (
            lambda: sd.auto(base, {"a": sd.drafts.Tree(BAD, (2, 1))}, PROMPTS, {"a": 3}),
            ValueError,
            "lengths for draft 'a' are 3: it drafts at most 2 tokens",
        ),
        (lambda: sd.auto(base, {"a": BAD}, PROMPTS, {"b": 2}), ValueError, "lengths has none for draft 'a'"),
        (lambda: sd.auto(base, {"a": BAD}, PROMPTS, 0), ValueError, "lengths"),
        (lambda: sd.auto(base, {"a": sd.drafts.Tree(BAD, (2, 1))}, PROMPTS, 0), ValueError, "lengths"),
        (lambda: sd.auto(base, {"a": BAD}, PROMPTS, new_tokens=1), ValueError, "new_tokens"),
        (lambda: sd.auto(base, {"a": BAD}, PROMPTS, repeats=0), ValueError, "repeats"),
        (lambda: sd.auto(base, {"a": BAD}, []), ValueError, "empty"),
        (
            lambda: sd.auto(base, {"a": sd.drafts.Model(BAD, sd.Sampling(temperature=(1.0, 0.0)))}, PROMPTS),
            ValueError,
            "draft 'a' has sampling settings for each request",
        ),
    ):
        with pytest.raises(kind, match=match):
            call()
