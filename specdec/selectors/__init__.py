"""Selectors: which arm (a draft, a length, no speculation) serves each request. One algorithm a file."""

from specdec.selectors.banditspec import EXP3Spec, UCBSpec
from specdec.selectors.by_batch import ByBatch
from specdec.selectors.epsilon import EpsilonGreedy
from specdec.selectors.exp3 import EXP3
from specdec.selectors.fixed import Fixed
from specdec.selectors.hedge import Hedge
from specdec.selectors.planner import Planner
from specdec.selectors.random import Random
from specdec.selectors.spin import Spin
from specdec.selectors.thompson import Thompson
from specdec.selectors.ucb import UCB1

__all__ = [
    "EXP3",
    "UCB1",
    "ByBatch",
    "EXP3Spec",
    "EpsilonGreedy",
    "Fixed",
    "Hedge",
    "Planner",
    "Random",
    "Spin",
    "Thompson",
    "UCBSpec",
]
