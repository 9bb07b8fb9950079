"""Temperatures and truncations of every row as inputs of a captured step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.sampling import Sampling
from specdec.types import Context

_NONE = {"temperature": 1.0, "top_k": 2**31, "top_p": 1.0, "min_p": 0.0}  # what changes nothing
FIELDS = {name: "i8" if name == "top_k" else "f8" for name in _NONE}
"""The inputs of a step, ``[R]`` each, and their types."""


class RowsKind(NamedTuple):
    """What a step is captured for: whether a row has a temperature above 0 (not ``greedy``), and which truncations some row has."""

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool


def settings_of(sampling: Sampling, context: Context) -> dict[str, np.ndarray]:
    """``FIELDS`` of every row of ``context``. Rows of temperature 0 have no truncations, which leave their most probable token.

    Raises:
        ValueError: a request has no settings.
    """
    requests = context.request.tolist()
    sampling.check_requests(max(requests, default=0))
    found = {}
    for name, none in _NONE.items():
        given = sampling.settings[name]
        rows = [given[r] if isinstance(given, Sequence) else given for r in requests]
        rows = [none if one is None else one for one in rows]
        found[name] = np.array([min(k, none) for k in rows] if name == "top_k" else rows)
    cold = found["temperature"] == 0
    return {name: x if name == "temperature" else np.where(cold, _NONE[name], x) for name, x in found.items()}


def kind_of(settings: Mapping[str, np.ndarray], before: RowsKind | None) -> RowsKind:
    """What a step for rows with such settings is captured for, which suits those of ``before``, too: requests that come and go do not change it each time."""
    given = [bool((settings[name] != _NONE[name]).any()) for name in ("top_k", "top_p", "min_p")]
    now = RowsKind(bool((settings["temperature"] == 0).all()), *given)
    if before is None:
        return now
    return RowsKind(now.greedy and before.greedy, *(a or b for a, b in zip(now[1:], before[1:])))


def fill(array: Mapping[str, np.ndarray], settings: Mapping[str, np.ndarray]) -> None:
    """Write the settings of the first rows to a step's arrays; other rows get what changes nothing."""
    for name, x in settings.items():
        array[name][:] = _NONE[name]
        array[name][: len(x)] = x


class RowSampling:
    """A ``Sampling`` in the step, by its inputs ``on``."""

    def __init__(self, kind: RowsKind, on: Mapping[str, Tensor]):
        self.kind, self._on = kind, on

    @property
    def greedy(self) -> bool:
        """As ``Sampling.greedy``."""
        return self.kind.greedy

    def scores(self, logits: Tensor, *_: Any) -> Tensor:
        """``logits [R, ..., V]`` after each row's temperature and truncations, as ``Sampling.scores`` computes them."""
        temperature = self._of("temperature", logits)
        scores = logits / torch.where(temperature > 0, temperature, 1).to(logits)
        if self.kind.top_k:
            k = self._of("top_k", logits).clamp(max=logits.shape[-1])
            least = scores.sort(-1, descending=True).values.gather(-1, (k - 1).expand(*scores.shape[:-1], 1))
            scores = scores.masked_fill(scores < least, float("-inf"))
        if self.kind.top_p:
            values, order = scores.sort(-1)
            gone = values.softmax(-1).cumsum(-1) <= (1 - self._of("top_p", logits)).to(logits)
            gone[..., -1] = False
            scores = scores.masked_fill(gone.scatter(-1, order, gone), float("-inf"))
        if self.kind.min_p:
            probs = scores.softmax(-1)
            gone = probs < self._of("min_p", logits).to(logits) * probs.amax(-1, keepdim=True)
            scores = scores.masked_fill(gone, float("-inf"))
        return scores

    def law(self, scores: Tensor, token: Tensor) -> Tensor:
        """The distributions of ``scores [R, ..., V]``, whose largest are at ``token [R, ...]``: at temperature 0 all probability is there."""
        point = torch.zeros_like(scores).scatter_(-1, token[..., None], 1)
        return torch.where(self._of("temperature", scores) == 0, point, scores.softmax(-1))

    def _of(self, name: str, like: Tensor) -> Tensor:
        """``[R, ..., 1]`` a setting of each row of ``like [R, ..., V]``, with which it is combined."""
        return self._on[name].view(-1, *[1] * (like.dim() - 1))
