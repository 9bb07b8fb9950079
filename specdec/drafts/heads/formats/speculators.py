"""Checkpoints of vLLM's library speculators (0.9): EAGLE-3, P-EAGLE, DFlash, DFlash2, DSpark, XPress and MTP.

Tensors have the names of our classes, except MTP's. The body's config is a field, ``transformer_layer_config``. Ids of layers are counted as here: ``l`` is
the output of block ``l``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.dflash2 import DFlash2
from specdec.drafts.heads.dspark import DSpark
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.formats.body import body_of, windows_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import RESIDUAL, Format, Plan
from specdec.drafts.heads.mtp import MTP
from specdec.drafts.heads.peagle import PEagle
from specdec.drafts.heads.xpress import XPress

FLAGS = ("fc_norm", "norm_before_fc", "norm_output", RESIDUAL)
MARKOV = {"rank": "markov_rank", "markov": "markov_head_type"}
CONFIDENCE = {"confidence": "enable_confidence_head", "confidence_with_markov": "confidence_head_with_markov"}
CONVOLUTIONS = {
    "conv_size": "conv_kernel_size",
    "conv_group": "conv_group_size",
    "rank": "selector_rank",
    "top_k": "selector_top_k",
}
REFINER = {"rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio"}
MTP_NAMES = {
    "mtp_layers.0.input_proj.": "layers.0.eh_proj.",
    "mtp_layers.0.token_layernorm.": "layers.0.enorm.",
    "mtp_layers.0.hidden_layernorm.": "layers.0.hnorm.",
    "mtp_layers.0.final_layernorm.": "layers.0.norm.",
    "mtp_layers.0.": "layers.0.",
}
VERIFIER = ("verifier_norm.", "verifier_lm_head.")  # the target's, which are loaded with it


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: a kind of head for which there is no class, or as ``body_of``.
    """
    kind = fields.get("speculators_model_type")
    if kind not in KINDS:
        raise ValueError(
            f"{fields.source}: speculators_model_type is {kind!r}; heads are {', '.join(map(repr, KINDS))}"
        )
    fields.skip(
        "speculators_version",
        "speculators_config",
        "draft_vocab_size",
        "embed_requires_grad",
        "has_no_defaults_at_init",
    )
    layer = fields.inside("transformer_layer_config", needed=True)
    fields.only("target_hidden_size", layer.need("hidden_size"))
    config = body_of(layer, vocab_size, blocks, windows=kind != "mtp")
    return KINDS[kind](fields, layer, config, blocks)


def _eagle3(fields: Fields, layer: Fields, config: Any, blocks: int) -> Plan:
    """Where ``norm_before_residual`` is missing, speculators takes False for both kinds, and vLLM True for EAGLE-3 and False for P-EAGLE."""
    taps = fields.get("eagle_aux_hidden_state_layer_ids", [2, blocks // 2, blocks - 3])
    settings = {name: fields.get(name, False) for name in FLAGS}
    if fields.get("speculators_model_type") == "eagle3":
        settings[RESIDUAL] = fields.get(RESIDUAL)
    settings |= {
        "blocks": config.num_hidden_layers,
        "windows": windows_of(layer, config.num_hidden_layers),
        "head_norms": layer.get("model_type", "qwen3") == "qwen3",
    }
    return Plan(Eagle3, config, taps, settings, drop=VERIFIER)


def _peagle(fields: Fields, layer: Fields, config: Any, blocks: int) -> Plan:
    made = _eagle3(fields, layer, config, blocks)
    depth = fields.get("speculators_config", {}).get("proposal_methods", [{}])[0].get("speculative_tokens", 8)
    settings = {**made.settings, "depth": depth, "mask_token": fields.need("mask_token_id")}
    return Plan(PEagle, config, made.taps, settings, drop=VERIFIER)


def _dflash(
    fields: Fields,
    layer: Fields,
    config: Any,
    blocks: int,
    anchor_first: bool = False,
    both_directions: bool = False,
) -> Plan:
    """``anchor_first`` and ``both_directions``: the defaults of the kind. Layers without a window attend in both directions, whatever the field says."""
    settings = {
        "blocks": config.num_hidden_layers,
        "windows": windows_of(layer, config.num_hidden_layers),
        "windows_causal": not fields.get("sliding_window_non_causal", both_directions),
        "block_size": fields.get("block_size", 8),
        "anchor_first": fields.get("sample_from_anchor", anchor_first),
        "mask_token": fields.need("mask_token_id"),
    }
    return Plan(DFlash, config, fields.need("aux_hidden_state_layer_ids"), settings, drop=VERIFIER)


def _dspark(fields: Fields, layer: Fields, config: Any, blocks: int) -> Plan:
    made = _dflash(fields, layer, config, blocks, anchor_first=True)
    return with_markov(
        fields,
        made,
        {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True},
    )


def with_markov(fields: Fields, made: Plan, default: Mapping[str, Any]) -> Plan:
    """A DSpark head on a plan of its DFlash part; ``default``: of the format's fields. Rank 0 is DFlash.

    Raises:
        ValueError: a confidence head without a Markov head, unless its field is ignored.
    """
    values = {"markov_head_type": "vanilla", **default}
    found = {name: fields.get(theirs, values[theirs]) for name, theirs in {**MARKOV, **CONFIDENCE}.items()}
    if not found["rank"]:
        switch = f"{fields.where}{CONFIDENCE['confidence']}"
        if switch in fields.ignore:
            return replace(made, drop=(*made.drop, "confidence_head.", "logit_head.confidence_head."))
        if found["confidence"]:
            raise ValueError(
                f"{fields.source}: it has a confidence head and no Markov head, for which there is no class: give ignore=({switch!r},) to read it "
                "as DFlash, without its confidence"
            )
        return made
    return Plan(DSpark, made.config, made.taps, {**made.settings, **found}, made.names, made.drop)


def _dflash2(fields: Fields, layer: Fields, config: Any, blocks: int) -> Plan:
    made = _dflash(fields, layer, config, blocks, both_directions=True)
    default = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    found = {name: fields.get(theirs, default[theirs]) for name, theirs in CONVOLUTIONS.items()}
    return Plan(DFlash2, config, made.taps, {**made.settings, **found}, drop=VERIFIER)


def _xpress(fields: Fields, layer: Fields, config: Any, blocks: int) -> Plan:
    """``num_jacobi_passes`` is an engine's; the tokens are drawn one after another here."""
    made = _dflash(fields, layer, config, blocks)
    fields.skip("num_jacobi_passes")
    default = {"xpress_rank": 256, "xpress_mlp_ratio": 2}
    found = {name: fields.get(theirs, default[theirs]) for name, theirs in REFINER.items()}
    return Plan(XPress, config, made.taps, {**made.settings, **found}, drop=VERIFIER)


def _mtp(fields: Fields, layer: Fields, config: Any, blocks: int) -> Plan:
    """Trained on the state before the final norm or after it, which the checkpoint does not say; engines feed the latter."""
    fields.only("num_nextn_predict_layers", 1)
    layer.only("model_type", "qwen3")
    return Plan(MTP, config, ("final",), {"head_norms": True}, MTP_NAMES, VERIFIER)


KINDS = {
    "eagle3": _eagle3,
    "peagle": _peagle,
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
    "xpress": _xpress,
    "mtp": _mtp,
}
SPECULATORS = Format("speculators", lambda config: "speculators_model_type" in config, plan)
