"""An independent smaller model proposes a chain (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafts.coerce import as_model
from specdec.drafts.cpu_chain import CpuChain, cpu_chain
from specdec.graphs import chain as chains
from specdec.protocols import LanguageModel
from specdec.rng import Key, Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Provenance, Round


class ModelState(NamedTuple):
    cache: Any
    proposal: Proposal | None  # the one whose nodes are in the cache


@dataclass(frozen=True)
class Model:
    """Draws a chain from ``model``, one forward a token; at temperature 0 the chain is the model's greedy one.

    With a model that has captured steps (``HFModel(graphs=...)``) the whole chain is one of them (``graphs.chain``).

    Args:
        model: any ``LanguageModel`` with the target's tokenizer (or what becomes one, as for ``specdec.decoder``); a padded vocabulary is cut or filled to the target's size.
        sampling: how the draft's tokens are drawn; ``None`` (the usual choice) takes the decoder's. Whatever it is, the
            proposal carries the distribution that was used, so the output keeps the target's law.
    """

    model: LanguageModel
    sampling: Sampling | None = None
    vocab_size: int | None = None
    name = "model"
    trees = False
    revocable = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", as_model(self.model, "model"))

    def bind(self, target: LanguageModel, sampling: Sampling) -> Model:
        return replace(self, sampling=self.sampling or sampling, vocab_size=target.vocab_size)

    def init(self, context: Context, target_cache: Any) -> ModelState:
        return self.prepare(self.empty(context), context, None)

    def empty(self, context: Context) -> ModelState:
        """A state that has read nothing."""
        return ModelState(self.model.cache(context.batch, context.tokens.shape[1]), None)

    def prepare(self, state: ModelState, context: Context, rows: Tensor | None) -> ModelState:
        """Read what was not read of ``rows`` (of all), so that the next ``propose`` need not."""
        self.model.prefill(state.cache, readable(context, self.model), rows)
        return state

    def propose(
        self, state: ModelState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, ModelState]:
        sampling = self.sampling or Sampling()
        text = readable(context, self.model)
        B, N = context.batch, int(budget.max())
        device = getattr(self.model, "device", "cpu")
        chain = chains.propose(self.model, state.cache, text, budget, rng, sampling, self.vocab_size)
        if chain is not None:
            how: Provenance = "point" if chain.probs is None else "sampled"
            proposal = Proposal.chain(chain.tokens, budget, chain.probs, how)
            return proposal, ModelState(state.cache, proposal)
        tokens = torch.zeros(B, N, dtype=torch.long, device=device)
        drawn: list[Tensor] = []
        uniform = int(budget.min()) == N
        sofar: Proposal | None = None
        more: CpuChain | None = None  # the steps after the first, where they are known beforehand
        for n in range(N):
            if more is not None:
                logits = more(n, tokens[:, n - 1])[:, None]
            else:
                rows = None if uniform else (budget > n).nonzero()[:, 0]
                start = n - 1 if n else None
                logits = self.model.score(state.cache, text, sofar, start=start, rows=rows).logits
            if n == 0:
                more = cpu_chain(self.model, state.cache, context.length, budget)
            logits = fit(logits, self.vocab_size)
            if sampling.greedy:
                tokens[:, n] = sampling.argmax(logits, context, sofar, first=n - 1)[:, 0]
            else:
                q = sampling(logits, context, sofar, first=n - 1)[:, 0]
                tokens[:, n] = rng.categorical(q, Key(context.length, n))
                drawn.append(q)
            if more is None or sampling.processors or n + 1 == N:
                sofar = Proposal.chain(tokens[:, : n + 1], budget.clamp(max=n + 1))
        if sofar is None:
            return Proposal.none(B, device), ModelState(state.cache, None)
        if more is not None:
            more.remember()
        proposal = replace(sofar, probs=torch.stack(drawn, 1), provenance="sampled") if drawn else sofar
        return proposal, ModelState(state.cache, proposal)

    def observe(self, state: ModelState, round: Round) -> ModelState:
        if state.proposal is round.proposal:  # otherwise the cache holds another tree: sync will notice
            state.cache.commit(round.context, round.verdict)
        return ModelState(state.cache, None)

    def select(self, state: ModelState, rows: Tensor) -> ModelState:
        return ModelState(state.cache.select(rows), None)

    def join(self, state: ModelState, other: ModelState) -> ModelState:
        return ModelState(state.cache.join(other.cache), None)


def readable(context: Context, model: LanguageModel) -> Context:
    """The context as a draft with a smaller (less padded) vocabulary can read it: tokens that it lacks become its last one."""
    if model.vocab_size > int(context.tokens.max()):
        return context
    return replace(context, tokens=context.tokens.clamp(max=model.vocab_size - 1))


def fit(logits: Tensor, vocab_size: int | None) -> Tensor:
    """Logits over the target's vocabulary: surplus entries (padding) are cut, missing ones cannot be drawn."""
    if vocab_size is None or logits.shape[-1] == vocab_size:
        return logits
    if logits.shape[-1] > vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=float("-inf"))
