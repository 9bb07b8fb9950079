"""Draft heads: small models that read the target's activations, run by one draft, ``Head``, over one contract."""

from specdec.drafts.heads.chain import Chain
from specdec.drafts.heads.ddtree import DDTree
from specdec.drafts.heads.dflash import DFlash
from specdec.drafts.heads.dflash2 import DFlash2
from specdec.drafts.heads.domino import Domino
from specdec.drafts.heads.draft import Head
from specdec.drafts.heads.dspark import DSpark
from specdec.drafts.heads.dynamic_tree import DynamicTree
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.features import Features, committed, fresh
from specdec.drafts.heads.formats.export import export
from specdec.drafts.heads.lilicorr import LiLiCorr
from specdec.drafts.heads.load import load
from specdec.drafts.heads.medusa import Medusa
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.mtp import MTP
from specdec.drafts.heads.pard2 import Pard2
from specdec.drafts.heads.peagle import PEagle
from specdec.drafts.heads.static_tree import StaticTree
from specdec.drafts.heads.xpress import XPress

__all__ = [
    "MTP",
    "Chain",
    "DDTree",
    "DFlash",
    "DFlash2",
    "DSpark",
    "Domino",
    "DynamicTree",
    "Eagle3",
    "Features",
    "Head",
    "HeadModel",
    "LiLiCorr",
    "Medusa",
    "PEagle",
    "Pard2",
    "StaticTree",
    "XPress",
    "committed",
    "export",
    "fresh",
    "load",
]
