"""Training losses of drafts: the next token, the target's distribution, the probability of acceptance, and weights by depth.

MixedLoss is SPIRe's (arXiv 2504.06419, section 3.4): half distillation, half acceptance. The expected acceptance probability of one
token is ``sum_v min(p(v), q(v))`` (Leviathan et al., arXiv 2211.17192, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

ABSENT = -100
"""In the tokens of a loss: a token that a reduced vocabulary lacks. Cross-entropy with the text leaves its position out."""


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """``-log q(token)`` in nats, the mean over all positions, without those whose token is ``ABSENT``.

    Args:
        logits: ``[..., V]`` of the draft. tokens: ``[...]`` the next tokens.
    """
    total = F.cross_entropy(logits.flatten(0, -2), tokens.flatten(), ignore_index=ABSENT, reduction="sum")
    return total / (tokens != ABSENT).sum().clamp(min=1)


def distillation(logits: Tensor, target_logits: Tensor) -> Tensor:
    """``-sum_v p(v) log q(v)`` in nats, the mean over all positions; both ``[..., V]``."""
    return -(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def acceptance(logits: Tensor, target_logits: Tensor) -> Tensor:
    """``[...]``: the probability that a token drawn from the draft is accepted; both ``[..., V]``, at temperature 1."""
    return _overlap(logits.softmax(-1), target_logits.softmax(-1))


def needs_target(loss: Any) -> bool:
    """Whether a loss reads the target's logits; a function does."""
    return getattr(loss, "needs_target", True)


READS = ("confidence", "accepted", "block", "rounds", "progress")


def reads(loss: Any) -> tuple[str, ...]:
    """The keywords that a loss is called with beside ``kept``, some of ``READS``; a function gets none.

    Raises:
        ValueError: it reads something else.
    """
    found: tuple[str, ...] = getattr(loss, "reads", ())
    if isinstance(found, str) or not set(found) <= set(READS):
        raise ValueError(
            f"loss has reads = {found!r}: give a tuple of some of {', '.join(READS)} (kept comes with masked data)"
        )
    return found


def takes_blocks(loss: Any) -> bool:
    """Whether a loss is of whole blocks ``[B, A, k, V]``, and not one for each depth."""
    return getattr(loss, "whole", False)


def _overlap(q: Tensor, p: Tensor) -> Tensor:
    return q.minimum(p).sum(-1)


def mean_of(values: Tensor, kept: Tensor | None) -> Tensor:
    """The mean of ``values [...]`` where ``kept [...]``; 0 if that is nowhere."""
    if kept is None:
        return values.mean()
    return values.where(kept, 0).sum() / kept.sum().clamp(min=1)


@dataclass(frozen=True)
class HardLoss:
    """One-hot cross-entropy with the text's next token: how the paper trains its vanilla draft. Needs no target."""

    needs_target = False

    def __call__(
        self, logits: Tensor, target_logits: Tensor | None, tokens: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        return cross_entropy(logits, tokens)  # tokens that are not kept are ABSENT


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

    def __call__(
        self, logits: Tensor, target_logits: Tensor, tokens: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        p, log_q = target_logits.softmax(-1), logits.log_softmax(-1)
        loss = -self.weight * (p * log_q).sum(-1)
        if self.weight < 1:
            loss = loss - (1 - self.weight) * _overlap(log_q.exp(), p)
        return mean_of(loss, kept)


@dataclass(frozen=True)
class CombinedLoss:
    """``hard * CE(text) + soft * KL(p, q) + variation * TV(p, q) + confidence * BCE``, in nats; each term is a mean over positions.

    TV is half of the L1 distance, so that DSpark's loss, ``0.1 CE + 0.9 L1 + 1.0 BCE``, is ``CombinedLoss(0.1, 0, 1.8, 1)``. The BCE is
    that of the head's confidence with the probability ``1 - TV`` that its token is accepted, through which no gradient flows.

    Raises:
        ValueError: a negative weight, or all of them zero.
    """

    hard: float = 0.0
    soft: float = 0.0
    variation: float = 0.0
    confidence: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in vars(self).items():
            if not weight >= 0:
                raise ValueError(f"{name} is {weight}: a weight is at least 0")
        if not any(vars(self).values()):
            raise ValueError(
                "all weights of CombinedLoss are 0: give at least one of hard, soft, variation, confidence"
            )

    @property
    def needs_target(self) -> bool:
        return bool(self.soft or self.variation or self.confidence)

    @property
    def reads(self) -> tuple[str, ...]:
        """The head's confidence, if it is trained."""
        return ("confidence", "accepted") if self.confidence else ()

    def __call__(
        self,
        logits: Tensor,
        target_logits: Tensor,
        tokens: Tensor,
        confidence: Tensor | None = None,
        accepted: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """``logits``, ``target_logits [..., V]``; ``tokens``, ``confidence`` (a logit) and ``accepted [...]``, the probability that the
        token is accepted: by default ``1 - TV(p, q)``, which it is not where the vocabulary is reduced and p renormalised. ``kept [...]``: which
        positions count; by default all."""
        loss = logits.new_zeros(())
        if self.hard:
            loss = loss + self.hard * cross_entropy(logits, tokens)
        if not self.needs_target:
            return loss
        log_p, log_q = target_logits.log_softmax(-1), logits.log_softmax(-1)
        p = log_p.exp()
        if self.soft:
            loss = loss + self.soft * mean_of((p * (log_p - log_q)).sum(-1), kept)
        if self.variation or self.confidence:
            overlap = _overlap(log_q.exp(), p)
            loss = loss + self.variation * mean_of(1 - overlap, kept)
            if self.confidence:
                if confidence is None:
                    raise ValueError(
                        "the loss trains a confidence, and this draft has none: leave the weight at 0"
                    )
                truth = (overlap if accepted is None else accepted).detach()
                each = F.binary_cross_entropy_with_logits(confidence, truth, reduction="none")
                loss = loss + self.confidence * mean_of(each, kept)
        return loss


@dataclass(frozen=True)
class LKLoss:
    """``w * KL(p, q) + (1 - w) * (1 - a)`` in nats: an LK loss (Samarin et al., arXiv 2602.23881), which distils where little is accepted, and raises acceptance where much is. Here
    ``a = sum_v min(p(v), q(v))`` is the probability of acceptance, and no gradient flows through ``w = exp(-eta * a)``.

    Args:
        eta: how fast distillation gives way; ``None``: the loss is ``-log a``.
    Raises:
        ValueError: a negative eta.
    """

    eta: float | None = 3.0
    needs_target = True

    def __post_init__(self) -> None:
        if self.eta is not None and not self.eta >= 0:
            raise ValueError(f"eta is {self.eta}: give a number of at least 0, or None for -log a")

    def __call__(
        self, logits: Tensor, target_logits: Tensor, tokens: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        log_p, log_q = target_logits.log_softmax(-1), logits.log_softmax(-1)
        if self.eta is None:
            return mean_of(-log_q.minimum(log_p).logsumexp(-1), kept)
        p = log_p.exp()
        a = _overlap(log_q.exp(), p)
        share = (-self.eta * a.detach()).exp()
        return mean_of(share * (p * (log_p - log_q)).sum(-1) + (1 - share) * (1 - a), kept)


@dataclass(frozen=True)
class CATLoss:
    """``hard * CE(text) + soft * KL(p, q)``, in nats. Each position is weighted by the product of the target's probabilities of the text's tokens before it in the
    block: PARD-2's confidence-adaptive tokens (CAT, arXiv 2605.08632).

    Raises:
        ValueError: a negative weight, or both zero.
    """

    hard: float = 0.1
    soft: float = 1.0
    needs_target = whole = True

    def __post_init__(self) -> None:
        if not (self.hard >= 0 and self.soft >= 0 and self.hard + self.soft > 0):
            raise ValueError(
                f"hard is {self.hard} and soft {self.soft}: give weights of at least 0, one of them above"
            )

    def __call__(
        self, logits: Tensor, target_logits: Tensor, tokens: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        """``logits``, ``target_logits [..., k, V]`` of whole blocks; ``tokens``, ``kept [..., k]``."""
        log_p, log_q = target_logits.log_softmax(-1), logits.log_softmax(-1)
        at, there = tokens.clamp(min=0)[..., None], tokens != ABSENT
        said, mine = (law.gather(-1, at)[..., 0].where(there, 0) for law in (log_p, log_q))
        reached = (said.cumsum(-1) - said).exp()
        reached = reached if kept is None else reached.where(kept, 0)
        each = self.soft * (log_p.exp() * (log_p - log_q)).sum(-1) - self.hard * mine
        return (each * reached).sum() / reached.sum().clamp(min=1e-6)


@dataclass(frozen=True)
class ByDepth:
    """The mean of ``loss`` over the depths of a block, weighted by depth.

    Args:
        loss: of one depth, ``(logits, target_logits, tokens) -> scalar``.
        weights: a factor from one depth to the next (EAGLE-3's 0.8; ``exp(-1 / gamma)`` gives DFlash's ``exp(-n / gamma)``), or the weight
            of each depth.
    Raises:
        ValueError: weights that are not positive; in a call: logits without blocks, or fewer weights than depths.
    """

    loss: Callable[..., Tensor]
    weights: float | Sequence[float] = 0.8

    def __post_init__(self) -> None:
        if takes_blocks(self.loss):
            raise ValueError(
                f"loss is a {type(self.loss).__name__}, which takes whole blocks: give it without ByDepth"
            )
        wide = set(reads(self.loss)) & {"block", "rounds", "progress"}
        if wide:
            raise ValueError(
                f"loss reads {wide.pop()}, which ByDepth does not divide by depth: give a loss of whole blocks (with whole = True) without ByDepth"
            )
        given = [self.weights] if isinstance(self.weights, (int, float)) else list(self.weights)
        if not given or not all(weight > 0 for weight in given):
            raise ValueError(
                f"weights is {self.weights}: give a factor above 0, or a positive weight of each depth"
            )

    @property
    def needs_target(self) -> bool:
        return needs_target(self.loss)

    @property
    def reads(self) -> tuple[str, ...]:
        return reads(self.loss)

    def of(self, k: int) -> list[float]:
        """The weights of ``k`` depths, which add up to 1."""
        if isinstance(self.weights, (int, float)):
            each = [float(self.weights) ** n for n in range(k)]
        else:
            each = [float(weight) for weight in self.weights[:k]]
        if len(each) < k:
            raise ValueError(
                f"weights has {len(each)} weights, and the blocks have {k} depths: give one of each"
            )
        return [weight / sum(each) for weight in each]

    def __call__(self, logits: Tensor, target_logits: Tensor, tokens: Tensor, **more: Any) -> Tensor:
        """``logits``, ``target_logits [B, A, k, V]``; ``tokens`` and what else there is ``[B, A, k]``."""
        if logits.dim() != 4:
            raise ValueError(
                f"ByDepth got logits of shape {list(logits.shape)}: weights by depth need blocks [B, A, k, V], as forward.Blocks and KPass give"
            )
        parts = []
        for n, weight in enumerate(self.of(logits.shape[2])):
            own = {name: value[..., n] for name, value in more.items() if value is not None}
            parts.append(
                weight * self.loss(logits[..., n, :], target_logits[..., n, :], tokens[..., n], **own)
            )
        return sum(parts[1:], parts[0])
