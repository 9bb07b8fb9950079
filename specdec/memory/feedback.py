"""Feedback memory: a layer attends to a mixture of all layers' activations at earlier positions (Fan et al., arXiv 2002.09402).

In a plain Transformer layer ``l`` sees the inputs of layer ``l`` at earlier positions. With feedback it sees memory vectors, which
hold what the *whole* model made of those positions, its last layer included. Positions must then be computed in order, which is
what a draft does anyway. ``SharedMemory`` is the paper's form; ``FeedbackMemory`` is SPIRe's (arXiv 2504.06419, section 3.3),
where every layer has its own mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def mix(activations: Sequence[Tensor] | Tensor, weights: Tensor) -> Tensor:
    """``sum_l softmax(weights)_l * activations[l]`` (Fan et al., equation 2).

    Args:
        activations: ``n + 1`` tensors ``[..., E]``: the input of layer 1, then every layer's output. They may be stacked.
        weights: ``[n + 1]`` logits of one memory vector, or ``[m, n + 1]`` of m of them.
    Returns:
        ``[..., E]``, or ``[m, ..., E]``.
    Raises:
        ValueError: another number of activations than weights, or activations of different shapes.
    """
    if len(activations) != weights.shape[-1]:
        raise ValueError(
            f"activations has {len(activations)} entries and weights {weights.shape[-1]}: give the input of the first layer "
            "and the output of every layer"
        )
    if len({x.shape for x in activations}) != 1:
        raise ValueError(
            f"activations have the shapes {[list(x.shape) for x in activations]}: they must agree"
        )
    share = weights.softmax(-1)
    if isinstance(activations, Tensor):
        made = share.to(activations.dtype) @ activations.flatten(1)
        return made.view(*share.shape[:-1], *activations.shape[1:])
    # A sum over a few tensors, so that nothing is stacked for a matrix product.
    return sum(
        (
            share[..., l].reshape(*share.shape[:-1], *[1] * x.dim()).to(x.dtype) * x
            for l, x in enumerate(activations)
        ),
        start=torch.zeros((), dtype=activations[0].dtype, device=activations[0].device),
    )


class SharedMemory(nn.Module):
    """Fan et al.'s memory: one vector a position, the same for all layers.

    Args:
        layers: n, the model's layers; ``weights [n + 1]`` start at zero, an even mixture.
    """

    def __init__(self, layers: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(_at_least_one(layers) + 1))

    def forward(self, activations: Sequence[Tensor] | Tensor) -> Tensor:
        """``n + 1`` activations ``[..., E]`` -> memory ``[n, ..., E]``: the same vector for every layer (a view)."""
        made = mix(activations, self.weights)
        return made.expand(len(activations) - 1, *made.shape)


class FeedbackMemory(nn.Module):
    """SPIRe's memory: layer ``i`` has ``m_t^i = sum_l softmax(w_i)_l * x_t^l`` of its own.

    Args:
        layers: n, the draft's layers; ``weights [n, n + 1]`` start at zero, even mixtures (the paper does not say).
    """

    def __init__(self, layers: int):
        super().__init__()
        layers = _at_least_one(layers)
        self.weights = nn.Parameter(torch.zeros(layers, layers + 1))

    def forward(self, activations: Sequence[Tensor] | Tensor) -> Tensor:
        """``n + 1`` activations ``[..., E]`` -> memory ``[n, ..., E]``, one vector a layer."""
        return mix(activations, self.weights)


def _at_least_one(layers: int) -> int:
    if layers < 1:
        raise ValueError(f"layers is {layers}: a memory needs at least one layer to read from")
    return layers
