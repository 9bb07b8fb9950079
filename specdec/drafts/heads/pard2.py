"""PARD-2 (An et al., arXiv 2605.08632): a small language model over mask tokens, whose inputs also have the target's activations.

Token x_t enters with the activations that the target had where it predicted x_t: ``embed(x_t) + scale * fc(g_{t-1})``. The first token is read without activations.
Mask tokens follow, with the activations of the last token. So all drafted tokens come from one causal pass, and each is drawn without seeing the others. Tensors have
transformers' names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specdec.arguments import at_least
from specdec.configs import parallel_token, setting
from specdec.drafts.heads.contract import Anchors, Pass
from specdec.drafts.heads.features import Features, Tap
from specdec.drafts.heads.formats.body import body_of
from specdec.drafts.heads.formats.fields import Fields
from specdec.drafts.heads.layers import Block, MaskEmbedding, Rotary, norm
from specdec.drafts.heads.model import HeadModel
from specdec.forward.ends import Ends
from specdec.models.fingerprint import fingerprint, unwrapped

OWN = ("embed_tokens.weight", "lm_head.weight")
FAMILIES = ("llama", "qwen3")
"""Families of language models whose blocks are those of this head."""


class Pard2(HeadModel):
    """A PARD-2 head: a language model with an embedding and an output matrix of its own.

    Args:
        config, taps, shared: as for ``HeadModel``; the width is the language model's. blocks: of the language model. depth: how many tokens the head proposes at
            most (16 is the authors'). target_width: of the target's activations; ``None``: the head's own. scale: of what the activations add. feature_bias: whether ``fc`` has a
            bias. head_norms: queries and keys are normed (as in qwen3). mask_token: as for ``PEagle``.
    Raises:
        ValueError: a depth or number of blocks below 1, an id that does not exist, or as ``HeadModel``.
    """

    marginal = leading = True

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        blocks: int = 2,
        depth: int = 16,
        target_width: int | None = None,
        scale: float = 0.02,
        feature_bias: bool = False,
        head_norms: bool = False,
        mask_token: int | None = None,
        own_embedding: bool = True,
        own_head: bool = True,
        **shared: Any,
    ):
        at_least(1, "depth", depth, "a head proposes at least 1 token")
        at_least(1, "blocks", blocks, "a head has at least 1 block")
        if not (own_embedding and own_head):
            raise ValueError("own_embedding and own_head are those of the language model: leave them out")
        wide = config.hidden_size if target_width is None else target_width
        super().__init__(
            config, taps, blocks=blocks, depth=depth, target_width=wide, scale=scale, feature_bias=feature_bias, head_norms=head_norms,
            mask_token=mask_token, own_embedding=True, own_head=True, **shared,
        )  # fmt: skip
        self.kv_layers, self.longest, self.depth, self.block_slots = blocks, depth, depth, depth - 1
        self.target_width, self.scale = wide, scale
        self.fc = nn.Linear(len(self.taps) * wide, config.hidden_size, bias=feature_bias)
        self.layers = nn.ModuleList(Block(config, head_norms) for _ in range(blocks))
        self.norm, self.rotary = norm(config), Rotary(config)
        self.mask_embedding = MaskEmbedding(config, mask_token)

    @classmethod
    def default_taps(cls, blocks: int) -> Sequence[Tap]:
        """The authors' layers of L: the final norm's output, and L - 7, L - 15 and L - 23, as far as they exist."""
        return ("final", *(layer for layer in (blocks - 7, blocks - 15, blocks - 23) if layer > 0))

    @classmethod
    def from_model(
        cls, model: Any, target: Any, taps: Sequence[Tap] | None = None, *, depth: int = 8, **settings: Any
    ) -> Self:
        """A new head with the weights of a language model, which is copied. ``fc`` begins at zero: the head first drafts as the model does.

        Args:
            model: a transformers model of the families llama and qwen3, with the target's vocabulary, or with a mask token after it
                (``training.parallel_blocks.with_mask_token``). The mask token is the one that its config names; if there is none, a vector of the head's own.
        Raises:
            TypeError: one of the two is no model, or a setting is the model's. ValueError: the model is of another family, has what this head's blocks have
                not, or does not fit the target; or as the class.
        """
        model, theirs = unwrapped(model), unwrapped(target)
        for name, one in (("model", model), ("target", theirs)):
            if not isinstance(one, PreTrainedModel):
                raise TypeError(
                    f"{name} is {one!r}: give a transformers model or an HFModel, HFModel.from_pretrained(...) of a name"
                )
        fixed = [
            name
            for name in ("blocks", "head_norms", "mask_token", "vocabulary", "target_width")
            if name in settings
        ]
        if fixed:
            raise TypeError(f"{fixed[0]} is that of the models: leave it out")
        own = model.config
        if own.model_type not in FAMILIES:
            raise ValueError(f"model is a {own.model_type}: give one of {' or '.join(FAMILIES)}")
        size, width, mask = theirs.config.get_text_config().vocab_size, own.hidden_size, parallel_token(own)
        tensors = {name.removeprefix("model."): t for name, t in model.state_dict().items()}
        table = tensors["embed_tokens.weight"]
        if len(table) < size or (len(table) > size and (mask is None or mask < size)):
            raise ValueError(
                f"model has a vocabulary of {len(table)} and the target one of {size}: give a model with the target's vocabulary"
            )
        if mask is None:
            tensors["mask_embedding.weight"] = table.mean(0, keepdim=True)
        elif mask >= size:  # an id that the target lacks
            tensors["mask_embedding.weight"], mask = table[mask : mask + 1], None
        tensors |= {name: t[:size] for name, t in tensors.items() if name in OWN}
        config = body_of(
            Fields("model", own.to_dict()), size, theirs.config.get_text_config().num_hidden_layers
        )
        config.vocab_size = size
        made = cls(
            config,
            cls.default_taps(config.num_target_layers) if taps is None else taps,
            blocks=own.num_hidden_layers,
            depth=depth,
            target_width=theirs.config.get_text_config().hidden_size,
            head_norms=own.model_type == "qwen3",
            mask_token=mask,
            target=fingerprint(theirs),
            **settings,
        )
        tensors["fc.weight"] = torch.zeros(width, made.fc.in_features, dtype=model.dtype)
        if made.fc.bias is not None:
            tensors["fc.bias"] = torch.zeros(width, dtype=model.dtype)
        made.filled({name: t.detach().clone() for name, t in tensors.items()}, "model")
        made.tokenizer, ends = setting(target, "tokenizer"), Ends.of(theirs)
        return made.to(ends.table.weight.device, ends.table.weight.dtype).eval().bound(target)

    def filled(self, tensors: Mapping[str, Tensor], source: str, called: Callable[[str], str] = str) -> Self:
        """As ``StoredHead.filled``; the output matrix may be the embedding."""
        if "lm_head.weight" not in tensors and "embed_tokens.weight" in tensors:
            tensors = {**tensors, "lm_head.weight": tensors["embed_tokens.weight"].clone()}
        return super().filled(tensors, source, called)

    @classmethod
    def from_target(cls, target: Any, taps: Sequence[Tap] | None = None, **settings: Any) -> Self:
        """As ``HeadModel.from_target``: a new language model."""
        if isinstance(unwrapped(target), PreTrainedModel):
            settings.setdefault("target_width", unwrapped(target).config.get_text_config().hidden_size)
        return super().from_target(target, taps, **settings)

    def copy_ends(self, ends: Ends) -> None:
        """As ``HeadModel.copy_ends``, where the widths are equal."""
        if self.config.hidden_size == self.target_width:
            super().copy_ends(ends)

    def read(self, features: Features, go: Pass) -> Tensor:
        """As ``HeadModel.read``: the output of each token is carried, and what its activations add."""
        taps = torch.cat([features.layers[tap] for tap in self.taps], -1)
        added = self.product(taps, self.fc) * self.scale
        return torch.cat([self.run(self.embed(features.following) + added, go), added], -1)

    def step(self, n: int, memo: Tensor, token: Tensor, at: Anchors) -> tuple[Tensor, Tensor]:
        """As ``HeadModel.step``: the memo is the logits of all steps, ``[..., depth, outputs]``."""
        if n == 0:
            last, added = memo.chunk(2, -1)
            x, count = last[..., None, :], at.count(self.depth) - 1
            if count:
                masks = (self.mask_embedding(self.embed) + added)[..., None, :]
                masks = masks.expand(*masks.shape[:-2], count, -1)
                x = torch.cat([x, self.run(masks, at.slots(0, count))], -2)
            memo = self.logits(self.norm(x))
        return memo[..., n, :], memo

    def run(self, x: Tensor, go: Pass) -> Tensor:
        """The outputs ``[..., E]`` of the blocks for inputs ``[..., E]``."""
        angles = self.rotary(go.positions, x)
        for layer, block in enumerate(self.layers):
            x = block(x, angles, layer, go)
        return x
