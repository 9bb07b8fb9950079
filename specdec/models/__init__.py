"""Target and draft models behind one interface: Hugging Face causal LMs, and exact tables for tests and notebooks."""

from specdec.models.compact import Windowed
from specdec.models.hf import SUPPORTED, HFModel, UnsupportedModel
from specdec.models.stacked import StackedModel
from specdec.models.table import TableModel
from specdec.models.trimmed import TrimmedModel

__all__ = [
    "SUPPORTED",
    "HFModel",
    "StackedModel",
    "TableModel",
    "TrimmedModel",
    "UnsupportedModel",
    "Windowed",
]
