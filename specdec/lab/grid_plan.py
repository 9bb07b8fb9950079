"""How long a grid measurement will take, estimated in advance from its smallest and its largest point."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil

from specdec.data.prompts import entries
from specdec.lab.clock import seconds
from specdec.lab.grid import BARE_REPEATS, SHORT, WARM, Grid, turns
from specdec.lab.grid_rows import K, Point
from specdec.lab.methods import LEAST_ROWS
from specdec.lab.multipliers import Recording
from specdec.lab.steady import steady

KS = 2.5
"""Block lengths of a method at a point, on average: k = 4 and one or two others."""
SCORING = 6.0
"""Seconds of recording noise-free τ, in prefills of the recorded texts by all models: sampling, k passes, and MagicDec's block starts."""


@dataclass(frozen=True)
class Probe:
    """Measured at one point: tokens of its prompts, seconds to feed them, and mean seconds of a run, including the time before its clock starts."""

    tokens: int
    feed: float
    run: float

    @staticmethod
    def of(grid: Grid, point: Point) -> Probe:
        """Feed a point's prompts, and run plain decoding and SPIRe once each after a warm-up."""
        batch, context = point
        found = []
        feed = seconds(lambda: found.append(grid.methods.groups(batch, context)))
        (groups,) = found
        decoders = [grid.methods.decoder("plain", 0), grid.methods.decoder("spire", K)]
        runs = []
        for decoder in decoders:
            steady(decoder, groups, 1)
            runs.append(seconds(partial(steady, decoder, groups, grid.s.new_tokens)))
        return Probe(max(batch, LEAST_ROWS) * context, feed, sum(runs) / len(runs))


def estimate(
    grid: Grid, recording: Recording, probes: tuple[Probe, Probe] | None = None
) -> tuple[float, float]:
    """Seconds that ``recording.taus`` and ``grid.measure`` will take, within a factor of about 1.5, linear in the tokens of the prompts.

    Args:
        probes: measurements at the grid's smallest and largest point; default: made here.
    """
    s = grid.s
    small, large = probes or (Probe.of(grid, s.points[0]), Probe.of(grid, s.points[-1]))

    def at(tokens: int) -> tuple[float, float]:
        """Seconds of feeding and of a run."""
        share = (
            (tokens - small.tokens) / (large.tokens - small.tokens) if large.tokens > small.tokens else 0.0
        )
        return small.feed + share * (large.feed - small.feed), small.run + share * (large.run - small.run)

    drafts, lengths = len(grid.methods.names) - 1, len(grid.methods.lengths)
    cases = 1 + drafts * min(KS, lengths)
    warm = (2 * s.visits if s.graphs else s.visits + 1) * cases + (drafts * 2 * WARM if lengths > 1 else 0)
    total = 0.0
    for batch, context in s.points:
        feed, run = at(max(batch, LEAST_ROWS) * context)
        repeats = min(max(s.repeats, ceil(SHORT / (cases * run))), turns(s.repeats))
        total += s.visits * feed + (cases * repeats + warm) * run
        if (batch, context) in s.corners:
            total += 2 * cases * run / s.new_tokens * (BARE_REPEATS + 2 * s.visits)
    count = len(entries()[: recording.prompts]) * recording.per_prompt
    recorded = sum(at(count * (context + 4 * recording.positions))[0] for context in s.contexts)
    return SCORING * recorded, total


def minutes(recorded: float, measured: float) -> str:
    """The estimate as text."""
    parts = [f"{part / 60:.1f}" for part in (recorded + measured, recorded, measured)]
    return f"{parts[0]} minutes: {parts[1]} for the noise-free tau, {parts[2]} for the grid"
