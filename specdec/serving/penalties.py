"""OpenAI's and vLLM's changes to scores: ``logit_bias``, ``repetition_penalty``, ``frequency_penalty`` and ``presence_penalty``, as one logits processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RANGES = {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100)}
NEUTRAL: dict[str, Any] = {
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
"""The fields, with the values that do nothing."""


@dataclass(frozen=True)
class Penalties:
    """A logits processor with vLLM's order: the bias, the repetition penalty, then frequency and presence.

    Args:
        prompt: tokens of the prompt, which only ``repetition_penalty`` counts. logit_bias: token -> what is added to its score. repetition_penalty: scores of tokens
            that the text has are divided by it if they are positive, and else multiplied. frequency_penalty: taken from a score for every time that its
            token was generated. presence_penalty: taken once if it was.
    """

    prompt: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0
    frequency_penalty: float = 0
    repetition_penalty: float = 1

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """``ids [1, l]`` of the whole text, ``scores [1, V]`` -> ``[1, V]``."""
        if self.logit_bias:
            token, bias = zip(*self.logit_bias)
            at = torch.tensor([token], device=scores.device)
            scores = scores.scatter_add(1, at, torch.tensor([bias], dtype=scores.dtype, device=scores.device))
        if self.repetition_penalty != 1:
            seen = scores.gather(1, ids)
            seen = torch.where(seen > 0, seen / self.repetition_penalty, seen * self.repetition_penalty)
            scores = scores.scatter(1, ids, seen)
        new = ids[:, self.prompt :]
        if (self.frequency_penalty or self.presence_penalty) and new.shape[1]:
            count = torch.zeros_like(scores).scatter_add(1, new, torch.ones_like(new, dtype=scores.dtype))
            scores = scores - self.frequency_penalty * count - self.presence_penalty * (count > 0)
        return scores


def penalties_of(body: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The arguments of ``Penalties``, without ``prompt``, of the fields of a request that do something.

    Raises:
        ValueError: a number is out of range, or a token is not in the vocabulary.
    """
    made: dict[str, Any] = {}
    for name, (low, high) in RANGES.items():
        value = body.get(name, NEUTRAL[name])
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}: give a number from {low} to {high}")
        if value != NEUTRAL[name]:
            made[name] = float(value)
    bias = []
    for token, value in body.get("logit_bias", {}).items():
        known = token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < vocab_size
        if not known or type(value) not in (int, float) or not -100 <= value <= 100:
            raise ValueError(
                f"logit_bias has {json.dumps({token: value})}: give ids of tokens, 0 to {vocab_size - 1}, with numbers from -100 to 100"
            )
        bias.append((int(token), float(value)))
    return made | ({"logit_bias": tuple(bias)} if bias else {})
