"""Verifiers that look at all siblings at once, and ways to draw siblings: their laws, by all draws; what they demand; the pocket pair."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare
from test_acceptance import draws, pairs
from walked import walked

import specdec as sd
from specdec import zoo
from specdec.audit import planted_siblings
from specdec.audit.adversaries import Adversary
from specdec.audit.catalogue import BASE, MENU, OTHER
from specdec.audit.certify import certify
from specdec.audit.level_adversary import LevelAdversary
from specdec.drafts.siblings import Distinct, Independent, TopAndOne
from specdec.rng import Key, Philox, seeds
from specdec.types import Context, Proposal
from specdec.verifiers import (
    DistinctTransport,
    KSeq,
    OptimalTransport,
    Rejection,
    Traversal,
    acceptance,
    distinct,
    kseq,
    transport,
)

T3 = [0.45, 0.45, 0.1], [0.2, 0.3, 0.5]


def law_of(rule, p, q, k, replacement=True):
    """The law of the next token, and the probability that a candidate is accepted, over all draws."""
    cases = [(x, w) for x, w in draws(q.tolist(), k, replacement) if w > 0]
    tokens = torch.tensor([x for x, _ in cases])
    weight = torch.tensor([w for _, w in cases], dtype=torch.float64)
    R = len(cases)
    chance, rest = rule(p.expand(R, -1), q.expand(R, -1), tokens, torch.ones_like(tokens) > 0)
    assert float(chance.min()) >= 0
    assert float(chance.sum(1).max()) <= 1 + 1e-12
    said = torch.zeros_like(p).index_add_(0, tokens.flatten(), (chance * weight[:, None]).flatten())
    return said + ((1 - chance.sum(1)) * weight) @ rest, float(said.sum())


@settings(max_examples=60, deadline=None)
@given(pair=pairs(), k=st.integers(1, 3))
def test_independent_candidates_are_verified_exactly_and_accepted_as_promised(pair, k):
    for rule, promised in ((kseq.rule, acceptance.kseq), (transport.rule, acceptance.optimum)):
        law, accepted = law_of(rule, *pair, k)
        assert torch.allclose(law, pair[0], rtol=0, atol=1e-12)
        assert accepted == pytest.approx(float(promised(*pair, k)), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(pair=pairs(most=4), k=st.integers(1, 3))
def test_distinct_candidates_are_verified_exactly_and_accepted_as_promised(pair, k):
    k = min(k, int((pair[1] > 0).sum()))
    law, accepted = law_of(partial(distinct.rule, most=100), *pair, k, replacement=False)
    assert torch.allclose(law, pair[0], rtol=0, atol=1e-12)
    assert accepted == pytest.approx(float(acceptance.optimum(*pair, k, replacement=False)), abs=1e-6)


@pytest.mark.parametrize("spread", [3, 8])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_large_vocabulary_is_moved_as_a_whole(k, spread):
    """Moved candidates are still drawn from q, and the last of them is a token as often as the law of the choice says."""
    draw = torch.Generator().manual_seed(k)
    p, q = torch.randn(2, 1, 600, generator=draw, dtype=torch.float64).mul(spread)
    p, q = p.softmax(-1), (0.9 * p + 0.2 * q).softmax(-1)
    p[:, :50], q[:, 50:100], q[:, 100:150] = 0, 0, p[:, 100:150]
    p, q = (x / x.sum() for x in (p, q))
    order = torch.where(q > 0, torch.where(p > 0, p / q, 0), torch.inf).argsort(dim=1, stable=True)
    p, q, count = p.gather(1, order), q.gather(1, order), torch.tensor([k])
    w, mean = transport.choice(p, q, count), transport.last_of(q, count)
    lacks, spare = (w - q * mean).clamp(min=0), (q * mean - w).clamp(min=0)
    kernel = torch.cat([transport.moved(torch.tensor([j]), q, mean, lacks, spare) for j in range(600)])
    assert float(kernel.min()) >= -1e-12
    assert torch.allclose(kernel.sum(1), torch.ones(600, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(q @ kernel, q, rtol=0, atol=1e-14)
    assert torch.allclose(q * (kernel @ mean[0]), w, rtol=0, atol=1e-13)
    assert float(torch.minimum(p, w).sum()) == pytest.approx(float(acceptance.optimum(p, q, k)), abs=1e-12)
    assert torch.allclose(w, q, rtol=0, atol=1e-12) if k == 1 else float((w - q).abs().max()) > 1e-3


def test_the_suite_sees_a_law_that_is_wrong():
    p, q = (torch.tensor(one, dtype=torch.float64) for one in T3)

    def at_one(p, q, tokens, asked):
        return kseq.tests(p, q, tokens, asked, asked.sum(1), torch.ones_like(p[:, 0]))

    wrong = {
        at_one: (True, 0.04),
        partial(transport.rule, move=planted_siblings._stays): (True, 0.06),
        partial(distinct.rule, most=9, planned=planted_siblings._unordered): (False, None),
    }
    for rule, (replacement, expected) in wrong.items():
        law, _ = law_of(rule, p, q, 2, replacement)
        off = float((law - p).abs().sum() / 2)
        assert off > 0.01  # the solution of a linear program need not be unique
        assert expected is None or off == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("verifier", [KSeq(), OptimalTransport()], ids=lambda v: type(v).__name__)
def test_chains_that_begin_alike_go_on_together(verifier):
    """The first token is certain, so that both chains have it, and the second has two candidates."""
    p, q = (torch.tensor(one, dtype=torch.float64) for one in T3)
    B = 20_000
    laws = torch.stack([torch.tensor([0, 1.0, 0], dtype=torch.float64), q, q]).expand(B, 3, 3)
    probs = torch.stack([laws[0, 0], p, p, p, p]).expand(B, 5, 3)
    where, rng = Context.of([[0]] * B), Philox(seeds(0, B))
    below = rng.categorical(laws[:, 1:], Key(where.length[:, None], 1, torch.arange(2).expand(B, 2)))
    tokens = torch.cat([torch.ones(B, 2, dtype=torch.long), below], 1)
    parents, source = torch.tensor([-1, -1, 0, 1]).expand(B, 4), torch.tensor([0, 0, 1, 2]).expand(B, 4)
    proposal = Proposal(tokens, parents, torch.full((B,), 4), laws, "sampled", source)
    verdict = verifier(proposal, probs, where, rng)
    promised = acceptance.kseq if isinstance(verifier, KSeq) else acceptance.optimum
    expected = float(promised(p, q, 2))
    assert float((verdict.accepted == 2).double().mean()) == pytest.approx(expected, abs=0.012)
    assert expected > float(acceptance.single(p, q)) + 0.1
    assert {tuple(path) for path in verdict.path[:, :2].tolist()} >= {(0, 2), (1, 3)}
    seen = torch.bincount(verdict.tokens[:, 1], minlength=3).double()
    assert chisquare(seen, p * B).pvalue > 1e-3
    # Another law below the second chain: its token is no candidate, and the second level has one.
    other = laws.clone()
    other[:, 2] = q.flip(0)
    alone = verifier(Proposal(tokens, parents, proposal.size, other, "sampled", source), probs, where, rng)
    assert float((alone.accepted == 2).double().mean()) < expected - 0.1


@pytest.mark.parametrize("pair", [T3, ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5])])
def test_rejection_accepts_all_that_can_be_of_the_top_and_a_drawn_one(pair):
    target, small = (sd.TableModel(one) for one in pair)
    for k in (1, 2, 3):
        draft = sd.drafts.Tree(small, (k,), siblings=TopAndOne())
        outcomes = walked(sd.decoder(target).draft(draft, length=1).build(), [0], 3)
        accepted = sum(len(one.rounds[0].path) * one.probability for one in outcomes)
        best = acceptance.greedy_set(*(torch.tensor(one, dtype=torch.float64) for one in pair), k)
        assert accepted == pytest.approx(float(best), abs=1e-12)


@pytest.mark.parametrize("siblings", [Distinct(), TopAndOne()], ids=lambda how: type(how).__name__)
def test_traversal_takes_siblings_drawn_in_any_way(siblings):
    builder = BASE.draft(sd.drafts.Tree(OTHER, (2, 1), siblings=siblings), length=2).verifier(Traversal())
    for top_k in (None, 1):  # of one token no second can be drawn
        found = certify(builder.sampling(top_k=top_k).build(), max_new_tokens=4)
        assert found.lossless, found


@pytest.mark.parametrize("siblings", [Distinct(), TopAndOne()], ids=lambda how: type(how).__name__)
def test_coupled_texts_are_plain_samplings(siblings):
    base = BASE.verifier(sd.Coupled())
    plain = base.build().generate([[0], [1, 2]], 12, seed=3).ids
    draft = sd.drafts.Tree(OTHER, (2, 2), siblings=siblings)
    assert base.draft(draft, length=2).build().generate([[0], [1, 2]], 12, seed=3).ids == plain


def test_what_a_verifier_demands_is_refused_when_built():
    adversary, independent = Adversary(MENU), sd.drafts.Tree(OTHER, (2,))
    apart = sd.drafts.Tree(OTHER, (2,), siblings=Distinct())
    for draft, verifier, kinds in (
        (adversary, KSeq(), r"'independent', and draft 'adversary' declares 'in turn'"),
        (apart, KSeq(), r"'independent', and draft 'tree' declares 'distinct'"),
        (independent, DistinctTransport(), r"'distinct', and draft 'tree' declares 'independent'"),
        (sd.drafts.Tree(OTHER, (2,), siblings=TopAndOne()), OptimalTransport(), r"declares 'in turn'"),
    ):
        with pytest.raises(ValueError, match=kinds) as refusal:
            BASE.draft(draft, length=1).verifier(verifier).build()
        assert "use drafts.Tree(model, widths, siblings=...)" in str(refusal.value)
        assert "Traversal() or Rejection()" in str(refusal.value)
        for any_siblings in (Traversal(), Rejection(), sd.Coupled()):
            BASE.draft(draft, length=1).verifier(any_siblings).build()
    pool = BASE.pool({"tree": independent, "in turn": adversary}, sd.selectors.Random(), 2)
    with pytest.raises(ValueError, match=r"'k-SEQ' takes trees .* draft 'adversary'"):
        pool.verifier(KSeq()).build()
    BASE.draft(Adversary(MENU, trees=False), length=2).verifier(KSeq()).build()  # chains have no siblings


def test_what_a_proposal_shows_is_refused_when_checked():
    law = torch.tensor([[[0.2, 0.3, 0.5], [0.0, 0.375, 0.625]]], dtype=torch.float64)
    tokens, parents, two = torch.tensor([[0, 1]]), torch.tensor([[-1, -1]]), torch.tensor([2])
    apart = Proposal(tokens, parents, two, law, "sampled")
    shared = Proposal(tokens, parents, two, law[:, :1], "sampled", torch.tensor([[0, 0]]))
    for verifier in (KSeq(), OptimalTransport()):
        verifier.check(shared)
        with pytest.raises(ValueError, match=r"nodes 0 and 1 of row 0 have distributions of their own: use"):
            verifier.check(apart)
    DistinctTransport().check(apart)
    with pytest.raises(ValueError, match=r"drawn without replacement, .* node 1 of row 0 is not: use"):
        DistinctTransport().check(shared)
    for verifier in (KSeq(), OptimalTransport(), DistinctTransport()):
        verifier.check(Proposal(tokens, parents, two))  # point masses: as by rejection
        with pytest.raises(ValueError, match=rf"{type(verifier).__name__}\(trust_declared=True\)"):
            verifier.check(Proposal(tokens, parents, two, law, "declared"))


def test_a_linear_program_that_is_too_large_is_refused():
    small = sd.TableModel.random(30, 1, seed=0)
    draft = sd.drafts.Tree(small, (2, 1), siblings=Distinct())
    base = sd.decoder(sd.TableModel.random(30, 1, seed=1)).draft(draft, length=2)
    base.verifier(DistinctTransport()).build().generate([[0]], 3, seed=0)  # 435 sets
    with pytest.raises(
        ValueError, match=r"every set of 2 among the 30 tokens .*, 435, and most is 400: draw"
    ):
        base.verifier(DistinctTransport(most=400)).build().generate([[0]], 3, seed=0)
    with pytest.raises(ValueError, match="most is 0"):
        DistinctTransport(most=0)


def test_siblings_carry_what_they_were_drawn_from():
    """Distinct ones have no elder's token; of the others the drawn one comes first, and the points are the most probable."""
    q = torch.tensor([[[0.5, 0.0, 0.3, 0.2], [1.0, 0, 0, 0]]], dtype=torch.float64).expand(400, -1, -1)
    rng, key = (
        Philox(seeds(0, 400)),
        Key(torch.ones(400, 1, 1, dtype=torch.long), 0, torch.arange(6).view(1, 2, 3)),
    )
    for how in (Distinct(), TopAndOne()):
        drawn = how(q, 3, key._replace(sibling=key.sibling.expand(400, 2, 3)), rng)
        assert drawn.tokens.shape == (400, 2, 3)
        laws = drawn.distributions[:, drawn.source.reshape(-1)].view(400, 2, 3, 4)
        assert torch.allclose(laws.sum(-1), torch.ones(400, 2, 3, dtype=torch.float64))
        assert bool((laws.gather(3, drawn.tokens[..., None]) > 0).all())
        ordered = drawn.tokens.sort(-1).values
        assert bool((ordered[..., 1:] > ordered[..., :-1]).all())
        if isinstance(how, Distinct):
            assert drawn.tokens[:, 1].tolist() == [[0, 1, 2]] * 400  # q has one token; the others are points
            seen = torch.bincount(drawn.tokens[:, 0, 0], minlength=4)
            assert chisquare(seen[[0, 2, 3]].double(), torch.tensor([200.0, 120, 80])).pvalue > 1e-3
        else:
            assert drawn.tokens[:, 0].tolist() == [[3, 0, 2]] * 400
            assert drawn.tokens[0, 1, 1] == 0


def test_a_draft_at_temperature_0_and_a_greedy_target_are_verified_by_all():
    small = sd.drafts.Tree(OTHER, (2, 1), sampling=sd.Sampling(temperature=0.0))
    plain = BASE.greedy().build().generate([[0], [1, 2]], 6, seed=0).ids
    for verifier in (KSeq(), OptimalTransport(), Traversal()):
        decoder = BASE.draft(small, length=2).verifier(verifier)
        decoder.build().generate([[0], [1, 2]], 6, seed=0)
        assert decoder.greedy().build().generate([[0], [1, 2]], 6, seed=0).ids == plain


@pytest.mark.parametrize(
    ("verifier", "siblings"),
    [(KSeq(), Independent()), (OptimalTransport(), Independent()), (DistinctTransport(), Distinct())],
    ids=["k-SEQ", "optimal transport", "distinct transport"],
)
def test_a_pool_may_hold_a_greedy_tree_beside_a_drawn_one(verifier, siblings):
    """Among drawn nodes the greedy tree's carry one-hot distributions. Its rows are verified as the point masses that they are."""
    greedy, drawn = (
        sd.drafts.Tree(OTHER, (2, 1), how, siblings=siblings) for how in (sd.Sampling(0.0), None)
    )
    pool = BASE.pool({"greedy": greedy, "drawn": drawn}, sd.selectors.Random(), 1).verifier(verifier).build()
    assert certify(pool, max_new_tokens=3).lossless
    rounds = []
    pool.generate([[0]] * 6, 5, seed=list(range(6)), on_round=rounds.append)
    assert any(len(set(one.arm.tolist())) == 2 for one in rounds[1:])
    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    laws = torch.nn.functional.one_hot(tokens, 3).double()
    laws[1] = torch.tensor([0.2, 0.3, 0.5])
    if isinstance(verifier, DistinctTransport):
        laws[1, 1:] = torch.tensor([[0.4, 0.6, 0], [0.2, 0.3, 0.5]])
    source = torch.tensor([[0, 1, 2], [0, 0, 2]]) if siblings == Independent() else None
    parents = torch.tensor([[-1, -1, 0]] * 2)
    mixed = Proposal(tokens, parents, torch.tensor([3, 3]), laws, "sampled", source)
    points = Proposal(tokens[:1], parents[:1], torch.tensor([3]))
    p = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p /= p.sum(-1, keepdim=True)
    where, one = Context.of([[0], [0]]), torch.tensor([0])
    verifier.check(mixed)
    for seed in range(40):
        rng = Philox(seeds(seed, 2))
        alone = verifier(points, p[:1], where.select(one), rng.select(one))
        assert torch.equal(verifier(mixed, p, where, rng).tokens[:1], alone.tokens)


def test_level_adversaries_use_their_freedom():
    """They draw trees of different shapes, and equal siblings whose children have one distribution, or several."""
    shapes, alike, rounds = set(), set(), []
    decoder = BASE.draft(LevelAdversary(MENU, limit=4), length=3).build()
    decoder.generate([[b % 3] for b in range(300)], 6, seed=0, on_round=rounds.append)
    for round in rounds[1:]:
        proposal, laws = round.proposal, round.proposal.distributions()
        for b, size in enumerate(proposal.size.tolist()):
            parents, tokens = proposal.parents[b, :size].tolist(), proposal.tokens[b].tolist()
            shapes.add(tuple(parents))
            two = [n for n in range(size) if parents[n] >= 0]
            for m in two:
                for n in two:
                    if parents[m] < parents[n] and tokens[parents[m]] == tokens[parents[n]]:
                        alike.add(torch.equal(laws[b, m], laws[b, n]))
    assert {(), (-1,), (-1, -1), (-1, 0), (-1, -1, 0), (-1, -1, 1), (-1, 0, 0), (-1, -1, 0, 1)} <= shapes
    assert alike == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "draft", "length"),
    [
        (Traversal(), lambda small: sd.drafts.Tree(small, (2, 2)), 2),
        (Traversal(), lambda small: sd.drafts.Tree(small, (3,), siblings=Distinct()), 1),
        (Rejection(), lambda small: sd.drafts.Tree(small, (3,), siblings=TopAndOne()), 1),
        (KSeq(), lambda small: sd.drafts.Tree(small, (3, 1)), 2),
        (OptimalTransport(), lambda small: sd.drafts.Tree(small, (3, 1)), 2),
    ],
    ids=["traversal", "traversal, distinct", "top and one", "k-SEQ", "optimal transport"],
)
def test_texts_of_the_pocket_pair_have_the_targets_distribution(verifier, draft, length):
    """The first drafted token of 1,500 rows, given the token before it."""
    target, small = (sd.HFModel(*zoo.load(name)) for name in ("pocket-target", "pocket-140k"))
    prompt, rows = target.tokenizer("def add(a, b):\n    return")["input_ids"], 1_500
    decoder = sd.decoder(target).draft(draft(small), length).verifier(verifier).sampling(temperature=0.8)
    texts = decoder.build().generate([prompt] * rows, 3, seed=1, eos_token_id=()).ids
    before = sorted({text[0] for text in texts})
    context = Context.of([[*prompt, token] for token in before])
    logits = target.score(target.cache(len(before), len(prompt) + 1), context).logits
    laws = sd.Sampling(temperature=0.8)(logits, context)[:, 0].double()
    statistic, freedom = 0.0, 0
    for token, law in zip(before, laws):
        seen = torch.tensor([text[1] for text in texts if text[0] == token])
        expected = law / law.sum() * len(seen)
        large = expected >= 5
        rest = float(expected[~large].sum())
        counted = torch.bincount(seen, minlength=len(law)).double()
        counts = [*counted[large].tolist(), float(counted[~large].sum())]
        wanted = [*expected[large].tolist(), rest]
        if rest < 5:  # merged with the smallest
            counts, wanted = [*counts[:-2], sum(counts[-2:])], [*wanted[:-2], sum(wanted[-2:])]
        if len(counts) > 1:
            statistic += chisquare(counts, wanted).statistic
            freedom += len(counts) - 1
    assert freedom > 20
    assert chi2.sf(statistic, freedom) > 1e-3


@pytest.mark.parametrize("gap", [20.0, 40.0, 60.0])
def test_distinct_candidates_of_a_draft_that_is_nearly_certain(gap):
    """What is left without its first token is then far below the rounding error of 1."""
    q = torch.tensor([0.0, gap, 1.2], dtype=torch.float64).softmax(-1)
    draft = sd.drafts.Tree(sd.TableModel(q), (2,), siblings=Distinct())
    base = sd.decoder(sd.TableModel([0.3, 0.4, 0.3])).draft(draft, length=1)
    assert certify(base.verifier(DistinctTransport()).build(), max_new_tokens=3).lossless
