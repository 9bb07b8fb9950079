"""Why greedy texts differ: ties of bfloat16 and of equal tokens, mistakes, and texts that ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny
from transformers import SuppressTokensLogitsProcessor

import specdec as sd
from specdec.lab import differences
from specdec.lab.differing import Differences

PROMPTS = [[1, 2, 3, 4], [7, 8], [5, 6, 9]]


def edited(out, row, position, token):
    """The same with another token in one place, and others after it."""
    ids = [list(texts) for texts in out.ids]
    ids[row][position] = token
    return replace(out, ids=ids)


@pytest.fixture(scope="module")
def decoder():
    return sd.decoder(sd.HFModel(tiny("llama", 0, torch.float32))).greedy().build()


def test_equal_texts_have_no_difference(decoder):
    out = decoder.generate(PROMPTS, 12)
    found = differences(decoder, out, out)
    assert found.explained
    assert len(found) == 0
    assert repr(found) == "the texts of all 3 rows are equal"


@pytest.mark.parametrize("second", [False, True])
def test_a_token_that_is_not_the_targets_is_no_tie(decoder, second):
    out = decoder.generate(PROMPTS, 12)
    wrong = edited(out, 1, 5, (out.ids[1][5] + 40) % 97)
    (one,) = differences(decoder, *((wrong, out) if second else (out, wrong)))
    assert (one.row, one.position, one.probable) == (1, 5, int(second))
    assert not one.tie
    assert one.gap > 100 * one.rounding > 0
    text = torch.tensor([PROMPTS[1] + out.ids[1][:5]])
    logits = decoder.target.model(text).logits[0, -1].detach()
    wanted = float(logits[out.ids[1][5]] - logits[wrong.ids[1][5]])
    assert one.gap == pytest.approx(wanted, rel=1e-4)
    assert f"no tie; the {'second' if second else 'first'} text has the most probable token" in str(one)


def test_neither_text_may_be_right(decoder):
    out = decoder.generate(PROMPTS, 12)
    a, b = (edited(out, 0, 3, (out.ids[0][3] + by) % 97) for by in (30, 60))
    found = differences(decoder, a, b)
    assert found[0].probable is None
    assert not found.explained
    assert "neither text has the most probable token" in repr(found)


@pytest.mark.parametrize("probs", [[0.4, 0.4, 0.2], [0.5, 0.5, 0.0]])
def test_equal_logits_are_a_tie(probs):
    target = sd.TableModel(probs)
    plain = sd.decoder(target).greedy().build()
    out = plain.generate([[0]], 4)
    (one,) = differences(plain, out, edited(out, 0, 2, 1 - out.ids[0][2]))
    assert one.gap == 0
    assert one.tie
    (one,) = differences(plain, out, edited(out, 0, 2, 2))
    assert not one.tie


def test_ties_of_bfloat16_are_found_where_they_happen():
    """Logits of few bits: speculative and plain texts differ, always by ties."""
    target, small = (sd.HFModel(tiny("llama", seed, torch.bfloat16)) for seed in (0, 1))
    plain = sd.decoder(target).greedy().build()
    drafted = sd.decoder(target).greedy().draft(small, 4).build()
    prompts = [[i, i + 1] for i in range(40)]
    found = differences(plain, plain.generate(prompts, 40), drafted.generate(prompts, 40), rows=8)
    assert isinstance(found, Differences)
    assert len(found) >= 1
    assert found.explained, found


@pytest.mark.parametrize("factor", [1000.0, 1e-3])
def test_the_error_is_that_of_scores(factor):
    """A processor that stretches the logits stretches their errors."""
    target = sd.HFModel(tiny("llama", 0, torch.bfloat16))
    plain = sd.decoder(target).greedy().build()
    out = plain.generate(PROMPTS, 8)
    wrong = edited(out, 0, 3, (out.ids[0][3] + 30) % 97)
    (one,) = differences(plain, out, wrong)
    stretched = sd.decoder(target).greedy().sampling(processors=(lambda ids, scores: scores * factor,))
    (other,) = differences(stretched, out, wrong)
    assert other.gap == pytest.approx(factor * one.gap, rel=0.02)
    assert other.rounding == pytest.approx(factor * one.rounding, rel=0.2)
    assert (one.tie, other.tie) == (False, False)


def test_a_text_that_ended_is_no_tie(decoder):
    out = decoder.generate(PROMPTS, 12)
    (one,) = differences(decoder, out, replace(out, ids=[out.ids[0][:6], *out.ids[1:]]))
    assert one.ended
    assert not one.tie
    assert str(one) == "row 0, token 6: the second text has ended, so budgets or stops differ"


def test_what_processors_forbid_is_no_tie(decoder):
    out = decoder.generate(PROMPTS, 12)
    token = out.ids[0][4]
    strict = sd.decoder(decoder.target).greedy()
    strict = strict.sampling(processors=(SuppressTokensLogitsProcessor([token], device="cpu"),)).build()
    (one,) = differences(strict, out, edited(out, 0, 4, (token + 1) % 97))
    assert one.gap == float("inf")
    assert not one.tie


def test_bad_calls_are_refused(decoder):
    out = decoder.generate(PROMPTS, 4)
    with pytest.raises(ValueError, match=r"give a decoder with .greedy"):
        differences(sd.decoder(decoder.target), out, out)
    with pytest.raises(ValueError, match="different prompts"):
        differences(decoder, out, decoder.generate(PROMPTS[:2], 4))
    with pytest.raises(TypeError, match=r"other is a list: give what decoder.generate returned"):
        differences(decoder, out, out.ids)
    with pytest.raises(TypeError, match="decoder is a HFModel"):
        differences(decoder.target, out, out)
