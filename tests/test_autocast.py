"""The caller's torch.autocast changes nothing: models run in their own precision."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.kernels.device import own_precision

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]


def decoders(family: str) -> list[sd.Decoder]:
    target, small = (sd.HFModel(tiny(family, seed, dtype=torch.float32)) for seed in (0, 1))
    base = sd.decoder(target).sampling(temperature=0.7)
    drafts = (sd.drafts.Model(small), sd.drafts.Tree(small, (2, 1)), sd.drafts.MagicDec(window=4))
    optimistic = base.draft(small, length=2).executor(sd.executors.Optimistic())
    return [base.build(), *(base.draft(one, length=2).build() for one in drafts), optimistic.build()]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_texts_are_those_without_autocast(family):
    def said() -> list[object]:
        found: list[object] = []
        for one in decoders(family):
            out = one.generate(PROMPTS, 8, seed=1, eos_token_id=())
            found.append(out.ids)
            if not isinstance(one.executor, sd.executors.Optimistic):
                served = [sd.Request(prompt, 8, seed=2) for prompt in PROMPTS]
                found.append([f.ids for f in one.serve(served, limit=1, eos_token_id=())])
            found.append([row.tolist() for row in sd.log_probs(one, out)])
        return found

    plain = said()
    with torch.autocast("cpu", torch.bfloat16):
        assert said() == plain
        assert torch.is_autocast_enabled("cpu")


def test_a_context_is_made_only_where_it_is_needed():
    with own_precision():
        assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        with own_precision():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
