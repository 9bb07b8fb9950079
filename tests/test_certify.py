"""The certifier: exact on what is lossless, not to be fooled by what is not. ``recipes/certify.py`` runs the whole catalogue."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import specdec as sd
from specdec import tree
from specdec.audit import catalogue, planted
from specdec.audit.adversaries import Adversary
from specdec.audit.around import verifier_of
from specdec.audit.certify import Certificate, certify, certify_coupled
from specdec.audit.plain import enumerate_plain, total_variation
from specdec.audit.walk import Branches, Walk, pack
from specdec.rng import ACCEPT, BONUS, Key
from specdec.types import Proposal
from specdec.verifiers import DistinctTransport, FusedRejection, KSeq, OptimalTransport

ALL = catalogue.everything()
SLOW = {  # a second or so each, or much like one that stays
    "adaptive chains",
    "adaptive trees 2",
    "adversarial selector 0",
    "adversarial selector 1",
    "adversarial selector, point masses, chains and trees",
    "optimistic, chain k=1",
    "optimistic, chain k=2, vocabulary 2",
    "optimistic, adversarial selector 0",
    "optimistic, hindsight 0",
    "optimistic, hindsight 1",
    "optimistic, hindsight 2",
    "pipelined behind a barrier, adaptive trees",
    "pipelined, adversarial selector 1, arms chosen ahead",
    "pipelined, adversarial selector 2, arms chosen late",
    "tree (2, 1)",
    "chain k=3",
    "chain k=3, vocabulary 2",
    "tree of two drafts' chains, merged",
    "every point-mass tree of 2",
    "length adapted to dropped nodes",
    "coupled, every tree of 2, zeros",
    "coupled, every tree, vocabulary 2",
    "coupled, every tree, 3 candidates",
    "distinct transport, adaptive trees 0",
    "distinct transport, tree (1, 2)",
    *(f"float64 llama, {what} k=2, a mask of its own" for what in ("SPIRe", "MagicDec")),
    "float64 llama, SPIRe k=2, all layers, no feedback",
    "float64 llama, optimistic, EAGLE-3 k=2",
    "float64 llama, tree (2, 1)",
    "float64 llama, windowed chain k=2",
    "float64 llama, chain k=2 under a mask of its own",
    "float64 llama, DFlash k=2, two ids",
    "float64 llama, DSpark k=2, ended by its confidence",
    "float64 llama, MagicDec k=2",
    "float64 llama, MTP k=2, two ids",
    "coupled, every tree",
    "ragged rows, tree (2, 1)",
    "chain k=2, repetition and prefix penalties",
    "tree (2, 1), penalties, temperature 1.5, top-p 0.9",
    "block verification, chain k=3",
    "block verification, the paper's tests, k=3",
    "block verification: the token-wise residual",
    "block verification: a test of the distributions before its token",
    "traversal, tree (2, 1)",
    "traversal, tree (2, 1), penalties, temperature 1.5, top-p 0.9",
    "traversal, adaptive trees 2",
    *(f"{what}, tree (2, 1)" for what in ("k-SEQ", "optimal transport")),
    *(c.name for c in catalogue.adaptive() if "its entropy" not in c.name and "stops" not in c.name),
    *(f"{what}, adaptive trees 1" for what in ("k-SEQ", "optimal transport", "distinct transport")),
}
EXACT = {
    "argmax declared as a sample of softmax(q)": 0.45,
    "node dropped after looking at its value": 0.15,
    "block verification: the whole product is capped": 0.04,
    "block verification: tests end at the first failure": 0.1,
    "siblings without replacement, declared independent": 0.09,
    "distinct siblings sorted by probability": 0.95 / 14,
    "equal siblings merged": 0.045,
    "a sibling dropped by its value": 0.075,
    "k-SEQ: ρ is 1, and the residual is clipped": 0.04,
}


@pytest.mark.parametrize(
    "composition",
    [pytest.param(c, marks=pytest.mark.slow if c.name in SLOW else (), id=c.name) for c in ALL],
)
def test_claims_are_exact_and_planted_biases_are_seen(composition):
    found = composition.run()
    assert composition.stands(found), found
    assert found.mass < 1e-12
    if composition.name in EXACT:
        assert found.total_variation == pytest.approx(EXACT[composition.name], abs=1e-12)


def test_the_catalogue_is_as_large_as_promised():
    names = [c.name for c in ALL]
    assert len(set(names)) == len(names)
    assert set(names) >= SLOW
    assert sum(c.lossless for c in ALL) >= 20
    assert sum(not c.lossless and c.distance is None for c in ALL) >= 3


def test_the_planner_of_the_catalogue_changes_its_mind():
    planner = next(c for c in ALL if c.name == "a planner that learns while it decodes").builder.build()
    orders = set()
    for seed in range(12):
        arms: list[int] = []
        planner.generate(
            [[0]],
            6,
            seed=seed,
            on_round=lambda r, arms=arms: arms.append(int(r.arm[0])) if r.number else None,
        )
        orders.add(tuple(arms[:3]))
    assert orders >= {(2, 2), (2, 0, 2)}  # an acceptance keeps it, and a rejection makes a plain round


def test_a_certificate_says_what_was_found_in_one_line():
    found = certify(catalogue.BASE.build())
    assert found.lossless
    assert repr(found).startswith("Certificate(total variation ")
    assert "\n" not in repr(found)
    assert found.branches == 27
    assert found.distribution[0].keys() == found.target[0].keys()
    assert not Certificate(0.0, 0.0, 1, 0.0, astray=0.5).lossless


def test_a_biased_certificate_says_so_and_where():
    found = certify(
        catalogue.BASE.draft(catalogue.CHAIN, length=1).verifier(planted.BonusFromTarget()).build()
    )
    assert repr(found).startswith("NOT LOSSLESS: Certificate(total variation ")
    assert found.biased_from == 1  # the first id of every text is drawn without a draft
    assert "biased from ids[1] on" in str(found)
    worst = found.worst(3)
    apart = [abs(one.decoded - one.target) for one in worst]
    assert len(worst) == 3
    assert apart == sorted(apart, reverse=True)
    assert apart[0] > 1e-3
    for one in worst:
        assert one.decoded == found.distribution[one.row][one.text]
        assert one.target == found.target[one.row][one.text]
    right = certify(catalogue.BASE.draft(catalogue.CHAIN, length=1).build())
    assert right.biased_from is None
    assert right.worst() == []
    declared = Certificate(0.1, 0.0, 1, 0.0, claimed=False)
    assert repr(declared).startswith("Certificate(declared lossy, total variation 1.0e-01")


def test_the_row_that_is_biased_is_named():
    wrong = catalogue.BASE.draft(catalogue.CHAIN, length=1).verifier(planted.BonusFromTarget()).build()
    found = certify(wrong, [[0], [1, 2], [2]], [2, 4, 3])  # the first row has no room for a drafted token
    assert found.biased_from == 1
    assert {one.row for one in found.worst(1000)} == {1, 2}
    assert certify(wrong, [[0]], 1).biased_from is None


def test_progress_is_shown(capsys):
    decoder = catalogue.BASE.draft(catalogue.CHAIN, length=1).build()
    certify(decoder, max_new_tokens=2, progress=True)
    shown = capsys.readouterr().err
    assert "certifying: 100.0 % of the probability" in shown
    assert "branches" in shown
    certify(decoder, max_new_tokens=2)
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match="progress is 1: give True or False"):
        certify(decoder, progress=1)


def by_rejection(proposal, probs, context, rng):
    """A verifier's function alone."""
    return sd.Rejection()(proposal, probs, context, rng)


def lazy(proposal, probs, context, rng):
    """Takes the bonus from p after a rejection, of chains."""
    if not proposal.nodes:
        return sd.Rejection()(proposal, probs, context, rng)
    return planted.BonusFromTarget()(proposal, probs, context, rng)


class Chains(sd.Rejection):
    """Refuses trees, and trusts its shortcut from logits no more than its own call."""

    def check(self, proposal):
        super().check(proposal)
        if not bool(tree.is_chain(proposal.parents, proposal.size).all()):
            raise ValueError("chains only")


class Lazy(Chains):
    def __call__(self, proposal, probs, context, rng):
        return lazy(proposal, probs, context, rng)


@pytest.mark.slow
def test_a_verifier_and_a_function_are_certified_at_once():
    """Without a decoder, in less than a second on a free machine: some 2,600 branches."""
    found = sd.certify(sd.Rejection())
    assert found.lossless
    assert 2_000 < found.branches < 4_000
    assert found.seconds < 10
    assert found.scope.siblings
    assert certify(by_rejection).distribution == found.distribution
    fused = certify(FusedRejection())
    assert fused.lossless
    assert fused.scope.parts["verifier"] == "fused rejection"
    chains = certify(Chains())
    assert chains.lossless
    assert not chains.scope.siblings
    assert certify(Lazy()).total_variation > 0.05
    for verifier in (KSeq(), OptimalTransport(), DistinctTransport()):
        at_once = certify(verifier)
        assert at_once.lossless
        assert at_once.scope.siblings


def test_what_is_no_decoder_and_no_verifier_is_refused():
    for wrong, what in (
        (sd.decoder(catalogue.MODEL), "a Builder"),
        (sd.Rejection, "the class Rejection"),
        (3, "a int"),
    ):
        with pytest.raises(TypeError, match=rf"decoder is {what}: give a built decoder, .*\.build\(\)"):
            certify(wrong)

    class Never(sd.Rejection):
        def check(self, proposal):
            raise ValueError("not today")

    with pytest.raises(ValueError, match="refuses trees, chains and single nodes, lastly with: not today"):
        certify(Never())
    with pytest.raises(ValueError, match="certify_coupled"):
        certify(sd.Coupled())


def test_a_certificate_says_what_it_covered_and_what_not():
    small = certify(catalogue.BASE.build(), [[0, 1]], 2)
    assert small.scope.covered[:3] == [
        "vocabulary of 3",
        "1 prompt, texts of 2 new tokens",
        "up to 0 nodes a round, of which up to 0 accepted",
    ]
    assert {"rejected nodes", "stop rules", "stops inside blocks", "rows beside other prompts"} <= set(
        small.scope.missing
    )
    drafted = catalogue.BASE.draft(catalogue.TREE, length=2).build()
    large = certify(drafted, [[0, 1], [2]], [4, 2], eos_token_id=[2])
    assert large.scope.nodes == 4
    assert large.scope.accepted == 2
    assert large.scope.missing == []
    assert large.scope.parts["draft"] == "tree, length 2"
    for words in (
        "2 prompts in one batch, texts of 2 to 4 new tokens",
        "1 stop rules",
        "stops inside blocks",
    ):
        assert words in repr(large)
    said = str(large.scope)
    assert "verifier: rejection" in said
    assert "\nnot covered: larger vocabularies, longer texts" in said
    assert "did not occur: " in str(small.scope)
    coupled = certify_coupled(catalogue.BASE.verifier(sd.Coupled()).build(), nodes=2)
    assert coupled.scope.nodes == 2


def test_the_targets_distribution_is_the_tables_joint_distribution():
    plain = enumerate_plain(catalogue.MODEL, sd.Sampling(), [2, 1], 3)
    joint = catalogue.MODEL.joint([2, 1], 3)
    assert len(plain.distribution) == 27
    assert all(p == pytest.approx(float(joint[ids]), abs=1e-15) for ids, p in plain.distribution.items())


def test_total_variation_counts_missing_mass():
    assert total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.25, (1,): 0.75}) == pytest.approx(0.25)
    assert total_variation({(0,): 0.5}, {(0,): 1.0}) == pytest.approx(0.5)
    assert total_variation({(0,): 1.0}, {(1,): 1.0}) == pytest.approx(1.0)


def _outcomes(decide) -> dict[tuple[int, ...], float]:
    """All outcomes of ``decide(rng) -> tensors [R]`` with their measures."""
    todo, distribution = [Branches.root()], {}
    while todo:
        walk = Walk(Branches.join(todo))
        answers = torch.stack([torch.as_tensor(a).long() for a in decide(walk.rng())], 1).tolist()
        for answer, measure in zip(answers, walk.branches.measure()):
            distribution[tuple(answer)] = distribution.get(tuple(answer), 0.0) + float(measure)
        todo = [scripts for _, scripts in walk.left]
    return distribution


def _distribution(rng, *probs):
    return torch.tensor(probs, dtype=torch.float64).expand(len(rng.rows), -1)


def _at(rng):
    return torch.full((len(rng.rows),), 3)


def test_a_key_that_is_asked_again_refines_the_same_number():
    def twice(rng):
        first = rng.categorical(_distribution(rng, 0.5, 0.5), Key(_at(rng)))
        again = rng.categorical(_distribution(rng, 0.2, 0.6, 0.2), Key(_at(rng)))
        below = rng.accept(_distribution(rng, 0.9)[:, 0], Key(_at(rng)))
        return first, again, below

    distribution = _outcomes(twice)
    assert distribution == pytest.approx(
        {(0, 0, 1): 0.2, (0, 1, 1): 0.3, (1, 1, 1): 0.3, (1, 2, 1): 0.1, (1, 2, 0): 0.1}
    )


def test_different_keys_are_independent_and_certain_decisions_do_not_branch():
    def several(rng):
        a = rng.accept(_distribution(rng, 0.3)[:, 0], Key(_at(rng), stream=ACCEPT))
        b = rng.accept(torch.where(a, 0.5, 1.0).double(), Key(_at(rng), 1, stream=ACCEPT))
        c = rng.accept(_distribution(rng, 0.0)[:, 0], Key(_at(rng), 2, stream=ACCEPT))
        return a, b, c, rng.categorical(_distribution(rng, 0, 1, 0), Key(_at(rng)))

    assert _outcomes(several) == pytest.approx({(1, 1, 0, 1): 0.15, (1, 0, 0, 1): 0.15, (0, 1, 0, 1): 0.7})


def test_keys_are_packed_without_collisions():
    keys = [
        Key(torch.tensor(a), d, s, t, n)
        for a in (0, 5)
        for d in (0, 1)
        for s in (0, 1)
        for t in (0, 1)
        for n in (0, 1)
    ]
    assert len({int(pack(key)) for key in keys}) == len(keys)
    with pytest.raises(ValueError, match="depth"):
        pack(Key(torch.tensor(0), 1 << 20))


def test_a_key_of_the_wrong_shape_is_refused():
    rng = Walk(Branches.root()).rng()
    with pytest.raises(ValueError, match="rows first"):
        rng.categorical(torch.ones(1, 2, 3), Key(torch.tensor([1])))
    with pytest.raises(ValueError, match="no probabilities"):
        rng.categorical(torch.zeros(1, 3), Key(torch.tensor([1])))


def test_races_are_not_walked_by_accident():
    with pytest.raises(ValueError, match="certify_coupled"):
        certify(catalogue.BASE.verifier(sd.Coupled()).build())
    found = certify_coupled(
        catalogue.BASE.draft(catalogue.CHAIN, length=2).verifier(sd.Coupled()).build(), nodes=None
    )
    assert found.lossless


def test_too_many_branches_are_refused_with_the_remedy():
    with pytest.raises(
        RuntimeError,
        match=r"more than 100 branches, .* % of the probability: give fewer tokens than max_new_tokens=6, a",
    ):
        certify(catalogue.BASE.build(), max_new_tokens=6, limit=100)
    with pytest.raises(RuntimeError, match="fewer nodes=, "):
        certify_coupled(catalogue.BASE.verifier(sd.Coupled()).build(), limit=100)


def asks_too_much(proposal, probs, context, rng):
    """Correct, but draws a token at every depth, of rows that are already rejected, too."""
    B, N = proposal.tokens.shape
    live, accepted = torch.ones(B, dtype=torch.bool), torch.zeros(B, dtype=torch.long)
    bonus = torch.zeros(B, dtype=torch.long)
    for d in range(N + 1):
        p = torch.where(probs[:, d].sum(-1, keepdim=True) > 0, probs[:, d], 1 / probs.shape[-1])
        y = rng.categorical(p, Key(context.length, d, 0, BONUS))
        bonus = torch.where(live, y, bonus)
        if d < N:
            live = live & (d < proposal.size) & (y == proposal.tokens[:, d])
            accepted += live
    return sd.Verdict.of(
        proposal, torch.where(torch.arange(N) < accepted[:, None], torch.arange(N), -1), accepted, bonus
    )


def test_a_verifier_that_asks_too_much_is_told_so():
    decoder = catalogue.BASE.draft(Adversary(catalogue.MENU, 3, trees=False), length=3)
    decoder = decoder.verifier(verifier_of(asks_too_much)).build()
    wanted = r"those so far have [\d.e-]+ % .*max_new_tokens=5, fewer prompts=, a decoder .*does not need"
    with pytest.raises(RuntimeError, match=wanted):
        certify(decoder, [[0], [1], [2, 0]], 5, limit=5000)
    assert certify(decoder, [[0]], 2).lossless


def test_each_prompt_of_a_ragged_batch_has_its_own_distribution():
    prompts, budgets = [[0, 1], [2], [1, 1, 0]], [1, 3, 2]
    decoder = catalogue.BASE.draft(catalogue.TREE, length=2).build()
    # Many small batches, in which every prompt has mates.
    together = certify(decoder, prompts, budgets, batch=7)
    for row, (prompt, budget) in enumerate(zip(prompts, budgets)):
        alone = certify(decoder, [prompt], budget)
        assert together.distribution[row] == pytest.approx(alone.distribution[0], abs=1e-14)
        assert alone.lossless
    assert together.lossless


@dataclass(frozen=True)
class Forwards(Adversary):
    """Proposes row 0's last token in every row: the distribution stays exact, but a row's text depends on its mates."""

    def propose(self, state, context, budget, rng):
        last = context.tokens[0, int(context.length[0]) - 1]
        return Proposal.chain(last.repeat(context.batch, 1), budget.clamp(max=1)), state


def test_a_row_that_depends_on_its_mates_is_not_certified():
    builder = catalogue.BASE.draft(Forwards(catalogue.MENU), length=1)
    with pytest.raises(RuntimeError, match=r"in another batch.*some part of the decoder"):
        certify(builder.build(), [[0], [1], [2]], 4, batch=64)


class PooledArms:
    """All rows take the arm of the most tokens so far, and it is not declared."""

    def init(self, arms):
        return torch.zeros(arms)

    def select(self, state, context, capacities, rng):
        arm = state.argmax().repeat(context.batch)
        return arm, torch.ones(context.batch), state

    def update(self, state, feedback):
        return state.index_add(0, feedback.arm, feedback.tokens.float() - 1.5)


def test_a_selector_that_pools_is_named_with_the_remedy():
    def pool(selector):
        return catalogue.BASE.pool({"chain": catalogue.CHAIN, "plain": None}, selector, length=1).build()

    with pytest.raises(
        RuntimeError, match=r"the selector PooledArms chooses .*info = sd.SelectorInfo\(joint=True\)"
    ):
        certify(pool(PooledArms()), [[0], [1]], 4, batch=16)

    class Declared(PooledArms):
        info = sd.SelectorInfo(joint=True)

    assert certify(pool(Declared()), [[0]], 3).lossless


def test_adversaries_use_their_freedom():
    """They submit no tree, small ones and large ones, of different shapes, and adapt to what was dropped."""
    shapes, rounds = set(), []
    decoder = catalogue.BASE.draft(Adversary(catalogue.MENU, salt=1), length=3).build()
    decoder.generate([[b % 3] for b in range(200)], 6, seed=0, on_round=rounds.append)
    for round in rounds[1:]:
        for b, size in enumerate(round.proposal.size.tolist()):
            shapes.add(tuple(round.proposal.parents[b, :size].tolist()))
    assert {(), (-1,), (-1, -1), (-1, 0), (-1, -1, -1), (-1, 0, 1), (-1, -1, 0), (-1, -1, 1)} <= shapes


def test_measures_partition_the_cube():
    branches = Branches(
        np.array([[1, 2], [1, -1]]), np.array([[0.0, 0.5], [0.25, 0.0]]), np.array([[0.25, 1.0], [1.0, 1.0]])
    )
    assert branches.measure().tolist() == [0.125, 0.75]
    assert Branches.join([branches, Branches.root()]).measure().tolist() == [0.125, 0.75, 1.0]


def test_prompts_are_those_that_generate_takes():
    decoder = sd.decoder(sd.TableModel.random(3, order=1)).build()
    flat, rows = sd.certify(decoder, [0, 1], 2), sd.certify(decoder, [[0, 1]], 2)
    assert flat.distribution == rows.distribution
    with pytest.raises(ValueError, match="prompt 0 has an id outside"):
        sd.certify(decoder, [0, 3], 2)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        certify_coupled(decoder, [[0], []], 2)


@pytest.mark.parametrize(
    ("selector", "capacities"),
    [(sd.selectors.Fixed(0), {"a": 1}), (sd.selectors.Random(), {"a": 1, "b": 1})],
)
def test_capacities_bind_between_the_rows_of_a_prompt_alone(selector, capacities):
    """Branches of one row are no rows of one batch."""
    target, small = (sd.TableModel.random(3, 1, seed=seed) for seed in (1, 2))
    arms = {"a": sd.Arm(small, 2), "b": None}
    pool = sd.decoder(target).pool(arms, selector, length=2, capacities=capacities).build()
    assert sd.certify(pool, [[0]], 3).total_variation < 1e-12
