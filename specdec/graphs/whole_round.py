"""A whole round as one captured step: the draft's chain or tree, the target's pass over it, the verdict, and the next round's inputs.

The texts' ends (length and last two tokens of every row) stay on the device, so a round may be launched before the last one's verdict is on
the host. Random numbers are computed in the step, from the keys that the host would use.

Every row has the same shape: the target is fed the last committed token and all drafted tokens, and the draft what its ``Drafting`` says.
Tokens beyond a row's budget are computed and never accepted. The cache has slots for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from specdec.graphs.branches import TreeShape
from specdec.graphs.chain import scored
from specdec.graphs.drafting import Drafting, Given, Passed, Side
from specdec.graphs.row_sampling import FIELDS, RowSampling, RowsKind, fill
from specdec.graphs.staging import Program, Staged, pad
from specdec.graphs.static import table_of, tabulate
from specdec.kernels import philox, rejection
from specdec.kernels.philox.reference import ACCEPT, BONUS, DRAFT, Key, pick, race_uniforms, uniforms
from specdec.rng import triton_kernels
from specdec.sampling import Sampling, fit
from specdec.verifiers.rejection import residual

# Columns of a result; the drafted tokens are in those from ``TOKENS`` on. Of a tree the accepted path follows, and each node's parent.
ACCEPTED, NEXT, FINITE, DRAWN, TOKENS = range(5)


class RoundShape(NamedTuple):
    """What a round is captured for: ``rows`` of at most ``length`` slots, paths of ``steps`` drafted tokens (0: no draft).

    ``verdict``: ``"rejection"`` as ``verifiers.Rejection`` decides, ``"fused"`` as ``FusedRejection`` does on logits (for a ``sampling`` that has nothing but
    a temperature), ``"coupled"`` as ``Coupled``; at temperature 0 all compare tokens. ``drawing``: the draft's sampling. Either is a ``RowsKind`` where every
    row has settings of its own. ``tree``: of depth ``steps``; ``None`` for chains.
    """

    rows: int
    length: int
    steps: int
    verdict: Literal["rejection", "fused", "coupled"]
    sampling: Sampling | RowsKind
    drawing: Sampling | RowsKind
    tree: TreeShape | None = None

    @property
    def nodes(self) -> int:
        """Drafted tokens of a row."""
        return self.steps if self.tree is None else self.tree.nodes


class Drafted(NamedTuple):
    """Chains: ``tokens [R, N]``, whether each ``exists``, whether what it was drawn from is ``finite``, and these distributions, ``laws [R, N, V]``; ``None``
    for point masses."""

    tokens: Tensor
    exists: Tensor
    finite: Tensor
    laws: Tensor | None


class Decided(NamedTuple):
    """``accepted [R]``, the token after them ``bonus [R]``, whether the target's logits that count have distributions, ``finite [R]``, and of a tree
    ``path [R, steps]``, the accepted nodes, followed by -1."""

    accepted: Tensor
    bonus: Tensor
    finite: Tensor
    path: Tensor | None = None


class WholeRound(Program):
    """One round of a batch.

    Args:
        carry: ``[B, ...]`` what rows of the draft carry from round to round; only its shape and dtype are read.
    Attributes:
        state: ``[R, 3]`` int64 on the device: each row's committed length, and its last two tokens. The step reads it and returns the next.
        carry: ``[R, ...]`` likewise; ``None`` if nothing is carried.
    """

    def __init__(
        self,
        target: Side,
        draft: Drafting | None,
        shape: RoundShape,
        device: torch.device,
        carry: Tensor | None = None,
    ):
        self.target, self.draft, self.shape, self.device = target, draft, shape, device
        R, by_row = shape.rows, isinstance(shape.sampling, RowsKind)
        self.staged = Staged(
            {
                "rows": ("i4", (R,)),
                "start": ("i8", (R, 3)),
                **dict.fromkeys(("real", "most", "seed"), ("i8", (R,))),
                **({name: (kind, (R,)) for name, kind in FIELDS.items()} if by_row else {}),
                **table_of(target.store, R, shape.length),
            },
            device,
        )
        self.sampling, self.drawing = (
            RowSampling(one, self.staged.on) if isinstance(one, RowsKind) else one
            for one in (shape.sampling, shape.drawing)
        )
        with torch.inference_mode(False):
            self.state, self.carry = torch.zeros(R, 3, dtype=torch.long, device=device), None
            if carry is not None:
                self.carry = torch.zeros(R, *carry.shape[1:], dtype=carry.dtype, device=device)

    def send(
        self,
        most: Tensor,
        seed: Tensor,
        start: Tensor | None = None,
        carry: Tensor | None = None,
        table: Sequence[Sequence[int]] = (),
        settings: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Send a batch, whose rows are the first of the cache.

        Args:
            most: ``[B]`` where each row's text ends. seed: ``[B]``. start: ``[B, 3]`` the state; ``None`` leaves it.
            carry: ``[B, ...]``; ``None`` leaves it. table: the pages of each row of a target that has pages. settings: of each row, for a ``RowsKind``.
        """
        array, B = self.staged.begin(), len(most)
        pad(array["rows"], range(B))
        pad(array["real"], [1] * B)
        pad(array["most"], most.numpy())
        pad(array["seed"], seed.numpy())
        fill(array, settings or {})
        if "table" in array:
            tabulate(array["table"], table)
        array["start"][:] = (2, 0, 0)
        if start is not None:
            array["start"][:B] = start.numpy()
        self.staged.send()
        if start is not None:
            self.state.copy_(self.staged.on["start"])
        if carry is not None:
            assert self.carry is not None
            self.carry[:B].copy_(carry)

    def follow(self, before: WholeRound) -> None:
        """Go on where the rounds of another program for as many rows have ended."""
        self.state.copy_(before.state)
        if self.carry is not None:
            assert before.carry is not None
            self.carry.copy_(before.carry)

    def run(self) -> Tensor:
        """``[R, TOKENS + nodes]`` (of a tree ``steps + nodes`` more) the round's result, which holds until the next; the state goes on to the next round."""
        made: Any = self.replay() if self.captured else self.body()
        result, state, carry = made
        self.state.copy_(state)
        if self.carry is not None:
            self.carry.copy_(carry)
        return result

    def body(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The result, the next state, and what is carried."""
        shape, most, V = self.shape, self.staged.on["most"], self.target.vocab_size
        length, last = self.state[:, 0], self.state[:, 2]
        live, budget = most > length, (most - length - 1).clamp(0, shape.steps)
        given = Given(self.staged.on, shape.steps, shape.length, self.target.store, self.carry)
        drafted = self._draw(given, budget)
        drawn = (drafted.finite | ~drafted.exists).all(1)
        ids = torch.cat([last[:, None], drafted.tokens], 1)
        caught: dict[int, list[Tensor]] = {tap: [] for tap in self.draft.taps} if self.draft else {}
        logits = self._read(given, ids, drafted, caught).view(shape.rows, shape.nodes + 1, V)
        made = self._decide(logits, drafted, length)
        # NaN may give another token; the next round is launched before this is noticed.
        passed = self._passed(given, ids, caught, made._replace(bonus=made.bonus.clamp(0, V - 1)))
        carry = None if self.draft is None else self.draft.observe(given, passed)
        accepted, bonus = passed.accepted, passed.bonus
        held = passed.ids.gather(1, accepted[:, None])[:, 0]
        state = torch.stack([length + accepted + 1, held, bonus], 1)
        result = torch.stack([accepted, bonus, made.finite.long(), drawn.long()], 1)
        result = torch.cat([result, *self._said(drafted, made)], 1)
        return result, torch.where(live[:, None], state, self.state), carry

    def _said(self, drafted: Any, made: Decided) -> list[Tensor]:
        """The columns from ``TOKENS`` on."""
        return [drafted.tokens]

    def _read(self, given: Given, ids: Tensor, drafted: Any, caught: dict[int, list[Tensor]]) -> Tensor:
        """The target's logits after the last committed and the drafted tokens ``ids``."""
        return self.target.feed(given, ids, self.state[:, 0] - 1, None, caught)

    def _passed(self, given: Given, ids: Tensor, caught: dict[int, list[Tensor]], made: Decided) -> Passed:
        """Put keys and values of the accepted tokens in place, and return what the draft may read of the target's pass."""
        layers = {tap: x for tap, (x,) in caught.items()}
        return Passed(self.state[:, 0], ids, layers, made.accepted, made.bonus)

    def _draw(self, given: Given, budget: Tensor) -> Any:
        """Draft, for rows of at most ``budget [R]`` tokens."""
        shape, length = self.shape, self.state[:, 0]
        if self.draft is None:
            none = length.new_zeros(shape.rows, 0)
            return Drafted(none, none.bool(), none.bool(), None)
        tokens: list[Tensor] = []
        tops: list[Tensor] = []
        distributions: list[Tensor] = []
        depths = torch.arange(shape.steps, device=self.device)
        numbers = None
        if shape.verdict != "coupled" and not self.drawing.greedy:
            numbers = self._uniforms(length, depths, DRAFT)
        forward, token = self.draft.chain(given, self.state), self.state[:, 2]
        for n in range(shape.steps):
            logits = fit(forward(n, token), self.target.vocab_size)
            top, token, q = scored(logits, self.drawing)
            if q is not None:
                distributions.append(q)
                token = self._race(q, length + n) if numbers is None else pick(q, numbers[:, n])
            token = token.clamp(0, self.target.vocab_size - 1)
            tops.append(top)
            tokens.append(token)
        finite, laws = torch.isfinite(torch.stack(tops, 1)), None
        if distributions:
            laws = torch.stack(distributions, 1)
        return Drafted(torch.stack(tokens, 1), depths < budget[:, None], finite, laws)

    def _decide(self, logits: Tensor, drafted: Any, length: Tensor) -> Decided:
        """The verdict on what was drafted, from ``logits [R, nodes + 1, V]``."""
        tokens, nodes, _, q = drafted
        shape, depths = self.shape, torch.arange(self.shape.steps + 1, device=self.device)
        if shape.verdict == "fused" and not self.sampling.greedy:
            accept, bonus = self._uniforms(length, depths[:-1], ACCEPT), self._uniforms(length, depths, BONUS)
            temperature = cast(Any, self.sampling).temperature
            made = rejection.decisions(
                logits, tokens, nodes.sum(1), accept, bonus, q, temperature=temperature
            )
            return Decided(made.accepted.clamp(min=0), made.token, made.accepted >= 0)
        top, wanted, p = scored(logits, self.sampling)
        finite = torch.isfinite(top)
        finite = (finite[:, 1:] | ~nodes).all(1) & finite[:, 0]
        if p is not None and shape.verdict == "coupled":
            wanted = self._race(p, length[:, None] + depths)
        if p is None or shape.verdict == "coupled":
            accepted = ((tokens == wanted[:, :-1]) & nodes).long().cumprod(1).sum(1)
            return Decided(accepted, wanted.gather(1, accepted[:, None])[:, 0], finite)
        rows, N = torch.arange(shape.rows, device=self.device), shape.steps
        if N:  # as verifiers.rejection.verify_chain
            mine = p[:, :N].gather(2, tokens[..., None])[..., 0]
            theirs = torch.ones_like(mine) if q is None else q.gather(2, tokens[..., None])[..., 0].to(mine)
            ratio = torch.where(nodes, mine / theirs, 0)
            accepts = (self._uniforms(length, depths[:N], ACCEPT) < ratio) & nodes
            accepted = accepts.long().cumprod(1).sum(1)
        else:
            accepted = torch.zeros_like(length)
        chosen = p[rows, accepted]
        if N:
            at = accepted.clamp(max=N - 1)
            drafted = torch.zeros_like(chosen).scatter_(1, tokens[rows, at][:, None], 1)
            drafted = drafted if q is None else q[rows, at].to(chosen)
            rejected = accepted < nodes.sum(1)
            chosen = torch.where(rejected[:, None], residual(chosen, drafted), chosen)
        number = self._uniforms(length, depths, BONUS).gather(1, accepted[:, None])[:, 0]
        return Decided(accepted, pick(chosen, number), finite)

    def _uniforms(
        self, length: Tensor, depths: Tensor, stream: int, siblings: Tensor | None = None
    ) -> Tensor:
        """``[R, D]`` as ``Philox.uniform`` gives them for blocks that begin at ``length [R]``; ``depths`` and ``siblings`` (by default 0): ``[D]`` or
        ``[R, D]``."""
        seed = self.staged.on["seed"]
        siblings = torch.zeros_like(depths) if siblings is None else siblings
        if length.is_cuda and triton_kernels():
            return philox.uniforms(seed, Key(length[:, None], depths, siblings, stream), self.device)
        return uniforms(seed, length, depths | siblings << 16, stream)

    def _race(self, probs: Tensor, position: Tensor) -> Tensor:
        """``position``'s shape: tokens from ``probs [R, ..., V]``, as by ``Philox.race``."""
        seed = self.staged.on["seed"]
        seed = seed.view(-1, *[1] * (position.dim() - 1)).expand(position.shape).reshape(-1)
        flat, at = probs.reshape(-1, probs.shape[-1]), position.reshape(-1)
        if probs.is_cuda and triton_kernels():
            return philox.race(flat, seed, at).view(position.shape)
        u = race_uniforms(seed, at, torch.arange(flat.shape[1], device=self.device))
        arrivals = u.clamp(max=1 - 2.0**-53).log().neg() / flat.double()
        return arrivals.argmin(-1).view(position.shape)
