"""What users give for a part of a decoder: refused by name where it is none, and made a draft where it stands for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from specdec import drafts
from specdec.drafts.coerce import ModelLike, as_model, in_memory
from specdec.drafts.heads.load import is_checkpoint, is_head, load
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.spire import SpireModel
from specdec.drafts.spire.load import is_spire, on_hub
from specdec.elsewhere import METHODS
from specdec.masks import Mask
from specdec.models.check import Loading
from specdec.models.hf import HFModel
from specdec.models.load import is_pair
from specdec.models.own_cache import OwnCache
from specdec.protocols import Draft

DraftLike = Draft[Any] | ModelLike | SpireModel | HeadModel | tuple[SpireModel | HeadModel, Any]


def made(name: str, part: Any, *parts: str) -> None:
    """Raise TypeError for a class in place of an object, and for an object that lacks one of the methods ``parts``."""
    if isinstance(part, type):
        raise TypeError(f"{name} is the class {part.__name__}: give an object, {part.__name__}(...)")
    lacking = [method for method in parts if not hasattr(part, method)]
    if lacking:
        what = repr(part) if isinstance(part, str) else f"a {type(part).__name__}"
        raise TypeError(
            f"{name} is {what} without {', '.join(lacking)}: give one of specdec.{name}s, or an object with {', '.join(parts)}"
        )


def as_draft(
    draft: Any, name: str, device: Any = None, target: Any = None, **options: Unpack[Loading]
) -> Draft[Any]:
    """A draft from a draft, a SPIRe model, a head, the folder or hub id of one, or what ``as_model`` takes: ``drafts.Parallel`` of a model whose config names
    a mask token, else ``drafts.Model``.

    Args:
        target: for the checkpoint of a head of another project, which does not say what it was made for.
    """
    made(name, draft)
    if isinstance(draft, str) and draft in METHODS and not Path(draft).exists():
        raise TypeError(f"{name} is {draft!r}, a name of vLLM's: {METHODS[draft]}")
    if hasattr(draft, "propose"):  # ``build`` checks the other methods
        in_memory(name, options)
        return draft
    if draft is None:
        raise TypeError(f"{name} is None: give drafts.NoDraft() for plain decoding, or a draft")
    if isinstance(draft, list):
        raise TypeError(f"{name} is a list: give one draft; pool() and specdec.auto take several, by name")
    if is_spire(draft):
        in_memory(name, options)
        return drafts.Spire(draft)
    if is_head(head := draft[0] if is_pair(draft) else draft):
        in_memory(name, options)
        return drafts.Head(head)
    if isinstance(draft, Mask):
        raise TypeError(f"{name} is a mask: give the model that uses it, models.Masked(model, {draft!r})")
    if callable(draft) and not any(hasattr(draft, name) for name in ("config", "score", "as_generate")):
        raise TypeError(f"{name} is a function: give chain_draft(function), which makes it a draft")
    if is_checkpoint(head, options):
        if target is None or options:
            raise TypeError(
                f"{name} is the checkpoint of a head, which reads a target's activations: give drafts.Head(drafts.heads.load({str(head)!r}, "
                "target)), with dtype= and other options there"
            )
        if not isinstance(target, (HFModel, OwnCache)):
            raise ValueError(
                f"{name} is the checkpoint of a head, which reads the target's activations, and the target is a {type(target).__name__}: give an "
                "HFModel or an OwnCache"
            )
        return drafts.Head(load(head, target))
    if on_hub(head, options):
        if options:
            raise TypeError(
                f"{name} is a SPIRe draft: give SpireModel.from_pretrained({head!r}, target), with dtype= and other options there"
            )
        return drafts.Spire(SpireModel.from_pretrained(head).eval())
    return drafts.parallel.over(as_model(draft, name, device, **options))
