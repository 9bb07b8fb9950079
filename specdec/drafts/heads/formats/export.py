"""A head as a checkpoint of the library speculators, which the engine vLLM serves, of SpecForge (``specforge_export``) or of z-lab (``zlab_export``)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.dflash2 import DFlash2
from specdec.drafts.heads.dspark import DSpark
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.formats.body import fields_of
from specdec.drafts.heads.formats.files import INDEX
from specdec.drafts.heads.formats.plan import EMBEDDING, HEAD
from specdec.drafts.heads.formats.specforge_export import specforge_config, specforge_tensors
from specdec.drafts.heads.formats.speculators import (
    CONFIDENCE,
    CONVOLUTIONS,
    FLAGS,
    MARKOV,
    MTP_NAMES,
    REFINER,
)
from specdec.drafts.heads.formats.zlab_export import zlab_config, zlab_names
from specdec.drafts.heads.load import is_checkpoint
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.mtp import MTP
from specdec.drafts.heads.peagle import PEagle
from specdec.drafts.heads.stored import FILE
from specdec.drafts.heads.xpress import XPress
from specdec.models.fingerprint import unwrapped

VERSION = "0.9.0"  # of the layout that is written
KINDS: dict[type[HeadModel], str] = {
    Eagle3: "eagle3",
    PEagle: "peagle",
    DFlash: "dflash",
    DFlash2: "dflash2",
    DSpark: "dspark",
    XPress: "xpress",
    MTP: "mtp",
}
EAGLE = ("eagle3", "peagle")
Layout = Literal["speculators", "specforge", "z-lab"]


def export(
    head: HeadModel,
    folder: str | os.PathLike[str],
    target: Any,
    *,
    verifier: str | None = None,
    length: int | None = None,
    layout: Layout = "speculators",
) -> None:
    """Write a head in the layout of speculators 0.9, which vLLM serves. Heads of the EAGLE family are written with an embedding and an output matrix, their own or copies
    of the target's; the others with what they have for a reduced vocabulary alone, as the layout takes the rest from the target.

    Args:
        target: the head's, an ``HFModel`` or a transformers model. verifier: the hub id or the folder under which the engine finds the target;
            ``None``: where it was loaded from. length: how many tokens the engine proposes by default; ``None``: all that the head can, or 3.
        layout: ``"specforge"``: an ``Eagle3`` as SpecForge writes it, which SGLang serves; ``"z-lab"``: a ``DFlash``, ``DFlash2``, ``Domino``, ``LiLiCorr`` or ``XPress`` in
            z-lab's layout, which SGLang and vLLM read. Neither has a verifier nor a length.
    Raises:
        TypeError: the layout has no heads of this class. ValueError: it cannot express the head: its mask, a tap ``"final"``, a mask token that
            is no id, both norms of taps, windows of several sizes or counted from slots, or a target whose logits are more than a product. Or the target is another one, or has no name,
            or the folder holds a saved head, parts of weights or another model. Or, for the other layouts, as ``specforge_config`` and ``zlab_config``.
    """
    config = check_export(head, target, verifier=verifier, length=length, layout=layout)
    folder = Path(folder)
    for name in (FILE, INDEX):
        if (folder / name).exists():
            raise ValueError(
                f"{folder} has a {name}, whose weights would no longer be those beside it: give an empty folder"
            )
    if (folder / "config.json").exists() and not is_checkpoint(folder):
        raise ValueError(f"{folder} has the config.json of another model: give an empty folder")
    if layout == "z-lab":
        names = zlab_names(head)
        tensors = {_theirs(name, names): _plain(t) for name, t in head.state_dict().items()}
    else:
        tensors = _tensors(head.bound(target), KINDS[type(head)])
    if layout == "specforge":
        tensors = specforge_tensors(head, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def check_export(
    head: HeadModel,
    target: Any,
    *,
    verifier: str | None = None,
    length: int | None = None,
    layout: Layout = "speculators",
) -> dict[str, Any]:
    """Refuse a head that ``export`` would refuse, before it is trained; arguments and errors are those of ``export``.

    Returns:
        The ``config.json`` that ``export`` writes.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout is {layout!r}: give one of {', '.join(map(repr, get_args(Layout)))}")
    if layout == "specforge":
        return specforge_config(head.bound(target))
    if layout == "z-lab":
        return zlab_config(head.bound(target))
    kind = KINDS.get(type(head))
    if kind is None:
        raise TypeError(
            f"head is a {type(head).__name__}: the layout of speculators has {', '.join(one.__name__ for one in KINDS)}"
        )
    head, model = head.bound(target), unwrapped(target)
    verifier = verifier or model.config._name_or_path
    if not verifier:
        raise ValueError(
            "verifier: the target was not loaded by a name: give the hub id or the folder under which an engine finds it"
        )
    flags = _flags(head, kind)
    _check_ends(head, kind)
    qwen = kind not in EAGLE or head.settings["head_norms"]
    blocks = head.config.num_target_layers if kind == "mtp" else head.settings["blocks"]
    depth = length or head.longest or 3
    return {
        "architectures": [f"{type(head).__name__}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": str(verifier),
                "architectures": list(model.config.architectures or []),
            },
        },
        "transformer_layer_config": fields_of(head.config, blocks, qwen, head.settings.get("windows")),
        **flags,
        "tie_word_embeddings": False,
        "dtype": str(head.dtype).removeprefix("torch."),
    }


def _flags(head: HeadModel, kind: str) -> dict[str, Any]:
    """The fields of the config that stand for the class's arguments."""
    settings = head.settings
    if head.mask is not None:
        raise ValueError(
            f"mask is {head.mask!r}: the layout of speculators has no masks; export a head without one"
        )
    if kind == "mtp":
        _check_mtp(head)
        return {"num_nextn_predict_layers": 1}
    if "final" in head.taps:
        raise ValueError(
            f"taps are {list(head.taps)}: the layout of speculators has no output of the final norm; make the head with layers"
        )
    if kind != "eagle3" and settings["mask_token"] is None:
        raise ValueError(
            "mask_token is None: in the layout of speculators the mask is an id of the target; make the head with mask_token=id"
        )
    shared: dict[str, Any] = {"draft_vocab_size": head.outputs, "target_hidden_size": None}
    if kind in EAGLE:
        if settings["fc_norm"] and settings["norm_before_fc"]:
            raise ValueError(
                "fc_norm and norm_before_fc are both set: the layout of speculators has one of them"
            )
        blocks = head.config.num_target_layers
        usual = (2, blocks // 2, blocks - 3)  # every engine's default; some read the field otherwise
        shared["eagle_aux_hidden_state_layer_ids"] = None if head.taps == usual else list(head.taps)
        shared["embed_requires_grad"] = settings["own_embedding"]
        more = {"mask_token_id": settings["mask_token"]} if kind == "peagle" else {}
        return {**shared, **{name: settings[name] for name in FLAGS}, **more}
    if settings["causal"] and None in (settings["windows"] or (None,)):
        raise ValueError(
            "causal is True: in the layout of speculators blocks without a window attend in both directions; give layout='z-lab'"
        )
    sliding = any(settings["windows"] or ())
    if sliding and settings["windows_from"] != "anchor":
        raise ValueError(
            "windows_from is 'slot': the layout of speculators counts the windows of a block from its anchor; make the head with windows_from='anchor'"
        )
    found = {
        "aux_hidden_state_layer_ids": list(head.taps),
        "block_size": settings["block_size"],
        "mask_token_id": settings["mask_token"],
        "sample_from_anchor": settings["anchor_first"],
        "sliding_window_non_causal": sliding and not (settings["windows_causal"] or settings["causal"]),
    }
    more = {"dspark": {**MARKOV, **CONFIDENCE}, "dflash2": CONVOLUTIONS, "xpress": REFINER}.get(kind, {})
    return {**shared, **found, **{theirs: settings[mine] for mine, theirs in more.items()}}


def _check_mtp(head: HeadModel) -> None:
    wanted = {"hidden_first": False, "norm_output": True, "head_norms": True, "shipped": None}
    wrong = [name for name, value in wanted.items() if head.settings[name] != value]
    if wrong or head.taps != ("final",):
        raise ValueError(
            "the layout of speculators has MTP heads that read 'final', with head_norms=True, norm_output=True and hidden_first=False; "
            f"this one reads {head.taps[0]!r} and has {', '.join(f'{name}={head.settings[name]!r}' for name in wrong) or 'these'}"
        )


def _reduced(head: HeadModel, kind: str) -> bool:
    """Whether the layout has the vocabulary of this head, which is not the target's."""
    return head.d2t is not None and kind not in ("mtp", "dflash2")


def _check_ends(head: HeadModel, kind: str) -> None:
    """Refuse an embedding, an output matrix or a vocabulary that the layout does not have."""
    ends, reduced = head.of_target, _reduced(head, kind)
    if kind not in EAGLE:
        own = [name for name in ("own_embedding", "own_head") if head.settings[name]]
        own = [name for name in own if name == "own_embedding" or not reduced]
        if own or (head.d2t is not None and not reduced):
            raise ValueError(
                f"the layout of speculators takes the embedding and the output matrix of a {type(head).__name__} from the target: make the head "
                f"without {' and '.join(own or ['vocabulary'])}"
            )
    if (reduced or kind in EAGLE) and head.lm_head is None and (ends.output.bias is not None or ends.softcap):
        raise ValueError(
            "the target's logits have a bias or a soft cap, which the layout of speculators cannot express: make the head with own_head=True"
        )


def _tensors(head: HeadModel, kind: str) -> dict[str, Tensor]:
    """The tensors of the layout: an embedding and an output matrix for the EAGLE family, an output matrix for a reduced vocabulary."""
    ends, found = head.of_target, dict(head.state_dict())
    if kind not in EAGLE and not _reduced(head, kind):
        names = MTP_NAMES if kind == "mtp" else {}
        return {_theirs(name, names): _plain(t) for name, t in found.items()}
    if kind in EAGLE and EMBEDDING not in found:
        found[EMBEDDING] = ends.table.weight.to(head.dtype)
    if HEAD not in found:
        found[HEAD] = (ends.output.weight.detach()[head.ids] * ends.scale).to(head.dtype)
    if head.d2t is not None:
        found["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool, device=head.device)
        found["t2d"][head.ids] = True
    return {name: _plain(t) for name, t in found.items()}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous().cpu()


def _theirs(name: str, names: Mapping[str, str]) -> str:
    return next((old + name[len(new) :] for old, new in names.items() if name.startswith(new)), name)
