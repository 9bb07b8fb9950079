"""From documents to training batches: a BPE tokenizer, one stream of tokens a domain, sequences drawn from them."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"


def train_tokenizer(texts: Sequence[str], vocabulary: int, positions: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `vocabulary` tokens; END begins and ends a document and is the padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=positions
    )


def train_words(texts: Sequence[str], vocabulary: int, positions: int = 2048) -> PreTrainedTokenizerFast:
    """As ``train_tokenizer``, but of another kind, SentencePiece's: a word has its space inside, digits are single, rare characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=END))
    lines, digits = pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, digits, words])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=200,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = json.loads(tokenizer.to_str())
    # Bytes are text.
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] == END]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=positions,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, END appended."""
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [[*item.ids, tokenizer.eos_token_id] for item in encoded]


def write(path: Path, save: Callable[[IO[bytes]], object]) -> None:
    """Writes a file all at once: an interruption leaves the old one."""
    draft = path.with_name(path.name + ".part")
    with open(draft, "wb") as file:
        save(file)
    os.replace(draft, path)


def write_stream(
    path: Path, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], limit: float = float("inf")
) -> None:
    """Saves the texts' tokens, one after another with END between, as `uint16[n]`; stops after `limit` tokens."""
    stream, total = [], 0
    for start in tqdm(range(0, len(texts), 256), desc=f"tokens {path.stem}", mininterval=10):
        for ids in encode(tokenizer, texts[start : start + 256]):
            stream.append(np.array(ids, np.uint16))
            total += len(ids)
        if total > limit:
            break
    write(path, lambda file: np.save(file, np.concatenate(stream)))


class Batches:
    """Sequences of length + 1 tokens drawn from several streams in proportion to `shares`.

    `cursor`, the number of sequences taken from each stream, is the only state: set it to resume.

    Raises:
        ValueError: a stream with a share is shorter than two sequences (later epochs start at other offsets).
    """

    def __init__(self, streams: Sequence[Path], shares: Sequence[float], length: int, seed: int = 0) -> None:
        self.streams = [np.load(path, mmap_mode="r") for path in streams]
        self.shares = np.array(shares)
        self.length = length
        self.cursor = np.zeros(len(streams), np.int64)
        counts = [max(0, (len(stream) - length - 1) // length) for stream in self.streams]
        for path, stream, share, count in zip(streams, self.streams, shares, counts):
            if share and not count:
                raise ValueError(f"{path} has {len(stream)} tokens, and {2 * length + 1} are needed")
        # Neighbours in a stream belong to one document, and a batch from one document teaches little.
        rng = np.random.default_rng(seed)
        self.order = [rng.permutation(count) for count in counts]

    def take(self, count: int) -> Tensor:
        """The next `count` sequences, `int64[count, length + 1]`; each from the stream furthest behind its share."""
        rows = []
        for _ in range(count):
            stream = int(np.argmax(self.shares * (self.cursor.sum() + 1) - self.cursor))
            rows.append(self.read(stream, int(self.cursor[stream])))
            self.cursor[stream] += 1
        return torch.stack(rows)

    def read(self, stream: int, index: int) -> Tensor:
        """Sequence `index` of a stream, `int64[length + 1]`; later epochs start at another offset."""
        turn, place = divmod(index, len(self.order[stream]))
        start = int(self.order[stream][place]) * self.length + turn * 389 % self.length
        return torch.from_numpy(self.streams[stream][start : start + self.length + 1].astype(np.int64))
