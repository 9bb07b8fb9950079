"""The contract between a head and what runs it, in decoding and in training alike.

A head drafts from *anchors*. An anchor is the position ``a`` of the last committed token, x_a. The target's activations exist at positions
below ``a``; the head's own slots are at ``a``, ``a + 1``, ... In decoding there is one anchor per row, and keys and values are in a cache.
In training every position of a text can be an anchor, and the tokens of its block are those of the text. The head's computation is the same:

1. ``HeadModel.read`` turns features of committed positions into keys and values, and into what is carried to the draft's first step;
2. ``HeadModel.step`` gives the logits for x_{a+1}, x_{a+2}, ..., each after the tokens before it.

``[...]`` below are the dimensions of positions (or anchors): packed positions ``[F]`` and rows ``[R]`` in decoding, nodes of a tree
``[R, W]``, texts ``[B, T]`` and anchors ``[B, A]`` in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor


class Sight(NamedTuple):
    """What a layer with a sliding window sees. Nothing is seen that a pass does not show anyway.

    Attributes:
        window: positions, at least 1. fixed: a block's slots see the last ``window`` positions of text before their anchor, all the same ones.
            Otherwise a slot at q sees the text at positions above ``q - window``: a window counts the slot itself. Committed positions do so in both
            cases. causal: a block's slots see no slot at a later position, also where the pass shows both directions.
    """

    window: int
    fixed: bool
    causal: bool


class Pass(Protocol):
    """Slots that are computed together.

    Attributes:
        positions: ``[...]`` their positions in the text, for the rotary embedding. kernels: part of a head -> what computes it faster in this
            pass; empty where there is nothing. ``layers`` looks parts up there, and a head's own code need not.
    """

    positions: Tensor
    kernels: Mapping[Any, Any]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the slots' ``key`` and ``value [..., H, D]`` as those of ``layer``, and attend.

        Args:
            query: ``[..., Hq, D]``; scores are scaled by ``D ** -0.5``.
        Returns:
            ``[..., Hq * Dv]``: heads are concatenated.
        """
        ...

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep ``key`` and ``value [..., H, D]`` without attending, in place of what this pass has kept of that layer."""
        ...

    def narrowed(self, sight: Sight) -> Self:
        """The pass of the same slots for layers that see less; a head calls it for its layers with windows alone."""
        ...


class Anchors(Protocol):
    """Where blocks are drafted: all slots see what ``read`` stored at positions below their anchor."""

    def count(self, most: int) -> int:
        """How many of the ``most`` tokens that a head proposes are asked for, at least 1: no more steps are taken. A head whose slots see none after them may
        leave out the others."""
        ...

    def slots(self, first: int, count: int | None = None, full: bool = False) -> Pass:
        """New slots for every anchor, which also see the block's slots of earlier passes (in a tree, those of their ancestors).

        Args:
            first: the position of the first slot minus that of its anchor. count: how many slots, at successive positions: the pass has
                shape ``[..., count]``; ``None`` is one slot, of shape ``[...]``.
            full: whether the slots of this pass see each other in both directions; otherwise a slot sees those before it.
        """
        ...
