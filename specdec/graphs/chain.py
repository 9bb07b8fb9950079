"""A draft's whole chain as one captured step: k forwards, their draws and the ids in between, without the host.

The uniforms of its draws are functions of keys that the host knows beforehand, so they travel with the rest, in one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.static import StaticStore, held, memory_of
from specdec.graphs.programs import SMALL
from specdec.graphs.row_sampling import RowSampling
from specdec.graphs.staging import Program, Staged, pad
from specdec.graphs.static import Forward, StaticPlan, bucket_of, table_of, tabulate
from specdec.kernels.attention.lowered import Lowered
from specdec.kernels.device import to_device
from specdec.rng import Attempt, Key, Philox, Rng, pick
from specdec.sampling import Sampling, fit, widened
from specdec.types import Context, Proposal


class Drawn(NamedTuple):
    """``tokens [B, N]`` (0 after a row's last, -1 where logits were not finite) and their distributions ``probs [B, N, V]``, ``None`` if greedy."""

    tokens: Tensor
    probs: Tensor | None

    def proposal(self, budget: Tensor) -> Proposal:
        """Chains of ``budget [B]`` tokens."""
        return Proposal.chain(self.tokens, budget, self.probs, "point" if self.probs is None else "sampled")


class ChainShape(NamedTuple):
    """What a chain is captured for: ``rows`` with at most ``queries`` committed tokens to feed first, ``steps`` draws, ``length`` slots."""

    rows: int
    queries: int
    steps: int
    length: int
    sampling: Sampling
    vocab_size: int | None


class Chain(Program):
    """``steps`` draws of every row, each from the forward of the one before.

    Args:
        forward: as ``Packed.forward``. store: where keys and values go. shape: what it is captured for. device: of the model.
    """

    def __init__(self, forward: Forward, store: StaticStore, shape: ChainShape, device: torch.device):
        self.forward, self.store, self.shape = forward, store, shape
        R, T = shape.rows, shape.rows * shape.queries
        self.staged = Staged(
            {
                **dict.fromkeys(("ids", "positions", "slots"), ("i8", (T,))),
                **dict.fromkeys(("keep", "base", "limit"), ("i8", (R,))),
                "uniforms": ("f8", (shape.steps, R)),
                **dict.fromkeys(("first", "later"), ("i4", (R + 1,))),
                **dict.fromkeys(("length", "rows"), ("i4", (R,))),
                **table_of(store, R, shape.length),
            },
            device,
        )

    def body(self) -> tuple[Tensor, Tensor | None]:
        """Tokens ``[rows, steps]`` and their distributions."""
        on, shape = self.staged.on, self.shape
        draws, token = Draws(on, shape.sampling, shape.vocab_size), on["ids"]
        for n in range(shape.steps):
            live = on["limit"] > n
            if n == 0:
                keep = None if shape.queries == 1 else on["keep"]
                logits = self._run(token, on["positions"], on["slots"], on["first"], on["length"], keep)
            else:
                at = on["base"] + n - 1  # finished rows read their first slot and write to the spare one
                positions = torch.where(live, at, 0)
                own = self.store.numbers(on["rows"], on.get("table"), positions[:, None])[:, 0]
                slots = torch.where(live, own, self.store.spare)
                length = torch.where(live, at + 1, 1).to(torch.int32)
                logits = self._run(token, positions, slots, on["later"], length, None)
            token = draws.draw(logits)
        return draws.made()

    def _run(
        self, ids: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, length: Tensor, keep: Any
    ) -> Tensor:
        shape = self.shape
        count = shape.queries if starts is self.staged.on["first"] else 1
        rows, table = self.staged.on["rows"], self.staged.on.get("table")
        lowered = Lowered(starts, length, rows, length, None, None, table, None, count, shape.length)
        self.store.begin()
        plan: Any = StaticPlan(lowered, slots, ordered=True)
        logits = self.forward(self.store, plan, ids, positions, keep)
        assert logits is not None
        return logits


class Draws:
    """The tokens of a captured chain, in order, and their distributions.

    Args:
        on: its inputs: ``uniforms [steps, R]``, and the ``limit [R]`` of tokens of each row.
    """

    def __init__(self, on: Mapping[str, Tensor], sampling: Sampling, vocab_size: int | None = None):
        self._on, self._sampling, self._vocab_size = on, sampling, vocab_size
        self._tokens: list[Tensor] = []
        self._distributions: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        """The next token ``[R]`` by ``logits [R, V]``, to be fed: 0 in rows whose logits are not finite, of which ``made`` has -1."""
        n = len(self._tokens)
        top, token, distribution = draw(logits, self._sampling, self._vocab_size, self._on["uniforms"][n])
        said = torch.where(torch.isfinite(top), token, -1)
        self._tokens.append(torch.where(self._on["limit"] > n, said, 0))
        if distribution is not None:
            self._distributions.append(distribution)
        return said.clamp(min=0)

    def made(self) -> tuple[Tensor, Tensor | None]:
        """All tokens ``[R, steps]``, 0 beyond a row's limit, and their distributions ``[R, steps, V]``, if there are any."""
        probs = torch.stack(self._distributions, 1) if self._distributions else None
        return torch.stack(self._tokens, 1), probs


def draw(
    logits: Tensor, sampling: Sampling, vocab_size: int | None, uniforms: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The largest score, the token and the distribution of each of ``logits [R, V]``, as by ``Sampling`` and ``Philox.categorical``."""
    top, token, distribution = scored(fit(logits, vocab_size), sampling)
    return top, token if distribution is None else pick(distribution, uniforms), distribution


def scored(logits: Tensor, sampling: Sampling | RowSampling) -> tuple[Tensor, Tensor, Tensor | None]:
    """The largest score of each of ``logits [..., V]``, its token, and their distribution, ``None`` at temperature 0. A ``Sampling`` must not read contexts."""
    nowhere: Any = None
    if sampling.greedy:
        top, token = sampling.scores(logits, nowhere, None).max(-1)
        return top, token, None
    top, token = (scores := sampling.scores(widened(logits), nowhere, None)).max(-1)
    law = sampling.law(scores, token) if isinstance(sampling, RowSampling) else scores.softmax(-1)
    return top, token, law


def propose(
    model: Any,
    cache: Any,
    text: Context,
    budget: Tensor,
    rng: Rng,
    sampling: Sampling,
    vocab_size: int | None,
) -> Drawn | None:
    """A chain of ``budget [B]`` tokens in each row, as ``drafts.Model`` draws it token by token.

    Args:
        model: an ``HFModel`` with captured steps.
    Returns:
        ``None``, without side effects but for the pages that rows hold, where a chain cannot be captured or is not captured yet; the caller then
        draws token by token.
    """
    B, N, memory = text.batch, int(budget.max()), memory_of(cache)
    if N < 1 or sampling.reads_context or memory is None:
        return None
    uniforms = uniforms_of(rng, text, N, sampling)
    if uniforms is None:
        return None
    some = None if int(budget.min()) > 0 else (budget > 0).nonzero()[:, 0]
    steps = model.steps
    packed, _ = model._plan(cache, text, None, None, some)
    limits = [int(budget[r.b]) for r in packed.rows]
    counts = [r.end - r.first for r in packed.rows]
    ends = [r.length + n - 1 for r, n in zip(packed.rows, limits)]
    if max(counts) > SMALL or max(ends) > cache.capacity:
        return None
    slots, table, page = held(cache, [r._replace(end=end) for r, end in zip(packed.rows, ends)])
    bucket = bucket_of(counts, [1] * len(counts), max(ends), slots)
    R = bucket.rows
    shape = ChainShape(R, bucket.queries, N, bucket.length, sampling, vocab_size)

    def make(store: StaticStore) -> Chain:
        return Chain(steps.forward, store, shape, steps.device)

    def update(chain: Any) -> None:
        array = chain.staged.begin()
        live, total = len(limits), sum(counts)
        pad(array["ids"], packed.ids)
        pad(array["positions"], packed.positions)
        pad(array["slots"], packed.flat(slots, table, page), chain.store.spare)
        array["first"][0] = array["later"][0] = 0
        array["first"][1 : live + 1] = array["keep"][:live] = torch.tensor(counts).cumsum(0).numpy()
        array["keep"][:live] -= 1
        array["keep"][live:] = 0
        array["first"][live + 1 :] = total
        pad(array["later"][1:], range(1, live + 1), live)
        pad(array["base"], [r.length for r in packed.rows])
        pad(array["length"], [r.length for r in packed.rows])
        pad(array["rows"], [r.b for r in packed.rows])
        if table is not None:
            tabulate(array["table"], [table[r.b] for r in packed.rows])
        pad(array["limit"], limits)
        array["uniforms"][:, :live] = uniforms[:, [r.b for r in packed.rows]]
        array["uniforms"][:, live:] = 0
        chain.staged.send()

    with torch.inference_mode():
        chain = steps.program(memory, shape, make, update)
        if chain is None:
            return None
        tokens, probs = chain.replay()
        tokens, probs = tokens[: len(limits)], None if probs is None else probs[: len(limits)]
        if len(limits) < B:
            at = to_device(torch.tensor([r.b for r in packed.rows]), tokens.device)
            tokens = tokens.new_zeros(B, N).index_copy_(0, at, tokens)
            if probs is not None:
                probs = probs.new_full((B, *probs.shape[1:]), 1 / probs.shape[-1]).index_copy_(0, at, probs)
        else:  # the next replay overwrites them
            tokens, probs = tokens.clone(), None if probs is None else probs.clone()
    words = text.tokens.numpy()
    for r, n in zip(packed.rows, limits):
        cache.remember(r.b, words[r.b], r.first, r.length, n - 1)
    return Drawn(tokens, probs)


def first_rows(chain: Program | None, rows: int) -> Drawn | None:
    """What a captured chain draws in its first rows; ``None`` without one."""
    if chain is None:
        return None
    tokens, probs = chain.replay()  # the next replay overwrites them
    return Drawn(tokens[:rows].clone(), None if probs is None else probs[:rows].clone())


def uniforms_of(rng: Rng, text: Context, count: int, sampling: Sampling) -> Any:
    """``[N, B]`` the uniforms that ``rng`` draws a chain's tokens with, zeros at temperature 0; ``None`` where it is not a ``Philox``."""
    if sampling.greedy:
        return np.zeros((count, text.batch))
    attempt = 0
    inner: Any = rng
    while isinstance(inner, Attempt):
        inner, attempt = inner.rng, inner.within(attempt)
    if type(inner) is not Philox:
        return None
    key = Key(text.length[:, None], torch.arange(count), attempt=attempt)
    return inner.uniform(key).numpy().T
