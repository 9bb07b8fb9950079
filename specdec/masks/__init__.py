"""Masks: which positions a query sees. A mask is a small callable object with FlexAttention's signature, ``&``, ``|`` and ``show()``."""

from specdec.masks.block import Block
from specdec.masks.causal import Causal
from specdec.masks.function import Function, Intervals
from specdec.masks.lower import block_mask, dense, intervals
from specdec.masks.mask import And, Mask, Or
from specdec.masks.positions import InCache, OriginalText
from specdec.masks.reach import Reach
from specdec.masks.sight import for_model, sees
from specdec.masks.sinks import Sinks
from specdec.masks.streaming import streaming
from specdec.masks.strided import Strided
from specdec.masks.tree import Tree
from specdec.masks.window import Window

__all__ = [
    "And",
    "Block",
    "Causal",
    "Function",
    "InCache",
    "Intervals",
    "Mask",
    "Or",
    "OriginalText",
    "Reach",
    "Sinks",
    "Strided",
    "Tree",
    "Window",
    "block_mask",
    "dense",
    "for_model",
    "intervals",
    "sees",
    "streaming",
]
