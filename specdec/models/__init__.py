"""Target and draft models behind one interface: Hugging Face causal LMs, and exact tables for tests and notebooks."""

from specdec.models.hf import SUPPORTED, HFModel, UnsupportedModel
from specdec.models.masked import Masked
from specdec.models.own_cache import OWN_CACHE, OwnCache
from specdec.models.reduced_vocab import TrimmedModel
from specdec.models.stacked import StackedModel
from specdec.models.table import TableModel
from specdec.models.text_only import text_only
from specdec.models.windowed import Windowed

__all__ = [
    "OWN_CACHE",
    "SUPPORTED",
    "HFModel",
    "Masked",
    "OwnCache",
    "StackedModel",
    "TableModel",
    "TrimmedModel",
    "UnsupportedModel",
    "Windowed",
    "text_only",
]
