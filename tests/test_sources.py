"""A distribution is stored once however many nodes were drawn from it, and every part still finds each node's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import specdec as sd
from specdec import drafts, tree
from specdec.audit.certify import certify, certify_coupled
from specdec.drafts.pool import merged
from specdec.drafts.stateless import Stateless
from specdec.executors import Pipelined
from specdec.executors.round import check
from specdec.rng import Attempt, Key, Philox, seeds
from specdec.types import Context, Proposal
from specdec.verifiers import fused

MODEL, OTHER = sd.TableModel.random(3, 1, seed=0), sd.TableModel.random(3, 1, seed=1)


@dataclass(frozen=True)
class Urn(Stateless):
    """``width`` children of the root, then two of node 0; distributions are stored in reverse order.

    Args:
        replacement: whether the root's children are drawn from one distribution. lies: all of them say that they were.
    """

    width: int = 2
    replacement: bool = False
    lies: bool = False
    trees = True
    name = "urn"

    def nodes(self, length: int) -> int:
        return self.width + 2

    def propose(self, state: None, context: Context, budget: torch.Tensor, rng: Any) -> tuple[Proposal, None]:
        B, w = context.batch, self.width
        q = OTHER.probs[context.tokens[torch.arange(B), context.length - 1]]
        distributions, tokens = [], []
        for n in range(w):
            distributions.append(q)
            tokens.append(rng.categorical(q, Key(context.length, 0, n)))
            if not self.replacement:
                q = q.scatter(1, tokens[n][:, None], 0)
                q = q / q.sum(1, keepdim=True)
        if self.replacement:
            distributions = distributions[:1]
        distributions.append(OTHER.probs[tokens[0]])
        tokens += [rng.categorical(distributions[-1], Key(context.length, 1, n)) for n in range(2)]
        number = [0] * w if self.replacement or self.lies else [*range(w)]
        source = (
            len(distributions) - 1 - torch.tensor([*number, len(distributions) - 1, len(distributions) - 1])
        )
        return Proposal(
            torch.stack(tokens, 1),
            torch.tensor([-1] * w + [0, 0]).expand(B, -1),
            torch.tensor([0, w, w + 2])[budget.clamp(max=2)],
            torch.stack(distributions[::-1], 1),
            "sampled",
            source.expand(B, -1),
        ), None


@dataclass(frozen=True)
class Both(Urn):
    """Two drafts without a state, merged into one tree."""

    one: Any = None
    two: Any = None
    name = "both"

    def nodes(self, length: int) -> int:
        return self.one.nodes(length) + self.two.nodes(length)

    def propose(self, state: None, context: Context, budget: torch.Tensor, rng: Any) -> tuple[Proposal, None]:
        a, _ = self.one.propose(state, context, budget, rng)
        b, _ = self.two.propose(state, context, budget, Attempt(rng, 1))
        return tree.merge(a, b), None


class Bush(drafts.Tree):
    """A tree from a table, which needs no state."""

    def propose(self, state: Any, context: Context, budget: torch.Tensor, rng: Any) -> tuple[Proposal, None]:
        proposal, _ = super().propose(super().init(context, None), context, budget, rng)
        return proposal, None


DRAFTS = {
    "tree (2,)": drafts.Tree(OTHER, (2,)),
    "tree (3,)": drafts.Tree(OTHER, (3,)),
    "tree (2, 1)": drafts.Tree(OTHER, (2, 1)),
    "tree (1, 2)": drafts.Tree(OTHER, (1, 2)),
    "urn of 2 with replacement": Urn(2, replacement=True),
    "urn of 2": Urn(2),
    "urn of 3": Urn(3),
    "two trees": Both(one=Bush(OTHER, (2,)), two=Bush(MODEL, (2,))),
    "urn and tree": Both(one=Urn(2), two=Bush(MODEL, (1,))),
}
SLOW = {"tree (2, 1)", "tree (3,)", "urn of 3", "two trees", "urn and tree", "urn of 2 with replacement"}
every_draft = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())


@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(draft, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, draft in DRAFTS.items()
    ],
)
def test_shared_distributions_are_lossless(draft):
    base = sd.decoder(MODEL).draft(draft, length=2)
    found = certify(base.build(), max_new_tokens=3)
    assert found.lossless, found
    assert certify_coupled(base.verifier(sd.Coupled()).build(), max_new_tokens=3).lossless


def test_the_certifier_sees_a_source_that_is_wrong():
    base = sd.decoder(MODEL).draft(Urn(2, lies=True), length=2)
    assert certify(base.build(), max_new_tokens=3).total_variation > 1e-3


@every_draft
def test_storage_does_not_show_in_what_is_generated(draft, monkeypatch):
    """Seeds give what they gave with one distribution a node."""

    propose = type(draft).propose

    def apiece(self, *args):
        proposal, state = propose(self, *args)
        if proposal.probs is None:
            return proposal, state
        q = torch.stack([proposal.q(n) for n in range(proposal.nodes)], 1)
        return replace(proposal, probs=q, source=None), state

    for verifier in (sd.Rejection(), sd.Coupled(), fused.FusedRejection()):
        decoder = sd.decoder(MODEL).draft(draft, length=2).verifier(verifier).build()
        expected = decoder.generate([[1], [2, 0], [0, 1, 1]], [9, 12, 7], seed=4).ids
        with monkeypatch.context() as patch:
            patch.setattr(type(draft), "propose", apiece)
            assert decoder.generate([[1], [2, 0], [0, 1, 1]], [9, 12, 7], seed=4).ids == expected


def test_seeds_give_what_they_gave():
    """Recorded when every node had a distribution of its own."""
    target, small = sd.TableModel.random(50, 1, seed=0), sd.TableModel.random(50, 1, seed=1)
    recorded = {
        "tree": [
            [2, 47, 16, 30, 13, 33, 28, 46, 38, 15, 37, 8],
            [45, 16, 5, 14, 2, 24, 36, 17, 48, 41, 20, 33],
        ],
        "chain": [
            [2, 47, 8, 44, 12, 5, 19, 44, 21, 18, 5, 43],
            [45, 14, 6, 25, 17, 38, 39, 27, 39, 35, 2, 30],
        ],
    }
    for name, draft in (("tree", drafts.Tree(small, (4, 2, 1))), ("chain", drafts.Model(small))):
        made = sd.decoder(target).draft(draft, length=3).build()
        assert made.generate([[1], [2, 3, 2]], 12, seed=5).ids == recorded[name]


def test_a_tree_stores_one_distribution_a_parent():
    context, rng = Context.of([[1], [2, 0]]), Philox(seeds(0, 2))
    for widths, parents in (((4,), 1), ((4, 4), 5), ((2, 2, 1), 7)):
        if max(widths) > 3:
            draft = drafts.Tree(sd.TableModel.random(8, 1, seed=1), widths)
        else:
            draft = drafts.Tree(OTHER, widths)
        state = draft.init(context, None)
        proposal, _ = draft.propose(state, context, torch.tensor([len(widths)] * 2), rng)
        V = proposal.probs.shape[2]
        assert proposal.probs.shape == (2, parents, V)
        assert proposal.probs.untyped_storage().nbytes() == 2 * parents * V * proposal.probs.itemsize
        assert proposal.distributions().shape == (2, proposal.nodes, V)
        for n in range(proposal.nodes):
            assert torch.equal(proposal.q(n), proposal.distributions()[:, n])
        drawn = proposal.distributions().gather(2, proposal.tokens[..., None])[..., 0]
        assert torch.equal(proposal.q_of(proposal.tokens), drawn)


def test_merging_in_a_pool_keeps_what_is_shared():
    context, rng = Context.of([[1], [2, 0], [0], [1, 1]]), Philox(seeds(0, 4))
    bush, _ = Urn(2).propose(None, context, torch.full((4,), 2), rng)
    chain = Proposal.chain(
        torch.tensor([[1, 2]] * 4), torch.full((4,), 2), OTHER.probs[None, :2].expand(4, -1, -1), "sampled"
    )
    point = Proposal.chain(torch.tensor([[2, 1, 0]] * 4), torch.full((4,), 3))
    whole = merged([(bush, torch.tensor([2])), (chain, torch.tensor([0])), (point, torch.tensor([1, 3]))], 4)
    assert whole.probs.shape == (4, 3, 3)
    q = whole.distributions()
    assert torch.equal(q[2, :4], bush.distributions()[2])
    assert torch.equal(q[0, :2], chain.probs[0])
    assert torch.equal(q[1, :3], torch.eye(3)[[2, 1, 0]].to(q))
    check(whole, torch.tensor([2, 3, 2, 3]), 3)
    back = whole.select(torch.tensor([2, 0]))
    assert torch.equal(back.distributions()[0, :4], bush.distributions()[2])


class Ragged(Both):
    """More distributions than a row has nodes: even rows have one draft's, odd rows the other's."""

    def nodes(self, length: int) -> int:
        return 4

    def propose(self, state: None, context: Context, budget: torch.Tensor, rng: Any) -> tuple[Proposal, None]:
        odd = context.request % 2 == 1
        a, _ = Urn(2).propose(state, context, budget.masked_fill(odd, 0), rng)
        b, _ = Urn(2).propose(state, context, budget.masked_fill(~odd, 0), Attempt(rng, 1))
        assert tree.merge(a, b).probs.shape[1] > 4
        return tree.merge(a, b), None


@pytest.mark.parametrize("draft", [Urn(2), Ragged()], ids=["fewer than nodes", "more than nodes"])
def test_sources_cross_to_another_process(draft):
    made = sd.decoder(MODEL).draft(draft, length=2)
    prompts, tokens = [[1], [2, 0], [0], [1, 1]], [9, 5, 7, 9]
    expected = made.build().generate(prompts, tokens, seed=3).ids
    assert made.executor(Pipelined(2, "processes")).build().generate(prompts, tokens, seed=3).ids == expected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"probs": torch.ones(1, 4, 3) / 3, "source": None}, r"shape \[1, 4, 3\]: expected \[1, 2, 3\]"),
        ({"probs": torch.ones(1, 1, 4) / 4}, r"shape \[1, 1, 4\]: expected \[1, 1, 3\]"),
        ({"probs": torch.ones(1, 0, 3)}, r"shape \[1, 0, 3\]: expected \[1, 1, 3\]"),
        ({"source": torch.tensor([[0, 1]])}, r"row 0, node 1 is 1 and probs has 1 distributions a row: give 0 to 0"),
        ({"source": torch.tensor([[-1, 0]])}, r"row 0, node 0 is -1"),
        ({"source": torch.tensor([[0]])}, r"source is \[1, 1\] torch.int64 on cpu: give \[1, 2\], torch.int64"),
        ({"source": torch.tensor([[0, 0]], dtype=torch.int32)}, "torch.int32"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_is_refused(change, says):
    good = Proposal(
        torch.tensor([[0, 1]]),
        torch.tensor([[-1, -1]]),
        torch.tensor([2]),
        torch.ones(1, 1, 3) / 3,
        "sampled",
        torch.tensor([[0, 0]]),
    )
    check(good, torch.tensor([1]), 3, 2)
    with pytest.raises(ValueError, match=says):
        check(replace(good, **change), torch.tensor([1]), 3, 2)
    check(replace(good, size=torch.tensor([1]), source=torch.tensor([[0, 9]])), torch.tensor([1]), 3)


def test_point_masses_have_no_source():
    point = Proposal.chain(torch.tensor([[1]]), torch.tensor([1]))
    for ask in (point.distributions, lambda: point.q(0), lambda: point.q_of(point.tokens)):
        with pytest.raises(ValueError, match="point masses"):
            ask()
    with pytest.raises(ValueError, match="source is given and probs is absent"):
        replace(point, source=torch.tensor([[0]]))


def test_rows_of_chains_are_fused_beside_rows_of_trees(monkeypatch):
    """Which way a row is verified, and so how it is rounded, does not depend on its batch mates."""
    rows = []

    def decide(logits, *args, **kwargs):
        rows.append(logits[:, 0, 0].tolist())
        return fused_decide(logits, *args, **kwargs)

    fused_decide = fused.decide
    monkeypatch.setattr(fused, "decide", decide)
    parents = torch.tensor([[-1, 0], [-1, -1], [-1, -1], [9, -9], [-1, 7]])
    proposal = Proposal(torch.tensor([[0, 1]] * 5), parents, torch.tensor([2, 2, 2, 0, 1]))
    logits = torch.arange(5.0)[:, None, None] + OTHER.probs[None, :, :].log()
    marks = logits[:, 0, 0].tolist()
    context, rng = Context.of([[0]] * 5), Philox(seeds(0, 5))
    found = fused.FusedRejection().from_logits(proposal, logits, sd.Sampling(), context, rng)
    assert rows == [[marks[0], marks[3], marks[4]]]
    plain = fused.FusedRejection()(proposal, logits.softmax(-1), context, rng)
    assert all(
        torch.equal(getattr(found, f), getattr(plain, f)) for f in ("path", "accepted", "bonus", "tokens")
    )


@dataclass(frozen=True)
class Littered(Bush):
    """``Tree``, with rubbish where no node is."""

    def propose(self, state: Any, context: Context, budget: torch.Tensor, rng: Any) -> tuple[Proposal, None]:
        proposal, _ = super().propose(state, context, budget, rng)
        if not proposal.nodes:
            return proposal, None
        dead = torch.arange(proposal.nodes + 3) >= proposal.size[:, None]
        tokens, parents, source = (
            torch.where(dead, junk, torch.nn.functional.pad(good, (0, 3)))
            for good, junk in ((proposal.tokens, 77), (proposal.parents, -5), (proposal.source, 88))
        )
        return replace(proposal, tokens=tokens, parents=parents, source=source), None

    def observe(self, state: Any, round: Any) -> None:
        return None

    def select(self, state: Any, rows: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1)])
@pytest.mark.parametrize("verifier", [sd.Rejection(), sd.Coupled(), fused.FusedRejection()])
def test_what_lies_beyond_a_row_is_not_looked_at(verifier, widths):
    prompts, tokens = [[1], [2, 0], [0, 1, 1]], [9, 2, 5]
    made = {
        kind: sd.decoder(MODEL).draft(kind(OTHER, widths), length=len(widths)).verifier(verifier).build()
        for kind in (drafts.Tree, Littered)
    }
    rounds = []
    expected = made[drafts.Tree].generate(prompts, tokens, seed=1)
    found = made[Littered].generate(prompts, tokens, seed=1, on_round=rounds.append)
    assert found.ids == expected.ids
    assert found.stats.reached == expected.stats.reached
    assert any(bool((r.proposal.size < r.proposal.nodes - 3).any()) for r in rounds)
