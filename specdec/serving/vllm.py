"""Drafts that read ids only, as a proposer of vLLM's ``custom_class`` (vllm#39487): vLLM decodes, and a draft of this library proposes.

``speculative_config={"method": "custom_class", "model": "specdec.serving.vllm.Proposer", "num_speculative_tokens": 4}``. Another draft is a subclass in a module
of one's own, ``class Mine(Proposer): draft = Suffix()``, and several drafts behind a selector are one of ``SelectingProposer``. Written to the interface
that vLLM documents, and not run in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec import tree
from specdec.arm_policy import Arm
from specdec.capabilities import DraftPart, SelectorInfo
from specdec.cost.arms import ArmCosts
from specdec.drafts.ngram import NGram
from specdec.drafts.suffix import Suffix
from specdec.protocols import Draft, Leaves, Selector
from specdec.rng import Philox
from specdec.selectors import UCB1
from specdec.types import Context, Feedback


class Proposer:
    """Proposes what ``draft`` proposes for each request's ids, afresh in every call, since vLLM does not say which request a row is.

    Args:
        vllm_config: vLLM's; ``speculative_config.num_speculative_tokens`` and ``model_config.max_model_len`` are read.
    Attributes:
        draft: of the class; it must choose its tokens without randomness, because vLLM verifies them as such.
    Raises:
        ValueError: the draft reads the target.
    """

    draft: ClassVar[Draft[Any]] = NGram()

    def __init__(self, vllm_config: Any):
        self.length = int(vllm_config.speculative_config.num_speculative_tokens)
        self.limit = int(vllm_config.model_config.max_model_len)
        self.parts = [_of_ids(draft) for draft in self._drafts()]

    def _drafts(self) -> list[Draft[Any]]:
        return [type(self).draft]

    def _choose(self, context: Context, budget: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row, the number of its draft (-1: none) and how many tokens it may propose; ``context.request`` has vLLM's rows."""
        return torch.zeros_like(budget), budget

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Up to ``num_speculative_tokens`` ids for each request.

        Args:
            sampled_token_ids: new ids of each request; without any (a prompt that is not read yet) nothing is proposed.
            num_tokens_no_spec: ``[B]`` tokens of each request, the new ones included. token_ids_cpu: ``[B, L]`` their ids.
        Raises:
            ValueError: the draft proposed a tree, or tokens that it sampled.
        """
        out: list[list[int]] = [[] for _ in sampled_token_ids]
        lengths = [int(n) for n in num_tokens_no_spec]
        rows = [b for b, new in enumerate(sampled_token_ids) if len(new) and 0 < lengths[b] < self.limit]
        if not rows:
            return out
        context = Context.of([[int(i) for i in token_ids_cpu[b][: lengths[b]]] for b in rows])
        context = replace(context, request=torch.tensor(rows))
        budget = torch.tensor([min(self.length, self.limit - lengths[b]) for b in rows])
        chosen, budget = self._choose(context, budget)
        for number, part in enumerate(self.parts):
            mine = (chosen == number).nonzero()[:, 0]
            for row, ids in zip(mine.tolist(), _chains(part, context.select(mine), budget[mine])):
                out[rows[row]] = ids
        return out

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """There is no model to load."""


class Sent(NamedTuple):
    """What a request had in the last call: its row and ids ``[L]``, the arm that was chosen (-1: none) and the number of tokens that it proposed."""

    row: int
    ids: Any
    arm: int
    size: int


class SelectingProposer(Proposer):
    """Several drafts, one of which a selector chooses for each request and call.

    A row is the request whose ids it goes on with, by no more tokens than were proposed and one. How many there are is what the selector learns from.

    Attributes:
        arms: of the class, name -> a draft, ``Arm(draft, length)``, or ``None``: propose nothing. selector: of the class, from ``specdec.selectors``.
        token_cost: of the class, the seconds of verifying one more token, in steps of the target. At 0 proposing nothing is never better.
    Raises:
        ValueError: a draft reads the target, there are no arms, or the selector learns from rewards of all arms, or is made for another number of
            arms.
    """

    arms: ClassVar[Mapping[str, Any]] = {"ngram": NGram(), "suffix": Suffix(), "none": None}
    selector: ClassVar[Selector[Any]] = UCB1(pool="global")
    token_cost: ClassVar[float] = 0.0

    def __init__(self, vllm_config: Any):
        super().__init__(vllm_config)
        arms = [arm if isinstance(arm, Arm) else Arm(arm) for arm in self.arms.values()]
        wanted = SelectorInfo.of(self.selector)
        if not arms or wanted.full_information or wanted.arms not in (None, len(arms)):
            raise ValueError(
                f"selector {self.selector!r} cannot choose among the {len(arms)} arms {', '.join(self.arms)}: give arms, and a selector of that many "
                "that learns from the arm that it chose, such as UCB1"
            )
        drawn = [arm.draft is not None for arm in arms]
        self.which = torch.tensor([sum(drawn[:a]) if drawn[a] else -1 for a in range(len(arms))])
        self.lengths = torch.tensor(
            [min(arm.length or self.length, self.length) * d for arm, d in zip(arms, drawn)]
        )
        self.costs = ArmCosts((self.token_cost,) * len(arms))
        self.state = self.selector.init(len(arms))
        self.open: dict[int, Sent] = {}
        self.requests: list[int] = []
        self.met = 0

    def _drafts(self) -> list[Draft[Any]]:
        drafts = [arm.draft if isinstance(arm, Arm) else arm for arm in self.arms.values()]
        return [draft for draft in drafts if draft is not None]

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """As ``Proposer.propose``."""
        texts = [np.array(ids[: int(n)]) for ids, n in zip(token_ids_cpu, num_tokens_no_spec)]
        self._recognise(texts[: len(sampled_token_ids)])
        self.chosen: dict[int, int] = {}
        out = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings)
        self.open = {
            request: Sent(row, texts[row], self.chosen.get(row, -1), len(out[row]))
            for row, request in enumerate(self.requests)
        }
        return out

    def _recognise(self, texts: list[Any]) -> None:
        """Set the ``requests`` of the rows; learn from those that went on, and let go of those that left."""
        left, self.requests = dict(self.open), []
        gone_on: list[tuple[int, int, int, int]] = []
        for row, ids in enumerate(texts):
            fits = (request for request, sent in left.items() if _goes_on(sent, ids))
            request = min(fits, key=lambda request: left[request].row != row, default=self.met)
            self.requests.append(request)
            if request == self.met:
                self.met += 1
                continue
            sent = left.pop(request)
            if sent.arm >= 0 and len(ids) > len(sent.ids):
                gone_on.append((request, sent.arm, len(ids) - len(sent.ids), sent.size))
        if gone_on:
            at, arm, tokens, drafted = torch.tensor(gone_on).T
            reward = tokens / (1 + self.length)
            seconds = self.costs.seconds(arm, drafted)
            feedback = Feedback(at, arm, tokens, drafted, seconds, reward)
            self.state = self.selector.update(self.state, feedback)
        if left and isinstance(self.selector, Leaves):
            self.state = self.selector.leave(self.state, torch.tensor(list(left)))

    def _choose(self, context: Context, budget: Tensor) -> tuple[Tensor, Tensor]:
        requests = torch.tensor([self.requests[row] for row in context.request.tolist()])
        room = torch.full((len(self.which),), context.batch)
        asked = replace(context, request=requests)
        arm, _, self.state = self.selector.select(self.state, asked, room, Philox(requests))
        self.chosen = dict(zip(context.request.tolist(), arm.tolist()))
        return self.which[arm], torch.minimum(budget, self.lengths[arm])


def _goes_on(sent: Sent, ids: Any) -> bool:
    """Whether ``ids`` are those of a request some tokens later, as many as its proposal allows."""
    old = len(sent.ids)
    return old <= len(ids) <= old + sent.size + 1 and bool((ids[:old] == sent.ids).all())


def _of_ids(draft: Any) -> DraftPart:
    part = DraftPart.of(draft)
    if part.reads_target:
        raise ValueError(
            f"draft {part.info.name!r} reads the target's activations or cache, which vLLM does not pass: give a draft of ids, such as NGram"
        )
    return part


def _chains(part: DraftPart, context: Context, budget: Tensor) -> list[list[int]]:
    """What a draft proposes for each row of ``context``."""
    if not context.batch or not int(budget.max()):
        return [[] for _ in range(context.batch)]
    state = part.draft.init(context, None)
    proposal, _ = part.propose(state, context, budget, Philox(torch.zeros_like(budget)))
    if proposal.probs is not None or not bool(tree.is_chain(proposal.parents, proposal.size).all()):
        raise ValueError(
            f"draft {part.info.name!r} proposed sampled tokens or a tree, which vLLM would verify wrongly: give a draft of chains chosen "
            "without randomness, such as NGram"
        )
    return [ids[:size] for ids, size in zip(proposal.tokens.tolist(), proposal.size.tolist())]
