"""EAGLE-3 and 3.1 (arXiv 2503.01840): a block reads fused activations of three layers and the next token, and then its own last output.

For a committed pair (g_i, x_{i+1}), where g_i is a projection of the target's activations at position i, the block gives o_i, from which the
head predicts x_{i+2}. A drafted token is paired with the output before it. Tensors have SafeAILab's names, but ``layers.0`` for ``midlayer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.arguments import at_least
from specdec.drafts.heads.contract import Anchors, Pass
from specdec.drafts.heads.features import Features, Tap
from specdec.drafts.heads.layers import MLP, Attention, Block, Rotary, Sublayers, norm
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.windows import passes, sights_of
from specdec.forward.block import Angles


class PairBlock(Sublayers):
    """The first block: attention reads the normed embedding beside the normed feature; the residual is the feature."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool, head_norms: bool):
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            norm(config) for _ in range(3)
        )
        self.self_attn = Attention(config, 2 * config.hidden_size, head_norms)
        self.mlp, self.norm_before_residual = MLP(config), norm_before_residual

    def forward(self, feature: Tensor, embedded: Tensor, angles: Angles, go: Pass) -> Tensor:
        """``feature`` and ``embedded [..., E]`` -> ``[..., E]``."""
        normed = self.hidden_norm(feature)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        return self.through(normed if self.norm_before_residual else feature, both, angles, 0, go)


class Eagle3(HeadModel):
    """An EAGLE-3 head.

    Args:
        config, taps, shared: as for ``HeadModel``, here with an output matrix of its own by default.
        blocks: the first reads pairs, the others are ordinary blocks. windows: for each block how many positions it sees, or ``None`` for all;
            ``None``: all blocks see all. A committed pair sees that many with its own; drafted ones see what the last committed pair before them sees, and
            each other (as speculators trains).
        fc_norm: each tap is normed by itself (3.1). norm_before_fc: all taps are normed together (3.1). norm_output: the output that is fed
            back is normed (3.1). norm_before_residual: the residual is the normed feature. head_norms: queries and keys are normed.
    Raises:
        ValueError: fewer than one block, as ``sights_of`` for windows, or as ``HeadModel``.
    """

    windows_from = "anchor"

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        blocks: int = 1,
        fc_norm: bool = False,
        norm_before_fc: bool = False,
        norm_output: bool = False,
        norm_before_residual: bool = False,
        head_norms: bool = False,
        own_head: bool = True,
        windows: Sequence[int | None] | None = None,
        **shared: Any,
    ):
        at_least(1, "blocks", blocks, "a head has at least 1 block")
        sights = sights_of(windows, blocks, shared.get("depth", 1), self.windows_from)
        super().__init__(
            config, taps, blocks=blocks, windows=None if windows is None else list(windows), fc_norm=fc_norm, norm_before_fc=norm_before_fc, norm_output=norm_output,
            norm_before_residual=norm_before_residual, head_norms=head_norms, own_head=own_head, **shared,
        )  # fmt: skip
        width = config.hidden_size
        self.kv_layers, self.norm_output, self.sights = blocks, norm_output, sights
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.fc_norm = nn.ModuleList(norm(config) for _ in self.taps) if fc_norm else None
        self.input_norm = norm(config, len(self.taps) * width) if norm_before_fc else None
        first = PairBlock(config, norm_before_residual, head_norms)
        self.layers = nn.ModuleList([first, *(Block(config, head_norms) for _ in range(1, blocks))])
        self.norm, self.rotary = norm(config), Rotary(config)

    @classmethod
    def default_taps(cls, blocks: int) -> Sequence[Tap]:
        """EAGLE's layers 2, L // 2 and L - 3 of L blocks, as far as they differ and exist."""
        return sorted({min(2, blocks), blocks // 2, max(blocks - 3, 0)})

    def read(self, features: Features, go: Pass) -> Tensor:
        """As ``HeadModel.read``: the output of each committed pair is carried."""
        taps = torch.cat([features.layers[tap] for tap in self.taps], -1)
        return self.run(self.fused(taps), self.embed(features.following), go)

    def step(self, n: int, memo: Tensor, token: Tensor, at: Anchors) -> tuple[Tensor, Tensor]:
        """As ``HeadModel.step``: the memo is the last output."""
        if n:  # the first token is predicted from the last committed pair
            feature = self.norm(memo) if self.norm_output else memo
            memo = self.run(feature, self.embed(token), at.slots(n - 1))
        return self.logits(self.norm(memo)), memo

    def fused(self, taps: Tensor) -> Tensor:
        """One feature ``[..., E]`` of the concatenated ``taps [..., E * len(taps)]``."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            each = taps.chunk(len(self.fc_norm), -1)
            taps = torch.cat([by(x) for by, x in zip(self.fc_norm, each)], -1)
        return self.product(taps, self.fc)

    def run(self, feature: Tensor, embedded: Tensor, go: Pass) -> Tensor:
        """The outputs ``[..., E]`` of pairs of a ``feature`` and an ``embedded`` token, each ``[..., E]``."""
        angles = self.rotary(go.positions, feature)
        (first, *others), (within, *more) = self.layers, passes(go, self.sights)
        x = first(feature, embedded, angles, within)
        for layer, (block, within) in enumerate(zip(others, more, strict=True), 1):
            x = block(x, angles, layer, within)
        return x
