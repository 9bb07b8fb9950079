"""What drafts have in common that remember nothing between rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.types import Context, Proposal, Round


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


def looked_up(context: Context, budget: Tensor, lookup: Callable[[np.ndarray, int], np.ndarray]) -> Proposal:
    """Chains of ``lookup(ids [l], count)``, which finds up to ``count`` tokens to follow the text of a row."""
    B, N = context.batch, int(budget.max())
    tokens, size = np.zeros((B, N), dtype=np.int64), np.zeros(B, dtype=np.int64)
    text, length, allowed = context.tokens.numpy(), context.length.tolist(), budget.tolist()
    for b in range(B):
        found = lookup(text[b, : length[b]], allowed[b])
        size[b] = len(found)
        tokens[b, : len(found)] = found
    return Proposal.chain(torch.from_numpy(tokens), torch.from_numpy(size))
