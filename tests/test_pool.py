"""Pools of drafts behind arms: who drafts which row, what a selector is told, what it may not do, and that nothing is lost."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from tiny import byte_tokenizer, tiny
from torch import Tensor

import specdec as sd
from specdec.arm_policy import Arm, ArmPolicy
from specdec.audit import catalogue
from specdec.audit.adversaries import AdversarialSelector
from specdec.audit.certify import certify_coupled
from specdec.cache import contiguous
from specdec.cost.arms import ArmCosts, weights
from specdec.drafts.pool import Pool, PoolState, merged
from specdec.drafts.spire import SpireModel
from specdec.executors import Pipelined, Serial
from specdec.executors.round import MicroBatch
from specdec.selectors import Fixed, Random, Spin
from specdec.selectors.rewards import charge

PROMPTS = [
    [5, 6],
    [7, 8, 9],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 2,
    [50] * 9,
    [3, 1, 3, 1, 3],
    [90, 4, 5, 6],
]
BUDGETS = [14, 1, 9, 12, 2, 13]
TABLE = sd.TableModel.random(5, 1, seed=0)
SMALL, OTHER = sd.TableModel.random(5, 1, seed=1), sd.TableModel.random(5, 1, seed=2)


class Told(NamedTuple):
    """How often each request chose, what came back, and who left."""

    chosen: dict[int, int]
    feedback: list[Any]
    left: list[int]


@dataclass(frozen=True)
class Script:
    """Arm ``number of the row's choice + its request``, round and round, whatever comes of it. ``states``: those of all runs."""

    states: list[Told] = field(default_factory=list, compare=False)
    pause: float = 0.0

    def init(self, arms: int) -> tuple[int, Told]:
        self.states.append(Told({}, [], []))
        return arms, self.states[-1]

    def select(self, state: Any, context: Any, capacities: Tensor, rng: Any) -> tuple[Tensor, Tensor, Any]:
        arms, told = state
        time.sleep(self.pause)
        arm = []
        for request in context.request.tolist():
            n = told.chosen[request] = told.chosen.get(request, -1) + 1
            arm.append((n + request) % arms)
        return torch.tensor(arm), torch.full((context.batch,), 0.5), state

    def update(self, state: Any, feedback: Any) -> Any:
        state[1].feedback.append(feedback)
        return state

    def leave(self, state: Any, requests: Tensor) -> Any:
        state[1].left.extend(requests.tolist())
        return state


@dataclass(frozen=True)
class Says(Script):
    """Gives a fixed answer, sensible or not."""

    answer: Any = None

    def select(self, state: Any, context: Any, capacities: Tensor, rng: Any) -> Any:
        arm, prob = self.answer(context.batch)
        return arm, prob, state


@pytest.fixture(scope="module")
def models():
    target = sd.HFModel(tiny("llama", 0))
    return target, *(sd.HFModel(tiny("llama", seed, num_hidden_layers=1)) for seed in (0, 1))


EXECUTORS = {
    "serial": Serial(),
    "threads": Pipelined(2),
    "threads, not ahead": Pipelined(3, ahead=False),
    "processes": Pipelined(2, "processes"),
    "barrier": Pipelined(3, barrier=True),
}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_arm_proposes_what_it_would_alone(models, executor):
    """However rows change their drafts, each proposal is the one of a fresh draft that has just read the text."""
    target, one, two = models
    arms: dict[str, Any] = {
        "one": sd.drafts.Model(one),
        "two": sd.drafts.Model(two),
        "ngram": sd.drafts.NGram(),
        "tree": sd.drafts.Tree(one, (2, 2)),
        "short": Arm(sd.drafts.Model(two), 1),
        "none": None,
    }
    lengths = [3, 3, 3, 2, 1, 0]  # a tree has its own
    rounds: list[Any] = []
    decoder = sd.decoder(target).pool(arms, Script(), 3).greedy().executor(EXECUTORS[executor]).build()
    out = decoder.generate(PROMPTS, BUDGETS, on_round=rounds.append)
    assert out.ids == sd.decoder(target).greedy().build().generate(PROMPTS, BUDGETS).ids
    assert {int(a) for r in rounds if r.number for a in r.arm} == set(range(6))
    pool = decoder.draft
    for r in rounds:
        if not r.number:
            assert not r.proposal.nodes
            continue
        room = torch.tensor([len(PROMPTS[q]) + BUDGETS[q] for q in r.context.request]) - r.context.length
        longest = torch.tensor([lengths[a] for a in r.arm])
        assert torch.equal(r.budget, torch.minimum(room - 1, longest))
        assert r.arm_prob.tolist() == [0.5] * len(r.arm)
        for b, arm in enumerate(r.arm.tolist()):
            size = int(r.proposal.size[b])
            if arm == 5:
                assert size == 0
                continue
            draft, text = pool.drafts[pool.arms[arm]], r.context.select(torch.tensor([b]))
            fresh, _ = draft.propose(draft.init(text, None), text, r.budget[b : b + 1], None)
            assert size == int(fresh.size[0])
            assert torch.equal(r.proposal.tokens[b, :size], fresh.tokens[0, :size])
            assert torch.equal(r.proposal.parents[b, :size], fresh.parents[0, :size])


def test_arms_may_share_a_draft():
    shared = sd.drafts.Model(SMALL)
    arms = {
        "a": Arm(shared, 1),
        "b": Arm(shared, 4),
        "c": Arm(sd.drafts.Model(SMALL), 2),
        "d": OTHER,
        "none": None,
    }
    decoder = sd.decoder(TABLE).pool(arms, Script(), 3).build()
    assert decoder.draft.arms == (0, 0, 0, 1, -1)
    assert len(decoder.draft.drafts) == 2
    assert decoder.selecting.lengths == (1, 4, 2, 3, 0)
    assert decoder.length == 4
    out = decoder.generate([[1], [2], [3]], 30, seed=0)
    plain = sd.decoder(TABLE).build().generate([[1], [2], [3]], 30, seed=0)
    assert [len(i) for i in out.ids] == [len(i) for i in plain.ids]


def test_seconds_of_arms_that_share_a_draft_go_by_their_rows():
    pool = Pool((sd.drafts.Model(SMALL), sd.drafts.NGram()), (0, 0, 1, -1))
    teams = pool._teams(torch.tensor([0, 1, 1, 1, 2, 3]))
    assert {d: rows.tolist() for d, rows in teams.rows.items()} == {0: [0, 1, 2, 3], 1: [4]}
    assert teams.share == (0.25, 0.75, 1.0, 0.0)
    assert pool._teams(torch.tensor([3, 3])) == ({}, (0.0,) * 4)


@dataclass(frozen=True)
class Assigned(Random):
    """Arm ``of[request]``."""

    of: tuple[int, ...] = ()

    def select(self, state, context, capacities, rng):
        arm = torch.tensor([self.of[r] for r in context.request.tolist()])
        return arm, torch.ones(context.batch), state


class Watched(sd.drafts.NGram):
    """Keeps the proposals that it makes and those of the rounds that it observes."""

    def __init__(self, seen):
        super().__init__(3, 1)
        object.__setattr__(self, "seen", seen)

    def propose(self, state, context, budget, rng):
        proposal, state = super().propose(state, context, budget, rng)
        self.seen.append(("proposed", proposal))
        return proposal, state

    def observe(self, state, round):
        self.seen.append(("observed", round.proposal))


@pytest.mark.parametrize("arms", [[0, 0], [1, 1], [0, 1], [2, 2]])
def test_every_draft_observes_its_own_proposal(arms):
    seen = [], []
    drafts = {"a": Watched(seen[0]), "b": Watched(seen[1]), "none": None}
    decoder = sd.decoder(TABLE).pool(drafts, Assigned(tuple(arms)), 3).build()
    decoder.generate([[1, 2, 1, 2, 1], [2, 1, 2, 1, 2]], 12, seed=0)
    for d, mine in enumerate(seen):
        later = mine[[what for what, _ in mine].index("observed") + 1 :]  # without the prefill
        assert later
        for (what, proposal), (before, last) in zip(later, [("", None), *later]):
            if what == "observed" and before == "proposed":
                assert proposal is last
            elif what == "observed":
                assert not proposal.nodes
        assert any(what == "proposed" for what, _ in later) == (d in arms)


def test_merging_keeps_what_each_node_was_drawn_from():
    half = torch.full((3, 2, 4), 0.25)
    sampled = sd.Proposal.chain(
        torch.tensor([[1, 2], [3, 3], [0, 0]]), torch.tensor([2, 0, 1]), half, "sampled"
    )
    point = sd.Proposal.chain(torch.tensor([[0], [3], [0]]), torch.tensor([0, 1, 0]))
    whole = merged([(sampled, torch.tensor([0, 2])), (point, torch.tensor([1]))], 3)
    assert whole.provenance == "sampled"
    assert whole.size.tolist() == [2, 1, 1]
    assert whole.tokens[0].tolist() == [1, 2]
    assert whole.tokens[1, 0] == 3
    assert whole.probs[1, 0].tolist() == [0, 0, 0, 1]
    assert whole.probs[0].tolist() == [[0.25] * 4] * 2
    declared = replace(sampled, provenance="declared")
    assert merged([(declared, torch.tensor([0])), (point, torch.tensor([1]))], 3).provenance == "declared"
    assert merged([(point, torch.tensor([1])), (point, torch.tensor([0, 2]))], 3).probs is None
    assert merged([], 3).nodes == 0
    exact = replace(sampled, probs=half.double() / 3 * 3)
    for order in ((sampled, exact), (exact, sampled)):
        both = merged([(order[0], torch.tensor([0])), (order[1], torch.tensor([2]))], 3)
        assert both.probs.dtype == torch.float64  # no distribution is rounded after its draw
    bush = sd.Proposal(
        torch.tensor([[1, 2, 3]] * 3), torch.tensor([[-1, -1, 0]] * 3), torch.tensor([3, 3, 3])
    )
    whole = merged([(sampled, torch.tensor([0])), (bush, torch.tensor([1, 2]))], 3)
    assert whole.parents.tolist() == [[-1, 0, 1], [-1, -1, 0], [-1, -1, 0]]


def test_proposals_are_moved_to_where_the_target_is(monkeypatch):
    moved = []
    original = sd.Proposal.to
    monkeypatch.setattr(sd.Proposal, "to", lambda self, device: moved.append(device) or original(self, "cpu"))

    class Elsewhere(type(TABLE)):
        device = torch.device("cuda", 1)  # as accelerate's device_map may have it; not real here

    target = object.__new__(Elsewhere)
    vars(target).update({k: v for k, v in vars(TABLE).items() if k != "device"})
    base = sd.decoder(TABLE).draft(SMALL, 2)
    expected = base.build().generate([[1], [2]], 9, seed=0)
    assert not moved
    for executor in (Serial(), Pipelined(2)):
        decoder = replace(base.executor(executor).build(), target=target)
        if isinstance(executor, Pipelined):
            monkeypatch.setattr("specdec.executors.worker.own_stream", lambda device: None)
        out = decoder.generate([[1], [2]], 9, seed=0)
        assert out.ids == expected.ids
        assert set(moved) == {torch.device("cuda", 1)}
        moved.clear()


# -- what a selector is told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["serial", "threads", "processes"])
def test_feedback_is_what_happened_without_cut_rows(executor):
    script, rounds = Script(), []
    arms = {"a": SMALL, "short": Arm(OTHER, 1), "none": None}
    costs = ArmCosts((0.5, 0.25, 0.0), verify=2.0)
    base = sd.decoder(TABLE).pool(arms, script, 3, costs=costs).executor(EXECUTORS[executor])
    base.build().generate(
        [[1], [2], [3], [0]], [20, 1, 9, 14], seed=0, eos_token_id=(4,), on_round=rounds.append
    )
    told = script.states[-1]
    counted = [(r, b) for r in rounds if r.number for b in range(len(r.committed)) if not r.truncated[b]]
    assert any(bool(r.truncated.any()) for r in rounds)
    seen = [
        tuple(part[i].item() for part in vars(f).values()) for f in told.feedback for i in range(len(f.arm))
    ]
    expected = []
    for r, b in counted:
        arm, tokens, size = int(r.arm[b]), int(r.verdict.accepted[b]) + 1, int(r.proposal.size[b])
        seconds = size * costs.draft[arm] + 2.0
        expected.append((int(r.context.request[b]), arm, tokens, size, seconds, pytest.approx(tokens / 4)))
    assert seen == expected
    assert sorted(told.left) == sorted(set(told.chosen))  # who ended in the prefill never came


def test_a_cut_row_is_one_that_could_not_do_its_best():
    rounds: list[Any] = []
    arms = {"a": Arm(TABLE, 3), "none": None}
    decoder = (
        sd.decoder(TABLE).pool(arms, Says(answer=lambda n: (torch.zeros(n).long(), torch.ones(n))), 3).build()
    )
    decoder.generate([[1]], 8, seed=0, on_round=rounds.append)  # 1, then 4, then 3 of 4
    assert [(int(r.committed[0]), bool(r.truncated[0])) for r in rounds] == [
        (1, False),
        (4, False),
        (3, True),
    ]
    rounds.clear()
    none = sd.decoder(TABLE).pool({"none": None}, Script()).build()
    none.generate([[1]], 4, seed=0, on_round=rounds.append)
    assert [bool(r.truncated[0]) for r in rounds] == [False] * 4


def test_measured_seconds_add_up():
    rounds: list[Any] = []
    decoder = (
        sd.decoder(TABLE).pool({"a": SMALL, "b": OTHER, "none": None}, Script(), 2, costs="wall").build()
    )
    decoder.generate([[1], [2], [3], [4]], 12, seed=0, on_round=rounds.append)
    for r in rounds[1:]:
        spent, rest = [0.5, 0.25, 0.0], r.seconds["target"] + r.seconds["verify"]
        paid = charge(r.arm, torch.tensor(spent, dtype=torch.float64), rest)
        used = sum(s for arm, s in enumerate(spent) if bool((r.arm == arm).any()))
        assert float(paid.sum()) == pytest.approx(used + rest)
    script = Script()
    sd.decoder(TABLE).pool({"a": SMALL, "none": None}, script, 2, costs="wall").build().generate(
        [[1], [2]], 12, seed=0
    )
    told = script.states[-1].feedback
    assert all(bool((f.seconds > 0).all()) for f in told)


def test_the_selectors_own_time_is_kept():
    decoder = sd.decoder(TABLE).pool({"a": SMALL, "none": None}, Script(pause=0.01), 2).build()
    begun, selection = [], ArmPolicy.begin

    def begin(self, batch):
        begun.append(selection(self, batch))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArmPolicy, "begin", begin)
        out = decoder.generate([[1]], 12, seed=0)
    assert 0.01 * out.stats.rounds <= begun[0].seconds <= sum(out.stats.seconds.values())


def test_a_reward_of_the_users():
    script = Script()
    base = sd.decoder(TABLE).pool(
        {"a": SMALL, "none": None}, script, 2, reward=lambda r: r.verdict.accepted * 10.0
    )
    base.build().generate([[1], [2]], 9, seed=0)
    for f in script.states[-1].feedback:
        assert torch.equal(f.reward, (f.tokens - 1) * 10.0)


@pytest.mark.parametrize("executor", [*EXECUTORS, "a row each"])
def test_capacities_hold_over_all_micro_batches(executor, monkeypatch):
    """At no time do more rows draft with an arm than it may take, whichever micro-batches they are in."""
    capacities = {"a": 2, "b": 1, "none": 3}
    flying: dict[int, int] = {}
    fullest: Counter[int] = Counter()
    choose, settle = MicroBatch.choose, MicroBatch.settle

    def chosen(self, ahead=False):
        choose(self, ahead)
        flying.update(zip(self.context.request.tolist(), self.choice.arm.tolist()))
        for arm, n in Counter(flying.values()).items():
            fullest[arm] = max(fullest[arm], n)

    def settled(self, round):
        for request in round.context.request[round.finished].tolist():
            flying.pop(request, None)
        return settle(self, round)

    monkeypatch.setattr(MicroBatch, "choose", chosen)
    monkeypatch.setattr(MicroBatch, "settle", settled)
    how = EXECUTORS.get(executor, Pipelined(6))
    for selector in (Fixed(0), Fixed(1), AdversarialSelector(), Random(), Spin(exploration=2)):
        base = sd.decoder(TABLE).pool(
            {"a": SMALL, "b": OTHER, "none": None}, selector, 2, capacities=capacities
        )
        out = base.executor(how).build().generate([[b % 5] for b in range(6)], [30, 4, 20, 1, 30, 9], seed=0)
        assert [len(i) for i in out.ids] == [30, 4, 20, 1, 30, 9]
    assert fullest == {0: 2, 1: 1, 2: 3}
    assert not flying


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda n: (torch.full((n,), 2), torch.ones(n)), r"chose arms \[2, 2\] for 2 rows: .* arms 0 to 1"),
        (lambda n: (torch.full((n,), -1), torch.ones(n)), "arms 0 to 1"),
        (lambda n: (torch.zeros(n + 1).long(), torch.ones(n)), r"give an int64 tensor \[2\]"),
        (lambda n: (torch.zeros(n), torch.ones(n)), "give an int64 tensor"),
        (lambda n: ([0] * n, torch.ones(n)), r"chose arms \[0, 0\] for 2 rows: give an int64 tensor"),
        (lambda n: (None, None), "chose arms None"),
        (lambda n: (torch.zeros(n).long(), torch.zeros(n)), r"gave probabilities \[0.0, 0.0\]"),
        (lambda n: (torch.zeros(n).long(), torch.full((n,), float("nan"))), "gave probabilities"),
        (lambda n: (torch.zeros(n).long(), None), "gave probabilities None"),
        (lambda n: (torch.zeros(n).long(), torch.ones(n + 1)), r"give a tensor \[2\] in \(0, 1\]"),
    ],
)
@pytest.mark.parametrize("executor", ["serial", "threads", "processes"])
def test_a_selector_that_talks_nonsense(answer, says, executor):
    arms = {"a": SMALL, "none": None}
    how = EXECUTORS[executor] if executor == "serial" else replace(EXECUTORS[executor], micro_batches=1)
    decoder = sd.decoder(TABLE).pool(arms, Says(answer=answer)).executor(how).build()
    with pytest.raises(ValueError, match=says):
        decoder.generate([[1], [2]], 9, seed=0)


def test_a_selector_that_takes_too_many():
    greedy = Says(answer=lambda n: (torch.zeros(n).long(), torch.ones(n)))
    base = sd.decoder(TABLE).pool({"a": SMALL, "none": None}, greedy, capacities={"a": 1, "none": 9})
    with pytest.raises(ValueError, match="gave arm 'a' 2 rows of the 1 that it may take"):
        base.build().generate([[1], [2]], 9, seed=0)
    with pytest.raises(ValueError, match="gave arm 'a' 1 rows of the 0 that it may take"):
        base.executor(Pipelined(2)).build().generate([[1], [2]], 9, seed=0)


# -- compositions that cannot be ----------------------------------------------------------------------------------------


def test_clear_refusals(models):
    base, script = sd.decoder(TABLE), Script()
    with pytest.raises(ValueError, match="arms is empty: give at least one draft, or None"):
        base.pool({}, script)
    with pytest.raises(ValueError, match="arms is empty"):
        Pool((), ())
    with pytest.raises(ValueError, match=r"arms are drafts \(0,\) of 0: give numbers of drafts, or -1"):
        Pool(())
    with pytest.raises(TypeError, match="selector is the class Script: give an object"):
        base.pool({"a": SMALL}, Script)
    with pytest.raises(TypeError, match="selector is a int without init, select, update: give one of"):
        base.pool({"a": SMALL}, 3)

    class ForThree(Script):
        arms = 3

    with pytest.raises(ValueError, match="is made for 3 arms and there are 2: a, none"):
        base.pool({"a": SMALL, "none": None}, ForThree())
    with pytest.raises(ValueError, match=r"arm is 5: there are arms 0\.\.1"):
        base.pool({"a": SMALL, "none": None}, Fixed(5)).build().generate([[1]], 4)
    for capacities in ({"b": 3}, {"a": -1}):
        with pytest.raises(ValueError, match="give numbers >= 0 for arms of a, none"):
            base.pool({"a": SMALL, "none": None}, script, capacities=capacities)
    tight = base.pool({"a": SMALL, "b": OTHER}, script, capacities={"a": 2, "b": 1})
    says = r"capacities hold 3 rows together \(a 2, b 1\) and the batch has 4: raise them, add an arm 'do not speculate'"
    for builder in (tight, tight.executor(Pipelined(4)), tight.executor(Pipelined(2, "processes"))):
        with pytest.raises(ValueError, match=says):
            builder.build().generate([[1], [2], [3], [4]], 5)
    with pytest.raises(ValueError, match="vocabulary has 5 entries and the draft's 6"):
        base.pool({"a": SMALL, "b": sd.TableModel.random(6, 1)}, script).build()
    target, longer = sd.HFModel(tiny("llama", 0), byte_tokenizer()), byte_tokenizer()
    longer.add_tokens(["zz"])
    with pytest.raises(ValueError, match="target and draft have different tokenizers"):
        sd.decoder(target).pool({"a": target, "b": sd.HFModel(tiny("llama", 1), longer)}, script).build()
    for length in (0, -1):
        with pytest.raises(
            ValueError, match=f"length is {length}: give at least 1; an arm that does not speculate is None"
        ):
            Arm(SMALL, length)
    chains = sd.HFModel(tiny("mpt"))
    with pytest.raises(ValueError, match="proposes trees but this target takes chains only"):
        sd.decoder(chains).pool({"a": sd.drafts.Tree(chains, (2,))}, script).build()


def test_modelled_costs(models):
    target, one, _ = models
    spire = sd.drafts.Spire(SpireModel.from_target(target.model, 1, window=4), block=4)
    arms = [
        sd.drafts.Model(target),
        sd.drafts.Model(one),
        sd.drafts.NGram(),
        None,
        sd.drafts.MagicDec(),
        spire,
    ]
    costs = ArmCosts.of(target, arms)
    share = weights(one) / weights(target)
    assert 0 < share < 1
    assert costs.draft[:5] == (1.0, share, 0.0, 0.0, 1.0)
    assert 0 < costs.draft[5] < 1
    assert costs.seconds(torch.tensor([1, 3, 4]), torch.tensor([4, 0, 2])).tolist() == pytest.approx(
        [4 * share + 1, 1, 3]
    )
    assert ArmCosts.of(TABLE, [SMALL]).draft == (0.0,)
    experts = tiny("qwen3_moe", 0)  # two of four are used
    of_experts = sum(p.numel() for name, p in experts.named_parameters() if "experts" in name.split("."))
    used = weights(experts) - of_experts // 2
    assert of_experts > 0
    assert ArmCosts.of(sd.HFModel(experts), [one]).draft == (weights(one) / used,)
    with pytest.raises(ValueError, match="need draft >= 0 and verify > 0"):
        ArmCosts((1.0,), verify=0.0)
    with pytest.raises(ValueError, match="need draft >= 0"):
        ArmCosts((-1.0,))


def test_a_pool_without_a_selector_is_its_first_arm():
    pool = Pool((sd.drafts.Model(SMALL), sd.drafts.NGram()), (0, 1, -1))
    base = sd.decoder(TABLE)
    one, other = (
        b.build().generate([[1], [2]], 20, seed=0) for b in (base.draft(pool, 3), base.draft(SMALL, 3))
    )
    assert one.ids == other.ids
    assert one.row_stats == other.row_stats
    state = pool.bind(TABLE, sd.Sampling()).init(sd.Context.of([[1], [2]], 8), None)
    assert isinstance(state, PoolState)
    assert state.arm.tolist() == [0, 0]


def test_rows_that_join():
    pool = Pool((sd.drafts.NGram(), sd.drafts.NoDraft()), (0, 1))
    context = sd.Context.of([[1, 2, 1], [3]], 9)
    state = pool.assign(pool.init(context, None), torch.tensor([1, 0]))
    both = pool.join(state, pool.init(context, None))
    assert both.arm.tolist() == [1, 0, 0, 0]
    assert len(both.proposals) == 2


# -- exactness ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class After(Script):
    """The second arm for requests from number ``first`` on, from each one's third choice on."""

    first: int = 0

    def select(self, state: Any, context: Any, capacities: Tensor, rng: Any) -> tuple[Tensor, Tensor, Any]:
        told, arm = state[1], []
        for request in context.request.tolist():
            told.chosen[request] = told.chosen.get(request, 0) + 1
            arm.append(int(request >= self.first and told.chosen[request] > 2))
        return torch.tensor(arm), torch.full((context.batch,), 0.5), state


@dataclass(frozen=True)
class Counts(sd.drafts.Model):
    """Counts what it observes, so its state must be there from the beginning."""

    seen: list[int] = field(default_factory=list, compare=False)

    def observe(self, state: Any, round: Any) -> Any:
        self.seen.append(round.context.batch)
        return super().observe(state, round)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(("first", "made"), [(9, False), (3, True), (0, True)])
def test_a_models_cache_is_made_when_a_row_first_uses_it(models, monkeypatch, served, first, made):
    target, one, two = models
    batches: list[int] = []
    cache = type(two).cache

    def noted(self: Any, batch: int, capacity: int) -> Any:
        if self is two and capacity > 1:  # ``serve`` looks at a cache for one token
            batches.append(batch)
        return cache(self, batch, capacity)

    monkeypatch.setattr(type(two), "cache", noted)
    decoder = sd.decoder(target).pool({"one": one, "two": two}, After(first=first), 3).greedy().build()
    plain = sd.decoder(target).greedy().build().generate(PROMPTS, 12).ids
    if served:  # rows join and leave
        requests = [sd.Request(prompt, 12) for prompt in PROMPTS]
        found = {f.index: f.ids for f in decoder.serve(requests, limit=2)}
        assert [found[b] for b in range(len(PROMPTS))] == plain
    else:
        assert decoder.generate(PROMPTS, 12).ids == plain
    assert bool(batches) is made, batches


def test_what_a_late_cache_would_raise_is_raised_at_the_start(models, monkeypatch):
    target, one, _ = models
    moved = sd.HFModel(model := tiny("llama", 3, num_hidden_layers=1))
    decoder = sd.decoder(target).pool({"one": one, "two": moved}, Fixed(0), 3).greedy().build()
    assert decoder.generate(PROMPTS, 4).ids
    monkeypatch.setattr(contiguous, "free_bytes", lambda device: 10**5)
    with pytest.raises(MemoryError, match="KV cache of 6 rows"):
        decoder.draft.init(sd.Context.of(PROMPTS, 4000), None)
    need = 6 * (4000 + moved._path.spare) * moved.bytes_per_token()
    monkeypatch.setattr(contiguous, "free_bytes", lambda device: 1.5 * need)  # for one of the two
    state = Pool((sd.drafts.Model(moved),), (0,)).init(sd.Context.of(PROMPTS, 4000), None)
    with pytest.raises(MemoryError, match="KV cache of 12 rows"):
        Pool((sd.drafts.Model(moved),), (0,)).join(state, state)
    with pytest.raises(MemoryError, match="KV cache of 6 rows"):
        decoder.draft.init(sd.Context.of(PROMPTS, 4000), None)
    monkeypatch.undo()
    model.float()
    with pytest.raises(RuntimeError, match="make a new HFModel"):
        decoder.generate(PROMPTS, 4)


def test_a_model_that_observes_is_there_from_the_beginning(models):
    target, one, two = models
    draft = Counts(two)
    decoder = sd.decoder(target).pool({"one": one, "two": draft}, Fixed(0), 3).greedy().build()
    rounds: list[Any] = []
    decoder.generate(PROMPTS, 8, on_round=rounds.append)
    assert len(draft.seen) >= len(rounds) - 2 > 2


def test_a_pool_follows_the_targets_draws():
    builder = catalogue._everything(2).verifier(sd.Coupled()).executor(Pipelined())
    assert certify_coupled(builder.build(), ((0,), (1,)), 3, nodes=None).lossless


def test_what_was_learned_goes_from_call_to_call():
    decoder = (
        sd.decoder(TABLE).pool({"a": SMALL, "none": None}, Spin(exploration=1, pool="global"), 2).build()
    )
    learned = decoder.begin(2)
    decoder.generate([[1], [2]], 12, seed=0, selection=learned)
    once = float(learned.state.own.sums.sum())
    decoder.generate([[1], [2]], 12, seed=1, selection=learned)
    twice = float(learned.state.own.sums.sum())
    assert twice > once > 0
    for _ in decoder.stream([[1], [2]], 12, seed=2, selection=learned):
        pass
    thrice = float(learned.state.own.sums.sum())
    assert thrice > twice
    list(decoder.serve([sd.Request([1], 12)], limit=2, seed=3, selection=learned))
    assert float(learned.state.own.sums.sum()) > thrice


def test_a_decoder_with_a_pool_is_pickled():
    decoder = sd.decoder(TABLE).pool({"a": SMALL, "none": None}, Random(), 2).build()
    expected = decoder.generate([[1], [2]], 12, seed=0)  # which keeps what it has found out
    assert pickle.loads(pickle.dumps(decoder)).generate([[1], [2]], 12, seed=0).ids == expected.ids


def test_an_aborted_run_leaves_no_requests_behind():
    def fail(round):
        if round.number == 2:
            raise KeyError("enough")

    decoder = (
        sd.decoder(TABLE)
        .pool({"a": SMALL, "none": None}, Spin(pool=lambda c: c.row(0)[:1] * c.batch), 2)
        .build()
    )
    learned = decoder.begin(1)
    with pytest.raises(KeyError):
        decoder.generate([[1]], 30, seed=0, on_round=fail, selection=learned)
    assert learned.state.own.member == {0: learned.state.own.keys.of[1]}
    rounds: list[Any] = []
    decoder.generate([[2]], 30, seed=0, on_round=rounds.append, selection=learned)
    assert {1, 2} <= set(learned.state.own.keys.of)  # the new request 0 is seen under its own key


def test_a_selection_of_another_pool_is_refused():
    make = lambda **arms: sd.decoder(TABLE).pool(arms, Random(), 2).build()  # noqa: E731
    other = make(a=SMALL, b=OTHER).begin(1)
    with pytest.raises(ValueError, match="selection is of a pool of a, b"):
        make(a=SMALL).generate([[1]], 4, selection=other)
    with pytest.raises(ValueError, match="selection is of a pool of a, b"):
        sd.decoder(TABLE).build().generate([[1]], 4, selection=other)


def test_a_selector_that_needs_a_reward_of_every_arm():
    base, arms = sd.decoder(TABLE), {"a": SMALL, "b": OTHER}
    with pytest.raises(ValueError, match=r"Hedge\(.*give pool\(\.\.\., reward=function\).*\[B, 2\]"):
        base.pool(arms, sd.selectors.Hedge(), 2)
    every = lambda round: (1.0 + round.committed)[:, None].repeat(1, 2)  # noqa: E731
    out = base.pool(arms, sd.selectors.Hedge(scale=4.0), 2, reward=every).build().generate([[1]], 9, seed=0)
    assert len(out.ids[0]) == 9


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda base: base.pool([SMALL, OTHER], Random()), "arms is a list: give a mapping"),
        (lambda base: base.pool({"a": SMALL}, Random(), capacities=[1]), "capacities is a list: give a mapping"),
        (lambda base: base.pool({"a": SMALL}, Random(), capacities={"a": 1.5}), r"capacities\['a'\] is 1\.5"),
        (lambda base: base.pool({"a": SMALL}, Random(), "2"), "length is '2': give a whole number"),
        (lambda base: base.pool({"a": Arm(SMALL, 2.5)}, Random()), r"length is 2\.5"),
        (lambda base: base.pool({"a": SMALL}, Fixed("a")), "arm is 'a': give a whole number: arms are counted"),
        (lambda base: base.pool({"a": SMALL}, type("S", (), {"select": 1, "update": 1})()), "without init: .* an object with init, select, update"),
    ],
)  # fmt: skip
def test_parts_of_a_pool_of_the_wrong_kind(make, says):
    with pytest.raises(TypeError, match=says):
        make(sd.decoder(TABLE))


def test_lengths_and_costs_of_a_pool_are_checked():
    base = sd.decoder(TABLE)
    with pytest.raises(ValueError, match="length is 0"):
        base.pool({"a": SMALL}, Random(), 0)
    with pytest.raises(ValueError, match="costs has 1 arms and there are 2"):
        base.pool({"a": SMALL, "none": None}, Random(), 2, costs=ArmCosts((0.5,)))
