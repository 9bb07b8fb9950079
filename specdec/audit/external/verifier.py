"""A foreign verification function as a verifier, so that a decoder with it can be certified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec import tree
from specdec.arguments import name_of
from specdec.audit.external.scripted import scripted
from specdec.audit.external.tape import Tape
from specdec.capabilities import VerifierInfo
from specdec.rng import BONUS, Key, Rng
from specdec.types import Context, Proposal, Verdict


@dataclass(frozen=True, eq=False)
class External:
    """A verifier whose decisions are those of ``f``, code that draws random numbers as it likes.

    ``f(tokens, q, p)`` gets one row's chain: ``tokens [n]`` that were drafted, the distributions ``q [n, V]`` that they were drawn from
    (one-hot for point masses), and the target's ``p [n + 1, V]``, float64. It returns the tokens that the round commits: the accepted
    ones and one more, ``[m]`` or ``[1, m]``, ids or a list. A row without a draft does not call it.

    In ``f``, torch's rand, uniform_, exponential_, bernoulli and multinomial, Python's ``random`` and ``numpy.random`` give numbers that the
    decoder's keyed generator decides, new ones in every block, unless ``f`` seeds a generator: the same seed gives the same numbers. While ``f``
    runs, Python's and numpy's functions are replaced in the whole process, so no other thread may draw with them.

    Args:
        trees: ``f(tokens, q, p, parents)`` takes trees, too: ``parents [n]`` with -1 at the root.
        batched: ``f`` takes all rows that have equally many nodes at once, with a leading dimension of rows in its arguments, its random
            calls and its result (a list of rows, if they differ in length).
        trust_declared: as for ``Rejection``. lossless: what is claimed of ``f``.
    Raises:
        specdec.audit.external.CannotWalk: ``f`` does something with random numbers that cannot be enumerated; the message names it.
        ValueError: what ``f`` returns is no path of the drafted tokens and one more token of the vocabulary.
    """

    f: Callable[..., Any]
    trees: bool = False
    batched: bool = False
    trust_declared: bool = False
    lossless: bool = False

    @property
    def info(self) -> VerifierInfo:
        return VerifierInfo(f"external {_name(self.f)}", lossless=self.lossless)

    def check(self, proposal: Proposal) -> None:
        if proposal.provenance == "declared" and not self.trust_declared:
            raise ValueError(
                "the draft declares probabilities that the library did not draw from: build External(f, trust_declared=True) if the "
                "declaration is known to be true"
            )
        branched = ~tree.is_chain(proposal.parents, proposal.size)
        if not self.trees and bool(branched.any()):
            raise ValueError(
                f"External takes chains, and row {int(branched.nonzero()[0])} of the proposal is a tree: build External(f, trees=True) if f "
                "takes parents as its fourth argument"
            )

    def for_draft(self, rng: Rng) -> Rng:
        return rng

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        B, N = proposal.tokens.shape
        path, accepted = torch.full((B, N), -1), torch.zeros(B, dtype=torch.long)
        bonus = torch.zeros(B, dtype=torch.long)
        for n in proposal.size.unique().tolist():
            rows = (proposal.size == n).nonzero()[:, 0]
            for some in (rows,) if self.batched or n == 0 else rows.split(1):
                mine, start = rng.select(some), context.length[some]
                if n == 0:
                    bonus[some] = mine.categorical(probs[some, 0], Key(start, 0, 0, BONUS)).cpu()
                    continue
                part, p = proposal.select(some), probs[some, : n + 1]
                told = self._run(part, p, n, Tape(mine, start, self.batched))
                if some[0] == rows[0]:
                    last = torch.tensor([len(some) - 1])
                    alone = Tape(mine.select(last), start[last], self.batched)
                    self._same(told[-1], self._run(part.select(last), p[last], n, alone)[0])
                for b, tokens in zip(some.tolist(), told):
                    in_vocabulary(tokens, probs.shape[-1], self.f)
                    nodes = _path(
                        tokens, proposal.tokens[b, :n].tolist(), proposal.parents[b, :n].tolist(), self.f
                    )
                    accepted[b], bonus[b] = len(nodes), tokens[-1]
                    path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
        return Verdict.of(proposal, path.to(probs.device), accepted, bonus)

    def _same(self, first: list[int], alone: list[int]) -> None:
        if first != alone:
            how = "beside other rows" if self.batched else "once"
            raise RuntimeError(
                f"{_name(self.f)} returned {first} {how}, and {alone} when it was called again for this row alone, with the same arguments and "
                "random numbers: it depends on its batch or keeps state between calls, so it cannot be certified"
            )

    def _run(self, part: Proposal, p: Tensor, n: int, tape: Tape) -> list[list[int]]:
        """The tokens that each row commits."""
        tokens = part.tokens[:, :n]
        q = (
            torch.nn.functional.one_hot(tokens, p.shape[-1]).to(p)
            if part.probs is None
            else part.distributions()[:, :n]
        )
        given = [
            tokens.clone(),
            q.to(p).clone(),
            p.clone(),
            *([part.parents[:, :n].clone()] if self.trees else []),
        ]
        with scripted(tape):
            out = self.f(*(given if self.batched else [one[0] for one in given]))
        if not self.batched:
            return [ids(out, self.f)]
        if len(out) != len(tokens):
            raise ValueError(
                f"{_name(self.f)} returned {len(out)} rows for {len(tokens)}: return the tokens of every row"
            )
        return [ids(row, self.f) for row in out]


def ids(out: Any, f: Callable[..., Any]) -> list[int]:
    """What a foreign function returned as a list of ids."""
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        out = out[0]  # tokens, and how many of them were accepted
    tensor = torch.as_tensor(out)
    if tensor.dim() == 2 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.dim() != 1 or tensor.is_floating_point() or not len(tensor):
        raise ValueError(
            f"{_name(f)} returned {tensor.dtype} of shape {list(tensor.shape)}: return ids, [m] or [1, m], at least one"
        )
    return [int(token) for token in tensor]


def in_vocabulary(tokens: list[int], V: int, f: Callable[..., Any]) -> None:
    for token in tokens:
        if not 0 <= token < V:
            raise ValueError(
                f"{_name(f)} returned the token {token}, which is not in the vocabulary of {V}: leave padding out of the result"
            )


def _path(tokens: list[int], drafted: list[int], parents: list[int], f: Callable[..., Any]) -> list[int]:
    """The nodes of ``tokens`` but the last."""

    def below(at: int, rest: list[int]) -> list[int] | None:
        if not rest:
            return []
        for node, (token, parent) in enumerate(zip(drafted, parents)):
            if parent == at and token == rest[0]:
                further = below(node, rest[1:])
                if further is not None:
                    return [node, *further]
        return None

    nodes = below(-1, tokens[:-1])
    if nodes is None:
        raise ValueError(
            f"{_name(f)} returned {tokens} where {drafted} with parents {parents} was drafted, more than one token that is not on a path of "
            "the draft: return the accepted tokens and one more"
        )
    return nodes


def _name(f: Callable[..., Any]) -> str:
    return name_of(f)
