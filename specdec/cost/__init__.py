"""Modelled throughput: shapes, terms, hardware, decoding methods, and the settings of SPIRe's figures."""

from specdec.cost.calibrate import Fitted, Host, calibrate
from specdec.cost.growth import critical_context, growing
from specdec.cost.hardware import A100_BF16, H100_FP8, H100_PAPER, H200_FP8, Hardware
from specdec.cost.investment import Investment, training_share
from specdec.cost.methods import (
    AUTOREGRESSIVE,
    Load,
    Method,
    Round,
    Sparse,
    View,
    Window,
    full,
    magicdec,
    spire,
    vanilla,
)
from specdec.cost.shapes import Experts, Shape
from specdec.cost.terms import FULL, PAPER, Forward, Step, Term, Work, step

__all__ = [
    "A100_BF16",
    "AUTOREGRESSIVE",
    "FULL",
    "H100_FP8",
    "H100_PAPER",
    "H200_FP8",
    "PAPER",
    "Experts",
    "Fitted",
    "Forward",
    "Hardware",
    "Host",
    "Investment",
    "Load",
    "Method",
    "Round",
    "Shape",
    "Sparse",
    "Step",
    "Term",
    "View",
    "Window",
    "Work",
    "calibrate",
    "critical_context",
    "full",
    "growing",
    "magicdec",
    "spire",
    "step",
    "training_share",
    "vanilla",
]
