"""Expected rounds and tokens of a decoder along given texts, from the chances of its decisions.

A round starts where the last one ended, so the expected number of rounds is a small dynamic programme over the tokens after which a
round may start. Only nodes on the text matter: what a draft proposes elsewhere is rejected and leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.arguments import whole

ROUNDING = 1e-9  # of sums of probabilities


class Efficiency(NamedTuple):
    """Expected ``tokens, rounds [C]``; ``reached, accepted [C, k]``: the expected number of times that a node of depth j was
    submitted after j accepted ones, and that one was accepted."""

    tokens: Tensor
    rounds: Tensor
    reached: Tensor
    accepted: Tensor

    @property
    def tau(self) -> float:
        """Tokens a round over all texts, a ratio of sums."""
        return float(self.tokens.sum() / self.rounds.sum())

    @property
    def acceptance(self) -> list[float]:
        """By depth, the share of the submitted nodes that are accepted; empty if the counts are not kept."""
        if self.reached.dim() < 2:
            return []
        return (self.accepted.sum(0) / self.reached.sum(0)).tolist()

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.2f}" for share in self.acceptance)
        return f"Efficiency(tau {self.tau:.2f} over {len(self.tokens)} texts, acceptance by depth {shares or 'not known'})"


def efficiency(
    accept: Tensor,
    k: int | None = None,
    cut: bool | Tensor = False,
    *,
    n: Tensor | None = None,
    lengths: Tensor | None = None,
    parents: Sequence[int] | None = None,
) -> Efficiency:
    """Expected rounds and tokens if a round proposes k tokens and adds one of the target's, over rounds that start among the
    first n positions of each text.

    Args:
        accept: ``[C, n, N]``: the probability that, in a round that starts after s tokens, node v is accepted if its parent was, given
            the text. Node v of a chain proposes token ``s + v``, a node at depth d of a tree token ``s + d``. Entries that are not
            used may have any value.
        k: the longest path of a round, at most the tree's; default: the tree's.
        cut: the text ends after n tokens, or, as ``[C]`` bool, whether each text does. As in a decoder whose budget ends, a round
            proposes at most one token less than remain. Where a stop ended the text, rounds and tokens are right, too, and proposals of
            the last token are not counted in ``reached`` and ``accepted``. Otherwise all rounds are whole, and the last one may end past n.
        n: ``[C]``: positions of each text, at most ``accept.shape[1]``; default: all.
        lengths: ``[C, n]``: the longest path of the round that starts there, at least 0 (``specdec.audit.lengths``); k limits it.
        parents: of the N nodes of a static tree (``shape``), -1 at the root, parents before children; default: a chain.
    Raises:
        ValueError: a shape or a value that does not fit, or chances outside 0 .. 1, of siblings together above 1.
    """
    rounds = Rounds.of(accept, k, cut, n=n, lengths=lengths, parents=parents)
    begun, past = rounds.begun()
    return Efficiency(
        (past * torch.arange(past.shape[1])).sum(1),
        begun.sum(1),
        torch.einsum("cs,csd->cd", begun, rounds.reached),
        torch.einsum("cs,csd->cd", begun, rounds.accepted),
    )


class Rounds(NamedTuple):
    """What a round does, given that it starts after s tokens of a text.

    Attributes:
        inside: ``[C, n]`` bool, whether rounds that start there count. room: ``[C, n]`` the longest path.
        ends: ``[C, n, k + 1]``: the probability that d tokens are accepted, and d + 1 committed.
        reached, accepted: ``[C, n, k]``: the probability that a node of depth d was submitted after d accepted ones, and that one was
            accepted.
        nodes: ``[C, n, N]``: the probability that each node was accepted.
    """

    inside: Tensor
    room: Tensor
    ends: Tensor
    reached: Tensor
    accepted: Tensor
    nodes: Tensor

    @staticmethod
    def of(
        accept: Tensor,
        k: int | None = None,
        cut: bool | Tensor = False,
        *,
        n: Tensor | None = None,
        lengths: Tensor | None = None,
        parents: Sequence[int] | None = None,
    ) -> Rounds:
        """From the arguments of ``efficiency``."""
        parents = range(-1, accept.shape[2] - 1) if parents is None else parents
        deep = depths(parents, accept.shape[2])
        longest = max(deep) + 1
        k = longest if k is None else k
        whole("k", k)
        if not 1 <= k <= longest:
            raise ValueError(f"k is {k}: accept has chances for 1 to {longest} proposed tokens")
        inside, room = _room(accept.shape[:2], k, cut, n, lengths)
        used = (torch.tensor(deep) < room[..., None]) & inside[..., None]
        accept = torch.where(used, accept.double(), 0)
        if not bool(((accept >= 0) & (accept <= 1 + ROUNDING)).all()):
            raise ValueError("accept has entries outside 0 .. 1: give probabilities, min(1, q / p)")
        accept = accept.clamp(max=1)
        for parent in {up for up in parents if parents.count(up) > 1}:
            children = [v for v, up in enumerate(parents) if up == parent]
            if bool((accept[..., children].sum(-1) > 1 + ROUNDING).any()):
                raise ValueError(
                    "accept of siblings sums to more than 1: at most one of them can be accepted"
                )
        at = [torch.ones_like(accept[..., 0])]  # probability that the root was reached, then of each node
        ends = accept.new_zeros(*accept.shape[:2], k + 1)
        ends[..., 0] = 1
        reached, accepted = accept.new_zeros(2, *accept.shape[:2], k)
        for v, (parent, d) in enumerate(zip(parents, deep)):
            at.append(at[parent + 1] * accept[..., v])
            if d < k:
                if parent not in parents[:v]:
                    reached[..., d] += at[parent + 1] * used[..., v]
                accepted[..., d] += at[-1]
                ends[..., d] -= at[-1]
                ends[..., d + 1] += at[-1]
        return Rounds(inside, room, ends, reached, accepted, torch.stack(at[1:], -1))

    def begun(self) -> tuple[Tensor, Tensor]:
        """``[C, n]`` the probability that a round starts after s tokens, and ``[C, n + k + 1]`` that the last one ended there."""
        C, n, ways = self.ends.shape
        past = torch.zeros(C, n + ways, dtype=torch.float64)
        past[:, 0] = 1
        begun = torch.zeros(C, n, dtype=torch.float64)
        for s in range(n):
            begun[:, s] = past[:, s] * self.inside[:, s]
            past[:, s] -= begun[:, s]
            past[:, s + 1 : s + 1 + ways] += begun[:, s, None] * self.ends[:, s]
        return begun, past


def depths(parents: Sequence[int], nodes: int) -> list[int]:
    """The depth of each node of a static tree, 0 for a child of the root (-1).

    Raises:
        ValueError: there are not as many parents as ``nodes``, or a parent is not -1 or an earlier node.
    """
    if len(parents) != nodes or not nodes:
        raise ValueError(
            f"parents has {len(parents)} entries and accept {nodes} nodes: give one parent a node, and at least one node"
        )
    deep: list[int] = []
    for v, parent in enumerate(parents):
        if not -1 <= parent < v:
            raise ValueError(f"parents[{v}] is {parent}: give -1 (the root) or a node before it")
        deep.append(deep[parent] + 1 if parent >= 0 else 0)
    return deep


def _room(
    shape: Sequence[int], k: int, cut: bool | Tensor, n: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``[C, n]`` whether rounds that start there count, and the longest path of each."""
    C, most = shape
    until = torch.full((C,), most) if n is None else torch.as_tensor(n)
    if until.shape != (C,) or bool(((until < 0) | (until > most)).any()):
        what = (
            f"has shape {list(until.shape)}"
            if until.shape != (C,)
            else f"is {int(until.min())} to {int(until.max())}"
        )
        raise ValueError(f"n {what}: give each of the {C} texts a number of positions, 0 to {most}")
    ends = torch.as_tensor(cut).expand(C)
    if ends.dtype != torch.bool:
        raise ValueError(f"cut is {cut!r}: give True, False, or a tensor of as many bools as there are texts")
    left = until[:, None] - torch.arange(most)
    room = torch.full((C, most), k)
    if lengths is not None:
        if lengths.shape != (C, most) or lengths.dtype.is_floating_point or bool((lengths < 0).any()):
            raise ValueError(
                f"lengths has shape {list(lengths.shape)} and dtype {lengths.dtype}: give whole numbers, 0 or more, [{C}, {most}]"
            )
        room = room.minimum(lengths)
    room = torch.where(ends[:, None], room.minimum(left - 1), room)
    return left > 0, room.clamp(min=0)
