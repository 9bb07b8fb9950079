"""Checkpoints of DeepSpec: DSpark and EAGLE-3 heads of Qwen3 targets, with copies of the target's embedding and output matrix."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.formats.body import body_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.formats.speculators import with_markov
from specdec.drafts.heads.formats.zlab import block_of, taps_of

TRAINING = (
    "num_anchors",
    "ttt_length",
    "step_loss_decay",
    "target_model_name_or_path",
    "draft_num_hidden_layers",
)


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: an EAGLE-3 head of several layers, which all read the token here, or as ``body_of`` and ``with_markov``.
    """
    fields.skip(*TRAINING)
    config = body_of(fields, vocab_size, blocks)
    taps = taps_of(fields, fields, config.num_hidden_layers, blocks)
    if fields.get("architectures") == ["Qwen3Eagle3Model"]:
        fields.only("num_hidden_layers", 1)
        return Plan(Eagle3, config, taps, {"head_norms": True})
    settings = {**block_of(fields, fields, config.num_hidden_layers), "anchor_first": True}
    default = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    return with_markov(fields, Plan(DFlash, config, taps, settings), default)


DEEPSPEC = Format(
    "DeepSpec",
    lambda config: config.get("architectures") in (["Qwen3DSparkModel"], ["Qwen3Eagle3Model"]),
    plan,
)
