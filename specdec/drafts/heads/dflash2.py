"""DFlash2 (z-lab): a DFlash block with short convolutions along it, whose tokens are chosen among candidates, given the token before.

The convolutions mix neighbouring slots, and the outputs still come from one pass. The choice is a conditional distribution over the ``top_k``
best tokens of each slot, drawn left to right. Tensors have z-lab's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.arguments import at_least
from specdec.drafts.heads.contract import Anchors, Pass
from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.features import Tap
from specdec.drafts.heads.layers import Block
from specdec.forward.block import Angles


class Candidates(NamedTuple):
    """The memo of a step: the block's outputs ``[..., longest, E]``, and its logits before the choice ``[..., longest, outputs]``."""

    hidden: Tensor
    logits: Tensor


class DynamicConv(nn.Module):
    """Causal convolutions along a block, before and after a sublayer: out_i = sum_t (base_t + delta_ti) * x_{i-t}, zero past the start.

    ``base`` is learned for each channel, ``delta`` is linear in the sublayer's input and shared by ``group`` channels. Initially both are the identity.
    """

    def __init__(self, width: int, size: int, group: int):
        super().__init__()
        self.size, self.group = size, group
        self.base_kernel = nn.Parameter(torch.zeros(2, size, width))
        self.kernel_projection = nn.Linear(width, 2 * size * (width // group), bias=False)

    def reset(self) -> None:
        """Make both convolutions the identity."""
        with torch.no_grad():
            self.base_kernel.zero_()[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def forward(self, x: Tensor, sublayer: Any) -> Tensor:
        """``sublayer`` of the convolved ``x [..., s, E]``, convolved again."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.size, -1)).repeat_interleave(self.group, -1)
        kernels = self.base_kernel + delta  # [..., s, 2, size, E]
        return self._convolved(sublayer(self._convolved(x, kernels[..., 0, :, :])), kernels[..., 1, :, :])

    def _convolved(self, x: Tensor, kernel: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, self.size - 1, 0))
        count = x.shape[-2]
        shifted = [padded.narrow(-2, self.size - 1 - t, count) for t in range(self.size)]
        return (torch.stack(shifted, -2) * kernel).sum(-2)


class ConvBlock(Block):
    """DFlash's block with ``DynamicConv`` around attention and around the MLP."""

    def __init__(self, config: LlamaConfig, size: int, group: int):
        super().__init__(config, head_norms=True)
        self.attention_conv, self.mlp_conv = (DynamicConv(config.hidden_size, size, group) for _ in range(2))

    def forward(self, x: Tensor, angles: Angles, layer: int, go: Pass) -> Tensor:
        """``[..., s, E]`` -> ``[..., s, E]``."""
        x = x + self.attention_conv(
            self.input_layernorm(x), lambda normed: self.self_attn(normed, angles, layer, go)
        )
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class Selector(nn.Module):
    """Scores of pairs of tokens: <A[the token before] * (P h), B[candidate]>, with codebooks A and B of rank ``rank``."""

    def __init__(self, vocab_size: int, outputs: int, width: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.randn(outputs, rank) * 0.02)
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, token: Tensor, hidden: Tensor, candidates: Tensor) -> Tensor:
        """``token [...]``, ``hidden [..., E]``, ``candidates [..., K]`` -> ``[..., K]``."""
        return (self.mixed(token, hidden)[..., None, :] * self.successor_codebook[candidates]).sum(-1)

    def every(self, token: Tensor, hidden: Tensor) -> Tensor:
        """As a call, with all tokens as candidates in the order of their ids, ``[..., outputs]``: one product of matrices, which makes no copy of the
        codebook for each position."""
        return self.mixed(token, hidden) @ self.successor_codebook.T

    def mixed(self, token: Tensor, hidden: Tensor) -> Tensor:
        """``[..., rank]``: A[the token before] * (P h)."""
        return self.predecessor_codebook[token] * self.hidden_projection(hidden)


class DFlash2(DFlash):
    """A DFlash2 head.

    Args:
        config, taps, shared: as for ``DFlash``.
        conv_size: positions that a convolution reads. conv_group: channels that share a dynamic kernel.
        rank: of the codebooks. top_k: candidates for each slot; all other tokens have q = 0. In training mode (``head.train()``) all tokens
            are candidates, so that every loss is finite.
    Raises:
        ValueError: a number below 1, a hidden size that is not a multiple of ``conv_group``, or as ``DFlash``.
    """

    marginal, corrected = False, True

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        blocks: int = 5,
        conv_size: int = 2,
        conv_group: int = 16,
        rank: int = 256,
        top_k: int = 16,
        **shared: Any,
    ):
        sizes: dict[str, Any] = {
            "conv_size": conv_size,
            "conv_group": conv_group,
            "rank": rank,
            "top_k": top_k,
        }
        for name, value in sizes.items():
            at_least(1, name, value, "give at least 1")
        if config.hidden_size % conv_group:
            raise ValueError(
                f"conv_group is {conv_group}: give a divisor of the hidden size, {config.hidden_size}"
            )
        super().__init__(config, taps, blocks=blocks, **sizes, **shared)
        self.top_k: int = min(top_k, self.outputs)
        self.layers = nn.ModuleList(ConvBlock(config, conv_size, conv_group) for _ in range(blocks))
        self.candidate_selector = Selector(self.vocab_size, self.outputs, config.hidden_size, rank)

    def initialise(self) -> None:
        """As ``HeadModel.initialise``; the convolutions begin as the identity."""
        super().initialise()
        for module in self.modules():
            if isinstance(module, DynamicConv):
                module.reset()

    def step(self, n: int, memo: Any, token: Tensor, at: Anchors) -> tuple[Tensor, Candidates]:
        """As ``HeadModel.step``."""
        if n == 0:
            hidden = self.fill(token, at)
            memo = Candidates(hidden, self.logits(hidden))
        if self.training:
            return memo.logits[..., n, :] + self.candidate_selector.every(token, memo.hidden[..., n, :]), memo
        best = memo.logits[..., n, :].topk(self.top_k)
        scores = best.values + self.candidate_selector(token, memo.hidden[..., n, :], best.indices)
        nothing = torch.full_like(memo.logits[..., n, :], float("-inf"))
        return nothing.scatter(-1, best.indices, scores), memo
