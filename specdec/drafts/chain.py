"""The forwards of a drafted chain: one ``score`` for each token, or a faster implementation with equal results.

``chain_of`` chooses one when a draft is bound. A fast implementation is used only where the model's own class declares it
(``HFModel.fast_chain``): a subclass with its own mask, cache or forward is scored token by token, and so is any other object.
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
    """Logits of one chain, token by token: the reference for the other implementations."""

    def __init__(self, model: LanguageModel, cache: Any, text: Context, budget: Tensor):
        self.model, self.cache, self.text, self.budget = model, cache, text, budget
        self.uniform = int(budget.min()) == int(budget.max())

    def logits(self, draw: ChainDraw) -> Tensor:
        """``[B, V]`` after the tokens drawn so far."""
        n = draw.count
        rows = None if self.uniform else (self.budget > n).nonzero()[:, 0]
        start = n - 1 if n else None
        scores = self.model.score(self.cache, self.text, draw.sofar, start=start, rows=rows)
        return scores.logits[:, 0]

    def done(self) -> None:
        """Called when all tokens are drawn."""


class InC(Scored):
    """As ``Scored``, but where possible the tokens after the first come from steps that are prepared together (``drafts.cpu_chain``)."""

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
    """``forwards`` makes the forwards of a chain one by one; ``at_once`` draws the whole chain in one captured step, or returns ``None``."""

    forwards: Callable[[Any, Any, Context, Tensor], Scored] = Scored
    at_once: Callable[[Any, Context, Tensor, Rng], Drawn | None] | None = None


def chain_of(model: LanguageModel, sampling: Any, vocab_size: int | None) -> Chain:
    """The fastest implementation that the class of ``model`` declares."""
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
