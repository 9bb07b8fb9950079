"""The result of a replay: a draft's exact behaviour along the texts of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.audit.tau import Efficiency, efficiency
from specdec.lab.traces import Trace, digest, identity
from specdec.models.hf import HFModel
from specdec.models.table import TableModel

Verification = Literal["rejection", "block"]


@dataclass(frozen=True, eq=False)
class Replay:
    """A draft on a trace of ``C`` texts.

    Attributes:
        name: of the draft. k: the longest path. q, accept: ``[C, n, k]``, see ``lab.forced.Recorder``; ``n`` is the largest number of rounds, and
            entries past a text's end mean nothing. size: ``[C, n]``. chains: whether all proposals were chains.
    """

    trace: Trace
    name: str
    k: int
    q: Tensor
    accept: Tensor
    size: Tensor
    chains: bool

    def __repr__(self) -> str:
        return f"Replay({self.name}, k = {self.k}: tau {self.tau:.3f} on {len(self.trace)} texts)"

    def __len__(self) -> int:
        return len(self.trace)

    @cached_property
    def tau(self) -> float:
        """Tokens a round, bonus included."""
        return self.efficiency().tau

    def efficiency(self, k: int | None = None) -> Efficiency:
        """Expected rounds and tokens of each text.

        Args:
            k: blocks of at most ``k`` tokens, for chain drafts whose tokens do not depend on how many are to come.
        """
        k = self.k if k is None else k
        if k != self.k and not self.chains:
            raise ValueError(f"k is {k}, and trees of depth {self.k} were replayed: replay with k={k}")
        parts = []
        for c, text in enumerate(self.trace.texts):
            n = text.rounds
            if n:
                parts.append(efficiency(self.accept[c : c + 1, :n], k, cut=text.ended))
            else:
                none = torch.zeros(1, dtype=torch.float64)
                parts.append(Efficiency(none, none, none.expand(1, k), none.expand(1, k)))
        return Efficiency(*(torch.cat(part) for part in zip(*parts)))


def described(value: Any) -> str:
    """A name for a draft by its settings and weights.

    Raises:
        TypeError: some part of it has no name, such as a function.
    """
    return digest(_plain(value))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.nn.Module | TableModel):
        return identity(value)
    if isinstance(value, HFModel):
        return [identity(value), repr(value), str(getattr(value, "mask", ""))]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__qualname__,
            *(_plain(getattr(value, f.name)) for f in fields(value) if f.compare),
        ]
    raise TypeError(f"a {type(value).__name__} has no name")
