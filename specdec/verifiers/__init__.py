"""Verifiers: which proposed nodes are accepted."""

from specdec.verifiers.block import BlockVerification
from specdec.verifiers.coupled import Coupled
from specdec.verifiers.distinct import DistinctTransport
from specdec.verifiers.fused import FusedRejection
from specdec.verifiers.kseq import KSeq
from specdec.verifiers.rejection import Rejection
from specdec.verifiers.transport import OptimalTransport
from specdec.verifiers.traversal import Traversal

__all__ = [
    "BlockVerification",
    "Coupled",
    "DistinctTransport",
    "FusedRejection",
    "KSeq",
    "OptimalTransport",
    "Rejection",
    "Traversal",
]
