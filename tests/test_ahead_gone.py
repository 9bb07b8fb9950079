"""A target's captured rounds keep nothing of drafts that are gone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts import MagicDec, Model
from specdec.drafts.heads import Eagle3, Head, Medusa
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead
from specdec.models import Windowed


def small(seed):
    return sd.HFModel(tiny("llama", seed=seed), graphs="eager")


def spire(target, seed):
    return sd.drafts.Spire(SpireModel.from_target(target, 1, window=4), 3, graphs="eager")


DRAFTS = {
    "model": lambda target, seed: Model(small(seed)),
    "windowed": lambda target, seed: Model(Windowed(small(seed), 4, block=4)),
    "spire": spire,
    "magicdec": lambda target, seed: MagicDec(window=4, sinks=1, block=4),
    "eagle3": lambda target, seed: Head(Eagle3.from_target(target).to(torch.float64), graphs="eager"),
    "medusa": lambda target, seed: Head(Medusa.from_target(target).to(torch.float64), graphs="eager"),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_their_weights_and_memory_are_free(kind):
    target = sd.HFModel(tiny("llama"), graphs="eager")
    plain = sd.decoder(target).executor(Ahead()).build()
    drafts = []

    def decode(seed):
        decoder = sd.decoder(target).draft(DRAFTS[kind](target, seed), 3).executor(Ahead()).build()
        for _ in range(2):
            decoder.generate([[1, 2, 3, 4]], 24, seed=0, eos_token_id=())
        drafts.append(weakref.ref(decoder.draft))
        return decoder, set(map(id, rounds(target)))

    def rounds(target):
        return [program for program in target.steps.captured if program.owner is not None]

    for _ in range(2):
        plain.generate([[1, 2, 3, 4]], 24, seed=0, eos_token_id=())
    own = {id(program) for program in target.steps.captured}
    kept, captured = decode(1)
    assert captured
    memory = [weakref.ref(program) for program in rounds(target)]
    del kept
    gc.collect()
    kept, _ = decode(2)  # the next texts of the target
    gc.collect()
    assert drafts[0]() is None
    assert not any(program() for program in memory)
    assert rounds(target)
    assert own <= {id(program) for program in target.steps.captured}  # what is nobody's stays
    del kept
    gc.collect()
    assert drafts[1]() is None
