"""The linter of lengths: lawful policies pass, and each unlawful one is named for what it does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from test_certify import Forwards

import specdec as sd
from specdec.audit import catalogue
from specdec.audit.adversaries import Adversary, Remembers
from specdec.audit.anticipation import lint
from specdec.audit.certify import certify
from specdec.audit.museum.exhibit import T2
from specdec.audit.museum.parts import Confident, DraftByPosition
from specdec.audit.planted import LooksThenDrops, PositionKeyed, SiblingsShare, StreamsShare

COIN = torch.tensor([0.5, 0.5], dtype=torch.float64)


def built(draft, length=3):
    return sd.decoder(T2.target).draft(draft, length=length).build()


@pytest.mark.parametrize(
    "draft",
    [
        T2.draft,
        Confident(COIN),
        Confident(COIN, lag=2),
        Confident(COIN, lag=0, first=True, cost=1.2),
        Remembers(COIN, [1]),
        sd.drafts.Tree(T2.draft, (2,)),
    ],
)
def test_lawful_policies_pass(draft):
    found = lint(built(draft, 1 if isinstance(draft, sd.drafts.Tree) else 3), max_new_tokens=3)
    assert found.lawful, found
    assert found.leak < 1e-12
    assert repr(found).startswith("Findings(lawful; leak")
    assert found.branches >= 8


def test_adversaries_that_submit_all_that_they_draw_pass():
    for settings in ({"salt": 1}, {"salt": 2, "replacement": False}):
        decoder = catalogue.BASE.draft(Adversary(catalogue.MENU, limit=2, **settings), length=2).build()
        assert lint(decoder).lawful


def test_a_node_that_is_dropped_by_its_value_is_named():
    decoder = built(LooksThenDrops(COIN, 1), 1)
    found = lint(decoder, max_new_tokens=3)
    assert found.anticipates[0].startswith("after [0, 0] node 0 of depth 0 is submitted or not")
    assert found.leak == pytest.approx(0.5)
    assert found.harm == pytest.approx(0.25)
    assert found.harm >= certify(decoder, max_new_tokens=3).total_variation
    assert not found.reused
    assert "2 nodes anticipated" in repr(found)


def test_live_confidences_may_stop_at_the_first_descent_only():
    """Comparing all lengths, a deeper node's confidence depends on the value of a node that may be dropped."""
    found = lint(built(Confident(COIN, lag=0)), max_new_tokens=3)
    assert found.anticipates
    assert found.leak > 0.05
    assert not found.reused


def test_confidences_of_the_block_before_are_lawful_with_new_numbers_only():
    """Nothing is anticipated, but the draft has seen its numbers before."""
    found = lint(built(Confident(COIN)), wrap=DraftByPosition)
    assert not found.lawful
    assert found.reused.keys() == {"draft"}
    assert found.leak > 0.01
    assert "draft numbers decide twice" in repr(found)
    assert not lint(built(T2.draft), wrap=PositionKeyed, max_new_tokens=5).lawful
    fixed = lint(built(T2.draft, 2), wrap=DraftByPosition)
    assert fixed.reused
    assert certify(
        built(T2.draft, 2), max_new_tokens=4, wrap=DraftByPosition
    ).lossless  # reuse is a risk, not yet a bias


@pytest.mark.parametrize(
    ("draft", "wrap", "stream"),
    [(T2.draft, StreamsShare, "draft"), (sd.drafts.Tree(T2.draft, (2,)), SiblingsShare, "draft")],
)
def test_numbers_that_decide_twice_in_one_round_are_seen(draft, wrap, stream):
    assert lint(built(draft, 1), wrap=wrap).reused[stream] == pytest.approx(1)


def test_a_row_that_depends_on_its_mates_is_seen():
    decoder = catalogue.BASE.draft(Forwards(catalogue.MENU), length=1).build()
    assert lint(decoder, max_new_tokens=4, batch=3).mates


@dataclass(frozen=True, eq=False)
class Wasteful(Confident):
    """Submits one token of three that it draws, always."""

    def propose(self, state, context, budget, rng):
        proposal, state = super().propose(state, context, budget, rng)
        return sd.Proposal.chain(proposal.tokens, budget.clamp(max=1), proposal.probs, "sampled"), state


def test_dropping_without_looking_is_lawful():
    found = lint(built(Wasteful(COIN)))
    assert found.lawful


def test_too_many_branches_are_refused():
    with pytest.raises(RuntimeError, match="more than 10 branches"):
        lint(built(T2.draft), limit=10)
