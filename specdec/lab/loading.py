"""Loads models by the names on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec import zoo
from specdec.drafts.spire.model import FILE, SpireModel
from specdec.models.hf import HFModel


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
        return (model if dtype is None else model.to(dtype)), tokenizer
    made = HFModel.from_pretrained(name, dtype="auto" if dtype is None else dtype)
    return made.model, made.tokenizer


def load_draft(name: str, target: Any) -> Any:
    """A ``SpireModel`` for ``target``, or a causal LM, in float32; a pocket model's name or a folder.

    Raises:
        SystemExit: there is no such draft.
    """
    folder = Path(name) if Path(name).is_dir() else zoo.FOLDER / name
    if (folder / FILE).exists():
        return SpireModel.from_pretrained(folder, target, dtype=torch.float32)
    if folder.is_dir():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    raise SystemExit(f"no draft {name!r}: give a folder, or one of {', '.join(zoo.names())}")
