"""Random decisions that make a draft follow a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.rng import Key, Philox


class Forced:
    """An ``Rng`` whose first candidate at every depth is the text's token; tokens that cannot be drawn, and other candidates, come from keys.

    Args:
        texts: ``[C, T]`` ids from the first token of the prompt on, padded. rows: ``[B]`` the text of each row. strays: draws that leave the text
            from some depth on, for the check that a draft does not remember them.
    """

    def __init__(self, texts: Tensor, rows: Tensor, other: Philox, strays: bool = False):
        self.texts, self.rows, self.other, self.strays = texts, rows, other, strays

    def select(self, rows: Tensor) -> Forced:
        return Forced(self.texts, self.rows[rows], self.other.select(rows), self.strays)

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        drawn = self.other.categorical(probs, key)
        at, depth, sibling = torch.broadcast_tensors(*(torch.as_tensor(part) for part in key[:3]))
        place = (at + depth).clamp(max=self.texts.shape[1] - 1)
        rows = self.rows.view(-1, *[1] * (at.dim() - 1)).expand(at.shape)
        token = self.texts[rows, place].to(drawn.device)
        possible = probs.gather(-1, token[..., None])[..., 0] > 0
        follows = (sibling == 0).to(drawn.device) & possible
        if self.strays:
            follows &= (depth < at % 3).to(drawn.device)
        return torch.where(follows, token, drawn)

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        return self.other.accept(prob, key)

    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        raise ValueError(
            "a draft that draws by races (Coupled) cannot be replayed: replay it under Rejection"
        )
