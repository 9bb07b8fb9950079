"""specdec: composable, provably lossless speculative decoding for Hugging Face causal language models."""

from specdec import drafts, executors, selectors, tree, verifiers
from specdec.builder import Builder, decoder
from specdec.decoder import Decoder, Piece
from specdec.drafts import chain_draft
from specdec.generation import Generation
from specdec.models import HFModel, TableModel
from specdec.requests import Finished, Request, Summary
from specdec.rng import Philox
from specdec.sampling import Sampling
from specdec.selection import Arm
from specdec.stats import Stats
from specdec.types import Context, Proposal, Round, Scores, Verdict
from specdec.verifiers import Coupled, Rejection

__version__ = "0.1.0"

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
    "Piece",
    "Proposal",
    "Rejection",
    "Request",
    "Round",
    "Sampling",
    "Scores",
    "Stats",
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
