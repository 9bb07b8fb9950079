"""Live decoding after a trace's prompts, for drafts that cannot be replayed: counted rounds in place of expected ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.audit.rounds import Efficiency
from specdec.builder import decoder
from specdec.capabilities import DraftInfo
from specdec.drafts.coerce import ModelLike, as_model
from specdec.lab.traces import Trace
from specdec.parts import DraftLike, as_draft
from specdec.protocols import Verifier
from specdec.sampling import Sampling
from specdec.types import Round
from specdec.verifiers.rejection import Rejection


@dataclass(frozen=True, eq=False)
class Simulation:
    """Counts of live decoding after the prompts of a trace's ``C`` texts. ``compare`` and ``decide`` take it beside replays and say that it is
    simulated.

    Attributes:
        name, k: as for ``Replay``. lossless: whether the verifier keeps the target's distribution. counted: ``tokens, rounds [C]`` and, by depth, ``reached, accepted [C, k]``, sums of all repeats.
    """

    trace: Trace
    name: str
    k: int
    counted: Efficiency
    lossless: bool = True
    exact = False

    def __len__(self) -> int:
        return len(self.trace)

    def __repr__(self) -> str:
        return f"Simulation({self.name}, k = {self.k}: tau {self.counted.tau:.3f} on {len(self)} prompts)"

    @property
    def tau(self) -> float:
        """Tokens a round, over all prompts."""
        return self.counted.tau

    def efficiency(self, k: int | None = None) -> Efficiency:
        """The counts.

        Raises:
            ValueError: ``k`` is not the simulated one.
        """
        if k not in (None, self.k):
            raise ValueError(f"k is {k}, and blocks of {self.k} were simulated: simulate with k={k}")
        return self.counted

    def sums(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """As for ``Replay``."""
        made = self.efficiency(k)
        both = torch.stack([made.tokens, made.rounds])
        return both, both


def simulate(
    trace: Trace,
    draft: DraftLike,
    target: ModelLike,
    k: int | None = None,
    repeats: int = 4,
    verifier: Verifier | None = None,
    sampling: Sampling | None = None,
    name: str | None = None,
    batch: int = 16,
    seed: int = 1,
) -> Simulation:
    """Decode live after every prompt of a trace and count rounds; unlike a replay this has the noise of the draft's draws.

    For what ``replay`` refuses: drafts with a memory of rejected tokens, trees whose shape depends on what was drawn. The texts are other samples
    of the target, so τ agrees with a replay's in the mean. As in a replay, the rounds that count are those that start among a
    text's first positions.

    Args:
        trace, draft, k, target, sampling, name: as for ``replay``. repeats: texts decoded after each prompt. verifier: default ``Rejection()``.
    """
    model, k = as_model(target, "target"), trace.k if k is None else k
    trace.check(model)
    at_least(1, "k", k, "give at least 1")
    at_least(1, "repeats", repeats, "give at least 1")
    part, new_tokens = as_draft(draft, "draft"), trace.meta["new_tokens"]
    built = (
        decoder(model)
        .sampling(trace.sampling(sampling))
        .draft(part, k)
        .verifier(verifier or Rejection())
        .build()
    )
    if built.drafting.by_request:
        raise ValueError(
            f"draft {built.drafting.info.name!r} has sampling settings for each request, and requests are numbered from 0 in every batch: give it one "
            "for all"
        )
    C = len(trace)
    tokens, rounds = torch.zeros(2, C, dtype=torch.float64)
    reached, accepted = torch.zeros(2, C, k, dtype=torch.float64)
    for repeat in range(repeats):
        for start in range(0, C, batch):
            some = range(start, min(C, start + batch))
            prompts = [text.ids[: text.prompt] for text in trace.texts[start : start + batch]]

            def count(round: Round, some: range = some) -> None:
                _count(round, some, new_tokens, (tokens, rounds, reached, accepted))

            seeds = [seed + 1_000_003 * (repeat + 1) + i for i in some]
            ends: Any = tuple(trace.meta["ends"])
            built.generate(prompts, 1 + new_tokens + k, seed=seeds, eos_token_id=ends, on_round=count)
    counted = Efficiency(tokens, rounds, reached, accepted)
    return Simulation(trace, name or DraftInfo.of(part).name, k, counted, built.verifying.lossless)


def _count(round: Round, some: range, new_tokens: int, sums: tuple[Tensor, ...]) -> None:
    """Add the rows of a round that starts among the first positions."""
    tokens, rounds, reached, accepted = sums
    if not round.number:
        return
    started = round.context.length - round.context.prompt_length - 1
    for b in (started < new_tokens).nonzero()[:, 0].tolist():
        c, taken = some[int(round.context.request[b])], int(round.verdict.accepted[b])
        tokens[c] += int(round.committed[b])
        rounds[c] += 1
        reached[c, : min(taken + 1, int(round.proposal.size[b]), reached.shape[1])] += 1
        accepted[c, :taken] += 1
