"""A function ``prefix -> logits`` as a draft: the library draws the tokens and records the distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.arguments import name_of
from specdec.capabilities import DraftInfo
from specdec.drafts.draw import ChainDraw
from specdec.drafts.stateless import Stateless
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling, widened
from specdec.types import Context, Proposal


@dataclass(frozen=True)
class FunctionDraft(Stateless):
    """Made by ``chain_draft``: calls ``logits(prefix)`` for each row and depth."""

    logits: Callable[[list[int]], Tensor | Sequence[float]]
    sampling: Sampling | None = None
    vocab_size: int | None = None

    @property
    def info(self) -> DraftInfo:
        return DraftInfo("function", revocable=True, sampling=self.sampling)

    @staticmethod
    def example(model: LanguageModel) -> FunctionDraft:
        """An instance for the contract tests: scores the whole prefix with ``model`` every time."""
        return FunctionDraft(
            lambda ids: model.score(model.cache(1, len(ids)), Context.of([ids])).logits[0, 0]
        )

    def bind(self, target: LanguageModel, sampling: Sampling) -> FunctionDraft:
        return replace(self, sampling=sampling.for_draft(self.sampling), vocab_size=target.vocab_size)

    def propose(self, state: None, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, None]:
        draw = ChainDraw(context, budget, self.sampling or Sampling())
        prefixes = [context.row(b) for b in range(context.batch)]
        for n in range(draw.length):
            rows = (budget > n).nonzero()[:, 0].tolist()
            returned = torch.stack([self._ask(prefixes[b]) for b in rows])
            logits = returned.new_zeros(context.batch, returned.shape[1])
            logits[rows] = returned
            tokens = draw.draw(logits, rng).tolist()
            for b in rows:
                prefixes[b].append(tokens[b])
        return draw.proposal(), None

    def _ask(self, prefix: list[int]) -> Tensor:
        returned = self.logits(list(prefix))
        said = f"chain_draft: the function {name_of(self.logits)} returned"
        try:
            logits = torch.as_tensor(returned)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{said} a {type(returned).__name__} that is no tensor ({error}): return [V] logits"
            ) from error
        if logits.dim() != 1:
            raise ValueError(f"{said} shape {list(logits.shape)} for one prefix: return [V] logits")
        if len(logits) != (self.vocab_size or len(logits)):
            raise ValueError(
                f"{said} {len(logits)} logits and the target's vocabulary has {self.vocab_size} entries: return one for each id, -inf for ids that "
                "are never to be drafted; of a model with a padded vocabulary, cut those that the target lacks"
            )
        return widened(logits)


def chain_draft(function: Callable[[list[int]], Tensor | Sequence[float]]) -> FunctionDraft:
    """Decorator: turn ``prefix (list of ids) -> logits [V]`` into a draft.

    The library draws from the logits with the decoder's sampling and records each token's exact distribution, so decoding is
    lossless whatever the function returns.

    Raises:
        TypeError: ``function`` is not callable. ValueError: in a run, its logits are fewer or more than the target's vocabulary has entries.
    """
    if not callable(function):
        raise TypeError(
            f"function is {function!r}: give a function from a prefix (a list of ids) to logits [V]"
        )
    return FunctionDraft(function)
