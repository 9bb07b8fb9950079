"""States of earlier prompts, for models whose state cannot be cut: what is read again, equal logits and texts, limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny
from tiny_states import HERE, reads, stateful

import specdec as sd
from specdec.cache import kept_states
from specdec.cache.kept_states import _tensors as tensors
from specdec.models import OwnCache
from specdec.models.own_cache import ONE_BY_ONE

SYSTEM = [(7 * i + 3) % 90 for i in range(40)]
GIB = 2**30
FEW = ["lfm2", "qwen3_next"]
FAMILIES = [pytest.param(f, marks=[] if f in FEW else pytest.mark.slow) for f in HERE if f not in ONE_BY_ONE]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(kept_states, "LEAST", 8)


def asked(model, prompts, taps=()):
    return model.score(model.cache(len(prompts), 80), sd.Context.of(prompts, 80), taps=taps).logits


def close(model, plain, prompts):
    mine, theirs = (asked(m, prompts) for m in (model, plain))
    return (mine - theirs).abs().max() < 3e-5 * theirs.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_go_on_from_earlier_ones(family):
    user = stateful(family)
    model, plain = (OwnCache(user, prefix_cache=limit) for limit in (GIB, None))
    for prompts in (
        [SYSTEM],
        [[*SYSTEM, 1, 2, 3], [*SYSTEM[:30], 5, 6]],
        [[*SYSTEM[:30], 7], [4] * 20, SYSTEM],
    ):
        assert close(model, plain, prompts)
    assert model.prefixes.found == 40 + 30 + 40


def test_what_is_read(monkeypatch):
    model, plain = (OwnCache(stateful("lfm2"), prefix_cache=limit) for limit in (GIB, None))
    counts = reads(monkeypatch)
    for prompt, expected in [
        (SYSTEM, [40]),
        ([*SYSTEM, 1, 2, 3], [3]),  # the next turn
        ([*SYSTEM[:30], 5, 6], [30, 2]),  # parts from the others, and leaves a state there
        ([*SYSTEM[:30], 7, 8, 9], [3]),  # goes on from it
        ([*SYSTEM[:36], 7], [7]),  # too few tokens to leave a state once more
        ([4] * 20, [20]),
        ([*SYSTEM, 1, 2, 3], []),  # the logits after it are known
    ]:
        counts.clear()
        asked(model, [prompt])
        assert counts == expected, prompt
    assert model.prefixes.found == 40 + 30 + 30 + 43
    counts.clear()
    equal = [[6] * 20] * 3
    assert close(model, plain, equal)
    assert counts == [20, 20]  # once by each model


def test_scores_and_requests_say_what_was_found():
    model, plain = (OwnCache(stateful("lfm2"), prefix_cache=limit) for limit in (GIB, None))

    def found(model, *prompts):
        return model.score(model.cache(len(prompts), 80), sd.Context.of([*prompts], 80)).found

    assert found(plain, SYSTEM) == ()
    assert found(model, SYSTEM, SYSTEM) == (0, 0)
    assert found(model, [*SYSTEM, 1], [*SYSTEM, 1], [4] * 20) == (40, 40, 0)
    requests = [sd.Request(prompt, 2) for prompt in ([*SYSTEM, 1, 2], [4] * 30, [9, 8])]
    served = sd.decoder(model).build().serve(requests, limit=3, clock="rounds")
    assert {one.index: one.cached for one in served} == {0: 41, 1: 20, 2: 0}


def test_a_conversation_under_a_draft():
    """Four turns, each with all that came before, of a hybrid target with a hybrid draft, under a pool, and in a stream."""
    user, small = stateful("lfm2"), stateful("qwen3_next")
    texts = []
    for limit in (GIB, None):
        model, draft = (OwnCache(m, prefix_cache=limit) for m in (user, small))
        decoder = sd.decoder(model).draft(sd.drafts.Model(draft), length=3).greedy().build()
        text = list(SYSTEM)
        for _ in range(4):
            text += [*decoder.generate([text], max_new_tokens=12).ids[0], 11, 12]
        served = decoder.serve([sd.Request([*SYSTEM, n], 9) for n in range(4)], limit=2, seed=3)
        texts.append((text, [one.ids for one in sorted(served, key=lambda one: one.index)]))
        if limit:
            assert model.prefixes.found >= 3 * len(SYSTEM)
            assert draft.prefixes.found >= 3 * (len(SYSTEM) - 1)
    assert texts[0] == texts[1]


def test_activations_are_read_from_the_beginning():
    user = stateful("lfm2")
    model = OwnCache(user, prefix_cache=GIB)
    asked(model, [SYSTEM])
    context = sd.Context.of([[*SYSTEM, 1]], 80)
    fed = model.score(model.cache(1, 80), context, taps=(1,)).fed
    assert fed.position.tolist() == list(range(41))
    assert model.prefixes.found == 0
    assert len(model.prefixes._held) == 1


def test_the_limit_and_what_is_dropped():
    model = OwnCache(stateful("lfm2"), prefix_cache=GIB)
    asked(model, [SYSTEM])
    one = model.prefixes.bytes
    assert one > 0
    model = OwnCache(stateful("lfm2"), prefix_cache=3 * one)
    for n in range(6):
        asked(model, [[n] * 40])
        assert 0 < model.prefixes.bytes <= 3 * one
    model.prefixes.found = 0
    asked(model, [[0] * 40 + [1]])
    assert model.prefixes.found == 0
    asked(model, [[5] * 40 + [1]])
    assert model.prefixes.found == 40
    small = OwnCache(stateful("lfm2"), prefix_cache=one // 2)
    asked(small, [SYSTEM])
    assert small.prefixes.bytes == 0


def test_what_was_used_last_stays():
    one = OwnCache(stateful("lfm2"), prefix_cache=GIB)
    asked(one, [SYSTEM])
    model = OwnCache(stateful("lfm2"), prefix_cache=3 * one.prefixes.bytes)
    for prompt in ([1] * 40, [2] * 40, [3] * 40):
        asked(model, [prompt])
    asked(model, [[1] * 40])  # used again
    asked(model, [[4] * 40])  # the twos leave
    model.prefixes.found = 0
    for n, found in [(1, 40), (2, 40)]:
        asked(model, [[n] * 40])
        assert model.prefixes.found == found
    small = OwnCache(stateful("lfm2"), prefix_cache=one.prefixes.bytes * 3 // 2)
    for prompt in ([1] * 40, [5] * 79, [1] * 40):  # the second is too long to stay, and leaves the first
        asked(small, [prompt])
    assert small.prefixes.found == 40


@pytest.mark.parametrize("family", ["gemma3n_text", "llama4_text"])
def test_bytes_are_those_that_are_held(family):
    """Layers with windows keep views of longer texts."""
    model = OwnCache(stateful(family), prefix_cache=GIB)
    asked(model, [SYSTEM, [4] * 30])
    kept = [entry.state for entry in model.prefixes._held.values()]
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for s in kept for t in tensors(s, set())
    }
    tokens = sum(len(state.tokens) for state in kept)
    assert sum(held.values()) <= model.prefixes.bytes - 3 * 8 * tokens


def test_weights_that_change_between_a_cache_and_its_prompt():
    """And change back: what was computed in between is not kept as of the first ones."""
    user = stateful("lfm2")
    model = OwnCache(user, prefix_cache=GIB)
    weight = user.get_input_embeddings().weight
    first = weight.detach().clone()
    cache = model.cache(1, 80)
    weight.data.copy_(first * 2)
    model.score(cache, sd.Context.of([SYSTEM], 80))
    weight.data.copy_(first)
    assert close(model, OwnCache(stateful("lfm2")), [[*SYSTEM, 1, 2]])


def test_without_memory_for_a_copy_prompts_are_read(monkeypatch):
    model, plain = (OwnCache(stateful("lfm2"), prefix_cache=limit) for limit in (GIB, None))
    asked(model, [SYSTEM])
    wanted = asked(plain, [[*SYSTEM, 1]])

    def full(self):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kept_states.State, "copy", full)
    assert torch.allclose(asked(model, [[*SYSTEM, 1]]), wanted, atol=1e-5)
    assert model.prefixes.bytes == 0


def test_changed_weights_are_noticed():
    user = stateful("lfm2")
    model = OwnCache(user, prefix_cache=GIB)
    asked(model, [SYSTEM])
    with torch.no_grad():
        user.get_input_embeddings().weight[SYSTEM[3]] += 1
    assert close(model, OwnCache(user), [[*SYSTEM, 1]])
    assert model.prefixes.found == 0


def test_kept_states_are_never_written_to():
    """What goes on from a state works on a copy: the same continuation twice, and others in between."""
    model = OwnCache(stateful("qwen3_next"), prefix_cache=GIB)
    asked(model, [SYSTEM])
    first = asked(model, [[*SYSTEM, 1, 2]])
    asked(model, [[*SYSTEM, 9, 9, 9]])
    model.prefixes._held.pop(np.array([*SYSTEM, 1, 2]).tobytes())
    assert torch.equal(asked(model, [[*SYSTEM, 1, 2]]), first)


def test_families_that_read_one_by_one_refuse_it():
    with pytest.raises(ValueError, match=r"prefix_cache is set and mamba reads .*leave it out"):
        OwnCache(stateful("mamba"), prefix_cache=GIB)
    with pytest.raises(ValueError, match=r"prefix_cache is 0: give a number of bytes, such as 2\*\*30"):
        OwnCache(stateful("lfm2"), prefix_cache=0)


def test_decoders_take_it_by_name(tmp_path):
    stateful("lfm2").save_pretrained(tmp_path / "hybrid")
    tiny("llama").save_pretrained(tmp_path / "llama")
    for name in ("hybrid", "llama"):
        decoder = sd.decoder(str(tmp_path / name), prefix_cache=GIB)
        decoder.save(tmp_path / f"saved {name}")
        assert sd.load(tmp_path / f"saved {name}").build().target.prefixes.limit == GIB


def test_answers_are_kept(monkeypatch):
    """The next turn of a conversation goes on from the end of the answer."""
    model, plain = (OwnCache(stateful("qwen3_next"), prefix_cache=limit) for limit in (GIB, None))
    draft = sd.drafts.NGram()
    ours, theirs = (sd.decoder(m).draft(draft, 3).verifier(sd.Coupled()).build() for m in (model, plain))
    texts = [[*SYSTEM, n] for n in range(2)]
    for turn in range(3):
        ids = ours.generate(texts, [5, 8], seed=turn).ids
        assert ids == theirs.generate(texts, [5, 8], seed=turn).ids
        texts = [[*text, *answer, 5, 6] for text, answer in zip(texts, ids)]
        counts = reads(monkeypatch)
        assert close(model, plain, texts)
        assert counts[:2] == [3, 3]  # the answer's last token, and what the user added
        monkeypatch.undo()
        monkeypatch.setattr(kept_states, "LEAST", 8)


def test_nothing_of_a_text_is_kept_after_a_clear():
    model, rounds = OwnCache(stateful("lfm2"), prefix_cache=GIB), []

    def clear(round):
        rounds.append(round)
        if len(rounds) == 4:
            model.prefixes.clear()

    decoder = sd.decoder(model).build()
    decoder.generate([SYSTEM], 12, on_round=clear)
    assert model.prefixes.bytes == 0
    decoder.generate([SYSTEM], 12)
    assert [len(entry.tokens) for entry in model.prefixes._held.values()] == [40, 51]


def test_answers_of_changed_weights_are_not_kept():
    user = stateful("lfm2")
    model, rounds = OwnCache(user, prefix_cache=GIB), []

    def change(round):
        rounds.append(round)
        if len(rounds) == 4:
            with torch.no_grad():
                user.get_input_embeddings().weight[3] += 1
            asked(model, [SYSTEM])

    sd.decoder(model).build().generate([SYSTEM], 12, on_round=change)
    assert [len(entry.tokens) for entry in model.prefixes._held.values()] == [40]
