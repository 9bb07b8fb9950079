"""DSpark (DeepSpec): a DFlash block whose logits are corrected by the token before, and a confidence that can end a chain.

One pass of the block gives outputs h_k and logits U_k. Step k adds ``W_2 s_k`` to U_k. As s_k is made from the token before it, the law is
conditional, and tokens are drawn left to right, without further passes. Tensors have DeepSpec's names.
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

KINDS = ("vanilla", "gated", "rnn")


class Walk(NamedTuple):
    """The memo of a step: the block's outputs ``[..., longest, E]`` and logits ``[..., longest, outputs]``, and the state ``[..., r]`` of the
    recurrent head, zeros for the other kinds."""

    hidden: Tensor
    logits: Tensor
    state: Tensor


class Markov(nn.Module):
    """The correction of a step's logits, for a rank r.

    With w = W_1[the token before] and the output h: ``vanilla`` s = w; ``gated`` s = sigmoid(G[h; w]) * w; ``rnn``, a recurrent cell whose
    state is zero at the anchor, [g; v; o] = J[state; w; h], state <- sigmoid(g) * state + (1 - sigmoid(g)) * tanh(v), s = tanh(o).
    """

    def __init__(self, vocab_size: int, outputs: int, width: int, rank: int, kind: str):
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, outputs, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, token: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """``token [...]``, ``hidden [..., E]`` and ``state [..., r]`` -> s ``[..., r]``, and the next state."""
        s = before = self.markov_w1(token)
        if self.kind == "gated":
            s = torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1))) * before
        if self.kind == "rnn":
            gate, new, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
            kept = torch.sigmoid(gate)
            s, state = torch.tanh(out), kept * state + (1 - kept) * torch.tanh(new)
        return s, state


class DSpark(DFlash):
    """A DSpark head.

    Args:
        config, taps, block_size, anchor_first, shared: as for ``DFlash``.
        rank: of the Markov head. markov: its kind, ``"vanilla"``, ``"gated"`` or ``"rnn"``.
        confidence: whether it estimates the probability that its next token is accepted. confidence_with_markov: from the token before, too.
    Raises:
        ValueError: a rank below 1, an unknown kind, or as ``DFlash``.
    """

    marginal, corrected = False, True

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        block_size: int = 7,
        anchor_first: bool = True,
        rank: int = 256,
        markov: str = "vanilla",
        confidence: bool = True,
        confidence_with_markov: bool = True,
        **shared: Any,
    ):
        at_least(1, "rank", rank, "give at least 1 (without a Markov head use DFlash)")
        if markov not in KINDS:
            raise ValueError(f"markov is {markov!r}: give one of {', '.join(map(repr, KINDS))}")
        super().__init__(
            config, taps, block_size=block_size, anchor_first=anchor_first, rank=rank, markov=markov,
            confidence=confidence, confidence_with_markov=confidence_with_markov, **shared,
        )  # fmt: skip
        width, self.confident, self.sees_token = config.hidden_size, confidence, confidence_with_markov
        self.rank = rank
        self.markov_head = Markov(self.vocab_size, self.outputs, width, rank, markov)
        inputs = width + rank if confidence_with_markov else width
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(inputs, 1)}) if confidence else None

    def step(self, n: int, memo: Any, token: Tensor, at: Anchors) -> tuple[Tensor, Walk]:
        """As ``HeadModel.step``."""
        if n == 0:
            hidden = self.fill(token, at)
            memo = Walk(hidden, self.logits(hidden), hidden.new_zeros(*token.shape, self.rank))
        s, state = self.markov_head(token, memo.hidden[..., n, :], memo.state)
        return memo.logits[..., n, :] + self.product(s, self.markov_head.markov_w2), memo._replace(
            state=state
        )

    def confidence(self, n: int, memo: Walk, token: Tensor) -> Tensor:
        """As ``HeadModel.confidence``."""
        if self.confidence_head is None:
            return super().confidence(n, memo, token)
        x = memo.hidden[..., n, :]
        if self.sees_token:
            x = torch.cat([x, self.markov_head.markov_w1(token)], -1)
        return self.confidence_head["proj"](x)[..., 0]
