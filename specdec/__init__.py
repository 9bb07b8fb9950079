"""specdec: composable, provably lossless speculative decoding for Hugging Face causal language models."""

from importlib import import_module
from typing import Any

from specdec import drafts, executors, selectors, tree, verifiers
from specdec.arm_policy import Arm
from specdec.builder import Builder, decoder
from specdec.decoder import Decoder, StreamChunk
from specdec.drafts import chain_draft
from specdec.generation import Generation
from specdec.models import HFModel, TableModel
from specdec.rng import Philox
from specdec.sampling import Sampling
from specdec.serving.requests import Finished, Request, Summary
from specdec.stats import Stats
from specdec.types import Context, Proposal, Round, Scores, Verdict
from specdec.verifiers import Coupled, Rejection

__version__ = "0.1.0"

_LATER = ("audit", "cost", "data", "distributed", "masks", "memory", "pruning", "training", "zoo")


def __getattr__(name: str) -> Any:
    """Modules that are imported when they are first asked for (``sd.zoo``)."""
    if name in _LATER:
        return import_module(f"specdec.{name}")
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


__all__ = [
    "Arm",
    "Builder",
    "Context",
    "Coupled",
    "Decoder",
    "Finished",
    "Generation",
    "HFModel",
    "Philox",
    "Proposal",
    "Rejection",
    "Request",
    "Round",
    "Sampling",
    "Scores",
    "Stats",
    "StreamChunk",
    "Summary",
    "TableModel",
    "Verdict",
    "chain_draft",
    "decoder",
    "drafts",
    "executors",
    "selectors",
    "tree",
    "verifiers",
]
