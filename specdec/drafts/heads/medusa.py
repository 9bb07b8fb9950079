"""Medusa-1 (arXiv 2401.10774, section 2.1): one head for each of the next tokens, all on the target's last final state.

Head j, counted from 0, predicts x_{n+1+j} from z, the output of the target's final norm at position n - 1: residual blocks
z + SiLU(A z + b), and an output matrix. Nothing depends on the tokens drafted before, so the law is marginal. There are no keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.arguments import at_least
from specdec.drafts.heads.contract import Anchors, Pass
from specdec.drafts.heads.features import Features, Tap
from specdec.drafts.heads.model import HeadModel
from specdec.forward.ends import Ends


class ResBlock(nn.Module):
    """``x + SiLU(A x + b)``; a new one has A = 0 and b = 0 and returns x."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` -> ``[..., E]``."""
        return x + F.silu(self.linear(x))


class Medusa(HeadModel):
    """Medusa's heads.

    Args:
        config, taps, shared: as for ``HeadModel``; there is one tap.
        heads: how many tokens it proposes at most, one for each head.
        blocks: residual blocks of each head.
        own_head: whether each head has an output matrix of its own, ``heads`` matrices of ``outputs * E`` weights, which begin as copies of
            the target's (the paper's heads). Otherwise all heads use the target's.
    Raises:
        ValueError: no heads, no blocks, other than one tap, or as ``HeadModel``. TypeError: an embedding or a mask, which it has no use for.
    """

    kv_layers, marginal = 0, True

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        heads: int = 5,
        blocks: int = 1,
        own_head: bool = True,
        **shared: Any,
    ):
        at_least(1, "heads", heads, "each head proposes one token")
        at_least(1, "blocks", blocks, "a head has at least 1 residual block")
        for name in ("mask", "own_embedding"):
            if shared.get(name) not in (None, False):
                raise TypeError(f"{name} is given, and Medusa reads one state, no embedding and no context")
        shared.pop("own_embedding", None)
        super().__init__(config, taps, heads=heads, blocks=blocks, **shared)
        self.settings["own_head"] = own_head  # the base class would make one matrix for all heads
        if len(self.taps) != 1:
            raise ValueError(f"taps is {list(self.taps)}: Medusa reads one layer, usually 'final'")
        width, self.longest = config.hidden_size, heads
        self.layers = nn.ModuleList(
            nn.Sequential(*(ResBlock(width) for _ in range(blocks))) for _ in range(heads)
        )
        matrices = (nn.Linear(width, self.outputs, bias=False) for _ in range(heads))
        self.lm_heads = nn.ModuleList(matrices) if own_head else None

    def initialise(self) -> None:
        """As ``HeadModel.initialise``: a new head predicts what the target's own output matrix does."""
        for p in self.layers.parameters():
            nn.init.zeros_(p)

    def copy_ends(self, ends: Ends) -> None:
        """As ``HeadModel.copy_ends``."""
        if self.lm_heads is not None:
            for matrix in self.lm_heads.parameters():
                matrix.copy_(self.rows(ends))

    def read(self, features: Features, go: Pass) -> Tensor:
        """As ``HeadModel.read``: the state itself is carried."""
        return features.layers[self.taps[0]]

    def step(self, n: int, memo: Tensor, token: Tensor, at: Anchors) -> tuple[Tensor, Tensor]:
        """As ``HeadModel.step``: the memo is the state at the position before the anchor."""
        layers: Any = self.layers
        own: Any = self.lm_heads
        x = layers[n](memo)
        return (self.logits(x) if own is None else own[n](x)), memo
