"""Captured chains of heads from text to text: their memory is lent again, with its chains."""

from __future__ import annotations

import pytest
import torch
from test_fast_heads import BUDGETS, PROMPTS, SIZES, shake
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import DFlash, Eagle3, Head


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", 0, torch.bfloat16, **SIZES).float())


def test_the_next_text_gets_the_memory_and_the_chains_of_the_last(target):
    head = shake(Eagle3.from_target(target, (0, 2)))
    decoder = sd.decoder(target).greedy().draft(Head(head, graphs="eager"), 3).build()
    found = []
    for _ in range(5):
        decoder.generate(PROMPTS, BUDGETS)
        found.append({id(program) for program in decoder.draft.programs.captured})
    assert found[3]
    assert found[3] == found[4]


@pytest.mark.parametrize("graphs", ["eager", "recorded"])
def test_memory_whose_block_was_too_small_is_not_lent_again(target, graphs):
    """Every text has one chain, for which the first memory has no slots."""
    head = shake(DFlash.from_target(target, (0, 2), blocks=1, block_size=5))
    decoder = sd.decoder(target).greedy().draft(Head(head, graphs=graphs), 3).build()
    for count in (2, 3):
        ids = [decoder.generate([[5, 6, 7]], count).ids for _ in range(4)]
        assert all(one == ids[0] for one in ids)
    assert decoder.draft.programs.captured


def test_a_captured_chain_gets_what_was_carried_in_its_own_dtype(target):
    class Wide(Eagle3):
        def read(self, features, go):
            return super().read(features, go).double()

        def step(self, n, memo, token, at):
            if n == 0 and memo.dtype != torch.float64:
                raise TypeError(f"carried {memo.dtype}")
            return super().step(n, memo.to(self.dtype), token, at)

    head = shake(Wide.from_target(target, (0, 2)))
    decoder = sd.decoder(target).greedy().draft(Head(head, graphs="recorded"), 3).build()
    out = [decoder.generate(PROMPTS[:2], 12).ids for _ in range(2)]
    assert out[0] == out[1]
    assert decoder.draft.programs.captured
