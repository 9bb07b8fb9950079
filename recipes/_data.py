"""Training data for drafts: the pocket corpus's shards, or any text data set, with the target's states cached beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import train_pocket
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from specdec.models.fingerprint import fingerprint
from specdec.training.states import States
from specdec.training.train import hash_of


def sequences(
    tokenizer: Any, work: str, site: str, split: str, count: int, batch: int = 4
) -> Iterator[Tensor]:
    """``count`` sequences of 1025 ids of the pocket corpus, in the order in which the pocket models saw them."""
    settings = train_pocket.Settings(work=work, site=site)
    made = train_pocket.make_streams(settings)
    if made.get_vocab() != tokenizer.get_vocab():
        raise SystemExit(
            f"the shards in {work} were made with another tokenizer than the target's: copy the target's tokenizer.json and "
            f"tokenizer_config.json to {Path(work) / 'tokenizer'}, remove {Path(work) / 'shards'}, and run again"
        )
    batches = train_pocket.batches_of(settings, split)
    for start in range(0, count, batch):
        yield batches.take(min(batch, count - start))


def states(
    target: Any,
    tokenizer: Any,
    work: str,
    site: str,
    layers: tuple[int, ...],
    tokens: int,
    split: str = "train",
) -> First:
    """The target's states of the first ``tokens`` of the corpus, made in bf16 where they are not there yet."""
    count = max(1, tokens // 1024)
    folder = Path(work) / f"states-{split}-{fingerprint(target)}-{'-'.join(map(str, layers))}"
    with PartialState().main_process_first():
        if held(folder, target) < count:
            low = copy.deepcopy(target).eval()
            for p in low.parameters():
                p.data = p.data.to(torch.bfloat16)
            low.set_attn_implementation("block")
            tqdm.write(f"target states of {count} sequences")
            States.write(folder, low, sequences(tokenizer, work, site, split, count), layers, count)
    return First(States(folder, target), count)


def text_states(
    target: Any,
    tokenizer: Any,
    work: str,
    dataset: str,
    column: str,
    length: int,
    layers: tuple[int, ...],
    tokens: int,
    skip: int = 0,
) -> First:
    """States of ``tokens`` of a data set's text, after the first ``skip`` sequences; documents are joined by the end token."""
    count = max(1, tokens // length)
    which = hash_of((dataset, column, skip, length))
    name = f"states-{which}-{fingerprint(target)}-{'-'.join(map(str, layers))}"
    folder = Path(work) / name
    with PartialState().main_process_first():
        if held(folder, target) < count:
            States.write(
                folder, target, packed(tokenizer, dataset, column, length, count, skip), layers, count
            )
    return First(States(folder, target), count)


def held(folder: Path, target: Any) -> int:
    """How many sequences' states are in a folder."""
    return len(States(folder, target)) if (folder / "states.json").exists() else 0


def packed(tokenizer: Any, dataset: str, column: str, length: int, count: int, skip: int) -> Iterator[Tensor]:
    """Sequences ``[1, length + 1]`` of a text data set: a .txt file, a saved or plain folder, or a hub id (read as a stream)."""
    import datasets

    path = Path(dataset)
    if path.is_file():
        rows: Any = [{column: path.read_text()}]
    elif (path / "dataset_info.json").exists():
        rows = datasets.load_from_disk(dataset)
    else:
        rows = datasets.load_dataset(dataset, split="train", streaming=True)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for row in rows:
        if column not in row:
            raise SystemExit(f"--column {column}: the data set has {', '.join(row)}")
        ids += tokenizer(row[column], add_special_tokens=False, verbose=False)["input_ids"] + end
        while len(ids) > length:
            if skip:
                skip -= 1
            elif count:
                count -= 1
                yield torch.tensor(ids[: length + 1])[None]
            else:
                return
            ids = ids[length:]


class First:
    """The first ``count`` sequences of some states."""

    def __init__(self, data: States, count: int):
        self.data, self.count, self.layers = data, count, data.layers

    def __len__(self) -> int:
        return min(self.count, len(self.data))

    def take(self, which: Any) -> Any:
        return self.data.take(which)
