"""A head as a checkpoint of the library speculators, which engines such as vLLM serve."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.dspark import DSpark
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.formats.body import fields_of
from specdec.drafts.heads.formats.plan import EMBEDDING, HEAD
from specdec.drafts.heads.formats.speculators import CONFIDENCE, FLAGS, MARKOV
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.peagle import PEagle
from specdec.models.fingerprint import unwrapped

VERSION = "0.9.0"  # of the layout that is written
KINDS: dict[type[HeadModel], str] = {Eagle3: "eagle3", PEagle: "peagle", DFlash: "dflash", DSpark: "dspark"}
LAYERS = {"eagle3": "eagle_aux_hidden_state_layer_ids", "peagle": "eagle_aux_hidden_state_layer_ids"}


def export(
    head: HeadModel,
    folder: str | os.PathLike[str],
    target: Any,
    *,
    verifier: str | None = None,
    length: int | None = None,
) -> None:
    """Write a head in the layout of speculators 0.9, with its embedding and its output matrix, or copies of the target's.

    Args:
        target: the head's, an ``HFModel`` or a transformers model. verifier: the hub id or the folder under which the engine finds the target;
            ``None``: where it was loaded from. length: how many tokens the engine proposes by default; ``None``: all that the head can, or 3.
    Raises:
        TypeError: the layout has no heads of this class. ValueError: it cannot express the head: its mask, a tap ``"final"``, a mask token that
            is no id, both norms of taps, or a target whose logits are more than a product. Or the target is another one, or has no name.
    """
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
    taps = _taps(head)
    flags = _flags(head, kind)
    tensors = _tensors(head)
    body = fields_of(
        head.config, head.settings["blocks"], kind.startswith("d") or head.settings["head_norms"]
    )
    depth = length or head.longest or 3
    config = {
        "architectures": [f"{type(head).__name__}Speculator"],
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
        "transformer_layer_config": body,
        "draft_vocab_size": head.outputs,
        "target_hidden_size": None,
        LAYERS.get(kind, "aux_hidden_state_layer_ids"): taps,
        **flags,
        "tie_word_embeddings": False,
        "dtype": str(head.dtype).removeprefix("torch."),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _taps(head: HeadModel) -> Sequence[int]:
    if head.mask is not None:
        raise ValueError(
            f"mask is {head.mask!r}: the layout of speculators has no masks; export a head without one"
        )
    if "final" in head.taps:
        raise ValueError(
            f"taps are {list(head.taps)}: the layout of speculators has no output of the final norm; make the head with layers"
        )
    return [int(tap) for tap in head.taps]


def _flags(head: HeadModel, kind: str) -> dict[str, Any]:
    """The fields of the config that stand for the class's arguments."""
    settings = head.settings
    if kind != "eagle3" and settings["mask_token"] is None:
        raise ValueError(
            "mask_token is None: in the layout of speculators the mask is an id of the target; make the head with mask_token=id"
        )
    if kind in ("eagle3", "peagle"):
        if settings["fc_norm"] and settings["norm_before_fc"]:
            raise ValueError(
                "fc_norm and norm_before_fc are both set: the layout of speculators has one of them"
            )
        found = {name: settings[name] for name in FLAGS}
        more = {"mask_token_id": settings["mask_token"]} if kind == "peagle" else {}
        return {**found, "embed_requires_grad": settings["own_embedding"], **more}
    found = {
        "block_size": settings["block_size"],
        "mask_token_id": settings["mask_token"],
        "sample_from_anchor": settings["anchor_first"],
        "sliding_window_non_causal": False,
    }
    if kind == "dspark":
        found |= {theirs: settings[mine] for mine, theirs in {**MARKOV, **CONFIDENCE}.items()}
    return found


def _tensors(head: HeadModel) -> dict[str, Tensor]:
    """The head's tensors, with an embedding, an output matrix and both maps of the vocabulary."""
    ends, found = head.of_target, dict(head.state_dict())
    with torch.no_grad():
        if EMBEDDING not in found:
            found[EMBEDDING] = ends.table.weight.to(head.dtype)
        if HEAD not in found:
            if ends.output.bias is not None or ends.softcap:
                raise ValueError(
                    "the target's logits have a bias or a soft cap, which the layout of speculators cannot express: make the head with own_head=True"
                )
            found[HEAD] = (ends.output.weight[head.ids] * ends.scale).to(head.dtype)
        if head.d2t is not None:
            found["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool, device=head.device)
            found["t2d"][head.ids] = True
    return {name: t.detach().clone().contiguous().cpu() for name, t in found.items()}
