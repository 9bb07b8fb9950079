"""Prompts that begin like earlier ones: copied keys and values, equal texts, limits, and what must not be lent."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from test_shared_prompts import fed
from tiny import tiny

import specdec as sd
from specdec.cache import prefixes
from specdec.executors import Ahead, Optimistic, Pipelined, Serial
from specdec.models.stacked import StackedModel

SYSTEM = [(7 * i + 3) % 90 for i in range(40)]
GIB = 2**30


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(prefixes, "SIZE", 8)


def asked(model, prompts, taps=()):
    """Scores of prompts in a new cache."""
    context = sd.Context.of(prompts, 80)
    return model.score(model.cache(len(prompts), 80), context, taps=taps)


@pytest.mark.parametrize("page", [None, 4, 16])
@pytest.mark.parametrize("graphs", [False, "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_second_prompt_is_fed_where_it_differs(monkeypatch, family, graphs, page):
    model, plain = (
        sd.HFModel(tiny(family), graphs=graphs, page=page, prefix_cache=limit) for limit in (GIB, None)
    )
    first, second = [[*SYSTEM, 1, 2, 3], [9] * 12], [[*SYSTEM, 5], [9] * 30, SYSTEM]
    counts = fed(monkeypatch)
    asked(model, first)
    asked(model, second)
    # five blocks of the system prompt, one of nines; the last token of a prompt is always fed
    assert counts == [43 + 12, 1 + (30 - 8) + (40 - 32)]
    mine, theirs = asked(model, second).logits, asked(plain, second).logits
    assert torch.allclose(mine, theirs, atol=1e-9)
    assert (model.prefixes.found, model.prefixes.asked) == (40 + 8 + 32 + 40 + 24 + 32, 55 + 2 * 111)


@pytest.mark.parametrize("taps", [(), (0, 2)])
def test_scores_and_requests_say_what_was_found(taps):
    model, plain = (sd.HFModel(tiny("llama"), prefix_cache=limit) for limit in (GIB, None))
    assert asked(plain, [SYSTEM], taps).found == ()
    assert asked(model, [SYSTEM] * 2, taps).found == (0, 0)  # the second row copies the first one's
    prompts = [[*SYSTEM, 5], [*SYSTEM, 5], SYSTEM, [4] * 20]
    assert asked(model, prompts, taps).found == (40, 40, 32, 0)
    requests = [sd.Request(prompt, 2) for prompt in (*prompts, [4] * 30)]
    served = sd.decoder(model).build().serve(requests, limit=2, clock="rounds")
    assert [one.cached for one in sorted(served, key=lambda one: one.index)] == [40, 40, 32, 16, 16]
    with torch.no_grad():
        next(model.model.parameters()).mul_(1.5)
    assert asked(model, prompts, taps).found == (0, 0, 0, 0)
    cache = model.cache(1, 80)
    with torch.no_grad():
        next(model.model.parameters()).mul_(1.5)
    assert model.score(cache, sd.Context.of([prompts[0]], 80), taps=taps).found == (0,)


def test_what_follows_continues_the_copied_beginning():
    """A conversation of four turns, each asked with all that came before, under a draft with a cache of its own."""
    model, plain = (sd.HFModel(tiny("llama"), prefix_cache=limit) for limit in (GIB, None))
    draft = sd.HFModel(tiny("llama", seed=1), prefix_cache=GIB)
    ours, theirs = (sd.decoder(m).draft(draft, length=3).build() for m in (model, plain))
    text = list(SYSTEM)
    for turn in range(4):
        one, other = (d.generate([text], max_new_tokens=20, seed=turn).ids[0] for d in (ours, theirs))
        assert one == other
        text += [*one, 11, 12]
    prompts = [len(SYSTEM) + 22 * turn for turn in range(3)]
    assert model.prefixes.found == sum(
        (n + 19) // 8 * 8 for n in prompts
    )  # answers without their last tokens
    assert draft.prefixes.found > 2 * sum(
        n // 8 * 8 for n in prompts
    )  # both decoders use it; it keeps prompts


def test_activations_of_copied_tokens_are_returned():
    model, plain = (sd.HFModel(tiny("llama"), prefix_cache=limit) for limit in (GIB, None))
    asked(model, [SYSTEM])  # without activations: of no use to the next call
    asked(model, [SYSTEM, [4] * 20], taps=(0, 2))
    assert model.prefixes.found == 0
    prompts = [[4] * 30, [*SYSTEM, 1], [6] * 10]
    for taps in ((2,), (0, 2)):
        mine, theirs = (asked(m, prompts, taps) for m in (model, plain))
        assert torch.allclose(mine.logits, theirs.logits, atol=1e-9)
        for name in ("row", "position", "node"):
            assert torch.equal(getattr(mine.fed, name), getattr(theirs.fed, name))
        for tap in taps:
            assert torch.allclose(mine.fed.layers[tap], theirs.fed.layers[tap], atol=1e-9)
    assert model.prefixes.found == 2 * (16 + 40)  # the third block of fours was kept without layer 0
    asked(model, prompts, taps=(0, 2))
    assert model.prefixes.found == 112 + 24 + 40 + 8
    asked(model, prompts, taps=(0, 1, 2))
    assert model.prefixes.found == 184  # layer 1 was never kept


def test_drafts_that_read_activations():
    from specdec.drafts.spire import SpireModel

    target = tiny("llama")
    spire = SpireModel.from_target(target, layers=1, window=8)
    texts = []
    for limit in (GIB, None):
        model = sd.HFModel(target, prefix_cache=limit)
        decoder = sd.decoder(model).draft(sd.drafts.Spire(spire), length=3).build()
        texts.append(
            [decoder.generate([[*SYSTEM, n], [n] * 20], max_new_tokens=12, seed=n).ids for n in range(3)]
        )
        if limit:
            assert model.prefixes.found == 2 * 40
    assert texts[0] == texts[1]


@pytest.mark.parametrize("page", [None, 8])
def test_requests_that_join_a_stream(page):
    prompts = [[*SYSTEM, n] for n in range(6)]
    texts = []
    for limit in (GIB, None):
        model = sd.HFModel(tiny("llama"), page=page, prefix_cache=limit)
        server = sd.decoder(model).draft(sd.HFModel(tiny("llama", seed=1)), length=3).build()
        done = list(server.serve([sd.Request(p, 9) for p in prompts], limit=2, seed=3))
        texts.append([one.ids for one in sorted(done, key=lambda one: one.index)])
        if limit:
            assert model.prefixes.found >= 40 * 4
    assert texts[0] == texts[1]


@pytest.mark.parametrize("page", [None, 4, 16])
def test_a_batch_that_begins_alike_is_kept_with_all_its_ends(monkeypatch, page):
    """Rows that share pages of one of them, and are then lent more; equal ones, and one that begins otherwise."""
    monkeypatch.setattr("specdec.models.shared_prompts.LEAST", 16)
    model, plain = (sd.HFModel(tiny("llama"), page=page, prefix_cache=limit) for limit in (GIB, None))
    prompts = [[*SYSTEM, *[n] * 10] for n in range(3)]
    asked(model, prompts)
    counts = fed(monkeypatch)
    again = [*prompts[::-1], [4] * 30, prompts[0]]
    cache, context = model.cache(5, 80), sd.Context.of(again, 80)
    mine = model.score(cache, context).logits
    # the root without its last token; an ending that two rows have; the last token of each, what follows the last block of row 1, and row 3
    assert counts == [1, 9, 1 + 2 + 1 + 30 + 1]
    assert torch.allclose(mine, asked(plain, again).logits, atol=1e-9)
    assert [cache.row(b) for b in range(5)] == again
    if page:
        pool = cache.pool
        del cache
        assert len(pool.free) == pool.pages
        assert not any(pool.holders)


def test_the_memory_has_a_limit_and_forgets_what_was_used_first(monkeypatch):
    block = 8 * sd.HFModel(tiny("llama")).bytes_per_token()
    model = sd.HFModel(tiny("llama"), prefix_cache=6 * block + 1)
    counts = fed(monkeypatch)
    for prompt, read in [
        (SYSTEM, 40),
        ([5] * 17, 17),  # the last block of SYSTEM leaves
        (SYSTEM, 8),  # four of five; now the last block of the fives leaves
        ([5] * 17, 9),
        (list(range(60)), 60),  # longer than the limit: six blocks of it stay
        (list(range(60)), 12),
        (SYSTEM, 40),
    ]:
        counts.clear()
        asked(model, [prompt])
        assert counts == [read], prompt
        assert model.prefixes.bytes <= 6 * block
        assert model.prefixes.bytes == sum(b.bytes for b in model.prefixes._held.values())
    model.prefixes.clear()
    asked(model, [SYSTEM])
    assert counts[-1] == 40


def test_no_block_outlives_its_beginning():
    """Of every text, what is kept is a beginning: whatever leaves, no block stays that cannot be found."""
    block = 8 * sd.HFModel(tiny("llama")).bytes_per_token()
    model = sd.HFModel(tiny("llama"), prefix_cache=7 * block)
    torch.manual_seed(0)
    for _ in range(40):
        ends = torch.randint(0, 3, (2, 3)).repeat_interleave(8, 1).tolist()
        asked(model, [[*SYSTEM[:16], *end, 1] for end in ends])
        numbers = {0, *(b.number for b in model.prefixes._held.values())}
        assert all(before in numbers for before, _ in model.prefixes._held)


@pytest.mark.parametrize("through", ["add_", "data", "load_state_dict"])
def test_changed_weights_are_noticed(through):
    user = tiny("llama")
    model = sd.HFModel(user, prefix_cache=GIB)
    asked(model, [SYSTEM])
    with torch.no_grad():
        weight = user.model.layers[0].mlp.up_proj.weight
        if through == "add_":
            weight.add_(0.1)
        elif through == "data":
            weight.data += 0.1
        else:
            user.load_state_dict({name: value * 1.1 for name, value in user.state_dict().items()})
    mine, theirs = (asked(m, [[*SYSTEM, 1]]).logits for m in (model, sd.HFModel(user)))
    assert torch.allclose(mine, theirs, atol=1e-9)
    assert model.prefixes.found == 0


@pytest.mark.parametrize(
    "options", [{}, {"kv_dtype": torch.float8_e4m3fn}, {"attention": "padded"}, {"attention": "decomposed"}]
)
def test_other_storages(options):
    model, plain = (sd.HFModel(tiny("llama"), prefix_cache=limit, **options) for limit in (GIB, None))
    asked(model, [SYSTEM])
    mine, theirs = (asked(m, [[*SYSTEM, 1, 2]]).logits for m in (model, plain))
    assert torch.allclose(mine, theirs, atol=1e-9)
    assert model.prefixes.found == 40


def test_the_same_bits_where_they_are_promised():
    user = tiny(
        "llama", hidden_size=64, intermediate_size=96, vocab_size=96, num_attention_heads=4, head_dim=16
    ).to(torch.float32)
    model, plain = (sd.HFModel(user, prefix_cache=limit, invariant=True) for limit in (GIB, None))
    asked(model, [SYSTEM])
    prompts = [[*SYSTEM, 1, 2], [3] * 9]
    assert torch.equal(asked(model, prompts).logits, asked(plain, prompts).logits)
    assert model.prefixes.found == 40


def test_models_that_show_something_else_do_not_borrow():
    """A mask over the same model, and members of a stack, compute other keys and values of the same tokens."""
    model = sd.HFModel(tiny("llama"), prefix_cache=GIB)
    asked(model, [SYSTEM])
    masked = sd.models.Windowed(model, window=4)
    dense = sd.models.Masked(model, sd.masks.Causal() & sd.masks.Window(4), storage="dense")
    for other in (masked, dense):
        asked(other, [SYSTEM])
        asked(other, [[5] * 40])
    assert (model.prefixes.found, model.prefixes.asked) == (0, 40)
    mine, theirs = (asked(m, [[5] * 40]).logits for m in (model, sd.HFModel(tiny("llama"))))
    assert torch.allclose(mine, theirs, atol=1e-9)
    stack = StackedModel([sd.HFModel(tiny("llama", seed=n)) for n in range(2)])
    assert stack.prefixes is None


def test_copies_begin_empty():
    model = sd.HFModel(tiny("llama"), prefix_cache=GIB)
    asked(model, [SYSTEM])
    assert "0 of 40 prompt tokens found" in repr(model.prefixes)
    for other in (copy.deepcopy(model).prefixes, pickle.loads(pickle.dumps(model.prefixes))):
        assert (other.bytes, other.limit) == (0, GIB)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_wrong_limits_are_refused(value, error):
    with pytest.raises(error, match=r"prefix_cache is .*2\*\*30"):
        sd.HFModel(tiny("llama"), prefix_cache=value)


def test_decoders_take_it_by_name_and_keep_it(tmp_path):
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    decoder = sd.decoder(str(folder), prefix_cache=GIB)
    decoder.save(tmp_path / "decoder")
    again = sd.load(tmp_path / "decoder").build()
    for one in (decoder.build(), again):
        prefixes = one.target.prefixes
        assert prefixes.limit == GIB
        for n in (1, 2):
            one.generate([SYSTEM], max_new_tokens=n)
        assert prefixes.found == 32


def test_blocks_of_different_sizes_near_the_limit():
    """With and without activations, in any order: the limit holds, no block stays that cannot be found, and logits and activations are right."""
    block = 8 * sd.HFModel(tiny("llama")).bytes_per_token()
    model, plain = sd.HFModel(tiny("llama"), prefix_cache=7 * block), sd.HFModel(tiny("llama"))
    torch.manual_seed(0)
    for n in range(60):
        ends = torch.randint(0, 2, (2, 5)).repeat_interleave(8, 1).tolist()
        prompts = [[*SYSTEM[:8], *end[: int(torch.randint(8, 41, ()))], 1] for end in ends]
        taps = [(), (), (2,), (0, 1, 2)][n % 4]
        mine, theirs = (asked(m, prompts, taps) for m in (model, plain))
        assert torch.allclose(mine.logits, theirs.logits, atol=1e-9)
        for tap in taps:
            assert torch.allclose(mine.fed.layers[tap], theirs.fed.layers[tap], atol=1e-9)
        kept = model.prefixes._held
        assert model.prefixes.bytes == sum(b.bytes for b in kept.values()) <= model.prefixes.limit
        assert {before for before, _ in kept} <= {0, *(b.number for b in kept.values())}
    assert model.prefixes.found > 500


def test_a_prompt_that_does_not_fit_is_refused_as_before():
    model = sd.HFModel(tiny("llama"), prefix_cache=GIB)
    asked(model, [SYSTEM])
    with pytest.raises(ValueError, match="needs 40 slots"):
        model.score(model.cache(1, 20), sd.Context.of([SYSTEM]))
    with pytest.raises(ValueError, match="select the same rows of both"):
        model.score(model.cache(2, 80), sd.Context.of([SYSTEM]))


@pytest.mark.parametrize("taps", [(), (2,)])
def test_rows_of_a_call_that_fails_are_empty_again(monkeypatch, taps):
    model, plain = (sd.HFModel(tiny("llama"), prefix_cache=limit) for limit in (GIB, None))
    asked(model, [SYSTEM], taps)
    context, cache = sd.Context.of([[*SYSTEM, 1]], 80), model.cache(1, 80)
    with monkeypatch.context() as patch:
        patch.setattr(sd.HFModel, "_run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.score(cache, context, taps=taps)
    assert cache.row(0) == []
    mine, theirs = model.score(cache, context, taps=(2,)), asked(plain, [[*SYSTEM, 1]], (2,))
    assert torch.allclose(mine.logits, theirs.logits, atol=1e-9)
    assert torch.allclose(mine.fed.layers[2], theirs.fed.layers[2], atol=1e-9)


def test_where_there_is_no_memory_nothing_is_kept(monkeypatch):
    model, plain = (sd.HFModel(tiny("llama"), prefix_cache=limit) for limit in (GIB, None))
    asked(model, [SYSTEM])

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prefixes.PrefixCache, "_made", full)
    assert torch.allclose(asked(model, [[3] * 30]).logits, asked(plain, [[3] * 30]).logits, atol=1e-9)
    assert model.prefixes.bytes == 0


def test_copies_of_weights_that_are_not_read_yet_leave_nothing():
    """A cache uses the weights of when it was made, where the model reads copies of them; what it computes is not kept as of the new ones."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 96,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    user = tiny("llama", **sizes).to(torch.bfloat16).to(torch.float32)
    model = sd.HFModel(user, prefix_cache=GIB, bf16_weights=True)
    context = sd.Context.of([SYSTEM], 80)
    cache = model.cache(1, 80)
    with torch.no_grad():
        for weight in user.parameters():
            weight.mul_(2)
    model.score(cache, context)
    assert model.prefixes.bytes == 0
    fresh = sd.HFModel(user, bf16_weights=True)
    for _ in range(2):
        assert torch.allclose(asked(model, [SYSTEM]).logits, asked(fresh, [SYSTEM]).logits, atol=1e-4)
    assert model.prefixes.found == 32


def test_one_changed_row_of_a_weight_is_noticed():
    user = tiny("llama")
    model = sd.HFModel(user, prefix_cache=GIB)
    asked(model, [SYSTEM])
    with torch.no_grad():
        user.get_input_embeddings().weight[SYSTEM[3]] += 1
    assert torch.allclose(asked(model, [SYSTEM]).logits, asked(sd.HFModel(user), [SYSTEM]).logits, atol=1e-9)


def test_a_changed_buffer_is_noticed():
    """The bias by which DeepSeek chooses experts is a buffer."""
    user = tiny("deepseek_v3", num_hidden_layers=4)
    model = sd.HFModel(user, prefix_cache=GIB)
    asked(model, [SYSTEM])
    for name, buffer in user.named_buffers():
        if "correction_bias" in name:
            buffer += torch.randn_like(buffer)
    mine, theirs = (asked(m, [[*SYSTEM, 1]]).logits for m in (model, sd.HFModel(user)))
    assert torch.allclose(mine, theirs, atol=1e-5)
    assert model.prefixes.found == 0


def test_several_threads():
    model, plain = (sd.HFModel(tiny("llama"), prefix_cache=limit, graphs=False) for limit in (GIB, None))
    prompts = [[*SYSTEM, *[n] * (n + 1)] for n in range(24)]
    wanted = [asked(plain, [p]).logits for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            found = list(pool.map(lambda p: asked(model, [p]).logits, prompts))
            assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(found, wanted))


def test_heads_under_captured_steps():
    from specdec.drafts.heads import Eagle3

    user, texts = tiny("llama"), []
    head = Eagle3.from_target(sd.HFModel(user), taps=(0, 1, 2))
    for limit in (GIB, None):
        target = sd.HFModel(user, graphs="eager", prefix_cache=limit)
        decoder = sd.decoder(target).draft(sd.drafts.Head(head), length=3).build()
        texts.append([decoder.generate([[*SYSTEM, n]], 12, seed=n).ids for n in range(3)])
        if limit:
            assert target.prefixes.found == 80
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))]
)
def test_random_calls_give_plain_samplings_texts(monkeypatch, seed):
    """Several calls on prompts of a few beginnings, with little room: every text is that of a target that keeps nothing and a draft that does not exist."""
    pick = random.Random(seed)
    monkeypatch.setattr("specdec.models.shared_prompts.LEAST", pick.choice([8, 24, 128]))
    user, other = (tiny(pick.choice(["llama", "gpt2", "mistral"]), n) for n in range(2))
    page, graphs = pick.choice([None, None, 4, 16]), pick.choice([False, "eager"])
    block = 8 * sd.HFModel(user).bytes_per_token()
    limits = [pick.choice([3, 9, 1000]) * block for _ in range(2)]
    target = sd.HFModel(user, page=page, graphs=graphs, prefix_cache=limits[0])
    small = sd.HFModel(other, page=page, graphs=graphs, prefix_cache=limits[1])
    draft = pick.choice(
        [small, sd.drafts.Tree(small, (2, 1)), sd.drafts.NGram(), sd.models.Windowed(small, 6, 1)]
    )
    executor = pick.choice([Serial(), Serial(), Pipelined(2)])
    base = sd.decoder(target).verifier(sd.Coupled()).sampling(temperature=pick.choice([0.7, 1.0]))
    decoder = base.draft(draft, length=2).executor(executor).build()
    plain = sd.decoder(sd.HFModel(user)).verifier(sd.Coupled()).sampling(decoder.sampling).build()
    begins = [[pick.randrange(1, 90) for _ in range(pick.randrange(9, 40))] for _ in range(3)]
    for _ in range(4):
        prompts = [
            [*pick.choice(begins)[: pick.randrange(1, 40)], *pick.choices(range(3), k=pick.randrange(1, 9))]
            for _ in range(pick.randrange(1, 5))
        ]
        prompts.append(list(prompts[0]))
        seeds = [pick.randrange(1000) for _ in prompts]
        found = decoder.generate(prompts, 8, seed=seeds, eos_token_id=()).ids
        assert found == plain.generate(prompts, 8, seed=seeds, eos_token_id=()).ids, f"{decoder!r}"
        served = decoder.serve([sd.Request(p, 5, seed=s) for p, s in zip(prompts, seeds)], 2, eos_token_id=())
        texts = [one.ids for one in sorted(served, key=lambda one: one.index)]
        alone = [plain.generate([p], 5, seed=s, eos_token_id=()).ids[0] for p, s in zip(prompts, seeds)]
        assert texts == alone, f"{decoder!r}"
        for model in (target, small):
            kept = model.prefixes._held
            assert model.prefixes.bytes == sum(b.bytes for b in kept.values()) <= model.prefixes.limit
            assert {before for before, _ in kept} <= {0, *(b.number for b in kept.values())}
    if limits[0] > 100 * block:
        assert target.prefixes.found > 0


@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize(
    "executor", [Serial(), Pipelined(2), Optimistic(), Ahead()], ids=lambda e: type(e).__name__
)
def test_answers_are_kept(executor, page):
    """Turns of three conversations at once, whose answers have different lengths: only what the user adds is read, with the answer's last block."""
    graphs = "eager" if isinstance(executor, Ahead) else False
    model, plain = (
        sd.HFModel(tiny("llama"), graphs=graphs, page=page, prefix_cache=limit) for limit in (GIB, None)
    )
    small = sd.HFModel(tiny("llama", seed=1), graphs=graphs, page=None if graphs else page, prefix_cache=GIB)
    other = sd.HFModel(tiny("llama", seed=1))
    ours, theirs = (
        sd.decoder(m).draft(s, 3).verifier(sd.Coupled()).executor(e).build()
        for m, s, e in ((model, small, executor), (plain, other, Serial()))
    )
    plainly = sd.decoder(model).build()
    texts, lengths = [[*SYSTEM, n] for n in range(3)], [9, 20, 14]
    for turn in range(4):
        if turn % 2 and not isinstance(executor, Optimistic):
            requests = [sd.Request(text, n) for text, n in zip(texts, lengths)]
            served = sorted(ours.serve(requests, limit=2, seed=turn), key=lambda one: one.index)
            ids = [one.ids for one in served]
        else:
            ids = ours.generate(texts, lengths, seed=turn).ids
        assert ids == theirs.generate(texts, lengths, seed=turn).ids
        before = model.prefixes.found
        texts = [[*text, *answer, 5] for text, answer in zip(texts, ids)]
        cached = [(len(text) - 2) // 8 * 8 for text in texts]
        requests = [sd.Request(text, 1) for text in texts]
        found = sorted(plainly.serve(requests, clock="rounds", limit=3), key=lambda one: one.index)
        assert [one.cached for one in found] == cached
        assert model.prefixes.found - before == sum(cached)
        if not isinstance(executor, Ahead):  # whose draft's answers are read again
            found = small.score(small.cache(3, 160), sd.Context.of(texts, 160)).found
            assert all(len(text) - 2 - n < 8 + 3 for text, n in zip(texts, found)), found


def reader(kind, model):
    """A draft that reads activations, and how many tokens it drafts."""
    from specdec.drafts.heads import DynamicTree, Eagle3
    from specdec.drafts.spire import SpireModel

    if kind == "spire":
        return sd.drafts.Spire(SpireModel.from_target(model.model, layers=1, window=8))
    head = Eagle3.from_target(model, taps=(0, 1, 2))
    return sd.drafts.Head(head, DynamicTree(6, 2)) if kind == "tree" else sd.drafts.Head(head)


@pytest.mark.parametrize(
    ("kind", "page", "executor"),
    [
        ("head", None, Serial()),
        ("head", None, Pipelined(2)),
        ("head", 4, Optimistic()),
        ("tree", None, Serial()),
        ("tree", 4, Pipelined(2)),
        ("spire", 4, Serial()),
        ("spire", None, Pipelined(2)),
    ],
    ids=lambda e: str(e) if e is None or isinstance(e, str | int) else type(e).__name__,
)
def test_answers_are_kept_with_what_a_draft_reads(executor, kind, page):
    """Also of streams and of equal prompts; the activations of each block are those of a call that reads the whole text."""
    model, plain = (sd.HFModel(tiny("llama"), page=page, prefix_cache=limit) for limit in (GIB, None))
    ours, theirs = (
        sd.decoder(m).draft(reader(kind, m), length=3).verifier(sd.Coupled()).executor(e).build()
        for m, e in ((model, executor), (plain, Serial()))
    )
    taps = ours.draft.info.taps
    texts, lengths = [[*SYSTEM, n // 2] for n in range(4)], [9, 20, 14, 7]
    for turn in range(3):
        asked = model.prefixes.asked, model.prefixes.found
        if turn == 1 and not isinstance(executor, Optimistic):
            requests = [sd.Request(text, n) for text, n in zip(texts, lengths)]
            served = sorted(ours.serve(requests, limit=2, seed=turn), key=lambda one: one.index)
            ids = [one.ids for one in served]
        else:
            ids = ours.generate(texts, lengths, seed=turn).ids
        assert ids == theirs.generate(texts, lengths, seed=turn).ids
        if turn:  # all but the end of an answer, and what the user adds
            lacking = (model.prefixes.asked - asked[0]) - (model.prefixes.found - asked[1])
            assert lacking <= sum(8 + 3 for _ in texts)
        texts = [[*text, *answer, 5] for text, answer in zip(texts, ids)]
    for text in texts:
        words = np.array(text)
        blocks = model.prefixes._find(words[: len(text) - 2], taps)
        assert len(blocks) == (len(text) - 2) // 8
        scores = plain.score(plain.cache(1, 160), sd.Context.of([text], 160), taps=taps)
        for i, block in enumerate(blocks):
            assert block.seen.keys() == set(taps)
            for tap, x in block.seen.items():
                torch.testing.assert_close(x, scores.fed.layers[tap][8 * i : 8 * i + 8])


def test_whole_rounds_keep_prompts_for_drafts_that_read_activations():
    model = sd.HFModel(tiny("llama"), graphs="eager", prefix_cache=GIB)
    head = sd.drafts.Head(reader("head", model).model, graphs="eager")
    decoder = sd.decoder(model).draft(head, length=3).executor(Ahead()).build()
    out = decoder.generate([SYSTEM], 20)
    assert len(model.prefixes._held) == 5
    decoder.generate([SYSTEM + out.ids[0]], 1)
    assert model.prefixes.found == 40


def test_an_answer_whose_prompt_was_dropped_is_not_kept():
    """Its prompt's activations are not known any more when it ends."""
    model = sd.HFModel(tiny("llama"), prefix_cache=GIB)
    decoder = sd.decoder(model).draft(reader("head", model), length=3).build()
    dropped = []

    def drop(chunk):
        if not dropped:
            dropped.append(len(model.prefixes._held))
            model.prefixes._held.popitem(last=False)  # the last block of the prompt

    request = sd.Request(SYSTEM, 20, on_chunk=drop)
    (served,) = decoder.serve([request])
    assert dropped == [5]
    text = np.array([*SYSTEM, *served.ids])
    assert len(model.prefixes._find(text, ())) == 4
    model.prefixes.clear()
    out = decoder.generate([SYSTEM], 20)
    assert len(model.prefixes._find(np.array([*SYSTEM, *out.ids[0][:-1]]), decoder.draft.info.taps)) == 7


def recorded(prompts, n, length=2):
    """Rounds of a draft that reads activations."""
    decoder = sd.decoder(sd.HFModel(tiny("llama"))).build()
    decoder, rounds = (
        sd.decoder(decoder.target).draft(reader("head", decoder.target), length=length).build(),
        [],
    )
    decoder.generate(prompts, n, on_round=rounds.append)
    return rounds


def test_what_is_noted_of_rows():
    """Positions that follow are added, those that are fed again take the place of the old ones, and what follows a gap stands alone."""
    from specdec.cache.noted import noted

    rounds = recorded([SYSTEM[:5], SYSTEM[:7]], 6)
    known = noted([None, None], rounds[0], [0, 4])
    assert [(one.first, one.end) for one in known] == [(0, 5), (4, 7)]
    after = noted(known, rounds[1], [0, 4])
    ends = (rounds[1].context.length + rounds[1].verdict.accepted).tolist()
    assert [(one.first, one.end) for one in after] == [(0, ends[0]), (4, ends[1])]
    skipped = noted(known, rounds[2], [0, 4])
    assert [one.first for one in skipped] == [n - 1 for n in rounds[2].context.length.tolist()]
    again = noted(after, rounds[0], [0, 4])
    for one, same in zip(again, noted([None, None], rounds[0], [0, 0])):
        assert (one.first, one.end) == (same.first, same.end)
    back = noted(after, rounds[1], [0, 4])
    for one, same in zip(back, after):
        assert (one.first, one.end) == (same.first, same.end)
        for tap, x in one.layers.items():
            assert torch.equal(x, same.layers[tap])
    fed = rounds[2].scores.fed
    hole = sd.types.Fed(fed.layers, fed.row, fed.position * 2, fed.node)
    scores = dataclasses.replace(rounds[2].scores, fed=hole)
    assert (rounds[2].verdict.accepted > 0).any()
    found = noted([None, None], dataclasses.replace(rounds[2], scores=scores), [0, 0])
    assert [one is None for one in found] == (rounds[2].verdict.accepted > 0).tolist()


def test_a_row_keeps_the_memory_of_its_own_activations():
    """And of the last rounds, whose tensors are those of all rows."""
    from specdec.cache.noted import ROUNDS, noted

    rounds, known = recorded([[n, *SYSTEM[:5]] for n in range(16)], 60), [None] * 16
    for round in rounds:
        if round.context.batch < 16:
            break
        known = noted(known, round, [0] * 16)
    one = known[0]
    assert len(one.recent) < ROUNDS
    held = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for part in one.own
        for x in part.values()
    }
    assert sum(held.values()) <= one.bytes
    assert one.bytes == sum(x.nbytes for x in one.layers.values())
    assert len(one.own) <= 4
    assert copy.deepcopy(one).layers.keys() == one.layers.keys()


def test_what_is_noted_for_long_keeps_its_order():
    """Positions whose activations are their own numbers, one a round."""
    from specdec.cache.noted import ROUNDS, Noted

    one = Noted(5, 5, (), ())
    for n in range(5, 505):
        one = one.grown({0: torch.tensor([[float(n)]])})
    assert (one.first, one.end) == (5, 505)
    assert one.layers[0][:, 0].tolist() == list(range(5, 505))
    assert len(one.own) < 8
    assert len(one.recent) < ROUNDS
    assert one.until(300).layers[0][:, 0].tolist() == list(range(5, 300))


def test_notes_keep_to_the_limit_and_to_the_memory(monkeypatch):
    prompt, out, held, plain = [SYSTEM], {}, [], prefixes.noted

    def watched(before, *args):
        held.append([one.bytes if one else 0 for one in before])
        return plain(before, *args)

    monkeypatch.setattr(prefixes, "noted", watched)
    for limit in (GIB, 30_000):
        model = sd.HFModel(tiny("llama"), prefix_cache=limit)
        decoder = sd.decoder(model).draft(reader("head", model), length=3).build()
        out[limit] = decoder.generate(prompt, 60).ids
        assert model.prefixes.bytes <= limit
        assert (max(map(sum, held)) > 30_000) == (limit == GIB)
        held.clear()
    decoder.generate([SYSTEM, SYSTEM[:9]], 30)  # one text is given up, and not the other
    assert any(0 in sizes and max(sizes) > 15_000 for sizes in held)
    assert max(map(sum, held)) <= 30_000
    model = sd.HFModel(tiny("llama"), prefix_cache=GIB)
    decoder = sd.decoder(model).draft(reader("head", model), length=3).build()
    calls = []

    def fails(*args):
        calls.append(1)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(prefixes, "noted", fails)
    assert decoder.generate(prompt, 60).ids == out[GIB] == out[30_000]
    assert len(calls) == 1  # the row is given up
    assert len(model.prefixes._held) == 5


def test_a_text_that_was_taken_back_is_kept_as_it_is():
    """An executor that takes back committed tokens and goes on otherwise."""
    model = sd.HFModel(tiny("llama"), prefix_cache=GIB)
    decoder = sd.decoder(model).draft(reader("head", model), length=3).build()
    taps, cache = decoder.draft.info.taps, model.cache(1, 160)

    def read(text):
        context = sd.Context.of([text], 160)
        scores = model.score(cache, context, taps=taps)
        none = torch.zeros(1, dtype=torch.long)
        verdict = sd.types.Verdict(
            torch.zeros(1, 0, dtype=torch.long), none, none, torch.zeros(1, 1, dtype=torch.long)
        )
        round = sd.types.Round.of(
            context, sd.Proposal.none(1), scores, verdict, none + 1, none, torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool), None,
        )  # fmt: skip
        model.note(cache, round)

    other = [*SYSTEM[:30], *(n + 1 for n in SYSTEM[30:]), *SYSTEM[:20]]
    for text in (SYSTEM[:20], SYSTEM, other, [*other, 9]):
        read(text)
    model.keep_texts(cache, sd.Context.of([[*other, 9, 9]], 160), [0])
    blocks = model.prefixes._find(np.array(other), taps)
    assert len(blocks) == len(other) // 8
    whole = sd.HFModel(tiny("llama"))
    seen = whole.score(whole.cache(1, 160), sd.Context.of([other], 160), taps=taps).fed.layers
    for i, block in enumerate(blocks):
        for tap, x in block.seen.items():
            torch.testing.assert_close(x, seen[tap][8 * i : 8 * i + 8])


def test_blocks_without_what_the_draft_reads_are_not_kept():
    """An executor that tells the target of ends, and not of rounds."""
    model = sd.HFModel(tiny("llama"), prefix_cache=GIB)
    cache, text = model.cache(1, 160), [*SYSTEM, *range(20)]
    model.score(cache, sd.Context.of([SYSTEM], 160), taps=(1, 2))
    model.score(cache, sd.Context.of([text], 160), taps=(1, 2))
    model.keep_texts(cache, sd.Context.of([[*text, 9]], 160), [0])
    assert [sorted(block.seen) for block in model.prefixes._held.values()] == [[1, 2]] * 5


@pytest.mark.parametrize("look", [False, True])
def test_answers_of_changed_weights_are_not_kept(look):
    """Weights that change while a text is decoded; ``look``: and that another call has noticed by its end."""
    user = tiny("llama")
    model = sd.HFModel(user, prefix_cache=GIB, graphs=False)
    rounds = []

    def change(round):
        rounds.append(round)
        if len(rounds) == 4:
            with torch.no_grad():
                user.get_input_embeddings().weight[3] += 1
            if look:
                asked(model, [SYSTEM])

    sd.decoder(model).build().generate([SYSTEM], 30, on_round=change)
    assert len(model.prefixes._held) == 5  # of prompts
    mine, theirs = (asked(m, [[*SYSTEM, 1]]).logits for m in (model, sd.HFModel(user)))
    assert torch.allclose(mine, theirs, atol=1e-9)


def test_nothing_of_a_text_is_kept_after_a_clear():
    model, rounds = sd.HFModel(tiny("llama"), prefix_cache=GIB, graphs=False), []

    def clear(round):
        rounds.append(round)
        if len(rounds) == 4:
            model.prefixes.clear()

    decoder = sd.decoder(model).build()
    decoder.generate([SYSTEM], 30, on_round=clear)
    assert model.prefixes.bytes == 0
    decoder.generate([SYSTEM], 30)
    assert len(model.prefixes._held) == (40 + 30 - 1) // 8


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("executor", [Serial(), Ahead()], ids=lambda e: type(e).__name__)
def test_answers_end_inside_accepted_trees(executor, kv_dtype):
    """Of ends in the middle of an accepted path, with trees whose nodes move; what is kept is what a prompt would leave."""
    graphs = "eager" if isinstance(executor, Ahead) else False
    user = tiny("llama")
    model, plain = (
        sd.HFModel(user, graphs=graphs, kv_dtype=kv_dtype, prefix_cache=limit) for limit in (GIB, None)
    )
    draft = sd.drafts.Tree(sd.HFModel(user, graphs=graphs), (2, 1, 1))
    ours, theirs = (sd.decoder(m).draft(draft, 3).executor(executor).build() for m in (model, plain))
    ends = range(0, 97, 5)
    for turn in range(6):
        prompts = [[*SYSTEM, turn], [turn] * 5]
        answers = ours.generate(prompts, 24, seed=turn, eos_token_id=ends).ids
        assert answers == theirs.generate(prompts, 24, seed=turn, eos_token_id=ends).ids
        assert any(len(ids) < 24 for ids in answers)
        texts = [[*prompt, *answer, 1] for prompt, answer in zip(prompts, answers)]
        mine, other = (asked(m, texts) for m in (model, plain))
        assert torch.allclose(mine.logits, other.logits, atol=1e-9 if kv_dtype is None else 1e-2)
        for text, found in zip(texts, mine.found):  # the end, too, if tokens behind it were accepted
            assert found in {(len(text) - n) // 8 * 8 for n in (2, 1)}


def test_a_wrapper_with_a_cache_of_its_own_keeps_nothing():
    class Wrapper:
        """A model that passes everything on but its cache."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def cache(self, batch, capacity):
            made = sd.HFModel(tiny("llama"), graphs=False).cache(batch, capacity)
            made.__class__ = type("Own", (type(made),), {})
            return made

    inner = sd.HFModel(tiny("llama"), prefix_cache=GIB, graphs=False)
    out = sd.decoder(Wrapper(inner)).build().generate([SYSTEM], 20, seed=1)
    assert inner.prefixes.bytes == 0
    assert out.ids == sd.decoder(inner).build().generate([SYSTEM], 20, seed=1).ids
