"""Target and draft models behind one interface: Hugging Face causal LMs, and exact tables for tests and notebooks."""

from specdec.models.table import TableModel

try:
    from specdec.models.hf import SUPPORTED, HFModel, UnsupportedModel
except ImportError:
    HFModel = SUPPORTED = UnsupportedModel = None

__all__ = ["SUPPORTED", "HFModel", "TableModel", "UnsupportedModel"]
