"""From what users pass as a model to a ``LanguageModel``: objects, ``(model, tokenizer)`` pairs, folders, hub ids, names of pocket models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.drafts.spire.load import is_spire
from specdec.models.hf import HFModel
from specdec.models.load import resolve
from specdec.models.reduced_vocab import TrimmedModel
from specdec.protocols import LanguageModel
from specdec.pruning.vocabulary import Trimmed

_Loadable = PreTrainedModel | Trimmed | str | os.PathLike[str]
ModelLike = LanguageModel | _Loadable | tuple[_Loadable, Any]  # what ``as_model`` takes


def as_model(model: Any, name: str) -> LanguageModel:
    """A ``LanguageModel`` from what the user passed; ``name`` is its name in messages.

    Raises:
        TypeError: it is no model; the message lists what is accepted.
    """
    if hasattr(model, "score") and hasattr(model, "cache"):
        return model
    model, tokenizer = resolve(model)
    if is_spire(model):
        raise TypeError(
            f"{name} is a SPIRe draft, which reads a target's activations: give drafts.Spire(...) of it"
        )
    if isinstance(model, (str, Path)):
        return HFModel.from_pretrained(model, tokenizer=tokenizer)
    if isinstance(model, Trimmed):
        return TrimmedModel(model, tokenizer)
    if isinstance(model, PreTrainedModel) or (hasattr(model, "config") and hasattr(model, "forward")):
        return HFModel(model, tokenizer)
    what = f"{name} is None" if model is None else f"{name} is a {type(model).__name__}"
    raise TypeError(
        f"{what}: give an HFModel, a transformers causal LM (or it and its tokenizer), a hub id, a folder, the name of a pocket model, or an "
        "object with cache() and score()"
    )
