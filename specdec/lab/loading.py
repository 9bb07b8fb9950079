"""Models and drafts by the names on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec import drafts, zoo
from specdec.drafts.coerce import as_model
from specdec.drafts.heads import HeadModel
from specdec.drafts.heads.load import as_head, is_head
from specdec.drafts.spire.model import FILE, SpireModel
from specdec.masks import streaming
from specdec.models.hf import HFModel
from specdec.models.load import load as read
from specdec.models.load import load_tokenizer
from specdec.models.windowed import Windowed


def load(name: str, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A transformers model in evaluation mode, and its tokenizer.

    Args:
        name: a pocket model, or a folder or hub id that transformers can load. dtype: of the weights; default: float32 for a pocket
            model, the checkpoint's own for others.
    Raises:
        FileNotFoundError, ValueError: as ``HFModel.from_pretrained``.
    """
    if name in zoo.names():
        model, tokenizer = zoo.load(name)
        return (model if dtype is None else in_dtype(model, dtype)), tokenizer
    model, tokenizer = read(name, dtype="auto" if dtype is None else dtype), load_tokenizer(name)
    as_model((model, tokenizer), name)  # refuses what no wrapper runs
    return model, tokenizer


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The same ``model``, its parameters in ``dtype``. Buffers stay as they are, as where transformers loads a checkpoint: in half precision,
    the frequencies of a rotary embedding would be rounded."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def load_draft(name: str, target: Any) -> Any:
    """A ``SpireModel`` or a head for ``target``, or a causal LM, in float32; a pocket model's name or a folder.

    Raises:
        SystemExit: there is no such draft.
    """
    folder = draft_folder(name)
    if (folder / FILE).exists():
        return SpireModel.from_pretrained(folder, target, dtype=torch.float32)
    if is_head(folder):
        return as_head(folder).float().bound(target)
    if folder.is_dir():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    raise SystemExit(f"no draft {name!r}: give a folder, or one of {', '.join(zoo.names())}")


def draft_folder(name: str) -> Path:
    """The folder of a draft: ``name`` if it is one, otherwise the pocket model's of this name, which need not exist."""
    return Path(name) if Path(name).is_dir() else zoo.FOLDER / name


def draft_part(spec: str, target: HFModel, window: int, sinks: int) -> tuple[str, Any]:
    """The name and the draft of ``NAME=DRAFT``, where ``DRAFT`` is as for ``load_draft``, or ``ngram``, ``magicdec``, ``none`` or ``windowed:DRAFT``.

    A causal LM keeps its keys and values in eight bits as ``fp8:DRAFT``, windowed as ``windowed:fp8:DRAFT``. One with another tokenizer than the
    target's is ``Translated``, and ``TextMatch`` as ``text:DRAFT``.

    Raises:
        SystemExit: there is no such draft, or ``fp8:`` is given for a draft that is not a causal LM.
    """
    name, equals, said = spec.partition("=")
    said = said if equals else name
    if said == "ngram":
        return name, drafts.NGram()
    if said == "none":
        return name, drafts.NoDraft()
    if said == "magicdec":
        return name, drafts.MagicDec(window=window, sinks=sinks)
    by_text = said.startswith("text:")
    said = said.removeprefix("text:")
    narrow = said.startswith("windowed:")
    said = said.removeprefix("windowed:")
    found = load_draft(said.removeprefix("fp8:"), target.model)
    kv_dtype = torch.float8_e4m3fn if said.startswith("fp8:") else None
    if kv_dtype is not None and isinstance(found, SpireModel | HeadModel):
        raise SystemExit(f"no draft {said!r}: keys and values of eight bits are for causal LMs")
    if isinstance(found, SpireModel):
        return name, drafts.Spire(found)
    if isinstance(found, HeadModel):
        return name, drafts.Head(found.masked(streaming(window, sinks)) if narrow else found)
    own = load_tokenizer(draft_folder(said.removeprefix("fp8:")))
    shared = share_ids(own, target.tokenizer)
    model: Any = HFModel(found, target.tokenizer if shared else own, kv_dtype=kv_dtype)
    model = Windowed(model, window, sinks) if narrow else model
    if by_text:
        return name, drafts.TextMatch(model, target.tokenizer)
    return name, drafts.Model(model if shared else drafts.Translated(model, target.tokenizer))


def share_ids(one: Any, other: Any) -> bool:
    """Whether the tokens that two tokenizers have in common have the same ids; ``None`` goes with any."""
    if one is None or other is None:
        return True
    a, b = one.get_vocab(), other.get_vocab()
    common = a.keys() & b.keys()
    return len(common) > 0 and all(a[token] == b[token] for token in common)
