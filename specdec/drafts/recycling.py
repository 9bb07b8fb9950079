"""Token recycling: the target's most probable tokens after each token, also after rejected ones, are what is proposed next time (Luo et al., arXiv 2408.08696)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.capabilities import DraftInfo
from specdec.drafts.heads.static_tree import StaticTree
from specdec.drafts.stateless import under
from specdec.grammars.masks import allowed_after, constrained, of_request, permitted
from specdec.kernels.device import to_device
from specdec.kernels.topk import topk
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round

KEPT = 4  # times as many followers of a token under a grammar, which allows others in each place
Followers = Mapping[int, list[int]]  # token -> the tokens that are expected after it, the best first


class RecyclingState(NamedTuple):
    """What follows each token, for each row, and the last ``proposal``."""

    followers: tuple[Followers, ...]
    proposal: Proposal | None


@dataclass(frozen=True)
class Recycling:
    """Proposes a tree of the tokens that the target found most probable after the same token, when it read that token last in this row.

    It needs no model. Every round shows the target's logits after each token that it read, accepted or rejected; before that, a token is followed by what
    followed it in the prompt. Under a grammar the ranks are those among the tokens that it allows.

    Args:
        tree: its shape. ``((0,), (0, 0), (1,))`` has the best follower, the best one after that, and the second best. ``StaticTree.of_widths((1,) * 4)`` is a chain.
    Raises:
        TypeError: ``tree`` is no ``StaticTree``.
    """

    tree: StaticTree = StaticTree.of_accuracies([[0.5, 0.14, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01]] * 6, 24)
    grammar: Any = field(default=None, kw_only=True, repr=False, compare=False)  # bind sets it

    def __post_init__(self) -> None:
        if not isinstance(self.tree, StaticTree):
            raise TypeError(
                f"tree is a {type(self.tree).__name__}: give a StaticTree, such as StaticTree.of_widths((3, 2, 1))"
            )

    @property
    def info(self) -> DraftInfo:
        tree = self.tree
        return DraftInfo(
            "recycling",
            trees=tree.nodes(tree.longest) > tree.longest,
            nodes=tree.nodes,
            longest=tree.longest,
            revocable=True,
            reads_logits=True,
        )

    def bind(self, target: LanguageModel, sampling: Sampling) -> Recycling:
        return under(self, sampling.grammar)

    def init(self, context: Context, target_cache: Any) -> RecyclingState:
        return RecyclingState(tuple(self._told(context.row(b)) for b in range(context.batch)), None)

    def _told(self, ids: list[int]) -> Followers:
        """What followed each token in a text, the latest first."""
        followers: dict[int, list[int]] = {}
        for token, after in zip(ids[-2::-1], ids[:0:-1]):
            known = followers.setdefault(token, [])
            if len(known) < self.tree.ranks and after not in known:
                known.append(after)
        return followers

    def propose(
        self, state: RecyclingState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, RecyclingState]:
        last = context.tokens.gather(1, context.length[:, None] - 1)[:, 0].tolist()
        trees = [
            self._tree(followers, last[b], most, partial(allowed_after, self.grammar, context, b))
            for b, (followers, most) in enumerate(zip(state.followers, budget.tolist()))
        ]
        B, N = len(trees), max(len(tokens) for tokens, _ in trees)
        tokens, parents = np.zeros((B, N), np.int64), np.full((B, N), -1, np.int64)
        size = torch.tensor([len(mine) for mine, _ in trees])
        for b, (mine, above) in enumerate(trees):
            tokens[b, : len(mine)], parents[b, : len(mine)] = mine, above
        whole = Proposal(torch.from_numpy(tokens), torch.from_numpy(parents), size)
        proposal = permitted(self.grammar, context, whole)
        return proposal, state._replace(proposal=proposal)

    def _tree(
        self, followers: Followers, token: int, most: int, allowed: Callable[..., list[int]]
    ) -> tuple[list[int], list[int]]:
        """Tokens and parents of a row's tree, no path of it longer than ``most``. Ranks are those among the followers that are ``allowed``."""
        tokens: list[int] = []
        parents: list[int] = []
        place: dict[tuple[int, ...], int] = {(): -1}
        after: dict[int, list[int]] = {}  # by node
        for path in self.tree.paths[: self.tree.nodes(most)]:
            above = place.get(path[:-1])
            if above is None:
                continue
            if above not in after:
                found = followers.get(tokens[above] if above >= 0 else token, [])
                after[above] = allowed((tokens, parents), above, found) if found else found
            if path[-1] < len(after[above]):
                place[path] = len(tokens)
                tokens.append(after[above][path[-1]])
                parents.append(above)
        return tokens, parents

    def observe(self, state: RecyclingState, round: Round) -> RecyclingState:
        """Keep the target's best tokens after every token that it read, of those that the grammar allowed there."""
        read = self._read(state, round)
        if not read:
            return state._replace(proposal=None)
        drafted = round.proposal if round.proposal.nodes else None
        logits = constrained(self.grammar, round.scores.logits, round.context, drafted, drafting=True)
        entries = list(dict.fromkeys((b, entry) for b, entry, _ in read))  # accepted nodes were read before
        rows, entry = (to_device(torch.tensor(x), logits.device) for x in zip(*entries))
        top = topk(logits[rows, entry], min(self.tree.ranks, logits.shape[-1]))
        after = {
            one: [token for token, value in zip(tokens, values) if value > -torch.inf]
            for one, tokens, values in zip(entries, top.indices.tolist(), top.values.tolist())
        }
        new: list[dict[int, list[int]]] = [{} for _ in state.followers]
        ruled = [of_request(self.grammar, request) is not None for request in round.context.request.tolist()]
        for b, place, token in read:
            best = after[b, place]
            if ruled[b]:  # behind it stays what was allowed after this token elsewhere in the text
                known = new[b].get(token, state.followers[b].get(token, []))
                best = list(dict.fromkeys((*best, *known)))[: KEPT * self.tree.ranks]
            new[b][token] = best
        return RecyclingState(tuple({**old, **own} for old, own in zip(state.followers, new)), None)

    def _read(self, state: RecyclingState, round: Round) -> list[tuple[int, int, int]]:
        """``(row, entry of the logits, token)`` of every token that the target read: the last committed one, its own nodes, then the accepted ones, which count most."""
        context, verdict = round.context, round.verdict
        last = context.tokens.gather(1, context.length[:, None] - 1)[:, 0].tolist()
        read = [(b, 0, token) for b, token in enumerate(last)]
        if state.proposal is not None and state.proposal is round.proposal:
            drafted = round.proposal.tokens.tolist()
            for b, count in enumerate(round.proposal.size.tolist()):
                read += [(b, 1 + n, drafted[b][n]) for n in range(count)]
        taken = zip(verdict.path.tolist(), verdict.tokens.tolist(), verdict.accepted.tolist())
        for b, (path, tokens, accepted) in enumerate(taken):
            read += [(b, 1 + path[d], tokens[d]) for d in range(accepted)]
        return read

    def select(self, state: RecyclingState, rows: Tensor) -> RecyclingState:
        return RecyclingState(tuple(state.followers[b] for b in rows.tolist()), None)

    def join(self, state: RecyclingState, other: RecyclingState) -> RecyclingState:
        return RecyclingState(state.followers + other.followers, None)
