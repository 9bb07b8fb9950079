"""A model drafts a chain or a tree in one forward, over mask tokens after the text (PARD, An et al., arXiv 2504.18583)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.capabilities import DraftInfo
from specdec.configs import parallel_token
from specdec.drafts.coerce import as_model
from specdec.drafts.draw import LOWEST, ChainDraw, fitted
from specdec.drafts.heads.static_tree import StaticTree
from specdec.drafts.model import Model
from specdec.drafts.one_model import ModelState, OneModel, readable
from specdec.drafts.stops import Stops, as_stops
from specdec.drafts.translated.model import Translated
from specdec.grammars.masks import permitted
from specdec.models.hf import HFModel
from specdec.models.own_cache import OwnCache
from specdec.protocols import LanguageModel
from specdec.rng import Rng
from specdec.sampling import Sampling, logits_of
from specdec.types import Context, Proposal


@runtime_checkable
class OfMarginals(Protocol):
    """A tree of marginal distributions: ``heads.DDTree``, ``heads.StaticTree``, or an object with these members."""

    @property
    def trees(self) -> bool: ...

    @property
    def longest(self) -> int | None: ...

    def nodes(self, length: int) -> int: ...

    def of(self, each: Sequence[Tensor], budget: Tensor) -> Proposal:
        """A proposal of point masses for rows with ``budget [R]``, from logits ``[R, V]`` of every depth."""
        ...


@dataclass(frozen=True)
class Parallel(OneModel):
    """Draws a chain of k tokens from one forward of ``model`` over the text and k - 1 mask tokens; at temperature 0 each token is the most probable one.

    The law of each token is the one after the text and the mask tokens before it (section 3.1), so it does not depend on the tokens drawn before. Mask tokens
    leave the model's cache at the end of the round. The model must have been trained for this: ``training.parallel_blocks.ParallelBlocks`` does, and AMD's
    checkpoints (PARD, and PARD-2 without the target's activations) were.

    Args:
        model, sampling: as for ``Model``. stop: as for ``Model``; a chain that ends early saves verification and no drafting.
        mask_token: the id of the mask token; ``None``: that of the model's config (``pard_token``). It may lie beyond the target's vocabulary.
        tree: a tree in place of the chain: ``heads.DDTree(nodes)``, the most probable one, or a ``heads.StaticTree``.
    Raises:
        TypeError: ``mask_token`` is no whole number, the model is ``Translated``, or ``tree`` is no tree of marginal distributions. ValueError: the mask token is no id of the model, or none
            is given and the config has none; rules beside a tree.
    """

    model: LanguageModel
    mask_token: int | None = None
    sampling: Sampling | None = None
    vocab_size: int | None = None
    stop: Stops = ()
    tree: OfMarginals | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", as_model(self.model, "model"))
        object.__setattr__(self, "stop", as_stops(self.stop))
        if isinstance(self.model, Translated):
            raise TypeError(
                "model has another tokenizer than the target, and a mask token has no text to translate: give drafts.Model of it"
            )
        mask = token_of(self.model) if self.mask_token is None else self.mask_token
        if mask is None:
            raise ValueError(
                "mask_token is not given, and the model's config has no pard_token: give the id that the model was trained with for parallel drafting, or, for "
                "a model that was not, drafts.Model (recipes/train_parallel.py trains one)"
            )
        called = "mask_token" if self.mask_token is not None else "the config's pard_token"
        whole(called, mask)
        if not 0 <= mask < self.model.vocab_size:
            raise ValueError(f"{called} is {mask}: the model has ids from 0 to {self.model.vocab_size - 1}")
        object.__setattr__(self, "mask_token", int(mask))
        if self.tree is not None and (isinstance(self.tree, type) or not isinstance(self.tree, OfMarginals)):
            raise TypeError(f"tree is {self.tree!r}: give heads.DDTree(nodes) or a heads.StaticTree")
        if self.tree is not None and self.stop:
            raise ValueError("stop ends chains, and tree is given: leave one of them out")

    @staticmethod
    def example(model: LanguageModel) -> Parallel:
        """A draft over any model, with its last id as mask token (for the contract tests)."""
        return Parallel(model, model.vocab_size - 1)

    @property
    def info(self) -> DraftInfo:
        about = DraftInfo(
            "parallel", revocable=True, model=self.model, sampling=self.sampling, once=True, rereads=True
        )
        if self.tree is None:
            return about
        return replace(about, trees=self.tree.trees, nodes=self.tree.nodes, longest=self.tree.longest)

    def bind(self, target: LanguageModel, sampling: Sampling) -> Parallel:
        if isinstance(self.tree, StaticTree) and self.tree.ranks > target.vocab_size:
            raise ValueError(
                f"tree has a rank of {self.tree.ranks - 1}, and there are {target.vocab_size} ids: give ranks below that"
            )
        return replace(self, sampling=sampling.for_draft(self.sampling), vocab_size=target.vocab_size)

    def propose(
        self, state: ModelState, context: Context, budget: Tensor, rng: Rng
    ) -> tuple[Proposal, ModelState]:
        sampling = self.sampling or Sampling()
        if self.tree is not None and self.tree.longest is not None:
            budget = budget.clamp(max=self.tree.longest)
        draw = ChainDraw(context, budget, sampling, self.vocab_size, self.stop)
        if draw.done:
            return draw.proposal(), ModelState(state.cache, None)
        assert self.mask_token is not None
        masks = torch.full((context.batch, draw.length - 1), self.mask_token)
        nodes = Proposal.chain(masks, (budget - 1).clamp(min=0)) if draw.length > 1 else None
        text = readable(context, self.model)
        logits = self.model.score(state.cache, text, nodes, rows=draw.rows).logits
        if self.tree is not None:
            return self._grown(logits, context, budget, sampling), ModelState(state.cache, None)
        draw.draw_all(logits, rng)
        return draw.proposal(), ModelState(state.cache, None)

    def _grown(self, logits: Tensor, context: Context, budget: Tensor, sampling: Sampling) -> Proposal:
        """The trees of ``logits [B, k, V]``; only the first token's follow processors and grammars, whose text is known."""
        assert self.tree is not None
        rows = torch.from_numpy(np.flatnonzero(budget.numpy() > 0))
        some = len(rows) < context.batch
        text, mine = (context.select(rows), budget[rows]) if some else (context, budget)
        logits = fitted(logits[rows.to(logits.device)] if some else logits, self.vocab_size, sampling)
        if sampling.reads_text:
            with logits_of("a draft's "):
                first = sampling.constrained(logits[:, :1].float(), text, None, -1).clamp(min=LOWEST)
            logits = torch.cat([first.to(logits.dtype), logits[:, 1:]], 1)
        made = permitted(sampling.grammar, text, self.tree.of(list(logits.unbind(1)), mine))
        return made.spread(rows, context.batch) if some else made


def token_of(model: LanguageModel) -> int | None:
    """The mask token of a model, if its config names one."""
    return parallel_token(model.model.config) if isinstance(model, (HFModel, OwnCache)) else None


def over(model: LanguageModel) -> Model | Parallel:
    """The draft that a model was trained for: ``Parallel`` if its config names a mask token, else ``Model``."""
    return Model(model) if token_of(model) is None else Parallel(model)
