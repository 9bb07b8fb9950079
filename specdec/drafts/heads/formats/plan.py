"""From what a format says of a checkpoint to a head: tensors are renamed, and copies of the target's are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from specdec.drafts.heads.features import Tap
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.vocabulary import check_offsets
from specdec.forward.ends import Ends

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
OWN = {EMBEDDING: "own_embedding", HEAD: "own_head"}
RESIDUAL = "norm_before_residual"  # an argument of Eagle3, and a field of some configs


@dataclass(frozen=True)
class Plan:
    """What a checkpoint holds, in the terms of a head's class.

    Attributes:
        kind: the class. config: of the body. taps: as ``HeadModel`` takes them. settings: the class's own arguments.
        names: the beginning of a tensor's name in the checkpoint -> in the class. drop: beginnings of tensors that no head needs.
    """

    kind: type[HeadModel]
    config: LlamaConfig
    taps: Sequence[Tap]
    settings: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    drop: Sequence[str] = ()

    def ours(self, name: str) -> str:
        """The class's name of a tensor of the checkpoint."""
        return next((new + name[len(old) :] for old, new in self.names.items() if name.startswith(old)), name)

    def theirs(self, name: str) -> str:
        """The checkpoint's name of a tensor of the class."""
        return next((old + name[len(new) :] for old, new in self.names.items() if name.startswith(new)), name)


@dataclass(frozen=True)
class Format:
    """A layout of checkpoints.

    Attributes:
        name: of the project. takes: whether a config is of this layout. plan: from the config's fields, the tensors, the number of the
            target's blocks and the size of its vocabulary to a ``Plan``.
    """

    name: str
    takes: Callable[[Mapping[str, Any]], bool]
    plan: Callable[[Fields, Mapping[str, Tensor], int, int], Plan]


def built(plan: Plan, tensors: Mapping[str, Tensor], source: str, ends: Ends) -> HeadModel:
    """The head of a checkpoint, not bound yet. An embedding or an output matrix that is the target's is not kept.

    Args:
        tensors: of the checkpoint. source: its name, for messages. ends: the target's.
    Raises:
        ValueError: tensors are missing, unknown or of another shape, named as in the checkpoint; or a vocabulary that is none.
    """
    if plan.settings.get("mask_token", 0) is None:
        raise ValueError(
            f"{source}: the config has no mask token: give mask_token=, the id of the target with which the head was trained"
        )
    if plan.settings.get(RESIDUAL, False) is None:
        raise ValueError(
            f"{source}: the config lacks {RESIDUAL}, for which speculators takes False and vLLM True: give {RESIDUAL}=True or False, the value with "
            "which the head was trained"
        )
    if plan.settings.get("windows_causal", False) is None:
        raise ValueError(
            f"{source}: some layers have a window, and the config does not say whether they are causal within the block, on which engines differ: give "
            "windows_causal=True or False, the value with which the head was trained"
        )
    drop = ("rotary_emb.inv_freq", *plan.drop)
    mine = {plan.ours(name): t for name, t in tensors.items() if not _dropped(name, drop)}
    d2t, t2d = mine.pop("d2t", None), mine.pop("t2d", None)
    vocabulary = None if d2t is None else _ids(d2t, t2d, plan.config.vocab_size, source)
    for name, theirs in ((EMBEDDING, ends.table.weight), (HEAD, ends.output.weight)):
        if plan.settings.get(OWN[name]):
            continue
        plain = name == EMBEDDING or (
            vocabulary is None and ends.output.bias is None and not ends.softcap and ends.scale == 1
        )
        if plain and name in mine and _same(mine[name], theirs):
            del mine[name]
    own = {setting: name in mine for name, setting in OWN.items()}
    head = plan.kind(plan.config, plan.taps, vocabulary=vocabulary, **{**own, **plan.settings})
    if head.d2t is not None:
        mine["d2t"] = head.d2t
    return head.filled(mine, source, plan.theirs)


def _dropped(name: str, drop: Sequence[str]) -> bool:
    return name.endswith(drop[0]) or name.startswith(tuple(drop[1:]))


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and torch.equal(mine, theirs.detach().to(mine.device, mine.dtype))


def _ids(d2t: Tensor, t2d: Tensor | None, vocab_size: int, source: str) -> Tensor | None:
    """The ids of a reduced vocabulary; ``None`` if it has all.

    ``d2t`` holds offsets. A map of ids in their place is recognised if ``t2d`` confirms it; without ``t2d`` nothing tells the two apart.

    Raises:
        ValueError: the map is neither, or without ``t2d`` holds no offsets.
    """
    d2t = d2t.long().cpu()
    if len(d2t) == vocab_size and not d2t.any():
        return None
    if t2d is not None and torch.equal(t2d.bool().cpu().nonzero()[:, 0], d2t):
        return d2t
    try:
        check_offsets(d2t, vocab_size, t2d)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return d2t + torch.arange(len(d2t))
