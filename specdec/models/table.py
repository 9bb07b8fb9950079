"""An exact tabular language model, for tests, the certifier and notebooks: every probability is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.types import Context, Proposal, Scores, Verdict


class TableModel:
    """The distribution of the next token given the last ``order`` tokens, from a table.

    Args:
        probs: ``[V] * order + [V]``: ``probs[a, b]`` is the distribution after ``..., a, b`` (order 2). Order 0 is one distribution for every
            position. Prefixes shorter than ``order`` are padded with token 0 on the left.
        dtype: of the logits (log probabilities, -inf for zeros); float64 keeps the certifier exact.
    Raises:
        ValueError: the shape is not a cube, an entry is negative or not finite, or a distribution does not sum to 1.
    """

    supports_trees = True
    max_positions = None
    eos_token_ids: tuple[int, ...] = ()
    tokenizer = None

    def __init__(self, probs: Tensor | Sequence[Any], dtype: torch.dtype = torch.float64):
        table = torch.as_tensor(probs, dtype=torch.float64)
        if table.dim() < 1 or len(set(table.shape)) != 1:
            raise ValueError(
                f"probs has shape {list(table.shape)}: give [V] (order 0), [V, V] (order 1: the distribution after each token), ..."
            )
        if not bool(torch.isfinite(table).all()) or bool((table < 0).any()):
            raise ValueError("probs has a negative, infinite or NaN entry: give probabilities, not logits")
        total = table.sum(-1)
        off = (total - 1).abs() > 1e-6  # float32 thirds pass
        if bool(off.any()):
            where = off.nonzero()[0].tolist()
            raise ValueError(
                f"the distribution probs{where} sums to {float(total[tuple(where)]):.8g}: divide each distribution by its sum (the last dimension is "
                "the next token)"
            )
        self.probs = table / total[..., None]
        self.order = table.dim() - 1
        self.vocab_size = table.shape[-1]
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._logits = self.probs.reshape(-1, self.vocab_size).log().to(dtype)

    @staticmethod
    def random(
        vocab_size: int, order: int = 1, seed: int = 0, concentration: float = 1.0, zeros: float = 0.0
    ) -> TableModel:
        """Distributions drawn from a symmetric Dirichlet; a share ``zeros`` of the entries is 0 (at least one per distribution is not)."""
        at_least(1, "vocab_size", vocab_size, "give at least 1 token")
        at_least(0, "seed", seed, "give 0 or more")
        draw = np.random.default_rng(seed)
        distributions = draw.dirichlet([concentration] * vocab_size, size=vocab_size**order)
        none = draw.random(distributions.shape) < zeros
        none[np.arange(len(distributions)), distributions.argmax(-1)] = False
        distributions[none] = 0
        distributions /= distributions.sum(-1, keepdims=True)
        return TableModel(torch.from_numpy(distributions).reshape([vocab_size] * (order + 1)))

    def cache(self, batch: int, capacity: int) -> TableCache:
        """A token index without keys and values: it only counts the tokens that were fed."""
        return TableCache(torch.zeros(batch, dtype=torch.long))

    def prefill(self, cache: TableCache, context: Context, rows: Tensor | None = None) -> None:
        """Does nothing: a table needs no past beyond ``order`` tokens."""

    def score(
        self,
        cache: TableCache,
        context: Context,
        proposal: Proposal | None = None,
        start: int | None = None,
        rows: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Scores:
        """Log probabilities ``[B, N + 1, V]`` (or ``[B, N - start, V]``), as in ``protocols.LanguageModel``.

        Raises:
            ValueError: a token is outside the vocabulary, or taps are asked for (a table has no layers).
        """
        if taps:
            raise ValueError("taps: a TableModel has no layers to tap; use an HFModel")
        B, V = context.batch, self.vocab_size
        N = 0 if proposal is None else proposal.nodes
        asked = torch.ones(B, dtype=torch.bool)
        if rows is not None:
            asked = torch.zeros(B, dtype=torch.bool).index_fill(0, rows, True)
        live = asked[:, None].expand(B, N + 1).clone()
        # state[b, n] encodes the last `order` tokens there in base V: one multiplication per token.
        state = torch.zeros(B, N + 1, dtype=torch.long)
        for back in range(self.order, 0, -1):
            at = context.length - back
            token = context.tokens.gather(1, at.clamp(min=0)[:, None])[:, 0]
            state[:, 0] = state[:, 0] * V + self._known(torch.where((at >= 0) & asked, token, 0))
        if proposal is not None and N:
            live[:, 1:] &= torch.arange(N) < proposal.size[:, None]
            drafted = self._known(torch.where(live[:, 1:], proposal.tokens.cpu(), 0))
            for n in range(N):
                up = state.gather(1, (proposal.parents[:, n] + 1).clamp(0, n)[:, None])[:, 0]
                state[:, n + 1] = (up * V + drafted[:, n]) % V**self.order
        logits = self._logits[state].masked_fill_(~live[..., None], 0)
        cache.length = torch.where(asked, context.length, cache.length)
        return Scores(logits if start is None else logits[:, start + 1 :])

    def _known(self, tokens: Tensor) -> Tensor:
        if bool(((tokens < 0) | (tokens >= self.vocab_size)).any()):
            bad = int(tokens[(tokens < 0) | (tokens >= self.vocab_size)][0])
            raise ValueError(f"token {bad} is outside this table's vocabulary of {self.vocab_size}")
        return tokens

    def distribution(self, prefix: Sequence[int]) -> Tensor:
        """``[V]`` float64: the distribution of the token after ``prefix``."""
        last = [0] * self.order + self._known(torch.tensor([*prefix], dtype=torch.long)).tolist()
        return self.probs[tuple(last[len(last) - self.order :])]

    def joint(self, prefix: Sequence[int], n: int) -> Tensor:
        """``[V] * n`` float64: the exact probability of every continuation of ``n`` tokens."""
        if n == 0:
            return torch.ones((), dtype=torch.float64)
        after = [self.joint([*prefix, token], n - 1) for token in range(self.vocab_size)]
        distribution = self.distribution(prefix)
        return torch.stack([distribution[token] * rest for token, rest in enumerate(after)])

    def __repr__(self) -> str:
        return f"TableModel(vocab_size={self.vocab_size}, order={self.order})"


class TableCache:
    """How many committed tokens of each row were fed (``length [B]``)."""

    def __init__(self, length: Tensor):
        self.length = length

    def sync(self, context: Context) -> Tensor:
        self.length = torch.minimum(self.length, context.length)
        return self.length

    def commit(self, context: Context, verdict: Verdict) -> None:
        self.length = context.length + verdict.accepted

    def select(self, rows: Tensor) -> TableCache:
        return TableCache(self.length[rows])

    def join(self, other: TableCache) -> TableCache:
        return TableCache(torch.cat([self.length, other.length]))
