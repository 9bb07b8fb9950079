"""EAGLE-3 checkpoints of SafeAILab/EAGLE. Its config looks like a Llama's of one layer; its block is called ``midlayer``.

The three layers are fixed: 2, L // 2 and L - 3 of L.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.formats.body import body_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan

NAMES = {"midlayer.": "layers.0."}


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: more than one layer, or as ``body_of``.
    """
    fields.skip("draft_vocab_size", "bias")
    fields.only("num_hidden_layers", 1)
    config = body_of(fields, vocab_size, blocks)
    return Plan(Eagle3, config, [2, blocks // 2, blocks - 3], {}, NAMES)


SAFEAILAB = Format(
    "SafeAILab/EAGLE",
    lambda config: config.get("architectures") == ["LlamaForCausalLM"] and "draft_vocab_size" in config,
    plan,
)
