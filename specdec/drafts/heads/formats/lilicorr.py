"""Checkpoints of LiLiCorr in z-lab's layout, as vLLM reads and NVIDIA's ModelOpt writes them. ModelOpt numbers the layers of MLPs, which vLLM names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.formats.plan import HEAD, Format, Plan
from specdec.drafts.heads.formats.zlab import flash
from specdec.drafts.heads.lilicorr import LiLiCorr

SETTINGS = {
    "top_k": "lilicorr_candidate_topk",
    "layers": "lilicorr_num_layers",
    "heads": "lilicorr_num_heads",
    "mlp_ratio": "lilicorr_mlp_ratio",
    "factors": "lilicorr_factor_dim",
    "vector_eps": "lilicorr_vector_eps",
    "scale": "lilicorr_logit_scale",
}


def plan(fields: Fields, tensors: Mapping[str, Tensor], blocks: int, vocab_size: int) -> Plan:
    """As ``Format.plan``.

    Raises:
        ValueError: as ``zlab.flash``; or a field is missing, also one of those that change no shape, or the output matrix that one promises.
    """
    made, more = flash(fields, blocks, vocab_size, "lilicorr")
    own = fields.get("has_own_lm_head", False)
    if own and HEAD not in tensors:
        raise ValueError(
            f"{fields.source}: has_own_lm_head is True and there is no {HEAD}: copy the checkpoint again"
        )
    more.only("lilicorr_enabled", True)
    found = {name: more.need(theirs) for name, theirs in SETTINGS.items()}
    found |= {
        "inner": more.get("lilicorr_hidden_size") or None,
        "conv_size": more.get("conv_kernel_size", 0),
        "conv_group": more.get("conv_group_size", 0),
    }
    names = names_of(found["layers"], numbered="lilicorr.feature_mlp.0.weight" in tensors)
    said = (fields.get("is_causal"), more.get("causal"), more.get("causal_head"))
    if made.settings["windows"] and said == (None, None, None):
        found["windows_causal"] = None  # engines differ
    drop = () if own else (HEAD,)  # engines do not read it then
    return replace(made, kind=LiLiCorr, settings={**made.settings, **found}, names=names, drop=drop)


def names_of(layers: int, numbered: bool = False) -> dict[str, str]:
    """vLLM's names, or ModelOpt's ``numbered`` ones, -> ours."""
    names = {}
    for i in range(layers):
        start = f"lilicorr.layers.{i}."
        names[f"{start}attn.in_proj_"] = f"{start}attn.in_proj."
        if numbered:
            names |= {f"{start}mlp.0.": f"{start}mlp.up_proj.", f"{start}mlp.2.": f"{start}mlp.down_proj."}
    if numbered:
        start = "lilicorr.feature_mlp."
        names |= {
            f"{start}0.": "lilicorr.feature_norm.",
            f"{start}1.": f"{start}up_proj.",
            f"{start}3.": f"{start}down_proj.",
        }
    return names


LILICORR = Format("LiLiCorr", lambda config: config.get("architectures") == ["LiLiCorrDraftModel"], plan)
