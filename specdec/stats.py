"""Measurements of a run, with the library's definitions (others in the literature differ).

A *round* is one pass of one row through draft, target and verifier. The prefill round is not counted. A round is *truncated* when
a stop discarded some of its tokens, or when the end of the row's budget shortened its draft. Truncated rounds are left out of tau.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specdec import tree
from specdec.types import Round


class Record(NamedTuple):
    """The counts of a round as plain lists, which do not keep logits alive."""

    number: int
    request: list[int]
    committed: list[int]
    accepted: list[int]
    size: list[int]
    truncated: list[bool]
    parents: list[list[int]] | None  # None for chains
    path: list[list[int]]
    arm: list[int]
    seconds: dict[str, float]
    lossless: bool = True

    @staticmethod
    def of(round: Round) -> Record:
        proposal, verdict = round.proposal, round.verdict
        chain = not proposal.nodes or bool(tree.is_chain(proposal.parents, proposal.size).all())
        seconds = dict(round.seconds)
        total = seconds.pop("total")
        if round.number == 0:
            seconds = {"prefill": total}
        else:
            other = total - sum(seconds.values())
            seconds["other" if other >= 0 else "overlapped"] = other
        return Record(
            round.number,
            round.context.request.tolist(),
            round.committed.tolist(),
            verdict.accepted.tolist(),
            proposal.size.tolist(),
            round.truncated.tolist(),
            None if chain else proposal.parents.tolist(),
            [] if chain else verdict.path.tolist(),
            round.arm.tolist(),
            seconds,
            round.lossless,
        )


@dataclass
class Stats:
    """Counts over all rows, and seconds by stage.

    Attributes:
        rounds: counted rounds, truncated ones included. full_rounds, full_tokens: without the truncated ones.
        drafted: proposed nodes. accepted: accepted nodes (before a stop discarded some).
        reached, accepted_at: by depth, how often a node of that depth was verified, and how often one was accepted. A position
            is reached when all before it were accepted.
        tokens: committed tokens, including the first of each row, which the prefill gives.
        arms: of a pool, the rounds of each arm by its number (truncated ones included).
        texts: tokens and rounds of each row of a batch, truncated rounds left out, for ``interval``; empty for a single row.
        seconds: by stage: prefill (the draft's too), draft, target, verify, other. ``overlapped`` is negative, the time saved by stages that
            ran at the same time, so that all of them sum to the wall clock.
        lossless: whether every round's verifier declares that its output has the target's distribution.
    """

    rounds: int = 0
    full_rounds: int = 0
    full_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    reached: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    arms: Counter[int] = field(default_factory=Counter)
    texts: list[tuple[int, int]] = field(default_factory=list)
    lossless: bool = True

    @property
    def tau(self) -> float:
        """Block efficiency: tokens a round, bonus included, over full rounds. NaN when there was none."""
        return self.full_tokens / self.full_rounds if self.full_rounds else float("nan")

    @property
    def shown_tau(self) -> str:
        """τ for messages: ``"tau 2.31"``, or why there is none."""
        if self.full_rounds:
            return f"tau {self.tau:.2f}"
        return f"tau n/a ({'all rounds cut short' if self.rounds else 'no round after the prefill'})"

    def interval(self, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
        """The 95 % interval of τ, by a bootstrap over texts: the rounds of one text are alike and count together.

        Args:
            draws, seed: of the bootstrap.
        Raises:
            ValueError: fewer than 5 texts have a round that counts.
        """
        counted = np.array([text for text in self._texts if text[1]])
        if len(counted) < 5:
            raise ValueError(
                f"{len(counted)} texts have rounds that count, too few for an interval: decode at least 5 prompts, or add several stats"
            )
        picks = np.random.default_rng(seed).integers(0, len(counted), (draws, len(counted)))
        tokens, rounds = counted[picks].sum(1).T
        low, high = np.quantile(tokens / rounds, [0.025, 0.975]).tolist()
        return low, high

    @property
    def _texts(self) -> list[tuple[int, int]]:
        return self.texts or [(self.full_tokens, self.full_rounds)] * bool(self.rounds)

    def plot(self) -> Any:
        """A matplotlib figure, which notebooks show: acceptance by position in the block, and seconds by stage.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from specdec.figures import ShownFigure
        except ImportError as missing:
            raise ImportError("plot() needs matplotlib: pip install matplotlib (or use row())") from missing
        figure = ShownFigure(figsize=(8, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        positions = [depth + 1 for depth in sorted(self.reached)]
        left.bar(positions, self.acceptance)
        left.set(
            title=self.shown_tau, xlabel="position in the block", ylabel="accepted, if reached", ylim=(0, 1)
        )
        left.set_xticks(positions)
        stages = [stage for stage in self.seconds if self.seconds[stage] > 0]
        right.barh(stages, [self.seconds[stage] for stage in stages])
        right.invert_yaxis()
        right.set(title="seconds by stage", xlabel="seconds")
        return figure

    @property
    def acceptance(self) -> list[float]:
        """By position in the block: the share of nodes accepted *given that the position was reached*."""
        return [self.accepted_at[d] / self.reached[d] for d in sorted(self.reached)]

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second, all rows together: without the prefill round's tokens and seconds."""
        spent = sum(s for stage, s in self.seconds.items() if stage != "prefill")
        return (self.tokens - self.prefill_tokens) / spent if spent else float("nan")

    def __add__(self, other: Stats) -> Stats:
        """The sums of counts and seconds, to combine several calls (``sum(stats, Stats())``)."""
        if not isinstance(other, Stats):
            return NotImplemented
        made = Stats()
        for name, mine in vars(self).items():
            theirs = vars(other)[name]
            if name == "texts":
                made.texts = self._texts + other._texts
                continue
            if isinstance(mine, bool):
                setattr(made, name, mine and theirs)
            elif isinstance(mine, Counter):
                both = Counter(mine)
                both.update(theirs)  # unlike +, keeps what is negative
                setattr(made, name, both)
            else:
                setattr(made, name, mine + theirs)
        return made

    @staticmethod
    def of(records: list[Record]) -> Stats:
        """Counts and seconds of a whole batch."""
        stats = Stats()
        texts: dict[int, tuple[int, int]] = {}
        for record in records:
            stats.seconds.update(record.seconds)
            for b, request in enumerate(record.request):
                before = stats.full_tokens, stats.full_rounds
                stats._add(record, b)
                tokens, rounds = texts.get(request, (0, 0))
                texts[request] = (
                    tokens + stats.full_tokens - before[0],
                    rounds + stats.full_rounds - before[1],
                )
        stats.texts = list(texts.values())
        return stats

    @staticmethod
    def by_request(records: list[Record], requests: int) -> list[Stats]:
        """Counts of each row, without seconds: the rows of a batch share them."""
        stats = [Stats() for _ in range(requests)]
        for record in records:
            for b, request in enumerate(record.request):
                stats[request]._add(record, b)
        return stats

    def count(self, record: Record) -> None:
        """Add a round's counts, in place, without its seconds and texts."""
        for b in range(len(record.request)):
            self._add(record, b)

    def _add(self, record: Record, b: int) -> None:
        self.tokens += record.committed[b]
        self.lossless &= record.lossless
        if record.number == 0:
            self.prefill_tokens += record.committed[b]
            return
        accepted, size = record.accepted[b], record.size[b]
        self.rounds += 1
        self.arms[record.arm[b]] += 1
        self.drafted += size
        self.accepted += accepted
        if not record.truncated[b]:
            self.full_rounds += 1
            self.full_tokens += accepted + 1
        if record.parents is None:
            reached: Iterable[int] = range(min(accepted + 1, size))
        else:
            asked = set(record.parents[b][:size])
            reached = (d for d, node in enumerate([-1, *record.path[b][:accepted]]) if node in asked)
        for d in reached:  # Counter.update takes longer for a few
            self.reached[d] += 1
        for d in range(accepted):
            self.accepted_at[d] += 1

    def row(self) -> dict[str, Any]:
        """A flat dictionary of figures, with units in the names."""
        return {
            "lossless": self.lossless,
            "tau": self.tau,
            "tokens_per_second": self.tokens_per_second,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_by_position": self.acceptance,
            **{f"{stage}_seconds": s for stage, s in sorted(self.seconds.items())},
        }
