"""Verifiers: which proposed nodes are accepted."""

from specdec.verifiers.block import BlockVerification
from specdec.verifiers.coupled import Coupled
from specdec.verifiers.fly import FLy
from specdec.verifiers.fused import FusedRejection
from specdec.verifiers.mixture import Mixture
from specdec.verifiers.rejection import Rejection
from specdec.verifiers.synthetic import Synthetic
from specdec.verifiers.typical import TypicalAcceptance

__all__ = [
    "BlockVerification",
    "Coupled",
    "FLy",
    "FusedRejection",
    "Mixture",
    "Rejection",
    "Synthetic",
    "TypicalAcceptance",
]
