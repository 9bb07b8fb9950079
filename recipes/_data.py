"""Training data for drafts: the pocket corpus's shards, or any text data set, with the target's states cached beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import train_pocket
from torch import Tensor
from tqdm.auto import tqdm

from specdec.models.fingerprint import fingerprint
from specdec.training.states import States


def sequences(tokenizer: Any, work: str, site: str, split: str, count: int, batch: int = 4) -> Iterator[Tensor]:
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


def states(target: Any, tokenizer: Any, work: str, site: str, layers: tuple[int, ...], tokens: int, split: str = "train") -> Any:
    """The target's states of the first ``tokens`` of the corpus, made in bf16 where they are not there yet."""
    count = max(1, tokens // 1024)
    folder = Path(work) / f"states-{split}-{fingerprint(target)}-{'-'.join(map(str, layers))}"
    there = len(States(folder, target)) if (folder / "states.json").exists() else 0
    if there < count:
        low = type(target)(target.config).to(torch.bfloat16).eval()
        low.load_state_dict(target.state_dict())
        low.set_attn_implementation("block")
        tqdm.write(f"target states of {count} sequences")
        States.write(folder, low, sequences(tokenizer, work, site, split, count), layers, count)
    return First(States(folder, target), count)


class First:
    """The first ``count`` sequences of some states."""

    def __init__(self, data: States, count: int):
        self.data, self.count, self.layers = data, count, data.layers

    def __len__(self) -> int:
        return min(self.count, len(self.data))

    def take(self, which: Any) -> Any:
        return self.data.take(which)
