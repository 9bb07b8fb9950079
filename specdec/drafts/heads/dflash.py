"""DFlash (arXiv 2602.06036): a block of masked slots is filled in one pass that attends in both directions and to features of the text.

Each layer makes keys and values of the committed positions from one projection of the target's activations; only the block has queries.
The slots are predicted independently: the law is marginal. Tensors have z-lab's names. JetSpec (arXiv 2606.18394, section 2.2) is the same head with
attention that is causal within the block.
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
from specdec.drafts.heads.layers import Block, MaskEmbedding, Rotary, norm
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.windows import passes, sights_of


class DFlash(HeadModel):
    """A DFlash head.

    Args:
        config, taps, shared: as for ``HeadModel``.
        blocks: how many transformer blocks; queries and keys are normed, as in qwen3.
        block_size: slots of the block, which begins with the last committed token.
        anchor_first: slot k predicts the token k + 1 positions after the anchor, so that the block proposes ``block_size`` tokens
            (DeepSpec). Otherwise slot k >= 1 predicts the token at its own position, ``block_size - 1`` in all (z-lab).
        mask_token: the id whose embedding the other slots of the block read; ``None``: a vector of the head's own.
        windows: for each block how many positions it sees, or ``None`` for all; ``None``: all blocks see all. windows_from: ``"anchor"``: every slot
            sees the last positions of the text before the anchor, and the block besides (speculators); ``"slot"``: the positions up to the slot,
            itself and the slots before it included (z-lab), at least ``block_size``. windows_causal: in blocks with a window a slot does not see
            later slots; blocks without one attend in both directions. causal: a slot sees no later slot in any block (JetSpec), whatever
            ``windows_causal`` says.
    Raises:
        TypeError: ``causal`` is neither true nor false.
        ValueError: no blocks, a block that predicts nothing, an id that does not exist, as ``sights_of`` for windows, or as ``HeadModel``.
    """

    marginal = True

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        blocks: int = 5,
        block_size: int = 16,
        anchor_first: bool = False,
        mask_token: int | None = None,
        windows: Sequence[int | None] | None = None,
        windows_from: str = "anchor",
        windows_causal: bool = True,
        causal: bool = False,
        **shared: Any,
    ):
        at_least(1, "blocks", blocks, "a head has at least 1 block")
        least = 1 if anchor_first else 2
        at_least(least, "block_size", block_size, f"a block that predicts a token has at least {least} slots")
        if not isinstance(causal, bool):
            raise TypeError(f"causal is {causal!r}: give True or False")
        sights = sights_of(windows, blocks, block_size, windows_from, windows_causal)
        super().__init__(
            config, taps, blocks=blocks, block_size=block_size, anchor_first=anchor_first, mask_token=mask_token,
            windows=None if windows is None else list(windows), windows_from=windows_from, windows_causal=windows_causal, causal=causal,
            **shared,
        )  # fmt: skip
        self.sights, self.causal = sights, causal
        width = config.hidden_size
        self.block_size, self.first = block_size, 0 if anchor_first else 1
        self.kv_layers, self.longest, self.block_slots = blocks, block_size - self.first, block_size
        self.fc, self.hidden_norm = nn.Linear(len(self.taps) * width, width, bias=False), norm(config)
        self.layers = nn.ModuleList(Block(config, head_norms=True) for _ in range(blocks))
        self.norm, self.rotary = norm(config), Rotary(config)
        self.mask_embedding = MaskEmbedding(config, mask_token)

    @classmethod
    def default_taps(cls, blocks: int) -> Sequence[Tap]:
        """z-lab's five layers: evenly from the output of block 2 to that of block L - 2 of L, as far as they differ and exist."""
        last = max(1, blocks - 3)  # counted from 0, as z-lab does
        return sorted({min(1 + round(1 + (last - 1) * i / 4), blocks) for i in range(5)})

    def read(self, features: Features, go: Pass) -> Tensor | None:
        """As ``HeadModel.read``: every layer's keys and values come from the same projection, and nothing is carried."""
        self.stored(features, go)
        return None

    def stored(self, features: Features, go: Pass) -> Tensor:
        """``read``, and what the layers read of each position ``[..., E]``."""
        taps = torch.cat([features.layers[tap] for tap in self.taps], -1)
        context = self.hidden_norm(self.product(taps, self.fc))
        angles = self.rotary(go.positions, context)
        for layer, block in enumerate(self.layers):
            attention: Any = block.self_attn
            attention.keep(context, angles, layer, go)
        return context

    def step(self, n: int, memo: Any, token: Tensor, at: Anchors) -> tuple[Tensor, Any]:
        """As ``HeadModel.step``: the memo is the logits of the whole block, ``[..., longest, outputs]``."""
        if n == 0:
            memo = self.logits(self.fill(token, at))
        return memo[..., n, :], memo

    def uncorrected(self, memo: Any) -> Tensor:
        """As ``HeadModel.uncorrected``, of the heads that are built on this one."""
        return memo.logits

    def fill(self, token: Tensor, at: Anchors) -> Tensor:
        """The block that follows ``token [...]`` at the anchors: the normed outputs of the slots that predict, ``[..., longest, E]``."""
        return self.norm(self.block(token, at)[..., self.first :, :])

    def block(self, token: Tensor, at: Anchors) -> Tensor:
        """As ``fill``, of all slots, before the norm: ``[..., block_size, E]``."""
        known = self.embed(token)[..., None, :]
        masks = self.mask_embedding(self.embed).expand(*token.shape, self.block_size - 1, -1)
        x = torch.cat([known, masks], -2)
        go = at.slots(0, self.block_size, full=not self.causal)
        angles = self.rotary(go.positions, x)
        for layer, (block, within) in enumerate(zip(self.layers, passes(go, self.sights), strict=True)):
            x = block(x, angles, layer, within)
        return x
