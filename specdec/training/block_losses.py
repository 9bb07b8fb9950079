"""Losses of heads that correct a block: of the choice among its candidates, and of the block's own logits beside the corrected ones.

As they are trained by Domino (arXiv 2605.29707), LiLiCorr (arXiv 2608.20530), XPress (arXiv 2608.02438) and, for DFlash2, by ModelOpt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.arguments import at_least
from specdec.training.losses import mean_of, needs_target, reads


@dataclass(frozen=True)
class ChoiceLoss:
    """The loss of a choice among the ``top_k`` best tokens of a block, the candidates: of ``heads.DFlash2`` and ``heads.LiLiCorr``. In nats, the mean over the positions
    whose text is among its candidates.

    Args:
        top_k: the head's. hard: weight of the cross-entropy with the text, of the head's distribution renormalised on the candidates. penalty: weight of the expectation under that distribution of how much lower
            the target's logit of a candidate is than that of the text's token (0 where it is higher). margin: weight of ``max(0, gap - lead)``,
            where the lead is the logit of the text's token less that of the best other candidate.
        prefix: a position counts only if the text is among the candidates at all depths before it, too, and with masked data only if its whole block is kept.
    Raises:
        ValueError: no candidates, a negative weight, or all weights zero.
    """

    top_k: int
    hard: float = 1.0
    penalty: float = 0.0
    margin: float = 0.0
    gap: float = 2.0
    prefix: bool = False
    reads = ("block",)
    whole = True

    def __post_init__(self) -> None:
        at_least(1, "top_k", self.top_k, "give the head's number of candidates")
        if not (
            min(self.hard, self.penalty, self.margin) >= 0 and self.hard + self.penalty + self.margin > 0
        ):
            raise ValueError(
                f"hard is {self.hard}, penalty {self.penalty} and margin {self.margin}: give weights of at least 0, one of them above"
            )

    @property
    def needs_target(self) -> bool:
        return bool(self.penalty)

    def __call__(
        self,
        logits: Tensor,
        target_logits: Tensor,
        tokens: Tensor,
        block: Tensor,
        kept: Tensor | None = None,
    ) -> Tensor:
        """``logits``, ``target_logits``, ``block [..., k, V]`` of whole blocks; ``tokens``, ``kept [..., k]``. ``block`` are the logits whose best tokens are the candidates."""
        best = block.topk(min(self.top_k, block.shape[-1])).indices
        scores, text = logits.gather(-1, best), best == tokens[..., None]
        log_q = scores.log_softmax(-1)
        each = -self.hard * log_q.where(text, 0).sum(-1)
        if self.penalty:
            said = target_logits.gather(-1, best)
            worse = (said.where(text, 0).sum(-1, keepdim=True) - said).clamp(min=0)
            each = each + self.penalty * (log_q.exp() * worse).sum(-1)
        if self.margin:
            lead = scores.where(text, 0).sum(-1) - scores.masked_fill(text, float("-inf")).amax(-1)
            each = each + self.margin * (self.gap - lead).clamp(min=0)
        counted = text.any(-1)
        if self.prefix:
            counted = counted.long().cumprod(-1).bool()
            kept = None if kept is None else kept.all(-1, keepdim=True)
        return mean_of(each, counted if kept is None else counted & kept)


@dataclass(frozen=True)
class WithBlock:
    """``loss`` of a corrected block, ``+ weight * block`` of its logits before they are corrected: of heads that are ``corrected``, such as Domino and XPress.

    Args:
        loss, block: of whole blocks, ``(logits, target_logits, tokens) -> scalar``. weight: of ``block``.
        fades: ``(1 - w) * loss + w * block`` instead, where w falls from ``weight`` to 0 in the course of a training: Domino's curriculum (arXiv 2605.29707). Validation has w = 0.
        rounds: weight of the mean of ``loss`` over the rounds of ``forward.Corrected(rounds=...)``, XPress's consistency (arXiv 2608.02438).
    Raises:
        ValueError: a negative weight, one above 1 that fades, a ``block`` that reads more than logits, a ``loss`` that reads ``progress`` or ``rounds``, or, beside rounds, a confidence; in a call:
            a forward without such logits, or without rounds.
    """

    loss: Callable[..., Tensor]
    block: Callable[..., Tensor]
    weight: float = 1.0
    fades: bool = False
    rounds: float = 0.0
    whole = True

    def __post_init__(self) -> None:
        for name, weight in (("weight", self.weight), ("rounds", self.rounds)):
            if not weight >= 0:
                raise ValueError(f"{name} is {weight}: a weight is at least 0")
        if self.fades and self.weight > 1:
            raise ValueError(f"weight is {self.weight}: a share that fades is at most 1")
        more = set(reads(self.loss)) & ({"progress", "rounds"} | ({"confidence"} if self.rounds else set()))
        for name, found in (("block", reads(self.block)), ("loss", tuple(more))):
            if found:
                raise ValueError(
                    f"{name} reads {found[0]}, which it does not get here: give a loss that does not"
                )

    @property
    def needs_target(self) -> bool:
        return needs_target(self.loss) or needs_target(self.block)

    @property
    def reads(self) -> tuple[str, ...]:
        more = ("progress",) * self.fades + ("rounds",) * bool(self.rounds)
        return tuple(dict.fromkeys((*reads(self.loss), "block", *more)))

    def __call__(
        self,
        logits: Tensor,
        target_logits: Tensor,
        tokens: Tensor,
        *,
        block: Tensor,
        rounds: Sequence[Tensor] | None = None,
        progress: Tensor | float = 1.0,
        **more: Any,
    ) -> Tensor:
        """``logits``, ``target_logits``, ``block`` and each of ``rounds`` ``[B, A, k, V]``, ``tokens`` and what else there is ``[B, A, k]``; ``progress``: the share of the training that is done."""
        if block is None or (self.rounds and rounds is None):
            what = "the logits of a block before it is corrected" if block is None else "rounds"
            raise ValueError(
                f"loss is a {type(self).__name__} and reads {what}: give forward=Corrected(...), with rounds if it reads them"
            )
        kept = {name: more.pop(name) for name in ("kept",) if name in more}
        own = {**kept, **more, **({"block": block} if "block" in reads(self.loss) else {})}
        value = self.loss(logits, target_logits, tokens, **own)
        beside = self.block(block, target_logits, tokens, **kept)
        share: Any = self.weight * (1 - progress) if self.fades else self.weight
        value = (1 - share if self.fades else 1) * value + share * beside
        if self.rounds and rounds is not None:
            again = [self.loss(one, target_logits, tokens, **own) for one in rounds]
            value = value + self.rounds * sum(again[1:], again[0]) / len(again)
        return value
