"""A head as a draft: it reads every round's newly committed positions, and drafts from the last of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from specdec.capabilities import DraftInfo
from specdec.drafts.heads.captured import drawn
from specdec.drafts.heads.chain import Chain
from specdec.drafts.heads.dynamic_tree import DynamicTree
from specdec.drafts.heads.eagle3 import Eagle3
from specdec.drafts.heads.features import fresh
from specdec.drafts.heads.kernels import Kernels
from specdec.drafts.heads.layers import by_kernels
from specdec.drafts.heads.load import as_head
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import NO_KERNELS, HeadState, SlotAnchors, empty, ends, pieces, reading
from specdec.drafts.pool import merged
from specdec.grammars.masks import permitted
from specdec.graphs.programs import Programs, capture_named
from specdec.kernels.device import to_device
from specdec.models.hf import HFModel
from specdec.models.own_cache import OwnCache
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


@runtime_checkable
class Grower(Protocol):
    """A way to draw a proposal from a head: ``Chain``, ``DynamicTree``, ``DDTree``, ``StaticTree``, or an object with the same members.

    Attributes:
        trees: whether it proposes more than chains. longest: the longest path that it proposes (``None``: no limit).
    """

    @property
    def trees(self) -> bool: ...

    @property
    def longest(self) -> int | None: ...

    def check(self, head: HeadModel) -> None:
        """Raise ValueError unless it can draw from this head."""
        ...

    def nodes(self, length: int) -> int:
        """The most nodes of a proposal whose longest path is ``length``."""
        ...

    def grow(
        self,
        head: HeadModel,
        at: SlotAnchors,
        memo: Any,
        given: Tensor,
        context: Context,
        budget: Tensor,
        sampling: Sampling,
        rng: Rng,
    ) -> Proposal:
        """A proposal for ``R`` rows.

        Args:
            memo: of the head's first step. given: ``[R, 1 + G]`` the tokens from the anchor on. G is 0, except where a text is drafted
                ahead of its verification. Steps 0 to G take these tokens as their token before, and the first token is drawn from the
                logits of step G.
            context, budget, rng: of these rows.
        """
        ...


@dataclass(frozen=True)
class Head:
    """Drafts from a ``HeadModel``, such as ``heads.Eagle3``.

    Args:
        model: made from the decoder's target, or the folder that it was saved to.
        tree: how the proposal grows: ``heads.Chain()`` draws a chain, ``heads.DynamicTree()`` builds EAGLE-2's tree,
            ``heads.DDTree()`` the best tree of marginal distributions.
        sampling: how the draft's tokens are drawn; ``None`` takes the decoder's.
        bf16_weights: whether products on the CPU read bfloat16 copies of the weights of a float32 head, as for ``HFModel``; ``None``: where they
            are exact, part by part.
        graphs: whether a chain is captured as one CUDA graph, as for ``HFModel``. Trees are captured only under ``executors.Ahead``, and chains with a
            ``stop`` or ``rules`` never.
    Raises:
        TypeError: ``tree`` is nothing that grows proposals. ValueError: it cannot draw from this head; in ``bind``: the target is another one, or has no activations to read; graphs or copies
            of weights are not possible.
    """

    model: HeadModel
    tree: Grower = Chain()
    sampling: Sampling | None = None
    bf16_weights: bool | None = None
    graphs: bool | str = "auto"
    programs: Programs | None = field(default=None, repr=False, compare=False)  # bind makes them

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", as_head(self.model))
        if isinstance(self.tree, type) or not isinstance(self.tree, Grower):
            raise TypeError(
                f"tree is {self.tree!r}: give heads.Chain(), heads.DynamicTree(...), or another object that grows proposals"
            )
        self.tree.check(self.model)
        if self.bf16_weights and self.graphs not in (False, "auto"):
            raise ValueError(
                "bf16_weights and graphs are both set: captured steps do not read bfloat16 copies; give only one of them"
            )

    @property
    def info(self) -> DraftInfo:
        """The declaration. In its ``taps``, a head's ``"final"`` is the last block: the final norm is applied here."""
        limits = [n for n in (self.model.longest, self.tree.longest) if n is not None]
        return DraftInfo(
            type(self.model).__name__.lower(),
            trees=self.tree.trees,
            nodes=self.tree.nodes,
            longest=min(limits, default=None),
            taps=tuple(sorted({self.model.layer_of(tap) for tap in self.model.taps})),
            revocable=True,
            model=self.model,
            sampling=self.sampling,
            once=self.model.block_slots > 0,
        )

    @staticmethod
    def example(model: Any) -> Head:
        """An untrained head for an ``HFModel`` or an ``OwnCache`` (for the contract tests)."""
        return Head(Eagle3.from_target(model))

    def bind(self, target: LanguageModel, sampling: Sampling) -> Head:
        if not isinstance(target, (HFModel, OwnCache)):
            raise ValueError(
                f"draft {type(self.model).__name__!r} reads the target's activations, and the target is a {type(target).__name__}: give an HFModel "
                "or an OwnCache"
            )
        model = self.model.bound(target)
        capture = capture_named(self.graphs, model.device, model.dtype)
        model.kernels = programs = None
        if capture is not None and not self.bf16_weights:  # graphs cannot capture C code
            programs = Programs(model.device, capture)
        else:
            output = [] if model.lm_head is not None else [model.of_target.output]
            model.kernels = Kernels([*model.modules(), *output], self.bf16_weights)
        return replace(self, model=model, sampling=sampling.for_draft(self.sampling), programs=programs)

    def init(self, context: Context, target_cache: Any) -> HeadState:
        """An empty state; the prefill's activations come with the first ``observe``."""
        model = self.model
        if model.kernels is not None:
            model.kernels.check()
        if self.programs is not None:
            self.programs.check(model.with_ends())
        lend = None if self.programs is None else self.programs.lent
        slots = model.block_slots
        if isinstance(self.tree, DynamicTree):
            slots = max(slots, self.tree.slots)
        longest = context.tokens.shape[1] + model.leading
        ring = empty(model.shapes, context.batch, longest, model.mask, lend, slots)
        if self.programs is not None and ring is not None:
            ring = self.programs.kept(ring)
        return HeadState(ring, torch.zeros(context.batch, dtype=torch.long), None)

    @torch.no_grad()
    def observe(self, state: HeadState, round: Round) -> HeadState:
        """Read the positions that the round committed."""
        model, (ring, known, carry) = self.model, state
        new = fresh(round, known)
        if not len(new.row):
            return state
        if model.leading:
            new = new.led()
        fed, at = round.scores.fed, to_device(torch.from_numpy(new.fed), self._device(round))
        assert fed is not None
        layers = model.tapped(lambda layer: fed.layers[layer][at])
        features = new.features(layers, model.device, model.dtype)
        for piece in pieces(new.row, new.position, ring):
            row, position = new.row[piece], new.position[piece]
            go: Any = None
            if ring is not None:
                go = reading(ring, row, position, model.mask, model.device, self._parts)
            some = features
            if len(piece) < len(new.row):
                some = features.at(to_device(torch.from_numpy(piece), model.device))
            with by_kernels(model.kernels is not None):
                kept = model.read(some, go)
            if kept is not None:
                last = torch.from_numpy(ends(row))
                carry = kept.new_zeros(len(known), *kept.shape[1:]) if carry is None else carry.clone()
                carry[to_device(torch.from_numpy(row)[last], carry.device)] = kept[
                    to_device(last, carry.device)
                ]
        end = round.context.length + round.committed - 1
        return HeadState(ring, torch.where(round.finished, known, end), carry)

    @property
    def _parts(self) -> Mapping[Any, Any]:
        return NO_KERNELS if self.model.kernels is None else self.model.kernels.parts

    @staticmethod
    def _device(round: Round) -> torch.device:
        fed = round.scores.fed
        assert fed is not None
        return next(iter(fed.layers.values())).device

    @torch.no_grad()
    def propose(
        self, state: HeadState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, HeadState]:
        if self.programs is not None and self.tree == Chain():
            sampling = self.sampling or Sampling()
            chain = drawn(self.programs, self.model, state, context, budget, rng, sampling)
            if chain is not None:
                return chain.proposal(budget), state
        ahead = (context.length - 1 - state.known).numpy()  # 0, unless the text has not been verified yet
        drafts = budget.numpy() > 0
        parts: list[tuple[Proposal, Tensor]] = []
        before = state.ring
        for gap in sorted(set(ahead[drafts].tolist())):
            rows = torch.from_numpy(np.flatnonzero(drafts & (ahead == gap)))
            room = self._room(int(budget.max()), gap)
            if not room:
                continue
            proposal, ring = self._grow(state, context, budget.clamp(max=room), rng, rows, gap)
            parts.append((proposal, rows))
            state = state._replace(ring=ring)
        now = state.ring
        if self.programs is not None and before is not None and now is not None and now is not before:
            self.programs.moved(before, now)
        return merged(parts, context.batch), state

    def _room(self, longest: int, gap: int) -> int:
        """The longest path that can be drafted when the draft is ``gap`` tokens ahead of the features."""
        limit = self.model.longest
        if limit is None:
            return longest
        if not gap:
            self.check_length(longest)
        return max(min(longest, limit - gap), 0)

    def check_length(self, length: int) -> None:
        """Raise ValueError if a path of ``length`` tokens is longer than the head proposes."""
        limit = self.model.longest
        if limit is not None and length > limit:
            raise ValueError(
                f"a path of {length} tokens was requested and this {type(self.model).__name__} proposes at most {limit}: use draft(..., "
                f"length={limit})"
            )

    def _grow(
        self, state: HeadState, context: Context, budget: Tensor, rng: Rng, rows: Tensor, gap: int
    ) -> tuple[Proposal, Any]:
        """Draft for the rows ``rows``. The proposal has all rows, but only these are valid."""
        model, some = self.model, len(rows) < context.batch
        text, mine = (context.select(rows), budget[rows]) if some else (context, budget)
        known = state.known[rows] if some else state.known
        anchor, wanted = known + model.leading, gap + int(mine.max())
        at = SlotAnchors(state.ring, rows, anchor, model.mask, model.device, self._parts, wanted)
        positions = known[:, None] + torch.arange(gap + 1) if gap else known[:, None]
        given = to_device(text.tokens.gather(1, positions), model.device)
        carry = state.carry
        memo = carry if carry is None or not some else carry[to_device(rows, carry.device)]
        own, sampling = rng.select(rows) if some else rng, self.sampling or Sampling()
        with by_kernels(model.kernels is not None):
            made = self.tree.grow(model, at, memo, given, text, mine, sampling, own)
        if made.probs is None and not isinstance(self.tree, Chain):
            made = permitted(sampling.grammar, text, made)
        return (made.spread(rows, context.batch) if some else made), at.ring

    def select(self, state: HeadState, rows: Tensor) -> HeadState:
        return state.select(rows)

    def join(self, state: HeadState, other: HeadState) -> HeadState:
        return state.join(other)
