"""Domino (arXiv 2605.29707): a DFlash block whose logits are corrected by a recurrent state of the tokens before.

One pass of the block gives outputs h_n and logits U_n. A GRU reads the embeddings of the tokens from the anchor on; with its state s_n after the token before,
step n predicts from U_n + P [h_n; s_n], where P is an MLP of low rank, and the first ``prefix`` steps from U_n alone. The distribution is conditional, and tokens
are drawn left to right without further passes of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.arguments import at_least
from specdec.drafts.heads.contract import Anchors
from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.features import Tap


class Read(NamedTuple):
    """The memo of a step: the block's outputs ``[..., longest, E]`` and logits ``[..., longest, outputs]``, and the state ``[..., S]`` of the GRU, zeros before
    the anchor."""

    hidden: Tensor
    logits: Tensor
    state: Tensor


class Recurrence(nn.Module):
    """A GRU without biases, one token at a time."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.size = size
        self.of_token, self.of_state = (nn.Linear(n, 3 * size, bias=False) for n in (width, size))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """``x [..., E]`` and ``state [..., S]`` -> the next state."""
        new, old = self.of_token(x).chunk(3, -1), self.of_state(state).chunk(3, -1)
        reset, kept = torch.sigmoid(new[0] + old[0]), torch.sigmoid(new[1] + old[1])
        return kept * state + (1 - kept) * torch.tanh(new[2] + reset * old[2])


class Domino(DFlash):
    """A Domino head.

    Args:
        config, taps, block_size, anchor_first, shared: as for ``DFlash``.
        rank: of the correction. state: the size of the GRU's. prefix: how many steps are not corrected.
    Raises:
        ValueError: a rank or a state below 1, a prefix below 0, or as ``DFlash``.
    """

    marginal, corrected = False, True

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        anchor_first: bool = True,
        rank: int = 256,
        state: int = 1024,
        prefix: int = 1,
        **shared: Any,
    ):
        for name, value in (("rank", rank), ("state", state)):
            at_least(1, name, value, "give at least 1")
        at_least(0, "prefix", prefix, "give 0 to correct all steps")
        super().__init__(
            config, taps, anchor_first=anchor_first, rank=rank, state=state, prefix=prefix, **shared
        )
        width = config.hidden_size
        self.prefix = prefix
        self.prefix_gru = Recurrence(width, state)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, self.outputs, bias=False)
        )

    def step(self, n: int, memo: Any, token: Tensor, at: Anchors) -> tuple[Tensor, Read]:
        """As ``HeadModel.step``."""
        if n == 0:
            hidden = self.fill(token, at)
            state = hidden.new_zeros(*token.shape, self.prefix_gru.size)
            memo = Read(hidden, self.logits(hidden), state)
        memo = memo._replace(state=self.prefix_gru(self.embed(token), memo.state))
        logits = memo.logits[..., n, :]
        if n >= self.prefix:
            down, act, up = self.embed_proj
            x = torch.cat([memo.hidden[..., n, :], memo.state], -1)
            logits = logits + self.product(act(self.product(x, down)), up)
        return logits, memo
