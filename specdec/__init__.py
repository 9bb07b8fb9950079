"""specdec: composable, provably lossless speculative decoding for Hugging Face causal language models."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():  # of a notebook without ipywidgets, where bars are text, at the first import
    warnings.filterwarnings("ignore", message="IProgress not found")
    import tqdm.auto  # noqa: F401

try:
    from specdec import kernels
except ImportError as missing:  # a checkout without symbolic links has a text file in their place
    raise ImportError(
        "specdec/kernels is not a folder: git could not make the symbolic link to ../kernels. Run `git config core.symlinks true` and "
        "`git checkout -- specdec/kernels` (on Windows in developer mode), or put a copy of the folder kernels in its place"
    ) from missing
from specdec import drafts, executors, selectors, tree, verifiers
from specdec.arm_policy import Arm
from specdec.audit.certify import certify
from specdec.builder import Builder, decoder
from specdec.capabilities import DraftInfo, ModelInfo, SelectorInfo, VerifierInfo
from specdec.decoder import Decoder, StreamChunk
from specdec.drafts import chain_draft
from specdec.generation import Generation
from specdec.models import HFModel, TableModel
from specdec.rng import Philox
from specdec.sampling import Sampling
from specdec.serving.requests import Finished, Request, Summary
from specdec.stats import Stats
from specdec.types import Context, Proposal, Round, Scores, Verdict
from specdec.verifiers import BlockVerification, Coupled, KSeq, OptimalTransport, Rejection, Traversal

__version__ = "0.1.0"

_LATER = (
    "audit",
    "cost",
    "data",
    "distributed",
    "lab",
    "masks",
    "memory",
    "models",
    "pruning",
    "testing",
    "training",
    "zoo",
)
_FUNCTIONS = {"compare": "specdec.lab.live"}

if TYPE_CHECKING:  # for type checkers and editors, to which a missing name is an error
    from specdec import audit as audit
    from specdec import cost as cost
    from specdec import data as data
    from specdec import distributed as distributed
    from specdec import lab as lab
    from specdec import masks as masks
    from specdec import memory as memory
    from specdec import models as models
    from specdec import pruning as pruning
    from specdec import testing as testing
    from specdec import training as training
    from specdec import zoo as zoo
    from specdec.lab.live import compare as compare
else:

    def __getattr__(name: str) -> Any:
        """Import submodules at first use (``sd.zoo``), and ``sd.compare``."""
        if name in _FUNCTIONS:
            return getattr(import_module(_FUNCTIONS[name]), name)
        if name in _LATER:
            return import_module(f"specdec.{name}")
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER, *_FUNCTIONS, *(name for name in globals() if name.startswith("__"))})


__all__ = [
    "Arm",
    "BlockVerification",
    "Builder",
    "Context",
    "Coupled",
    "Decoder",
    "DraftInfo",
    "Finished",
    "Generation",
    "HFModel",
    "KSeq",
    "ModelInfo",
    "OptimalTransport",
    "Philox",
    "Proposal",
    "Rejection",
    "Request",
    "Round",
    "Sampling",
    "Scores",
    "SelectorInfo",
    "Stats",
    "StreamChunk",
    "Summary",
    "TableModel",
    "Traversal",
    "Verdict",
    "VerifierInfo",
    "certify",
    "chain_draft",
    "decoder",
    "drafts",
    "executors",
    "kernels",
    "selectors",
    "tree",
    "verifiers",
]
