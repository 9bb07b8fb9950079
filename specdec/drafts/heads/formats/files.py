"""The files of a checkpoint: its config and its tensors, from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
WHOLE = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
BESIDE = "warp_model.bin"  # of PARD-2


def config_of(folder: Path) -> dict[str, Any]:
    """The fields of ``config.json``.

    Raises:
        FileNotFoundError: there is none. ValueError: it is damaged.
    """
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has neither head.json nor config.json: it is not the folder of a head"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): copy the checkpoint again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}: copy the checkpoint again")
    return found


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of ``model.safetensors``, of its parts, or of the first of ``WHOLE``, and in their precision those of ``BESIDE`` (of pickled files only tensors
    are read).

    Raises:
        FileNotFoundError: there is none of these, or a part is missing. ValueError: a file is damaged.
    """
    if (folder / INDEX).exists():
        files = [folder / name for name in _parts(folder / INDEX)]
    else:
        files = [folder / name for name in WHOLE if (folder / name).exists()][:1]
    if not files:
        raise FileNotFoundError(f"{folder} lacks its weights, {WHOLE[0]}: copy the checkpoint again")
    files += [folder / BESIDE] if (folder / BESIDE).exists() else []
    found: dict[str, Tensor] = {}
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{folder} lacks its weights, {file.name}: copy the checkpoint again")
        try:
            found |= _read(file)
        except Exception as error:  # safetensors and pickle each have their own
            raise ValueError(f"{file} is damaged ({error}): copy the checkpoint again") from error
        if file.name == BESIDE:
            kind = next((t.dtype for t in found.values() if t.is_floating_point()), torch.float32)
            found = {name: t.to(kind) if t.is_floating_point() else t for name, t in found.items()}
    return found


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    made = torch.load(file, map_location="cpu", weights_only=True)
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}


def _parts(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is no index of weights: copy the checkpoint again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"{index} names {name!r}, which is outside its folder, and is not read: copy the checkpoint again"
            )
    return names
