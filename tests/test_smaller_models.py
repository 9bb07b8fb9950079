"""Models with fewer layers, heads, channels or tokens against what they stand for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pruned import TOKENS, logits
from tiny import FAMILIES, FLOAT32, slow, tiny
from torch import nn
from transformers import AutoModelForCausalLM

import specdec as sd
from specdec import pruning
from specdec.configs import blocks_of

DEPTH = {
    "gpt2": "n_layer",
    "codegen": "n_layer",
    "gptj": "n_layer",
    "mpt": "n_layers",
    "gpt_neo": "num_layers",
}


def deep(family: str, layers: int = 4, **changes: Any) -> Any:
    """A tiny model of four layers, whose kinds of layers alternate where it has kinds."""
    if family == "gpt_neo":
        changes["attention_types"] = [[["global", "local"], layers // 2]]
    return tiny(family, **{DEPTH.get(family, "num_hidden_layers"): layers}, **changes)


def skipping(model: Any, layers: list[int]) -> torch.Tensor:
    """The whole model's logits when all other blocks give back what they are given."""
    hooks = [
        block.register_forward_hook(
            lambda m, args, kwargs, out: (
                (args[0] if args else kwargs["hidden_states"])
                if isinstance(out, torch.Tensor)
                else ((args[0] if args else kwargs["hidden_states"]), *out[1:])
            ),
            with_kwargs=True,
        )
        for i, block in enumerate(blocks_of(model))
        if i not in layers
    ]
    try:
        return logits(model)
    finally:
        for hook in hooks:
            hook.remove()


def test_blocks_are_told_from_other_lists_of_their_number():
    """Norms and gates have no parts; experts are inside blocks, also of blocks that are found late; a tower has no cache."""
    model = tiny("qwen3_moe", num_hidden_layers=4)  # as many as experts
    body, blocks = model.model, model.model.layers
    for block in blocks:
        block.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(4))
    norms = nn.ModuleList(nn.LayerNorm(2) for _ in range(4))
    gates = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    vars(body)["_modules"] = {"norms": norms, "gates": gates, **body._modules}
    assert blocks_of(model) is blocks
    tower = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(4))})
    vars(body)["_modules"] = {"tower": tower, **body._modules}
    assert blocks_of(model) is blocks
    body.add_module("others", copy.deepcopy(blocks))
    with pytest.raises(ValueError, match=r"4 decoder blocks of a Qwen3MoeForCausalLM, layers or others\?"):
        blocks_of(model)
    body.layers, body.others, body.tower = None, None, None
    with pytest.raises(ValueError, match="no list of 4 decoder blocks found in a Qwen3MoeForCausalLM"):
        blocks_of(model)


def test_which_layers():
    assert pruning.last_layers(8, 2) == [6, 7]  # SPIRe's 7 and 8
    assert pruning.first_layers(8, 2) == [0, 1]
    assert pruning.spaced_layers(8, 2) == [0, 7]
    assert pruning.spaced_layers(8, 3) == [0, 3, 7]
    assert pruning.spaced_layers(32, 16) == [*range(0, 29, 2), 31]  # Distil-Whisper's
    assert pruning.spaced_layers(8, 1) == [7]
    assert pruning.influential_layers(torch.tensor([0.3, 0.1, 0.4, 0.1, 0.5]), 3) == [0, 2, 4]
    assert pruning.influential_layers(torch.tensor([0.1, 0.1, 0.1]), 2) == [0, 1]


# What a layer computes depends on its number, or other settings than those of layers would have to change with them.
UNEVEN = {
    *(
        "afmoe",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "gemma4_text",
        "gemma4_unified_text",
        "glm4_moe",
        "gpt_neox_japanese",
        "laguna",
    ),
    *("minicpm3", "modernbert-decoder"),
}


@pytest.mark.parametrize("family", sorted(UNEVEN))
def test_layers_that_would_not_be_the_same_are_refused(family):
    with pytest.raises(ValueError, match=r"does not follow from its config|depends on its number"):
        pruning.keep_layers(deep(family), [1, 2])


@pytest.mark.parametrize("family", slow(f for f in FAMILIES if f not in UNEVEN))
def test_keep_layers_is_skipping_the_others(family):
    model = deep(family)
    for layers in ([2, 3], [1], [0, 3], [0, 2, 3]):
        small = pruning.keep_layers(model, layers)
        assert torch.equal(logits(small), skipping(model, layers))
        assert small.config.num_hidden_layers == len(layers) == len(blocks_of(small))


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "gpt_neo", "qwen3_moe"]
)
def test_what_a_config_says_of_its_layers_goes_with_them(family, tmp_path):
    changes: dict[str, Any] = {}
    if family in ("qwen2", "qwen3"):
        changes = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    if family == "qwen3_moe":
        changes = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = deep(family, **changes)
    for layers in ([1, 2], [0, 3], [3], [0, 1, 2, 3]):
        small = pruning.keep_layers(model, layers)
        expected = skipping(model, layers)
        assert torch.equal(logits(small), expected)
        for name in ("layer_types", "attention_layers"):
            if getattr(model.config, name, None) is not None:
                assert getattr(small.config, name) == [getattr(model.config, name)[i] for i in layers]
        if family == "gpt_neo":
            assert small.config.attention_types == [[small.config.attention_layers, 1]]
        small.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        # Gemma's scale of the embedding is not saved, and rounded otherwise in a model that is loaded as float64.
        assert torch.allclose(logits(again), expected, atol=1e-5 if family.startswith("gemma") else 0)
    if family == "qwen2":
        assert [t[:4] for t in model.config.layer_types] == ["full", "full", "slid", "slid"]
        config = pruning.keep_layers(model, [1, 2, 3]).config
        assert config.max_window_layers == 1
        config.layer_types = None  # made anew from the numbers alone, it is the same
        assert type(config)(
            **{k: v for k, v in config.to_dict().items() if k != "layer_types"}
        ).layer_types == [
            "full_attention",
            "sliding_attention",
            "sliding_attention",
        ]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_shared_layers_are_the_models_own(family):
    model = deep(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = [0, 1, 3]
    small = pruning.keep_layers(model, layers, share=True)
    mine = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert {p.data_ptr() for p in small.parameters()} <= mine
    assert not any(p.requires_grad for p in small.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(logits(small), skipping(model, layers))
    out = sd.decoder(model).draft(small, length=3).greedy().generate([[1, 2, 3], [4]], 12, eos_token_id=())
    assert out.ids == sd.decoder(model).greedy().generate([[1, 2, 3], [4]], 12, eos_token_id=()).ids
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    assert torch.equal(logits(small), skipping(model, layers))  # it follows changes


def test_layers_that_do_not_fit_are_refused():
    model = deep("llama")
    for layers in ([], [4], [-1], [2, 1], [1, 1], [0, 1, 2, 3, 4]):
        with pytest.raises(ValueError, match="ascending numbers from 0 to 3"):
            pruning.keep_layers(model, layers)
    with pytest.raises(TypeError, match=r"layers is 2: give the numbers .* last_layers\(4, 2\)"):
        pruning.keep_layers(model, 2)
    with pytest.raises(ValueError, match="'gpt2' models a layer's computation depends on its number"):
        pruning.keep_layers(deep("gpt2", scale_attn_by_inverse_layer_idx=True), [1, 2])


def test_a_block_whose_settings_hang_on_its_number_is_refused():
    model = deep("llama")
    model.model.layers[
        2
    ].self_attn.scaling *= 2  # as a family with a scale of its own for each layer would have it
    with pytest.raises(ValueError, match="layer 2 would not be the same as layer 1"):
        pruning.keep_layers(model, [0, 2])
    pruning.keep_layers(model, [0, 1])


@pytest.mark.parametrize("family", slow(FAMILIES))
def test_block_influence(family):
    """Section 2.2: one minus the mean cosine of a block's input and output, the last one's before the final norm."""
    model = deep(family)
    caught: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        b.register_forward_hook(
            lambda m, a, k, o: caught.append(
                (a[0] if a else k["hidden_states"], o if isinstance(o, torch.Tensor) else o[0])
            ),
            with_kwargs=True,
        )
        for b in blocks_of(model)
    ]
    logits(model)
    for hook in hooks:
        hook.remove()
    expected = []
    for x, y in caught:
        cosines = [
            float(torch.dot(x[b, t], y[b, t]) / (x[b, t].norm() * y[b, t].norm()))
            for b in range(2)
            for t in range(24)
        ]
        expected.append(1 - sum(cosines) / 48)
    got = pruning.layer_influence(model, TOKENS)
    assert got.tolist() == pytest.approx(expected, rel=1e-4 if family in FLOAT32 else 1e-6)
    x = torch.randn(5, 7)
    assert float(pruning.block_influence(x, 3 * x)) == pytest.approx(0, abs=1e-6)
    assert float(pruning.block_influence(x, -x)) == pytest.approx(2)
    with pytest.raises(ValueError, match="equal"):
        pruning.block_influence(x, x[:1])


LLAMAS = ["llama", "mistral", "qwen2", "qwen3"]


def wide(family: str) -> Any:
    """Three layers, six query heads on three KV heads; with every bias that the family can have."""
    sizes = {
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 48,
        "head_dim": 8,
    }
    biases = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}.get(
        family, {}
    )
    model = tiny(family, **sizes, **biases)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("family", LLAMAS)
def test_keep_heads_is_silencing_the_others(family):
    model = wide(family)
    heads = [[0, 2], [1, 2], [0, 1]]
    small = pruning.keep_heads(model, heads)
    muted = copy.deepcopy(model)
    with torch.no_grad():
        for i, block in enumerate(muted.model.layers):
            for group in {0, 1, 2} - set(heads[i]):
                for head in (2 * group, 2 * group + 1):  # the query heads of a KV head
                    block.self_attn.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
    assert torch.allclose(logits(small), logits(muted), atol=1e-12)
    assert not torch.allclose(logits(small), logits(model), atol=1e-3)
    assert (small.config.num_attention_heads, small.config.num_key_value_heads, small.config.head_dim) == (
        4,
        2,
        8,
    )
    assert sd.HFModel(small).bytes_per_token() * 3 == sd.HFModel(model).bytes_per_token() * 2


@pytest.mark.parametrize("family", LLAMAS)
def test_keep_channels_is_silencing_the_others(family):
    model = wide(family)
    channels = pruning.most_important(torch.rand(3, 48), 20)
    small = pruning.keep_channels(model, channels)
    muted = copy.deepcopy(model)
    with torch.no_grad():
        for i, block in enumerate(muted.model.layers):
            gone = sorted(set(range(48)) - set(channels[i]))
            block.mlp.down_proj.weight[:, gone] = 0
    assert torch.allclose(logits(small), logits(muted), atol=1e-12)
    assert small.config.intermediate_size == 20


def given_to(model: Any, modules: list[Any]) -> list[torch.Tensor]:
    caught: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda m, args: caught.append(args[0])) for m in modules]
    logits(model)
    for hook in hooks:
        hook.remove()
    return caught


@pytest.mark.parametrize("family", LLAMAS)
def test_importance(family):
    """Minitron: the mean norm of a head's output; the mean absolute activation of a channel."""
    model = wide(family)
    heads, channels = pruning.head_importance(model, TOKENS), pruning.channel_importance(model, TOKENS)
    assert heads.shape == (3, 3)
    assert channels.shape == (3, 48)
    for i, x in enumerate(given_to(model, [b.self_attn.o_proj for b in model.model.layers])):
        for group in range(3):
            norms = [float(x[b, t, 16 * group : 16 * group + 16].norm()) for b in range(2) for t in range(24)]
            assert float(heads[i, group]) == pytest.approx(sum(norms) / 48)
    for i, x in enumerate(given_to(model, [b.mlp.down_proj for b in model.model.layers])):
        for c in (0, 7, 47):
            sizes = [abs(float(x[b, t, c])) for b in range(2) for t in range(24)]
            assert float(channels[i, c]) == pytest.approx(sum(sizes) / 48)


@pytest.mark.parametrize("family", slow(sorted(set(FAMILIES) - set(LLAMAS))))
@pytest.mark.parametrize("name", ["keep_heads", "keep_channels", "head_importance", "channel_importance"])
def test_other_families_are_refused(family, name):
    with pytest.raises(ValueError, match=f"{name}: '{family}' models are not supported.*keep_layers"):
        getattr(pruning, name)(deep(family), [[0]] * 4 if name.startswith("keep") else TOKENS)


def test_heads_and_channels_that_do_not_fit_are_refused():
    model = wide("llama")
    for heads, message in (
        ([[0], [1]], "heads has 2 lists and the model 3 layers"),
        ([[0], [1], [3]], r"heads\[2\] is \[3\]: give ascending numbers from 0 to 2"),
        ([[0], [1], []], r"heads\[2\] is \[\]"),
        ([[0], [2, 1], [1]], r"heads\[1\] is \[2, 1\]"),
        ([[0], [1, 2], [1]], r"heads\[1\] has 2 numbers and heads\[0\] 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pruning.keep_heads(model, heads)
    with pytest.raises(ValueError, match=r"channels\[0\] is \[48\]: give ascending numbers from 0 to 47"):
        pruning.keep_channels(model, [[48]] * 3)


def test_frequent_tokens():
    tokens = torch.tensor([[1, 1, 2, 0], [4, 2, 1, 0]])
    assert pruning.token_counts(tokens, 6).tolist() == [2, 3, 2, 0, 1, 0]
    counts = pruning.token_counts(tokens, 6, torch.tensor([3, 2]))
    assert counts.tolist() == [0, 2, 2, 0, 1, 0]
    assert pruning.token_counts(tokens[0], 6).tolist() == [1, 2, 1, 0, 0, 0]
    assert pruning.frequent_tokens(counts, 3) == [1, 2, 4]
    assert pruning.frequent_tokens(counts, 4) == [0, 1, 2, 4]  # of equal ones the lower id
    assert pruning.frequent_tokens(counts, 3, always=[5, 5]) == [1, 2, 5]
    assert counts.tolist() == [0, 2, 2, 0, 1, 0]
    for wrong, message in (
        ({"keep": 1, "always": [1, 2]}, "the 2 of always"),
        ({"keep": 2, "always": [6]}, "always has 6"),
    ):
        with pytest.raises(ValueError, match=message):
            pruning.frequent_tokens(counts, **wrong)
    with pytest.raises(ValueError, match="tokens go from 0 to 4 and vocab_size is 4"):
        pruning.token_counts(tokens, 4)


@pytest.mark.parametrize("family", slow(FAMILIES))
def test_keep_tokens(family):
    model = deep(family)
    ids = [5, 3, 90, 0]
    small = pruning.keep_tokens(model, ids)
    expected, got = logits(model), logits(small.model)
    assert got.shape == (2, 24, 4)
    assert torch.allclose(got, expected[..., ids], atol=1e-6 if expected.dtype == torch.float32 else 1e-12)
    assert small.model.get_input_embeddings().weight.shape[0] == 97
    assert small.model.get_output_embeddings().weight.shape[0] == 4
    full = small.full(got)
    assert full.shape == expected.shape
    assert torch.equal(full[..., ids], got)
    assert (full.isfinite().sum(-1) == 4).all()
    assert small.ids.tolist() == ids
    assert (small.model.config.get_text_config().vocab_size, small.vocab_size) == (4, 97)


def test_a_trimmed_model_is_not_taken_for_a_whole_one():
    """Its token k is ``ids[k]``: as a draft it would propose other tokens than it means."""
    model = deep("llama")
    small = pruning.keep_tokens(model, [5, 3, 90])
    with pytest.raises(ValueError, match="vocab"):
        sd.decoder(sd.HFModel(model)).draft(sd.HFModel(small.model)).build()
    with pytest.raises(ValueError, match="does not follow from its config"):
        pruning.keep_layers(small.model, [3])


def test_tokens_that_do_not_fit_are_refused():
    model = deep("llama")
    for ids in ([], [97], [-1], [3, 3]):
        with pytest.raises(ValueError, match="distinct tokens from 0 to 96"):
            pruning.keep_tokens(model, ids)
    with pytest.raises(ValueError, match="LlamaModel has no linear unembedding"):
        pruning.keep_tokens(model.model, [1])
