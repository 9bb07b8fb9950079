"""XPress (arXiv 2608.02438): a DFlash block whose logits are corrected by all tokens before, through a causal mixer of low rank.

One pass of the block gives outputs h_j and logits U_j of its slots j. A refiner of rank r reads, in each slot, its output, the mean output g of the block
and the token before it:

    x_j = W [A h_j; G g; E[the token before]],   y_j = x_j + sum_{i <= j} M_ji * x_i,   z_j = y_j + MLP(y_j),

and slot j predicts from U_j + R z_j. The distribution is conditional, and tokens are drawn left to right without further passes of the block. The authors'
Jacobi iteration computes all slots again and again from the tokens of the pass before; where it converges, it gives the greedy tokens of this chain.
Tensors have the names of speculators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.arguments import at_least
from specdec.drafts.heads.contract import Anchors, Pass
from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.features import Features, Tap


class Refined(NamedTuple):
    """The memo of a step: the logits of the block ``[..., longest, outputs]``, what x_j gets of its outputs ``[..., slots, r]``, and x_j itself of the slots
    so far, ``[..., slots, r]``, zeros in the others."""

    logits: Tensor
    read: Tensor
    inputs: Tensor


class Refiner(nn.Module):
    """The refiner of blocks of ``slots``: W, A, G, E, M, its gated MLP and R, in the formula above."""

    def __init__(self, vocab_size: int, outputs: int, width: int, slots: int, rank: int, mlp_ratio: int):
        super().__init__()
        inner = rank * mlp_ratio
        self.rank = rank
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h, self.down_g = (nn.Linear(width, rank, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, slots, slots))
        self.mlp_gate, self.mlp_up = (nn.Linear(rank, inner, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, outputs, bias=False)

    def reads(self, hidden: Tensor) -> Tensor:
        """What x_j gets of the outputs ``[..., slots, E]`` of a block, its mean included: ``[..., slots, r]``."""
        mean = self.down_g(hidden.mean(-2, keepdim=True)).expand(*hidden.shape[:-1], -1)
        return F.linear(torch.cat([self.down_h(hidden), mean], -1), self.in_proj.weight[:, : 2 * self.rank])

    def put(self, slot: int, before: Tensor, read: Tensor, inputs: Tensor) -> Tensor:
        """``inputs [..., slots, r]`` with x_j of ``slot``, where ``before [..., r]`` embeds the token before it."""
        x = read[..., slot, :] + F.linear(before, self.in_proj.weight[:, 2 * self.rank :])
        return torch.cat([inputs[..., :slot, :], x[..., None, :], inputs[..., slot + 1 :, :]], -2)

    def mixed(self, slot: int, inputs: Tensor) -> Tensor:
        """z_j ``[..., r]`` of ``slot``."""
        sofar = inputs[..., : slot + 1, :]
        y = inputs[..., slot, :] + (self.mix_l[:, slot, : slot + 1].T * sofar).sum(-2)
        return y + self.mlp_down(F.silu(self.mlp_gate(y)) * self.mlp_up(y))


class XPress(DFlash):
    """An XPress head.

    Args:
        config, taps, shared: as for ``DFlash``.
        rank: of the refiner. mlp_ratio: the inner width of its MLP, in multiples of the rank.
    Raises:
        ValueError: a number below 1, or as ``DFlash``.
    """

    marginal, corrected = False, True

    def __init__(
        self, config: LlamaConfig, taps: Sequence[Tap], *, rank: int = 256, mlp_ratio: int = 2, **shared: Any
    ):
        for name, value in (("rank", rank), ("mlp_ratio", mlp_ratio)):
            at_least(1, name, value, "give at least 1")
        super().__init__(config, taps, rank=rank, mlp_ratio=mlp_ratio, **shared)
        sizes = self.outputs, config.hidden_size, self.block_size, rank, mlp_ratio
        self.refiner_head = Refiner(self.vocab_size, *sizes)

    def read(self, features: Features, go: Pass) -> Tensor | None:
        """As ``HeadModel.read``: the token is carried, where the block's first slot is the anchor's own and has it as the token before."""
        super().read(features, go)
        return self.refiner_head.token_embed(features.tokens) if self.first else None

    def step(self, n: int, memo: Any, token: Tensor, at: Anchors) -> tuple[Tensor, Refined]:
        """As ``HeadModel.step``."""
        refiner = self.refiner_head
        if n == 0:
            hidden = self.norm(self.block(token, at))
            read = refiner.reads(hidden)
            inputs = torch.zeros_like(read)
            if self.first:
                inputs = refiner.put(0, memo, read, inputs)
            memo = Refined(self.logits(hidden[..., self.first :, :], raw=True), read, inputs)
        slot = n + self.first
        inputs = refiner.put(slot, refiner.token_embed(token), memo.read, memo.inputs)
        correction = self.product(refiner.mixed(slot, inputs), refiner.readout)
        return memo.logits[..., n, :] + correction, memo._replace(inputs=inputs)
