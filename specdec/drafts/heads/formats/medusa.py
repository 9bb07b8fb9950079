"""Medusa's own checkpoints (FasterDecoding/Medusa): the heads alone, ``medusa_lm_head.safetensors`` or ``.pt``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.medusa import Medusa


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``. The heads are counted: the config's number is often that of the library's default.

    Raises:
        ValueError: there are no heads.
    """
    fields.skip("medusa_num_heads", "base_model_name_or_path", "version")
    layers = fields.get("medusa_num_layers", 1)
    heads = 0
    while f"{heads}.0.linear.weight" in tensors:
        heads += 1
    if not heads:
        raise ValueError(f"{fields.source} lacks the tensor '0.0.linear.weight': copy the checkpoint again")
    width = tensors["0.0.linear.weight"].shape[-1]
    names = {f"{j}.{layers}.": f"lm_heads.{j}." for j in range(heads)}
    names |= {f"{j}.": f"layers.{j}." for j in range(heads)}
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_attention_heads": 1,
        "num_target_layers": blocks,
    }
    config = LlamaConfig(**sizes)
    return Plan(Medusa, config, ("final",), {"heads": heads, "blocks": layers, "own_head": True}, names)


MEDUSA = Format("FasterDecoding/Medusa", lambda config: "medusa_num_heads" in config, plan)
