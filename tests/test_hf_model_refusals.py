"""Bad input to HFModel and to its caches, models that it refuses, and folders that cannot be loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from forwards import ROWS, TOLERANCE, error, propose
from tiny import byte_tokenizer, tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaModel

import specdec as sd
from specdec.cache.contiguous import free_bytes
from specdec.models import OWN_CACHE, SUPPORTED, HFModel, UnsupportedModel
from specdec.models.hf import self_check
from specdec.types import Context, Proposal


def test_a_cache_of_less_than_nothing_is_refused():
    model = HFModel(tiny("llama"))
    for batch, capacity, why in ((2, -4, "capacity is -4: give"), (-1, 4, "batch is -1: give")):
        for made in (model, HFModel(tiny("llama"), page=16)):
            with pytest.raises(ValueError, match=why):
                made.cache(batch, capacity)


def test_a_cache_that_would_not_fit_is_refused_before_it_is_made(llama):
    free = free_bytes(torch.device("cpu"))
    per_token = llama.bytes_per_token()
    assert free > 2**20
    tokens = 4 * free // per_token
    with pytest.raises(
        MemoryError, match=r"needs \d+\.\d\d GiB on cpu and \d+\.\d\d GiB are free: batch \d+ would fit"
    ) as caught:
        llama.cache(8, tokens)
    assert "capacity" in str(caught.value)
    assert "batch_size" not in str(caught.value)  # not even one row fits
    with pytest.raises(MemoryError, match=r"\(generate\(\.\.\., batch_size=\d+\)\)"):
        llama.cache(4 * free // (16 * per_token), 16)
    llama.cache(8, 16)


def test_no_room_in_the_cache(llama):
    with pytest.raises(ValueError, match=r"row 1 needs 33 slots .* the cache has 32"):
        llama.score(llama.cache(4, 32), Context.of(ROWS))
    with pytest.raises(ValueError, match=r"row 1 needs 39 slots"):
        llama.score(llama.cache(4, 38), Context.of(ROWS), propose(llama, [6, 6, 0, 0]))


def test_proposal_of_another_batch(llama):
    with pytest.raises(ValueError, match="the proposal has 3 rows and the context 4"):
        llama.score(llama.cache(4, 64), Context.of(ROWS), propose(llama, [1, 1, 1], rows=3))


def test_trees_are_refused_where_attention_goes_by_slot(llama):
    target = HFModel(tiny("mpt"))
    with pytest.raises(ValueError, match="mpt takes chains only"):
        target.score(target.cache(4, 64), Context.of(ROWS), propose(llama, [6, 6, 6, 6]))


@pytest.mark.parametrize("family", ["mpt", "llama"])
def test_parents_of_nodes_that_do_not_exist_are_not_looked_at(family):
    """A row is a chain whatever its batch mates are, and whatever lies beyond its nodes."""
    target = HFModel(tiny(family))
    N, size = 4, torch.tensor([4, 0, 2, 1])
    dead = torch.arange(N) >= size[:, None]
    parents = torch.arange(-1, N - 1).repeat(4, 1)
    if target.supports_trees:
        parents[0] = torch.tensor([-1, -1, 0, 0])
    tokens = torch.randint(0, 97, (4, N), generator=torch.Generator().manual_seed(0))

    def scores(parents, tokens):
        proposal = Proposal(tokens, parents, size)
        return target.score(target.cache(4, 64), Context.of(ROWS), proposal).logits

    expected = scores(parents, tokens)
    for parent in (-9, -1, 0, 99):
        assert torch.equal(
            scores(torch.where(dead, parent, parents), torch.where(dead, -1, tokens)), expected
        )


def small(family, **settings):
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, **settings},
    )
    return AutoModelForCausalLM.from_config(config)


KINDS = ["sliding_attention", "full_attention"]


def named(family):
    """A Llama with the name of another family."""
    model = tiny("llama")
    model.config.model_type = family
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: small("bloom", n_layer=1, n_head=4), "ALiBi"),
        (lambda: tiny("falcon", alibi=True), "ALiBi"),
        (lambda: small("mamba", state_size=4), "recurrent state"),
        (lambda: tiny("gemma3_text", use_bidirectional_attention=True), "both directions"),
        (lambda: named("unheard_of"), r"unlisted='packed'"),
        (lambda: named("lama"), r"unlisted='packed'.* similar names: llama"),
        (
            lambda: named("deepseek_v32"),
            "an indexer or a compressor.* similar names: deepseek_v3, deepseek_v2",
        ),
        (
            lambda: tiny("qwen2_moe", use_sliding_window=True, sliding_window=8, layer_types=KINDS),
            "a sliding window of 8, which its layers do not pass",
        ),
        (lambda: tiny("phimoe", sliding_window=255), "a sliding window of 255, which its layers do not pass"),
        (
            lambda: AutoModelForSeq2SeqLM.from_config(
                AutoConfig.for_model("t5", vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1)
            ),
            "encoder-decoder",
        ),
        (lambda: LlamaModel(tiny("llama").config), "AutoModelForCausalLM"),
    ],
)
def test_families_that_cannot_run_exactly_are_refused(make, why):
    with pytest.raises(UnsupportedModel, match=why) as caught:
        HFModel(make())
    listed = f"specdec.models.SUPPORTED lists all {len(SUPPORTED)} supported families"
    own = any(family in str(caught.value) for family in OWN_CACHE)
    assert ("Give models.OwnCache" if own else listed) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_windows_that_no_text_reaches_are_no_reason_to_refuse():
    slides = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2}
    for model in (tiny("phimoe", sliding_window=256), tiny("qwen2_moe", **slides)):
        HFModel(model)


def test_an_unlisted_family_is_tried_and_compared():
    settings = {
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    model = small("olmo", **settings).eval().double()
    model.config.model_type = "unheard_of"
    target = HFModel(model, unlisted="packed")
    assert self_check(target) < TOLERANCE
    assert error(model, ROWS[:3], target.score(target.cache(3, 64), Context.of(ROWS[:3])).logits) < TOLERANCE
    broken = copy.deepcopy(model)
    broken.model.rotary_emb.forward = lambda x, position_ids: model.model.rotary_emb(
        x, torch.arange(position_ids.shape[-1])[None]
    )
    with pytest.raises(UnsupportedModel, match="differs from its own"):
        HFModel(broken, unlisted="packed")
    eager = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval().double()
    assert self_check(HFModel(eager, unlisted="packed")) < 1e-5  # its own softmax is in float32
    eager.model.rotary_emb.forward = broken.model.rotary_emb.forward
    with pytest.raises(UnsupportedModel, match="differs from its own"):
        HFModel(eager, unlisted="packed")
    with pytest.raises(ValueError, match="unlisted is 'padded'"):
        HFModel(model, unlisted="padded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unlisted_familys_windows_are_seen_however_long(dtype):
    model = tiny("mistral", sliding_window=100, dtype=dtype)
    model.config.model_type = "unheard_of"
    HFModel(model, unlisted="packed")
    assert model.config.sliding_window == 100
    slides = {"use_sliding_window": True, "sliding_window": 100, "layer_types": ["sliding_attention"] * 2}
    model = tiny("qwen2_moe", dtype=dtype, **slides)  # they are in transformers' masks alone
    model.config.model_type = "unheard_of"
    with pytest.raises(UnsupportedModel, match="differs from its own"):
        HFModel(model, unlisted="packed")


def test_things_that_are_no_model():
    with pytest.raises(TypeError, match=r"HFModel\.from_pretrained"):
        HFModel("gpt2")
    with pytest.raises(ValueError, match="prefill_chunk is 0"):
        HFModel(tiny("llama"), prefill_chunk=0)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer is 'gpt2': give the object"),
        ({"page": "64"}, TypeError, "page is '64': give a whole number, or None"),
        ({"page": 2.5}, TypeError, r"page is 2\.5: give a whole number"),
        ({"prefill_chunk": 1.5}, TypeError, r"prefill_chunk is 1\.5: give a whole number"),
        ({"unlisted": "x"}, ValueError, "unlisted is 'x'"),
        ({"compile": "yes"}, TypeError, "compile is 'yes': give True, False, or a mapping"),
        ({"attention": "torch_flash"}, ValueError, "attention is 'torch_flash' but .*CUDA"),
    ],
)
def test_arguments_that_make_no_sense(arguments, error, says):
    with pytest.raises(error, match=says):
        HFModel(tiny("llama", dtype=torch.float32), **arguments)


@pytest.fixture
def folder(tmp_path):
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_loading_a_folder(folder):
    target = HFModel.from_pretrained(folder)
    assert target.tokenizer is None
    assert target.dtype == torch.float32
    model = tiny("llama", dtype=torch.float32)
    assert error(model, ROWS, target.score(target.cache(4, 64), Context.of(ROWS)).logits) < 3e-5
    byte_tokenizer().save_pretrained(folder)
    loaded = HFModel.from_pretrained(str(folder), dtype=torch.bfloat16, device_map="cpu", prefill_chunk=64)
    assert loaded.dtype == torch.bfloat16
    assert loaded.tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    assert loaded.score(loaded.cache(4, 64), Context.of(ROWS)).logits.shape == (4, 1, 97)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"dtype": "float99"}, ValueError, "dtype is 'float99': give 'auto'"),
        ({"dtype": "zeros"}, ValueError, "dtype is 'zeros'"),
        ({"device": "cpu"}, TypeError, "no argument 'device': name the device in device_map"),
        ({"devise": "cpu"}, TypeError, "no argument 'devise': leave it out"),
        ({"device_map": "cpux"}, ValueError, "device_map"),
    ],
)
def test_arguments_of_loading_are_not_taken_for_damage(folder, arguments, error, says):
    with pytest.raises(error, match=says) as raised:
        HFModel.from_pretrained(folder, **arguments)
    assert "cut off" not in str(raised.value)


@pytest.mark.parametrize("where", ["cuda", {"": "cuda:0"}, torch.device("cuda")], ids=str)
def test_a_gpu_that_is_not_there(folder, where, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device_map is .*PyTorch sees no CUDA device"):
        HFModel.from_pretrained(folder, device_map=where)


def test_a_missing_or_damaged_folder(folder, tmp_path_factory):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        HFModel.from_pretrained(folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        HFModel.from_pretrained(tmp_path_factory.mktemp("empty"))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="may be truncated"):
        HFModel.from_pretrained(folder)
    from safetensors.torch import load_file, save_file

    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config[:50])
    with pytest.raises(ValueError, match="may be truncated"):
        HFModel.from_pretrained(folder)
    (folder / "config.json").write_text(config)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing .*layers\.1\.mlp\.up_proj"):
        HFModel.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        HFModel.from_pretrained(folder)


def test_the_cpus_fast_path_by_name():
    model = tiny("llama", dtype=torch.float32)
    auto, named = HFModel(model), HFModel(model, attention="cpu")
    assert type(named._path.lean) is type(auto._path.lean)
    context = Context.of(ROWS)
    for each in (auto, named):
        each.logits = each.score(each.cache(len(ROWS), 48), context).logits
    assert torch.equal(auto.logits, named.logits)
    assert error(model, ROWS, named.logits) < 1e-4


def test_an_output_matrix_that_is_replaced_is_noticed():
    model = tiny("llama", 0, tie_word_embeddings=True)
    decoder = sd.decoder(model).greedy().build()
    decoder.generate([[1, 2]], 3)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with pytest.raises(RuntimeError, match="given other parameters after it was wrapped"):
        decoder.generate([[1, 2]], 3)
