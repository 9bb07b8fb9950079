"""A DFlash head, or one that is built on it, as a checkpoint in z-lab's layout, which the engines SGLang and vLLM serve."""

from __future__ import annotations

from typing import Any

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.dflash2 import DFlash2
from specdec.drafts.heads.domino import Domino
from specdec.drafts.heads.formats import domino, lilicorr, xpress
from specdec.drafts.heads.formats.body import fields_of
from specdec.drafts.heads.formats.speculators import CONVOLUTIONS
from specdec.drafts.heads.lilicorr import LiLiCorr
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.xpress import XPress

KINDS: dict[type[HeadModel], str] = {
    DFlash: "DFlashDraftModel",
    DFlash2: "DFlash2DraftModel",
    Domino: "DominoDraftModel",
    LiLiCorr: "LiLiCorrDraftModel",
    XPress: "Qwen3XPressModel",
}


def zlab_config(head: HeadModel) -> dict[str, Any]:
    """The ``config.json`` of a head that is bound to its target.

    Raises:
        TypeError: the layout has no heads of this class. ValueError: it cannot express the head: its mask, its own embedding, output matrix or vocabulary, a mask
            token that is no id, the target's last layer among the taps, slots that predict the token after them in a head other than ``Domino``, or windows of
            several sizes or counted from the anchor.
    """
    kind, settings = KINDS.get(type(head)), head.settings
    if kind is None:
        raise TypeError(
            f"head is a {type(head).__name__}: the layout of z-lab has {', '.join(one.__name__ for one in KINDS)}"
        )
    if head.mask is not None:
        raise ValueError(
            f"mask is {head.mask!r}: the layout of z-lab has no masks; export a head without one"
        )
    own = [name for name in ("own_embedding", "own_head") if settings[name]]
    if own or head.d2t is not None:
        raise ValueError(
            f"the layout of z-lab takes the embedding and the output matrix of a {type(head).__name__} from the target: make the head without "
            f"{' and '.join(own or ['vocabulary'])}"
        )
    if settings["mask_token"] is None:
        raise ValueError(
            "mask_token is None: in the layout of z-lab the mask is an id of the target; make the head with mask_token=id"
        )
    taps = [head.layer_of(tap) for tap in head.taps]
    last: int = head.config.num_target_layers
    if last in taps:
        raise ValueError(
            f"taps are {list(head.taps)}: engines differ on the target's last layer in the layout of z-lab; make the head with layers below {last}"
        )
    if settings["anchor_first"] and type(head) is not Domino:
        raise ValueError(
            "anchor_first is True: in the layout of z-lab a slot predicts the token at its own position; make the head with anchor_first=False"
        )
    windows = settings["windows"]
    if any(windows or ()) and settings["windows_from"] != "slot":
        raise ValueError(
            "windows_from is 'anchor': the layout of z-lab counts windows from each slot; make the head with windows_from='slot'"
        )
    if settings["causal"]:
        causal = {"is_causal": True}
    else:
        causal = {} if any(windows or ()) and settings["windows_causal"] else {"is_causal": False}
    return {
        "architectures": [kind],
        **fields_of(head.config, settings["blocks"], True, windows),
        "num_target_layers": last,
        "block_size": settings["block_size"],
        **causal,
        **_beside(head),
        "dflash_config": {
            "mask_token_id": settings["mask_token"],
            "target_layer_ids": [tap - 1 for tap in taps],
            **({"causal": True, "causal_head": True} if settings["causal"] else {}),
            **_more(head),
        },
        "dtype": str(head.dtype).removeprefix("torch."),
    }


def zlab_names(head: HeadModel) -> dict[str, str]:
    """The beginnings of names of tensors, the layout's -> the class's."""
    if type(head) is LiLiCorr:
        return lilicorr.names_of(head.settings["layers"])
    return {Domino: domino.NAMES, XPress: xpress.NAMES}.get(type(head), {})


def _beside(head: HeadModel) -> dict[str, Any]:
    """The fields of XPress, which are not in ``dflash_config``."""
    if type(head) is not XPress:
        return {}
    s = head.settings
    sizes = {"xpress_rank": s["rank"], "xpress_mlp_hidden": s["rank"] * s["mlp_ratio"]}
    return {**sizes, "xpress_block_size": s["block_size"], "sample_from_anchor": False}


def _more(head: HeadModel) -> dict[str, Any]:
    """What a class has beside DFlash."""
    s = head.settings
    if type(head) is DFlash2:
        names: dict[str, Any] = {theirs: s[mine] for mine, theirs in CONVOLUTIONS.items()}
        return {"projector_type": "dflash2", **names, "block_size": s["block_size"]}
    if type(head) is Domino:
        sizes = {"emb_dim": s["rank"], "gru_hidden_dim": s["state"], "pure_draft_prefix_len": s["prefix"]}
        return {"projector_type": "domino", **sizes, "shift_label": s["anchor_first"]}
    if type(head) is LiLiCorr:
        names = {theirs: s[mine] for mine, theirs in lilicorr.SETTINGS.items()}
        convolutions = {"conv_kernel_size": s["conv_size"], "conv_group_size": s["conv_group"]}
        width = {"lilicorr_hidden_size": s["inner"] or head.config.hidden_size, "lilicorr_enabled": True}
        return {"projector_type": "lilicorr", **width, **names, **(convolutions if s["conv_size"] else {})}
    return {}
