"""Checkpoints of other projects: what speculators computed with its own and with ours, and the layouts of the others."""

from __future__ import annotations

import ast
import json
import re

import pytest
import torch
from fixtures.digest import digest
from fixtures.export_speculators import CASES, FOLDER, export, target
from safetensors.torch import load_file, save_file

import specdec as sd
from specdec.drafts import heads
from specdec.drafts.heads import (
    MTP,
    DFlash,
    DFlash2,
    Domino,
    DSpark,
    Eagle3,
    Head,
    LiLiCorr,
    Medusa,
    PEagle,
    XPress,
)
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.zlab import taps_of
from specdec.masks import streaming
from specdec.training.anchored import steps


@pytest.fixture(scope="module")
def model():
    return target().double()


CLOSE = {"rtol": 1e-5, "atol": 3e-5}  # speculators computes norms in float32


def made(head, given, anchors, k):
    """The head's steps over the features of a fixture, as ``[A, k, K]``; its confidences ``[A, k]``; and the last memo."""
    parts = given["features"].double().chunk(len(head.taps), -1)
    found = list(steps(head, given["tokens"], dict(zip(head.taps, parts)), k, anchors[None]))
    sure = None if found[0].confidence is None else torch.stack([one.confidence[0] for one in found], 1)
    return torch.stack([one.logits[0] for one in found], 1), sure, found[-1].memo


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_speculators(model, case):
    head, given = (
        heads.load(FOLDER / case, model, dtype=torch.float64),
        load_file(FOLDER / case / "reference.safetensors"),
    )
    wanted, sure = given["unary_logits" if type(head) is DFlash2 else "logits"][0], None
    if type(head) is Eagle3:  # [T, steps, K]: each position in turn, with the tokens of the text
        anchors = torch.arange(1, 13)
        ours, *_ = made(head, given, anchors, 3)
        wanted = wanted[: len(anchors)]
    elif type(head) is MTP:
        ours = made(head, given, torch.arange(1, len(wanted) + 1), 1)[0][:, 0]
    elif type(head) is PEagle:  # entries of any positions and depths
        anchors = torch.arange(1, 12)
        every, *_ = made(head, given, anchors, 4)
        at = given["anchor_pos"]
        # Those of -1 have no committed pair, which decoding always has.
        kept = (at >= 0) & (at < len(anchors))
        ours, wanted = every[at[kept], given["depth"][kept]], wanted[kept]
        assert len(set(given["depth"][kept].tolist())) == 4
    else:  # blocks
        # All tokens are candidates.
        every, sure, memo = made(head.train(), given, given["anchors"], head.longest)
        ours, count = (memo.logits[0] if type(head) is DFlash2 else every), len(given["anchors"])
        wanted = wanted.unflatten(0, (count, -1))[:, head.first :]
        if type(head) is DFlash2:
            ids, scores = (
                given[key].unflatten(1, (count, -1))[0, :, head.first :]
                for key in ("training_candidate_ids", "candidate_logits")
            )
            torch.testing.assert_close(every.gather(-1, ids), scores, **CLOSE)
            assert (wanted.gather(-1, ids) - scores).abs().max() > 0.1
    assert ours.shape == wanted.shape
    assert wanted.std() > 0.5
    torch.testing.assert_close(ours, wanted, **CLOSE)
    assert (sure is None) == ("confidence" not in given)
    if sure is not None:
        theirs = given["confidence"].view(len(given["anchors"]), -1)[:, head.first :]
        torch.testing.assert_close(sure, theirs, **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_speculators_has_read_what_is_written_here(tmp_path, model, case):
    """``make_speculators.py read`` recorded that speculators computes its own logits with exactly these files."""
    export(case, tmp_path)
    there = json.loads((FOLDER / "read.json").read_text())["heads"][case]
    assert digest(tmp_path / case) == there["digest"], "export again, and run make_speculators.py read"
    assert there["difference"] < 1e-12
    theirs, ours = (load_file(folder / case / "model.safetensors") for folder in (FOLDER, tmp_path))
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "case", ["eagle3", "peagle", "dflash-anchor", "dflash2", "dspark-rnn", "mtp", "xpress"]
)
def test_a_head_of_speculators_drafts(model, case):
    plain = sd.decoder(sd.HFModel(model)).greedy().build().generate([[1, 2, 3], [4] * 9], 12)
    draft = Head(heads.load(FOLDER / case, model))
    out = (
        sd.decoder(sd.HFModel(model))
        .greedy()
        .draft(draft, length=3)
        .build()
        .generate([[1, 2, 3], [4] * 9], 12)
    )
    assert out.ids == plain.ids


# -- the layouts of the others, written here as their sources write them ---------------------------------------------------------

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
QWEN = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "use_cache": True,
}
BLOCK = {
    "input_layernorm": [16], "post_attention_layernorm": [16], "self_attn.q_proj": [32, 16], "self_attn.k_proj": [16, 16],
    "self_attn.v_proj": [16, 16], "self_attn.o_proj": [16, 32], "mlp.gate_proj": [24, 16], "mlp.up_proj": [24, 16], "mlp.down_proj": [16, 24],
}  # fmt: skip
PAIR = BLOCK | {
    "hidden_norm": [16],
    "self_attn.q_proj": [32, 32],
    "self_attn.k_proj": [16, 32],
    "self_attn.v_proj": [16, 32],
}
NORMS = {"self_attn.q_norm": [8], "self_attn.k_norm": [8]}
ENDS = {"embed_tokens": [64, 16], "lm_head": [64, 16]}
MARKOV = {"markov_head.markov_w1": [64, 5], "markov_head.markov_w2": [64, 5]}
SURE = {"confidence_head.proj": [1, 21], "confidence_head.proj.bias": [1]}
IDS = list(range(3, 63, 3))


def within(prefix, table):
    return {f"{prefix}.{name}": shape for name, shape in table.items()}


def flash(layers, names=("fc", "hidden_norm")):
    blocks = {
        name: shape for i in range(layers) for name, shape in within(f"layers.{i}", BLOCK | NORMS).items()
    }
    return {names[0]: [16, 48], names[1]: [16], "norm": [16], **blocks}


Z_LAB = {
    **SIZES, **QWEN, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "num_target_layers": 8, "layer_types": ["full_attention"] * 2,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "max_window_layers": 2,
}  # fmt: skip
INNER = {"mask_token_id": 63, "target_layer_ids": [1, 3, 5]}
DSPARK = {
    "markov_rank": 5,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
EAGLE = {
    **SIZES,
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "draft_vocab_size": 20,
    "rms_norm_eps": 1e-5,
}
OWN_HEAD = {"norm": [16], "lm_head": [20, 16]}
CONVOLUTIONS = {
    f"layers.{i}.{name}": shape
    for i in range(2)
    for kind in ("attention_conv", "mlp_conv")
    for name, shape in ((f"{kind}.base_kernel:", [2, 2, 16]), (f"{kind}.kernel_projection", [16, 16]))
}
LATTICE = {
    f"lilicorr_{name}": value
    for name, value in {
        "enabled": True, "candidate_topk": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "mlp_ratio": 1.5, "factor_dim": 3,
        "vector_eps": 1e-6, "logit_scale": 3.0,
    }.items()
}  # fmt: skip


def correlator(**mlps):
    """The tensors of a LiLiCorr head; ``mlps``: the names of the parts of its MLPs."""
    linear = {
        "token_proj": [8, 16], "pass_hidden_proj": [8, 16], "context_proj": [8, 16], "factor_input_proj": [8, 24], "out_head": [3, 8],
        "in_head": [3, 8], "anchor_out_head": [3, 8], "layers.0.attn.out_proj": [8, 8], mlps["up"]: [8, 5], mlps["down"]: [8, 8],
        mlps["layer_up"]: [12, 8], mlps["layer_down"]: [8, 12],
    }  # fmt: skip
    found = {
        name: shape
        for part, shape in linear.items()
        for name, shape in ((part, shape), (f"{part}.bias", shape[:1]))
    }
    found |= {mlps["norm"]: [5], f"{mlps['norm']}.bias": [5]}
    found |= {name: [8] for name in ("output_norm", "anchor_norm", "layers.0.attn_norm", "layers.0.mlp_norm")}
    found |= {
        "slot_embedding:": [1, 1, 3, 1, 8], "rank_embedding:": [1, 1, 1, 4, 8], "relative_slot_bias:": [2, 7], "same_slot_bias:": [2],
        "layers.0.attn.in_proj_weight:": [24, 8], "layers.0.attn.in_proj_bias:": [24],
    }  # fmt: skip
    return within("lilicorr", found)


VLLM = {
    "up": "feature_mlp.up_proj", "down": "feature_mlp.down_proj", "norm": "feature_norm", "layer_up": "layers.0.mlp.up_proj",
    "layer_down": "layers.0.mlp.down_proj",
}  # fmt: skip
MODELOPT = {
    "up": "feature_mlp.1", "down": "feature_mlp.3", "norm": "feature_mlp.0", "layer_up": "layers.0.mlp.0", "layer_down": "layers.0.mlp.2",
}  # fmt: skip

# name -> config, tensors (without ".weight", or with a colon where they have no such ending), the class, its taps, some of its settings
LAYOUTS = {
    "SafeAILab": (
        {**EAGLE, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "pad_token_id": 0},
        {"fc": [16, 48], **within("midlayer", PAIR), **OWN_HEAD},
        Eagle3, (2, 4, 5), {"head_norms": False, "norm_output": False},
    ),
    "SpecForge, EAGLE-3.1": (
        {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True},
        {"fc": [16, 48], "fc_norm.0": [16], "fc_norm.1": [16], "fc_norm.2": [16], **within("midlayer", PAIR), **OWN_HEAD},
        Eagle3, (2, 4, 5), {"fc_norm": True, "norm_output": False},
    ),
    "SpecForge, P-EAGLE": (
        {
            **EAGLE, "architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "norm_before_residual": True, "mask_token_id": 9,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]},
        },
        {
            "fc": [16, 48], "mask_hidden": [1, 1, 48], **within("layers.0", PAIR), **within("layers.1", BLOCK), **OWN_HEAD,
            "embed_tokens": [64, 16],
        },
        PEagle, (1, 3, 7), {"blocks": 2, "norm_before_residual": True, "mask_token": 9, "own_embedding": True},
    ),
    "SpecForge, DSpark": (
        {
            **Z_LAB, "architectures": ["DSparkDraftModel"], "block_size": 3,
            "dflash_config": {**INNER, **DSPARK, "attention_mode": "gqa", "projector_type": "dspark", "confidence_head_alpha": 1.0},
        },
        {**flash(2), **MARKOV, **SURE},
        DSpark, (2, 4, 6), {"block_size": 3, "anchor_first": True, "rank": 5, "confidence": True},
    ),
    "z-lab": (
        {**Z_LAB, "block_size": 4, "dflash_config": INNER},
        flash(2),
        DFlash, (2, 4, 6), {"block_size": 4, "anchor_first": False, "mask_token": 63, "own_head": False},
    ),
    "z-lab, newer": (
        {**Z_LAB, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "dflash_config": {"block_size": 4, "mask_token_id": 63}},
        flash(3),
        DFlash, (2, 4, 6), {"block_size": 4, "blocks": 3},
    ),
    "z-lab, DFlash2": (
        {
            **Z_LAB, "architectures": ["DFlash2DraftModel"], "is_causal": False,
            "dflash_config": {
                **INNER, "block_size": 4, "projector_type": "dflash2", "causal": False, "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5,
                "selector_top_k": 6,
            },
        },
        {
            **flash(2), **CONVOLUTIONS, "candidate_selector.predecessor_codebook:": [64, 5], "candidate_selector.successor_codebook:": [64, 5],
            "candidate_selector.hidden_projection": [5, 16],
        },
        DFlash2, (2, 4, 6), {"block_size": 4, "conv_group": 4, "rank": 5, "top_k": 6},
    ),
    "SpecForge, Domino": (
        {
            **Z_LAB, "architectures": ["DominoDraftModel"], "block_size": 4, "emb_dim": 5, "auto_map": {"AutoModel": "domino.DominoDraftModel"},
            "dflash_config": {
                **INNER, "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 5, "gru_hidden_dim": 7, "shift_label": True,
            },
        },
        {
            **flash(2), "prefix_gru.weight_ih_l0:": [21, 16], "prefix_gru.weight_hh_l0:": [21, 7], "embed_proj.0": [5, 23], "embed_proj.2": [64, 5],
        },
        Domino, (2, 4, 6), {"block_size": 4, "anchor_first": True, "rank": 5, "state": 7, "prefix": 1},
    ),
    "ModelOpt, Domino": (
        {
            **Z_LAB, "block_size": 4, "emb_dim": 5,
            "dflash_config": {**INNER, "projector_type": "domino", "causal": False, "emb_dim": 5, "gru_hidden_dim": 7},
        },
        {
            **flash(2), "prefix_gru.weight_ih_l0:": [21, 16], "prefix_gru.weight_hh_l0:": [21, 7], "embed_proj.0": [5, 23], "embed_proj.2": [64, 5],
        },
        Domino, (2, 4, 6), {"anchor_first": False, "prefix": 0},
    ),
    "vLLM, LiLiCorr": (
        {
            **Z_LAB, "architectures": ["LiLiCorrDraftModel"], "block_size": 4, "has_own_lm_head": False,
            "dflash_config": {**INNER, **LATTICE, "block_size": 4},
        },
        {**flash(2), **correlator(**VLLM)},
        LiLiCorr, (2, 4, 6), {"top_k": 4, "inner": 8, "scale": 3.0, "conv_size": 0, "own_head": False},
    ),
    "ModelOpt, LiLiCorr": (
        {
            **Z_LAB, "architectures": ["LiLiCorrDraftModel"], "block_size": 4,
            "dflash_config": {
                **INNER, **LATTICE, "projector_type": "lilicorr", "causal": False, "conv_kernel_size": 2, "conv_group_size": 4,
            },
        },
        {**flash(2), **CONVOLUTIONS, **correlator(**MODELOPT)},
        LiLiCorr, (2, 4, 6), {"heads": 2, "layers": 1, "mlp_ratio": 1.5, "factors": 3, "conv_size": 2, "conv_group": 4},
    ),
    "XPress": (
        {
            **Z_LAB, "architectures": ["Qwen3XPressModel"], "block_size": 4, "sample_from_anchor": False, "dflash_config": INNER, "xpress_rank": 5,
            "xpress_mlp_hidden": 15, "xpress_block_size": 4, "xpress_num_passes": 3, "draft_vocab_size": 64,
        },
        {
            **flash(2), "xpress_head.w1": [64, 5], "xpress_head.w2": [64, 5], "xpress_head.down_h": [5, 16], "xpress_head.down_g": [5, 16],
            "xpress_head.in_proj": [5, 15], "xpress_head.mix.L:": [5, 4, 4], "xpress_head.mlp.gate_proj": [15, 5], "xpress_head.mlp.up_proj": [15, 5],
            "xpress_head.mlp.down_proj": [5, 15],
        },
        XPress, (2, 4, 6), {"rank": 5, "mlp_ratio": 3, "anchor_first": False},
    ),
    "JetSpec": (
        {**Z_LAB, "block_size": 4, "dflash_config": {**INNER, "causal_head": True}},
        flash(2),
        DFlash, (2, 4, 6), {"block_size": 4, "causal": True},
    ),
    "AutoModel, DFlash2": (
        {
            **Z_LAB, "architectures": ["Qwen3DFlash2DraftModel"], "is_causal": False, "block_size": 4,
            "dflash_config": {
                **INNER, "block_size": 4, "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6,
            },
        },
        {
            **flash(2), **CONVOLUTIONS, "candidate_selector.predecessor_codebook:": [64, 5], "candidate_selector.successor_codebook:": [64, 5],
            "candidate_selector.hidden_projection": [5, 16],
        },
        DFlash2, (2, 4, 6), {"block_size": 4, "conv_group": 4, "rank": 5, "top_k": 6, "causal": False},
    ),
    "AutoModel, Domino": (
        {
            **Z_LAB, "architectures": ["Qwen3DFlashDraftModel"], "block_size": 4, "is_causal": False,
            "dflash_config": {
                **INNER, "block_size": 4, "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 5, "gru_hidden_dim": 7, "shift_label": True,
            },
        },
        {
            **flash(2), "prefix_gru.weight_ih_l0:": [21, 16], "prefix_gru.weight_hh_l0:": [21, 7], "embed_proj.0": [5, 23], "embed_proj.2": [64, 5],
        },
        Domino, (2, 4, 6), {"block_size": 4, "anchor_first": True, "prefix": 1},
    ),
    "DeepSpec, DSpark": (
        {
            **SIZES, **QWEN, **DSPARK, "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 1, "num_target_layers": 8, "block_size": 3,
            "mask_token_id": 63, "target_layer_ids": [-1, 3, 5], "num_anchors": 512, "layer_types": ["full_attention"],
        },
        {**flash(1), **MARKOV, **SURE, **ENDS},
        DSpark, (0, 4, 6), {"block_size": 3, "anchor_first": True, "confidence_with_markov": True, "own_head": True},
    ),
    "DeepSpec, no Markov head": (
        {
            **SIZES, **QWEN, "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 1, "num_target_layers": 8, "block_size": 3,
            "mask_token_id": 63, "target_layer_ids": [1, 3, 5], "num_anchors": 512, "markov_rank": 0, "enable_confidence_head": False,
        },
        {**flash(1), **ENDS},
        DFlash, (2, 4, 6), {"anchor_first": True},
    ),
    "DeepSpec, EAGLE-3": (
        {
            **SIZES, **QWEN, "architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 1, "num_target_layers": 8, "ttt_length": 7,
            "target_layer_ids": [1, 3, 5, 6], "draft_num_hidden_layers": 1, "step_loss_decay": 0.8, "target_model_name_or_path": "x/y",
        },
        {"fc": [16, 64], **within("layers.0", PAIR | NORMS), "norm": [16], **ENDS},
        Eagle3, (2, 4, 6, 7), {"head_norms": True, "own_embedding": True},
    ),
    "Medusa": (
        {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "x/y"},
        {"0.0.linear": [16, 16], "0.0.linear.bias": [16], "0.1": [64, 16], "1.0.linear": [16, 16], "1.0.linear.bias": [16], "1.1": [64, 16]},
        Medusa, ("final",), {"heads": 2, "blocks": 1, "own_head": True},
    ),
    "transformers": (
        {
            **{name: n for name, n in SIZES.items() if name != "vocab_size"}, "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "sliding_window": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "block_size": 4, **INNER,
        },
        flash(2, ("encoder.fc", "encoder.output_norm_enc")),
        DFlash, (2, 4, 6), {"block_size": 4, "own_embedding": False},
    ),
}  # fmt: skip
RENAMED = (
    (r"^midlayer", "layers.0"),
    (r"^encoder\.fc", "fc"),
    (r"^encoder\.output_norm_enc", "hidden_norm"),
    (r"^(\d\.0\.linear)", r"layers.\1"),
    (r"^(\d)\.1\.weight", r"lm_heads.\1.weight"),
    (r"^lilicorr\.feature_mlp\.0", "lilicorr.feature_norm"),
    (r"^(lilicorr\.feature_mlp)\.1", r"\1.up_proj"),
    (r"^(lilicorr\.feature_mlp)\.3", r"\1.down_proj"),
    (r"^(lilicorr\.layers\.0\.mlp)\.0", r"\1.up_proj"),
    (r"^(lilicorr\.layers\.0\.mlp)\.2", r"\1.down_proj"),
    (r"^(lilicorr\.layers\.0\.attn\.in_proj)_", r"\1."),
    (r"^prefix_gru\.weight_ih_l0", "prefix_gru.of_token.weight"),
    (r"^prefix_gru\.weight_hh_l0", "prefix_gru.of_state.weight"),
    (r"^xpress_head\.w1", "refiner_head.token_embed"),
    (r"^xpress_head\.w2", "refiner_head.readout"),
    (r"^xpress_head\.mix\.L", "refiner_head.mix_l"),
    (r"^xpress_head\.mlp\.(\w+)_proj", r"refiner_head.mlp_\1"),
    (r"^xpress_head", "refiner_head"),
)
REDUCED = ("SafeAILab", "SpecForge, EAGLE-3.1", "SpecForge, P-EAGLE")


def written(folder, name, config=(), tensors=(), without=()):
    """A checkpoint of a layout with changes of its config and of its tensors."""
    fields, shapes, *_ = LAYOUTS[name]
    draw = torch.Generator().manual_seed(5)
    found = {
        f"{n}.weight" if n[-4:] not in ("bias", "dden") and n[-1] != ":" else n.rstrip(":"): torch.randn(
            s, generator=draw
        )
        * 0.3
        for n, s in shapes.items()
    }
    if name in REDUCED:
        there = torch.zeros(64, dtype=torch.bool)
        there[IDS] = True
        found |= {"d2t": torch.tensor(IDS) - torch.arange(20), "t2d": there}
    found = {n: t for n, t in {**found, **dict(tensors)}.items() if n not in without}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**fields, **dict(config)}))
    save_file(found, folder / "model.safetensors")
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(tmp_path, model, name):
    tensors = written(tmp_path, name)
    head = heads.load(tmp_path, model)
    _, _, kind, taps, settings = LAYOUTS[name]
    assert (type(head), head.taps) == (kind, taps)
    assert {key: head.settings[key] for key in settings} == settings
    mine = head.state_dict()
    for label, value in tensors.items():
        ours = label
        for theirs, name_here in RENAMED:
            ours = re.sub(theirs, name_here, ours)
        if label != "t2d":
            assert torch.equal(mine.pop(ours), value), label
    assert not mine
    assert head.ids.tolist() == (IDS if name in REDUCED else list(range(64)))
    if name != "Medusa":
        assert head.config.rope_parameters["rope_theta"] == {"qwen3": 1e6, "llama": 1e4}.get(
            LAYOUTS[name][0]["model_type"], 5e5
        )
    copy = sd.HFModel(target())
    plain = sd.decoder(copy).greedy().build().generate([[1, 2, 3]], 6)
    out = sd.decoder(copy).greedy().draft(Head(head), length=2).build().generate([[1, 2, 3]], 6)
    assert out.ids == plain.ids


def test_copies_of_the_targets_ends_are_not_kept(tmp_path, model):
    ends = {"embed_tokens.weight": model.model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    written(
        tmp_path,
        "DeepSpec, EAGLE-3",
        tensors={n: t.detach().to(torch.bfloat16).clone() for n, t in ends.items()},
    )
    head = heads.load(tmp_path, model)
    assert head.embed_tokens is None
    assert head.lm_head is None
    heads.export(head, tmp_path / "out", model, verifier="x/y")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(again[n], t.float()) for n, t in ends.items())


def test_other_files_of_weights(tmp_path, model):
    tensors = written(tmp_path / "whole", "SafeAILab")
    whole = heads.load(tmp_path / "whole", model).state_dict()
    config = (tmp_path / "whole" / "config.json").read_text()
    for kind in ("bin", "parts"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(config)
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    names, index = sorted(tensors), tmp_path / "parts" / "model.safetensors.index.json"
    for part in (0, 1):
        save_file({n: tensors[n] for n in names[part::2]}, tmp_path / "parts" / f"{part}.safetensors")
    index.write_text(json.dumps({"weight_map": {n: f"{i % 2}.safetensors" for i, n in enumerate(names)}}))
    for kind in ("bin", "parts"):
        again = heads.load(tmp_path / kind, model).state_dict()
        assert all(torch.equal(again[n], t) for n, t in whole.items())
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../whole/model.safetensors"}}))
    with pytest.raises(ValueError, match="outside its folder"):
        heads.load(tmp_path / "parts", model)
    (tmp_path / "bin" / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks its weights, model\.safetensors"):
        heads.load(tmp_path / "bin", model)


def test_a_hub_id_is_downloaded(tmp_path, model, monkeypatch):
    from specdec.drafts import hub

    written(tmp_path, "z-lab")
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    assert type(heads.load("z-lab/Tiny-DFlash", model)) is DFlash
    assert asked == ["z-lab/Tiny-DFlash"]

    def offline(name, **_):
        raise OSError("no connection")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"could not be read from the hub \(no connection\)"):
        heads.load("z-lab/Tiny-DFlash", model)


WRONG = {
    "a tensor is missing": (
        "SafeAILab",
        {"without": ["midlayer.mlp.up_proj.weight"]},
        r"lacks the tensor 'midlayer\.mlp\.up_proj\.weight'",
    ),
    "a tensor has another shape": (
        "SafeAILab",
        {"tensors": {"midlayer.self_attn.q_proj.weight": torch.zeros(32, 16)}},
        r"'midlayer\.self_attn\.q_proj\.weight' is \[32, 16\] and must be \[32, 32\]",
    ),
    "a tensor is unknown": (
        "z-lab",
        {"tensors": {"gate.weight": torch.zeros(1)}},
        "has a tensor 'gate.weight'",
    ),
    "a map of ids": (
        "SafeAILab",
        {"tensors": {"d2t": torch.tensor(IDS) + 40}, "without": ["t2d"]},
        "d2t holds no offsets",
    ),
    "a map of other ids": ("SafeAILab", {"tensors": {"d2t": torch.arange(20)}}, "d2t holds no offsets"),
    "unknown fields": (
        "z-lab",
        {"config": {"use_gates": True, "dflash_config": {**INNER, "noise": 0.1}, "block_size": 4}},
        r"not known here, use_gates, dflash_config\.noise",
    ),
    "a missing field": ("z-lab", {"config": {"hidden_size": None}}, "lacks hidden_size"),
    "a missing block size": ("z-lab", {"config": {"block_size": None}}, "lacks block_size"),
    "a missing mask token": (
        "z-lab",
        {"config": {"dflash_config": {}}},
        "no mask token: give mask_token=",
    ),
    "a bias": ("z-lab", {"config": {"attention_bias": True}}, "attention_bias is True"),
    "windows": (
        "z-lab",
        {"config": {"layer_types": ["sliding_attention", "full_attention"]}},
        "some layers have a sliding window .* use_sliding_window is False",
    ),
    "another target": (
        "z-lab",
        {"config": {"num_target_layers": 36}},
        "num_target_layers is 36, and this target has 8 blocks",
    ),
    "the last layer": (
        "z-lab",
        {"config": {"dflash_config": {**INNER, "target_layer_ids": [1, 3, 7]}}},
        "libraries differ",
    ),
    "another vocabulary": ("DeepSpec, EAGLE-3", {"config": {"vocab_size": 65}}, "must be"),
    "rotary positions": (
        "z-lab",
        {"config": {"rope_scaling": {"type": "dynamic", "factor": 2.0}}},
        r"rotary positions are .* write such rope_parameters into its config\.json",
    ),
    "rotary positions by kind of layer": (
        "z-lab",
        {
            "config": {
                "rope_theta": None,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                },
            }
        },
        "the same for all layers",
    ),
    "several pair layers": (
        "DeepSpec, EAGLE-3",
        {"config": {"num_hidden_layers": 2}},
        "num_hidden_layers is 2",
    ),
    "no norm": ("SpecForge, EAGLE-3.1", {"config": {"norm_output": False}}, "norm_output is False"),
    "no mask token": (
        "SpecForge, P-EAGLE",
        {"config": {"mask_token_id": None}},
        r"no mask token: give mask_token=",
    ),
    "a confidence alone": (
        "DeepSpec, no Markov head",
        {"config": {"enable_confidence_head": True}},
        "no Markov head",
    ),
    "a part of a reranker": (
        "vLLM, LiLiCorr",
        {"config": {"dflash_config": {**INNER, **LATTICE, "lilicorr_logit_scale": None}}},
        r"lacks dflash_config\.lilicorr_logit_scale",
    ),
    "a reranker that is off": (
        "vLLM, LiLiCorr",
        {"config": {"dflash_config": {**INNER, **LATTICE, "lilicorr_enabled": False}}},
        "lilicorr_enabled is False",
    ),
    "an output matrix that is not there": (
        "vLLM, LiLiCorr",
        {"config": {"has_own_lm_head": True}},
        r"has_own_lm_head is True and there is no lm_head\.weight",
    ),
    "windows of a reranker": (
        "vLLM, LiLiCorr",
        {
            "config": {
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 8,
                "use_sliding_window": True,
            }
        },
        "give windows_causal=True or False",
    ),
    "two block sizes": (
        "z-lab",
        {"config": {"block_size": 4, "dflash_config": {**INNER, "block_size": 8}}},
        r"block_size is 4 and dflash_config\.block_size 8",
    ),
    "no rank": ("XPress", {"config": {"xpress_rank": 0}}, "xpress_mlp_hidden is 15 and xpress_rank 0"),
    "a refiner of other blocks": ("XPress", {"config": {"xpress_block_size": 8}}, "xpress_block_size is 8"),
    "a width of a refiner": ("XPress", {"config": {"xpress_mlp_hidden": 12}}, "xpress_mlp_hidden is 12 and"),
    "a refiner of some tokens": ("XPress", {"config": {"draft_vocab_size": 20}}, "draft_vocab_size is 20"),
    "another class": (
        "z-lab",
        {"config": {"architectures": ["Gemma4DSparkModel"]}},
        r"known are those of speculators",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(tmp_path, model, what):
    name, changes, message = WRONG[what]
    written(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=message):
        heads.load(tmp_path, model)


def test_what_a_checkpoint_lacks_can_be_given(tmp_path, model):
    written(tmp_path, "SpecForge, P-EAGLE", config={"mask_token_id": None})
    head = heads.load(tmp_path, model, mask_token=11, depth=3)
    assert head.settings["mask_token"] == 11
    assert head.longest == 3
    written(tmp_path, "z-lab", config={"use_gates": True, "layer_types": ["sliding_attention"] * 2})
    head = heads.load(
        tmp_path, model, ignore=("use_gates", "layer_types"), mask=streaming(8), taps=(1, 2, "final")
    )
    assert head.mask == streaming(8)
    assert head.taps == (1, 2, "final")


def test_an_output_matrix_is_read_where_the_config_says_so(tmp_path, model):
    """Engines read LiLiCorr's with ``has_own_lm_head`` alone."""
    extra = {"lm_head.weight": torch.randn(64, 16)}
    for own in (True, False):
        written(tmp_path, "vLLM, LiLiCorr", config={"has_own_lm_head": own}, tensors=extra)
        assert heads.load(tmp_path, model).settings["own_head"] is own


def test_windows_of_modelopt(tmp_path, model):
    inner = {**INNER, **LATTICE, "use_swa": True, "swa_window_size": 9}
    for causal in (True, False, None):
        more = {} if causal is None else {"causal": causal}
        written(tmp_path, "vLLM, LiLiCorr", config={"dflash_config": {**inner, **more}})
        given = {} if causal is not None else {"windows_causal": True}
        settings = heads.load(tmp_path, model, **given).settings
        assert settings["windows"] == [9, 9]
        assert settings["windows_from"] == "slot"
        assert settings["windows_causal"] is (causal is not False)


def test_windows_of_a_reranker_whose_direction_jetspecs_field_has(tmp_path, model):
    inner = {**INNER, **LATTICE, "use_swa": True, "swa_window_size": 9, "causal_head": True}
    written(tmp_path, "vLLM, LiLiCorr", config={"dflash_config": inner})
    assert heads.load(tmp_path, model).causal


def asked_to_ignore(tmp_path, model):
    """The fields that a refusal says to ignore."""
    with pytest.raises(ValueError, match="give ignore=") as caught:
        heads.load(tmp_path, model)
    return ast.literal_eval(re.search(r"ignore=(\(.*?\))", str(caught.value))[1])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("z-lab", {"mlp_bias": True}),
        ("SpecForge, EAGLE-3.1", {"norm_output": "both"}),
        ("z-lab, newer", {"dflash_config": {"block_size": 4, "mask_token_id": 63, "projector_type": "own"}}),
    ],
)
def test_a_value_without_code_can_be_ignored(tmp_path, model, name, config):
    written(tmp_path, name)
    expected = heads.load(tmp_path, model)
    written(tmp_path, name, config=config)
    found = heads.load(tmp_path, model, ignore=asked_to_ignore(tmp_path, model))
    assert (type(found), found.settings) == (type(expected), expected.settings)


@pytest.mark.parametrize("name", ["DeepSpec, DSpark", "SpecForge, DSpark"])
def test_a_confidence_without_a_markov_head_can_be_ignored(tmp_path, model, name):
    fields = LAYOUTS[name][0]
    none = {"markov_rank": 0}
    config = {"dflash_config": {**fields["dflash_config"], **none}} if "dflash_config" in fields else none
    written(tmp_path, name, config=config, without=[f"{n}.weight" for n in MARKOV])
    ignore = asked_to_ignore(tmp_path, model)
    assert type(heads.load(tmp_path, model, ignore=ignore)) is DFlash


def test_layers_are_rounded_as_z_lab_does():
    """Half a layer is rounded to an even one, which 1 + 7 * (61 / 14) would miss."""
    nothing = Fields("x", {})
    assert taps_of(nothing, nothing, 15, 65)[7] == 33


def test_taps_replace_ids_with_the_last_layer(tmp_path, model):
    """The remedy that the refusal of the target's last layer names."""
    inner = {**INNER, "target_layer_ids": [1, 3, 7]}
    written(tmp_path, "z-lab", config={"block_size": 4, "dflash_config": inner})
    assert heads.load(tmp_path, model, taps=(2, 4, "final")).taps == (2, 4, "final")
    written(tmp_path, "DeepSpec, EAGLE-3", config={"target_layer_ids": [1, 3, 5, 7]})
    assert heads.load(tmp_path, model, taps=(2, 4, 6, 8)).taps == (2, 4, 6, 8)
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 7]}
    written(tmp_path, "SpecForge, P-EAGLE", config={"eagle_config": ids})
    assert heads.load(tmp_path, model, taps=(1, 3, 8)).taps == (1, 3, 8)


def test_rotary_positions_by_kind_of_layer(tmp_path, model):
    """They are not taken for none, which would be the default."""
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 700.0}}
    written(tmp_path, "z-lab", config={"rope_theta": None, "rope_parameters": rope})
    assert heads.load(tmp_path, model).config.rope_parameters["rope_theta"] == 700


def test_ids_in_place_of_offsets_are_recognised(tmp_path, model):
    written(tmp_path, "SafeAILab", tensors={"d2t": torch.tensor(IDS)})
    assert heads.load(tmp_path, model).ids.tolist() == IDS


def test_without_the_other_map_ids_are_read_as_offsets(tmp_path, model):
    written(tmp_path, "SafeAILab", tensors={"d2t": torch.arange(0, 40, 2)}, without=["t2d"])
    assert heads.load(tmp_path, model).ids.tolist() == list(range(0, 60, 3))


def test_a_map_of_the_whole_vocabulary_is_none(tmp_path, model):
    whole = {
        "d2t": torch.zeros(64, dtype=torch.long),
        "t2d": torch.ones(64, dtype=torch.bool),
        "lm_head.weight": torch.randn(64, 16),
    }
    written(tmp_path, "SafeAILab", tensors=whole, config={"draft_vocab_size": 64})
    assert heads.load(tmp_path, model).d2t is None


def test_our_own_folder_is_read(tmp_path, model):
    head = Eagle3.from_target(sd.HFModel(model), norm_output=True)
    head.save_pretrained(tmp_path)
    again = heads.load(tmp_path, model, dtype=torch.float32)
    assert again.settings == head.settings
    assert again.dtype == torch.float32
    assert again.ends is not None
    with pytest.raises(TypeError, match="with its own settings"):
        heads.load(tmp_path, model, taps=(1, 2, 3))
    with pytest.raises(FileNotFoundError, match=r"has neither head\.json nor config\.json"):
        heads.load(tmp_path / "elsewhere", model)
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "head.json").unlink()
    with pytest.raises(ValueError, match="holds a list"):
        heads.load(tmp_path, model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        heads.load(tmp_path, model)
