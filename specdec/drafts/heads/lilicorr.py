"""LiLiCorr (arXiv 2608.20530): a DFlash block, of whose best candidates a small transformer scores each pair of neighbours.

One pass of the block gives outputs and logits. The ``top_k`` best tokens of each slot are a lattice, which a transformer reads at once, in both directions.
Of each candidate it makes a vector ``out`` and a vector ``in``, and of the target's activations before the anchor an ``out``; the score of a candidate after the one before it
is the cosine of that one's ``out`` and its own ``in``, times ``scale``. Drawn left to right, the scores are the logits of a conditional distribution over the
candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec.arguments import at_least, number
from specdec.drafts.heads.contract import Anchors, Pass
from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.dflash2 import ConvBlock, DynamicConv
from specdec.drafts.heads.features import Features, Tap
from specdec.drafts.heads.layers import Norm

FEATURES = 5  # of a candidate: its log-probability, probability and distance from the best, its rank, and whether it is the best


class Lattice(NamedTuple):
    """The memo of a step.

    Attributes:
        logits: ``[..., longest, outputs]`` the block's, in float32 or float64, which scores have, too. candidates: ``[..., longest, K]`` indices of outputs, best first. scores: ``[..., longest, K, K]``: the
            score of a candidate (last dimension) after each candidate of the slot before; in the first slot, all rows are the same.
    """

    logits: Tensor
    candidates: Tensor
    scores: Tensor


class TwoLayers(nn.Module):
    """``down(silu(up(x)))``, with biases."""

    def __init__(self, inputs: int, inner: int, outputs: int):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Attention of all candidates to all, with a bias for each head and pair."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """``x [..., N, W]`` and ``bias [heads, N, N]`` -> ``[..., N, W]``."""
        parts = self.in_proj(x).chunk(3, -1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in parts)
        # Written out: few candidates, and some kernels for a mask need its memory aligned.
        weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias).softmax(-1)
        return self.out_proj((weights @ value).transpose(-3, -2).flatten(-2))


class LatticeLayer(nn.Module):
    """Attention and an MLP, each after a norm and with its residual."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, eps: float):
        super().__init__()
        self.attn_norm, self.mlp_norm = Norm(width, eps=eps), Norm(width, eps=eps)
        self.attn, self.mlp = LatticeAttention(width, heads), TwoLayers(width, int(width * mlp_ratio), width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class Correlator(nn.Module):
    """Scores of neighbours in a lattice of ``slots`` with ``top_k`` candidates each.

    Args:
        width: of the block's outputs and of embeddings. inner: of the transformer. block_size: positions of a block, which limits the distances that its
            attention knows. factors: numbers in a vector ``out`` or ``in``. eps: of norms. vector_eps: the least length of a vector that is divided by. scale: the logit of a cosine of 1.
    """

    def __init__(
        self, width: int, inner: int, slots: int, block_size: int, top_k: int, layers: int, heads: int, mlp_ratio: float, factors: int, eps: float,
        vector_eps: float, scale: float,
    ):  # fmt: skip
        super().__init__()
        self.vector_eps, self.scale, self.block_size = vector_eps, scale, block_size
        self.token_proj = nn.Identity() if width == inner else nn.Linear(width, inner)
        self.pass_hidden_proj, self.context_proj = (nn.Linear(width, inner) for _ in range(2))
        self.feature_norm, self.feature_mlp = nn.LayerNorm(FEATURES), TwoLayers(FEATURES, inner, inner)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, inner))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, top_k, inner))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.layers = nn.ModuleList(LatticeLayer(inner, heads, mlp_ratio, eps) for _ in range(layers))
        self.output_norm, self.anchor_norm = Norm(inner, eps=eps), Norm(inner, eps=eps)
        self.factor_input_proj = nn.Linear(3 * inner, inner)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(inner, factors) for _ in range(3))

    def forward(self, tokens: Tensor, log_probs: Tensor, hidden: Tensor, anchor: Tensor) -> Tensor:
        """The scores ``[..., slots, K, K]`` of ``Lattice``.

        Args:
            tokens: ``[..., slots, K, E]`` the candidates' embeddings. log_probs: ``[..., slots, K]``, best first. hidden: ``[..., slots, E]`` the block's
                outputs. anchor: ``[..., E]`` what the block reads of the position before the anchor.
        """
        slots, K = log_probs.shape[-2:]
        best = log_probs[..., :1]
        rank = torch.arange(K, device=log_probs.device, dtype=log_probs.dtype)
        each = (
            log_probs,
            log_probs.exp(),
            log_probs - best,
            (rank / max(K - 1, 1)).expand_as(log_probs),
            (rank == 0).to(log_probs.dtype).expand_as(log_probs),
        )
        x = self.token_proj(tokens) + self.pass_hidden_proj(hidden)[..., None, :]
        x = x + self.feature_mlp(self.feature_norm(torch.stack(each, -1).to(x.dtype)))
        x = x + self.slot_embedding[0, 0] + self.rank_embedding[0, 0]
        x, bias = x.flatten(-3, -2), self._bias(slots, K)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(-2, (slots, K))
        start = self.anchor_norm(self.context_proj(anchor))
        beside = start[..., None, None, :].expand_as(x)
        factor = F.silu(self.factor_input_proj(torch.cat([x, beside, x * beside], -1)))
        out, into = self._unit(self.out_head(factor)), self._unit(self.in_head(factor))
        first = self._unit(self.anchor_out_head(start))[..., None, None, :].expand_as(out[..., :1, :, :])
        before = torch.cat([first, out[..., :-1, :, :]], -3)
        return self.scale * (before @ into.transpose(-1, -2)).to(log_probs.dtype)

    def _bias(self, slots: int, K: int) -> Tensor:
        """``[heads, slots * K, slots * K]``: what attention adds for the distance of two candidates' slots."""
        slot = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(K)
        apart = slot[:, None] - slot
        return self.relative_slot_bias[:, apart + self.block_size - 1] + self.same_slot_bias[
            :, None, None
        ] * (apart == 0)

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.vector_eps)


class LiLiCorr(DFlash):
    """A LiLiCorr head.

    Args:
        config, taps, shared: as for ``DFlash``.
        top_k: candidates for each slot; all other tokens have q = 0. In training mode (``head.train()``) the scores share out the probability that the
            block gives to the candidates, and the other tokens keep theirs, so that every loss is finite.
        inner: the width of the transformer; ``None``: the head's. layers, heads, mlp_ratio: of the transformer. factors: numbers in a vector.
        scale: the logit of a cosine of 1. vector_eps: the least length of a vector that is divided by.
        conv_size, conv_group: as for ``DFlash2``, of convolutions along the block; 0: there are none.
    Raises:
        ValueError: a number below 1, convolutions with one of their sizes alone, an ``inner`` that is no multiple of ``heads``, or as ``DFlash``.
    """

    marginal, corrected = False, True

    def __init__(
        self,
        config: LlamaConfig,
        taps: Sequence[Tap],
        *,
        blocks: int = 5,
        top_k: int = 8,
        inner: int | None = None,
        layers: int = 2,
        heads: int = 8,
        mlp_ratio: float = 2.0,
        factors: int = 128,
        scale: float = 10.0,
        vector_eps: float = 1e-6,
        conv_size: int = 0,
        conv_group: int = 0,
        **shared: Any,
    ):
        width: int = config.hidden_size if inner is None else inner
        sizes = {"top_k": top_k, "inner": width, "layers": layers, "heads": heads, "factors": factors}
        for name, value in sizes.items():
            at_least(1, name, value, "give at least 1")
        for name, real in (("mlp_ratio", mlp_ratio), ("scale", scale), ("vector_eps", vector_eps)):
            number(name, real)
            if not 0 < real < math.inf:
                raise ValueError(f"{name} is {real}: give a finite number above 0")
        at_least(
            1, "mlp_ratio", int(width * mlp_ratio), "its width is the transformer's times this: give more"
        )
        if width % heads:
            raise ValueError(f"heads is {heads}: give a divisor of the transformer's width, {width}")
        for name, value in (("conv_size", conv_size), ("conv_group", conv_group)):
            at_least(0, name, value, "give 0 for no convolutions")
        if bool(conv_size) != bool(conv_group) or (conv_group and config.hidden_size % conv_group):
            raise ValueError(
                f"conv_size is {conv_size} and conv_group {conv_group}: give both, the group a divisor of the hidden size {config.hidden_size}, or 0 for both"
            )
        super().__init__(
            config, taps, blocks=blocks, top_k=top_k, inner=inner, layers=layers, heads=heads, mlp_ratio=mlp_ratio, factors=factors, scale=scale,
            vector_eps=vector_eps, conv_size=conv_size, conv_group=conv_group, **shared,
        )  # fmt: skip
        self.top_k: int = min(top_k, self.outputs)
        if conv_size:
            self.layers = nn.ModuleList(ConvBlock(config, conv_size, conv_group) for _ in range(blocks))
        self.lilicorr = Correlator(
            config.hidden_size, width, self.block_size - self.first, self.block_size, self.top_k, layers, heads, mlp_ratio, factors, config.rms_norm_eps, vector_eps,
            scale,
        )  # fmt: skip

    def initialise(self) -> None:
        """As ``HeadModel.initialise``; biases are 0, and convolutions begin as the identity."""
        super().initialise()
        for module in self.modules():
            if isinstance(module, DynamicConv):
                module.reset()
            elif isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def read(self, features: Features, go: Pass) -> Tensor:
        """As ``HeadModel.read``: what all layers read of a position is carried."""
        return self.stored(features, go)

    def step(self, n: int, memo: Any, token: Tensor, at: Anchors) -> tuple[Tensor, Lattice]:
        """As ``HeadModel.step``."""
        if n == 0:
            memo, previous = self.lattice(memo, token, at), None
        else:
            previous = self._named(memo.candidates[..., n - 1, :]) == token[..., None]
        scores, best = memo.scores[..., n, :, :], memo.candidates[..., n, :]
        logits = memo.logits[..., n, :]
        if previous is None:
            scores = scores[..., 0, :]
        else:
            scores = (scores * previous[..., None]).sum(-2)
            # A token that was no candidate has no scores: the block's own order remains.
            scores = torch.where(previous.any(-1, keepdim=True), scores, logits.gather(-1, best))
        if self.training:
            share = logits.log_softmax(-1)
            mass = share.gather(-1, best).logsumexp(-1, keepdim=True)
            return share.scatter(-1, best, mass + scores.log_softmax(-1)), memo
        return torch.full_like(logits, float("-inf")).scatter(-1, best, scores), memo

    def lattice(self, anchor: Tensor, token: Tensor, at: Anchors) -> Lattice:
        """The block's candidates after ``token [...]``, and their scores; ``anchor [..., E]`` is what ``read`` carried."""
        hidden = self.fill(token, at)
        logits = self.logits(hidden, raw=True)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best = logits.topk(self.top_k)
        log_probs = best.values - logits.logsumexp(-1, keepdim=True)
        embedded = self.embed(self._named(best.indices)).detach()
        return Lattice(logits, best.indices, self.lilicorr(embedded, log_probs, hidden, anchor))

    def _named(self, index: Tensor) -> Tensor:
        """The target's ids of outputs."""
        return index if self.d2t is None else self.ids[index]
