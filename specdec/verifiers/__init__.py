"""Verifiers: which proposed nodes are accepted."""

from specdec.verifiers.block import BlockVerification
from specdec.verifiers.coupled import Coupled
from specdec.verifiers.fused import FusedRejection
from specdec.verifiers.rejection import Rejection

__all__ = ["BlockVerification", "Coupled", "FusedRejection", "Rejection"]
