"""Processors that raise on made-up texts, as grammars do, are judged at the first text of a run."""

from __future__ import annotations

import pytest
import torch

import specdec as sd

PROMPT = [2, 3]


class Alternates:
    """After the prompt even and odd tokens take turns; it raises on a text of another language."""

    def __call__(self, ids, scores):
        text = ids[0].tolist()
        if text[:2] != PROMPT:
            raise AssertionError("no text of the language")
        return self.allowed(len(text), scores)

    def allowed(self, length, scores):
        out = scores.clone()
        out[:, length % 2 :: 2] = -torch.inf
        return out


class Counts(Alternates):
    """The same, but it counts its calls instead of the text's tokens."""

    def __init__(self):
        self.calls = 0

    def allowed(self, length, scores):
        self.calls += 1
        return super().allowed(self.calls + 1, scores)


class Matcher(Alternates):
    """Takes the last token of the text in every call but the first, as grammar matchers do, and raises where it does not follow."""

    def __init__(self):
        self.read = None

    def __call__(self, ids, scores):
        text = ids[0].tolist()
        if self.read is not None and (self.read + text[-1:])[-len(text) :] != text:
            raise AssertionError("the text does not follow")
        self.read = text
        return super().__call__(ids, scores)


class Silent(Counts):
    """The same, but it lets other texts pass in place of raising."""

    def __call__(self, ids, scores):
        return super().__call__(ids, scores) if ids[0, :2].tolist() == PROMPT else scores


class Remembers(Alternates):
    """Pure, and with a memo."""

    def __init__(self):
        self.memo = {}

    def __call__(self, ids, scores):
        text = tuple(ids[0].tolist())
        if text not in self.memo:
            self.memo[text] = super().__call__(ids, torch.zeros_like(scores))
        return scores + self.memo[text]


def decoder(processor, speculates=True):
    target, draft = (sd.TableModel.random(vocab_size=6, order=1, seed=seed) for seed in (0, 1))
    made = sd.decoder(target).sampling(processors=(processor,)).verifier(sd.Coupled())
    return (made.draft(draft, 3) if speculates else made).build()


@pytest.mark.parametrize("kind", [Counts, Matcher, Silent])
@pytest.mark.parametrize("speculates", [False, True])
def test_one_that_keeps_state_is_refused_at_the_first_text(kind, speculates):
    one = kind()
    made = decoder(one, speculates)
    with pytest.raises(ValueError, match=f"processors: {kind.__name__} keeps state between calls"):
        made.generate([PROMPT], 8)
    assert vars(one) == vars(kind())


def test_every_row_is_a_trial():
    with pytest.raises(ValueError, match="processors: Silent keeps state between calls"):
        decoder(Silent()).generate([[4, 5], PROMPT], 8)


def test_a_drafts_own_sampling_is_tried_too():
    target, draft = (sd.TableModel.random(vocab_size=6, order=1, seed=seed) for seed in (0, 1))
    own = sd.drafts.Model(draft, sampling=sd.Sampling(processors=(Counts(),)))
    with pytest.raises(ValueError, match="processors: Counts keeps state between calls"):
        sd.decoder(target).draft(own, 3).build().generate([PROMPT], 8)


@pytest.mark.parametrize("kind", [Alternates, Remembers])
def test_a_pure_one_is_let_through(kind):
    made = decoder(kind())
    assert len(made.sampling._processors.unseen) == 1
    ids = made.generate([PROMPT] * 20, 12, seed=3).ids
    assert ids == decoder(kind(), False).generate([PROMPT] * 20, 12, seed=3).ids
    assert all([token % 2 for token in row] == [1, 0] * 6 for row in ids)
    assert not made.sampling._processors.unseen


def test_what_it_raises_on_a_real_text_is_raised():
    with pytest.raises(AssertionError, match="no text of the language"):
        decoder(Alternates()).generate([[4, 5]], 4)
