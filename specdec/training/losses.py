"""Training losses of drafts: the next token, the target's distribution, or the probability of acceptance.

MixedLoss is SPIRe's (arXiv 2504.06419, section 3.4): half distillation, half acceptance. The expected acceptance probability of one
token is ``sum_v min(p(v), q(v))`` (Leviathan et al., arXiv 2211.17192, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """``-log q(token)`` in nats, the mean over all positions.

    Args:
        logits: ``[..., V]`` of the draft. tokens: ``[...]`` the next tokens.
    """
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def distillation(logits: Tensor, target_logits: Tensor) -> Tensor:
    """``-sum_v p(v) log q(v)`` in nats, the mean over all positions; both ``[..., V]``."""
    return -(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def acceptance(logits: Tensor, target_logits: Tensor) -> Tensor:
    """``[...]``: the probability that a token drawn from the draft is accepted; both ``[..., V]``, at temperature 1."""
    return _overlap(logits.softmax(-1), target_logits.softmax(-1))


def _overlap(q: Tensor, p: Tensor) -> Tensor:
    return q.minimum(p).sum(-1)


@dataclass(frozen=True)
class HardLoss:
    """One-hot cross-entropy with the text's next token: how the paper trains its vanilla draft. Needs no target."""

    needs_target = False

    def __call__(self, logits: Tensor, target_logits: Tensor | None, tokens: Tensor) -> Tensor:
        return cross_entropy(logits, tokens)


@dataclass(frozen=True)
class MixedLoss:
    """``weight * distillation - (1 - weight) * acceptance``; SPIRe's weight is 0.5, and 1 is distillation alone.

    Raises:
        ValueError: a weight outside 0 .. 1.
    """

    weight: float = 0.5
    needs_target = True

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight is {self.weight}: the share of distillation is between 0 and 1")

    def __call__(self, logits: Tensor, target_logits: Tensor, tokens: Tensor) -> Tensor:
        p, log_q = target_logits.softmax(-1), logits.log_softmax(-1)
        loss = -self.weight * (p * log_q).sum(-1)
        if self.weight < 1:
            loss = loss - (1 - self.weight) * _overlap(log_q.exp(), p)
        return loss.mean()
