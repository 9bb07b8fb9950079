"""specdec: composable, provably lossless speculative decoding for Hugging Face causal language models."""

import sys
import warnings
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
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

__version__ = "0.1.0"

_LATER = (
    "audit",
    "cost",
    "data",
    "distributed",
    "drafts",
    "executors",
    "grammars",
    "lab",
    "masks",
    "memory",
    "models",
    "pruning",
    "rng",
    "selectors",
    "testing",
    "training",
    "tree",
    "verifiers",
    "zoo",
)
_NAMES = {
    "Arm": "specdec.arm_policy",
    "BlockVerification": "specdec.verifiers",
    "Builder": "specdec.builder",
    "Context": "specdec.types",
    "Coupled": "specdec.verifiers",
    "Decoder": "specdec.decoder",
    "DraftInfo": "specdec.capabilities",
    "Finished": "specdec.serving.requests",
    "Generation": "specdec.generation",
    "HFModel": "specdec.models",
    "KSeq": "specdec.verifiers",
    "LogProbs": "specdec.likelihood",
    "ModelInfo": "specdec.capabilities",
    "OptimalTransport": "specdec.verifiers",
    "Philox": "specdec.rng",
    "Proposal": "specdec.types",
    "Rejection": "specdec.verifiers",
    "Request": "specdec.serving.requests",
    "Round": "specdec.types",
    "Sampling": "specdec.sampling",
    "Scores": "specdec.types",
    "SelectorInfo": "specdec.capabilities",
    "Stats": "specdec.stats",
    "StreamChunk": "specdec.texts",
    "Summary": "specdec.serving.requests",
    "TableModel": "specdec.models",
    "Traversal": "specdec.verifiers",
    "Verdict": "specdec.types",
    "VerifierInfo": "specdec.capabilities",
    "auto": "specdec.lab.auto",
    "certify": "specdec.audit.certify",
    "chain_draft": "specdec.drafts",
    "compare": "specdec.lab.live",
    "decoder": "specdec.builder",
    "load": "specdec.builder",
    "log_probs": "specdec.likelihood",
}
_MODULES = {module.name for module in iter_modules(__path__)}

if TYPE_CHECKING:  # for type checkers and editors, to which a missing name is an error
    from specdec import audit as audit
    from specdec import cost as cost
    from specdec import data as data
    from specdec import distributed as distributed
    from specdec import drafts as drafts
    from specdec import executors as executors
    from specdec import grammars as grammars
    from specdec import lab as lab
    from specdec import masks as masks
    from specdec import memory as memory
    from specdec import models as models
    from specdec import pruning as pruning
    from specdec import rng as rng
    from specdec import selectors as selectors
    from specdec import testing as testing
    from specdec import training as training
    from specdec import tree as tree
    from specdec import verifiers as verifiers
    from specdec import zoo as zoo
    from specdec.arm_policy import Arm as Arm
    from specdec.audit.certify import certify as certify
    from specdec.builder import Builder as Builder
    from specdec.builder import decoder as decoder
    from specdec.builder import load as load
    from specdec.capabilities import DraftInfo as DraftInfo
    from specdec.capabilities import ModelInfo as ModelInfo
    from specdec.capabilities import SelectorInfo as SelectorInfo
    from specdec.capabilities import VerifierInfo as VerifierInfo
    from specdec.decoder import Decoder as Decoder
    from specdec.drafts import chain_draft as chain_draft
    from specdec.generation import Generation as Generation
    from specdec.lab.auto import auto as auto
    from specdec.lab.live import compare as compare
    from specdec.likelihood import LogProbs as LogProbs
    from specdec.likelihood import log_probs as log_probs
    from specdec.models import HFModel as HFModel
    from specdec.models import TableModel as TableModel
    from specdec.rng import Philox as Philox
    from specdec.sampling import Sampling as Sampling
    from specdec.serving.requests import Finished as Finished
    from specdec.serving.requests import Request as Request
    from specdec.serving.requests import Summary as Summary
    from specdec.stats import Stats as Stats
    from specdec.texts import StreamChunk as StreamChunk
    from specdec.types import Context as Context
    from specdec.types import Proposal as Proposal
    from specdec.types import Round as Round
    from specdec.types import Scores as Scores
    from specdec.types import Verdict as Verdict
    from specdec.verifiers import BlockVerification as BlockVerification
    from specdec.verifiers import Coupled as Coupled
    from specdec.verifiers import KSeq as KSeq
    from specdec.verifiers import OptimalTransport as OptimalTransport
    from specdec.verifiers import Rejection as Rejection
    from specdec.verifiers import Traversal as Traversal
else:

    def __getattr__(name: str) -> Any:
        """Import a name or a module at its first use (``sd.HFModel``, ``sd.zoo``): PyTorch and transformers take seconds."""
        if name in _NAMES:
            found = getattr(import_module(_NAMES[name]), name)
        elif name in _MODULES:
            found = import_module(f"specdec.{name}")
        else:
            raise AttributeError(f"module 'specdec' has no attribute {name!r}")
        globals()[name] = found
        return found

    class _Package(ModuleType):
        """``sd.decoder`` is the function, also after the module ``specdec.decoder`` was imported."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in _NAMES or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER, *_NAMES, *(name for name in globals() if name.startswith("__"))})


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
    "LogProbs",
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
    "auto",
    "certify",
    "chain_draft",
    "decoder",
    "drafts",
    "executors",
    "grammars",
    "kernels",
    "load",
    "log_probs",
    "selectors",
    "tree",
    "verifiers",
]
