"""Verifiers on the same rounds: their means against exact ones, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

import specdec as sd
from specdec.drafts.siblings import Distinct
from specdec.lab.verifying import accepted_by

TARGET, DRAFT = sd.TableModel([0.6, 0.3, 0.1]), sd.TableModel([0.2, 0.3, 0.5])


def decoder(draft=DRAFT, length=2):
    return sd.decoder(TARGET).draft(draft, length=length).build()


def test_means_are_the_exact_ones():
    """Two drafted tokens of a known pair: .96 are accepted by rejection, 1 by block verification."""
    prompts = [[0]] * 150
    chains = {"rejection": sd.Rejection(), "block": sd.BlockVerification()}
    found = accepted_by(decoder(), prompts, chains, new_tokens=30, batch=64)
    for name, mean in (("rejection", 1.96), ("block", 2.0)):
        tokens, rounds = found[name].sum(1)
        assert tokens / rounds == pytest.approx(mean, abs=0.02)
    assert np.array_equal(found["rejection"][1], found["block"][1])
    assert found["block"].shape == (2, 150)


@pytest.mark.slow
def test_means_of_trees_are_the_exact_ones():
    """Of trees (2, 2) of distinct siblings 1.338 are accepted by rejection and 1.362 by traversal."""
    prompts = [[0]] * 150
    tree = decoder(sd.drafts.Tree(DRAFT, (2, 2), siblings=Distinct()))
    rules = {"rejection": sd.Rejection(), "traversal": sd.verifiers.Traversal()}
    found = accepted_by(tree, prompts, rules, new_tokens=30, batch=64)
    for name, mean in (("rejection", 2.338), ("traversal", 2.362)):
        tokens, rounds = found[name].sum(1)
        assert tokens / rounds == pytest.approx(mean, abs=0.02)


def test_more_draws_of_the_same_rounds():
    """The rounds are the decoder's own, whatever verifies them, and a prompt's do not depend on its batch."""
    rules = {"rejection": sd.Rejection()}
    one, other = (
        accepted_by(decoder(), [[0], [1], [2]], rules, 20, draws, batch) for draws, batch in ((1, 3), (4, 2))
    )
    assert np.array_equal(one["rejection"][1], other["rejection"][1])
    assert not np.array_equal(one["rejection"][0], other["rejection"][0])
    assert (other["rejection"][0] % 0.25 == 0).all()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: accepted_by(decoder(), [[0]], {"c": sd.Coupled()}),
            "verifier 'c' wants drafts drawn with its own",
        ),
        (
            lambda: accepted_by(decoder(), [[0]], {"r": sd.Rejection()}, draws=0),
            "draws is 0: give at least 1",
        ),
        (
            lambda: accepted_by(
                decoder(sd.drafts.Tree(DRAFT, (2, 2))), [[0]], {"b": sd.BlockVerification()}, 8
            ),
            "BlockVerification takes chains",
        ),
        (
            lambda: accepted_by(
                sd.decoder(TARGET).draft(DRAFT).greedy().build(), [[0]], {"r": sd.Rejection()}
            ),
            "temperature is 0, where all verifiers accept the same",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
