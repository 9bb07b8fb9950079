"""Bits per byte of texts: of a language model over sliding windows, and of ``xz -9`` beside it."""

from __future__ import annotations

import lzma
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from specdec.data.tokens import encode


@torch.no_grad()
def bits_per_byte(model: Any, tokenizer: Any, texts: Sequence[str], window: int = 1024) -> float:
    """Bits per UTF-8 byte of the concatenated texts: windows of ``window`` tokens at a stride of half of it, so that
    every token but the first half window's has at least window / 2 tokens before it.

    Args:
        model: a Llama of transformers.
    """
    device = next(model.parameters()).device
    stream = torch.tensor([tokenizer.eos_token_id] + [i for ids in encode(tokenizer, texts) for i in ids])
    nats, half = 0.0, window // 2
    starts = list(range(0, max(1, len(stream) - 1 - half), half))
    for start in tqdm(starts, desc="bits per byte", mininterval=20):
        tokens = stream[start : start + window + 1].to(device)
        skip = half if start else 0
        hidden = model.model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0, skip:]
        logits = F.linear(hidden, model.lm_head.weight).float()
        nats += float(F.cross_entropy(logits, tokens[1 + skip :], reduction="sum"))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def xz_bits_per_byte(texts: Sequence[str]) -> float:
    """Bits per byte of the concatenated texts under ``xz -9``."""
    data = "".join(texts).encode()
    return 8 * len(lzma.compress(data, preset=9)) / len(data)
