"""Tokens that a grammar forces, proposed without a model (jump-forward decoding: SGLang, Zheng et al., arXiv 2312.07104, on compressed finite state machines).

Where a grammar allows one token only, as for the keys of a JSON schema without whitespace, a draft need not ask a model for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.capabilities import DraftInfo, DraftPart
from specdec.drafts.model import Model, as_draft
from specdec.drafts.none import NoDraft
from specdec.grammars import masks
from specdec.kernels.device import to_device
from specdec.protocols import Draft, LanguageModel
from specdec.rng import Key, Rekeyed, Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Round


@dataclass(frozen=True)
class JumpForward:
    """Proposes what the row's grammar forces, then what ``draft`` proposes after it. Without a grammar it proposes what ``draft`` does, at most ``most``
    tokens deep. ``Paced`` treats forced tokens as drafted ones.

    A token is forced if the grammar allows no other. A grammar may instead have a method ``forced(state)`` that returns the tokens that will follow, certainly or
    probably; llguidance's returns a forced text as the tokenizer would split it. The target verifies every proposed token, so with a lossless verifier the output
    keeps the target's distribution under the grammar.

    Args:
        draft: a draft, or a model. Some drafts cannot be called for a text that is not committed: heads, for example, and others that read the target's
            activations or cache or are not ``DraftInfo.revocable``. Such a draft drafts only for rows in which fewer than two tokens are forced.
        most: the longest path that ``draft`` proposes, so that a large ``length`` of the decoder leaves room for forced tokens; ``None``: what is left.
    Raises:
        TypeError: ``most`` is no whole number. ValueError: ``most`` is below 1, or ``draft`` is a pool.
    """

    draft: Draft[Any] = field(default_factory=NoDraft)
    most: int | None = None
    grammar: Any = field(default=None, repr=False)
    vocab_size: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", as_draft(self.draft, "draft"))
        if self.most is not None:
            at_least(1, "most", self.most, "give the most tokens of the draft, or None")
        if self.part.arms is not None:
            raise ValueError("draft is a pool: give one of its arms, or a pool of JumpForward drafts")

    @staticmethod
    def example(model: LanguageModel) -> JumpForward:
        """A model after what is forced (for the contract tests)."""
        return JumpForward(Model(model))

    @cached_property
    def part(self) -> DraftPart:
        """The draft with its capabilities."""
        return DraftPart.of(self.draft)

    @cached_property
    def _goes_on(self) -> bool:
        """Whether the draft can be called for a text with forced tokens at its end."""
        return self.part.info.revocable and not self.part.reads_target

    @property
    def info(self) -> DraftInfo:
        inner = self.part.info
        return replace(inner, name=f"jump forward, {inner.name}", nodes=self._nodes, longest=None)

    def _nodes(self, length: int) -> int:
        inner = self.part.info.nodes
        return max(n + inner(self._left(length - n)) for n in range(length + 1))

    def _left(self, length: int) -> int:
        """The longest path of the draft, where ``length`` tokens are left."""
        return min(
            length, *(most for most in (self.most, self.part.info.longest, length) if most is not None)
        )

    def bind(self, target: LanguageModel, sampling: Sampling) -> JumpForward:
        bound = self.part.bound(target, sampling)
        return replace(self, draft=bound, grammar=sampling.grammar, vocab_size=target.vocab_size)

    def init(self, context: Context, target_cache: Any) -> Any:
        return self.draft.init(context, target_cache)

    def propose(self, state: Any, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Any]:
        found = masks.forced(self.grammar, context, budget.tolist(), self.vocab_size)
        count = torch.tensor([len(tokens) for tokens in found.tokens])
        left = (budget - count).where(~found.ended, 0)
        if not self._goes_on:
            count = count.where(count > 1, 0)
            left = budget.where(count == 0, 0)
        left = left.clamp(max=self._left(int(budget.max())))
        if not bool(count.any()):
            return self.part.propose(state, context, left, rng)
        tokens = torch.zeros(context.batch, int(count.max()), dtype=torch.long)
        for row, some, n in zip(tokens, found.tokens, count.tolist()):
            row[:n] = torch.tensor(some[:n], dtype=torch.long)
        if not self._goes_on:
            after, state = self.part.propose(state, context, left, rng)
            return _after(tokens, count, after), state
        after, state = self.part.propose(state, context.append(tokens, count), left, _Deeper(rng, count))
        return _after(tokens, count, after), state

    def observe(self, state: Any, round: Round) -> Any:
        return self.draft.observe(state, round)

    def select(self, state: Any, rows: Tensor) -> Any:
        return self.draft.select(state, rows)

    def __getattr__(self, name: str) -> Any:
        """The optional methods that ``draft`` has."""
        if name not in ("empty", "prepare", "follow", "join", "forget", "check_length"):
            raise AttributeError(name)
        method = getattr(self.draft, name)
        return (lambda length: method(self._left(length))) if name == "check_length" else method


class _Deeper(Rekeyed):
    """The decisions of a block whose first ``count [B]`` tokens are forced: the draft's begin after them, under the keys of their depths in the block.

    So no key decides twice, also where a token that was said to be forced is rejected, and the next block begins before the place at which the draft began.
    """

    def __init__(self, rng: Rng, count: Tensor):
        super().__init__(rng)
        self.count = count

    def select(self, rows: Tensor) -> _Deeper:
        return _Deeper(self.rng.select(rows), self.count[rows])

    def rekeyed(self, key: Key) -> Key:
        count = self.count.view(-1, *[1] * (key.at.dim() - 1))
        return key._replace(at=key.at - count, depth=key.depth + count)


def _after(tokens: Tensor, count: Tensor, proposal: Proposal) -> Proposal:
    """The chains ``tokens[b, :count[b]]``, each followed by its row of ``proposal``."""
    size = count + proposal.size
    B, N, device = len(size), int(size.max()), proposal.tokens.device
    if not bool(proposal.size.any()):
        return Proposal.chain(tokens, count)
    number = torch.arange(N).expand(B, N)
    own = number - count[:, None]  # the number in ``proposal``, negative for forced tokens
    at = own.clamp(0, proposal.nodes - 1)
    first = to_device(own < 0, device)
    padded = to_device(torch.nn.functional.pad(tokens, (0, N)), device)[:, :N]
    made = Proposal(
        torch.where(first, padded, proposal.tokens.gather(1, to_device(at, device))),
        torch.where(own < 0, number - 1, proposal.parents.gather(1, at) + count[:, None]),
        size,
    )
    if proposal.probs is None:
        return made
    q, F = proposal.probs, tokens.shape[1]
    certain = torch.zeros(B, F, q.shape[-1], dtype=q.dtype, device=device)
    certain.scatter_(2, to_device(tokens, device)[..., None], 1)
    source = torch.where(own < 0, number, F + proposal.sources().gather(1, at))
    return replace(made, probs=torch.cat([certain, q], 1), provenance=proposal.provenance, source=source)
