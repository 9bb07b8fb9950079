"""Checkpoints of SpecForge: EAGLE-3, P-EAGLE and DSpark (its DFlash is z-lab's). Ids of layers are counted from 0.

Its EAGLE-3 norms the output before the output matrix alone; the output that is fed back is not normed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import LlamaConfig

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.formats.body import body_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.formats.safeailab import NAMES
from specdec.drafts.heads.formats.speculators import with_markov
from specdec.drafts.heads.formats.zlab import block_of, counted_from_0, sight_of, taps_of
from specdec.drafts.heads.peagle import PEagle

# The names of early checkpoints.
NESTED = {f"logit_head.{name}.": f"{name}." for name in ("markov_head", "confidence_head")}


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: as ``body_of`` and ``with_markov``, or an output without a norm.
    """
    spark = fields.get("architectures") == ["DSparkDraftModel"]
    config = body_of(fields, vocab_size, blocks, windows=spark)
    if spark:
        return _dspark(fields, config, blocks)
    fields.skip("draft_vocab_size")
    ids = fields.inside("eagle_config").get(
        "eagle_aux_hidden_state_layer_ids", [1, blocks // 2 - 1, blocks - 4]
    )
    taps = counted_from_0(ids, blocks, fields.source)
    if fields.get("architectures") == ["PEagleDraftModel"]:
        settings = {
            "norm_before_residual": fields.get("norm_before_residual", False),
            "blocks": config.num_hidden_layers,
            "mask_token": fields.get("mask_token_id"),
        }
        return Plan(PEagle, config, taps, settings)
    fields.only("num_hidden_layers", 1)
    fields.only("norm_output", True)
    return Plan(Eagle3, config, taps, {"fc_norm": fields.get("fc_norm", False)}, NAMES)


def _dspark(fields: Fields, config: LlamaConfig, blocks: int) -> Plan:
    more = fields.inside("dflash_config", needed=True)
    more.only("projector_type", None, "dspark")
    more.skip("attention_mode", "confidence_head_alpha")
    layers = fields.need("num_hidden_layers")
    settings = {**block_of(fields, more, layers), **sight_of(fields, more, layers), "anchor_first": True}
    alpha = bool(more.get("confidence_head_alpha", 0.0))
    default = {"markov_rank": 0, "enable_confidence_head": alpha, "confidence_head_with_markov": False}
    return with_markov(
        more, Plan(DFlash, config, taps_of(fields, more, layers, blocks), settings, NESTED), default
    )


SPECFORGE = Format(
    "SpecForge",
    lambda config: (
        config.get("architectures")
        in (["LlamaForCausalLMEagle3"], ["PEagleDraftModel"], ["DSparkDraftModel"])
    ),
    plan,
)
