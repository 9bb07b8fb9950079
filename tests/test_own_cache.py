"""``OwnCache`` against the forward without a cache: every family, every way in which states may be used."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from forwards import ROWS, accept, error, plain, propose
from tiny import byte_tokenizer, tiny
from tiny_states import HERE, STATES, reads, stateful
from transformers import AutoConfig, AutoModelForCausalLM

import specdec as sd
from specdec.cache.states import State
from specdec.configs import cache_name
from specdec.models import OWN_CACHE, SUPPORTED, HFModel, OwnCache, UnsupportedModel
from specdec.models.check import check_own
from specdec.types import Context, Proposal

EXACT = 3e-5  # float32, relative
PROMPTS = [list(range(5, 30)), [3, 4], [90, 7, 7]]
FEW = ["lfm2", "mamba", "mamba2", "qwen3_next"]


def several(fast=FEW):
    return [pytest.param(f, marks=[] if f in fast else pytest.mark.slow) for f in HERE]


def texts(decoder, **options):
    return decoder.build().generate(PROMPTS, max_new_tokens=24, **options).ids


def lists(context):
    return [context.row(b) for b in range(context.batch)]


def test_every_family_is_tested_and_no_other_class_takes_it():
    assert set(STATES) == set(OWN_CACHE)
    assert not set(OWN_CACHE) & set(SUPPORTED)


@pytest.mark.parametrize("family", HERE)
@pytest.mark.slow
def test_every_family_in_every_phase(family):
    model = stateful(family)
    target = OwnCache(model, prefill_chunk=20)
    ids = list(range(3, 36))
    changed, same = plain(model, [*ids[:4], 90, *ids[5:]])[-1], plain(model, ids)[-1]
    assert (changed - same).abs().max() > 30 * EXACT * same.abs().max()  # what is forgotten is seen
    context, cache = Context.of(ROWS), target.cache(4, 64)
    target.prefill(cache, context)
    assert cache.length.tolist() == [0, 32, 14, 1]
    assert error(model, ROWS, target.score(cache, context).logits) < EXACT
    # verify ragged proposals, and take some nodes: none, some, all
    proposal = propose(target, [6, 5, 0, 3])
    logits = target.score(cache, context, proposal).logits
    assert error(model, ROWS, logits, proposal) < EXACT
    assert logits[2, 1:].abs().max() == 0  # nodes that do not exist
    verdict = accept(proposal, [[0, 1, 2], [], [], [0, 1, 2]])
    cache.commit(context, verdict)
    context = context.append(verdict.tokens, verdict.accepted + 1)
    again = propose(target, [3, 6, 6, 2], seed=1)
    logits = target.score(cache, context, again).logits
    assert error(model, lists(context), logits, again) < EXACT
    # roll back to a shorter text that ends differently
    back = Context.of([[*row[: max(1, len(row) - 4)], 44] for row in lists(context)])
    assert error(model, lists(back), target.score(cache, back).logits) < EXACT


@pytest.mark.parametrize("family", several(["lfm2", "mamba2"]))
def test_text_is_that_of_the_models_own_generate(family):
    model = stateful(family)
    target = OwnCache(model, byte_tokenizer())
    greedy = sd.decoder(target).greedy()
    ours = texts(greedy)
    for prompt, ids in zip(PROMPTS, ours):
        own = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert own[0, len(prompt) :].tolist() == ids
    assert texts(greedy.draft(sd.drafts.NGram(), length=4)) == ours
    assert texts(greedy.draft(OwnCache(model), length=3)) == ours  # all is accepted
    assert texts(greedy.draft(OwnCache(stateful(family, seed=1)), length=3)) == ours  # almost nothing is


@pytest.mark.parametrize("family", several(["lfm2", "mamba"]))
def test_sampled_text_is_that_of_plain_decoding(family):
    target = OwnCache(stateful(family, spread=1.5))
    coupled = sd.decoder(target).sampling(temperature=1.0).verifier(sd.Coupled())
    ours = texts(coupled, seed=5)
    near = OwnCache(stateful(family, spread=1.4))
    assert texts(coupled.draft(near, length=3), seed=5) == ours
    assert texts(coupled.draft(HFModel(tiny("llama", dtype=torch.float32)), length=4), seed=5) == ours


def test_the_output_has_the_targets_distribution():
    """Chi-square, by transformers' own forward."""
    model = stateful("lfm2", spread=1.5)
    target, draft = OwnCache(model), OwnCache(stateful("lfm2", spread=1.3))
    decoder = sd.decoder(target).draft(draft, length=2).sampling(temperature=0.5).build()
    n, prompt = 600, [5, 6, 7]
    out = decoder.generate([prompt] * n, max_new_tokens=2, seed=3)
    second = torch.tensor([ids[1] for ids in out.ids])
    first = torch.softmax(plain(model, prompt)[-1].double() / 0.5, -1)
    law = sum(
        p * torch.softmax(plain(model, [*prompt, a])[-1].double() / 0.5, -1) for a, p in enumerate(first)
    )
    order = law.argsort(descending=True)
    groups = torch.searchsorted(law[order].cumsum(0), torch.arange(1, 10) / 10)
    edges = [0, *groups.tolist(), len(law)]
    spans = [order[a:b] for a, b in pairwise(edges) if b > a]
    expected = torch.tensor([float(law[s].sum()) for s in spans]) * n
    seen = torch.tensor([float(torch.isin(second, s).sum()) for s in spans])
    chi = float(((seen - expected) ** 2 / expected).sum())
    assert chi < 3.5 * len(spans), (seen, expected)


@pytest.mark.parametrize("refeed", [0, 3, 100])
@pytest.mark.parametrize(
    "family", ["mamba2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("zamba2", "jamba"))]
)
def test_when_tokens_are_read_again_changes_nothing(family, refeed):
    model = stateful(family)
    ours = texts(sd.decoder(OwnCache(model)).greedy())
    draft = OwnCache(stateful(family, seed=1))
    assert texts(sd.decoder(OwnCache(model, refeed=refeed)).greedy().draft(draft, length=3)) == ours


def fed(target, action):
    """The numbers of tokens of the forwards that ``action`` runs."""
    counts = []
    hook = target.clone.register_forward_pre_hook(
        lambda module, args, given: counts.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    action()
    hook.remove()
    return counts


def test_a_round_is_one_forward_and_reads_few_tokens_again():
    target = OwnCache(stateful("mamba2"), refeed=4)
    text, chain = list(range(10, 20)), torch.tensor([[1, 2, 3]])
    nodes = Proposal.chain(chain, torch.tensor([3]))
    cache = target.cache(1, 64)

    def score(row, proposal=nodes):
        return fed(target, lambda: target.score(cache, Context.of([row]), proposal))

    assert fed(target, lambda: target.prefill(cache, Context.of([text]))) == [9]
    assert score(text) == [1 + 3]
    assert score([*text, 1, 2, 3, 9]) == [1 + 3]  # all were accepted: nothing is read again
    assert score([*text, 1, 2, 3, 9, 1, 7]) == [3 + 3]  # one was, after a state at 13 tokens
    assert score([*text, 1, 2, 3, 9, 1, 7, 8, 8]) == [
        5,
        3,
    ]  # too many to read again: for good, in a forward of their own
    assert score([*text, 1, 2, 3, 9, 1, 7, 8, 8], None) == []  # the logits are still known
    assert score([*text, 5]) == [11, 3]  # another text: from the beginning


def test_one_token_at_a_time_where_the_forward_forgets():
    target = OwnCache(stateful("mamba"), prefill_chunk=4)
    text, nodes = list(range(10, 20)), Proposal.chain(torch.tensor([[1, 2]]), torch.tensor([2]))
    cache = target.cache(1, 64)
    assert fed(target, lambda: target.prefill(cache, Context.of([text]))) == [9]
    assert fed(target, lambda: target.score(cache, Context.of([text]), nodes)) == [1, 1, 1]
    later = Context.of([[*text, 1, 5]])
    assert fed(target, lambda: target.score(cache, later, nodes)) == [1, 1, 1, 1]


def test_start_goes_on_where_an_earlier_call_ended():
    model = stateful("qwen3_next")
    target, context = OwnCache(model), Context.of(ROWS)
    proposal = propose(target, [6, 5, 0, 3])
    whole = target.score(target.cache(4, 64), context, proposal).logits
    cache = target.cache(4, 64)
    two = Proposal.chain(proposal.tokens[:, :2], proposal.size.clamp(max=2))
    assert torch.allclose(target.score(cache, context, two).logits, whole[:, :3], atol=1e-5)
    counts = fed(target, lambda: target.score(cache, context, proposal, start=2))
    assert counts == [4, 3, 1]
    other = Context.of(
        [[*row, 44] for row in ROWS]
    )  # from the state behind the nodes, if it has read the text
    assert fed(target, lambda: target.score(cache, other)) == [
        len(row) + 1 if len(row) < 9 else 1 for row in ROWS
    ]
    cache = target.cache(4, 64)
    target.score(cache, context, two)
    assert torch.allclose(target.score(cache, context, proposal, start=2).logits, whole[:, 3:], atol=1e-5)
    assert not target.score(cache, context, proposal, rows=torch.tensor([1])).logits[[0, 2, 3]].any()


@pytest.mark.parametrize("refeed", [0, 8])
def test_rows_do_not_see_each_other_and_may_leave_join_and_double(refeed):
    model = stateful("lfm2")
    target = OwnCache(model, refeed=refeed)
    context, cache = Context.of(ROWS), target.cache(4, 64)
    together = target.score(cache, context).logits
    for b, row in enumerate(ROWS):
        alone = target.score(target.cache(1, 64), Context.of([row])).logits
        assert torch.equal(alone[0], together[b])
    rows = torch.tensor([3, 1, 1])
    cache, context = cache.select(rows), context.select(rows)
    other = target.cache(1, 80)
    target.prefill(other, Context.of([ROWS[2]]))
    cache = cache.join(other)
    assert cache.capacity == 80
    joined = [[*row, 60 + b] for b, row in enumerate([*lists(context), ROWS[2]])]
    proposal = propose(target, [2, 6, 4, 1])
    context = Context.of(joined)
    assert error(model, joined, target.score(cache, context, proposal).logits, proposal) < EXACT


@pytest.mark.parametrize("refeed", [0, 8])
def test_prompts_that_are_alike_are_read_once(refeed):
    target = OwnCache(stateful("mamba2"), refeed=refeed)
    context, cache = Context.of([[5, 6, 7], [8, 9], [5, 6, 7]]), target.cache(3, 64)
    assert fed(target, lambda: target.prefill(cache, context)) == [2, 1]
    proposal = propose(target, [3, 3, 3], rows=3)
    assert (
        error(target.model, lists(context), target.score(cache, context, proposal).logits, proposal) < EXACT
    )


def test_the_lengths_of_a_cache_are_those_of_its_states():
    target, text = OwnCache(stateful("mamba2")), [5, 6, 7, 8, 9]
    cache, context = target.cache(1, 64), Context.of([text])
    target.score(cache, context)
    assert cache.length.tolist() == [5]
    assert len(cache.rows[0]) == 1  # nothing was proposed, so nothing can be rejected
    assert cache.sync(context).tolist() == [4]  # the last token is always read
    target.score(cache, context, Proposal.chain(torch.tensor([[1, 2, 3]]), torch.tensor([3])))
    assert cache.length.tolist() == [5]
    assert cache.sync(Context.of([[*text, 1, 2, 3, 4]])).tolist() == [8]
    assert cache.sync(Context.of([[*text, 1, 4]])).tolist() == [5]
    assert cache.sync(Context.of([[5, 4]])).tolist() == [0]


def test_a_stream_of_requests():
    target = OwnCache(stateful("qwen3_next"))
    decoder = sd.decoder(target).draft(sd.drafts.NGram(), length=3).greedy().build()
    alone = [decoder.generate([p], max_new_tokens=9).ids[0] for p in PROMPTS]
    requests = [sd.Request(p, max_new_tokens=9) for p in PROMPTS]
    served = {one.index: one.ids for one in decoder.serve(requests, limit=2)}
    assert [served[i] for i in range(3)] == alone


def test_the_users_model_is_not_modified():
    model = stateful("lfm2")
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    model.train()
    target = OwnCache(model)
    texts(sd.decoder(target).greedy().draft(sd.drafts.NGram(), length=3))
    assert model.training
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert target.score(target.cache(1, 9), Context.of([[1, 2]])).logits.add_(1).requires_grad is False


def test_a_forward_that_fails_leaves_no_half_read_state():
    model = stateful("mamba2")
    target, context = OwnCache(model), Context.of([[5, 6, 7, 8]])
    cache = target.cache(1, 64)
    target.prefill(cache, context)

    def fail(*args):
        raise RuntimeError("out of memory")

    hook = target.clone.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.score(cache, context)
    hook.remove()
    assert error(model, [[5, 6, 7, 8]], target.score(cache, context).logits) < EXACT


def test_copies_share_what_no_forward_writes_into():
    target = OwnCache(stateful("lfm2"))
    cache = target.cache(1, 64)
    target.prefill(cache, Context.of([list(range(9))]))
    state = cache.rows[0][0]
    twin = state.copy()
    ours, theirs = state.memory.layers, twin.memory.layers
    assert ours[1].keys is theirs[1].keys
    assert ours[0].conv_states[0] is not theirs[0].conv_states[0]
    assert torch.equal(ours[0].conv_states[0], theirs[0].conv_states[0])
    assert State().copy().memory is None


def test_a_family_that_is_not_listed_is_compared_first():
    model = tiny("llama")
    target = OwnCache(model)
    assert texts(sd.decoder(target).greedy()) == texts(sd.decoder(HFModel(model)).greedy())


def forgetful(model):
    """The model, which goes on from no cache."""
    forward, name = model.model.forward, cache_name(model)
    model.model.forward = lambda *args, **given: forward(*args, **{**given, name: None})
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_comparison_sees_mistakes_in_every_dtype(dtype):
    OwnCache(tiny("llama", dtype=dtype))
    with pytest.raises(UnsupportedModel, match="forward in pieces differs") as caught:
        OwnCache(forgetful(tiny("llama", dtype=dtype)))
    assert "Give models.OwnCache" not in str(caught.value)


@pytest.mark.parametrize("family", ["diffllama", "minimax"])
def test_a_window_that_is_passed_by_is_refused_however_long(family, monkeypatch):
    OwnCache(stateful(family))
    for window in (8, 100):
        monkeypatch.setitem(STATES, family, {**STATES[family], "sliding_window": window})
        with pytest.raises(UnsupportedModel, match="forward in pieces differs"):
            OwnCache(stateful(family))
    windowed = stateful("gemma3n_text")
    windowed.config.sliding_window = 100
    OwnCache(windowed)
    assert windowed.config.sliding_window == 100


def test_another_text_decides_where_one_differs():
    """As a router does that chooses another expert after another rounding."""
    target, texts_read = OwnCache(tiny("llama")), []
    score = target.score

    def other_once(cache, context, proposal):
        texts_read.append(context.row(0))
        scores = score(cache, context, proposal)
        if len(texts_read) == 2:
            scores.logits.add_(torch.arange(97) / 97)
        return scores

    target.score = other_once
    assert check_own(target) < 1e-5
    assert len(texts_read) == 8
    assert texts_read[0] != texts_read[4]


def test_builders_choose_it_by_family(tmp_path):
    model = stateful("lfm2")
    assert isinstance(sd.decoder(model).build().target, OwnCache)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    loaded = sd.decoder(tmp_path / "model").greedy().build()
    assert isinstance(loaded.target, OwnCache)
    assert loaded.target.tokenizer is not None
    assert loaded.generate(PROMPTS, max_new_tokens=5).ids == [
        ids[:5] for ids in texts(sd.decoder(OwnCache(model)).greedy())
    ]
    with pytest.raises(
        TypeError, match=r"lfm2 model, which runs with transformers' own cache .*page is of HFModel"
    ):
        sd.decoder(tmp_path / "model", page=16)
    with pytest.raises(UnsupportedModel, match=r"OwnCache"):
        HFModel(model)


def test_it_is_saved_and_loaded_with_its_settings(tmp_path):
    model = stateful("mamba2")
    target = OwnCache(model, byte_tokenizer(), refeed=3)
    decoder = sd.decoder(target).draft(OwnCache(model), length=2).greedy().build()
    decoder.save(tmp_path / "decoder")
    loaded = sd.load(tmp_path / "decoder").build()
    assert isinstance(loaded.target, OwnCache)
    assert (loaded.target.refeed, loaded.draft.model.refeed) == (3, 8)
    assert loaded.draft.model.model is loaded.target.model
    assert loaded.generate(PROMPTS, max_new_tokens=6).ids == decoder.generate(PROMPTS, max_new_tokens=6).ids


def test_custom_generate():
    model = stateful("lfm2")
    decoder = sd.decoder(model).draft(sd.drafts.NGram(), length=3).build()
    ids = torch.tensor([PROMPTS[0]])
    ours = model.generate(ids, max_new_tokens=9, custom_generate=decoder.as_generate())
    assert torch.equal(ours, model.generate(ids, max_new_tokens=9, do_sample=False))


def test_bad_input_is_refused_by_name():
    model = stateful("mamba2")
    target = OwnCache(model)
    for name, value, kind in (
        *(("refeed", -1, ValueError), ("refeed", 1.5, TypeError)),
        *(("prefill_chunk", 0, ValueError), ("prefill_chunk", 1.5, TypeError)),
    ):
        with pytest.raises(kind, match=name):
            OwnCache(model, **{name: value})
    rwkv = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "rwkv", vocab_size=9, hidden_size=8, attention_hidden_size=8, num_hidden_layers=2
        )
    )
    with pytest.raises(UnsupportedModel, match="rescales its weights in place"):
        OwnCache(rwkv)
    with pytest.raises(TypeError, match="model is a str"):
        OwnCache("mamba2")
    cache, context = target.cache(1, 5), Context.of([[1, 2, 3]])
    tree = Proposal(torch.tensor([[1, 2]]), torch.tensor([[-1, -1]]), torch.tensor([2]))
    with pytest.raises(ValueError, match="proposes a tree"):
        target.score(cache, context, tree)
    with pytest.raises(ValueError, match="taps: layer 3 does not exist"):
        target.score(cache, context, taps=(3,))
    with pytest.raises(ValueError, match="needs 6 slots"):
        target.score(cache, context, Proposal.chain(torch.tensor([[1, 2, 3]]), torch.tensor([3])))
    with pytest.raises(ValueError, match="context has 1 rows and the cache 2"):
        target.score(target.cache(2, 5), context)
    with pytest.raises(ValueError, match="batch is -1"):
        target.cache(-1, 5)


def test_equal_prompts_are_read_once(monkeypatch):
    """By a target, in one call; the rows then go their own ways."""
    model = OwnCache(stateful("lfm2"))
    counts = reads(monkeypatch)
    prompt = list(range(20, 31))
    prompts = [prompt, [9, 9], prompt, prompt]
    decoder = sd.decoder(model).draft(sd.drafts.NGram(), length=3).build()
    together = decoder.generate(prompts, 12, seed=[0, 1, 2, 3]).ids
    assert counts[:2] == [11, 2]
    assert counts.count(11) == 1
    assert together == [decoder.generate([p], 12, seed=[n]).ids[0] for n, p in enumerate(prompts)]
