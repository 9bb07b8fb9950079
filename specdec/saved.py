"""A decoder on disk: ``decoder.json`` names its parts with their settings, and every model has a folder beside it.

A recipe names parts of the library only, so that reading one runs no code that comes with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from inspect import isroutine
from pathlib import Path
from shutil import rmtree
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from specdec import arm_policy, drafts, executors, grammars, pruning, sampling, selectors, verifiers
from specdec.configs import setting
from specdec.cost import arms, rounds
from specdec.drafts import heads, siblings, stops
from specdec.drafts.coerce import as_model, place
from specdec.drafts.heads.load import HEADS, as_head, is_head
from specdec.drafts.spire import SpireModel
from specdec.drafts.spire.load import as_spire, is_spire
from specdec.kernels.float8 import DTYPES
from specdec.masks import Mask
from specdec.masks.text import known, parse
from specdec.models.check import Options
from specdec.models.hf import HFModel
from specdec.models.load import load_tokenizer
from specdec.models.masked import Masked
from specdec.models.own_cache import OwnCache
from specdec.models.stacked import StackedModel
from specdec.models.windowed import Windowed
from specdec.selectors import kinds, rewards

FILE, VERSION = "decoder.json", 1
MODULES = (
    drafts, heads, siblings, stops, verifiers, executors, selectors, kinds, rewards, pruning, sampling, grammars, arm_policy, arms, rounds
)  # fmt: skip
PARTS: dict[str, Any] = {
    f"{module.__name__.removeprefix('specdec.')}.{name}": kind
    for module in MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type) and is_dataclass(kind)
} | {"models.Masked": Masked, "models.Windowed": Windowed, "drafts.Translated": drafts.Translated}
"""What a recipe may name."""
NAMES = {kind: name for name, kind in reversed(PARTS.items())}


def save(folder: str | os.PathLike[str], parts: Mapping[str, Any]) -> None:
    """Write parts by name, the target first, to a new folder.

    Raises:
        FileExistsError: there are files in the folder.
        TypeError: a part is not the library's; the message names it. Whatever is raised, nothing is written.
    """
    folder = _path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{str(folder)!r} is not an empty folder: give a new one")
    writer = _Writer()
    recipe = {"version": VERSION, **{name: writer.text(part, name) for name, part in parts.items()}}
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, saved in writer.folders.items():
            for part in saved:
                with _unchanged(setting(part, "config"), setting(part, "generation_config")):
                    part.save_pretrained(folder / name)
        (folder / FILE).write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    except BaseException:
        for made in folder.iterdir():  # it was empty
            rmtree(made) if made.is_dir() else made.unlink()
        if new:
            folder.rmdir()
        raise


@contextmanager
def _unchanged(*configs: Any) -> Iterator[None]:
    """transformers writes into a model's configs when it saves it."""
    before = [(config, dict(vars(config))) for config in configs if config is not None]
    try:
        yield
    finally:
        for config, kept in before:
            vars(config).clear()
            vars(config).update(kept)


class _Writer:
    """Parts as JSON. ``folders``: of every model that was met, what is saved there (the model, and a tokenizer if it has one)."""

    def __init__(self) -> None:
        self.folders: dict[str, list[Any]] = {}

    def text(self, part: Any, path: str) -> Any:
        """``part`` as JSON; ``path`` names it in messages."""
        if part is None or isinstance(part, (bool, int, float, str)):
            return part
        if isinstance(part, (tuple, list)):
            return [self.text(one, f"{path}[{i}]") for i, one in enumerate(part)]
        if isinstance(part, Mapping):
            return {"pairs": [[self.text(one, path) for one in pair] for pair in part.items()]}
        if isinstance(part, StackedModel):
            raise TypeError(
                f"{path} is of a stacked pool, which {FILE} cannot name: save the pool without stacked=True, and give it in code again, "
                "sd.load(folder).pool(..., stacked=True)"
            )
        if isinstance(part, Mask) and known(part):
            return {"mask": repr(part)}
        if type(part) in (SpireModel, *HEADS):
            if part.mask is not None and not known(part.mask):
                raise _refused(f"{path}.mask", part.mask)
            return {"model": self.folder(part, path)}
        if type(part) in (HFModel, OwnCache):
            return self.language_model(part, path)
        if isinstance(part, PreTrainedTokenizerBase):
            return {"tokenizer": self.folder(part, path)}
        if type(part) not in NAMES:
            raise _refused(path, part)
        own: dict[str, Any] = {"part": NAMES[type(part)]}
        if isinstance(part, drafts.Translated):
            both = {"model": part.model, "tokenizer": part.tokenizer}
            return own | {name: self.text(one, f"{path}.{name}") for name, one in both.items()}
        if isinstance(part, Masked):
            own["model"], own["block"] = self.language_model(part, path), part.block
            if isinstance(part, Windowed):
                return own | {"window": part.window, "sinks": part.sinks}
            own["storage"] = "dense" if part.reach is None else "ring"
            return own | {"mask": self.text(part.mask, f"{path}.mask")}
        settings = {
            field.name: vars(part)[field.name]
            for field in fields(part)
            if field.init and not (isroutine(field.default) and vars(part)[field.name] is field.default)
        }
        return own | {name: self.text(value, f"{path}.{name}") for name, value in settings.items()}

    def language_model(self, part: HFModel | OwnCache, path: str) -> dict[str, Any]:
        kind: Any = OwnCache if isinstance(part, OwnCache) else HFModel  # also of a model under a mask
        own, default = vars(part), kind.__init__.__kwdefaults__
        names = [name for name in default if isinstance(part, OwnCache) or name in Options.__annotations__]
        options = {name: own[name] for name in names if own[name] != default[name]}
        if isinstance(part, OwnCache):
            options["own_cache"] = True
        elif part.kv_dtype is not None:
            options["kv_dtype"] = str(part.kv_dtype)
        for name, value in [*options.items(), ("tokenizer", part.tokenizer)]:
            if not (value is None or isinstance(value, (bool, int, str, PreTrainedTokenizerBase))):
                raise _refused(f"{path}.{name}", value)
        return {"model": self.folder(part.model, path, part.tokenizer), **options}

    def folder(self, model: Any, path: str, tokenizer: Any = None) -> str:
        """The folder of a model, one for all parts that share it: ``target``, ``draft``, ``draft_2``, ..."""
        for name, saved in self.folders.items():
            if any(one is model for one in saved):
                return name
        if isinstance(model, nn.Module) and any(
            type(m).__module__.startswith("peft.") for m in model.modules()
        ):
            raise TypeError(
                f"{path} has an adapter of PEFT's, and a folder would hold the adapter or weights under its names, which do not load: give the merged model, "
                "peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()"
            )
        name = path.partition(".")[0]
        same = sum(other.partition("_")[0] == name for other in self.folders)
        name = f"{name}_{same + 1}" if same else name
        self.folders[name] = [model] if tokenizer is None else [model, tokenizer]
        return name


def _refused(path: str, part: Any) -> TypeError:
    method = path.partition(".")[0]
    remedy = (
        "give an HFModel with a tokenizer of transformers'"
        if method == "target"
        else f"save the decoder without it, and give it in code again, sd.load(folder).{method}(...)"
    )
    return TypeError(f"{path} is {repr(part)[:200]}, which {FILE} cannot name: {remedy}")


def _path(folder: Any) -> Path:
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder is {folder!r}: give a path")
    return Path(folder)


def load(folder: str | os.PathLike[str], device_map: Any = None) -> dict[str, Any]:
    """The parts that ``save`` wrote, by name.

    Args:
        device_map: of the language models; ``None``: the GPU if there is one.
    Raises:
        FileNotFoundError: there is no saved decoder. ValueError: the recipe is damaged, or of another version.
    """
    file = _path(folder) / FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {FILE}: give a folder that decoder.save(folder) wrote; a model's folder goes to sd.decoder(folder)"
        )
    try:
        recipe = json.loads(file.read_text(encoding="utf-8"))
        version = recipe.pop("version")
        if version == VERSION:
            reader = _Reader(file.parent, device_map)
            return {name: reader.part(saved) for name, saved in recipe.items()}
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{str(file)!r} is damaged ({type(error).__name__}: {error}): save the decoder again"
        ) from error
    raise ValueError(f"{str(file)!r} has version {version!r}, and this library reads version {VERSION}")


class _Reader:
    """Parts from JSON; parts that shared a model share it again."""

    def __init__(self, folder: Path, device_map: Any):
        self.folder, self.device_map = folder, device_map
        self.models: dict[str, Any] = {}

    def part(self, saved: Any) -> Any:
        if isinstance(saved, list):
            return tuple(self.part(one) for one in saved)
        if not isinstance(saved, dict):
            return saved
        settings = dict(saved)
        if "pairs" in settings:
            return {self.part(key): self.part(value) for key, value in settings["pairs"]}
        if "tokenizer" in settings and len(settings) == 1:
            return load_tokenizer(self.inside(settings["tokenizer"]))
        if "part" not in settings:
            return parse(saved["mask"]) if "mask" in saved else self.model(settings.pop("model"), settings)
        kind = PARTS.get(settings.pop("part"))
        if kind is None:
            raise ValueError(
                f"{FILE} names the part {saved['part']!r}, which this version of the library does not have"
            )
        return kind(**{name: self.part(value) for name, value in settings.items()})

    def inside(self, name: str) -> Path:
        """The folder of a model or a tokenizer."""
        if name in ("", "..") or Path(name).name != name:
            raise ValueError(f"{FILE} names the model {name!r}, which is outside its folder, and is not read")
        if not (self.folder / name).is_dir():
            raise FileNotFoundError(
                f"{FILE} names the folder {name!r}, which is not there: save the decoder again"
            )
        return self.folder / name

    def model(self, name: str, options: dict[str, Any]) -> Any:
        if "kv_dtype" in options:
            options["kv_dtype"] = {str(dtype): dtype for dtype in DTYPES}[options["kv_dtype"]]
        path, found = self.inside(name), self.models.get(name)
        kind = OwnCache if options.pop("own_cache", False) else HFModel
        if isinstance(found, (HFModel, OwnCache)):  # another wrapper of the same weights
            return kind(found.model, found.tokenizer, **options)
        if found is None:
            device = self.models["target"].device if self.models else None
            if is_spire(path):
                found = as_spire(path).to(device)
            elif is_head(path):
                found = as_head(path).to(device)
            elif kind is OwnCache:
                found = OwnCache.from_pretrained(path, device_map=place(self.device_map, device), **options)
            else:
                found = as_model(path, name, device, device_map=self.device_map, **options)
            self.models[name] = found
        return found
