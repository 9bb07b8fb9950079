"""Captured chains of heads read the slots in use, rounded up to a power of two, and draft what they drafted over all of them."""

from __future__ import annotations

import pytest
import torch
from both_executors import pair
from test_fast_heads import shake
from tiny import tiny
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import specdec as sd
from specdec.drafts.heads import (
    MTP,
    Chain,
    DFlash,
    DFlash2,
    Domino,
    DSpark,
    Eagle3,
    Head,
    LiLiCorr,
    PEagle,
    XPress,
    captured,
)
from specdec.executors import whole_rounds
from specdec.masks import Causal, Sinks, Strided, Window, streaming

PROMPTS = [[7], [50, 51, 52] * 4, [9, 8, 7, 6]]
HEADS = {
    "eagle3": (Eagle3, {"blocks": 2, "head_norms": True}),
    "mtp": (MTP, {}),
    "peagle": (PEagle, {"blocks": 2, "depth": 4}),
    "dflash": (DFlash, {"blocks": 2, "block_size": 14}),
    "dspark": (DSpark, {"blocks": 1, "block_size": 4, "rank": 16}),
    "dflash2": (DFlash2, {"blocks": 2, "block_size": 5, "rank": 16, "top_k": 6}),
    "domino": (Domino, {"blocks": 1, "block_size": 4, "rank": 16, "state": 8}),
    "lilicorr": (LiLiCorr, {"blocks": 2, "block_size": 5, "top_k": 6}),
    "xpress": (XPress, {"blocks": 2, "block_size": 5, "rank": 16}),
    "strided": (Eagle3, {"mask": Causal() & (Window(3) | Strided(4) | Sinks(1)), "blocks": 2}),
    "strided block": (DFlash, {"mask": Causal() & (Window(3) | Strided(4)), "blocks": 1, "block_size": 5}),
    "window": (Eagle3, {"mask": streaming(6, 2)}),
    "window block": (DFlash, {"mask": streaming(6, 2), "blocks": 1, "block_size": 5}),
}

FEW = ("eagle3", "peagle", "dflash", "window block")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(captured, "SHORTEST", 16)
    monkeypatch.setattr(whole_rounds, "SHORTEST", 16)


@pytest.fixture
def read(monkeypatch):
    """The slots of each captured pass, and the largest slot of a row that one wrote."""
    found, written, attention = set(), set(), captured.attention

    def attend(query, keys, values, plan):
        found.add(plan.lowered.max_length)
        if not is_in_torch_dispatch_mode():  # a recording has no numbers to look at
            written.add(int((plan.slots % keys.shape[1]).max()))
        return attention(query, keys, values, plan)

    monkeypatch.setattr(captured, "attention", attend)
    return found, written


def decoded(name, graphs, temperature=1.0):
    """To the end of the memory: the longest text has 59 tokens, and the memory room for one chain more."""
    kind, settings = HEADS[name]
    target = sd.HFModel(tiny("llama"))
    head = shake(kind.from_target(target, (2,) if kind is MTP else (0, 2), **settings))
    builder = sd.decoder(target).draft(Head(head, Chain(), graphs=graphs), 3)
    decoder, proposals = builder.sampling(temperature=temperature).build(), []
    out = decoder.generate(PROMPTS, [9, 47, 47], seed=2, on_round=lambda r: proposals.append(r.proposal))
    return out.ids, proposals, decoder.draft.programs


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        *((name, "eager") for name in FEW),
        ("strided block", "recorded"),
        *(pytest.param(name, "recorded", marks=pytest.mark.slow) for name in HEADS),
        *(pytest.param(name, "eager", marks=pytest.mark.slow) for name in HEADS if name not in FEW),
    ],
)
def test_drafts_of_a_growing_text(name, graphs, short, read):
    """Rows of unequal length, the shortest of which leaves; the text grows out of its bucket."""
    expected, theirs, _ = decoded(name, False)
    found, ours, programs = decoded(name, graphs)
    assert found == expected
    for mine, other in zip(ours, theirs, strict=True):
        live = torch.arange(mine.nodes) < mine.size[:, None]
        assert torch.equal(mine.size, other.size)
        assert torch.equal(mine.tokens[live], other.tokens[live])
        if mine.probs is not None:
            torch.testing.assert_close(mine.probs[live], other.probs[live], rtol=0, atol=1e-12)
    (storage,) = programs._storages
    extra, slots = storage._model.extra, storage._model.slots
    lengths = {program.shape.length for program in programs.captured}
    assert programs.why is None
    assert read[0] == lengths
    if name.startswith("window"):
        assert lengths == {slots} == {6 + 63 + 2 + extra}
    else:
        assert slots == 64 + extra
        assert {64, slots} <= lengths <= {32, 64, slots}


def test_a_block_behind_the_last_position(short, read):
    """The last block is longer than what is left of the memory for the text."""
    found, _, programs = decoded("dflash", "eager", temperature=0)
    assert found == decoded("dflash", False, temperature=0)[0]
    (storage,) = programs._storages
    assert 64 <= max(read[1]) < storage._model.slots


def test_a_short_text_in_a_long_memory(read):
    """The buckets of a model's steps: the smallest has 256 slots."""
    target = sd.HFModel(tiny("llama", max_position_embeddings=2048))
    decoder = sd.decoder(target).draft(Head(shake(Eagle3.from_target(target)), graphs="recorded"), 3).build()
    stream = decoder.stream(PROMPTS[:2], 1500, seed=1)
    for _ in range(12):
        next(stream)
    assert read[0] == {256}
    assert decoder.draft.programs._storages[0]._model.slots > 1500


@pytest.mark.parametrize(
    "name",
    ["eagle3", "dflash", *(pytest.param(n, marks=pytest.mark.slow) for n in ("peagle", "strided", "window"))],
)
def test_whole_rounds_read_the_slots_of_their_bucket(name, short, read):
    kind, settings = HEADS[name]
    target = sd.HFModel(tiny("llama"), graphs="eager")
    head = shake(kind.from_target(target, (0, 2), **settings))
    builder = sd.decoder(target).draft(Head(head, graphs="eager"), 3)
    decoders = pair(builder)
    said = [decoders[0].generate(PROMPTS, [9, 47, 47], seed=3, eos_token_id=()).ids]
    read[0].clear()
    said.append(decoders[1].generate(PROMPTS, [9, 47, 47], seed=3, eos_token_id=()).ids)
    assert said[0] == said[1]
    rounds = {key[0].length for storage in target.steps._storages for key in storage.programs}
    assert rounds == {32, 64}
    some = {16, 32, 64}  # of 71 with a window
    block = {length + head.block_slots for length in some}  # which may be behind the last position
    assert read[0] == {"dflash": block, "peagle": some | block}.get(name, some)
