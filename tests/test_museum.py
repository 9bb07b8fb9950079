"""The bug museum: every exhibit's number, and the parts that its models are made of. ``recipes/museum.py`` runs all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import StoppingCriteriaList

from specdec.audit import museum
from specdec.audit.museum import parts, real, rules
from specdec.audit.museum.exhibit import T2, T3, Exhibit, one_round

ALL = museum.everything()
SLOW = (  # a second or more each; a smaller case of each stays
    "B1: argmax declared as a draw, 2 tokens",
    "B3: adaptive verification, draft noise by position, 4",
    "B3: adaptive verification, draft noise by position, 5",
    "B3: by live confidences",
    "B7: products",
    "B7: the same",
    "B7: its repair, distributions before the token, 3",
    "B9: the last test is not capped, 3",
    "B12: ",
    "B13: ",
    "false alarm: a fresh draw",
    "transformers' generate",
    "transformers' rule, 3",
    "what #11985 asks for: end at the first failed test, 3",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "exhibit",
    [pytest.param(e, marks=pytest.mark.slow if e.name.startswith(SLOW) else (), id=e.name) for e in ALL],
)
def test_an_exhibit_has_its_number_and_its_repair_is_exact(exhibit):
    found = exhibit.broken()
    repaired = exhibit.fixed() if exhibit.fixed else None
    assert exhibit.stands(found, repaired), (found, repaired)
    assert found.mass < 1e-12


def test_the_museum_has_every_bug_and_names_its_sources():
    assert len({e.name for e in ALL}) == len(ALL)
    numbers = {e.name.split(":")[0] for e in ALL}
    assert numbers >= {f"B{n}" for n in range(1, 14)}
    for e in ALL:
        assert "/" in e.source
        assert e.fixed is not None or e.expected == 0
    assert {e.name.split(":")[0] for e in ALL if e.real_code} >= {"B1", "B12", "B13"}


def test_an_exhibit_that_is_not_as_expected_does_not_stand():
    wrong, right = one_round(T3, rules.one_number, 1), one_round(T3, rules.token_rule, 1)
    row = Exhibit("a row", "a/b", 0.0375, lambda: wrong)
    assert row.stands(wrong, None)
    assert row.stands(wrong, right)
    assert not row.stands(right, None)
    assert not row.stands(wrong, wrong)
    assert not Exhibit("a row", "a/b", 0.0, lambda: wrong).stands(wrong, None)
    assert Exhibit("a row", "a/b", None, lambda: wrong).stands(wrong, None)
    assert not Exhibit("a row", "a/b", None, lambda: wrong).stands(right, None)
    assert not Exhibit("a row", "a/b", 0.0003, lambda: wrong).stands(right, None)


def test_generate_overlooks_a_stop_inside_a_block():
    found = real.generate(1, 2, stop=2)
    if real.ASKS_ABOUT_DRAFTS:  # and this draft ends with its one token
        assert found.lossless
        found = real.generate(2, 3, stop=1)
    assert found.total_variation > 0.01
    assert real.generate(1, 2, stop=2, crop=True).lossless
    assert real.EndsAt(2)(torch.tensor([[0, 2]]), None).tolist() == [True]
    assert StoppingCriteriaList([real.EndsAt(2)])(torch.tensor([[0, 1]]), None).tolist() == [False]


def test_products_of_uniforms():
    """The closed form against a simulation."""
    draw = np.random.default_rng(0)
    for k in (1, 2, 4):
        chance = torch.from_numpy(draw.random(k) ** 0.5)
        found = rules.longest(chance)
        assert float(found.sum()) == pytest.approx(1)
        stands = draw.random((200_000, k)).cumprod(1) <= chance.cumprod(0).numpy()
        longest = (stands * np.arange(1, k + 1)).max(1)
        assert np.abs(np.bincount(longest, minlength=k + 1) / len(longest) - found.numpy()).max() < 5e-3
    assert rules.longest(torch.tensor([0.3]).double()).tolist() == pytest.approx([0.7, 0.3])
    assert rules.longest(torch.ones(2).double()).tolist() == pytest.approx([0, 0, 1])
    assert rules.longest(torch.tensor([0.5, 0.0]).double()).tolist() == pytest.approx([0.5, 0.5, 0])


def test_lengths_of_adaptive_verification():
    draft = parts.Confident(T2.draft.probs)
    survival = torch.tensor([[0.9, 0.81, 0.729], [0.6, 0.54, 0.486]], dtype=torch.float64)
    assert draft._size(survival).tolist() == [3, 0]
    assert parts.Confident(T2.draft.probs, first=True)._size(survival).tolist() == [0, 0]
    assert parts.Confident(T2.draft.probs, first=True, cost=1.2)._size(survival).tolist() == [3, 3]
