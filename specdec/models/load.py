"""Load a causal LM from a hub id or a folder, with clear errors for what is missing, truncated or no name at all."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.utils import is_peft_available

from specdec.forward.families import multimodal
from specdec.models.clone import packed_weights
from specdec.models.text_only import text_only
from specdec.zoo import files as zoo

_SECONDS = 10.0  # how long the hub may take to answer
_DAMAGE = (SafetensorError, pickle.UnpicklingError, json.JSONDecodeError, EOFError, OSError)


def load(name: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """The model of a local folder or a hub id, or a pocket model; of a multimodal one its language model. Errors as for ``HFModel.from_pretrained``."""
    _check_arguments(kwargs.get("dtype"), kwargs.get("device_map"))
    if (place := _place(name)) != name and kwargs.get("dtype", "auto") == "auto":
        kwargs["dtype"] = "float32"  # as pocket models are read everywhere
    name, folder = place, Path(place).is_dir()
    if folder:
        _check_folder(Path(name), kwargs)
    elif Path(name).is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1:
        raise FileNotFoundError(
            f"there is no folder {str(name)!r}: give the folder of a saved model, or a hub id"
        )
    else:
        check_hub_name(str(name), kwargs)
    try:
        loaded = _loaded(name, kwargs)
    except Exception as error:
        unknown = [key for key in kwargs if f"unexpected keyword argument '{key}'" in str(error)]
        if unknown:
            remedy = "name the device in device_map" if unknown == ["device"] else "leave it out"
            raise TypeError(f"from_pretrained has no argument {unknown[0]!r}: {remedy}") from error
        damage = isinstance(error, _DAMAGE) or "PytorchStreamReader" in str(error)
        if not folder or not damage:
            raise
        raise ValueError(
            f"the model in {str(name)!r} cannot be loaded ({type(error).__name__}: {error}): a file may be truncated; copy or "
            "download the folder again"
        ) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{len(missing)} weights are missing from {str(name)!r}, {missing[0]!r} for one, and would be random: copy or "
            "download it again"
        )
    if packed_weights(model):
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return text_only(model) if multimodal(model.config) else model


def _loaded(name: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """The model and what was read of it."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        try:
            return AutoModelForImageTextToText.from_pretrained(name, output_loading_info=True, **options)
        except ValueError:
            raise error from None


def _place(name: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder of a pocket model; other names as they are."""
    return zoo.FOLDER / name if name in zoo.names() and not Path(name).exists() else name


def load_tokenizer(name: str | os.PathLike[str], config: Any = None) -> Any:
    """The tokenizer of a hub id, or of the model in a folder (of an adapter without one, its base model's); ``None`` for a folder that has none.

    ``config``: the model's, for folders whose own config transformers cannot read.
    """
    name = _place(name)
    folder = zoo.tokenizer_folder(Path(name)) if Path(name).is_dir() else name
    if folder is None:
        base = _base_of(Path(name))
        return None if base is None else load_tokenizer(base)
    try:
        return AutoTokenizer.from_pretrained(folder, config=config)
    except Exception as error:
        if not Path(name).is_dir():
            raise
        raise ValueError(
            f"the tokenizer in {str(name)!r} cannot be loaded ({type(error).__name__}: {error}): a file may be truncated or missing; "
            "copy or download the folder again"
        ) from error


def _check_arguments(dtype: Any, device_map: Any) -> None:
    if (
        isinstance(dtype, str)
        and dtype != "auto"
        and not isinstance(getattr(torch, dtype, None), torch.dtype)
    ):
        raise ValueError(
            f"dtype is {dtype!r}: give 'auto', a torch.dtype, or the name of one, such as 'bfloat16'"
        )
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    if any(str(place).startswith("cuda") for place in places) and not torch.cuda.is_available():
        raise ValueError(
            f"device_map is {device_map!r} and PyTorch sees no CUDA device: leave it out, or give 'cpu'"
        )


def _check_folder(folder: Path, options: Mapping[str, Any]) -> None:
    if (folder / "spire.json").exists() and "config" not in options:
        raise ValueError(
            f"{str(folder)!r} is a SPIRe draft, which reads a target's activations, and no language model: give drafts.Spire({str(folder)!r})"
        )
    if (folder / "decoder.json").is_file():
        raise ValueError(f"{str(folder)!r} is a saved decoder: give it to sd.load({str(folder)!r})")
    if (base := _base_of(folder)) is not None:
        _check_adapter(folder, base, options)
        return
    if (folder / "head.json").is_file():
        raise ValueError(
            f"{str(folder)!r} is a draft head, and no language model: give it to .draft({str(folder)!r})"
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no config.json: it is not the folder of a saved model, or it is incomplete"
        )
    if not _weights(folder):
        raise FileNotFoundError(f"{str(folder)!r} has no weights (*.safetensors): copy or download it again")
    for index in folder.glob("*.index.json"):
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{str(index)!r} is no index of weights: copy or download the folder again"
            ) from None
        for file in named:
            if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
                raise ValueError(
                    f"{str(index)!r} names {file!r}, which is outside its folder, and is not read: copy or download the folder again"
                )
            if not (folder / file).is_file():
                raise FileNotFoundError(
                    f"{str(index)!r} names {file!r}, which is not there: copy or download the folder again"
                )


def _base_of(folder: Path) -> str | None:
    """The base model of the adapter in a folder; ``None``: it has no adapter, or the weights of a whole model.

    Raises:
        ValueError: the adapter names no base model, or its file is damaged.
    """
    file = folder / "adapter_config.json"
    if not file.is_file() or ((folder / "config.json").is_file() and _weights(folder)):
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str):
        raise ValueError(
            f"{str(file)!r} names no base_model_name_or_path: write the base model's hub id or folder there, or load both with PEFT and give "
            "wrapper.base_model.model"
        )
    return base


def _check_adapter(folder: Path, base: str, options: Mapping[str, Any]) -> None:
    """Refuse an adapter that transformers cannot load with its base model."""
    if not is_peft_available():
        raise ImportError(
            f"{str(folder)!r} is an adapter of {base!r}, and peft, which reads it, is not installed: pip install peft; or give a folder of the model that "
            "PEFT's merge_and_unload() returns"
        )
    if not [*folder.glob("adapter_model*")]:
        raise FileNotFoundError(
            f"{str(folder)!r} has no weights (adapter_model.safetensors): copy or download it again"
        )
    if Path(base).is_dir():
        _check_folder(Path(base), options)
    elif Path(base).is_absolute() or base.startswith((".", "~")) or base.count("/") > 1:
        raise FileNotFoundError(
            f"{str(folder)!r} is an adapter of {base!r}, and there is no such folder: correct base_model_name_or_path in its adapter_config.json"
        )
    else:
        check_hub_name(base, options)


def _weights(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]


def check_hub_name(name: str, options: Mapping[str, Any]) -> None:
    """Ask the hub once whether it has a model, unless the model is in the cache: transformers tries for half a minute.

    Args:
        options: of ``from_pretrained``.
    Raises:
        ValueError: the name cannot be one of the hub's, or the hub has no such model.
        ConnectionError: the hub does not answer, and the model is not in the cache.
    """
    close = get_close_matches(name, zoo.names(), 1)
    pocket = (
        f"did you mean the pocket model {close[0]!r}?"
        if close
        else f"pocket models are {', '.join(zoo.names())}"
    )
    what = f"{name!r} is neither a folder nor a pocket model"
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ValueError(
            f"{what}, and no name of a hub model, which looks like 'Qwen/Qwen3-0.6B': {pocket}"
        ) from None
    within = options.get("subfolder") or ""
    for config in ("config.json", "adapter_config.json", "head.json"):
        file = f"{within}/{config}".lstrip("/")
        if isinstance(
            try_to_load_from_cache(name, file, options.get("cache_dir"), options.get("revision")), str
        ):
            return
    asks = not (constants.HF_HUB_OFFLINE or options.get("local_files_only"))
    try:
        if asks:
            HfApi().model_info(name, timeout=_SECONDS, token=options.get("token"))
            return
    except GatedRepoError:
        return  # transformers says how to get access
    except RepositoryNotFoundError:
        raise ValueError(
            f"{what}, and the hub has no model of this name that you can read (for a private one: hf auth login): {pocket}"
        ) from None
    except HfHubHTTPError:
        return  # the hub answered; transformers finds out more
    except Exception as error:  # of the HTTP library, which has changed
        reason = f"the hub does not answer ({error})"
    else:
        reason = "the hub may not be asked (HF_HUB_OFFLINE or local_files_only)"
    raise ConnectionError(
        f"{what}, it is not in the hub's cache, and {reason}: give the folder of a saved model; {pocket}"
    )


def resolve(model: Any) -> tuple[Any, Any]:
    """A model in memory, a hub id (str) or a folder (Path), and the tokenizer passed with it; for a pocket SPIRe draft, its folder."""
    model, tokenizer = model if is_pair(model) else (model, None)
    if isinstance(model, os.PathLike) or (isinstance(model, str) and Path(model).exists()):
        return Path(model), tokenizer
    if isinstance(model, str) and model in zoo.names():
        folder = zoo.FOLDER / model
        return (folder, None) if (folder / "spire.json").exists() else zoo.read(model)
    return model, tokenizer


def is_pair(model: Any) -> bool:
    """Whether ``model`` is a pair of a model and its tokenizer."""
    return isinstance(model, tuple) and len(model) == 2
