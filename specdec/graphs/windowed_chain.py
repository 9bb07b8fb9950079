"""The chain of a model with constant-size KV (``Windowed``, and MagicDec's view of a target) as one captured step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.cache.static import StaticStore
from specdec.graphs.chain import Drawn
from specdec.graphs.ring_chain import Forward, drawn
from specdec.graphs.ring_plan import RingPlan
from specdec.graphs.static import Forward as Packed
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context


def forwards(run: Packed, store: StaticStore, position: Tensor, steps: int) -> Forward:
    """As ``ring_chain.Forwards``, of a packed model; ``run``: as ``Packed.forward``."""

    def forward(n: int, tokens: Tensor, plan: RingPlan) -> Tensor | None:
        keep = False if n == 0 and len(position) > steps else None
        return run(store, plan, tokens, position[n], keep)

    return forward


def propose(
    model: Any,
    cache: Any,
    text: Context,
    budget: Tensor,
    rng: Rng,
    sampling: Sampling,
    vocab_size: int | None,
) -> Drawn | None:
    """As ``chain.propose``, over a ``RingCache`` whose mask is sinks and a window. Where more than the last two tokens of a text
    are missing, they are fed first."""
    N = int(budget.max())
    if N < 1 or cache.block <= N or sampling.reads_context:  # see ``Masked.in_flight``
        return None
    words, length = text.tokens.numpy(), text.length.tolist()
    # Tokens beyond a row's budget are fed, too, and learned positions end.
    if max(length) + N > min(cache.capacity, (model.max_positions or cache.capacity) + 1):
        return None
    steps = model.steps
    first = cache.matched(text)
    if any(n - held > 2 for n, held in zip(length, first)):
        model.prefill(cache, text)
        first = cache.matched(text)

    run = partial(forwards, steps.forward)
    made = drawn(steps, cache, text, budget, rng, sampling, run, vocab_size, torch.tensor(first))
    if made is not None:
        for b, (n, k) in enumerate(zip(length, budget.tolist())):
            cache.remember(b, words[b], first[b], n, max(k - 1, 0))
            cache.wrote(b, n + N - 2)
    return made
