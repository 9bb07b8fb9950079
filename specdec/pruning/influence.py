"""Block influence: how much a layer turns the hidden states that pass through it (ShortGPT, Men et al., arXiv 2403.03853)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.forward.taps import blocks_of
from specdec.pruning.observe import observe
from specdec.pruning.rebuild import plain


def block_influence(before: Tensor, after: Tensor) -> Tensor:
    """``1 - E[cos(before, after)]`` over all tokens of a layer's inputs and outputs, both ``[..., E]``: a number from 0 to 2.

    A layer of low influence gives back nearly what it was given, and is the first to drop.

    Raises:
        ValueError: different shapes, or no tokens.
    """
    if before.shape != after.shape or not before.numel():
        raise ValueError(
            f"before is {list(before.shape)} and after {list(after.shape)}; they must be equal, with at least one token"
        )
    return 1 - torch.nn.functional.cosine_similarity(before, after, dim=-1).mean()


def layer_influence(model: Any, tokens: Tensor, length: Tensor | None = None) -> Tensor:
    """``[layers]`` block influence of each layer on a calibration batch; for ``influential_layers``.

    The last layer's output is taken before the final norm (transformers' ``output_hidden_states`` gives it after).

    Args:
        tokens: ``[B, L]`` right-padded. length: ``[B]``; by default all tokens count.
    Raises:
        TypeError, ValueError: a model that cannot be read, tokens that do not fit.
    """
    model = plain(model, "layer_influence")
    return observe(model, list(blocks_of(model)), block_influence, tokens, length)
