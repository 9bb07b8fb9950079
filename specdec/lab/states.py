"""A target's states on training text, cached in a folder: from the pocket corpus's streams, or from any text data set."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

import specdec.lab.pretraining  # noqa: F401  # registers the attention "block"
from specdec.lab.documents import documents, packed
from specdec.lab.loading import in_dtype
from specdec.lab.streams import Streams
from specdec.models.fingerprint import fingerprint
from specdec.training.checkpoints import hash_of
from specdec.training.muon import quick
from specdec.training.states import Batch, States


@dataclass(frozen=True)
class First:
    """The first ``count`` sequences of some states, as ``training.train`` takes them."""

    data: States
    count: int

    @property
    def layers(self) -> Sequence[int]:
        return self.data.layers

    def __len__(self) -> int:
        return min(self.count, len(self.data))

    def take(self, which: Sequence[int]) -> Batch:
        """The sequences with these indices."""
        return self.data.take(which)


def stream_states(
    target: Any,
    tokenizer: Any,
    streams: Streams,
    layers: Sequence[int],
    tokens: int,
    split: str = "train",
    shares: Sequence[float] = (),
    label: str = "",
) -> First:
    """The target's states on the first ``tokens`` of the corpus, computed in bf16 (float32 where that is faster) unless they are cached.

    Args:
        layers: the layers whose inputs to store. shares: of the domains, if not the mixture's. label: distinguishes folders of other
            shares.
    Raises:
        SystemExit: the streams were made with another tokenizer.
    """
    count = max(1, tokens // streams.length)
    folder = _folder(streams.work, f"{label}{split}", target, layers)
    with _processes(target).main_process_first():
        if held(folder, target) < count:
            low = in_dtype(copy.deepcopy(target).eval(), quick(target.device))
            low.set_attn_implementation("block")
            tqdm.write(f"target states of {count} sequences")
            States.write(folder, low, sequences(tokenizer, streams, split, count, shares), layers, count)
    return First(States(folder, target), count)


def sequences(
    tokenizer: Any, streams: Streams, split: str, count: int, shares: Sequence[float] = (), batch: int = 4
) -> Iterator[Tensor]:
    """``count`` sequences of the pocket corpus, ``[batch, length + 1]`` at a time, in the order in which the pocket models saw them.

    A new work folder is given ``tokenizer``.

    Raises:
        SystemExit: the tokenizer has no end token, or more tokens than the shards' 16 bits can number, or the shards are of another one.
    """
    work = Path(streams.work)
    if len(tokenizer) > 2**16 or tokenizer.eos_token_id is None:
        raise SystemExit(
            f"the pocket corpus is stored for tokenizers with an end token and at most {2**16} tokens, and the target's has {len(tokenizer)} and the end "
            f"token {tokenizer.eos_token}: give another target, or text of your own where there is --dataset"
        )
    if not (work / "tokenizer" / "tokenizer.json").exists() and not (work / "shards").exists():
        tokenizer.save_pretrained(work / "tokenizer")
    if streams.make().get_vocab() != tokenizer.get_vocab():
        raise SystemExit(
            f"the shards in {work} were made with another tokenizer than the target's: copy the target's tokenizer.json and "
            f"tokenizer_config.json to {work / 'tokenizer'}, remove {work / 'shards'}, and run again"
        )
    batches = streams.batches(split, shares)
    for start in range(0, count, batch):
        yield batches.take(min(batch, count - start))


def text_states(
    target: Any,
    tokenizer: Any,
    work: str,
    dataset: str,
    column: str,
    length: int,
    layers: Sequence[int],
    tokens: int,
    skip: int = 0,
) -> First:
    """States of ``tokens`` of a data set's text, after the first ``skip`` sequences of ``length`` tokens.

    Args:
        dataset: as for ``documents``; states of a file are recorded again if its content has changed. column: of the texts. layers: the layers
            whose inputs to store.
    Raises:
        SystemExit: the text is too short for a sequence, or as ``documents`` and ``packed``.
    """
    count = max(1, tokens // length)
    folder = _folder(work, hash_of((_content(dataset), column, skip, length)), target, layers)
    with _processes(target).main_process_first():
        if held(folder, target) < count:
            texts = packed(tokenizer, documents(dataset, column), length, count, skip)
            first = next(texts, None)
            if first is None:
                raise SystemExit(
                    f"--dataset {dataset}: its text has no sequence of {length} tokens{f' after the first {skip}' if skip else ''}: give more text, or a "
                    "smaller --length or --validation"
                )
            States.write(folder, target, chain([first], texts), layers, count)
    return First(States(folder, target), count)


def sequence_states(target: Any, sequences: Tensor, work: str, layers: Sequence[int]) -> States:
    """The target's states on ``sequences [N, L + 1]``, recorded in a folder of ``work`` that is named by the ids, the target and the layers; an
    interrupted recording continues.

    Args:
        layers: the layers whose inputs to store.
    """
    folder = _by_ids(target, sequences, work, layers)
    with _processes(target).main_process_first():
        if held(folder, target) < len(sequences):
            States.write(folder, target, sequences.split(4), layers, len(sequences))
    return States(folder, target)


def unrecorded(target: Any, sequences: Tensor, work: str, layers: Sequence[int]) -> int:
    """How many of the states that ``sequence_states`` would store are not on disk."""
    return len(sequences) - held(_by_ids(target, sequences, work, layers), target)


def _by_ids(target: Any, sequences: Tensor, work: str, layers: Sequence[int]) -> Path:
    ids = hashlib.sha256(sequences.to(torch.int32).numpy().tobytes()).hexdigest()[:8]
    return _folder(work, ids, target, layers)


def _content(dataset: str) -> Any:
    """What names the text of a data set: its name, and of a file the content too."""
    if not Path(dataset).is_file():
        return dataset
    with open(dataset, "rb") as file:
        return dataset, hashlib.file_digest(file, "sha256").hexdigest()


def held(folder: Path, target: Any) -> int:
    """How many sequences' states a folder holds."""
    return len(States(folder, target)) if (folder / "states.json").exists() else 0


def _processes(target: Any) -> PartialState:
    """The processes that share the work. Without a GPU they are found only if accelerate is told so. With one, the target may be on the CPU and
    be trained for on the GPU, and the first state of a process is its state for good."""
    return PartialState(cpu=target.device.type == "cpu" and not torch.cuda.is_available())


def _folder(work: str, name: str, target: Any, layers: Sequence[int]) -> Path:
    return Path(work) / f"states-{name}-{fingerprint(target)}-{'-'.join(map(str, layers))}"
