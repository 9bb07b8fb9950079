"""Rejection verification of drafted chains on logits, without writing probabilities to memory."""

from specdec.kernels.rejection.fused import BACKENDS, chosen, decisions, verify
from specdec.kernels.rejection.reference import Decision, decide

__all__ = ["BACKENDS", "Decision", "chosen", "decide", "decisions", "verify"]
