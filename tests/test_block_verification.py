"""Block verification: the paper's numbers, the paper's own tests, and what it has in common with rejection."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from walked import walked

import specdec as sd
from specdec.audit.planted import BlockByThePaper
from specdec.rng import Philox, seeds
from specdec.selectors import Fixed
from specdec.verifiers import FLy


def verdicts(verifier, target, draft, k):
    """What one round of k drafted tokens does: (accepted, tokens) -> probability."""
    decoder = sd.decoder(target).draft(draft, length=k).verifier(verifier).build()
    law = defaultdict(float)
    for one in walked(decoder, [0], k + 2):
        accepted = len(one.rounds[0].path)
        law[one.ids[: accepted + 2], accepted] += one.probability
    return law


def mean(law):
    return sum(accepted * p for (_, accepted), p in law.items())


@pytest.mark.parametrize(
    ("p", "q", "token", "block"),
    [
        ([1 / 3, 2 / 3], [2 / 3, 1 / 3], 10 / 9, 11 / 9),  # the example of the paper, section 2
        ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5], 0.96, 1.0),
    ],
)
def test_accepted_tokens_of_known_pairs(p, q, token, block):
    target, draft = sd.TableModel(p), sd.TableModel(q)
    assert mean(verdicts(sd.Rejection(), target, draft, 2)) == pytest.approx(token, abs=1e-12)
    assert mean(verdicts(sd.BlockVerification(), target, draft, 2)) == pytest.approx(block, abs=1e-12)


@pytest.mark.parametrize(
    ("k", "zeros"),
    [
        (1, 0.0),
        (1, 0.4),
        (2, 0.4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 0.0), (3, 0.0), (3, 0.4))),
    ],
)
def test_tests_in_turn_have_the_law_of_the_papers(k, zeros):
    """Not only the committed text, but also how much of it was accepted."""
    vocabulary = 3 if k < 3 else 2
    pairs = [
        (sd.TableModel.random(vocabulary, 1, seed=s, zeros=zeros) for s in (n, n + 50)) for n in range(4)
    ]
    for target, draft in pairs:
        ours, theirs = (verdicts(v, target, draft, k) for v in (sd.BlockVerification(), BlockByThePaper()))
        for outcome in ours.keys() | theirs.keys():
            assert ours[outcome] == pytest.approx(theirs[outcome], abs=1e-12)
        assert mean(ours) >= mean(verdicts(sd.Rejection(), target, draft, k)) - 1e-12


def test_the_suite_sees_a_test_that_is_wrong():
    target, draft = sd.TableModel([0.45, 0.45, 0.1]), sd.TableModel([0.2, 0.3, 0.5])
    right = verdicts(BlockByThePaper(), target, draft, 2)
    wrong = verdicts(BlockByThePaper(mistake="first"), target, draft, 2)
    assert max(abs(right[one] - wrong[one]) for one in right.keys() | wrong.keys()) > 0.01


@pytest.mark.parametrize("one_hot", [False, True])
def test_point_masses_are_verified_as_by_rejection(one_hot):
    """With the same random numbers the same tokens are accepted; a point mass in a pool carries one-hot probabilities."""
    rows, N, V = 500, 4, 3
    draw = torch.Generator().manual_seed(0)
    tokens, size = torch.randint(0, V, (rows, N), generator=draw), torch.arange(rows) % (N + 1)
    p = torch.rand(rows, N + 1, V, generator=draw, dtype=torch.float64)
    p /= p.sum(-1, keepdim=True)
    probs = torch.nn.functional.one_hot(tokens, V).double() if one_hot else None
    proposal = sd.Proposal.chain(tokens, size, probs, "sampled" if one_hot else "point")
    where, rng = sd.Context.of([[0]] * rows), Philox(seeds(1, rows))
    block, token = (rule(proposal, p, where, rng) for rule in (sd.BlockVerification(), sd.Rejection()))
    assert torch.equal(block.accepted, token.accepted)
    assert torch.equal(block.tokens, token.tokens)
    assert len(block.accepted.unique()) == N + 1


def test_a_tree_and_a_declared_distribution_are_refused():
    target = sd.TableModel.random(3, 1, seed=0)
    tree = sd.decoder(target).draft(sd.drafts.Tree(target, (2,)), length=1)
    pool = sd.decoder(target).pool({"tree": sd.drafts.Tree(target, (2,)), "none": None}, Fixed(1), 1)
    for verifier in (sd.BlockVerification(), FLy()):
        for given in (tree, pool):
            with pytest.raises(
                ValueError, match=r"takes chains, and draft 'tree' proposes trees: use a draft"
            ):
                given.verifier(verifier).build()
    chain = (
        sd.decoder(target).draft(sd.drafts.Tree(target, (1, 1)), length=2).verifier(sd.BlockVerification())
    )
    assert chain.build().generate([[0]], 4).ids
    two = torch.tensor([[1, 2]])
    undeclared = sd.Proposal(two, torch.tensor([[-1, -1]]), torch.tensor([2]))
    for verifier in (sd.BlockVerification(), FLy()):
        with pytest.raises(ValueError, match=r"takes chains, and row 0 .* is a tree: use a draft"):
            verifier.check(undeclared)
    one = torch.ones(1, 1, dtype=torch.long)
    declared = sd.Proposal.chain(one, one[0], torch.full((1, 1, 3), 1 / 3))
    with pytest.raises(ValueError, match=r"BlockVerification\(trust_declared=True\)"):
        sd.BlockVerification().check(declared)
    sd.BlockVerification(trust_declared=True).check(declared)
