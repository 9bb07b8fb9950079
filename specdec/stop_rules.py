"""When a row ends: budgets, end-of-sequence ids, stop strings and Hugging Face stopping criteria, token by token.

A block of accepted tokens is cut at the first token that ends the row: nothing after a stop is ever committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import name_of
from specdec.texts import PromptEnd
from specdec.types import Context, Verdict


@dataclass(frozen=True, eq=False)
class StopRules:
    """Stop rules for all requests of one ``generate`` call, or of one stream.

    Attributes:
        max_length: ``[requests]`` prompt plus budget. eos: ids that end a row (they are kept, as in transformers).
        stop_strings: texts that end a row as soon as the text that its ids add to the prompt's contains them; needs ``tokenizer``.
        criteria: transformers ``StoppingCriteria`` or functions ``(ids [1, l], scores) -> bool``, evaluated after every token.
        reasons: request -> why it ended. cancelled: request -> whether it ends now, asked after every round.
        own: request -> its rules, which stand in place of ``eos``, ``stop_strings`` and ``criteria``.
    """

    max_length: Tensor
    eos: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    criteria: tuple[Callable[..., Any], ...] = ()
    tokenizer: Any = None
    reasons: dict[int, str] = field(default_factory=dict)
    cancelled: dict[int, Callable[[], bool]] = field(default_factory=dict)
    own: dict[int, StopRules] = field(default_factory=dict)

    def room(self, context: Context) -> Tensor:
        """``[B]`` tokens that each row may still commit."""
        most = self.max_length.numpy()[context.request.numpy()]
        return torch.from_numpy(most - context.length.numpy())

    def apply(self, context: Context, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """``committed [B]``, how many tokens of the block to commit, and ``finished [B]``."""
        room = self.room(context).numpy()
        committed = np.minimum(verdict.accepted.numpy() + 1, room)
        why: dict[int, str] = dict.fromkeys((committed == room).nonzero()[0].tolist(), "length")
        own: dict[int, StopRules] = {}  # by row
        if self.own:
            own = {b: self.own[r] for b, r in enumerate(context.request.tolist()) if r in self.own}
        if self.eos:
            tokens = verdict.tokens.numpy()
            hit = np.isin(tokens, self.eos) if len(self.eos) > 1 else tokens == self.eos[0]
            hit &= np.arange(tokens.shape[1]) < committed[:, None]
            for b in hit.any(1).nonzero()[0].tolist():
                if b not in own:
                    committed[b] = int(hit[b].argmax()) + 1
                    why[b] = "eos"
        for b, rules in own.items():
            block = verdict.tokens[b, : int(committed[b])].tolist()
            end = next((n for n, token in enumerate(block, 1) if token in rules.eos), None)
            if end is not None:
                committed[b], why[b] = end, "eos"
        for b in range(context.batch) if self._scans else own:
            rules = own.get(b, self)
            if not rules._scans:
                continue
            prompt, count = int(context.prompt_length[b]), int(committed[b])
            stop = rules._scan(context.row(b), prompt, verdict.tokens[b], count)
            if stop is not None and (stop[0] < count or why.get(b) != "eos"):
                committed[b], why[b] = stop
        if self.cancelled:
            for b, request in enumerate(context.request.tolist()):
                if b not in why and request in self.cancelled and self.cancelled[request]():
                    why[b] = "cancelled"
        finished = torch.zeros(context.batch, dtype=torch.bool)
        for b, reason in why.items():
            finished[b] = True
            self.reasons[int(context.request[b])] = reason
        return torch.from_numpy(committed), finished

    def end_at(self, request: int, ends: Iterable[int]) -> None:
        """Let a request also end at the tokens ``ends``, those of its grammar."""
        rules = self.own.get(request, self)
        new = [token for token in ends if token not in rules.eos]
        if new:
            self.own[request] = replace(rules, eos=(*rules.eos, *new), own={})

    @property
    def _scans(self) -> bool:
        """Whether a row's tokens are looked at one by one."""
        return bool(self.stop_strings or self.criteria)

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that a text does not show."""
        return frozenset(special_tokens(self.tokenizer))

    def _scan(self, ids: list[int], prompt: int, block: Tensor, count: int) -> tuple[int, str] | None:
        # A token has at least one byte.
        reach = max((len(s.encode()) for s in self.stop_strings), default=0) + 4
        recent = (i for i in islice(reversed(ids), len(ids) - prompt) if i not in self._special)
        shown = list(islice(recent, reach))[::-1] if self.stop_strings else []
        near = bool(self.stop_strings) and len(shown) < reach  # of later tokens the prompt is out of reach
        before = PromptEnd.of(self.tokenizer, ids[:prompt]) if near else None
        for n, token in enumerate(block[:count].tolist(), 1):
            ids.append(token)
            if self.stop_strings and token not in self._special:
                shown.append(token)
                if before is not None and len(shown) <= reach:
                    text = before.added(shown)
                else:
                    text = self.tokenizer.decode(shown[-reach:], skip_special_tokens=True)
                if any(s in text for s in self.stop_strings):
                    return n, "stop_string"
            for criterion in self.criteria:
                if _yes(criterion, criterion(torch.tensor([ids]), None)):
                    return n, "criteria"
        return None


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> name of the tokens that decoding with ``skip_special_tokens`` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {i: token.content for i, token in added.items() if token.special}
    ids, names = (getattr(tokenizer, f"all_special_{what}", ()) for what in ("ids", "tokens"))
    return found | dict(zip(ids, names))


def _yes(criterion: Callable[..., Any], said: Any) -> bool:
    """What a criterion said; raises TypeError if it is no truth value."""
    try:
        return bool(torch.as_tensor(said).all())
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"stopping_criteria: {name_of(criterion)} returned {said!r}: return a bool, or a bool tensor"
        ) from error
