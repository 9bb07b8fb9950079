"""Checkpoints of Domino in z-lab's layout, as SpecForge and NVIDIA's ModelOpt and NeMo AutoModel write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdec.drafts.heads.domino import Domino
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import Format, Plan
from specdec.drafts.heads.formats.zlab import flash

NAMES = {
    f"prefix_gru.weight_{theirs}_l0": f"prefix_gru.{ours}.weight"
    for theirs, ours in (("ih", "of_token"), ("hh", "of_state"))
}
"""PyTorch's names of a GRU's weights -> ours."""


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: as ``zlab.flash``; or a field is missing.
    """
    made, more = flash(fields, blocks, vocab_size, "domino")
    fields.skip("emb_dim")  # as in ``more``
    found = {
        "rank": more.need("emb_dim"),
        "state": more.need("gru_hidden_dim"),
        "prefix": more.get("pure_draft_prefix_len", 0),
        "anchor_first": more.get("shift_label", False),
    }
    return replace(made, kind=Domino, settings={**made.settings, **found}, names=NAMES)


def takes(config: Mapping[str, Any]) -> bool:
    """Whether a config is of Domino; ModelOpt and AutoModel give it the architecture of DFlash."""
    kind = (config.get("dflash_config") or {}).get("projector_type")
    named = config.get("architectures")
    return named == ["DominoDraftModel"] or (
        named in (["DFlashDraftModel"], ["Qwen3DFlashDraftModel"]) and kind == "domino"
    )


DOMINO = Format("Domino", takes, plan)
