"""MTP: against transformers' own MTP layer, and with the layer that a target's checkpoint has."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_heads import FAMILIES, shake, texts
from tiny import _BASE, tiny
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

import specdec as sd
from specdec.audit.certify import certify
from specdec.cost.arms import used_weights, weights
from specdec.drafts.heads import MTP, DDTree, DynamicTree, Head
from specdec.drafts.heads.layers import config_like
from specdec.models.fingerprint import fingerprint
from specdec.training.anchored import blocks

MOE = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3))


def drafted(layer, rotary, embed, state, tokens, k):
    """What transformers' layer makes of the pairs ``state [1, a, E]`` and ``tokens [1, >= a + k]``, and then of ``k - 1`` of its own outputs."""
    outputs, a = [], state.shape[1]
    for n in range(k):
        at = torch.arange(a + n)[None]
        x = embed(tokens[:, 1 : a + n + 1])
        mask = create_causal_mask(layer.config, x, None, None, position_ids=at)
        made = layer(x, state, rotary(x, at), mask, at, None)
        outputs.append(made[0, -1])
        state = torch.cat([state, made[:, -1:]], 1)
    return torch.stack(outputs)


@pytest.mark.parametrize("hidden_first", [False, True])
@torch.no_grad()
def test_the_head_is_transformers_layer(target, hidden_first):
    head = shake(MTP.from_target(target, hidden_first=hidden_first))
    config = target.model.config
    config = AutoConfig.for_model(**{**config.to_dict(), "mtp_hidden_states_first": hidden_first})
    config._attn_implementation = "eager"
    layer = MtpLayer(config, LlamaDecoderLayer, LlamaRMSNorm, 0).double().eval()
    weights, own = head.layers[0].state_dict(), ("enorm", "hnorm", "eh_proj")
    renamed = {("" if n.startswith(own) else "mtp_block.") + n: t for n, t in weights.items()}
    renamed["post_norm.weight"] = renamed.pop("mtp_block.norm.weight")
    layer.load_state_dict(renamed)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (1, 12), generator=draw)
    states = torch.randn(1, 11, 32, dtype=torch.float64, generator=draw)
    expected = drafted(layer, target.model.model.rotary_emb, head.embed, states[:, :6], tokens, 4)
    found = blocks(head, tokens, {"final": states}, 4, torch.tensor([[6]]))[0, 0]
    torch.testing.assert_close(found, head.logits(expected), rtol=0, atol=1e-6)  # its angles are float32


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_targets_for_every_family(family):
    target = sd.HFModel(tiny(family))
    head = shake(MTP.from_target(target))
    prompts, budgets = [[1, 2, 3], [5] * 12], [9, 5]
    for greedy in (True, False):
        plain = texts(target, None, greedy, prompts=prompts, budgets=budgets)
        for tree in ({}, {"tree": DynamicTree(3, 2, 5)}):
            assert texts(target, Head(head, **tree), greedy, prompts=prompts, budgets=budgets) == plain


def test_trees_have_the_targets_distribution_exactly():
    small = sd.HFModel(tiny("llama", seed=4, vocab_size=3))
    head = shake(MTP.from_target(small, vocabulary=[0, 2], norm_output=False))
    decoder = sd.decoder(small).draft(Head(head, DynamicTree(2, 2, 3)), length=2).build()
    found = certify(decoder, [[0], [2, 1, 2]], [4, 3])
    assert found.lossless, found


def with_mtp(folder, family, **changes):
    """A tiny checkpoint with an MTP layer under its released names, and the target that is loaded from it."""
    draw = torch.Generator().manual_seed(0)

    def saved(layers, where):
        """A random model's tensors by their names in checkpoints."""
        sizes = {**_BASE, **MOE, "head_dim": 8, "pad_token_id": 0, **changes, "num_hidden_layers": layers}
        config = AutoConfig.for_model(family, **sizes)
        config.bos_token_id = config.eos_token_id = None
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=draw) * 0.2 + (p.dim() == 1))
        model.save_pretrained(folder / where)
        return load_file(folder / where / "model.safetensors")

    L = changes["num_hidden_layers"]
    like = 7 if "qwen3" in family else L  # a layer with full attention
    more, tensors = saved(like + 1, "more"), saved(L, ".")
    block = {n.split(f"layers.{like}.")[1]: t for n, t in more.items() if f"layers.{like}." in n}
    pair = {name: torch.rand(32, generator=draw) + 0.5 for name in ("enorm", "hnorm", "norm")}
    pair["eh_proj"] = torch.randn(32, 64, generator=draw) * 0.2
    if family == "glm4_moe":
        names = {"norm": "shared_head.norm"}
        made = {f"model.layers.{L}.{n}": t for n, t in block.items()}
        made |= {f"model.layers.{L}.{names.get(n, n)}.weight": t for n, t in pair.items()}
        made[f"model.layers.{L}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        made[f"model.layers.{L}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    else:
        names = {
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "eh_proj": "fc",
            "norm": "norm",
        }
        made = {f"mtp.layers.0.{n}": t for n, t in block.items()}
        made |= {f"mtp.{names[n]}.weight": t for n, t in pair.items()}
    save_file(tensors | made, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder).eval()


SHIPPING = {
    "glm4_moe": {"num_hidden_layers": 2},
    "mellum": {
        "num_hidden_layers": 2,
        "num_mtp_layers": 1,
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["sparse"],
    },
    "qwen3_next": {"num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 24},
}
READS_FC = any("fc" in p for t in get_checkpoint_conversion_mapping("MtpModel") for p in t.source_patterns)
needs_fc = pytest.mark.skipif(
    not READS_FC, reason=f"transformers {transformers.__version__} does not read MTP layers with the name fc"
)
LOADED = [pytest.param("mellum", marks=needs_fc), "glm4_moe"]


def two_layers(monkeypatch):
    """Transformers knows GLM's layer by its numbers of layers; here GLM has 2."""
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])


def kinds(family):
    """What the family's rotary embedding is told beside positions."""
    return {"layer_type": "full_attention"} if family == "mellum" else {}


@pytest.mark.parametrize("family", [*SHIPPING, pytest.param("glm4_moe of 46", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_target_drafts_with_the_layer_that_it_ships(tmp_path, family, monkeypatch):
    changes = SHIPPING.get(family, {"num_hidden_layers": 46})  # as GLM-4.5-Air has
    if family == "glm4_moe":
        two_layers(monkeypatch)
    model = with_mtp(tmp_path, family.split()[0], **changes)
    before = model.config.to_dict()
    if family in ("mellum", "qwen3_next") and not READS_FC:
        with pytest.raises(ValueError, match=r"found no MTP layer of this .* try a newer transformers"):
            MTP.from_checkpoint(model)
        return
    head = MTP.from_checkpoint(model)
    assert model.config.to_dict() == before
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    layer = MtpModel.from_pretrained(model).layers[0].eval()
    layer.config._attn_implementation = "eager"
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (1, 12), generator=draw)
    states = torch.randn(1, 11, 32, generator=draw)

    def rotary(x, at):
        return model.get_decoder().rotary_emb(x, at, **kinds(family))

    expected = drafted(layer, rotary, head.embed, states[:, :6], tokens, 3)
    found = blocks(head, tokens, {"final": states}, 3, torch.tensor([[6]]))[0, 0]
    torch.testing.assert_close(found, head.logits(expected), rtol=1e-4, atol=1e-4)
    head.save_pretrained(tmp_path / "head")
    again = MTP.from_pretrained(tmp_path / "head").bound(model)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values()))
    said = blocks(again, tokens, {"final": states}, 3, torch.tensor([[6]]))[0, 0]
    torch.testing.assert_close(said, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mellum", "glm4_moe"])
@torch.no_grad()
def test_a_target_in_low_precision_has_exact_angles(tmp_path, family, monkeypatch):
    two_layers(monkeypatch)
    with_mtp(tmp_path, family, **SHIPPING[family])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    if family == "mellum" and not READS_FC:  # as a head that transformers 5.23 saved
        kind = model.config.to_diff_dict()
        kind["num_nextn_predict_layers"] = kind.pop("num_mtp_layers")
        head = MTP(config_like(model), ("final",), shipped=kind, target=fingerprint(model)).bfloat16()
    else:
        head = MTP.from_checkpoint(model)
    assert {p.dtype for p in head.parameters()} == {p.dtype for p in model.parameters()}
    x, at = torch.zeros(1, 2, 32, dtype=torch.bfloat16), torch.tensor([[3, 4001]])
    expected = model.get_decoder().rotary_emb(x, at, **kinds(family))
    assert all(map(torch.equal, head.layers[0].rotary(x, at), expected))


def test_a_shipped_layer_costs_the_experts_that_it_uses():
    model = tiny("qwen3_moe", num_experts=8)  # two of which are used
    kind = {**model.config.to_diff_dict(), "num_mtp_layers": 1}
    head = MTP.from_target(model, shipped=kind)
    experts = sum(p.numel() for name, p in head.named_parameters() if ".experts." in name)
    assert experts > 0
    assert used_weights(head) == weights(head) - experts * 3 / 4


def test_the_routers_bias_of_a_target_in_low_precision_stays_exact(tmp_path, monkeypatch):
    two_layers(monkeypatch)
    with_mtp(tmp_path, "glm4_moe", **SHIPPING["glm4_moe"])
    tensors, name = load_file(tmp_path / "model.safetensors"), "mlp.gate.e_score_correction_bias"
    exact = 14 + torch.rand(4, generator=torch.Generator().manual_seed(0))
    save_file(tensors | {f"model.layers.2.{name}": exact}, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    MTP.from_checkpoint(model).save_pretrained(tmp_path / "head")
    head = MTP.from_pretrained(tmp_path / "head")
    assert {p.dtype for p in head.parameters()} == {p.dtype for p in model.parameters()}
    found = [b for n, b in head.named_buffers() if n.endswith(name)]
    assert len(found) == 1
    assert torch.equal(found[0], exact)


@pytest.mark.parametrize("family", LOADED)
def test_a_target_that_ships_a_layer_decodes_with_it(tmp_path, family, monkeypatch):
    two_layers(monkeypatch)
    model = with_mtp(tmp_path, family, **SHIPPING[family])
    target = sd.HFModel(model, unlisted="packed")
    head = MTP.from_checkpoint(target)
    prompts, budgets = [[1, 2, 3], [5] * 12], [9, 5]
    for greedy in (True, False):
        plain = texts(target, None, greedy, prompts=prompts, budgets=budgets)
        for draft in (Head(head), Head(head, DynamicTree(3, 2, 5))):
            assert texts(target, draft, greedy, prompts=prompts, budgets=budgets) == plain


@pytest.mark.parametrize("family", LOADED)
def test_a_target_that_was_made_from_its_config_is_given_the_folder(tmp_path, family, monkeypatch):
    two_layers(monkeypatch)
    loaded = with_mtp(tmp_path, family, **SHIPPING[family])
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**loaded.config.to_dict() | {"dtype": None}))
    made.load_state_dict(loaded.state_dict())
    assert made.config.dtype is None
    expected = MTP.from_checkpoint(loaded).state_dict()
    found = MTP.from_checkpoint(made.eval(), tmp_path).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_targets_without_a_layer_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match=r"was not loaded from a checkpoint: give MTP\.from_checkpoint"):
        MTP.from_checkpoint(target)
    for family, name in {"llama": "Llama", "gpt_neox": "GPTNeoX", "gpt2": "GPT2LMHeadModel"}.items():
        other = tiny(family)
        other.save_pretrained(tmp_path / family)
        with pytest.raises(
            ValueError, match=rf"no MTP layer of this {name}.* in .*: make a new one with MTP\.from_target"
        ):
            MTP.from_checkpoint(other, tmp_path / family)


@needs_fc
def test_a_layer_with_a_sliding_window_is_refused(tmp_path):
    model = with_mtp(tmp_path, "mellum", **SHIPPING["mellum"])
    model.config.mtp_layer_types = model.config.layer_types[1:] = ["sliding_attention"]
    with pytest.raises(ValueError, match="sliding window"):
        MTP.from_checkpoint(model)


@pytest.mark.parametrize("family", LOADED)
def test_layers_that_cannot_be_read_are_refused(tmp_path, family, monkeypatch):
    two_layers(monkeypatch)
    model = with_mtp(tmp_path, family, **SHIPPING[family])
    tensors, name = load_file(tmp_path / "model.safetensors"), type(model).__name__
    del tensors["mtp.fc.weight" if family == "mellum" else "model.layers.2.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"no MTP layer of this {name} in .*eh_proj"):
        MTP.from_checkpoint(model)
    model.config.num_mtp_layers = 3
    with pytest.raises(ValueError, match="ships 3 MTP layers"):
        MTP.from_checkpoint(model)
    model.hf_quantizer = SimpleNamespace(pre_quantized=True)
    says = rf"{name} is quantized, .*give MTP\.from_checkpoint\(model, folder\)"
    with pytest.raises(ValueError, match=says):
        MTP.from_checkpoint(model)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match=says):
        MTP.from_checkpoint(model, tmp_path)


@pytest.mark.parametrize("family", LOADED)
def test_the_layer_of_a_quantized_target_is_read_from_another_checkpoint(tmp_path, family, monkeypatch):
    two_layers(monkeypatch)
    model = with_mtp(tmp_path, family, **SHIPPING[family])
    expected = MTP.from_checkpoint(model).state_dict()
    model.hf_quantizer = SimpleNamespace(pre_quantized=True)
    found = MTP.from_checkpoint(model, tmp_path).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bad_input_is_refused(target):
    with pytest.raises(ValueError, match=r"taps is \[0, 'final'\]: MTP reads one layer"):
        MTP.from_target(target, (0, "final"))
    with pytest.raises(ValueError, match="taps: layer 9 does not exist"):
        MTP.from_target(target, (9,))
    with pytest.raises(
        ValueError, match="DDTree takes one distribution for each depth, and those of this MTP"
    ):
        Head(MTP.from_target(target), DDTree(3))
