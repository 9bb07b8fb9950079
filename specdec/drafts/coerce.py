"""From what users pass as a model to a ``LanguageModel``: objects, ``(model, tokenizer)`` pairs, folders, hub ids, names of pocket models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel

from specdec.configs import setting
from specdec.drafts.spire.load import is_spire
from specdec.forward.families import multimodal
from specdec.models.check import Loading, Options
from specdec.models.hf import HFModel
from specdec.models.load import load, load_tokenizer, resolve
from specdec.models.own_cache import OWN_CACHE, OwnCache
from specdec.models.reduced_vocab import TrimmedModel
from specdec.models.text_only import text_only
from specdec.protocols import LanguageModel
from specdec.pruning.vocabulary import Trimmed
from specdec.zoo import files as zoo

_Loadable = PreTrainedModel | Trimmed | str | os.PathLike[str]
ModelLike = LanguageModel | _Loadable | tuple[_Loadable, Any]  # what ``as_model`` takes


def place(device_map: Any, device: Any) -> Any:
    """The ``device_map`` of a model that is loaded: as given, else ``device``, else the GPU if there is one."""
    if device_map is not None:
        return device_map
    where = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return None if where in ("cpu", "meta") else where


def _wrapped(model: Any, tokenizer: Any, name: str, options: Mapping[str, Any]) -> HFModel | OwnCache:
    config = setting(model, "config")
    if config is not None and multimodal(config):
        model = text_only(model)
    family = setting(setting(model, "config"), "model_type")
    if family not in OWN_CACHE:
        return HFModel(model, tokenizer, **options)
    other = [key for key in options if key not in ("prefill_chunk", "prefix_cache")]
    if other:
        raise TypeError(
            f"{name} is a {family} model, which runs with transformers' own cache (models.OwnCache), and {', '.join(other)} is of HFModel: "
            "leave it out"
        )
    return OwnCache(model, tokenizer, **options)


def in_memory(name: str, options: Mapping[str, Any]) -> None:
    """Raise TypeError for options of loading: there is nothing to load."""
    if "tokenizer" in options:
        raise TypeError(f"{name} is in memory already: give it with its tokenizer, as (model, tokenizer)")
    if options:
        given = ", ".join(options)
        raise TypeError(
            f"{name} is in memory already and {given} is for loading: give a hub id or a folder with it, or HFModel(model, ...) with its options"
        )


def as_model(model: Any, name: str, device: Any = None, **options: Unpack[Loading]) -> LanguageModel:
    """A ``LanguageModel`` from what the user passed.

    Args:
        name: its name in messages. device: to which a hub id or a folder goes without a ``device_map``; ``None``: the GPU if there is one.
        options: of ``HFModel.from_pretrained``, for a hub id or a folder.
    Raises:
        TypeError: it is no model (the message lists what is accepted), or there are options for a model that is in memory already.
    """
    if hasattr(model, "score") and hasattr(model, "cache"):
        in_memory(name, options)
        return model
    if options and model in zoo.names():  # pocket models are read in float32
        model, options = zoo.FOLDER / model, {"dtype": "float32", **options}
    model, tokenizer = resolve(model)
    if not isinstance(model, (str, Path)):
        in_memory(name, options)
    if is_spire(model):
        raise TypeError(
            f"{name} is a SPIRe draft, which reads a target's activations: give drafts.Spire(...) of it"
        )
    if isinstance(model, (str, Path)):
        options["device_map"] = place(options.get("device_map"), device)
        ours: dict[str, Any] = {key: options.pop(key) for key in Options.__annotations__ if key in options}  # type: ignore[misc]
        tokenizer = options.pop("tokenizer", tokenizer)
        found = load(model, **{"dtype": "auto", **options})
        return _wrapped(found, load_tokenizer(model) if tokenizer is None else tokenizer, name, ours)
    if isinstance(model, Trimmed):
        return TrimmedModel(model, tokenizer)
    if isinstance(model, PreTrainedModel) or (hasattr(model, "config") and hasattr(model, "forward")):
        return _wrapped(model, tokenizer, name, {})
    what = f"{name} is None" if model is None else f"{name} is a {type(model).__name__}"
    raise TypeError(
        f"{what}: give an HFModel, a transformers causal LM (or it and its tokenizer), a hub id, a folder, the name of a pocket model, or an "
        "object with cache() and score()"
    )
