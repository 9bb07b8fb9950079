"""What recipes that train drafts share: settings of the training and of the corpus, lines on the console, and the export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from specdec.lab.loading import in_dtype
from specdec.lab.options import option
from specdec.lab.recipe import Recipe, Reported
from specdec.lab.streams import Streams
from specdec.training.train import Settings
from specdec.zoo.files import tokenizer_folder


@dataclass(frozen=True)
class Trains(Recipe):
    """The base of the settings of recipes that train a draft."""

    tokens: float = option(5.0, "millions of training tokens of each draft, as far as the text has them")
    epochs: float = option(1.0, "passes over the tokens")
    batch: int = option(2, "sequences per step")
    muon_lr: float = option(0.03, "peak learning rate of the matrices")
    adam_lr: float = option(0.009, "peak learning rate of other weights")
    warmup: float = option(0.03, "share of the steps in which the learning rate rises")
    decay: float = option(0.8, "share of the steps, at the end, in which it falls to zero")
    compile: bool = option(True, "torch.compile of the loss")
    validation: int = option(16, "number of validation sequences")
    validations: int = option(10, "how often to validate")

    def steps(self, sequences: int) -> int:
        """Optimiser steps of ``epochs`` passes over so many sequences, at least 1."""
        return max(1, round(sequences * self.epochs / self.batch))

    def training(self, steps: int) -> Settings:
        """The settings of ``training.train`` for so many steps."""
        return Settings(
            steps, self.batch, self.muon_lr, self.adam_lr, warmup=self.warmup, decay=self.decay, compile=self.compile,
            seed=self.seed, validate_every=max(1, steps // self.validations),
        )  # fmt: skip


@dataclass(frozen=True)
class OnCorpus(Reported):
    """The base of the settings of recipes that train on the pocket corpus."""

    work: str = option("runs/pocket", "folder for shards, recorded states and checkpoints")
    site: str = option("", "more site-packages folders for the corpus, separated by commas")

    @property
    def streams(self) -> Streams:
        """The corpus in the mixture of the pocket models."""
        return Streams(work=self.work, site=self.site)


def main_process() -> bool:
    """Whether this is the only process, or the one of several that prints and writes."""
    return PartialState(cpu=not torch.cuda.is_available()).is_main_process


def say(line: str) -> None:
    """Print a line, once for all processes."""
    if main_process():
        print(line, flush=True)


def told(row: Mapping[str, float], name: str = "") -> str:
    """A row of a validation curve as a line, after the draft's name."""
    figures = json.dumps({key: round(value, 4) for key, value in row.items()})
    return f"{name} {figures}".lstrip()


def export(draft: Any, folder: Path, tokenizer: Any, card: str) -> None:
    """Write a draft in bf16, its tokenizer unless the package's models share it, and its model card."""
    folder.mkdir(parents=True, exist_ok=True)
    in_dtype(draft, torch.bfloat16)
    if isinstance(draft, PreTrainedModel):
        draft.config.dtype = torch.bfloat16
    draft.save_pretrained(folder)
    if tokenizer_folder(folder) is None:
        tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable for its owner only
    (folder / "README.md").write_text(card, encoding="utf-8")
