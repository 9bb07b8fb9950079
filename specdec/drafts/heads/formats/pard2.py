"""PARD-2 checkpoints of AMD-AGI/PARD: a Llama or Qwen3 language model, and ``warp_model.bin`` with what the target's activations go through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec.drafts.heads.features import Tap
from specdec.drafts.heads.formats.body import body_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.pard2 import FAMILIES, Pard2

NAMES = {"target_proj.": "fc.", "model.": ""}
TRAINING = ("ce_alpha", "kd_alpha", "kd_temperature", "prev_prob_loss", "target_feat_mask")


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: the file with the projection or the output matrix is missing, a layer that the target does not have, or as ``body_of``.
    """
    family = fields.only("model_type", *FAMILIES)
    fields.only("spd_type", "pard2")
    fields.only("pard2", True)
    fields.skip(*TRAINING)
    if "target_proj.weight" not in tensors:
        raise ValueError(
            f"{fields.source} lacks target_proj.weight: copy warp_model.bin, too, or, to draft without the target's activations, give "
            "drafts.Parallel of the model"
        )
    if "lm_head.weight" not in tensors and not fields.get("tie_word_embeddings"):
        raise ValueError(
            f"{fields.source} lacks lm_head.weight, and its config does not tie it to the embedding: copy the checkpoint again"
        )
    old = fields.get("pard_scale", fields.get("feat_scale", 0.02))
    wide = tensors["target_proj.weight"].shape[1]
    several = fields.get(
        "pard2_ml", fields.get("ml", wide > 10000)
    )  # as the authors' converter, where no layers are named
    layers = fields.get(
        "pard2_target_layers", fields.get("target_layers", [-1, -8, -16, -24] if several else [-1])
    )
    taps = [_tap(int(layer), blocks, fields.source) for layer in layers]
    for name in ("pard2_target_dim", "pard_target_dim"):
        fields.only(name, wide)
    for name in ("pard2_proj_bias", "proj_bias"):
        fields.only(name, "target_proj.bias" in tensors)
    settings = {
        "blocks": fields.need("num_hidden_layers"),
        "target_width": wide // len(taps),
        "scale": fields.get("pard2_scale", old),
        "feature_bias": "target_proj.bias" in tensors,
        "head_norms": family == "qwen3",
        "mask_token": token if (token := fields.get("pard_token", -1)) >= 0 else None,
        "own_embedding": True,
        "own_head": True,
    }
    return Plan(Pard2, body_of(fields, vocab_size, blocks), taps, settings, NAMES)


def _tap(layer: int, blocks: int, source: str) -> Tap:
    """The tap of an entry of transformers' ``hidden_states``, whose last one is normed."""
    at = layer + blocks + 1 if layer < 0 else layer
    if not 0 <= at <= blocks:
        raise ValueError(
            f"{source}: pard2_target_layers has {layer}, and the target has {blocks} layers: give the target that the head was made for"
        )
    return "final" if at == blocks else at


def _takes(config: Mapping[str, Any]) -> bool:
    return bool(config.get("pard2")) or config.get("spd_type") == "pard2"


PARD2 = Format("AMD-AGI/PARD", _takes, plan)
