"""Random decisions that are recorded, and replaced by other outcomes where a check wants that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from specdec.rng import Key, Rng
from specdec.testing.rules import Rule

COIN = -1  # the token of a decision between yes and no


class Decision(NamedTuple):
    """A decision that a draft asked for: its key, the token, and the distribution ``[V]`` from which the token was drawn."""

    key: tuple[int, ...]
    token: int
    distribution: Tensor


Swap = Mapping[tuple[int, tuple[int, ...]], int]  # (request, key) -> another token


@dataclass
class Recorder:
    """Real keyed decisions for the rows ``requests``, recorded in ``log`` as ``(request, Decision)``.

    Args:
        rule: the rule that an invalid key breaks, and a race where there must be none (``races``). swap: decisions to replace, and by what.
    """

    rng: Any
    requests: list[int]
    rule: Rule
    races: bool = False
    log: list[tuple[int, Decision]] = field(default_factory=list)
    swap: Swap = field(default_factory=dict)

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        shapes = f"probs {list(probs.shape)} and a key of {[list(np.shape(f)) for f in key]}"  # type: ignore[arg-type]
        with self.rule.errors(f"rng.categorical with {shapes}"):
            answer = self.rng.categorical(probs, key)
        out = answer.reshape(-1).clone()
        for i, (request, name) in enumerate(self._named(key, answer)):
            out[i] = self.swap.get((request, name), int(out[i]))
            self.log.append((request, Decision(name, int(out[i]), probs.reshape(-1, probs.shape[-1])[i])))
        return out.reshape(answer.shape)

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        answer = self.rng.accept(prob, key)
        self.log += [(request, Decision(name, COIN, prob)) for request, name in self._named(key, answer)]
        return answer

    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        if not self.races:
            self.rule.broken("rng.race is called, which is the target's")
        return self.rng.race(probs, position, streams)

    def select(self, rows: Tensor) -> Rng:
        return replace(self, rng=self.rng.select(rows), requests=[self.requests[b] for b in rows.tolist()])

    def _named(self, key: Key, answer: Tensor) -> list[tuple[int, tuple[int, ...]]]:
        """(request, key) of each decision."""
        fields = [f.numpy() if isinstance(f, Tensor) else f for f in key]
        try:
            *names, flat = (f.reshape(-1) for f in np.broadcast_arrays(*fields, answer.numpy()))
        except ValueError:
            names, flat = [], np.zeros(0)
        self.rule.require(
            len(flat) == answer.numel(),
            f"a key of shapes {[list(np.shape(f)) for f in fields]} names decisions of shape {list(answer.shape)}",
        )
        per_row = answer[0].numel()
        return [(self.requests[i // per_row], tuple(int(f[i]) for f in names)) for i in range(answer.numel())]
