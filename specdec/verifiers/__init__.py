"""Verifiers: which proposed nodes are accepted."""

from specdec.verifiers.coupled import Coupled
from specdec.verifiers.fused import FusedRejection
from specdec.verifiers.rejection import Rejection

__all__ = ["Coupled", "FusedRejection", "Rejection"]
