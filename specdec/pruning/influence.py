"""Block influence: how much a layer changes the direction of the hidden states (ShortGPT, Men et al., arXiv 2403.03853)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.configs import blocks_of
from specdec.pruning.observe import observe
from specdec.pruning.rebuild import plain


def block_influence(before: Tensor, after: Tensor) -> Tensor:
    """``1 - E[cos(before, after)]`` over all tokens of a layer's inputs and outputs, both ``[..., E]``: a number from 0 to 2.

    A layer of low influence returns nearly its input, and is dropped first.

    Raises:
        ValueError: different shapes, or no tokens.
    """
    if before.shape != after.shape or not before.numel():
        raise ValueError(
            f"before is {list(before.shape)} and after {list(after.shape)}; they must be equal, with at least one token"
        )
    return 1 - torch.nn.functional.cosine_similarity(before, after, dim=-1).mean()


def layer_influence(model: Any, tokens: Tensor, length: Tensor | None = None) -> Tensor:
    """``[layers]`` block influence on a calibration batch; input of ``influential_layers``.

    The last layer's output is taken before the final norm (transformers' ``output_hidden_states`` returns it after).

    Args:
        tokens: ``[B, L]`` right-padded. length: ``[B]``; by default all of ``L``.
    Raises:
        TypeError, ValueError: a model that cannot be read, tokens that do not fit.
    """
    model = plain(model, "layer_influence")
    return observe(model, list(blocks_of(model)), block_influence, tokens, length)
