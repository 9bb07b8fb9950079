"""Drafts and verifiers that break their contracts, which a decoder refuses by name."""

from __future__ import annotations

import pytest
import torch

import specdec as sd
from specdec.drafts.stateless import Stateless


def drafting(answer, **declared):
    """A draft that proposes what ``answer(context, budget)`` returns."""
    methods = {"propose": lambda self, state, context, budget, rng: answer(context, budget)}
    return type("Mine", (Stateless,), {"name": "mine", **methods, **declared})()


def zeros(context, width=1, dtype=torch.long):
    return torch.zeros(context.batch, width, dtype=dtype)


def declaring(scale, provenance="sampled", first=1):
    """Chains of token 0 with an even distribution times ``scale``; without ``first``, token 0 has no part in it."""

    def answer(context, budget):
        q = torch.full((context.batch, int(budget.max()), 97), scale / 97, dtype=torch.float64)
        if not first:
            q[..., 0], q[..., 1] = 0, 2 / 97
        return sd.Proposal.chain(zeros(context, q.shape[1]), budget, q, provenance), None

    return answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda c, b: (sd.Proposal.chain(zeros(c, int(b.max()) + 1), b + 1), None), "more than its budget"),
        (declaring(1.0, "declared"), "trust_declared"),
        (declaring(2.0, "declared"), "sum to"),
        (declaring(2.0), "sum to 2"),
        (declaring(float("nan")), "sum to nan"),
        (declaring(1.0, first=0), "cannot have been drawn"),
        (
            lambda c, b: (sd.Proposal.chain(zeros(c, int(b.max())) + 97, b), None),
            "outside the target's vocabulary",
        ),
    ],
)
def test_drafts_that_break_the_contract(target, answer, says):
    with pytest.raises(ValueError, match=says):
        sd.decoder(target).draft(drafting(answer), length=2).build().generate([[1, 2]], 8)


def star(context, budget):
    """Five children of the root."""
    return sd.Proposal(zeros(context, 5), zeros(context, 5) - 1, torch.where(budget > 0, 5, 0)), None


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (lambda c, b: sd.Proposal.none(c.batch), TypeError, r"propose\(\) returned Proposal: return a pair"),
        (lambda c, b: ([[1]], None), TypeError, r"'mine': propose\(\) returned \(list, NoneType\)"),
        (
            lambda c, b: (sd.Proposal.chain(zeros(c, 1, torch.float), b.clamp(max=1)), None),
            ValueError,
            r"tokens \[2, 1\] torch.float32.*torch.int64",
        ),
        (
            lambda c, b: (sd.Proposal.chain(zeros(c)[:1], b[:1].clamp(max=1)), None),
            ValueError,
            r"tokens \[1, 1\].* for 2 rows: give tokens \[2, N\]",
        ),
        (
            lambda c, b: (sd.Proposal(zeros(c, 2), zeros(c) - 1, b.clamp(max=1)), None),
            ValueError,
            r"parents \[2, 1\]",
        ),
        (lambda c, b: (sd.Proposal.chain(zeros(c), b.clamp(max=1).int()), None), ValueError, r"size \[2\] torch.int32"),
        (star, ValueError, r"proposed 5 nodes in a row, and there is room for 2: declare the maximum"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pooled", [False, True])
def test_proposals_of_the_wrong_form(target, answer, error, says, pooled):
    base, draft = sd.decoder(target), drafting(answer)
    made = base.pool({"a": draft}, sd.selectors.Random(), 2) if pooled else base.draft(draft, length=2)
    with pytest.raises(error, match=says):
        made.build().generate([[1, 2], [3]], 8)


def test_a_tree_as_large_as_it_says(target):
    draft = drafting(star, nodes=lambda self, length: 5)
    out = sd.decoder(target).greedy().draft(draft, length=2).build().generate([[1, 2], [3]], 8)
    assert out.ids == sd.decoder(target).greedy().build().generate([[1, 2], [3]], 8).ids


class Accepts:
    """Says that ``count`` nodes were accepted, those of ``path``; then token ``bonus``."""

    name, lossless = "mine", False

    def __init__(self, path, count, bonus=1):
        self.path, self.count, self.bonus = path, count, bonus

    def check(self, proposal):
        pass

    def for_draft(self, rng):
        return rng

    def __call__(self, proposal, probs, context, rng):
        if self.path is None:
            return None
        B, nodes = context.batch, proposal.nodes
        path = torch.tensor([self.path[:nodes]] * B, dtype=torch.long).view(B, nodes)
        path = torch.where(proposal.size[:, None] > 0, path, -1)
        accepted = proposal.size.clamp(max=self.count)
        return sd.Verdict.of(proposal, path, accepted, torch.full((B,), self.bonus))


class Leaf(sd.drafts.NoDraft):
    """Nodes 0 and 1 are children of the root, and 2 of node 0."""

    info = sd.DraftInfo("leaf", trees=True, nodes=lambda length: 3)

    def propose(self, state, context, budget, rng):
        parents = torch.tensor([[-1, -1, 0]] * context.batch)
        return sd.Proposal(zeros(context, 3), parents, torch.where(budget > 1, 3, 0)), None


@pytest.mark.parametrize(
    ("verifier", "error", "says"),
    [
        (Accepts(None, 0), TypeError, "verifier 'mine' returned a NoneType: return Verdict.of"),
        (Accepts([0, -1, -1], 2), ValueError, r"accepted is 2 and path \[0, -1, -1\] in row 0, of 3 nodes"),
        (Accepts([0, 2, -1], 1), ValueError, r"accepted is 1 and path \[0, 2, -1\]"),
        (Accepts([2, -1, -1], 1), ValueError, r"path \[2, -1, -1\].*child of the root"),
        (Accepts([1, 2, -1], 2), ValueError, r"path \[1, 2, -1\]"),
        (Accepts([7, -1, -1], 1), ValueError, r"path \[7, -1, -1\]"),
        (Accepts([-2, -1, -1], 1), ValueError, r"path \[-2, -1, -1\]"),
        (Accepts([0, 2, -1], 2, 97), ValueError, r"'mine' gave the bonus tokens \[97\].*vocabulary has 97"),
    ],
)  # fmt: skip
def test_verdicts_that_are_none(target, verifier, error, says):
    with pytest.raises(error, match=says):
        sd.decoder(target).draft(Leaf(), length=3).verifier(verifier).build().generate([[1, 2]], 8)


def test_a_verdict_of_another_shape():
    proposal, one = (
        sd.Proposal.chain(torch.zeros(1, 2, dtype=torch.long), torch.tensor([2])),
        torch.ones(1).long(),
    )
    for path, accepted in (
        (one[None], one),
        (torch.tensor([[0, -1]]), one.repeat(2)),
        (torch.tensor([[0, 1]]), one + 4),
    ):
        with pytest.raises(ValueError, match="give"):
            sd.Verdict.of(proposal, path, accepted, one)
    assert sd.Verdict.of(proposal, torch.tensor([[0, -1]]), one, one).tokens.tolist() == [[0, 1, 0]]


def test_a_verdict_that_is_a_path(target):
    made = sd.decoder(target).draft(Leaf(), length=3).verifier(Accepts([0, 2, -1], 2)).build()
    assert made.generate([[1, 2]], 8).ids == [[1, 0, 0, 1, 0, 0, 1, 1]]
