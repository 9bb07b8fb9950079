"""The target drafts for itself over a constant-size view of its own KV (MagicDec, Chen et al., arXiv 2408.11049)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.cache.ring import BLOCK
from specdec.capabilities import DraftInfo
from specdec.drafts.magicdec.observation import check_budget
from specdec.drafts.magicdec.view import View, ViewCache
from specdec.drafts.model import Model
from specdec.drafts.one_model import ModelState
from specdec.drafts.stops import Stops, as_stops
from specdec.masks import for_model, streaming
from specdec.models.hf import HFModel
from specdec.models.masked import Masked
from specdec.protocols import LanguageModel
from specdec.pruning.pruner import Pruner, check_pruner
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


class MagicDecState(NamedTuple):
    cache: ViewCache
    rounds: Tensor  # [B] on the host: since the pruner last chose


@dataclass(frozen=True)
class MagicDec:
    """Draws a chain with the target's own weights, which see only the first and the latest tokens of the target's own KV.

    At committed positions the draft's keys and values equal the target's bit for bit; only those of the current block are its own. A
    step costs as much as the target's with a short context, which pays where reading the KV dominates: with long texts and large
    batches. The target must be an ``HFModel``.

    Args:
        window: latest tokens that a query sees, including its own. sinks: first tokens that stay visible.
        mask: what a query sees instead: a ``masks.Mask`` of positions. The view of the target's KV is as small as the mask's reach.
        positions: ``"original"``: positions in the text. ``"in_cache"``: the sinks have the positions right before the window
            (StreamingLLM, arXiv 2309.17453, which the paper uses), for which their keys are rotated in every step.
        pruner: chooses further entries for each KV head (such as ``specdec.pruning.SnapKV()``) from those that the draft does not
            see already, at the start and every ``refresh`` rounds (``None``: never again). A pruner that needs attention weights gets
            those of the last ``observation`` committed tokens, which the target reads once more for this; nothing is chosen for rows
            with fewer tokens. The window always follows the text.
        budget: entries that the pruner may choose, for every layer or for each (``pruning.budgets``); without a pruner nothing is chosen.
        block: the longest chain that can be proposed.
        sampling: how the draft's tokens are drawn; ``None`` takes the decoder's.
        stop: as for ``Model``.
    Raises:
        TypeError: the pruner does not declare what it needs.
        ValueError: a window or a budget below 1, or a pruner with positions in the cache; in ``bind``, a pruner and a mask
            without a reach, a target without KV to read, or keys that cannot be rotated; in ``init``, a prompt that is shorter than the sinks.
    """

    window: int = 64
    sinks: int = 1
    positions: Literal["original", "in_cache"] = "original"
    pruner: Pruner | None = None
    budget: int | Sequence[int] = 128
    refresh: int | None = 16
    observation: int = 16
    block: int = 16
    sampling: Sampling | None = None
    mask: Any = None
    view: View | None = field(default=None, repr=False)  # bind makes it
    draft: Model | None = field(default=None, repr=False)  # over the view
    stop: Stops = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", as_stops(self.stop))
        streaming(self.window, self.sinks)
        at_least(1, "block", self.block, BLOCK)
        if self.mask is not None:
            object.__setattr__(self, "mask", for_model(self.mask))
            if (self.window, self.sinks) != (64, 1):
                raise TypeError(
                    f"mask is {self.mask!r}, and window or sinks are set: give mask alone, or sinks and window without mask"
                )
            if self.positions == "in_cache":
                raise ValueError(
                    f"mask is {self.mask!r} and positions 'in_cache', which are those of sinks and a window: use positions='original'"
                )
        if self.positions not in ("original", "in_cache"):
            raise ValueError(f"positions is {self.positions!r}: give 'original' or 'in_cache'")
        if self.pruner is not None:
            check_pruner(self.pruner)
        if self.pruner is not None and self.positions == "in_cache":
            raise ValueError(
                "a pruner chooses other positions for every head, so the cache has no common positions: use "
                "positions='original'"
            )
        budgets = list(self.budget) if isinstance(self.budget, Iterable) else [self.budget]
        for each in budgets or [0]:
            at_least(1, "budget", each, "give at least 1", ", or one for every layer")
        at_least(1, "observation", self.observation, "give at least 1")
        if self.refresh is not None:
            remedy = "give a number of rounds, or None to choose once"
            at_least(1, "refresh", self.refresh, remedy, ", or None for never")

    @property
    def info(self) -> DraftInfo:
        sinks = self.sinks
        if self.mask is not None:
            sinks = 0 if self.mask.reach is None else self.mask.reach.sinks
        return DraftInfo("magicdec", reads_cache=True, sampling=self.sampling, shortest=sinks)

    @staticmethod
    def example(model: Any) -> MagicDec:
        """A draft with a small view (for the contract tests)."""
        return MagicDec(window=3, sinks=1)

    def bind(self, target: LanguageModel, sampling: Sampling) -> MagicDec:
        if not isinstance(target, HFModel) or isinstance(target, Masked):
            raise ValueError(
                f"draft 'magicdec' reads the target's keys and values, and the target is {target!r}: give an HFModel"
            )
        layers = len(target._shapes)
        if not isinstance(self.budget, int) and len(self.budget) != layers:
            raise ValueError(
                f"budget has {len(self.budget)} numbers and the target {layers} layers: give one for each layer"
            )
        mask = streaming(self.window, self.sinks) if self.mask is None else self.mask
        if self.pruner is not None and mask.reach is None:
            raise ValueError(
                f"mask is {mask!r}, which has no reach, and a pruner adds to a view of constant size: join the mask with a window, or give no pruner"
            )
        extra = 0 if self.pruner is None else max(self._budgets(layers))
        if self.pruner is not None:
            for shape, budget in {*zip(target._shapes, self._budgets(layers))}:
                check_budget(self.pruner, shape, budget, self.observation)
        view = View(target, mask, self.block, self.positions == "in_cache", extra)
        mine = sampling.for_draft(self.sampling)
        return replace(
            self, sampling=mine, view=view, draft=Model(view, mine, stop=self.stop).bind(target, mine)
        )

    def init(self, context: Context, target_cache: Any) -> MagicDecState:
        self.info.check_prompts(context.length.tolist())
        cache = self._bound().of(target_cache)
        self._choose(cache, range(context.batch))
        return MagicDecState(cache, torch.full((context.batch,), -1))  # the prefill is observed too

    def propose(
        self, state: MagicDecState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, MagicDecState]:
        self.check_length(int(budget.max()))
        self._bound()
        assert self.draft is not None
        state = self.caught_up(state, budget)
        proposal, _ = self.draft.propose(ModelState(state.cache, None), context, budget, rng)
        return proposal, state

    def caught_up(self, state: MagicDecState, budget: Tensor) -> MagicDecState:
        """The state whose view has all committed positions of the target's cache, and entries chosen anew where ``refresh`` says so in rows with a budget.

        ``observe`` does not do this: rows may have left the cache by then, and others joined it. In a pool, rows of other drafts have no budget.
        """
        state.cache.catch_up()
        if self.pruner is None or self.refresh is None:
            return state
        due = (state.rounds >= self.refresh) & (budget > 0)
        self._choose(state.cache, due.nonzero()[:, 0].tolist())
        return state._replace(rounds=state.rounds.masked_fill(due, 0))

    def check_length(self, length: int) -> None:
        """Raise ValueError if a chain of ``length`` tokens is longer than ``block``."""
        if self.block < length:
            raise ValueError(
                f"a chain of {length} tokens was requested and block is {self.block}: use MagicDec(block={length})"
            )

    def observe(self, state: MagicDecState, round: Round) -> MagicDecState:
        return state._replace(rounds=state.rounds + 1)

    def select(self, state: MagicDecState, rows: Tensor) -> MagicDecState:
        return MagicDecState(state.cache.select(rows), state.rounds[rows])

    def follow(self, state: MagicDecState, target_cache: Any) -> MagicDecState:
        """Read from ``target_cache`` from now on, which has the rows of the state."""
        state.cache.source = target_cache
        return state

    def join(self, state: MagicDecState, other: MagicDecState) -> MagicDecState:
        return MagicDecState(state.cache.join(other.cache), torch.cat([state.rounds, other.rounds]))

    def _bound(self) -> View:
        if self.view is None:
            raise RuntimeError(
                "draft 'magicdec' has no target yet: build() binds it, or call bind(target, sampling)"
            )
        return self.view

    def _budgets(self, layers: int) -> list[int]:
        return [self.budget] * layers if isinstance(self.budget, int) else list(self.budget)

    def _choose(self, cache: ViewCache, rows: Sequence[int]) -> None:
        if self.pruner is not None and rows:
            cache.choose(self.pruner, self._budgets(len(cache.layers)), self.observation, rows)
