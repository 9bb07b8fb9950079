"""Retrieval: its matches beside a search through every place, and its settings."""

from __future__ import annotations

import random

import numpy as np
import pytest

import specdec as sd
from specdec.drafts import Corpus, Retrieval
from specdec.drafts.retrieval import SAMPLED


def searched(texts, ids, most, least):
    """The same, place by place."""
    flat = [token for text in texts for token in (*text, -1)]
    for m in range(min(most, len(ids)), least - 1, -1):
        at = [i + m for i in range(len(flat) - m) if flat[i : i + m] == ids[-m:]]
        if at:
            return at
    return []


@pytest.mark.parametrize("seed", range(60))
def test_matches_are_the_longest(seed):
    pick = random.Random(seed)
    texts = [[pick.randrange(3) for _ in range(pick.randrange(1, 40))] for _ in range(4)]
    most = pick.choice([1, 3, 16, 32])
    corpus = Corpus(texts)
    for _ in range(5):
        ids, least = [pick.randrange(3) for _ in range(pick.randrange(1, 40))], pick.randrange(1, most + 1)
        assert corpus.after(np.array(ids), most, least).tolist() == searched(texts, ids, most, least)


def test_of_many_places_some_are_looked_at():
    corpus = Corpus([[1, 2, 3] * 1000])
    at = corpus.after(np.array([9, 1, 2]), 8, 1)
    assert len(at) == SAMPLED
    assert set(corpus.tokens[at].tolist()) == {3}


def test_the_most_frequent_continuation_is_proposed_up_to_the_end_of_a_text():
    draft = Retrieval(Corpus([[1, 2, 3, 4], [1, 2, 5, 6], [7, 1, 2, 5, 6], [2, 9]]))
    assert draft.lookup(np.array([0, 1, 2]), 8).tolist() == [5, 6]
    assert draft.lookup(np.array([0, 1, 2]), 1).tolist() == [5]
    assert draft.lookup(np.array([7, 1, 2]), 8).tolist() == [5, 6]
    assert draft.lookup(np.array([8, 2]), 8).tolist() == []  # a match of one token
    assert Retrieval(draft.corpus, min_match=1, min_chance=0.3).lookup(np.array([8, 2]), 8).tolist() == [5, 6]
    assert draft.lookup(np.array([5, 6]), 8).tolist() == []  # nothing follows


def test_a_corpus_of_the_targets_own_text_is_guessed():
    target = sd.TableModel.random(50, order=2, seed=3)
    base = sd.decoder(target).greedy()
    plain = base.generate([[0, 1, 2]], 60)
    out = base.draft(Retrieval(Corpus([[0, 1, 2, *plain.ids[0]]])), length=5).generate([[0, 1, 2]], 60)
    assert out.ids == plain.ids
    assert out.stats.tau > 5


def test_texts_become_a_corpus_by_the_targets_tokenizer(tmp_path):
    model, tokenizer = sd.zoo.load("pocket-target")
    corpus = Corpus.of(["import os\n", "import sys\n"], tokenizer)
    assert tokenizer.decode(corpus.ids[1]) == "import sys\n"
    assert repr(corpus).startswith("Corpus(2 texts, ")
    decoder = sd.decoder((model, tokenizer)).greedy().draft(Retrieval(corpus), length=4).build()
    decoder.save(tmp_path / "saved")
    loaded = sd.load(tmp_path / "saved").build()
    assert loaded.draft.corpus.ids == corpus.ids


def test_bad_input_is_refused():
    corpus = Corpus([[0, 1]])
    with pytest.raises(
        TypeError, match=r"corpus is a list: give drafts.Corpus.of\(texts, target.tokenizer\)"
    ):
        Retrieval(["some text"])
    with pytest.raises(TypeError, match=r"ids are texts: give Corpus.of\(texts, target.tokenizer\)"):
        Corpus(["some text"])
    with pytest.raises(TypeError, match="texts is str: give a list of texts"):
        Corpus.of("some text", None)
    with pytest.raises(ValueError, match="ids is empty"):
        Corpus([])
    for wrong in ({"min_match": 5, "max_match": 4}, {"max_match": 33}, {"min_chance": 2.0}):
        with pytest.raises(ValueError, match="need min_match <= max_match <= 32"):
            Retrieval(corpus, **wrong)
    with pytest.raises(ValueError, match="min_match is 0"):
        Retrieval(corpus, min_match=0)
    with pytest.raises(ValueError, match="corpus has the id 9 and the target's vocabulary 6"):
        sd.decoder(sd.TableModel.random(6)).draft(Retrieval(Corpus([[9]]))).build()


def test_what_is_no_corpus():
    assert Corpus(iter([[1, 2], [3]])) == Corpus([[1, 2], [3]])
    for wrong in ([1, 2, 3], None, 5, [None]):
        with pytest.raises(TypeError, match="give a list of ids for each text"):
            Corpus(wrong)
    with pytest.raises(TypeError, match="no whole number"):
        Corpus([[1.7]])
    with pytest.raises(ValueError, match="negative token"):
        Corpus([[-1, 2]])
    with pytest.raises(TypeError, match="tokenizer is None: give the target's"):
        Corpus.of(["a"], None)
