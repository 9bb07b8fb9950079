"""Attention of packed ragged queries over KV slots: one function, several backends, all tested against a reference."""

from specdec.kernels.attention.api import BACKENDS, attention, available, choose, explain, register
from specdec.kernels.attention.contract import Backend
from specdec.kernels.attention.costs import CostModel, fit
from specdec.kernels.attention.decompose import Fragments, decompose
from specdec.kernels.attention.explicit import ExplicitPlan
from specdec.kernels.attention.merge import merge
from specdec.kernels.attention.plan import AttentionPlan, Tree

__all__ = [
    "BACKENDS",
    "AttentionPlan",
    "Backend",
    "CostModel",
    "ExplicitPlan",
    "Fragments",
    "Tree",
    "attention",
    "available",
    "choose",
    "decompose",
    "explain",
    "fit",
    "merge",
    "register",
]
