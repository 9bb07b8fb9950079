"""Verifiers: which proposed nodes are accepted."""

from specdec.verifiers.block import BlockVerification
from specdec.verifiers.coupled import Coupled
from specdec.verifiers.distinct import DistinctTransport
from specdec.verifiers.fly import FLy
from specdec.verifiers.fused import FusedRejection
from specdec.verifiers.kseq import KSeq
from specdec.verifiers.mixture import Mixture
from specdec.verifiers.rejection import Rejection
from specdec.verifiers.synthetic import Synthetic
from specdec.verifiers.transport import OptimalTransport
from specdec.verifiers.traversal import Traversal
from specdec.verifiers.typical import TypicalAcceptance

__all__ = [
    "BlockVerification",
    "Coupled",
    "DistinctTransport",
    "FLy",
    "FusedRejection",
    "KSeq",
    "Mixture",
    "OptimalTransport",
    "Rejection",
    "Synthetic",
    "Traversal",
    "TypicalAcceptance",
]
