"""The values that cross a boundary between parts: context, proposal, scores, verdict, round, feedback.

One alphabet everywhere: ``B`` rows, ``L`` token buffer, ``N`` nodes, ``V`` vocabulary, ``S`` cache slots, ``H`` KV heads,
``D`` head size, ``E`` hidden size, ``F`` fed tokens. *Structure lives on the host, values on the device*: lengths, sizes,
parents, paths and committed tokens are CPU tensors, so that no part waits for the device to learn a shape; proposed
tokens, probabilities and logits are on the model's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.kernels.device import to_device, to_host

Provenance = Literal["point", "sampled", "declared"]


class _Shown:
    """A repr that shows tensors as shapes, for notebooks."""

    def __repr__(self) -> str:
        def show(value: object) -> str:
            return str(list(value.shape)) if isinstance(value, Tensor) else repr(value)

        shown = ((one.name, vars(self)[one.name]) for one in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{k}={show(v)}' for k, v in shown)})"


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts have in common at their beginnings."""
    n = min(len(one), len(other))
    differ = one[:n] != other[:n]
    return int(differ.argmax()) if differ.any() else n


@dataclass(frozen=True, eq=False, repr=False)
class Context(_Shown):
    """The committed tokens of every row: the only authoritative copy of the texts.

    Attributes:
        tokens: ``[B, L]`` int64 on the host, right-padded with anything.
        length: ``[B]`` int64, committed tokens of each row (prompt included).
        prompt_length: ``[B]`` int64.
        request: ``[B]`` int64, the caller's number of each row; it stays with the row when others leave.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    request: Tensor

    @staticmethod
    def of(rows: list[list[int]], capacity: int | None = None, request: Tensor | None = None) -> Context:
        """A context from ragged lists of ids, with room for ``capacity`` tokens a row (default: the longest row)."""
        if isinstance(rows, str) or not isinstance(rows, Sized):
            raise TypeError(f"rows is a {type(rows).__name__}: give a list of lists of ids")
        if capacity is not None:
            whole("capacity", capacity, ", or None for the longest row")
        if not len(rows):
            raise ValueError("rows is empty: give at least one prompt")
        if any(len(row) == 0 for row in rows):
            raise ValueError(
                f"prompt {[len(r) for r in rows].index(0)} is empty: give at least one token (a BOS token will do)"
            )
        length = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), max(int(length.max()), capacity or 0), dtype=torch.long)
        for b, row in enumerate(rows):
            tokens[b, : len(row)] = torch.as_tensor(row, dtype=torch.long)
        return Context(
            tokens, length, length.clone(), torch.arange(len(rows)) if request is None else request
        )

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    def row(self, b: int) -> list[int]:
        """The committed ids of row ``b``."""
        return self.tokens[b, : int(self.length[b])].tolist()

    def append(self, tokens: Tensor, count: Tensor) -> Context:
        """A context with ``tokens[b, :count[b]]`` committed after row ``b``; the buffer grows if necessary."""
        length = self.length + count
        buffer = self.tokens.clone()
        need = int(length.max()) if self.batch else 0
        if need > buffer.shape[1]:
            buffer = torch.nn.functional.pad(buffer, (0, max(need - buffer.shape[1], 64)))
        # In NumPy, whose small operations take a third of the time of PyTorch's.
        b, m = (np.arange(tokens.shape[1]) < count.numpy()[:, None]).nonzero()
        buffer.numpy()[b, self.length.numpy()[b] + m] = tokens.numpy()[b, m]
        return Context(buffer, length, self.prompt_length, self.request)

    def select(self, rows: Tensor) -> Context:
        """The context of some rows, in the given order."""
        return Context(self.tokens[rows], self.length[rows], self.prompt_length[rows], self.request[rows])


@dataclass(frozen=True, eq=False, repr=False)
class Proposal(_Shown):
    """A tree of proposed tokens for every row; a chain is the tree with parents -1, 0, 1, ...

    Nodes are stored parent before child; node ``n`` of row ``b`` exists iff ``n < size[b]``. Size 0 means "no
    speculation". Siblings are tried in the order in which they are stored.

    Attributes:
        tokens: ``[B, N]`` int64 on the model's device.
        parents: ``[B, N]`` int64 on the host; -1 is the last committed token.
        size: ``[B]`` int64 on the host.
        probs: ``[B, Q, V]``, the distributions that nodes were *actually* drawn from, given their prefixes and earlier
            siblings; ``None``: every node is a point mass, chosen without randomness.
        provenance: where ``probs`` comes from. ``"sampled"``: the library drew the tokens from exactly these
            probabilities. ``"point"``: no probabilities. ``"declared"``: the draft states them, which verifiers refuse unless told
            to trust it.
        source: ``[B, N]`` int64 on the host: node ``n`` of row ``b`` was drawn from ``probs[b, source[b, n]]``, so that siblings
            drawn from one distribution share it. ``None``: node ``n`` from ``probs[b, n]``, and ``Q`` is ``N``.
    """

    tokens: Tensor
    parents: Tensor
    size: Tensor
    probs: Tensor | None = None
    provenance: Provenance = "point"
    source: Tensor | None = None

    def __post_init__(self) -> None:
        if self.provenance not in ("point", "sampled", "declared"):
            raise ValueError(f'provenance is {self.provenance!r}: give "point", "sampled" or "declared"')
        if (self.probs is None) != (self.provenance == "point"):
            raise ValueError(
                f"provenance is {self.provenance!r} but probs is {'absent' if self.probs is None else 'given'}: "
                "a point mass has no probs, and every other node carries the distribution it was drawn from"
            )
        if self.source is not None and self.probs is None:
            raise ValueError("source is given and probs is absent: point masses have neither")

    @staticmethod
    def none(batch: int, device: torch.device | str = "cpu") -> Proposal:
        """No speculation for any row."""
        return Proposal(
            torch.zeros(batch, 0, dtype=torch.long, device=device),
            torch.zeros(batch, 0, dtype=torch.long),
            torch.zeros(batch, dtype=torch.long),
        )

    @staticmethod
    def chain(
        tokens: Tensor, size: Tensor, probs: Tensor | None = None, provenance: Provenance | None = None
    ) -> Proposal:
        """One candidate continuation a row: ``tokens[b, :size[b]]``."""
        B, N = tokens.shape
        parents = torch.arange(-1, N - 1).expand(B, N)
        return Proposal(
            tokens, parents, size, probs, provenance or ("point" if probs is None else "declared")
        )

    def to(self, device: torch.device) -> Proposal:
        """The same proposal with tokens and probabilities on ``device``."""
        probs = None if self.probs is None else to_device(self.probs, device)
        return replace(self, tokens=to_device(self.tokens, device), probs=probs)

    @property
    def nodes(self) -> int:
        """``N``, the widest row."""
        return self.tokens.shape[1]

    @cached_property
    def ids(self) -> list[list[int]]:
        """``tokens`` on the host; the first time it waits for them."""
        return self.tokens.cpu().tolist()

    def kept(self, nodes: Sequence[Sequence[int]]) -> Proposal:
        """Of each row only ``nodes``, ascending and each with its parent, under new numbers; for point masses."""
        N, old = max(map(len, nodes), default=0), self.parents.tolist()
        at, parents = np.zeros((len(nodes), N), np.int64), np.full((len(nodes), N), -1, np.int64)
        for b, some in enumerate(nodes):
            number = {-1: -1} | {n: i for i, n in enumerate(some)}
            at[b, : len(some)], parents[b, : len(some)] = some, [number[old[b][n]] for n in some]
        tokens = self.tokens.gather(1, to_device(torch.from_numpy(at), self.tokens.device))
        return Proposal(tokens, torch.from_numpy(parents), torch.tensor([*map(len, nodes)]))

    def sources(self, device: torch.device | str = "cpu") -> Tensor:
        """``[B, N]`` on ``device``: ``source`` made explicit, with valid indices for nodes that do not exist."""
        if self.source is None:
            return torch.arange(self.nodes, device=device).expand(self.tokens.shape)
        return to_device(self.source.clamp(0, self._drawn_from().shape[1] - 1), device)

    def distributions(self) -> Tensor:
        """``[B, N, V]`` the distribution that each node was drawn from: a copy where nodes share theirs."""
        probs = self._drawn_from()
        if self.source is None:
            return probs
        rows = torch.arange(len(probs), device=probs.device)
        return probs[rows[:, None], self.sources(probs.device)]

    def q(self, node: int) -> Tensor:
        """``[B, V]`` the distribution that node ``node`` of each row was drawn from."""
        probs = self._drawn_from()
        if self.source is None:
            return probs[:, node]
        return probs[torch.arange(len(probs), device=probs.device), self.sources(probs.device)[:, node]]

    def q_of(self, tokens: Tensor) -> Tensor:
        """``[B, N]`` the probability of ``tokens [B, N]`` under each node's distribution."""
        probs = self._drawn_from()
        if self.source is None:
            return probs.gather(2, tokens[..., None])[..., 0]
        rows = torch.arange(len(probs), device=probs.device)
        return probs[rows[:, None], self.sources(probs.device), tokens]

    def _drawn_from(self) -> Tensor:
        if self.probs is None:
            raise ValueError("the proposal has no probs: its nodes are point masses, each with probability 1")
        return self.probs

    def select(self, rows: Tensor) -> Proposal:
        """The proposal of some rows, in the given order."""
        at = to_device(rows, self.tokens.device)
        return Proposal(
            self.tokens[at],
            self.parents[rows],
            self.size[rows],
            None if self.probs is None else self.probs[at],
            self.provenance,
            None if self.source is None else self.source[rows],
        )

    def spread(self, rows: Tensor, batch: int) -> Proposal:
        """The proposal of ``batch`` rows of which ``rows`` are these, in order; the others have no nodes."""
        at, size = torch.zeros(batch, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
        at[rows], size[rows] = torch.arange(len(rows)), self.size
        return replace(self.select(at), size=size)


@dataclass(frozen=True, eq=False, repr=False)
class Fed(_Shown):
    """Activations at the ``F`` positions that a model consumed in one call, all rows packed.

    Attributes:
        layers: layer number -> ``[F, E]``; ``l`` is the output of block ``l`` counted from 1, 0 the embedding.
        row: ``[F]`` batch row. position: ``[F]`` position in the text. node: ``[F]`` tree node, -1 for committed tokens.
    """

    layers: Mapping[int, Tensor]
    row: Tensor
    position: Tensor
    node: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Scores(_Shown):
    """The output of ``score``: ``logits[b, 0]`` after the last committed token, ``logits[b, 1 + n]`` after node ``n``.

    When ``score`` was asked to start at node ``n``, row 0 is node ``n``. Entries of nodes that do not exist are zero. ``found``: of each row, how many tokens of
    its text the model's ``prefixes`` had when this call began to read it; nothing without such memory.
    """

    logits: Tensor
    fed: Fed | None = None
    found: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Verdict(_Shown):
    """What a verifier decided, on the host.

    Attributes:
        path: ``[B, N]`` accepted node ids in order, padded with -1.
        accepted: ``[B]`` how many.
        bonus: ``[B]`` the token after them (drawn from the target's residual or, when all was accepted, from the target).
        tokens: ``[B, N + 1]`` the tokens that this round commits: the accepted nodes', then the bonus, then zeros.
    """

    path: Tensor
    accepted: Tensor
    bonus: Tensor
    tokens: Tensor

    @staticmethod
    def of(
        proposal: Proposal, path: Tensor, accepted: Tensor, bonus: Tensor, *, checked: bool = False
    ) -> Verdict:
        """A verdict on the host from decisions on any device (a device synchronisation, once a round).

        Args:
            checked: ``path`` is valid by construction and is not checked again.
        Raises:
            ValueError: ``path[b, :accepted[b]]`` is not a path of row b's tree from its root, or is not padded with -1.
        """
        path, accepted, bonus, drafted = to_host(path, accepted, bonus, proposal.tokens)
        if not checked:
            _check_path(proposal, path, accepted, bonus)
        taken = torch.where(path >= 0, drafted.gather(1, path.clamp(min=0)), 0)
        tokens = torch.cat([taken, torch.zeros_like(bonus)[:, None]], 1)
        return Verdict(path, accepted, bonus, tokens.scatter_(1, accepted[:, None], bonus[:, None]))


def _check_path(proposal: Proposal, path: Tensor, accepted: Tensor, bonus: Tensor) -> None:
    """Raise ValueError for an invalid path; takes at most a microsecond a row on the host."""
    B, N = proposal.tokens.shape
    if path.shape != (B, N) or accepted.shape != (B,) or bonus.shape != (B,):
        raise ValueError(
            f"path is {list(path.shape)}, accepted {list(accepted.shape)} and bonus {list(bonus.shape)}: give [{B}, {N}], [{B}] and [{B}]"
        )
    rows = zip(path.tolist(), accepted.tolist(), proposal.size.tolist(), proposal.parents.tolist())
    for b, (nodes, count, size, parents) in enumerate(rows):
        at, fits = -1, 0 <= count <= size and nodes[count:] == [-1] * (N - count)
        for n in nodes[:count]:
            if not 0 <= n < size or parents[n] != at:
                fits = False
                break
            at = n
        if not fits:
            raise ValueError(
                f"accepted is {count} and path {nodes} in row {b}, of {size} nodes with parents {parents}: give a child of the root (parent "
                "-1), then each time a child of the previous node, and -1 after the accepted ones (a verifier of chains refuses trees in its check)"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Round(_Shown):
    """A record of one round, to be observed: no part may keep state in it.

    Attributes:
        context: before the round. committed: ``[B]`` how many of the tokens of ``verdict.tokens`` were committed (fewer than accepted + 1
            where a stop truncated the block). finished: ``[B]`` bool. budget: ``[B]`` longest path that the draft was allowed.
        probs: ``[B, N + 1, V]`` the target's distributions; ``None`` where the verifier took the logits, and at temperature 0, where
            ``target_argmax [B, N + 1]`` has the most probable tokens.
        truncated: ``[B]`` bool, the block was shortened by a stop or by the end of the row's budget.
        arm, arm_prob: ``[B]`` the selector's choice and its probability. seconds: by stage.
        lossless: whether the verifier declares that committed tokens have the target's distribution.
    """

    context: Context
    proposal: Proposal
    scores: Scores
    probs: Tensor | None
    verdict: Verdict
    committed: Tensor
    finished: Tensor
    budget: Tensor
    truncated: Tensor
    arm: Tensor
    arm_prob: Tensor
    number: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    target_argmax: Tensor | None = None
    lossless: bool = True

    @staticmethod
    def of(
        context: Context,
        proposal: Proposal,
        scores: Scores,
        verdict: Verdict,
        committed: Tensor,
        budget: Tensor,
        finished: Tensor | None = None,
        short: Tensor | None = None,
        probs: Tensor | None = None,
        arm: Tensor | None = None,
        arm_prob: Tensor | None = None,
        **others: Any,
    ) -> Round:
        """The record of a round, by default of arm 0; ``others``: the fields that have defaults.

        Args:
            finished, short: ``[B]`` bool, rows that end, and rows whose budget is the end of their text. By default no row is finished or truncated.
        """
        if finished is None or short is None:
            finished = truncated = torch.zeros_like(committed, dtype=torch.bool)
        else:
            truncated = (committed <= verdict.accepted) | short
        arm = torch.zeros_like(committed) if arm is None else arm
        arm_prob = torch.ones(len(committed)) if arm_prob is None else arm_prob
        ends = committed, finished, budget, truncated
        return Round(context, proposal, scores, probs, verdict, *ends, arm, arm_prob, **others)


@dataclass(frozen=True, eq=False, repr=False)
class Feedback(_Shown):
    """What a selector may learn from; it never includes values of tokens that were not committed.

    ``tokens[B]`` committed, ``drafted[B]`` submitted, ``seconds`` of the round charged to the row, ``reward[B]`` (or
    ``[B, arms]`` with full information).
    """

    request: Tensor
    arm: Tensor
    tokens: Tensor
    drafted: Tensor
    seconds: Tensor
    reward: Tensor
