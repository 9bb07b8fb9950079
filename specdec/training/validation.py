"""Validation of a draft on held-out text: the loss, the probability of acceptance by depth, and τ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.heads.model import HeadModel
from specdec.training.forward import Drafted, drafted
from specdec.training.losses import ABSENT, acceptance, needs_target, reads
from specdec.training.states import Batch


class Judge:
    """Compares blocks of a draft with the target's law and with the text.

    Args:
        draft: if it has a reduced vocabulary, the loss gets the target's logits and the tokens of that vocabulary, so that p is renormalised.
        loss: as ``train``'s. law: final hidden states ``[..., E]`` -> the target's logits ``[..., V]``. compile: torch.compile of the loss. outputs: V, if the
            draft may have ids after the target's, whose logits are left out.
    """

    def __init__(
        self,
        draft: Any,
        loss: Any,
        law: Callable[[Tensor], Tensor],
        compile: bool = False,
        outputs: int | None = None,
    ):
        self.outputs = outputs
        reduced = isinstance(draft, HeadModel) and draft.d2t is not None
        self.ids: Tensor | None = draft.ids if reduced else None
        self.needs, self.reads = needs_target(loss), reads(loss)
        self.loss, self.law = loss, law
        if self.ids is not None:
            self.numbers = torch.full((draft.vocab_size,), ABSENT, device=self.ids.device)
            self.numbers[self.ids] = torch.arange(len(self.ids), device=self.ids.device)
        self.value = torch.compile(self._value, dynamic=False) if compile else self._value

    def __call__(self, made: Drafted, batch: Batch, progress: float = 1.0) -> Tensor:
        """The loss of blocks, with gradients; ``progress`` is the share of the training that is done."""
        return self._compared(self.value, self._fitted(made), batch, kept(batch, made), progress)

    def _fitted(self, made: Drafted) -> Drafted:
        return made if self.outputs is None else made._replace(logits=made.logits[..., : self.outputs])

    def _compared(
        self,
        value: Callable[..., Tensor],
        made: Drafted,
        batch: Batch,
        counted: Tensor | None,
        progress: float = 1.0,
    ) -> Tensor:
        tokens = _rows(batch.tokens, made.at + 1)
        tokens = tokens if self.ids is None else self.numbers.to(tokens.device)[tokens]
        final = _rows(batch.final, made.at) if self.needs else batch.final
        more = {name: value for name, value in made._asdict().items() if name in self.reads}
        if "progress" in self.reads:
            more["progress"] = torch.full((), progress, device=tokens.device)
        if counted is None:
            return value(made.logits, final, tokens, more)
        return value(made.logits, final, tokens.where(counted, ABSENT), {**more, "kept": counted})

    def _value(self, logits: Tensor, final: Tensor, tokens: Tensor, more: dict[str, Any]) -> Tensor:
        logits = logits.float()
        wanted = self.law(final).float() if self.needs else logits
        for name in ("confidence", "block"):
            if more.get(name) is not None:
                more = {**more, name: more[name].float()}
        if more.get("rounds") is not None:
            more = {**more, "rounds": [one.float() for one in more["rounds"]]}
        reduced = self.ids is not None and self.needs
        if "accepted" in self.reads:
            more = {**more, "accepted": self.accepted(logits.detach(), wanted) if reduced else None}
        wanted = wanted[..., self.ids] if reduced else wanted
        return self.loss(logits, wanted, tokens, **more)

    def accepted(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """``[...]`` the probability of acceptance; ``wanted [..., V]`` are the target's logits over its whole vocabulary."""
        if self.ids is None:
            return acceptance(logits, wanted)
        return logits.softmax(-1).minimum(wanted.softmax(-1)[..., self.ids]).sum(-1)

    @torch.no_grad()
    def validate(
        self, draft: Any, held: Any, forward: Any, batch: int, device: torch.device, precision: torch.dtype
    ) -> dict[str, float]:
        """The mean loss; of whole blocks of natural text the mean acceptance, that of each depth, and ``τ = 1 + sum_j prod_{i <= j} a_i``.

        Acceptance is at temperature 1 and given that the tokens before are the text's. A forward without ``k`` has blocks of 4 positions. If the
        data has a mask, blocks that lie wholly in it count.

        Raises:
            ValueError: no block lies in the mask.
        """
        totals, count = torch.zeros(0, dtype=torch.float64), 0
        draft.eval()
        for start in range(0, len(held), batch):
            which = range(start, min(start + batch, len(held)))
            states = held.take(which).to(device, precision)
            made = self._fitted(drafted(forward, draft, states, None))
            if not hasattr(forward, "k"):  # [B, T, 1, V]
                whole = made.logits.shape[1] // 4 * 4
                logits, at = (x[:, :whole].reshape(len(x), -1, 4, *x.shape[3:]) for x in made[:2])
                made = Drafted(logits, at)
            a = self.accepted(made.logits.float(), self.law(_rows(states.final, made.at)).float())
            weight, inside = len(which), kept(states, made)
            if inside is not None:
                inside = inside.all(-1, keepdim=True)  # whole blocks, as in decoding
                a, weight = a[inside[..., 0]], int(inside.sum())
                inside = inside.expand(made.at.shape)
                if not weight:
                    continue
            tau = 1 + a.cumprod(-1).sum(-1).mean()
            loss = self._compared(self._value, made, states, inside)
            depths = a.mean(tuple(range(a.dim() - 1)))
            row = torch.stack([loss, a.mean(), tau, *depths]).double().cpu()
            totals = totals + weight * row if len(totals) else weight * row
            count += weight
        draft.train()
        if not count:
            raise ValueError(
                "validation: no block lies wholly in the tokens that its mask shows: give more text, or a smaller k"
            )
        names = ["validation_loss", "acceptance", "tau"]
        names += [f"acceptance_{n + 1}" for n in range(len(totals) - len(names))]
        return dict(zip(names, (totals / count).tolist()))


def kept(batch: Batch, made: Drafted) -> Tensor | None:
    """``[B, A, k]``: which tokens of blocks count, those before the first outside of the batch's mask; ``None``: all."""
    if batch.mask is None:
        return None
    return _rows(batch.mask, made.at + 1).long().cumprod(-1).bool()


def _rows(values: Tensor, at: Tensor) -> Tensor:
    """``values [B, T, ...]`` at positions ``[B, A, k]``."""
    return values[torch.arange(len(values), device=values.device)[:, None, None], at]
