"""How the forwards of a drafted chain are made: one call of ``score`` a token, or a faster way that says the same.

``chain_of`` chooses when a draft is bound. A faster way is taken only where the model's class declares it for itself (``HFModel.fast_chain``):
a subclass with its own mask, cache or forward is asked token by token, and so is any other object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from specdec.drafts.cpu_chain import CpuChain, cpu_chain
from specdec.drafts.draw import ChainDraw
from specdec.graphs import chain as captured
from specdec.graphs import windowed_chain
from specdec.graphs.chain import Drawn
from specdec.models.hf import HFModel
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.types import Context


class Scored:
    """Logits of one chain, token by token: the plain way, which the others must equal."""

    def __init__(self, model: LanguageModel, cache: Any, text: Context, budget: Tensor):
        self.model, self.cache, self.text, self.budget = model, cache, text, budget
        self.uniform = int(budget.min()) == int(budget.max())

    def logits(self, draw: ChainDraw) -> Tensor:
        """``[B, V]`` after what was drawn so far."""
        n = draw.count
        rows = None if self.uniform else (self.budget > n).nonzero()[:, 0]
        start = n - 1 if n else None
        scores = self.model.score(self.cache, self.text, draw.sofar, start=start, rows=rows)
        return scores.logits[:, 0]

    def done(self) -> None:
        """All tokens were drawn."""


class InC(Scored):
    """As ``Scored``; tokens after the first by steps that are prepared together (``drafts.cpu_chain``), where they can be."""

    steps: CpuChain | None = None

    def logits(self, draw: ChainDraw) -> Tensor:
        if draw.count == 1:  # the first call has fed the text
            self.steps = cpu_chain(self.model, self.cache, self.text.length, self.budget)
        if self.steps is None:
            return super().logits(draw)
        return self.steps(draw.count, draw.tokens[:, draw.count - 1])

    def done(self) -> None:
        if self.steps is not None:
            self.steps.remember()


class Chain(NamedTuple):
    """``forwards`` of a chain, one after the other, and ``at_once``: all of it in one captured step, ``None`` when that is not possible now."""

    forwards: Callable[[Any, Any, Context, Tensor], Scored] = Scored
    at_once: Callable[[Any, Context, Tensor, Rng], Drawn | None] | None = None


def chain_of(model: LanguageModel, sampling: Any, vocab_size: int | None) -> Chain:
    """The fastest way that the class of ``model`` declares."""
    kind = model.fast_chain if isinstance(model, HFModel) else None
    if kind is None:
        return Chain()
    assert isinstance(model, HFModel)
    if model.steps is None:
        return Chain(InC) if kind == "slots" else Chain()
    propose: Any = captured.propose if kind == "slots" else windowed_chain.propose

    def at_once(cache: Any, text: Context, budget: Tensor, rng: Rng) -> Drawn | None:
        return propose(model, cache, text, budget, rng, sampling, vocab_size)

    return Chain(at_once=at_once)
