"""A model with another tokenizer drafts a text, which is proposed in the target's tokens: string-level exact match (SLEM).

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202,
section 3. transformers' universal assisted generation has the same idea in greedy decoding, and translates new tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.capabilities import DraftInfo
from specdec.drafts.coerce import ModelLike
from specdec.drafts.model import Model
from specdec.drafts.one_model import ModelState
from specdec.drafts.stateless import under
from specdec.drafts.translated.codec import LOST
from specdec.drafts.translated.model import Translated, TranslatedCache
from specdec.drafts.translated.retokenizer import Read
from specdec.grammars.masks import permitted
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round, Verdict

MOST = 8  # tokens of the model for one of the target, at most


class TextState(NamedTuple):
    """``drafted``: the model's last tokens, after the text ``read``, both in the model's ids; they are in the cache."""

    cache: TranslatedCache
    drafted: Proposal | None = None
    read: Context | None = None


@dataclass(frozen=True, eq=False)
class TextMatch:
    """The model's most probable tokens, decoded, and encoded by the target's tokenizer: a chain of point masses.

    Unlike ``Translated``, it can propose any text, and reports no probabilities: a proposed token is accepted with the probability that the target
    gives to it. A chain ends before a token that the row's grammar forbids. A special token ends what is proposed; it is proposed itself where the target has it, too.

    Args:
        model, tokenizer: as for ``Translated``.
    """

    model: ModelLike
    tokenizer: Any
    translated: Translated = field(init=False, repr=False)
    grammar: Any = field(default=None, kw_only=True, repr=False)  # bind sets it

    def __post_init__(self) -> None:
        object.__setattr__(self, "translated", Translated(self.model, self.tokenizer))
        object.__setattr__(self, "model", self.translated.model)

    @property
    def info(self) -> DraftInfo:
        return DraftInfo("text match", revocable=True, model=self.translated)

    @cached_property
    def back(self) -> dict[int, int]:
        """The model's ids -> the target's, where they are in a pair."""
        return {other: i for i, other in self.translated.retokenizer.pairs.items()}

    @cached_property
    def chain(self) -> Model:
        """The model's greedy chain, in its own ids."""
        model: LanguageModel = self.translated.model
        return Model(model).bind(model, Sampling(temperature=0.0))

    def bind(self, target: LanguageModel, sampling: Sampling) -> TextMatch:
        return under(self, sampling.grammar)

    def init(self, context: Context, target_cache: Any) -> TextState:
        return self.prepare(self.empty(context), context, None)

    def empty(self, context: Context) -> TextState:
        """A state that has read nothing."""
        return TextState(
            self.translated.cache(context.batch, context.tokens.shape[1] + self.translated.block)
        )

    def prepare(self, state: TextState, context: Context, rows: Tensor | None) -> TextState:
        """Feed unread tokens of ``rows`` (``None``: all), so that the next ``propose`` need not."""
        self.translated.prefill(state.cache, context, rows)
        return TextState(state.cache)

    def propose(
        self, state: TextState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, TextState]:
        text = state.cache.text(context)
        if state.drafted is not None and state.read is not None:
            _keep(state.cache.inner, state.read, state.drafted, text)
        # As many of the model's tokens as the row's text has for one of the target's, and one more.
        share = (text.length / context.length).clamp(max=MOST)
        own = (budget * share).ceil().long() + 1
        own = torch.where(budget > 0, own.clamp(max=self.translated.block), 0)
        drafted, _ = self.chain.propose(ModelState(state.cache.inner, None), text, own, rng)
        tokens, size, most = drafted.tokens.tolist(), drafted.size.tolist(), budget.tolist()
        found = [self._ids(read, tokens[b][: size[b]])[: most[b]] for b, read in enumerate(state.cache.read)]
        proposal = permitted(self.grammar, context, _chains(found))
        return proposal, TextState(state.cache, drafted, text)

    def _ids(self, read: Read, drafted: list[int]) -> list[int]:
        """What the model drafted after a text, in the target's ids."""
        translate = self.translated.retokenizer
        special = next((n for n, i in enumerate(drafted) if i in translate.there.special), len(drafted))
        end = [self.back[i] for i in drafted[special : special + 1] if i in self.back]
        new = translate.there.text(drafted[:special], inside=True).rstrip(LOST)
        start = read.ends[-1][0]
        # The text's last block is written anew with what follows, which gives natural ids, unless its own ids change by that.
        block, inside = read.ids[start:].tolist(), start > 0
        own = translate.codec
        whole = own.ids_of(own.text(block, inside) + new, inside)
        natural = whole[: len(block)] == block
        return (whole[len(block) :] if natural else own.ids_of(new, inside=True)) + end

    def observe(self, state: TextState, round: Round) -> TextState:
        return state

    def select(self, state: TextState, rows: Tensor) -> TextState:
        return TextState(state.cache.select(rows))

    def join(self, state: TextState, other: TextState) -> TextState:
        cache: Any = state.cache
        return TextState(cache.join(other.cache))


def _chains(rows: list[list[int]]) -> Proposal:
    """Chains of point masses, ragged."""
    size = torch.tensor([len(row) for row in rows], dtype=torch.long)
    tokens = torch.zeros(len(rows), int(size.max()) if len(rows) else 0, dtype=torch.long)
    for line, row in zip(tokens, rows):
        line[: len(row)] = torch.tensor(row, dtype=torch.long)
    return Proposal.chain(tokens, size)


def _keep(cache: Any, read: Context, drafted: Proposal, text: Context) -> None:
    """Commit the drafted tokens that are in the text now."""
    B, N = drafted.tokens.shape
    if cache is None or read.batch != text.batch or not N:
        return
    tokens = drafted.tokens.cpu()
    place = (read.length[:, None] + torch.arange(N)).clamp(max=text.tokens.shape[1] - 1)
    same = text.tokens.gather(1, place) == tokens
    same &= torch.arange(N) < torch.minimum(drafted.size, text.length - read.length)[:, None]
    accepted = same.long().cumprod(1).sum(1)
    path = torch.where(torch.arange(N) < accepted[:, None], torch.arange(N), -1)
    end = torch.zeros(B, 1, dtype=torch.long)
    cache.commit(read, Verdict(path, accepted, end[:, 0], torch.cat([tokens, end], 1)))
