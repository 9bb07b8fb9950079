"""P-EAGLE (arXiv 2602.01469): EAGLE-3's blocks, which predict all tokens in one causal pass over learned placeholders.

Committed pairs of a feature and the token after it are read as in EAGLE-3. EAGLE-3 feeds a drafted token and its own last output. P-EAGLE feeds
a mask token and a learned vector in their place. So the law is marginal. Tensors have the names of the library speculators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.arguments import at_least
from specdec.drafts.heads.contract import Anchors
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.features import Tap
from specdec.drafts.heads.layers import MaskEmbedding


class PEagle(Eagle3):
    """A P-EAGLE head.

    Args:
        config, taps, shared: as for ``Eagle3``; ``norm_output`` has no effect, because no output is fed back.
        depth: how many tokens it proposes at most. blocks: as for ``Eagle3``. windows: as for ``Eagle3``, but placeholders, too, see that many positions
            with their own, at least ``depth``.
        mask_token: the id whose embedding the placeholders have; ``None``: a vector of the head's own. An id's embedding is trained only if
            the head has ``own_embedding``.
    Raises:
        ValueError: a depth below 1, an id that does not exist, or as ``Eagle3``.
    """

    marginal = True
    windows_from = "slot"

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        depth: int = 8,
        blocks: int = 4,
        mask_token: int | None = None,
        **shared: Any,
    ):
        at_least(1, "depth", depth, "a head proposes at least 1 token")
        super().__init__(config, taps, depth=depth, blocks=blocks, mask_token=mask_token, **shared)
        self.longest = self.depth = depth
        self.block_slots = depth - 1
        self.mask_embedding = MaskEmbedding(config, mask_token)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(self.taps) * config.hidden_size))

    def step(self, n: int, memo: Tensor, token: Tensor, at: Anchors) -> tuple[Tensor, Tensor]:
        """As ``HeadModel.step``: the memo is the logits of all steps, ``[..., depth, outputs]``."""
        if n == 0:
            memo = self.logits(self.norm(self.fill(memo, at)))
        return memo[..., n, :], memo

    def fill(self, last: Tensor, at: Anchors) -> Tensor:
        """The outputs of the last committed pair ``[..., E]`` and of the placeholders after it, together ``[..., depth, E]``."""
        known, count = last[..., None, :], at.count(self.depth) - 1
        if not count:
            return known
        shape = (*known.shape[:-2], count, -1)
        feature = self.fused(self.mask_hidden[0]).expand(shape)
        masks = self.mask_embedding(self.embed).expand(shape)
        return torch.cat([known, self.run(feature, masks, at.slots(0, count))], -2)
