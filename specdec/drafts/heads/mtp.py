"""MTP, multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): one block on the target's last state and the next token.

For a committed pair (f_i, x_{i+1}), where f_i is the target's last state at position i, the block reads W [norm(Emb(x_{i+1})); norm(f_i)]. From
its output o_i, after a norm, the target's output matrix predicts x_{i+2}. A drafted token is paired with the output before it. (The paper's
equation 21 has the state first; DeepSeek's released weights have the embedding first, as here.) Tensors have DeepSeek's names, but
``layers.0.norm`` for ``shared_head.norm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.cache.slots import KVShape
from specdec.configs import setting
from specdec.drafts.heads.contract import Anchors, Pass
from specdec.drafts.heads.features import Features, Tap
from specdec.drafts.heads.layers import Block, Rotary, config_like, norm
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.shipped import ShippedBlock
from specdec.drafts.heads.shipped import shipped as layer_of
from specdec.models.fingerprint import fingerprint, unwrapped

Product = Callable[[Tensor, nn.Linear], Tensor]
"""As ``HeadModel.product``."""


class PairBlock(Block):
    """A block that reads a projection of the normed embedding and the normed state, and the norm of its output."""

    def __init__(self, config: LlamaConfig, hidden_first: bool, head_norms: bool):
        super().__init__(config, head_norms)
        self.enorm, self.hnorm, self.norm = (norm(config) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_first, self.rotary = hidden_first, Rotary(config)
        self.sizes = (config.num_key_value_heads, config.head_dim, config.head_dim)

    def pairs(self, embedded: Tensor, state: Tensor, go: Pass, product: Product) -> Tensor:
        """The output ``[..., E]`` before its norm, of ``embedded`` tokens and the ``state`` before each, ``[..., E]``."""
        both = [self.enorm(embedded), self.hnorm(state)]
        x = product(torch.cat(both[::-1] if self.hidden_first else both, -1), self.eh_proj)
        return self(x, self.rotary(go.positions, x), 0, go)


class MTP(HeadModel):
    """A head of multi-token prediction with one layer, which is used again for every further token.

    Args:
        config, shared: as for ``HeadModel``.
        taps: one layer, ``("final",)`` for the state after the target's final norm, or its number of blocks for the state before.
        hidden_first: the projection reads the state before the embedding.
        norm_output: the output that is fed back is normed (DeepSeek, GLM, Qwen); otherwise it is fed back as it is (Step, MiMo-V2).
        head_norms: queries and keys are normed. shipped: the config of the target whose kind of block the layer has, which ``from_checkpoint`` sets;
            ``None``: a llama-like block.
    Raises:
        ValueError: other than one tap, or as ``HeadModel``.
    """

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        hidden_first: bool = False,
        norm_output: bool = True,
        head_norms: bool = False,
        shipped: Mapping[str, Any] | None = None,
        **shared: Any,
    ):
        super().__init__(
            config, taps, hidden_first=hidden_first, norm_output=norm_output, head_norms=head_norms,
            shipped=shipped, **shared,
        )  # fmt: skip
        if len(self.taps) != 1:
            raise ValueError(
                f"taps is {list(self.taps)}: MTP reads one layer, 'final' or the target's last block"
            )
        self.norm_output = norm_output
        layer = PairBlock(config, hidden_first, head_norms) if shipped is None else ShippedBlock(shipped)
        self.layers = nn.ModuleList([layer])

    def read(self, features: Features, go: Pass) -> Tensor:
        """As ``HeadModel.read``: the output of each committed pair is carried."""
        return self.run(features.layers[self.taps[0]], features.following, go)

    def step(self, n: int, memo: Tensor, token: Tensor, at: Anchors) -> tuple[Tensor, Tensor]:
        """As ``HeadModel.step``: the memo is the last output, normed if ``norm_output``."""
        if n:  # the first token is predicted from the last committed pair
            memo = self.run(memo, token, at.slots(n - 1))
        layer: Any = self.layers[0]
        return self.logits(memo if self.norm_output else layer.norm(memo)), memo

    def run(self, state: Tensor, token: Tensor, go: Pass) -> Tensor:
        """What is fed back ``[..., E]`` of pairs of a ``state [..., E]`` and the ``token [...]`` after it."""
        layer: Any = self.layers[0]
        x = layer.pairs(self.embed(token), state, go, self.product)
        return layer.norm(x) if self.norm_output else x

    @property
    def shapes(self) -> list[KVShape]:
        """As ``HeadModel.shapes``."""
        layer: Any = self.layers[0]
        heads, key_size, value_size = layer.sizes
        return [KVShape(heads, key_size, value_size, self.dtype, self.device)]

    @classmethod
    def from_checkpoint(cls, target: Any, folder: str | Path | None = None) -> Self:
        """The head that a target ships with its checkpoint, such as DeepSeek's, GLM's and Qwen3-Next's: trained, with a block of the target's kind.

        Args:
            target: an ``HFModel``, an ``OwnCache`` or a transformers model. folder: of its checkpoint; by default where it was loaded from.
        Raises:
            ValueError: the checkpoint has no MTP layer, several, one whose attention heads do not support, or is quantized.
        """
        model = unwrapped(target)
        kind, tensors = layer_of(model, folder)
        made = cls(config_like(model), ("final",), shipped=kind, target=fingerprint(model))
        made.filled(
            {f"layers.0.{name}": tensor for name, tensor in tensors.items()}, "the target's checkpoint"
        )
        made.tokenizer = setting(target, "tokenizer")
        # Not to the target's precision: its weights have it already, and a router's bias stays in float32.
        return made.to(model.get_input_embeddings().weight.device).eval().bound(target)
