"""What an enumeration covered, and what it did not: sizes that were asked for, and events that its rounds had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec import tree
from specdec.capabilities import DraftInfo, SelectorInfo
from specdec.decoder import Decoder
from specdec.types import Round


@dataclass(eq=False)
class Scope:
    """What a certificate is about. Everything else is not covered: another vocabulary, longer texts, other parts or settings.

    Attributes:
        vocabulary: tokens of the target. prompts: tokens of each. tokens: new tokens of each row. eos: ids that end a row.
        criteria: how many stopping criteria. parts: the target, the draft, the selector if any, the verifier, the sampling and the executor.
        alone: whether each branch was a batch of its own, because a row's selector looks at the other rows.
        nodes: the most nodes of a row in a round. accepted: the most nodes that one was seen to accept.
        siblings, rejected, empty, mixed, truncated: whether a node had several children; a node was rejected; a row after the prefill had
            no nodes; rows of one round had different trees; a stop cut a block before its end.
    """

    vocabulary: int
    prompts: tuple[int, ...]
    tokens: tuple[int, ...]
    eos: tuple[int, ...] = ()
    criteria: int = 0
    parts: dict[str, str] = field(default_factory=dict)
    alone: bool = False
    nodes: int = 0
    accepted: int = 0
    siblings: bool = False
    rejected: bool = False
    empty: bool = False
    mixed: bool = False
    truncated: bool = False

    @staticmethod
    def of(
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[int],
        eos: Sequence[int],
        criteria: Sequence[Callable[..., Any]],
    ) -> Scope:
        """What is asked for; ``watch`` adds what happens."""
        sizes = tuple(map(len, prompts))
        selector = None if decoder.selecting is None else decoder.selecting.selector
        parts = {
            "target": repr(decoder.target),
            "draft": f"{DraftInfo.of(decoder.draft).name}, length {decoder.length}",
            **({} if selector is None else {"selector": type(selector).__name__}),
            "verifier": decoder.verifying.name,
            "sampling": repr(decoder.sampling),
            "executor": type(decoder.executor).__name__,
        }
        bound = (
            decoder.selecting is not None and decoder.selecting.capacities is not None
        )  # between the rows of a prompt
        alone = selector is not None and (SelectorInfo.of(selector).joint or bound)
        return Scope(decoder.target.vocab_size, sizes, tuple(tokens), tuple(eos), len(criteria), parts, alone)

    def watch(self, round: Round) -> None:
        """Note what a round has."""
        if not round.number:
            return
        proposal, verdict = round.proposal, round.verdict
        size, accepted = proposal.size, verdict.accepted
        self.nodes = max(self.nodes, int(size.max()))
        self.accepted = max(self.accepted, int(accepted.max()))
        chain = tree.is_chain(proposal.parents, size)
        self.siblings |= not bool(chain.all())
        self.rejected |= bool((accepted < size).any())
        self.empty |= bool((size == 0).any())
        self.mixed |= int(size.min()) != int(size.max()) or bool(chain.any()) != bool(chain.all())
        self.truncated |= bool((round.committed <= accepted).any())

    @property
    def covered(self) -> list[str]:
        """What was enumerated, in words."""
        many = "1 prompt" if len(self.prompts) == 1 else f"{len(self.prompts)} prompts"
        many += "" if len(self.prompts) == 1 else ", each alone" if self.alone else " in one batch"
        return [
            f"vocabulary of {self.vocabulary}",
            f"{many}, texts of {_range(self.tokens)} new tokens",
            f"up to {self.nodes} nodes a round, of which up to {self.accepted} accepted",
            *[words for words, here in self._events() if here],
        ]

    @property
    def missing(self) -> list[str]:
        """What could have happened in a run like this one, and did not."""
        missing = [words for words, here in self._events() if not here]
        return missing + (["rows beside other prompts"] if self.alone or len(self.prompts) == 1 else [])

    def _events(self) -> list[tuple[str, bool]]:
        stops = len(self.eos) + self.criteria
        return [
            ("several children of a node", self.siblings),
            ("rejected nodes", self.rejected),
            ("rounds without nodes", self.empty),
            ("rows with different trees in one round", self.mixed),
            (f"{stops} stop rules" if stops else "stop rules", stops > 0),
            ("stops inside blocks", self.truncated),
        ]

    def __str__(self) -> str:
        lines = [f"{kind}: {what}" for kind, what in self.parts.items()]
        lines += ["covered: " + "; ".join(self.covered)]
        if self.missing:
            lines += ["did not occur: " + "; ".join(self.missing)]
        lines += [
            "not covered: larger vocabularies, longer texts, deeper or wider proposals; other parts and settings; arithmetic in less than the "
            "target's precision; the generator's quality (its numbers are taken for independent reals in [0, 1))"
        ]
        return "\n".join(lines)


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
