"""Traversal verification: the paper's recursion, what it has in common with other rules, and how much it accepts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from walked import walked

import specdec as sd
from specdec import tree
from specdec.audit.certify import certify
from specdec.audit.planted_siblings import TraversalByThePaper
from specdec.drafts.siblings import Distinct
from specdec.drafts.stateless import Stateless
from specdec.rng import Key, Philox, seeds
from specdec.types import Context, Proposal
from specdec.verifiers.traversal import visits

DRAWINGS = {"independent": sd.drafts.siblings.Independent(), "distinct": Distinct()}


def pair(vocabulary, seed, zeros=0.0):
    return (sd.TableModel.random(vocabulary, 1, seed=s, zeros=zeros) for s in (seed, seed + 50))


def accepted(verifier, target, draft, length):
    """The mean number of accepted nodes of the first round."""
    decoder = sd.decoder(target).draft(draft, length=length).verifier(verifier).build()
    return sum(len(one.rounds[0].path) * one.probability for one in walked(decoder, [0], length + 2))


def trees(rows, nodes, vocabulary, seed, zeros, point):
    """Random trees, drawn node by node, and the target's distributions: some with q = p, and with one token only."""
    draw = torch.Generator().manual_seed(seed)

    def laws(*shape):
        made = torch.rand(*shape, generator=draw, dtype=torch.float64) + 1e-3
        gone = torch.rand(*shape, generator=draw) < zeros
        made[gone & (made < made.max(-1, keepdim=True).values)] = 0
        return made / made.sum(-1, keepdim=True)

    parents = torch.stack(
        [
            torch.tensor([int(torch.randint(-1, n, (1,), generator=draw)) for n in range(nodes)])
            for _ in range(rows)
        ]
    )
    p, q = laws(rows, nodes + 1, vocabulary), laws(rows, nodes, vocabulary)
    alike = torch.rand(rows, nodes, generator=draw) < 0.25
    q = torch.where(alike[..., None], p.gather(1, (parents + 1)[..., None].expand(-1, -1, vocabulary)), q)
    size = torch.randint(0, nodes + 1, (rows,), generator=draw)
    where, rng = Context.of([[0]] * rows), Philox(seeds(seed, rows))
    key = Key(where.length[:, None], tree.depths(parents), tree.sibling_numbers(parents))
    tokens = rng.categorical(q, key)
    if point:
        return Proposal(tokens, parents, size), p, where, rng
    return Proposal(tokens, parents, size, q, "sampled"), p, where, rng


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    nodes=st.integers(1, 6),
    vocabulary=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    zeros=st.sampled_from([0.0, 0.5, 0.9]),
    point=st.booleans(),
)
def test_the_chances_are_those_of_the_papers_recursion(rows, nodes, vocabulary, seed, zeros, point):
    proposal, p, where, rng = trees(rows, nodes, vocabulary, seed, zeros, point)
    chance, left = visits(proposal, p)
    assert torch.allclose(chance.sum(1), torch.ones(rows, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((chance >= 0).all())
    for b in range(rows):
        expected, law = torch.zeros(nodes + 1, dtype=torch.float64), p[b].clone()
        row = proposal.select(torch.tensor([b]))
        TraversalByThePaper()._visit(-1, 1.0, 1.0, row, p[b], expected, law)
        assert torch.allclose(chance[b], expected, rtol=0, atol=1e-12)
        likely = expected > 1e-9
        assert torch.allclose(left[b][likely], law[likely], rtol=0, atol=1e-6)
    whole = sd.verifiers.Traversal()(proposal, p, where, rng)
    for b in range(rows):
        one = torch.tensor([b])
        alone = sd.verifiers.Traversal()(proposal.select(one), p[one], where.select(one), rng.select(one))
        assert torch.equal(alone.tokens[0], whole.tokens[b])


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_chains_are_accepted_as_by_block_verification(k, zeros):
    """With the tokens, the number of accepted ones has the same law."""
    for seed in range(3):
        target, draft = pair(3 if k < 3 else 2, seed, zeros)
        laws = []
        for verifier in (sd.verifiers.Traversal(), sd.BlockVerification()):
            law = defaultdict(float)
            decoder = sd.decoder(target).draft(draft, length=k).verifier(verifier).build()
            for one in walked(decoder, [0], k + 2):
                n = len(one.rounds[0].path)
                law[one.ids[: n + 2], n] += one.probability
            laws.append(law)
        for outcome in laws[0].keys() | laws[1].keys():
            assert laws[0][outcome] == pytest.approx(laws[1][outcome], abs=1e-12)


@pytest.mark.parametrize("name", DRAWINGS)
def test_siblings_without_children_are_accepted_as_by_rejection(name):
    for seed in range(4):
        target, small = pair(3, seed, 0.3)
        draft = sd.drafts.Tree(small, (3,), siblings=DRAWINGS[name])
        counts = [accepted(v, target, draft, 1) for v in (sd.verifiers.Traversal(), sd.Rejection())]
        assert counts[0] == pytest.approx(counts[1], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("widths", [(2, 1), (1, 2)])
def test_at_least_as_many_are_accepted_as_by_rejection(widths, name):
    more = 0.0
    for seed in range(4):
        target, small = pair(2 if widths == (2, 1) else 3, seed)
        draft = sd.drafts.Tree(small, widths, siblings=DRAWINGS[name])
        ours, theirs = (accepted(v, target, draft, 2) for v in (sd.verifiers.Traversal(), sd.Rejection()))
        assert ours >= theirs - 1e-12
        more += ours - theirs
    assert more > 1e-3


def test_a_known_tree():
    """Two siblings without replacement at each of two levels, by all their tokens."""
    p, q = (torch.tensor(one, dtype=torch.float64) for one in ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]))
    pairs = list(permutations(range(3), 2))
    tokens = torch.tensor([[*top, *left, *right] for top, left, right in product(pairs, repeat=3)])
    R, parents = len(tokens), torch.tensor([-1, -1, 0, 0, 1, 1])
    elder = torch.tensor([0, 0, 2, 2, 4, 4])
    laws = q.expand(R, 6, 3).clone()
    for n in (1, 3, 5):
        laws[:, n] = laws[:, n].scatter(1, tokens[:, elder[n], None], 0)
        laws[:, n] /= laws[:, n].sum(1, keepdim=True)
    weight = laws.gather(2, tokens[..., None])[..., 0].prod(1)
    proposal = Proposal(tokens, parents.expand(R, 6), torch.full((R,), 6), laws, "sampled")
    chance, _ = visits(proposal, p.expand(R, 7, 3))
    depth = torch.tensor([0.0, 1, 1, 2, 2, 2, 2], dtype=torch.float64)
    assert float(weight.sum()) == pytest.approx(1, abs=1e-12)
    assert float(weight @ chance @ depth) == pytest.approx(1.362, abs=5e-4)
    level = 0.76  # by recursive rejection, which takes each level by itself
    assert level + level**2 == pytest.approx(1.338, abs=5e-4)


@dataclass(frozen=True, eq=False)
class GrowsAfterwards(Stateless):
    """Two siblings, and two children below the first if the second is token 1."""

    name = "grows afterwards"
    trees = True

    def nodes(self, length):
        return 4

    def propose(self, state, context, budget, rng):
        B, two = context.batch, torch.arange(2).expand(context.batch, 2)
        q = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.2, 0.8], [0.2, 0.8]], dtype=torch.float64).expand(
            B, 4, 2
        )
        top = rng.categorical(q[:, :2], Key(context.length[:, None], 0, two))
        below = rng.categorical(q[:, 2:], Key(context.length[:, None], 1, two))
        size = torch.where(budget > 0, torch.where((budget > 1) & (top[:, 1] == 1), 4, 2), 0)
        parents = torch.tensor([-1, -1, 0, 0]).expand(B, 4)
        return Proposal(torch.cat([top, below], 1), parents, size, q, "sampled"), state


def test_what_grows_below_a_node_may_depend_on_its_later_siblings():
    """A subtree is rejected with a probability that does not depend on what is in it."""
    decoder = sd.decoder(sd.TableModel.random(2, 1, seed=3)).draft(GrowsAfterwards(), length=2)
    found = certify(decoder.verifier(sd.verifiers.Traversal()).build(), max_new_tokens=4)
    assert found.lossless, found


def test_probabilities_that_agree_up_to_rounding_are_not_divided():
    """A residual of rounding errors, R = 1e-16 with a = 1, is no probability: R / (R + 1 - a) is 1 however it is rounded."""
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    near = p * (1 + torch.tensor([1.5e-15, -1.5e-15, 0], dtype=torch.float64))
    chain = Proposal.chain(
        torch.tensor([[0, 1]]), torch.tensor([2]), torch.stack([near, near])[None], "sampled"
    )
    siblings = replace(chain, parents=torch.tensor([[-1, -1]]))
    for proposal in (chain, siblings):
        chance, _ = visits(proposal, p.expand(1, 3, 3))
        assert bool((chance >= 0).all())
        assert float(chance.sum()) == pytest.approx(1, abs=1e-12)
