"""Makes a ``HeadModel`` from what users pass as a head: an object, a folder, a name, or a checkpoint of another project."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from transformers.utils import cached_file

from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.dflash2 import DFlash2
from specdec.drafts.heads.domino import Domino
from specdec.drafts.heads.dspark import DSpark
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.features import Tap
from specdec.drafts.heads.formats import layout_of, read
from specdec.drafts.heads.lilicorr import LiLiCorr
from specdec.drafts.heads.medusa import Medusa
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.mtp import MTP
from specdec.drafts.heads.pard2 import Pard2
from specdec.drafts.heads.peagle import PEagle
from specdec.drafts.heads.stored import FILE
from specdec.drafts.heads.xpress import XPress
from specdec.drafts.hub import folder_of
from specdec.models.fingerprint import unwrapped
from specdec.models.load import check_hub_name
from specdec.zoo import files as zoo

HEADS: tuple[type[HeadModel], ...] = (
    Eagle3,
    PEagle,
    Pard2,
    MTP,
    Medusa,
    DFlash,
    DFlash2,
    DSpark,
    Domino,
    LiLiCorr,
    XPress,
)
"""The library's own heads, which are loaded from folders by name; a head of your own is loaded by its class."""


def as_head(model: Any) -> HeadModel:
    """A ``HeadModel``: the one that is given, or the one in a folder, or a pocket head by its name.

    Raises:
        TypeError: it is none of these. FileNotFoundError: the folder holds no head. ValueError: it holds one that the library does not know.
    """
    if isinstance(model, (str, os.PathLike)):
        folder = Path(model)
        if isinstance(model, str) and not folder.exists() and (zoo.FOLDER / model / FILE).exists():
            return read_pocket(model, zoo.FOLDER)[0]
        if not (folder / FILE).exists():
            raise FileNotFoundError(
                f"{folder} has no {FILE}: it is not the folder of a head; heads.load(name, target) reads checkpoints of other projects, and hub ids"
            )
        name = json.loads((folder / FILE).read_text())["head"]
        kinds = {kind.__name__: kind for kind in HEADS}
        if name not in kinds:
            raise ValueError(
                f"{folder} holds a {name!r}, which is not one of {', '.join(kinds)}: load it with {name}.from_pretrained(folder)"
            )
        return kinds[name].from_pretrained(folder)
    if not isinstance(model, HeadModel):
        raise TypeError(
            f"model is a {type(model).__name__}: give a head, such as heads.Eagle3.from_target(target), or the folder of a saved one"
        )
    return model


def load(
    name: str | os.PathLike[str],
    target: Any,
    *,
    taps: Sequence[Tap] | None = None,
    dtype: torch.dtype | None = None,
    ignore: Collection[str] = (),
    any_target: bool = False,
    **settings: Any,
) -> HeadModel:
    """The head in a folder or under a hub id, bound to its target: one that was saved here, or a checkpoint of another project (``formats``).

    Args:
        name: the folder, or the hub id. target: an ``HFModel`` or a transformers model, the one that the head was made for. A checkpoint of
            another project does not say which that is; one of the same sizes is not refused, and its tokens are hardly ever accepted.
        dtype: ``None`` is the checkpoint's own. taps, settings: the layers that the head reads and arguments of its class, in place of those
            that the checkpoint of another project names. ignore: fields of its config that are not read.
        any_target: only the sizes of the target are checked, where a head that was saved here is otherwise refused by all but its own target. It is for the
            same target in another form (quantised, with an adapter, merged). The output is the target's in any case; fewer tokens may be accepted.
    Raises:
        FileNotFoundError: there are no such files. ValueError: as ``formats.read`` and ``HeadModel.bound``. TypeError: taps, settings or ignored
            fields for a head that was saved here.
    """
    folder, model = folder_of(name), unwrapped(target)
    if (folder / FILE).exists():
        if taps is not None or ignore or settings:
            raise TypeError(f"{folder} holds a head with its own settings: leave taps, ignore and others out")
        head = as_head(folder).to(dtype=dtype)
        head.any_target = any_target or head.any_target
        return head.bound(target)
    return read(folder, model, taps, ignore, settings).to(dtype=dtype).eval().bound(target)


def is_checkpoint(name: Any, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a folder has a head of another project, or a hub id any head; ``load`` reads both.

    Args:
        options: of ``from_pretrained``, with which the hub is asked (``token``, ``cache_dir``, ``revision``, ``local_files_only``).
    Raises:
        ValueError, ConnectionError: as for a model's hub id.
    """
    if not isinstance(name, (str, os.PathLike)) or name in zoo.names():
        return False
    config: Path | None = Path(name) / "config.json"
    if not Path(name).exists() and isinstance(name, str) and name.count("/") == 1 and name[0] not in "./~":
        given = options or {}
        check_hub_name(name, given)
        config = from_hub(name, "config.json", given)
        if config is None:
            return from_hub(name, FILE, given) is not None
    try:
        found = json.loads(config.read_text(encoding="utf-8")) if config is not None else None
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and layout_of(found) is not None


def from_hub(name: str, file: str, options: Mapping[str, Any]) -> Path | None:
    """A file of a hub id: from the cache, or from the hub; ``None``: there is none, or it is not for all to read."""
    where = {key: options[key] for key in ("cache_dir", "revision") if options.get(key) is not None}
    within = options.get("subfolder") or ""
    found = try_to_load_from_cache(name, f"{within}/{file}".lstrip("/"), **where)
    if not isinstance(found, str) and not constants.HF_HUB_OFFLINE:
        more = {key: options[key] for key in ("token", "local_files_only") if key in options}
        with suppress(OSError):
            found = cached_file(name, file, subfolder=within, **where, **more)
    return Path(found) if isinstance(found, str) else None


def read_pocket(name: str, folder: str | Path = zoo.FOLDER) -> tuple[HeadModel, Any]:
    """A pocket head in float32, not bound to a target yet, and its tokenizer, as ``zoo.load``."""
    return zoo.read(name, folder, lambda path: as_head(path).float())


def is_head(model: Any) -> bool:
    """Whether ``model`` is a head, in memory, in a folder or in the zoo."""
    if isinstance(model, (str, os.PathLike)):
        pocket = isinstance(model, str) and not Path(model).exists()  # as ``as_head``
        return ((zoo.FOLDER / model if pocket else Path(model)) / FILE).exists()
    return isinstance(model, HeadModel)
