"""SPIRe: a few of the target's blocks over its own activations, sparse attention and feedback memory (arXiv 2504.06419).

The KV cache has a constant size: sinks, window and the current block. At committed positions it holds keys and values of the target's
activations, which the verification pass computes anyway; no other forward of the target is needed. At positions of the block it holds
keys and values of the draft's memory vectors.

Activations wait until their row is drafted (``unread.py``): in a pool, a row that other drafts serve costs only a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.capabilities import DraftInfo
from specdec.drafts.draw import ChainDraw
from specdec.drafts.heads.features import committed
from specdec.drafts.spire.layers import remember
from specdec.drafts.spire.load import as_spire
from specdec.drafts.spire.model import SpireModel
from specdec.drafts.spire.steps import SpireSteps, forwards
from specdec.drafts.spire.unread import Committed, Unread
from specdec.drafts.stops import Stops, as_stops
from specdec.graphs.chain import Drawn
from specdec.graphs.programs import Programs, capture_named
from specdec.graphs.ring_chain import drawn
from specdec.kernels.device import to_device
from specdec.models.hf import HFModel
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


class SpireState(NamedTuple):
    """The cache, and what was committed since a row's entries were last written."""

    ring: Ring
    unread: Unread


@dataclass(frozen=True)
class Spire:
    """Draws a chain from a ``SpireModel``, one step a token; at temperature 0 it is the greedy chain.

    Args:
        model: made from the decoder's target and trained for it, or the folder that it was saved to.
        block: the longest chain that can be proposed; the KV cache has ``sinks + window + block - 1`` slots a row, and one more with graphs.
        sampling: how the draft's tokens are drawn; ``None`` takes the decoder's.
        graphs: whether a chain is captured as one CUDA graph, as for ``HFModel``.
        bf16_weights: whether steps on the CPU read bfloat16 copies of the draft's weights, as for ``HFModel``; ``None``: where they are exact.
        stop: as for ``Model``.
    Raises:
        ValueError (in ``bind``): the target is another one, or has no activations to read; or graphs or copies of weights are not
            possible.
    """

    model: SpireModel
    block: int = 8
    sampling: Sampling | None = None
    graphs: bool | str = "auto"
    bf16_weights: bool | None = None
    programs: Programs | None = field(default=None, repr=False, compare=False)  # bind makes them
    stop: Stops = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", as_stops(self.stop))
        object.__setattr__(self, "model", as_spire(self.model))
        at_least(1, "block", self.block, "a draft proposes at least 1 token")
        if self.bf16_weights and self.graphs not in (False, "auto"):
            raise ValueError(
                "bf16_weights and graphs are both set: captured steps do not read bfloat16 copies; give only one of them"
            )

    @property
    def info(self) -> DraftInfo:
        """``taps``: every verification returns the target's activations that are inputs of the blocks that the draft copied."""
        model = self.model
        return DraftInfo(
            "spire", taps=model.layers, model=model, sampling=self.sampling, shortest=model.sinks
        )

    @staticmethod
    def example(model: Any) -> Spire:
        """An untrained draft for an ``HFModel`` (for the contract tests)."""
        return Spire(SpireModel.from_target(model, layers=1, window=4))

    def bind(self, target: LanguageModel, sampling: Sampling) -> Spire:
        if not isinstance(target, HFModel):
            raise ValueError(
                f"draft 'spire' reads the target's activations, and the target is a {type(target).__name__}: give an HFModel"
            )
        self.model.check_target(target)
        here = self.model.device, self.model.dtype
        capture = None if self.bf16_weights else capture_named(self.graphs, *here)
        programs = None if capture is None else Programs(self.model.device, capture)
        model = self.model
        if self.bf16_weights is not False and capture is None and model.narrow is None:
            model = model.narrowed(automatic=self.bf16_weights is None)
        return replace(self, model=model, sampling=sampling.for_draft(self.sampling), programs=programs)

    def init(self, context: Context, target_cache: Any) -> SpireState:
        """An empty cache; the prefill's activations come with the first ``observe``.

        Raises:
            ValueError: a row is shorter than the sinks.
        """
        self.model.check()
        if self.programs is not None:
            self.programs.check(self.model.modules())
        self.info.check_prompts(context.length.tolist())
        ring = self.ring(context.batch, context.tokens.shape[1])
        return SpireState(ring, Unread.none(context.batch))

    def ring(self, batch: int, capacity: int) -> Ring:
        """Empty slots for ``batch`` rows of texts of up to ``capacity`` tokens."""
        model = self.model
        shapes = [
            KVShape(b.key.out_features // b.size, b.size, b.size, model.dtype, model.device)
            for b in model.blocks
        ]
        # Without a window all positions are kept, and no slot is reused.
        window = capacity if model.window is None else model.window
        if self.programs is None:
            return Ring(shapes, batch, model.sinks, window, self.block, mask=model.mask)
        # A whole round in one step may run twice on a text, and its last position is one more in flight (``SpireDrafting.observe``).
        block = self.block + 1
        slots = model.sinks + window + block - 1
        if model.window is None:  # a longer one does as well
            lent = self.programs.lent(batch, lambda ring: ring.slots >= slots)
        else:
            lent = self.programs.lent(batch, lambda ring: ring.slots == slots)
        return lent or self.programs.kept(Ring(shapes, batch, model.sinks, window, block, mask=model.mask))

    def propose(
        self, state: SpireState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, SpireState]:
        sampling, model = self.sampling or Sampling(), self.model
        B, N = context.batch, int(budget.max())
        if N == 0:
            return Proposal.none(B, model.device), state
        self.check_length(N)
        rows = (budget > 0).nonzero()[:, 0]  # in a pool, rows of other drafts have no budget
        state = self._read(state, rows)
        if self.programs is not None and not self.stop:
            chain = self._drawn(state.ring, context, budget, rng, sampling)
            if chain is not None:
                return chain.proposal(budget), state
        some = len(rows) < B
        text, mine, own = (
            (context.select(rows), budget[rows], rng.select(rows)) if some else (context, budget, rng)
        )
        step = SpireSteps(model, state.ring, text, N, rows)
        draw = ChainDraw(text, mine, sampling, stop=self.stop)
        last = to_device(text.tokens.gather(1, text.length[:, None] - 1)[:, 0], model.device)
        while not draw.done:
            last = draw.draw(step(draw.count, last), own)
        made = draw.proposal()
        return (made.spread(rows, B) if some else made), state

    def check_length(self, length: int) -> None:
        """Raise ValueError if a chain of ``length`` tokens is longer than ``block``."""
        if self.block < length:
            raise ValueError(
                f"a chain of {length} tokens was requested and block is {self.block}: use Spire(model, block={length})"
            )

    def _drawn(
        self, ring: Ring, context: Context, budget: Tensor, rng: Rng, sampling: Sampling
    ) -> Drawn | None:
        assert self.programs is not None

        return drawn(self.programs, ring, context, budget, rng, sampling, partial(forwards, self.model))

    def observe(self, state: SpireState, round: Round) -> SpireState:
        """Keep the target's activations at newly committed positions for the next chain (section 3.3: ``m_t^i = y_t``).

        A prompt's are read at once, and if rounds are captured all are, since they read only the ring.
        """
        fed = round.scores.fed
        if fed is None:
            raise ValueError(
                "the round has no activations: the executor must score with the taps that DraftInfo declares"
            )
        which, model = committed(fed, round), self.model
        row, position = fed.row.numpy()[which], fed.position.numpy()[which]
        at = to_device(torch.from_numpy(which), model.device)
        layers = [fed.layers[layer].to(model.device, model.dtype) for layer in model.layers]
        if not round.number or self.programs is not None:
            self._write(state.ring, row, position, layers, at)
        else:  # copies, since a captured step of the target overwrites its activations
            new = Committed(row, position, [x[at] for x in layers])
            state = state._replace(unread=state.unread.add(new, state.ring.size))
        return state

    def _read(self, state: SpireState, rows: Tensor) -> SpireState:
        """Write the entries of ``rows`` that are missing."""
        unread, left = state.unread.take(rows.numpy())
        if unread is not None:
            self._write(state.ring, *unread)
        return SpireState(state.ring, left)

    def _write(
        self,
        ring: Ring,
        row: np.ndarray,
        position: np.ndarray,
        layers: Sequence[Tensor],
        at: Tensor | None = None,
    ) -> None:
        """Write the entries of those positions ``[T]`` for which the ring has room.

        Args:
            layers: activations, ``[T, E]``; with ``at [T]``, ``[F, E]``, and ``at`` picks the T of them.
        """
        model, last = self.model, np.zeros(int(row.max(initial=0)) + 1, dtype=np.int64)
        np.maximum.at(last, row, position)
        held = np.flatnonzero((position < ring.sinks) | (position > last[row] - ring.size))
        if len(held) < len(row) or at is not None:
            some = to_device(torch.from_numpy(held), model.device)
            some = some if at is None else at[some]
            row, position, layers = row[held], position[held], [x[some] for x in layers]
        if not len(row):
            return
        positions = torch.from_numpy(position)
        slots = ring.at(torch.from_numpy(row), positions, model.device)
        remember(model, ring, slots, layers, model.rotary(to_device(positions, model.device)))

    def select(self, state: SpireState, rows: Tensor) -> SpireState:
        return SpireState(state.ring.select(rows), state.unread.select(rows.numpy()))

    def join(self, state: SpireState, other: SpireState) -> SpireState:
        new = len(other.unread.since)
        self._read(other, torch.arange(new))
        return SpireState(state.ring.followed_by(other.ring), state.unread.join(new))
