"""From what users pass as a SPIRe draft to a ``SpireModel``: objects, ``(model, tokenizer)`` pairs, folders, names of pocket models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.drafts.heads.load import from_hub
from specdec.drafts.spire.model import FILE, SpireModel
from specdec.models.load import is_pair, resolve
from specdec.zoo import files as zoo


def as_spire(model: Any) -> SpireModel:
    """A ``SpireModel`` from one, from a pair of it and a tokenizer, from its folder, or from the name of a pocket model.

    Raises:
        TypeError: it is none of these. FileNotFoundError: the folder holds no SPIRe draft.
    """
    if isinstance(model, str) and not Path(model).exists() and (zoo.FOLDER / model / FILE).exists():
        return read_pocket(model)[0]
    model, _ = resolve(model)
    if isinstance(model, (str, Path)):
        return SpireModel.from_pretrained(model).eval()
    if not isinstance(model, SpireModel):
        raise TypeError(
            f"model is a {type(model).__name__}: give a SpireModel (SpireModel.from_target(target, layers) makes one) or the folder of a "
            "saved one"
        )
    return model


def read_pocket(name: str, folder: str | Path = zoo.FOLDER) -> tuple[SpireModel, Any]:
    """A pocket model that is a SPIRe draft, and its tokenizer, as ``zoo.load``."""
    return zoo.read(name, folder, lambda path: SpireModel.from_pretrained(path, dtype=torch.float32))


def is_spire(model: Any) -> bool:
    """Whether ``model`` is a SPIRe draft, in memory or in a folder."""
    model = model[0] if is_pair(model) else model
    if isinstance(model, (str, os.PathLike)):
        return any((folder / FILE).exists() for folder in (Path(model), zoo.FOLDER / model))
    return isinstance(model, SpireModel)


def on_hub(name: Any, options: Mapping[str, Any]) -> bool:
    """Whether ``name`` is the hub id of a SPIRe draft, from whose files a causal LM could be read, too. ``options``: as for ``heads.load.is_checkpoint``."""
    if not isinstance(name, str) or Path(name).exists() or name.count("/") != 1 or name[0] in "./~":
        return False
    return from_hub(name, FILE, options) is not None
