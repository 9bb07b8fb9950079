"""Verifiers that are declared lossy: their distances, their rules one by one, and that every result says so."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from walked import walked

import specdec as sd
from specdec import lab
from specdec.audit.certify import certify
from specdec.rng import Key, Philox, seeds
from specdec.verifiers import FLy, Mixture, Synthetic, TypicalAcceptance

P, Q = [0.45, 0.45, 0.1], [0.2, 0.3, 0.5]
LOSSY = (TypicalAcceptance(), Mixture(0.5), FLy(window=1), Synthetic(0.5))
by_name = pytest.mark.parametrize("verifier", LOSSY, ids=lambda v: type(v).__name__)


def tensor(*p):
    return torch.tensor(p, dtype=torch.float64)


def composed(verifier, p=P, q=Q, k=1):
    return sd.decoder(sd.TableModel(p)).draft(sd.TableModel(q), length=k).verifier(verifier).build()


def second_token(decoder):
    """The exact distribution of the first drafted token; the prefill gives the one before it."""
    found = certify(decoder, max_new_tokens=3)
    law = torch.zeros(3, dtype=torch.float64)
    for ids, mass in found.distribution[0].items():
        law[ids[1]] += mass
    return law, found


@pytest.mark.parametrize(
    ("verifier", "law", "distance"),
    [
        (TypicalAcceptance(epsilon=0.2, delta=0.3), (0.425, 0.525, 0.05), 0.075),
        (Mixture(0.5), (0.325, 0.375, 0.3), 0.2),
        (Synthetic(0.5), (0.325, 0.375, 0.3), 0.2),
        (Synthetic(1.0), tuple(Q), 0.4),
        (Mixture(1.0), tuple(P), 0.0),
    ],
    ids=repr,
)
def test_known_distances(verifier, law, distance):
    assert torch.allclose(verifier.law(tensor(*P), tensor(*Q)), tensor(*law), rtol=0, atol=1e-15)
    drafted, found = second_token(composed(verifier))
    assert torch.allclose(drafted, tensor(*law), rtol=0, atol=1e-12)
    assert found.total_variation == pytest.approx(distance, abs=1e-12)
    assert not found.claimed
    assert "declared lossy, total variation" in repr(found)
    assert "lossy" not in repr(certify(composed(sd.Rejection()), max_new_tokens=3))


weights = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(p=weights, q=weights, share=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_one_drafted_token_has_the_law_that_is_said(p, q, share):
    """Zeros, ties and one-token supports included; the enumeration runs the decoder."""
    p, q = ([x / sum(w) for x in w] for w in (p, q))
    for verifier in (TypicalAcceptance(0.3, 0.09 + share), Mixture(share), Synthetic(share)):
        law, _ = second_token(composed(verifier, p, q))
        assert torch.allclose(law, verifier.law(tensor(*p), tensor(*q)), rtol=0, atol=1e-12)


def test_fly_keeps_a_rejected_token_as_by_its_rule():
    """Two drafted tokens, window 1, by hand: the first is kept if it fails, p of it is not 0 and the second passes."""
    found = certify(composed(FLy(window=1), k=2), max_new_tokens=4)
    p, q = tensor(*P), tensor(*Q)
    both, left = torch.minimum(p, q), (p - q).clamp(min=0) / 0.4
    law = torch.outer(both, p)  # accepted, and then losslessly
    law += 0.4 * torch.outer(tensor(0, 0, 1), both)  # only the third token is ever rejected
    law += 0.4 * 0.4 * torch.outer(left, p)
    drafted = torch.zeros(3, 3, dtype=torch.float64)
    for ids, mass in found.distribution[0].items():
        drafted[ids[1], ids[2]] += mass
    assert torch.allclose(drafted, law, rtol=0, atol=1e-12)
    assert found.total_variation == pytest.approx(0.24, abs=1e-12)
    # A gate above the entropy, or a window longer than the chain, leaves rejection.
    entropy = -2 * 0.45 * math.log(0.45) - 0.1 * math.log(0.1)
    for strict in (FLy(window=2), FLy(window=1, entropy=entropy + 1e-9)):
        assert certify(composed(strict, k=2), max_new_tokens=4).lossless
    loose = FLy(window=1, entropy=entropy - 1e-9)
    assert not certify(composed(loose, k=2), max_new_tokens=4).lossless


def test_fly_keeps_no_token_without_probability():
    p, q = [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]
    found = certify(composed(FLy(window=1), p, q, k=2), max_new_tokens=4)
    assert all(2 not in ids for ids in found.distribution[0])


def test_typical_acceptance_takes_the_longest_path_and_then_the_likeliest():
    """A tree with known probabilities: each node passes or fails by p alone."""
    p = torch.zeros(1, 7, 4, dtype=torch.float64)
    p[0, 0] = tensor(0.1, 0.6, 0.3, 0.0)
    p[0, 1:] = tensor(0.4, 0.35, 0.2, 0.05)
    verifier = TypicalAcceptance(epsilon=0.3, delta=0.5)
    threshold = verifier.threshold(p[0, :2])
    entropies = [-sum(x * math.log(x) for x in row if x) for row in ([0.1, 0.6, 0.3], [0.4, 0.35, 0.2, 0.05])]
    assert threshold.tolist() == pytest.approx([min(0.3, 0.5 * math.exp(-h)) for h in entropies])
    context, rng = sd.Context.of([[0]]), Philox(seeds(0, 1))

    def path(tokens, parents):
        nodes = sd.Proposal(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(tokens)]))
        verdict = verifier(nodes, p[:, : len(tokens) + 1], context, rng)
        return verdict.path[0, : verdict.accepted[0]].tolist()

    # 1 (.6) and 2 (.3) pass at the root and 0 (.1) does not; below, 0 and 1 pass, and 3 does not.
    assert path([0], [-1]) == []
    assert path([2, 1], [-1, -1]) == [1]
    assert path([1, 2, 1], [-1, -1, 1]) == [1, 2]  # longer, though less likely
    assert path([1, 2, 1, 0], [-1, -1, 1, 0]) == [0, 3]  # .6 * .4 against .3 * .35
    assert path([0, 1, 0, 1], [-1, 0, 1, 2]) == []  # nothing below a node that fails
    assert path([1, 1, 0], [-1, -1, 1]) == [1, 2]  # equal siblings: the longer path


def test_typical_acceptance_is_exact_at_temperature_0():
    decoder = sd.decoder(sd.TableModel(P)).draft(sd.TableModel(Q), length=2).greedy()
    assert certify(decoder.verifier(TypicalAcceptance()).build(), max_new_tokens=4).lossless
    assert certify(decoder.verifier(FLy(window=1)).build(), max_new_tokens=4).lossless


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("rates", [0.0, 1.0, 0.35, (0.9, 0.2, 0.7)], ids=str)
def test_synthetic_acceptance_is_as_prescribed(rates, shape):
    """By enumeration: the law of the number of accepted nodes, of a draft that the target would always reject."""
    target, draft = sd.TableModel([1.0, 0.0]), sd.TableModel([0.0, 1.0])
    nodes = sd.drafts.Tree(draft, (2, 1)) if shape == "tree" else draft
    k = 2 if shape == "tree" else 3
    verifier = Synthetic(rates)
    decoder = sd.decoder(target).draft(nodes, length=k).verifier(verifier).build()
    law = defaultdict(float)
    for one in walked(decoder, [0], k + 2):
        law[len(one.rounds[0].path)] += one.probability
    each = [*(rates if isinstance(rates, tuple) else [rates] * k)][:k]
    for n in range(k + 1):
        wanted = math.prod(each[:n]) * (1 - each[n] if n < k else 1)
        assert law[n] == pytest.approx(wanted, abs=1e-12)
    assert verifier.tau(k) == pytest.approx(1 + sum(n * mass for n, mass in law.items()), abs=1e-12)


def test_synthetic_tau_over_ragged_rows():
    target, draft = sd.TableModel.random(5, 1, seed=0), sd.TableModel.random(5, 1, seed=1)
    verifier = Synthetic((0.9, 0.6))
    decoder = sd.decoder(target).draft(draft, length=4).verifier(verifier).build()
    prompts = [[0] * (1 + b % 3) for b in range(200)]
    made = decoder.generate(prompts, 60, seed=0)
    assert made.stats.tau == pytest.approx(verifier.tau(4), abs=0.05)  # 0.015 is a standard error
    assert made.stats.acceptance[:3] == pytest.approx([0.9, 0.6, 0.6], abs=0.02)
    alone = decoder.generate(prompts[7:8], 60, seed=[int(seeds(0, 200)[7])])
    assert alone.ids[0] == made.ids[7]


@by_name
def test_every_result_says_that_it_is_lossy(verifier):
    decoder, exact = composed(verifier), composed(sd.Rejection())
    assert repr(decoder).count("lossy") == 1
    assert "lossy" not in repr(exact)
    made, plain = (d.generate([[0], [1]], 8, seed=0) for d in (decoder, exact))
    assert "lossy" in repr(made)
    assert "lossy" not in repr(plain)
    assert not made.stats.lossless
    assert not any(s.lossless for s in made.row_stats)
    assert plain.stats.lossless
    assert made.stats.row()["lossless"] is False
    assert plain.stats.row()["lossless"] is True
    assert set(made.frame()["lossless"]) == {False}
    assert set(plain.frame()["lossless"]) == {True}
    both = plain.stats + made.stats
    assert both.lossless is False
    assert (plain.stats + plain.stats).lossless is True
    rounds = []
    decoder.generate([[0]], 4, seed=0, on_round=rounds.append)
    assert not any(round.lossless for round in rounds)
    done = list(decoder.serve([sd.Request([0], 4, seed=1), sd.Request([1], 4, seed=2)], clock="rounds"))
    assert not any(one.stats.lossless for one in done)
    assert not sd.Summary.of(done).lossless


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: TypicalAcceptance(epsilon=0.0), ValueError, "epsilon is 0.0: give a positive number"),
        (lambda: TypicalAcceptance(delta=-1.0), ValueError, "delta is -1.0: give a positive number"),
        (lambda: TypicalAcceptance(delta="x"), TypeError, "delta is 'x': give a number"),
        (lambda: Mixture(1.5), ValueError, "weight is 1.5: give the target's share, 0 to 1"),
        (lambda: Mixture(float("nan")), ValueError, "weight is nan"),
        (lambda: Mixture(None), TypeError, "weight is None: give a number"),
        (lambda: FLy(entropy=0), ValueError, "entropy is 0: give a positive number"),
        (lambda: FLy(window=0), ValueError, "window is 0: give at least 1"),
        (lambda: FLy(window=1.5), TypeError, "window is 1.5: give a whole number"),
        (lambda: Synthetic(1.01), ValueError, "acceptance is 1.01: give probabilities, 0 to 1"),
        (lambda: Synthetic((0.5, -0.1)), ValueError, "give probabilities, 0 to 1"),
        (lambda: Synthetic(()), ValueError, "acceptance is empty"),
        (lambda: Synthetic("0.5"), TypeError, "acceptance is '0.5': give a number, or one for each depth"),
        (lambda: Synthetic(float("nan")), ValueError, "acceptance is nan"),
    ],
)
def test_bad_settings_are_named(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_declared_distributions_and_trees_are_refused_by_name():
    one = torch.ones(1, 1, dtype=torch.long)
    declared = sd.Proposal.chain(one, one[0], torch.full((1, 1, 3), 1 / 3))
    with pytest.raises(ValueError, match=r"build Mixture\(weight, trust_declared=True\)"):
        Mixture(0.5).check(declared)
    Mixture(0.5, trust_declared=True).check(declared)
    with pytest.raises(ValueError, match=r"FLy\(trust_declared=True\)"):
        FLy().check(declared)
    tree = sd.Proposal(torch.zeros(1, 2, dtype=torch.long), torch.tensor([[-1, -1]]), torch.tensor([2]))
    with pytest.raises(ValueError, match="FLy takes chains, and row 0 of the proposal is a tree"):
        FLy().check(tree)


def test_the_rules_of_chains_agree_with_a_plain_loop():
    """FLy and the mixture over ragged chains, decision for decision, with the same random numbers."""
    rows, N, V = 400, 5, 4
    draw = torch.Generator().manual_seed(0)
    p, q = (torch.rand(rows, n, V, generator=draw, dtype=torch.float64) ** 3 for n in (N + 1, N))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    context, rng, size = sd.Context.of([[0]] * rows), Philox(seeds(1, rows)), torch.arange(rows) % (N + 1)
    tokens = rng.categorical(q, Key(context.length[:, None], torch.arange(N)))
    proposal = sd.Proposal.chain(tokens, size, q, "sampled")
    uniforms = rng.uniform(Key(context.length[:, None], torch.arange(N), 0, sd.rng.ACCEPT))
    fly, half = FLy(window=2, entropy=0.8), Mixture(0.25)
    found = {rule: rule(proposal, p, context, rng).accepted for rule in (fly, half)}
    overridden = 0
    for b in range(rows):
        passes = [
            bool(uniforms[b, i] < p[b, i, tokens[b, i]] / q[b, i, tokens[b, i]]) for i in range(int(size[b]))
        ]
        stands = []
        for i, ok in enumerate(passes):
            top = sorted(p[b, i].tolist())[-3:]
            uncertain = -sum(x * math.log(x) for x in top) >= 0.8
            kept = not ok and uncertain and i + 2 < len(passes) and all(passes[i + 1 : i + 3])
            stands.append(ok or kept)
            overridden += kept
        assert int(found[fly][b]) == [*stands, False].index(False)
        mixed = [
            bool(uniforms[b, i] < 0.75 + 0.25 * p[b, i, tokens[b, i]] / q[b, i, tokens[b, i]])
            for i in range(int(size[b]))
        ]
        assert int(found[half][b]) == [*mixed, False].index(False)
    assert overridden > 10


# -- distances on real rounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verifier", "drafted"),
    [
        (TypicalAcceptance(epsilon=0.2, delta=0.3), 0.075),
        (Mixture(0.5), 0.2),
        (Synthetic((0.5, 0.25, 1.0)), None),
        (sd.Rejection(), 0.0),
    ],
    ids=lambda v: type(v).__name__,
)
def test_the_distance_of_real_rounds_is_that_of_the_law(verifier, drafted):
    """The distributions do not depend on the text here, so each drafted token has the same distance."""
    decoder = composed(verifier, k=3)
    away, rounds = lab.Distance(decoder), []
    for seed, rows in ((0, 5), (1, 3)):
        decoder.generate(
            [[0]] * rows, 20, seed=seed, on_round=lambda r: (away(r), rounds.append(r)), eos_token_id=()
        )
    assert (away.texts, away.tokens) == (8, 160)
    each = [drafted] * 3 if drafted is not None else [0.5 * 0.4, 0.25 * 0.4, 1.0 * 0.4]
    reached = [
        sum(
            int(n < int(r.proposal.size[b]) and n <= int(r.verdict.accepted[b]))
            for r in rounds
            for b in range(r.context.batch)
        )
        for n in range(3)
    ]
    assert min(reached) > 0
    total = sum(count * one for count, one in zip(reached, each))
    assert away.total == pytest.approx(total, abs=1e-9)
    assert away.token == pytest.approx(total / 160, abs=1e-9)
    assert away.text == pytest.approx(total / 8, abs=1e-9)
    assert away.largest == pytest.approx(max(each), abs=1e-12)
    assert f"{total / 160:.4f} a token" in repr(away)


@pytest.mark.slow
def test_the_sum_over_a_text_bounds_the_distance_of_texts():
    """Markov pairs, exact total variation against the exact mean of the sums, by running every branch."""
    for seed in range(4):
        target, draft = (sd.TableModel.random(3, 1, seed=s) for s in (seed, seed + 20))
        for verifier in (Mixture(0.3), TypicalAcceptance(0.3, 0.6)):
            decoder = sd.decoder(target).draft(draft, length=2).verifier(verifier).build()
            exact = certify(decoder, max_new_tokens=4).total_variation
            away = lab.Distance(decoder)
            decoder.generate([[0]] * 2000, 4, seed=seed, on_round=away)
            assert exact <= away.text + 0.02
            assert exact > 0.01


def test_points_stops_and_temperature_0_have_a_distance():
    certain = sd.decoder(sd.TableModel([0.7, 0.2, 0.1])).draft(sd.drafts.NGram(), length=2)
    decoder = certain.verifier(Mixture(0.5)).build()
    away, rounds = lab.Distance(decoder), []
    decoder.generate(
        [[0, 0, 0, 0]] * 20, 12, seed=0, on_round=lambda r: (away(r), rounds.append(r)), eos_token_id=2
    )
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    total = 0.0
    for r in rounds:
        for b in range(r.context.batch):
            for n in range(min(int(r.proposal.size[b]), int(r.committed[b]))):
                total += 0.5 * (1 - float(p[r.proposal.tokens[b, n]]))  # half of TV(p, point)
    assert total > 0
    assert away.total == pytest.approx(total, abs=1e-9)
    greedy = certain.greedy().verifier(FLy(window=1)).build()
    with pytest.raises(ValueError, match=r"the distance of FLy \(lossy\) has no closed form"):
        lab.Distance(greedy)
    exact = certain.greedy().build()
    none = lab.Distance(exact)
    exact.generate([[0]], 6, on_round=none)
    assert (none.tokens, none.total) == (6, 0.0)
    assert math.isnan(lab.Distance(exact).token)


def test_trees_have_no_law():
    tree = sd.drafts.Tree(sd.TableModel(Q), (2,))
    decoder = sd.decoder(sd.TableModel(P)).draft(tree, length=1).verifier(Mixture(0.5)).build()
    with pytest.raises(ValueError, match="the draft proposes trees, and law is of one candidate"):
        decoder.generate([[0]], 6, seed=0, on_round=lab.Distance(decoder))
