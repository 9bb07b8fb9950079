"""The MTP layer that Qwen3-Next and Qwen3.5 ship: read from a checkpoint with its released names, compared with a plain computation, and decoded with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_mtp import needs_fc
from tiny_states import HERE, STATES, stateful
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import specdec as sd
from specdec.drafts.heads import MTP, Head
from specdec.models import OwnCache
from specdec.training.anchored import blocks

pytestmark = needs_fc
FAMILIES = [f for f in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") if f in HERE]
E, HEADS, KV, SIZE, WIDE, EXPERT, EXPERTS, TOP = 32, 4, 2, 8, 48, 24, 4, 2
ROTARY = SIZE // 4  # a quarter of each head is rotated
PROMPTS, BUDGETS = [list(range(5, 30)), [3, 4], [90, 7, 7]], [9, 12, 3]


def layer(family, draw, fused=False):
    """Random tensors of an MTP layer by the names in released checkpoints (``mtp.*``)."""
    at = "mtp.layers.0."
    shapes = {
        "mtp.fc": (E, 2 * E),
        at + "self_attn.q_proj": (2 * HEADS * SIZE, E),  # and the gate of each head
        at + "self_attn.k_proj": (KV * SIZE, E),
        at + "self_attn.v_proj": (KV * SIZE, E),
        at + "self_attn.o_proj": (E, HEADS * SIZE),
    }
    norms = dict.fromkeys(["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"], E)
    norms |= dict.fromkeys([at + "input_layernorm", at + "post_attention_layernorm"], E)
    norms |= dict.fromkeys([at + "self_attn.q_norm", at + "self_attn.k_norm"], SIZE)
    mlp = at + "mlp."

    def gated(name, wide):
        return {name + "gate_proj": (wide, E), name + "up_proj": (wide, E), name + "down_proj": (E, wide)}

    if family == "qwen3_5_text":
        shapes |= gated(mlp, WIDE)
    else:
        shapes |= {mlp + "gate": (EXPERTS, E), mlp + "shared_expert_gate": (1, E)}
        shapes |= gated(mlp + "shared_expert.", EXPERT)
        for n in range(EXPERTS):
            shapes |= gated(f"{mlp}experts.{n}.", EXPERT)
    made = {f"{name}.weight": torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    made |= {f"{name}.weight": torch.randn(size, generator=draw) * 0.3 for name, size in norms.items()}
    return made


def fuse(tensors):
    """The experts as one tensor for all, as in some checkpoints."""
    at = "mtp.layers.0.mlp.experts."
    each = [[tensors[f"{at}{n}.{p}_proj.weight"] for p in ("gate", "up", "down")] for n in range(EXPERTS)]
    made = {name: t for name, t in tensors.items() if not name.startswith(at)}
    made[at + "gate_up_proj"] = torch.stack([torch.cat([g, u]) for g, u, _ in each])
    made[at + "down_proj"] = torch.stack([d for _, _, d in each])
    return made


def norm(x, weight):
    """These families' RMS norm, whose weight is stored without 1."""
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


def gated(x, w, name):
    return (F.silu(x @ w[name + "gate_proj.weight"].T) * (x @ w[name + "up_proj.weight"].T)) @ w[
        name + "down_proj.weight"
    ].T


def mixed(x, w, name):
    """Experts, of which each token uses two, and the shared one."""
    chance = (x @ w[name + "gate.weight"].T).softmax(-1)
    best = chance.topk(TOP)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, n in zip(best.values[t] / best.values[t].sum(), best.indices[t].tolist()):
            out[t] += weight * gated(x[t], w, f"{name}experts.{n}.")
    return out + (x @ w[name + "shared_expert_gate.weight"].T).sigmoid() * gated(
        x, w, name + "shared_expert."
    )


def turned(x, theta):
    """``x [H, T, D]``, whose first quarter is rotated by the position."""
    T = x.shape[1]
    speed = theta ** (-torch.arange(0, ROTARY, 2) / ROTARY)
    angle = torch.cat([torch.arange(T)[:, None] * speed] * 2, -1)
    own, rest = x[..., :ROTARY], x[..., ROTARY:]
    half = torch.cat([-own[..., ROTARY // 2 :], own[..., : ROTARY // 2]], -1)
    return torch.cat([own * angle.cos() + half * angle.sin(), rest], -1)


def outputs(w, embedded, state, theta, dense):
    """The layer's normed outputs ``[T, E]`` of embeddings of tokens and the state before each, ``[T, E]``."""
    at, T = "mtp.layers.0.", len(state)
    both = [
        norm(embedded, w["mtp.pre_fc_norm_embedding.weight"]),
        norm(state, w["mtp.pre_fc_norm_hidden.weight"]),
    ]
    x = torch.cat(both, -1) @ w["mtp.fc.weight"].T
    h = norm(x, w[at + "input_layernorm.weight"])
    query, gate = (h @ w[at + "self_attn.q_proj.weight"].T).view(T, HEADS, 2 * SIZE).chunk(2, -1)
    key, value = ((h @ w[f"{at}self_attn.{p}_proj.weight"].T).view(T, KV, SIZE).transpose(0, 1) for p in "kv")
    query = turned(norm(query, w[at + "self_attn.q_norm.weight"]).transpose(0, 1), theta)
    key = turned(norm(key, w[at + "self_attn.k_norm.weight"]), theta)
    key, value = (t.repeat_interleave(HEADS // KV, 0) for t in (key, value))
    scores = query @ key.transpose(1, 2) * SIZE**-0.5
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    out = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(0, 1)
    x = x + (out * gate.sigmoid()).reshape(T, -1) @ w[at + "self_attn.o_proj.weight"].T
    h = norm(x, w[at + "post_attention_layernorm.weight"])
    return norm(x + (gated if dense else mixed)(h, w, at + "mlp."), w["mtp.norm.weight"])


def with_images(family):
    """The model of text and images that Qwen3.5 is released as."""
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": E}
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 0, 0],
    }
    text = {**STATES[family], "rope_parameters": rope, "mtp_num_hidden_layers": 1}
    ids = {f"{name}_token_id": 96 for name in ("image", "video", "vision_start", "vision_end")}
    config = AutoConfig.for_model(family.removesuffix("_text"), text_config=text, vision_config=sizes, **ids)
    return AutoModelForImageTextToText.from_config(config)


def checkpoint(folder, family, fused=False, images=False):
    """A tiny target with an MTP layer on disk, the tensors of the layer, and the target as it is loaded."""
    (with_images(family) if images else stateful(family)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    weights = layer(family, torch.Generator().manual_seed(1))
    save_file(tensors | (fuse(weights) if fused else weights), folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder).eval(), weights


WAYS = [(f, {}) for f in FAMILIES]
WAYS += [(f, {"fused": True}) for f in FAMILIES if f != "qwen3_5_text"]
WAYS += [(f, {"images": True}) for f in FAMILIES if f != "qwen3_next"]


@pytest.mark.parametrize(
    ("family", "how"), WAYS, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "as released"
)
@torch.no_grad()
def test_the_logits_are_those_of_a_plain_computation(tmp_path, family, how):
    assert STATES[family]["num_attention_heads"] == HEADS
    model, weights = checkpoint(tmp_path, family, **how)
    assert model.config.model_type == family
    head = MTP.from_checkpoint(model)
    theta = model.config.rope_parameters["rope_theta"]
    draw = torch.Generator().manual_seed(0)
    tokens, state = torch.randint(0, 97, (12,), generator=draw), torch.randn(7, E, generator=draw)
    embedding, matrix = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    found = blocks(head, tokens[None], {"final": state[None]}, 4, torch.tensor([[7]]))[0, 0]
    for n in range(4):  # each further token is paired with the layer's own last output
        made = outputs(weights, embedding[tokens[1 : len(state) + 1]], state, theta, family == "qwen3_5_text")
        expected = made[-1] @ matrix.T
        torch.testing.assert_close(found[n], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        state = torch.cat([state, made[-1:]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_decodes_with_the_layer_that_it_ships(tmp_path, family):
    model, weights = checkpoint(tmp_path, family)
    model.generation_config.eos_token_id = None
    target, rounds = OwnCache(model), []
    draft = Head(MTP.from_checkpoint(target))
    for greedy in (False, True):
        base = sd.decoder(target).verifier(sd.Coupled()).sampling(temperature=0.0 if greedy else 0.8)
        plain = base.build().generate(PROMPTS, BUDGETS, seed=4, eos_token_id=())
        rounds.clear()
        made = (
            base.draft(draft, 3)
            .build()
            .generate(PROMPTS, BUDGETS, seed=4, eos_token_id=(), on_round=rounds.append)
        )
        assert made.ids == plain.ids
        assert made.stats.drafted > 10
    # greedily the layer proposes what a plain computation on the target's own states does
    embedding, matrix = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    compared = 0
    for r in rounds[1:]:
        for b, request in enumerate(r.context.request.tolist()):
            text, size = r.context.row(b), int(r.proposal.size[b])
            with torch.no_grad():
                state = model.base_model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
                for n in range(size):
                    after = embedding[torch.tensor([*text[1:], *r.proposal.tokens[b, :n].tolist()])]
                    out = outputs(weights, after, state, 1e4, family == "qwen3_5_text")[-1:]
                    assert int((out @ matrix.T).argmax()) == int(r.proposal.tokens[b, n]), (request, n)
                    state, compared = torch.cat([state, out]), compared + 1
    assert compared > 10


def test_a_decoder_with_a_shipped_layer_is_saved(tmp_path):
    model, _ = checkpoint(tmp_path / "target", "qwen3_5_text")
    target = OwnCache(model)
    decoder = sd.decoder(target).draft(Head(MTP.from_checkpoint(target)), 3).greedy().build()
    expected = decoder.generate(PROMPTS, BUDGETS, eos_token_id=())
    decoder.save(tmp_path / "saved")
    found = sd.load(tmp_path / "saved").build().generate(PROMPTS, BUDGETS, eos_token_id=())
    assert found.ids == expected.ids
    assert found.stats.accepted == expected.stats.accepted
