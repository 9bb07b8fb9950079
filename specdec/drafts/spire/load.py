"""SPIRe drafts as users have them: objects, ``(model, tokenizer)`` pairs, folders and names of pocket models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specdec import zoo
from specdec.drafts.spire.model import FILE, SpireModel
from specdec.models.load import is_pair, resolve


def as_spire(model: Any) -> SpireModel:
    """A ``SpireModel`` from one, from it and its tokenizer, from its folder, or from the name of a pocket model.

    Raises:
        TypeError: it is something else. FileNotFoundError: the folder has none.
    """
    model, _ = resolve(model)
    if isinstance(model, (str, Path)):
        return SpireModel.from_pretrained(model).eval()
    if not isinstance(model, SpireModel):
        raise TypeError(
            f"model is a {type(model).__name__}: give a SpireModel (SpireModel.from_target(target, layers) makes one) or the folder of a "
            "saved one"
        )
    return model


def is_spire(model: Any) -> bool:
    """Whether it is a SPIRe draft, in memory or in a folder."""
    model = model[0] if is_pair(model) else model
    if isinstance(model, (str, os.PathLike)):
        return any((folder / FILE).exists() for folder in (Path(model), zoo.FOLDER / model))
    return isinstance(model, SpireModel)
