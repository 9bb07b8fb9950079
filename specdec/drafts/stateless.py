"""What drafts have in common that remember nothing between rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from specdec.grammars.masks import permitted
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round

D = TypeVar("D", bound=Any)


def under(draft: D, grammar: Any) -> D:
    """A draft with this ``grammar``: a copy, if it has another one."""
    if draft.grammar is grammar:
        return draft
    made = copy(draft)  # ``replace`` calls __init__, which a derived class may have changed
    object.__setattr__(made, "grammar", grammar)
    return made


class Stateless:
    """The methods of a draft, except ``propose``, for one whose state is ``None``."""

    def init(self, context: Context, target_cache: Any) -> None:
        return None

    def observe(self, state: None, round: Round) -> None:
        return None

    def select(self, state: None, rows: Tensor) -> None:
        return None

    def join(self, state: None, other: None) -> None:
        return None


@dataclass(frozen=True)
class Lookup(Stateless, ABC):
    """The methods of a draft that looks up in texts what may follow a row's."""

    grammar: Any = field(default=None, kw_only=True, repr=False, compare=False)  # bind sets it

    def bind(self, target: LanguageModel, sampling: Sampling) -> Self:
        return under(self, sampling.grammar)

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        """Chains of what ``lookup`` finds, which end before a token that the row's ``grammar`` forbids."""
        B, N = context.batch, int(budget.max())
        tokens, size = np.zeros((B, N), dtype=np.int64), np.zeros(B, dtype=np.int64)
        text, length, allowed = context.tokens.numpy(), context.length.tolist(), budget.tolist()
        for b in range(B):
            found = self.lookup(text[b, : length[b]], allowed[b])
            size[b] = len(found)
            tokens[b, : len(found)] = found
        chains = Proposal.chain(torch.from_numpy(tokens), torch.from_numpy(size))
        return permitted(self.grammar, context, chains), None

    @abstractmethod
    def lookup(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Up to ``count`` tokens that may follow ``ids [l]``."""
