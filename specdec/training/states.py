"""The target's states that training needs, computed once and stored on disk: final hidden states and inputs of chosen layers.

Logits would not fit (V numbers per token); the final hidden state is E numbers, and the target's frozen head recomputes the logits
of a batch from it (SPIRe, arXiv 2504.06419, section 3.3: "target activations can be cached").
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec.configs import body_of
from specdec.forward.taps import listening, tapped
from specdec.models.fingerprint import fingerprint


class Batch(NamedTuple):
    """Training sequences and the target's states on them.

    ``tokens [B, L + 1]`` int64; ``inputs``: layer -> ``[B, L, E]``, the target's activations before that layer (counted from 0,
    so that 0 is the embedding and ``l`` the output of the l-th block, of the last one before the final norm); ``final [B, L, E]``: the
    input of the head. ``mask [B, L + 1]`` bool: the tokens that a draft learns to predict; ``None``: all.
    """

    tokens: Tensor
    inputs: dict[int, Tensor]
    final: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """The batch on another device, its activations in ``dtype``."""
        inputs = {layer: x.to(device, dtype) for layer, x in self.inputs.items()}
        mask = None if self.mask is None else self.mask.to(device)
        return Batch(self.tokens.to(device), inputs, self.final.to(device, dtype), mask)


@torch.no_grad()
def target_states(target: Any, tokens: Tensor, layers: Sequence[int]) -> Batch:
    """One forward of the target over ``tokens[:, :-1]``.

    Args:
        target: a transformers causal LM. tokens: ``[B, L + 1]``. layers: the layers whose inputs to return, counted from 0.
    """
    tokens = tokens.to(target.device)
    # Not output_hidden_states, whose last is normed, and whose first is the output of block 1 in some families.
    caught = listening(target, layers)
    with tapped(target, caught, lambda hidden: hidden):
        made = body_of(target)(input_ids=tokens[:, :-1], use_cache=False)
    return Batch(tokens, {layer: caught[layer][0] for layer in layers}, made.last_hidden_state)


class States:
    """Cached batches in a folder; ``States.write`` makes it, and continues after an interruption.

    Args:
        folder: written by ``write``. target: if given, it must be the model that computed the states.
    Raises:
        FileNotFoundError: no states there. ValueError: states of another target, named by fingerprint.
    """

    def __init__(self, folder: str | Path, target: Any = None):
        path = Path(folder) / "states.json"
        if not path.exists():
            raise FileNotFoundError(f"folder {folder} holds no states: make them with States.write")
        self.folder, self.meta = Path(folder), json.loads(path.read_text())
        if target is not None and fingerprint(target) != self.meta["target"]:
            raise ValueError(
                f"folder {folder} holds states of target {self.meta['target']}, and this target is {fingerprint(target)}: "
                "write states of this one"
            )
        self.layers: list[int] = self.meta["layers"]
        self.length: int = self.meta["length"]
        shapes = {
            "tokens": (np.int32, (self.length + 1,)),
            "activations": (np.int16, (len(self.layers) + 1, self.length, self.meta["hidden"])),
        }
        files = {name: self.folder / f"{name}.bin" for name in shapes}
        # A sequence that an interruption cut short does not count.
        sizes = {
            name: int(np.prod(shape)) * np.dtype(kind).itemsize for name, (kind, shape) in shapes.items()
        }
        self.count = min(files[name].stat().st_size // size for name, size in sizes.items())
        made = {
            name: np.memmap(files[name], kind, "r", shape=(self.count, *shape))
            if self.count
            else np.zeros((0, *shape), kind)
            for name, (kind, shape) in shapes.items()
        }
        self.tokens, self.activations = made["tokens"], made["activations"]
        self.sizes = {files[name]: self.count * size for name, size in sizes.items()}

    def __len__(self) -> int:
        """Sequences that are complete."""
        return self.count

    def take(self, which: Sequence[int]) -> Batch:
        """The sequences of these numbers; activations in bf16."""
        at = np.asarray(which)
        tokens = torch.from_numpy(self.tokens[at].astype(np.int64))
        kept = torch.from_numpy(self.activations[at]).view(torch.bfloat16)
        inputs = {layer: kept[:, i] for i, layer in enumerate(self.layers)}
        return Batch(tokens, inputs, kept[:, -1])

    @classmethod
    def write(
        cls,
        folder: str | Path,
        target: Any,
        sequences: Iterable[Tensor],
        layers: Sequence[int],
        total: int | None = None,
        progress: bool = True,
    ) -> States:
        """Run the target over batches of sequences ``[B, L + 1]`` and store the results in bf16.

        Args:
            sequences: the same ones in the same order at every call, in batches of any size; stored ones are skipped.
            layers: the layers whose inputs to store, counted from 0.
            total: number of sequences, for the progress bar.
        Raises:
            ValueError: the folder keeps other layers. RuntimeError: another process writes to the folder.
        """
        folder, done, meta = Path(folder), 0, None
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "states.json").exists():
            there = cls(folder, target)
            done, meta = len(there), there.meta
            if there.layers != list(layers):
                raise ValueError(
                    f"folder {folder} keeps layers {there.layers}, not {list(layers)}: use another folder"
                )
            for path, size in there.sizes.items():
                os.truncate(path, size)
        with (
            open(folder / "tokens.bin", "ab") as token_file,
            open(folder / "activations.bin", "ab") as file,
            tqdm(total=total, initial=done, desc="target states", unit="seq", disable=not progress) as bar,
        ):
            seen, size = 0, file.tell()
            for tokens in sequences:
                skip = min(max(done - seen, 0), len(tokens))
                seen += len(tokens)
                if skip == len(tokens):
                    continue
                batch = target_states(target, tokens[skip:], layers)
                if meta is None:
                    length, hidden = batch.final.shape[1:]
                    meta = {
                        "target": fingerprint(target),
                        "layers": list(layers),
                        "length": length,
                        "hidden": hidden,
                    }
                    (folder / "states.json").write_text(json.dumps(meta))
                kept = torch.stack([*batch.inputs.values(), batch.final], 1).to(torch.bfloat16).cpu()
                if os.fstat(file.fileno()).st_size != size:
                    raise RuntimeError(
                        f"folder {folder} was written to by another process meanwhile: remove it, and let one process at a time record states"
                    )
                token_file.write(tokens[skip:].numpy().astype(np.int32).tobytes())
                file.write(kept.view(torch.int16).numpy().tobytes())
                token_file.flush()
                file.flush()
                size = file.tell()
                bar.update(len(tokens) - skip)
        return cls(folder, target)
