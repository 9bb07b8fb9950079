"""Models as users have them: objects, ``(model, tokenizer)`` pairs, folders, hub ids and names of pocket models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec import zoo
from specdec.models.hf import HFModel
from specdec.models.spire import FILE, SpireModel
from specdec.models.trimmed import TrimmedModel
from specdec.protocols import LanguageModel
from specdec.pruning.vocabulary import Trimmed


def as_model(model: Any, who: str) -> LanguageModel:
    """A ``LanguageModel`` from whatever the user has; ``who`` is its name in messages.

    Raises:
        TypeError: it is something else; the message says what can be done with it.
    """
    if hasattr(model, "score") and hasattr(model, "cache"):
        return model
    model, tokenizer = _given(model)
    if isinstance(model, SpireModel) or is_spire(model):
        raise TypeError(
            f"{who} is a SPIRe draft, which reads a target's activations: give drafts.Spire(...) of it"
        )
    if isinstance(model, (str, Path)):
        return HFModel.from_pretrained(model, tokenizer=tokenizer)
    if isinstance(model, Trimmed):
        return TrimmedModel(model, tokenizer)
    if isinstance(model, PreTrainedModel) or (hasattr(model, "config") and hasattr(model, "forward")):
        return HFModel(model, tokenizer)
    what = f"{who} is None" if model is None else f"{who} is a {type(model).__name__}"
    raise TypeError(
        f"{what}: give an HFModel, a transformers causal LM (or it and its tokenizer), a hub id, a folder, the name of a pocket model, or an "
        "object with cache() and score()"
    )


def as_spire(model: Any) -> SpireModel:
    """A ``SpireModel`` from one, from it and its tokenizer, from its folder, or from the name of a pocket model.

    Raises:
        TypeError: it is something else. FileNotFoundError: the folder has none.
    """
    model, _ = _given(model)
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
    model = model[0] if _is_pair(model) else model
    if isinstance(model, (str, os.PathLike)):
        return any((folder / FILE).exists() for folder in (Path(model), zoo.FOLDER / model))
    return isinstance(model, SpireModel)


def _given(model: Any) -> tuple[Any, Any]:
    """A model in memory, a hub id (str) or a folder (Path), and the tokenizer that came with it."""
    model, tokenizer = model if _is_pair(model) else (model, None)
    if isinstance(model, os.PathLike) or (isinstance(model, str) and Path(model).exists()):
        return Path(model), tokenizer
    if isinstance(model, str) and model in zoo.names():
        return zoo.load(model)
    return model, tokenizer


def _is_pair(model: Any) -> bool:
    return isinstance(model, (tuple, list)) and len(model) == 2
