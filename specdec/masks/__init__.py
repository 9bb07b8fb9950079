"""Masks: which positions a query sees. Small callable objects; FlexAttention's signature, with ``&``, ``|`` and ``show()``."""

from specdec.masks.block import Block
from specdec.masks.causal import Causal
from specdec.masks.lower import block_mask, dense, intervals
from specdec.masks.mask import And, Mask, Or
from specdec.masks.positions import InCache, OriginalText
from specdec.masks.sinks import Sinks
from specdec.masks.strided import Strided
from specdec.masks.tree import Tree
from specdec.masks.window import Window

__all__ = [
    "And",
    "Block",
    "Causal",
    "InCache",
    "Mask",
    "Or",
    "OriginalText",
    "Sinks",
    "Strided",
    "Tree",
    "Window",
    "block_mask",
    "dense",
    "intervals",
]
