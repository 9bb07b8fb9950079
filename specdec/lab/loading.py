"""Models and drafts by the names on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec import drafts, zoo
from specdec.drafts.coerce import as_model, place
from specdec.drafts.heads import MTP, HeadModel
from specdec.drafts.heads.load import is_checkpoint, is_head
from specdec.drafts.heads.load import load as load_head
from specdec.drafts.spire.load import on_hub
from specdec.drafts.spire.model import FILE, SpireModel
from specdec.elsewhere import METHODS
from specdec.masks import streaming
from specdec.models.hf import HFModel
from specdec.models.load import load as read
from specdec.models.load import load_tokenizer
from specdec.models.windowed import Windowed

UNTRAINED = {"ngram": drafts.NGram, "suffix": drafts.Suffix, "none": drafts.NoDraft}


def load(name: str, dtype: torch.dtype | None = None, device: Any = None) -> tuple[Any, Any]:
    """A transformers model in evaluation mode, and its tokenizer.

    Args:
        name: a pocket model, or a folder or hub id that transformers can load. dtype: of the weights; default: float32 for a pocket
            model, the checkpoint's own for others. device: where it goes; default: the CPU for a pocket model, for others the GPU if there is one.
    Raises:
        FileNotFoundError, ValueError: as ``HFModel.from_pretrained``.
    """
    if name in zoo.names():
        model, tokenizer = zoo.load(name)
        model = model if dtype is None else in_dtype(model, dtype)
        return (model if device is None else model.to(device)), tokenizer
    model = read(name, dtype="auto" if dtype is None else dtype, device_map=place(None, device))
    tokenizer = load_tokenizer(name)
    as_model((model, tokenizer), name)  # refuses what no wrapper runs
    return model, tokenizer


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The same ``model``, its parameters in ``dtype``. Buffers stay as they are, as where transformers loads a checkpoint: in half precision,
    the frequencies of a rotary embedding would be rounded."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def load_draft(name: str, target: Any, dtype: torch.dtype | None = None) -> Any:
    """A ``SpireModel`` or a head for ``target``, or a causal LM and its tokenizer, on the target's device.

    Args:
        name: a pocket model, a folder or a hub id. target: an ``HFModel`` or an ``OwnCache``. dtype: as for ``load``.
    Raises:
        SystemExit: it is the name of another engine's method. FileNotFoundError, ValueError, ConnectionError: there is no such draft, or it is of another target.
    """
    folder = draft_folder(name)
    here = folder.is_dir()
    if name in METHODS and not here:
        raise SystemExit(f"no draft {name!r}, a name of vLLM's: {METHODS[name]}")
    if dtype is None and here and folder.resolve().parent == zoo.FOLDER.resolve():
        dtype = torch.float32
    if is_head(folder) or is_checkpoint(name):
        return load_head(folder if here else name, target, dtype=dtype)
    if (folder / FILE).exists() if here else on_hub(name, {}):
        where = place(None, target.device)
        kind = "auto" if dtype is None else dtype
        return SpireModel.from_pretrained(folder if here else name, target, dtype=kind, device_map=where)
    model, tokenizer = load(name, dtype, target.device)
    return model, load_tokenizer(folder) if here else tokenizer


def own_head(target: Any) -> drafts.Head:
    """The MTP layer of the target's own checkpoint.

    Raises:
        SystemExit: it has none that ``MTP`` runs.
    """
    try:
        return drafts.Head(MTP.from_checkpoint(target))
    except ValueError as error:
        raise SystemExit(
            f"no draft 'mtp', which is the MTP layer of the target's own checkpoint ({error}): name another draft; recipes/train_head.py trains a head"
        ) from None


def draft_folder(name: str) -> Path:
    """The folder of a draft: ``name`` if it is one, otherwise the pocket model's of this name, which need not exist."""
    return Path(name) if Path(name).is_dir() else zoo.FOLDER / name


def draft_part(
    spec: str, target: Any, window: int = 64, sinks: int = 1, dtype: torch.dtype | None = None
) -> tuple[str, Any]:
    """The name and the draft of ``NAME=DRAFT``, where ``DRAFT`` is as for ``named_draft``."""
    name, equals, said = spec.partition("=")
    return name, named_draft(said if equals else name, target, window, sinks, dtype)


def named_draft(
    said: str, target: Any, window: int = 64, sinks: int = 1, dtype: torch.dtype | None = None
) -> Any:
    """The draft of a name: as for ``load_draft``, or ``ngram``, ``suffix``, ``magicdec``, ``none``, ``windowed:DRAFT``, or ``mtp``, the MTP layer of the
    target's own checkpoint.

    A causal LM keeps its keys and values in eight bits as ``fp8:DRAFT``, windowed as ``windowed:fp8:DRAFT``. One with another tokenizer than the
    target's is ``Translated``, and ``TextMatch`` as ``text:DRAFT``, before the other prefixes.

    Args:
        target: an ``HFModel`` or an ``OwnCache``. dtype: as for ``load``; ``mtp`` has the target's.
    Raises:
        SystemExit: the target has no such layer, or a prefix does not fit the draft; and other errors as ``load_draft``.
    """
    if said in UNTRAINED:
        return UNTRAINED[said]()
    if said == "magicdec":
        return drafts.MagicDec(window=window, sinks=sinks)
    if said == "mtp":
        return own_head(target)
    rest, given = said, set[str]()
    for prefix in ("text:", "windowed:", "fp8:"):
        if rest.startswith(prefix):
            rest = rest.removeprefix(prefix)
            given.add(prefix)

    def refuse(prefix: str, why: str) -> None:
        if prefix in given:
            raise SystemExit(f"no draft {said!r}: {why}: leave {prefix} out")

    if not rest:
        raise SystemExit(f"no draft {said!r}: name a draft after {said}")
    found = load_draft(rest, target, dtype)
    if isinstance(found, SpireModel | HeadModel):
        refuse("text:", "the text of a causal LM is matched, and this draft reads the target's activations")
        refuse("fp8:", "keys and values of eight bits are for causal LMs")
    if isinstance(found, SpireModel):
        refuse("windowed:", "a SPIRe draft has a mask of its own")
        return drafts.Spire(found)
    if isinstance(found, HeadModel):
        return drafts.Head(found.masked(streaming(window, sinks)) if "windowed:" in given else found)
    lm, own = found
    shared = share_ids(own, target.tokenizer)
    model: Any = as_model((lm, target.tokenizer if shared else own), said)
    if not isinstance(model, HFModel):
        refuse("windowed:", "its model runs with transformers' own cache, where nothing is masked")
        refuse("fp8:", "its model runs with transformers' own cache, whose precision is its own")
    if "fp8:" in given:
        model = HFModel(lm, model.tokenizer, kv_dtype=torch.float8_e4m3fn)
    model = Windowed(model, window, sinks) if "windowed:" in given else model
    if "text:" in given:
        return drafts.TextMatch(model, target.tokenizer)
    return drafts.parallel.over(model if shared else drafts.Translated(model, target.tokenizer))


def share_ids(one: Any, other: Any) -> bool:
    """Whether the tokens that two tokenizers have in common have the same ids; ``None`` goes with any."""
    if one is None or other is None:
        return True
    a, b = one.get_vocab(), other.get_vocab()
    common = a.keys() & b.keys()
    return len(common) > 0 and all(a[token] == b[token] for token in common)
