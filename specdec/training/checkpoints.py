"""Checkpoints of a training run: written atomically, and read only by a run with the same settings and parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.heads.model import HeadModel
from specdec.drafts.spire.model import SpireModel
from specdec.training.sources import Masked, Source

_FREE = {"checkpoint_minutes", "compile", "validate_every"}  # settings that may change


def save(
    path: Path, state: Mapping[str, Any], settings: Mapping[str, Any], identity: Mapping[str, str]
) -> None:
    """Write ``state`` with the run's ``settings`` and the ``identity`` of its parts."""
    part = path.with_name(path.name + ".part")
    torch.save({**state, "settings": dict(settings), "identity": dict(identity)}, part)
    part.replace(path)


def load(path: Path, settings: Mapping[str, Any], identity: Mapping[str, str]) -> dict[str, Any]:
    """Read what ``save`` wrote, for a run of the same settings and parts; ``steps`` may be larger, and the precision ``None``.

    Raises:
        ValueError: it is of another run.
    """
    state = torch.load(path, map_location="cpu", weights_only=False)
    theirs, free = state["settings"], set(_FREE)
    if settings["steps"] > theirs.get("steps", 0):
        free.add("steps")  # training continues: the rates follow the longer run from here
    if settings["precision"] is None:
        free.add("precision")
    differ = [n for n in settings if n not in free and settings[n] != theirs.get(n)]
    if differ:
        raise ValueError(
            f"checkpoint {path} was made with {differ[0]} = {theirs.get(differ[0])}, and it is {settings[differ[0]]} now: use the "
            "same settings, or another file; or delete it, to begin again"
        )
    other = [n for n, mine in identity.items() if mine != state["identity"].get(n, mine)]
    if other:
        raise ValueError(
            f"checkpoint {path} is of another run: its {other[0]} is {state['identity'].get(other[0])}, and it is "
            f"{identity[other[0]]} now: use another file, or delete it, to begin again"
        )
    return state


def content(data: Any) -> str:
    """A short hash of sequences of ids, and of their mask, so that a run does not continue with others; empty for stored states, which know theirs."""
    if isinstance(data, Masked):
        return content(data.data) + content(data.mask)
    if isinstance(data, Source) and not isinstance(data, Tensor):
        return ""
    return hashlib.sha256(torch.as_tensor(data).contiguous().numpy().tobytes()).hexdigest()[:12]


def described(draft: Any) -> str:
    """The properties of a draft that a checkpoint does not store: its shapes and its mask."""
    shapes = hash_of([(name, list(p.shape)) for name, p in draft.named_parameters()])
    looks: dict[str, Any] = {}
    if isinstance(draft, SpireModel):
        looks = {"layers": draft.layers, "mask": draft.mask}
    if isinstance(draft, HeadModel):
        looks = {"taps": draft.taps, "mask": draft.mask, "settings": draft.settings}
    return f"{type(draft).__name__} {looks} {shapes}"


def hash_of(value: Any) -> str:
    """Eight hexadecimal digits of a value's ``repr``."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
