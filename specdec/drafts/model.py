"""An independent smaller model proposes a chain (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from specdec.capabilities import DraftInfo
from specdec.drafts.coerce import as_model
from specdec.drafts.draw import ChainDraw
from specdec.drafts.one_model import ModelState, OneModel, readable
from specdec.drafts.stops import Stops, as_stops
from specdec.graphs import chain, windowed_chain
from specdec.graphs.chain import Drawn
from specdec.models.hf import HFModel
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class Model(OneModel):
    """Draws a chain from ``model``, one forward a token; at temperature 0 it is the greedy chain.

    Each token is one ``score``. With captured steps (``HFModel(graphs=...)``) the whole chain is one of them, if the model's own class
    declares that it may be (``HFModel.fast_chain``).

    Args:
        model: any ``LanguageModel`` with the target's tokenizer, or what ``specdec.decoder`` accepts as one. A padded vocabulary is cut or
            filled to the target's size.
        sampling: how the draft's tokens are drawn; ``None`` (the usual choice) takes the decoder's. In any case the
            proposal carries the distribution that was used, so the output keeps the target's distribution.
        stop: rules that end a chain before ``length`` (``drafts.stops``): a rule, several, or a number for ``stops.Confidence``. Such a chain is
            drawn token by token, since the host looks at every distribution.
    """

    model: LanguageModel
    sampling: Sampling | None = None
    vocab_size: int | None = None
    captured: Callable[..., Drawn | None] | None = field(default=None, repr=False, compare=False)
    stop: Stops = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", as_model(self.model, "model"))
        object.__setattr__(self, "stop", as_stops(self.stop))

    @property
    def info(self) -> DraftInfo:
        return DraftInfo("model", revocable=True, model=self.model, sampling=self.sampling)

    def bind(self, target: LanguageModel, sampling: Sampling) -> Model:
        mine, size = sampling.for_draft(self.sampling), target.vocab_size
        fast = None if self.stop else captured(self.model, mine, size)
        return replace(self, sampling=mine, vocab_size=size, captured=fast)

    def propose(
        self, state: ModelState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, ModelState]:
        text = readable(context, self.model)
        drawn = self.captured and self.captured(state.cache, text, budget, rng)
        if drawn is not None:
            proposal = drawn.proposal(budget)
        else:
            draw = ChainDraw(context, budget, self.sampling or Sampling(), self.vocab_size, self.stop)
            while not draw.done:
                start = draw.count - 1 if draw.count else None
                scores = self.model.score(state.cache, text, draw.sofar, start=start, rows=draw.rows)
                draw.draw(scores.logits[:, 0], rng)
            proposal = draw.proposal()
        return proposal, ModelState(state.cache, proposal if proposal.nodes else None)


def as_draft(given: Any, name: str) -> Any:
    """A draft, or what becomes a ``Model``; raises TypeError, which calls it ``name``, if it is neither."""
    if isinstance(given, type) or not hasattr(given, "propose"):
        return Model(as_model(given, name))
    return given


def captured(
    model: LanguageModel, sampling: Sampling, vocab_size: int | None
) -> Callable[..., Drawn | None] | None:
    """``(cache, text, budget, rng)``: a whole chain in one captured step, or ``None`` where it is not captured; ``None`` without such steps."""
    kind = model.fast_chain if isinstance(model, HFModel) and model.steps is not None else None
    if kind is None:
        return None
    propose: Any = chain.propose if kind == "slots" else windowed_chain.propose
    return partial(propose, model, sampling=sampling, vocab_size=vocab_size)
