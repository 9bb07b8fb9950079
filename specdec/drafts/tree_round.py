"""The tree of ``drafts.Tree`` in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specdec.drafts.siblings import Distinct, Independent, TopAndOne
from specdec.drafts.tree import Tree
from specdec.drafts.whole_round import ModelDrafting, without_steps
from specdec.graphs.branches import Branches, TreeShape
from specdec.graphs.drafting import Given, Passed
from specdec.kernels.attention.lowered import NODES


class TreeDrafting(ModelDrafting):
    """``Drafting`` of a ``Tree`` over an ``HFModel`` with graphs.

    Accepted nodes that were fed get the slots of their positions. Then each row's last two committed tokens are fed, as for a chain.
    """

    @staticmethod
    def why_not(draft: Any, target: Any, length: int) -> str | None:
        model: Any = draft.model
        why = without_steps(model)
        if why is not None:
            return f"runs an HFModel with graphs=True, but the draft's model {why}"
        if model.page is not None:
            return f"needs a draft's keys and values in slots, and its model has pages of {model.page} tokens"
        if type(draft.siblings) not in (Independent, Distinct, TopAndOne):
            return f"draws siblings as the library does, and the draft's are {draft.siblings!r}"
        if draft.nodes(length) > NODES:
            return f"runs trees of at most {NODES} nodes, and the draft's has {draft.nodes(length)}"
        return None

    @staticmethod
    def tree(draft: Tree, length: int) -> TreeShape:
        return TreeShape(draft.widths[:length], draft.siblings, draft.siblings.kind != "independent")

    def levels(self, given: Given, state: Tensor, branches: Branches) -> Callable[[int, Tensor], Tensor]:
        first, root = self.chain(given, state), state[:, 0]

        def forward(d: int, tokens: Tensor) -> Tensor:
            if d == 0:
                return first(0, tokens[:, 0])[:, None]
            logits = self.side.feed_nodes(given, tokens, root, branches.levels[d - 1])
            return logits.view(*tokens.shape, -1)

        return forward

    def observe(self, given: Given, passed: Passed) -> Tensor | None:
        assert passed.path is not None
        fed = passed.path[:, :-1]  # the deepest nodes were not fed
        if fed.shape[1]:
            self.side.keep_path(given, passed.length, fed)
        return None
