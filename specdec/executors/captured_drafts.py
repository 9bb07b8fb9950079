"""What drafts in the captured rounds of ``executors.Ahead``, and with which sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.composition import Composition
from specdec.drafts.heads.draft import Head
from specdec.drafts.heads.dynamic_tree import DynamicTree
from specdec.drafts.heads.static_tree import StaticTree
from specdec.drafts.heads.tree_round import HeadStaticDrafting, HeadTreeDrafting
from specdec.drafts.heads.whole_round import HeadDrafting
from specdec.drafts.magicdec.draft import MagicDec
from specdec.drafts.magicdec.whole_round import ViewDrafting
from specdec.drafts.model import Model
from specdec.drafts.spire.draft import Spire
from specdec.drafts.spire.whole_round import SpireDrafting
from specdec.drafts.tree import Tree
from specdec.drafts.tree_round import TreeDrafting
from specdec.drafts.whole_round import ModelDrafting, class_of
from specdec.drafts.windowed_round import WindowedDrafting
from specdec.models.masked import Masked
from specdec.models.windowed import Windowed
from specdec.per_request import PerRequest
from specdec.sampling import Sampling

DRAFTS: dict[type, Any] = {
    Model: ModelDrafting,
    Tree: TreeDrafting,
    Spire: SpireDrafting,
    MagicDec: ViewDrafting,
    Head: HeadDrafting,
}
HEAD_TREES: dict[type, Any] = {DynamicTree: HeadTreeDrafting, StaticTree: HeadStaticDrafting}
CONSTANT = (Masked, Windowed)  # models whose keys and values are in a ring


def drafting_of(draft: Any) -> Any:
    """The ``Drafting`` of a draft, or ``None``."""
    if type(draft) is Model and class_of(draft.model) in CONSTANT:
        return WindowedDrafting
    if type(draft) is Head and type(draft.tree) in HEAD_TREES:
        return HEAD_TREES[type(draft.tree)]
    return DRAFTS.get(type(draft))


def samplings(composition: Composition) -> tuple[Sampling, Sampling]:
    """That of the target, and that of the draft, in the step: the same object unless the draft has its own."""
    draft: Any = composition.draft
    own = None if drafting_of(draft) is None else draft.sampling
    if own is None or own is composition.sampling:
        return composition.sampling, composition.sampling
    if isinstance(own.grammar, PerRequest):  # taken from the decoder's; ``Ahead`` refuses grammars
        own = replace(own, grammar=own.grammar.default)
    return composition.sampling, own
