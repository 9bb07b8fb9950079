"""Whole rounds that draft with heads: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from both_executors import PROMPTS, a_round_waits_once, batch_of, pair, same_rounds
from test_fast_heads import shake
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import (
    MTP,
    Chain,
    DFlash,
    DFlash2,
    Domino,
    DSpark,
    DynamicTree,
    Eagle3,
    Head,
    LiLiCorr,
    Medusa,
    PEagle,
    XPress,
)
from specdec.drafts.heads.layers import config_like
from specdec.drafts.heads.slots import PIECE
from specdec.executors import Ahead
from specdec.graphs.whole_round import RoundShape, WholeRound
from specdec.masks import Causal, Sinks, Strided, Window, streaming

BUDGETS = [12, 7, 19, 15]
EVERY = {"blocks": 2, "head_norms": True, "fc_norm": True, "norm_output": True, "norm_before_residual": True}
HEADS = {
    "eagle3": (Eagle3, {}),
    "all flags": (Eagle3, EVERY),
    "own ends": (Eagle3, {"own_embedding": True, "norm_before_fc": True}),
    "window": (Eagle3, {"mask": streaming(6, 2)}),
    "one position": (Eagle3, {"mask": Causal() & Window(1)}),
    "strided": (Eagle3, {"mask": Causal() & Window(9) & (Strided(3) | Sinks(1)), "blocks": 2}),
    "mtp": (MTP, {}),
    "state before the norm": (MTP, {"taps": (2,), "norm_output": False, "hidden_first": True}),
    "peagle": (PEagle, {"depth": 6}),
    "dflash": (DFlash, {"blocks": 2, "block_size": 9}),
    "dflash, window": (DFlash, {"block_size": 7, "mask": streaming(6, 2), "blocks": 2}),
    "dflash, sliding": (DFlash, {"blocks": 3, "block_size": 7, "windows": [5, None, 9]}),
    "dflash, sliding, window": (
        DFlash,
        {"blocks": 2, "block_size": 7, "windows": [8, None], "windows_from": "slot", "mask": streaming(9, 2)},
    ),
    "dspark, sliding": (DSpark, {"blocks": 2, "rank": 8, "windows": [3, 5], "windows_causal": False}),
    "eagle3, sliding": (Eagle3, {"blocks": 2, "windows": [4, None]}),
    "peagle, sliding": (PEagle, {"blocks": 2, "depth": 6, "windows": [7, None]}),
    "dflash2": (DFlash2, {"blocks": 1, "block_size": 7, "anchor_first": True, "top_k": 40}),
    "dspark": (DSpark, {"blocks": 1, "rank": 8, "markov": "rnn"}),
    "domino": (Domino, {"blocks": 1, "block_size": 7, "rank": 8, "state": 9}),
    "lilicorr": (
        LiLiCorr,
        {"blocks": 1, "block_size": 7, "top_k": 90, "heads": 4, "factors": 6, "scale": 1.0},
    ),
    "xpress": (XPress, {"blocks": 1, "block_size": 7, "rank": 8}),
    "xpress, sliding": (
        XPress,
        {"blocks": 2, "block_size": 6, "rank": 8, "windows": [6, None], "anchor_first": True},
    ),
    "jetspec": (DFlash, {"blocks": 2, "block_size": 9, "causal": True}),
    "dspark, strided": (DSpark, {"blocks": 1, "mask": Causal() & Window(9) & (Strided(3) | Sinks(1))}),
}


def head_of(target, name, graphs="eager", sampling=None, **more):
    kind, settings = HEADS[name]
    model = shake(kind.from_target(target, **settings | more))
    return Head(model, sampling=sampling, graphs=graphs)


def head_on(on, like):
    """A builder whose target, and a head like ``like``, are put where ``on`` puts them."""
    model, head = tiny("llama"), type(like)(like.config, like.taps).to(torch.float64)
    model.set_attn_implementation(
        "sdpa"
    )  # the other makes numbers on the device, which the fake one cannot hold
    head.load_state_dict(like.state_dict())
    target = sd.HFModel(on(model), graphs="eager")
    return sd.decoder(target).draft(Head(on(head).eval(), graphs="eager"), 3)


def builder_of(name="eagle3", graphs="eager", length=3, vocab_size=97, **settings):
    target = sd.HFModel(tiny("llama", vocab_size=vocab_size), graphs=graphs)
    return sd.decoder(target).draft(head_of(target, name, graphs, **settings), length)


def accepted(made):
    return made[1].stats.accepted


@pytest.mark.parametrize(
    ("name", "graphs", "length", "verifier", "temperature"),
    [
        ("eagle3", "recorded", 3, sd.Rejection(), 1.0),
        ("all flags", "eager", 4, sd.Coupled(), 1.0),
        ("own ends", "eager", 1, sd.verifiers.FusedRejection(), 1.0),
        ("mtp", "eager", 6, sd.Coupled(), 0.7),
        ("state before the norm", "eager", 5, sd.Rejection(), 1.0),
        ("peagle", "recorded", 5, sd.Rejection(), 1.0),
        ("dflash", "eager", 6, sd.verifiers.FusedRejection(), 1.0),
        ("dflash, window", "eager", 6, sd.Coupled(), 1.0),
        ("dflash2", "recorded", 6, sd.Rejection(), 1.0),
        ("dspark", "eager", 6, sd.Rejection(), 1.0),
        ("dspark, strided", "eager", 7, sd.Coupled(), 0.7),
        ("dflash, sliding", "recorded", 6, sd.Rejection(), 1.0),
        ("dflash, sliding, window", "eager", 6, sd.Coupled(), 1.0),
        ("dspark, sliding", "eager", 6, sd.Rejection(), 1.0),
        ("eagle3, sliding", "eager", 6, sd.Rejection(), 1.0),
        ("peagle, sliding", "recorded", 5, sd.Rejection(), 1.0),
        ("lilicorr", "recorded", 6, sd.Rejection(), 1.0),
        ("domino", "recorded", 6, sd.Rejection(), 1.0),
        ("xpress", "eager", 6, sd.Coupled(), 1.0),
        *(
            pytest.param(name, graphs, length, verifier, 1.0, marks=pytest.mark.slow)
            for name in HEADS
            for graphs, length in (("eager", 6), ("recorded", 4))
            for verifier in (sd.Rejection(), sd.verifiers.FusedRejection(), sd.Coupled())
        ),
    ],
)
def test_texts_and_rounds_are_those_of_serial(name, graphs, length, verifier, temperature):
    builder = builder_of(name, graphs, length).verifier(verifier).sampling(temperature=temperature)
    prompts, budgets = PROMPTS[:3], BUDGETS[:3]  # a step has four rows, and the memory three
    _, made = same_rounds(builder, prompts, budgets, eos_token_id=())
    assert accepted(made) > 7


@pytest.mark.parametrize(
    ("name", "ids"),
    [("eagle3", 3), pytest.param("state before the norm", 6, marks=pytest.mark.slow)],
)
def test_greedy_texts(name, ids):
    """Of a few ids, so that some of an untrained head's are accepted, and others not."""
    prompts = [[token % ids for token in prompt] for prompt in PROMPTS]
    _, made = same_rounds(builder_of(name, vocab_size=ids).greedy(), prompts, BUDGETS, eos_token_id=())
    assert 5 < accepted(made) < made[1].stats.drafted - 10


def test_a_reduced_vocabulary():
    prompts = [[token % 6 for token in prompt] for prompt in PROMPTS]
    builder = builder_of(vocab_size=6, vocabulary=[0, 2, 3, 5])
    (_, rounds), made = same_rounds(builder, prompts, BUDGETS, eos_token_id=())
    assert accepted(made) > 4
    assert {int(t) for round in rounds for t in round.proposal.tokens.flatten()} == {0, 2, 3, 5}


@pytest.mark.parametrize("graphs", ["eager", pytest.param("recorded", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "window",
        "strided",
        "dflash, window",
        "dflash, sliding, window",
        pytest.param("one position", marks=pytest.mark.slow),
    ],
)
def test_rings_that_wrap(monkeypatch, name, graphs):
    """As long as chains may be: one position more, and a slot would be overwritten that is still seen."""
    from specdec.drafts.heads import slots, whole_round

    for module in (slots, whole_round):
        monkeypatch.setattr(module, "PIECE", 4)
    prompts, budgets = [[5, 6, 7, 8, 9], [3]], [20, 30]
    more = {"block_size": 4} if "dflash" in name else {}
    _, made = same_rounds(builder_of(name, graphs, **more), prompts, budgets, eos_token_id=())
    assert accepted(made) > 8


@pytest.mark.parametrize("name", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_stops_that_are_found_a_round_late(name):
    builder = builder_of(name)
    plain = builder.build().generate(PROMPTS, BUDGETS, seed=3, eos_token_id=())
    ends = [plain.ids[0][6], plain.ids[2][12]]
    _, (made, _) = same_rounds(builder, PROMPTS, BUDGETS, eos_token_id=ends)
    assert "eos" in made.finish


def test_texts_grow_out_of_their_bucket():
    """What is carried goes from one captured step to the next."""
    target = sd.HFModel(tiny("llama", max_position_embeddings=512), graphs="eager")
    builder = sd.decoder(target).draft(head_of(target, "mtp"), 3)
    same_rounds(builder, prompts=[[5, 6, 7] * 80, [8, 9]], budgets=[30, 30], eos_token_id=())
    shapes = [key[0] for storage in target.steps._storages for key in storage.programs]
    assert len({shape.length for shape in shapes if isinstance(shape, RoundShape)}) == 2


def test_one_memory_and_its_captures_serve_every_call():
    decoder = builder_of().executor(Ahead()).build()
    said, captured, held = [], [], []
    for _ in range(3):
        said.append(decoder.generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids)
        captured.append(set(decoder.target.steps.captured))
        held.append([storage.whole[0].data_ptr() for storage in decoder.draft.programs._storages])
    assert said[0] == said[1] == said[2]
    assert captured[0] <= captured[1] == captured[2]
    assert held[0] == held[2]
    assert len(held[0]) == 1
    fewer = decoder.generate(PROMPTS[:2], BUDGETS[:2], seed=3, eos_token_id=()).ids  # in the same memory
    assert fewer == said[0][:2]
    before = set(decoder.target.steps.captured)
    decoder.draft.model.fc = copy.deepcopy(decoder.draft.model.fc)  # a step would run the old one
    assert decoder.generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids == said[0]
    after = set(decoder.target.steps.captured)
    assert after
    assert not after & before


@pytest.mark.parametrize("name", ["peagle", "dflash"])
def test_blocks_at_the_end_of_the_memory(name):
    """The last blocks are longer than what is left of the memory for the text."""
    more = {"depth": 20} if name == "peagle" else {"block_size": 20}
    builder = builder_of(name, length=2, **more)
    _, made = same_rounds(builder, [[3], [4, 5]], [60, 59], eos_token_id=())
    assert made[1].finish == ["length", "length"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_longer_requests_leave_no_memory_behind(name):
    """A captured round holds the head's memory and the target's, so a longer text may not make one of them anew and keep the other."""
    decoder = builder_of(name).executor(Ahead()).build()
    for most in range(8, 56, 8):
        for _ in range(2):
            decoder.generate(PROMPTS, most, seed=3, eos_token_id=())
        gc.collect()
        read = [p.draft.store.layers[0][0].data_ptr() for p in rounds_of(decoder)]
        assert len(set(read)) <= 1
        assert len(decoder.draft.programs._storages) == 1


def rounds_of(decoder):
    storages = decoder.target.steps._storages
    return [p for storage in storages for p in storage.programs.values() if isinstance(p, WholeRound)]


def test_streams_run_between_each_other():
    serial, ahead = pair(builder_of())
    wanted = [serial.generate([p], 12, seed=i, eos_token_id=()).ids[0] for i, p in enumerate(PROMPTS[:2])]
    streams = [ahead.stream([p], 12, seed=i, eos_token_id=()) for i, p in enumerate(PROMPTS[:2])]
    made = [[], []]
    while not all(len(ids) == 12 for ids in made):
        for stream, ids in zip(streams, made):
            chunk = next(stream, None)
            ids += [] if chunk is None else chunk.ids
    assert made == wanted


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0, marks=pytest.mark.slow)])
def test_on_a_device_a_round_waits_once(temperature):
    raw = tiny("llama")
    like = shake(Eagle3(config_like(raw), (0, 1, 2))).to(torch.float64)

    def made(on, executor):
        return head_on(on, like).sampling(temperature=temperature).executor(executor).build()

    a_round_waits_once(made, PROMPTS[:2], 10)


def test_logits_that_are_not_finite_are_refused():
    decoder = builder_of().executor(Ahead()).build()

    def spoil(round):
        if round.number == 2:
            with torch.no_grad():
                decoder.draft.model.lm_head.weight.fill_(float("nan"))

    with pytest.raises(ValueError, match="the draft's logits of row"):
        decoder.generate(PROMPTS, 30, seed=0, eos_token_id=(), on_round=spoil)


class OwnTree(DynamicTree):
    pass


class OwnHead(Head):
    pass


class OwnEagle3(Eagle3):
    def step(self, n, memo, token, at):
        logits, memo = super().step(n, memo, token, at)
        return logits * 2, memo


class OwnMedusa(Medusa):
    pass


class OwnDFlash(DFlash):
    pass


def own(b, h, q, kv):
    return kv % 3 == 0


def eagle3(target, **settings):
    return Eagle3.from_target(target, **settings)


REFUSED = {
    "subclass of the draft": (lambda t: OwnHead(eagle3(t), graphs="eager"), "draft is a OwnHead"),
    "subclass of a head": (lambda t: Head(OwnEagle3.from_target(t), graphs="eager"), "head is a OwnEagle3"),
    "tree": (lambda t: Head(eagle3(t), OwnTree(2, 2, 4), graphs="eager"), "tree is OwnTree"),
    "no graphs": (lambda t: Head(eagle3(t)), "the draft has no graphs"),
    "own mask": (
        lambda t: Head(eagle3(t, mask=Causal() & (Window(4) | own)), graphs="eager"),
        "runs the library's masks",
    ),
    "stop": (
        lambda t: Head(DSpark.from_target(t, rank=4), Chain(0.4), graphs="eager"),
        "without a stop, DynamicTree and StaticTree, but .* Chain",
    ),
    "subclass of medusa": (lambda t: Head(OwnMedusa.from_target(t), graphs="eager"), "head is a OwnMedusa"),
    "subclass of dflash": (lambda t: Head(OwnDFlash.from_target(t), graphs="eager"), "head is a OwnDFlash"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_parts_that_the_step_would_bypass_are_refused(which):
    make, why = REFUSED[which]
    target = sd.HFModel(tiny("llama"), graphs="eager")
    with pytest.raises(ValueError, match=rf"Ahead\(\) .*{why}.*: use executors.Serial\(\)"):
        sd.decoder(target).draft(make(target), 2).executor(Ahead()).build()


def test_chains_that_are_too_long_for_a_window_are_refused():
    with pytest.raises(ValueError, match=f"at most {PIECE - 1} tokens .* the length is {PIECE}"):
        builder_of("window", length=PIECE).executor(Ahead()).build()
    with pytest.raises(
        ValueError, match=f"blocks of at most {PIECE} slots .* the length is 3 and the block {PIECE + 1}"
    ):
        builder_of("dflash, window", block_size=PIECE + 1).executor(Ahead()).build()
    builder_of("dflash, window", block_size=PIECE).executor(Ahead()).build()
    builder_of("window", length=PIECE - 1).executor(Ahead()).build()
    builder_of(length=PIECE).executor(Ahead()).build()  # nothing is overwritten


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 40))]
)
def test_random_batches(seed):
    pick, prompts, budgets = batch_of(seed, shortest=1)
    vocab_size = pick.choice([97, 97, 7])
    prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    target = sd.HFModel(tiny("llama", vocab_size=vocab_size), graphs="eager")
    more = {}
    if pick.random() < 0.4:
        more["vocabulary"] = sorted(pick.sample(range(vocab_size), vocab_size // 2))
    drawing = pick.choice([None, None, sd.Sampling(temperature=0), sd.Sampling(temperature=1.3)])
    graphs = pick.choice(["eager", "eager", "recorded"])
    draft = head_of(target, pick.choice(list(HEADS)), graphs, drawing, **more)
    verifier = pick.choice([sd.Rejection(), sd.Coupled(), sd.verifiers.FusedRejection()])
    builder = sd.decoder(target).sampling(temperature=pick.choice([0, 0.8, 1.0])).verifier(verifier)
    ends = [pick.randrange(vocab_size) for _ in range(pick.choice([0, 3, 12 if vocab_size > 7 else 1]))]
    same_rounds(builder.draft(draft, pick.randint(1, 6)), prompts, budgets, eos_token_id=ends)
