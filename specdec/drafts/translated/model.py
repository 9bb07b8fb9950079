"""A model with another tokenizer as a draft: token-level intersection (TLI).

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202,
section 4. The draft proposes only tokens that are the same text in both vocabularies, and reports their probabilities, so every lossless
verifier keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.capabilities import ModelInfo
from specdec.drafts.coerce import ModelLike, as_model
from specdec.drafts.translated.retokenizer import NOTHING, Read, Retokenizer
from specdec.protocols import JoinableCache, LanguageModel
from specdec.types import Context, Proposal, Scores, Verdict

BLOCK = 256  # of the model's positions, kept for a draft's block
LOWEST = (
    -1e4
)  # logit of what is not in the intersection: a probability of 0, unless a processor forbids everything else


class Translated:
    """A language model over the ids of ``tokenizer``, computed by a ``model`` with a tokenizer of its own; for drafts, not for targets.

    A text is decoded, and encoded by the model's tokenizer (``retokenizer.Retokenizer``). Logits ``[..., V + 1]`` are those of the tokens that are the
    same text in both vocabularies, and very low for all others, which the verifier still emits from the residual. (The last entry stands for ids outside the tokenizer.) Of a
    text that is longer than the model's positions, the model reads the end.

    Args:
        model: with a tokenizer, or what ``specdec.decoder`` takes as a model. It is shared, neither copied nor changed.
        tokenizer: the target's.
    Raises:
        TypeError: one of the two tokenizers is missing. ValueError: no token is the same text in both vocabularies.
    """

    def __init__(self, model: ModelLike, tokenizer: Any):
        model = as_model(model, "model")
        own = ModelInfo.of(model)
        for name, of, given in (("tokenizer", "the target's", tokenizer), ("model", "its", own.tokenizer)):
            if given is None:
                raise TypeError(
                    f"{name}: {of} tokenizer is None: give both tokenizers, HFModel(model, tokenizer)"
                )
        self.model: LanguageModel = model
        self.tokenizer = tokenizer
        self.retokenizer = Retokenizer(tokenizer, own.tokenizer)
        self.vocab_size, self.supports_trees = len(self.retokenizer.other), model.supports_trees
        pairs = {i: other for i, other in self.retokenizer.pairs.items() if other < model.vocab_size}
        if not pairs:
            raise ValueError(
                f"no token is the same text in the vocabularies of {len(tokenizer)} and {len(own.tokenizer)} tokens: give another draft"
            )
        ours, theirs = zip(*sorted(pairs.items()))
        self.ours, self.theirs = (torch.tensor(side, device=own.device) for side in (ours, theirs))
        self.other = torch.from_numpy(self.retokenizer.other).clamp(max=model.vocab_size - 1)
        self.on_device = self.other.to(own.device or "cpu")
        self.limit = own.max_positions
        self.block = BLOCK if self.limit is None else min(BLOCK, self.limit // 2)
        self.joinable = isinstance(model.cache(1, 1), JoinableCache)

    @property
    def info(self) -> ModelInfo:
        own = ModelInfo.of(self.model)
        limits = [n for n in (own.longest_chain, self.limit and self.block) if n is not None]
        longest = min(limits, default=None)
        return replace(
            own, tokenizer=self.tokenizer, max_positions=None, eos_token_ids=(), longest_chain=longest
        )

    def cache(self, batch: int, capacity: int) -> TranslatedCache:
        """As ``LanguageModel.cache``; the model's own cache is made when a text is read, and made anew where texts have become too long for it."""
        kind = JoinableTranslatedCache if self.joinable else TranslatedCache
        return kind(self, None, 0, capacity, [NOTHING] * batch)

    def prefill(self, cache: TranslatedCache, context: Context, rows: Tensor | None = None) -> None:
        """As ``LanguageModel.prefill``."""
        text = cache.text(context)  # which may exchange the model's cache
        self.model.prefill(cache.inner, text, rows)

    def score(
        self,
        cache: TranslatedCache,
        context: Context,
        proposal: Proposal | None = None,
        start: int | None = None,
        rows: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Scores:
        """As ``LanguageModel.score``.

        Raises:
            ValueError: taps are asked for.
        """
        if taps:
            raise ValueError(
                "taps: activations at another tokenizer's tokens are not the target's; leave them out"
            )
        text = cache.text(context)
        scores = self.model.score(cache.inner, text, self._nodes(proposal), start, rows)
        logits = scores.logits
        out = logits.new_full((*logits.shape[:-1], self.vocab_size), LOWEST)
        return Scores(out.index_copy_(-1, self.ours, logits.index_select(-1, self.theirs)))

    def _nodes(self, proposal: Proposal | None) -> Proposal | None:
        """The nodes in the model's ids."""
        if proposal is None:
            return None
        if self.limit is not None and proposal.nodes > self.block:
            raise ValueError(
                f"the proposal has {proposal.nodes} nodes, and of the draft's {self.limit} positions {self.block} are kept for them: draft at most {self.block}"
            )
        other = self.other if proposal.tokens.is_cpu else self.on_device
        tokens = other[proposal.tokens.clamp(0, self.vocab_size - 1)]
        return Proposal(tokens, proposal.parents, proposal.size)

    def end_of(self, ids: np.ndarray) -> np.ndarray:
        """What begins every text, and then the last ids, as many as the model has positions for.

        A quarter of the positions is given up at a time, because the model reads the rest again each time.
        """
        if self.limit is None:
            return ids
        step, kept = max(1, self.limit // 4), len(self.retokenizer.start)
        over = len(ids) + self.block - self.limit
        dropped = max(0, -(-over // step) * step)
        return np.concatenate([ids[:kept], ids[kept + dropped :]]) if dropped else ids

    def __repr__(self) -> str:
        return f"Translated({self.model!r}, {len(self.ours)} of {self.vocab_size - 1} tokens)"


class TranslatedCache:
    """A cache of the model's, and how its texts were read.

    Attributes:
        inner: the model's cache, with ``room`` for its tokens. capacity: for ours. read: of each row.
    """

    def __init__(self, owner: Translated, inner: Any, room: int, capacity: int, read: list[Read]):
        self.owner, self.inner, self.room, self.capacity, self.read = owner, inner, room, capacity, read
        self.last: tuple[Context, Context] | None = None  # a context, and it in the model's ids

    @property
    def length(self) -> Tensor:
        """``[B]`` on the host: our tokens that were translated."""
        return torch.tensor([len(read.ids) for read in self.read], dtype=torch.long)

    def text(self, context: Context) -> Context:
        """The context in the model's ids. The model's cache is exchanged for a larger, empty one where it has no room for what may follow."""
        if self.last is not None and self.last[0] is context:
            return self.last[1]
        if context.batch != len(self.read):
            raise ValueError(
                f"the context has {context.batch} rows and the cache {len(self.read)}: select the same rows of both"
            )
        owner, rows = self.owner, context.tokens.numpy()
        made = [
            owner.retokenizer(rows[b, :n], read)
            for b, (n, read) in enumerate(zip(context.length.tolist(), self.read))
        ]
        self.read = [read for _, read in made]
        texts = [owner.end_of(ids) for ids, _ in made]
        length = np.array([len(ids) for ids in texts], dtype=np.int64)
        # What may follow takes as many slots here as there, nodes included.
        need = int((length + (self.capacity - context.length.numpy())).max(initial=1))
        if self.inner is None or need > self.room:
            self.inner = None  # two caches would need twice the memory
            self.room = need + need // 4
            self.inner = owner.model.cache(context.batch, self.room)
        tokens = np.zeros((len(texts), self.room), dtype=np.int64)
        for row, ids in zip(tokens, texts):
            row[: len(ids)] = ids
        lengths = torch.from_numpy(length)
        text = Context(torch.from_numpy(tokens), lengths, lengths.clone(), context.request)
        self.last = context, text
        return text

    def sync(self, context: Context) -> Tensor:
        """``[B]`` our tokens that need not be read again, counting each token that the model lacks as one of ours."""
        text = self.text(context)
        return (context.length - text.length + self.inner.sync(text)).clamp(min=0)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Keep the accepted nodes; where the model's tokenizer writes the new text otherwise, the next call drops them again."""
        if (
            self.last is not None
            and self.inner is not None
            and torch.equal(self.last[0].length, context.length)
        ):
            tokens = self.owner.other[verdict.tokens.clamp(0, self.owner.vocab_size - 1)]
            self.inner.commit(self.last[1], replace(verdict, tokens=tokens))
        self.last = None

    def select(self, rows: Tensor) -> TranslatedCache:
        """The cache of some rows, in the given order; the old object must not be used again."""
        read = [self.read[b] for b in rows.tolist()]
        inner = None if self.inner is None else self.inner.select(rows)
        return type(self)(self.owner, inner, self.room, self.capacity, read)


class JoinableTranslatedCache(TranslatedCache):
    """A ``TranslatedCache`` over a cache that takes in the rows of another."""

    def join(self, other: TranslatedCache) -> TranslatedCache:
        """The cache of both caches' rows, in order; neither may be used again."""
        both = None not in (self.inner, other.inner)
        inner = self.inner.join(other.inner) if both else None
        room, capacity = max(self.room, other.room), max(self.capacity, other.capacity)
        return type(self)(self.owner, inner, room, capacity, [*self.read, *other.read])
