"""``generate(batch_size=)``: many prompts in several batches give what one batch gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import specdec as sd
from specdec.executors import Pipelined
from specdec.selectors import UCB1
from specdec.selectors.statistics import PULLS

PROMPTS = [[5, 6], [7], [8, 9, 10], [2], [3, 4]]
BUDGETS = [9, 4, 12, 7, 5]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 99])
def test_batches_have_the_texts_of_one_batch(target, small, size):
    decoder = sd.decoder(target).draft(small, length=3).build()
    together = decoder.generate(PROMPTS, BUDGETS, seed=0)
    seen = []
    apart = decoder.generate(
        PROMPTS, BUDGETS, seed=0, batch_size=size, on_round=lambda round: seen.append(round.context.batch)
    )
    assert apart.ids == together.ids
    assert apart.finish == together.finish
    assert apart.prompt_ids == PROMPTS
    assert max(seen) == min(size, 5)
    assert apart.stats.tokens == together.stats.tokens == sum(map(len, apart.ids))
    assert [one.tokens for one in apart.row_stats] == [one.tokens for one in together.row_stats]
    assert apart.stats.tau == together.stats.tau
    own = decoder.generate(PROMPTS, BUDGETS, seed=[4, 3, 2, 1, 0], batch_size=size)
    assert own.ids[1] == decoder.generate([PROMPTS[1]], BUDGETS[1], seed=[3]).ids[0]


def test_batches_are_even(target):
    seen = []
    sd.decoder(target).build().generate([[5]] * 10, 1, batch_size=4, on_round=seen.append)
    assert [round.context.request.tolist() for round in seen] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_stops_are_those_of_the_prompt(target, small):
    decoder = sd.decoder(target).draft(small, length=3).build()
    end = decoder.generate(PROMPTS, 12, seed=0).ids[3][2]
    criteria = [lambda ids, scores: len(ids[0]) == 9]
    given = {"seed": 0, "eos_token_id": end, "stopping_criteria": criteria}
    together = decoder.generate(PROMPTS, 12, **given)
    apart = decoder.generate(PROMPTS, 12, batch_size=2, **given)
    assert (apart.ids, apart.finish) == (together.ids, together.finish)
    assert {"eos", "criteria"} <= set(apart.finish)


@dataclass(frozen=True)
class Seen(UCB1):
    """A bandit that notes how much it has seen whenever it chooses."""

    seen: list[float] = field(default_factory=list)

    def select(self, state, *given):
        self.seen.append(float(state.sums[:, :, PULLS].sum()))
        return super().select(state, *given)


def test_a_selector_goes_on_learning(target, small):
    selector = Seen(pool="global")
    pool = sd.decoder(target).pool({"small": small, "none": sd.drafts.NoDraft()}, selector, 2).build()
    selector.seen.clear()
    out = pool.generate(PROMPTS, 12, seed=0, batch_size=2)
    assert sum(map(len, out.ids)) == 60
    assert selector.seen == sorted(selector.seen)  # it never begins anew
    assert selector.seen.count(0) == 1
    learned = pool.begin(2)
    again = pool.generate(PROMPTS, 12, seed=0, batch_size=2, selection=learned)
    assert (again.ids, again.stats.arms) == (out.ids, out.stats.arms)


def test_a_pipeline_needs_rows_for_its_micro_batches(target, small):
    decoder = sd.decoder(target).draft(small, length=2).executor(Pipelined(2)).build()
    together = decoder.generate(PROMPTS, 6, seed=0)
    assert decoder.generate(PROMPTS, 6, seed=0, batch_size=3).ids == together.ids
    with pytest.raises(ValueError, match="batch_size is 1, which makes a batch of 1 of the 5 rows"):
        decoder.generate(PROMPTS, 6, batch_size=1)


def test_what_is_no_batch_size(target):
    decoder = sd.decoder(target).build()
    with pytest.raises(ValueError, match="batch_size is 0: give the most rows of a batch"):
        decoder.generate([[5]], 1, batch_size=0)
    with pytest.raises(TypeError, match="batch_size is '4'"):
        decoder.generate([[5]], 1, batch_size="4")
    with pytest.raises(TypeError, match="batch_size"):
        decoder.stream([[5]], 1, batch_size=2)


def test_a_batch_takes_the_memory_of_its_rows(target, monkeypatch):
    decoder = sd.decoder(target).build()
    monkeypatch.setattr("specdec.prompts.free_bytes", lambda device: 200)
    assert len(decoder.generate([[5]] * 4, 8, batch_size=2).ids) == 4
    with pytest.raises(MemoryError, match="4 rows"):
        decoder.generate([[5]] * 4, 8)


def test_nothing_of_one_batch_is_left_in_the_next(target, small):
    decoder = sd.decoder(target).draft(small, length=3).sampling(temperature=0).build()
    texts = [torch.randint(2, 40, (n,)).tolist() for n in (30, 2, 17, 1)]
    assert decoder.generate(texts, 10, batch_size=1).ids == [decoder.generate([t], 10).ids[0] for t in texts]
