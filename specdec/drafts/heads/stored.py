"""A head on disk: ``head.json``, its weights, and a model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.drafts.heads.vocabulary import check_offsets
from specdec.drafts.hub import folder_of, push, write_card
from specdec.masks.text import known, parse

FILE, WEIGHTS = "head.json", "model.safetensors"


class StoredHead(nn.Module):
    """What ``HeadModel`` can do with a folder, and what of it is stored there.

    Attributes:
        any_target: whether every target of the head's sizes is taken, whatever its weights: that of the head in another form, for example.
    """

    config: LlamaConfig
    taps: tuple[Any, ...]
    target: str
    mask: Any
    settings: dict[str, Any]
    tokenizer: Any = None
    any_target = False

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the weights and ``head.json``: the class's name, its settings, and the config of its body; and a model card, if there is none.

        Raises:
            ValueError: the mask is a function, which has no text.
        """
        if self.mask is not None and not known(self.mask):
            raise ValueError(
                f"mask is {self.mask!r}, which cannot be saved: make it of masks.Causal, Window, Sinks, Strided and Block, or save "
                "state_dict()"
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        about = {
            "head": type(self).__name__,
            "taps": list(self.taps),
            "target": self.target,
            "mask": None if self.mask is None else repr(self.mask),
            "settings": self.settings,
            "any_target": self.any_target,
            "config": self.config.to_diff_dict(),
        }
        (folder / FILE).write_text(json.dumps(about, indent=1) + "\n")
        save_file({name: t.contiguous() for name, t in self.state_dict().items()}, folder / WEIGHTS)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        name = type(self).__name__
        what = f"A draft head of the class `specdec.drafts.heads.{name}`, which reads the layers {list(self.taps)} of its target."
        read = 'draft = sd.drafts.heads.load("...", target)  # the folder or the hub id of this head'
        write_card(folder, name, what, self.target, read)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload what ``save_pretrained`` writes; as ``hub.push``."""
        return push(self.save_pretrained, name, **options)

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype | None = None) -> Self:
        """Load what ``save_pretrained`` of the same class wrote, in its own precision or in ``dtype``.

        Args:
            folder: or a hub id.
        Raises:
            FileNotFoundError: the folder holds no head, or the hub has none. ValueError: it is another class's, or tensors are missing, unknown or of
                another shape.
        """
        folder = folder_of(folder)
        if not (folder / FILE).exists():
            raise FileNotFoundError(
                f"{folder} has no {FILE}: it is not a head; {cls.__name__}.from_target makes one"
            )
        about = json.loads((folder / FILE).read_text())
        if about["head"] != cls.__name__:
            raise ValueError(
                f"{folder} holds a {about['head']}: load it with that class, not with {cls.__name__}"
            )
        tensors, config = load_file(folder / WEIGHTS), LlamaConfig(**about["config"])
        settings = dict(about["settings"])
        if about["mask"] is not None:
            settings["mask"] = parse(about["mask"])
        if "d2t" in tensors:
            check_offsets(tensors["d2t"], config.vocab_size)
            settings["vocabulary"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        kind: Any = cls
        model: Self = kind(config, about["taps"], target=about["target"], **settings)
        model.any_target = about.get("any_target", False)
        return model.filled(tensors, str(folder)).to(dtype=dtype).eval()

    def filled(self, tensors: Mapping[str, Tensor], source: str, called: Callable[[str], str] = str) -> Self:
        """This head with the weights ``tensors``, in their dtype; messages name a tensor ``called(name)``.

        Raises:
            ValueError: tensors are missing, unknown or of another shape; the message names the first and the ``source``.
        """
        mine = self.state_dict()
        for name in sorted(mine.keys() | tensors.keys()):
            if name not in tensors:
                raise ValueError(
                    f"{source} lacks the tensor {called(name)!r}, {list(mine[name].shape)}: copy the checkpoint again"
                )
            if name not in mine:
                raise ValueError(
                    f"{source} has a tensor {called(name)!r} that a {type(self).__name__} of these settings does not have"
                )
            if mine[name].shape != tensors[name].shape:
                raise ValueError(
                    f"{source}: tensor {called(name)!r} is {list(tensors[name].shape)} and must be {list(mine[name].shape)} by its config"
                )
        self.load_state_dict(dict(tensors), assign=True)
        return self
