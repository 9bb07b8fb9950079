"""Verifiers on plain tensors: decisions against the reference, distributions against the target's, refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec as sd
from specdec import tree
from specdec.rng import DRAFT, Key, Philox, seeds
from specdec.types import Context, Proposal
from specdec.verifiers import FusedRejection, Rejection
from specdec.verifiers.rejection import residual, verify_chain, verify_tree


def distributions(*shape: int, seed: int, zeros: float = 0.0) -> torch.Tensor:
    """Random distributions, some entries impossible."""
    made = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1e-3
    gone = torch.rand(*shape, generator=torch.Generator().manual_seed(seed + 1)) < zeros
    made[gone & (made < made.max(-1, keepdim=True).values)] = 0
    return made / made.sum(-1, keepdim=True)


def context(rows: int, length: int = 1) -> Context:
    return Context.of([[0] * (length + b % 3) for b in range(rows)])


def drawn(
    parents: torch.Tensor, size: torch.Tensor, q: torch.Tensor, where: Context, rng: Philox
) -> Proposal:
    depth, number = tree.depths(parents), tree.sibling_numbers(parents)
    tokens = rng.categorical(q, Key(where.length[:, None], depth, number, DRAFT))
    return Proposal(tokens, parents, size, q, "sampled")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    nodes=st.integers(1, 5),
    vocab=st.integers(2, 6),
    seed=st.integers(0, 10**6),
    zeros=st.sampled_from([0.0, 0.4]),
    point=st.booleans(),
)
def test_chains_and_trees_are_verified_decision_for_decision_alike(rows, nodes, vocab, seed, zeros, point):
    where, rng = context(rows), Philox(seeds(seed, rows))
    size = torch.from_numpy(np.random.default_rng(seed).integers(0, nodes + 1, rows))
    p, q = (
        distributions(rows, nodes + 1, vocab, seed=seed, zeros=zeros),
        distributions(rows, nodes, vocab, seed=seed + 2, zeros=zeros),
    )
    proposal = drawn(torch.arange(-1, nodes - 1).expand(rows, nodes), size, q, where, rng)
    if point:
        proposal = Proposal.chain(proposal.tokens, size)
    path, accepted, distribution = verify_chain(proposal, p, where, rng)
    reference = verify_tree(proposal, p, where, rng)
    assert torch.equal(path, reference[0])
    assert torch.equal(accepted, reference[1])
    assert torch.allclose(distribution, reference[2], rtol=0, atol=1e-12)
    assert bool((accepted <= size).all())
    assert torch.allclose(distribution.sum(-1), torch.ones(rows, dtype=torch.float64))


def test_a_residual_of_nothing_is_not_nan():
    p = torch.tensor([[0.5, 0.5], [0.3, 0.7]], dtype=torch.float64)
    assert torch.equal(residual(p, p), p)
    assert torch.equal(
        residual(p, torch.tensor([[0.5, 0.5], [0.4, 0.6]], dtype=torch.float64))[1],
        torch.tensor([0.0, 1.0]).double(),
    )
    where, rng = context(2), Philox(seeds(0, 2))
    proposal = Proposal.chain(torch.tensor([[0], [1]]), torch.tensor([1, 1]), p[:, None], "sampled")
    verdict = sd.Rejection()(proposal, p[:, None].expand(2, 2, 2), where, rng)
    assert verdict.accepted.tolist() == [1, 1]  # q = p is never rejected


def test_declared_probabilities_are_refused_unless_trusted():
    q = torch.tensor([[[0.1, 0.9]]], dtype=torch.float64)
    declared = Proposal.chain(torch.tensor([[1]]), torch.tensor([1]), q)
    assert declared.provenance == "declared"
    with pytest.raises(ValueError, match="trust_declared=True"):
        sd.Rejection().check(declared)
    sd.Rejection(trust_declared=True).check(declared)
    sd.Coupled().check(declared)  # the target's own draw decides, whatever is declared
    with pytest.raises(ValueError, match="point mass has no probs"):
        Proposal(declared.tokens, declared.parents, declared.size, q, "point")
    with pytest.raises(ValueError, match="probs is absent"):
        Proposal(declared.tokens, declared.parents, declared.size, None, "sampled")


def test_a_verifier_of_its_own_is_asked_at_temperature_0_too():
    class Never(Rejection):
        """Accepts nothing."""

        def __call__(self, proposal, probs, context, rng):
            return super().__call__(sd.Proposal.none(context.batch), probs[:, :1], context, rng)

    target = sd.TableModel.random(5, order=1, seed=0)
    greedy = sd.decoder(target).greedy().draft(sd.drafts.Model(target), length=3)
    rounds = {kind: [] for kind in (Rejection, Never)}
    said = [
        greedy.verifier(kind()).build().generate([[0], [1, 2]], 8, seed=0, on_round=rounds[kind].append).ids
        for kind in rounds
    ]
    assert said[0] == said[1]
    assert all(r.target_argmax is not None and r.probs is None for r in rounds[Rejection])
    assert all(r.target_argmax is None and r.probs is not None for r in rounds[Never])
    assert len(rounds[Rejection]) < len(rounds[Never])


def test_a_way_from_logits_of_its_own_and_a_setting_called_greedy():
    asked = []

    class Logits(FusedRejection):
        """Says when it is asked."""

        def from_logits(self, *args):
            asked.append(1)
            return super().from_logits(*args)

    class Setting:
        """Has a setting, not a method."""

        name, lossless, greedy = "setting", True, False
        check, for_draft, __call__ = Rejection.check, Rejection.for_draft, Rejection.__call__
        trust_declared = False

    target = sd.TableModel.random(5, order=1, seed=0)
    decoder = sd.decoder(target).greedy().draft(sd.drafts.Model(target), length=3)
    plain = decoder.build().generate([[0], [1, 2]], 8, seed=0).ids
    assert decoder.verifier(Logits()).build().generate([[0], [1, 2]], 8, seed=0).ids == plain
    assert asked
    assert decoder.verifier(Setting()).build().generate([[0], [1, 2]], 8, seed=0).ids == plain
