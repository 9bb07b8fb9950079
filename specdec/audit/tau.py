"""Block efficiency τ (tokens a round of speculation), exact for given texts, without the noise of acceptance.

On a text that was sampled from the target, the probability that a token was proposed and accepted, given that the draft reached
its position, is ``min(p, q) / p = min(1, q / p)`` of that token (Leviathan et al., arXiv 2211.17192: a proposal is drawn from q and
accepted with ``min(1, p / q)``, and the committed token has distribution p). ``efficiency`` (``audit/rounds.py``) makes expected rounds
of these chances. The mean over texts is that of live decoding, with less variance, since only the texts are random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.audit.rounds import Efficiency, efficiency
from specdec.drafts.magicdec import MagicDec
from specdec.models.hf import HFModel
from specdec.sampling import Sampling
from specdec.training.passes import k_pass
from specdec.types import Context, Proposal

__all__ = ["Efficiency", "chances", "efficiency", "magicdec_chances", "parallel_chances", "spire_chances"]


def chances(p: Tensor, q: Tensor) -> Tensor:
    """``min(1, q / p)``: the probability that a token with these probabilities under target and draft came from the draft."""
    return torch.where(q >= p, torch.ones_like(p), q / p)


@torch.no_grad()
def parallel_chances(
    target_logits: Tensor, draft_logits: Tensor, tokens: Tensor, start: int, k: int
) -> Tensor:
    """``accept [C, n, k]`` of a draft whose distribution at a position does not depend on where the block began.

    Args:
        target_logits, draft_logits: ``[C, T, V]`` after each of the first T of ``tokens [C, T + 1]``. start: number of tokens before
            round one, those of the prompt and the one that its prefill gave; n = T + 1 - start. Entries past the text's end are 1:
            for whole rounds (``efficiency(..., cut=False)``) leave out the last k block starts, ``accept[:, :-k]``.
    """
    p, q = (_of_next(logits, tokens) for logits in (target_logits, draft_logits))
    accept = chances(p, q)[:, start - 1 :]
    n = accept.shape[1]
    padded = torch.nn.functional.pad(accept, (0, k - 1), value=1.0)
    return padded.unfold(1, k, 1)[:, :n]


@torch.no_grad()
def spire_chances(model, target_logits: Tensor, inputs, tokens: Tensor, start: int, k: int) -> Tensor:
    """``accept [C, n, k]`` of a ``SpireModel``, whose distribution depends on the block's start: k passes for blocks that start at every
    position in turn.

    Args:
        inputs: layer -> ``[C, T, E]``, as for ``k_pass``. Other arguments as for ``parallel_chances``.
    """
    C, T = tokens.shape[0], tokens.shape[1] - 1
    n = T + 1 - start
    p = _of_next(target_logits, tokens)
    out = torch.ones(C, n, k, dtype=p.dtype)
    spare = -(-n // k) * k + k  # whole blocks past the end, which are not used
    text = torch.nn.functional.pad(tokens, (0, spare))
    known = {layer: torch.nn.functional.pad(x, (0, 0, 0, spare)) for layer, x in inputs.items()}
    for offset in range(min(k, n)):
        first = start - 1 + offset
        blocks = -(-(n - offset) // k)
        stop = first + blocks * k
        logits = k_pass(model, text[:, :stop], {i: x[:, :stop] for i, x in known.items()}, k, first)
        q = _of_next(logits, text[:, first : stop + 1])
        wide = torch.nn.functional.pad(p, (0, max(0, stop - T)), value=1.0)[:, first:stop]
        out[:, offset::k] = chances(wide, q).view(C, blocks, k)
    return out


@torch.no_grad()
def magicdec_chances(
    draft: MagicDec, target: HFModel, target_logits: Tensor, tokens: Tensor, start: int, k: int
) -> Tensor:
    """``accept [C, n, k]`` of a ``MagicDec``: from every block start in turn, its view of the text so far reads the next tokens.

    A pruner chooses once, before the first block; ``refresh`` is ignored.

    Args:
        target_logits: ``[C, n, V]`` after each of the last n + 1 tokens but the last. Other arguments as for ``parallel_chances``.
    """
    C, n = tokens.shape[0], tokens.shape[1] - start
    p = _of_next(target_logits, tokens[:, start - 1 :])
    out = torch.ones(C, n, k, dtype=p.dtype)
    bound, cache = draft.bind(target, Sampling()), target.cache(C, tokens.shape[1])
    context = Context.of(tokens[:, :start].tolist(), capacity=tokens.shape[1])
    target.prefill(cache, context)
    view: Any = bound.init(context, cache).cache
    model: Any = bound.view
    for s in range(n):
        if s:
            context = context.append(tokens[:, start + s - 1, None], torch.ones(C, dtype=torch.long))
            target.prefill(cache, context)
            view.catch_up()
        room = min(k, n - s)
        block = tokens[:, start + s : start + s + room]
        chain = Proposal.chain(block[:, :-1], torch.full((C,), room - 1)) if room > 1 else None
        q = _of_next(
            model.score(view, context, chain).logits.to(tokens.device),
            tokens[:, start + s - 1 : start + s + room],
        )
        out[:, s, :room] = chances(p[:, s : s + room], q)
    return out


def _of_next(logits: Tensor, tokens: Tensor) -> Tensor:
    """``[C, T]``: the probability of each next token."""
    next_ones = tokens[:, 1 : logits.shape[1] + 1, None]
    return (logits.gather(-1, next_ones)[..., 0] - logits.logsumexp(-1)).exp()
