"""Proposals that a verifier is tried with: shapes of trees, and kinds of distributions, with nodes drawn as a draft draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec import tree
from specdec.models import TableModel
from specdec.protocols import Verifier
from specdec.rng import Key, Philox, Rng, pick, seeds
from specdec.sampling import Sampling
from specdec.types import Context, Proposal

SHAPES = {  # parents of a row's nodes
    "chain": (-1, 0, 1, 2),
    "siblings": (-1, -1, -1),
    "tree": (-1, -1, 0, 0, 1, 2, 2),
    "one": (-1,),
}
SMALL = {"chain": (-1, 0, 1), "siblings": (-1, -1), "tree": (-1, -1, 0), "one": (-1,)}  # to be enumerated
ROWS = 24
KINDS = (
    "point",
    "sampled",
    "same distribution",
    "disjoint",
    "greedy draft",
    "zeros",
    "independent",
    "distinct",
)
"""The distributions that nodes are drawn from. In the last two kinds siblings are drawn as ``DraftInfo.siblings`` says. In the others they are
drawn in turn, each from a distribution of its own. The distribution of ``"independent"`` siblings is stored once."""

# Kinds that a greedy target is tried with.
GREEDY = ("point", "sampled", "greedy draft", "independent", "distinct")


class Example(NamedTuple):
    """The arguments of a verifier: ``probs [B, N + 1, V]`` is the target's distribution at every node."""

    proposal: Proposal
    probs: Tensor
    context: Context
    rng: Any

    def rows(self, rows: Tensor) -> Example:
        """The same for some rows."""
        return Example(
            self.proposal.select(rows), self.probs[rows], self.context.select(rows), self.rng.select(rows)
        )


@dataclass(frozen=True)
class Asked:
    """One kind of proposal. ``parents``: of the nodes of every row. ``whole``: rows have all nodes or none, otherwise any number of them."""

    shape: str
    parents: tuple[int, ...]
    kind: str
    greedy: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{self.shape}, {self.kind}{', greedy' if self.greedy else ''}"

    def example(self, verifier: Verifier, table: TableModel, rows: int = ROWS, seed: int = 0) -> Example:
        """An example with ``rows`` rows of different sizes."""
        context = Context.of([[b % table.vocab_size] * (1 + b % 4) for b in range(rows)])
        N = len(self.parents)
        number = torch.arange(rows) % (N + 1)
        size = torch.where(number < N, 0, N) if self.whole else number
        q = self.distributions((rows, N), table.vocab_size)
        return self.of(verifier, table, context, Philox(seeds(seed, rows)), size, q)

    def of(
        self, verifier: Verifier, table: TableModel, context: Context, rng: Rng, size: Tensor, q: Tensor
    ) -> Example:
        """An example for given rows, decisions and sizes. Tokens are drawn node by node, with the draft's own keys, from ``q [B, N, V]`` or
        from what the kind makes of it."""
        B, V, shape, q = context.batch, table.vocab_size, self.parents, q.clone()
        N, drafts = len(shape), verifier.for_draft(rng)
        parents = torch.tensor(shape).expand(B, N).contiguous()
        depth, sibling = tree.depths(parents), tree.sibling_numbers(parents)
        tokens = torch.zeros(B, N, dtype=torch.long)
        last = context.tokens.gather(1, context.length[:, None] - 1)[:, 0]
        source = torch.arange(N)
        for n, parent in enumerate(shape):
            p = table.probs[last if parent < 0 else tokens[:, parent]]
            elder = [m for m in range(n) if shape[m] == parent]
            if self.kind == "same distribution":
                q[:, n] = p
            elif self.kind == "disjoint":
                free = (p == 0).double()
                some = free.sum(-1, keepdim=True) > 0
                q[:, n] = torch.where(some, free / free.sum(-1, keepdim=True), torch.full_like(free, 1 / V))
            elif self.kind == "greedy draft":
                q[:, n] = torch.nn.functional.one_hot(p.argmax(-1), V).to(q)
            elif self.kind == "independent" and elder:
                source[n] = elder[0]
                q[:, n] = q[:, elder[0]]
            elif self.kind == "distinct" and elder:
                left = q[:, elder[0]].scatter(1, tokens[:, elder], 0)
                q[:, n] = left / left.sum(-1, keepdim=True)
            tokens[:, n] = drafts.categorical(q[:, n], Key(context.length, depth[:, n], sibling[:, n]))
        live = torch.arange(N) < size[:, None]
        tokens = torch.where(live, tokens, 0)
        proposal = Proposal(
            tokens, parents, size, q, "sampled", source.expand(B, N) if self.kind == "independent" else None
        )
        if self.kind == "point":
            proposal = Proposal(tokens, parents, size)
        logits = table.score(table.cache(B, 16), context, proposal).logits
        probs = Sampling(temperature=0.0 if self.greedy else 1.0)(logits, context, proposal)
        live = torch.cat([torch.ones(B, 1, dtype=torch.bool), live], 1)
        return Example(proposal, torch.where(live[..., None], probs, 0), context, rng)

    def distributions(self, shape: tuple[int, ...], V: int) -> Tensor:
        """Random distributions ``[*shape, V]``."""
        made = np.random.default_rng(1).dirichlet([0.7] * V, size=shape)
        if self.kind == "zeros":
            made[..., ::2] = 0
            made[..., 1] += 1e-3
            made /= made.sum(-1, keepdims=True)
        return torch.from_numpy(made)


def asked(verifier: Verifier, table: TableModel, shapes: dict[str, tuple[int, ...]]) -> list[Asked]:
    """The kinds of proposals that ``verifier.check`` takes: those with rows of different sizes, or, if it refuses these, with whole rows."""
    return list(_asked(verifier, table, shapes))


def _asked(verifier: Verifier, table: TableModel, shapes: dict[str, tuple[int, ...]]) -> Iterator[Asked]:
    for shape, parents in shapes.items():
        for kind in KINDS:
            for whole in (False, True):
                one = Asked(shape, parents, kind, whole=whole)
                try:
                    verifier.check(one.example(verifier, table).proposal)
                except ValueError:
                    continue
                yield one
                if kind in GREEDY:
                    yield replace(one, greedy=True)
                break


class Extreme:
    """Decisions in which every random number is ``u``: 0, or the largest number below 1."""

    def __init__(self, u: float):
        self.u = u

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        return pick(probs, torch.full(probs.shape[:-1], self.u, dtype=torch.float64))

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        return torch.full(prob.shape, self.u, dtype=torch.float64) < prob

    def race(self, probs: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensor:
        return probs.argmax(-1)

    def select(self, rows: Tensor) -> Extreme:
        return self
