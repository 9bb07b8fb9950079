"""Suffix decoding: its paths beside a count of all continuations, and what it gains over lookup."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

import specdec as sd
from specdec.drafts import Suffix


def counted(ids, count, max_match, factor, min_chance):
    """The same by plain lists: for each length of a match, all continuations, one token at a time."""
    best, most = [], 0.0
    for n in range(1, min(max_match, len(ids) - 1) + 1):
        starts = [i + n for i in range(len(ids) - n) if ids[i : i + n] == ids[-n:]]
        path, chance, chances = [], 1.0, 0.0
        while len(path) < min(count, max(1, int(factor * n))):
            after = [(s + len(path), ids[s + len(path)]) for s in starts if s + len(path) < len(ids)]
            after = [(i, token) for i, token in after if ids[i - len(path) : i] == path]
            if not after:
                break
            times = Counter(token for _, token in after)
            token = max(after, key=lambda pair: (times[pair[1]], pair[0]))[1]
            chance *= times[token] / len(after)
            if chance < min_chance:
                break
            path.append(token)
            chances += chance
        if starts and chances >= most:
            best, most = path, chances
    return best


@pytest.mark.parametrize("seed", range(60))
def test_the_path_is_the_most_frequent_one(seed):
    pick = random.Random(seed)
    ids = [pick.randrange(pick.choice([2, 3])) for _ in range(pick.randrange(1, 60))]
    settings = pick.choice([1, 3, 24]), pick.choice([0.5, 1.0, 4.0]), pick.choice([0.0, 0.1, 0.6])
    count = pick.randrange(1, 8)
    assert Suffix(*settings).lookup(np.array(ids), count).tolist() == counted(ids, count, *settings)


def test_a_frequent_continuation_beats_the_latest():
    text = np.array([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    assert Suffix().lookup(text, 2).tolist() == [3, 9]
    assert sd.drafts.NGram().lookup(text, 2).tolist() == [4, 9]


def test_a_longer_match_gives_a_longer_path():
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert Suffix().lookup(np.array([*text, 0, 5]), 8).tolist() == [6]
    assert Suffix().lookup(np.array([*text, 0, 5, 6, 7]), 8).tolist() == [8, 9, 10]
    assert Suffix(factor=2).lookup(np.array([*text, 0, 5, 6]), 8).tolist() == [7, 8, 9, 10]


def test_rows_and_their_budgets():
    table = sd.TableModel.random(4, order=1, seed=3)
    prompts = [[0, 1, 2], [3], [1, 2, 1, 2, 1]]
    base = sd.decoder(table).greedy()
    out = base.draft(Suffix(), length=5).generate(prompts, [40, 5, 30])
    assert out.ids == base.generate(prompts, [40, 5, 30]).ids
    assert out.stats.tau > 2


@pytest.mark.parametrize("wrong", [{"max_match": 0}, {"factor": 0}, {"min_chance": 1.5}])
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} .*need max_match >= 1, factor > 0"):
        Suffix(**wrong)


def test_a_path_may_have_no_limit_of_its_own():
    target = sd.TableModel.random(4, order=1, seed=0)
    for factor in (float("inf"), 1e300):
        decoder = sd.decoder(target).greedy().draft(sd.drafts.Suffix(factor=factor), 8).build()
        assert (
            decoder.generate([[1, 2, 1, 2, 1]], 20).ids
            == sd.decoder(target).greedy().generate([[1, 2, 1, 2, 1]], 20).ids
        )
