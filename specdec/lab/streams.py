"""Token streams for training: the pocket corpus of this installation as a tokenizer and one token stream per split and domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from specdec.data.corpus import DOMAINS, PACKAGES, corpus
from specdec.data.tokens import Batches, train_tokenizer, train_words, write_stream
from specdec.lab.options import option


@dataclass(frozen=True)
class Streams:
    """Settings of the corpus, and of the folder for everything made from it."""

    work: str = option("runs/pocket", "folder for corpus, shards and checkpoints")
    site: str = option("", "more site-packages folders, separated by commas")
    vocabulary: int = option(4096, "tokens of the BPE tokenizer")
    tokenizer_kind: Literal["bytes", "words"] = option(
        "bytes", "of the BPE tokenizer: byte-level, or words with byte fallback"
    )
    tokenizer_megabytes: float = option(24.0, "megabytes of text to train the tokenizer on")
    token_limit: int = option(
        32_000_000, "training tokens to prepare, shared among the domains like the mixture"
    )
    mixture: tuple[float, ...] = option(
        (0.7, 0.2, 0.1), "shares of code, prose, tabular among the training sequences"
    )
    length: int = option(1024, "tokens of a training sequence")
    seed: int = option(0, "seed of the initialisation and of the order of the data")

    @property
    def sites(self) -> list[str]:
        """The folders of ``site``."""
        return [site for site in self.site.split(",") if site]

    def path(self, split: str, domain: str) -> Path:
        """The file of a stream."""
        return Path(self.work) / "shards" / f"{split}-{domain}.npy"

    def documents(self, split: str) -> dict[str, list[str]]:
        """The texts of a split by domain, shuffled (training) or in the corpus's order (held out)."""
        texts: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
        for row in corpus(None, split, self.sites, self.work):
            texts[row["domain"]].append(row["text"])
        if split == "train":
            for domain in DOMAINS:
                np.random.default_rng(self.seed).shuffle(texts[domain])
        return texts

    def tokenizer(self, texts: dict[str, list[str]]) -> PreTrainedTokenizerFast:
        """The tokenizer in the work folder, or a new one, trained on texts by domain in the mixture's proportions."""
        folder = Path(self.work) / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            sample = []
            for domain, share in zip(DOMAINS, self.mixture, strict=True):
                room = share * self.tokenizer_megabytes * 1e6
                for text in texts[domain]:
                    sample.append(text)
                    room -= len(text)
                    if room < 0:
                        break
            kind = train_words if self.tokenizer_kind == "words" else train_tokenizer
            kind(sample, self.vocabulary).save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def make(self) -> PreTrainedTokenizerFast:
        """Write the tokenizer and the training and validation streams unless they exist; returns the tokenizer."""
        tokenizer = None
        for split in ("train", "validation"):
            if all(self.path(split, domain).exists() for domain in DOMAINS):
                continue
            texts = self.documents(split)
            tokenizer = tokenizer or self.tokenizer(texts)
            self.path(split, "").parent.mkdir(parents=True, exist_ok=True)
            for domain, share in zip(DOMAINS, self.mixture, strict=True):
                write_stream(self.path(split, domain), tokenizer, texts[domain], share * self.token_limit)
        return tokenizer or self.tokenizer({})

    def batches(self, split: str, shares: Sequence[float] = ()) -> Batches:
        """Sequences of a split in the mixture's proportions, or in those of ``shares``.

        Raises:
            SystemExit: a stream is too short: the installed packages have too little text of its kind.
        """
        paths = [self.path(split, domain) for domain in DOMAINS]
        try:
            return Batches(paths, shares or self.mixture, self.length, self.seed)
        except ValueError as error:
            raise SystemExit(
                f"{error}: install the packages of {PACKAGES.name} (pip install --no-deps --target FOLDER -r {PACKAGES}), give --site FOLDER, and "
                f"remove {paths[0].parent}"
            ) from None
