"""The tree of ``drafts.Tree`` in a whole round that is one captured step (``executors.Ahead``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.drafts.siblings import Distinct, Independent, TopAndOne
from specdec.drafts.tree import Tree
from specdec.drafts.whole_round import ModelDrafting, without_slots
from specdec.graphs.branches import Branches, Growing, Grown, TreeShape
from specdec.graphs.chain import scored
from specdec.graphs.drafting import Given, Passed
from specdec.kernels.attention.lowered import NODES
from specdec.kernels.topk import topk
from specdec.rng import Key
from specdec.sampling import fit


class TreeDrafting(ModelDrafting):
    """``Drafting`` of a ``Tree`` over an ``HFModel`` with graphs.

    After the verdict, keys and values of the accepted nodes move to the slots of their positions; the deepest nodes were never fed. Then each row's last two committed tokens are fed, as for a chain.
    """

    def __init__(self, draft: Any, memory: Any):
        super().__init__(draft, memory)
        self.widths, self.siblings = draft.widths, draft.siblings

    @staticmethod
    def why_not(draft: Any, target: Any, length: int) -> str | None:
        why = without_slots(draft.model)
        if why is None and type(draft.siblings) not in (Independent, Distinct, TopAndOne):
            why = f"draws siblings as the library does, and the draft's are {draft.siblings!r}"
        return why or too_many(draft.nodes(length))

    @staticmethod
    def tree(draft: Tree, length: int) -> TreeShape | None:
        """As ``Drafting.tree``."""
        widths = draft.widths[:length]
        if max(widths) == 1:
            return None
        return TreeShape(draft.nodes(length), (widths, draft.siblings))

    def constants(self, rows: int, device: torch.device, steps: int) -> Branches:
        """As ``Drafting.constants``."""
        above, level = list[int](), [-1]
        for width in self.widths[:steps]:
            first = len(above)
            above += [node for node in level for _ in range(width)]
            level = list(range(first, len(above)))
        return Branches(above, self.siblings.kind != "independent", rows, device)

    def grow(self, given: Given, growing: Growing, constants: Any) -> Grown:
        """As ``Drafting.grow``."""
        branches: Branches = constants
        state, V = growing.state, growing.vocab_size
        no_text: Any = None
        length, level = state[:, 0], state[:, 2:]
        first, tokens, tops, laws = self.chain(given, state), [], [], []
        for d, width in enumerate(branches.fan):
            if d == 0:
                logits = first(0, level[:, 0])[:, None]
            else:
                logits = self.side.feed_nodes(given, level, length, branches.levels[d - 1])
            logits = fit(logits.view(*level.shape, -1), V)
            top, _, q = scored(logits, growing.sampling)
            if q is None:
                children = topk(growing.sampling.scores(logits, no_text, None), width).indices
            else:
                number = torch.arange(q.shape[1] * width, device=q.device).view(1, -1, width)
                numbers: Any = growing.rng
                drawn = self.siblings(q, width, Key(length[:, None, None], d, number), numbers)
                children = drawn.tokens
                laws.append(drawn.distributions)
            level = children.flatten(1).clamp(0, V - 1)
            tokens.append(level)
            tops.append(top[..., None].expand(children.shape).flatten(1))
        finite = torch.isfinite(torch.cat(tops, 1))
        return branches.grown(
            torch.cat(tokens, 1), growing.budget, finite, torch.cat(laws, 1) if laws else None
        )

    def observe(self, given: Given, passed: Passed) -> Tensor | None:
        """As ``Drafting.observe``."""
        if passed.path is not None and passed.path.shape[1] > 1:
            self.side.keep_path(given, passed.length, passed.path[:, :-1])  # the deepest nodes were not fed
        return None


def too_many(nodes: int) -> str | None:
    """Why a step cannot verify a tree of this many nodes, or ``None``."""
    return f"runs trees of at most {NODES} nodes, and the draft's has {nodes}" if nodes > NODES else None
