"""Cuts the rows of a verification pass into fragments by a cost model: request decomposition (SPIN, section 2).

The rows' lengths form a skyline. It is covered by *blocks*, neighbouring rows times a range of slots, each of which is one batched
call on a view: nothing is copied. Inside a block, rows that end below its top are masked (padding); longer rows continue in blocks
above, and the parts are merged by their log-sum-exps (``merge``). Fragments may differ in size. The search includes the single
padded block, the packed backend's blocks, and the best cover without cuts, so the chosen cover is never predicted slower than these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from specdec.kernels.attention.plan import mostly_padding

if TYPE_CHECKING:
    from specdec.kernels.attention.costs import CostModel

CUTS = 4  # heights tried for a first cut
DEPTH = 2  # the most cuts above each other


class Block(NamedTuple):
    """Rows ``r0:r1`` over slots ``low:high``; ``above``: blocks that continue some of the rows."""

    r0: int
    r1: int
    low: int
    high: int
    above: tuple[Block, ...] = ()

    def walk(self) -> Iterator[Block]:
        """This block and all above it."""
        yield self
        for block in self.above:
            yield from block.walk()


@dataclass(frozen=True)
class Fragments:
    """A cover of a batch, and its predicted time for one layer.

    Attributes:
        blocks: those at the bottom; each row is in one of them. lengths: ``[R]`` slots of each row. queries: ``[R]``.
        seconds: predicted. padded, packed: predicted seconds of these backends.
    """

    blocks: tuple[Block, ...]
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    seconds: float
    padded: float
    packed: float

    @property
    def calls(self) -> int:
        return sum(1 for _ in self.walk())

    @property
    def cut(self) -> bool:
        """Whether any row is in more than one block."""
        return any(block.above for block in self.blocks)

    def walk(self) -> Iterator[Block]:
        """All blocks."""
        for block in self.blocks:
            yield from block.walk()

    def slots(self) -> int:
        """Row-slots that are computed, padding included."""
        return sum((b.r1 - b.r0) * (b.high - b.low) for b in self.walk())

    def show(self, width: int = 48) -> str:
        """A line for each block, drawn over its slots, and the predicted times."""
        top = max(b.high for b in self.walk())
        lines = []
        for b in self.walk():
            first, last = b.low * width // top, max(b.high * width // top, b.low * width // top + 1)
            rows = f"row {b.r0}" if b.r1 == b.r0 + 1 else f"rows {b.r0}-{b.r1 - 1}"
            bar = " " * first + "█" * (last - first)
            lines.append(f"{rows:>12}  slots {b.low:>6}:{b.high:<6} |{bar:<{width}}|")
        work, needed = self.slots(), sum(self.lengths)
        lines.append(
            f"{self.calls} calls, {work / max(needed, 1) - 1:.0%} padding, {1e3 * self.seconds:.3g} ms predicted "
            f"(padded {1e3 * self.padded:.3g}, packed {1e3 * self.packed:.3g})"
        )
        return "\n".join(lines)

    __str__ = show


def decompose(
    lengths: Sequence[int],
    queries: int | Sequence[int],
    model: CostModel,
    *,
    lows: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    fragment: int | None = None,
    cut: bool = True,
) -> Fragments:
    """The cheapest cover found; deterministic.

    Args:
        lengths: ``[R]`` slots of each row, those of the new queries included.
        queries: of each row. Rows share a block only if they have equally many.
        model: the cost of calls.
        lows: ``[R]`` no query sees slots below (a sliding window); by default 0.
        rows: ``[R]`` buffer rows; by default 0, 1, ... Rows share a block only if they are neighbours.
        fragment: cut each row into fragments of at most this many slots instead, at any cost.
        cut: whether a row may be cut; if not, only the grouping of rows into calls is chosen.
    Raises:
        ValueError: lists that do not match, a row without slots, or ``fragment`` below 1.
    """
    R = len(lengths)
    count = [queries] * R if isinstance(queries, int) else list(queries)
    low = [0] * R if lows is None else list(lows)
    at = list(range(R)) if rows is None else list(rows)
    if not R or not len(count) == len(low) == len(at) == R:
        raise ValueError(
            f"lengths, queries, lows and rows have {R}, {len(count)}, {len(low)} and {len(at)} entries: give one for each row"
        )
    if any(not 0 <= a < n for a, n in zip(low, lengths)):
        raise ValueError("a row has no slots: lengths must be above lows, and these at least 0")
    if fragment is not None and fragment < 1:
        raise ValueError(f"fragment is {fragment}: give at least 1 slot")
    starts = [r for r in range(R) if not r or count[r] != count[r - 1] or at[r] != at[r - 1] + 1]
    together = not mostly_padding(lengths)
    blocks: list[Block] = []
    seconds = padded = packed = 0.0
    together, widest = not mostly_padding(lengths), max(lengths)
    for i, j in pairwise([*starts, R]):
        run = _Run(lengths, low, count[i], model)
        whole, each = run.groups([i, j]), run.groups(range(i, j + 1))
        if fragment is not None:
            found = run.equal(i, j, min(low[i:j]), fragment)
        else:
            found = min(run.best(i, j, 0, DEPTH if cut else 0), whole, each, key=lambda f: f[0])
        seconds += found[0]
        padded += run.block(j - i, widest)
        packed += (whole if together else each)[0]
        blocks += found[1]
    return Fragments(tuple(blocks), tuple(lengths), tuple(count), seconds, padded, packed)


Cover = tuple[float, tuple[Block, ...]]
_NONE: tuple[Block, ...] = ()


class _Run:
    """Covers of neighbouring rows with equally many queries: seconds and blocks. Plain Python, since there are few."""

    def __init__(self, length: Sequence[int], low: Sequence[int], queries: int, model: CostModel):
        self.length, self.low, self.queries, self.model = length, low, queries, model
        self.call, self.row, self.slot = model.call, model.row, model.slot + queries * model.query

    def block(self, rows: int, slots: int) -> float:
        return self.call + rows * (self.row + slots * self.slot)

    def groups(self, borders: Sequence[int], base: int = 0) -> Cover:
        """A block for the rows between two borders each, from their lowest slot (at least ``base``) to their highest."""
        blocks = tuple(
            Block(a, b, max(base, min(self.low[a:b])), max(self.length[a:b])) for a, b in pairwise(borders)
        )
        return sum(self.block(b.r1 - b.r0, b.high - b.low) for b in blocks), blocks

    def best(self, i: int, j: int, base: int, depth: int) -> Cover:
        """The best of rows ``i:j`` above ``base``: the best grouping without cuts, or a cut of all at one height."""
        found = self.groups(self._borders(i, j, base), base)
        if j - i == 1 or not depth or any(self.low[i:j]):
            return found
        heights = sorted(set(self.length[i:j]))[:-1]
        if len(heights) > CUTS:
            heights = [heights[n * len(heights) // (CUTS + 1)] for n in range(1, CUTS + 1)]
        for height in heights:
            on = [r for r in range(i, j) if self.length[r] > height]
            rest = self.call + sum(self.length[r] - height for r in on) * self.slot
            bottom = self.block(j - i, height - base)
            if bottom + rest + self.model.merging(len(on), self.queries) >= found[0]:
                continue  # worse even if the rest were one call without padding
            total, above = bottom, _NONE
            for a, b in _stretches(on):
                cost, blocks = self.best(a, b, height, depth - 1)
                total += cost + sum(self.model.merging(c.r1 - c.r0, self.queries) for c in blocks)
                above += blocks
            if total < found[0]:
                found = total, (Block(i, j, base, height, above),)
        return found

    def equal(self, i: int, j: int, base: int, size: int) -> Cover:
        """Fragments of ``size`` slots; neighbouring rows share a call at each height."""
        high = base + size
        on = [r for r in range(i, j) if self.length[r] > high]
        if not on:
            return self.groups([i, j], base)
        total, above = self.block(j - i, size), _NONE
        for a, b in _stretches(on):
            cost, blocks = self.equal(a, b, high, size)
            total += cost + self.model.merging(b - a, self.queries)
            above += blocks
        return total, (Block(i, j, base, high, above),)

    def _borders(self, i: int, j: int, base: int) -> list[int]:
        """The borders of groups that share a call, by dynamic programming over the start of the last group."""
        length, low, n = self.length[i:j], [max(base, low) for low in self.low[i:j]], j - i
        if (n * (max(length) - min(low)) - sum(length) + sum(low)) * self.slot <= self.call:
            return [i, j]  # another call costs more than all padding
        best, begin = [0.0], [0]
        for last in range(1, n + 1):  # groups first:last
            high, bottom, needed, rows = 0, base + max(length), 0, 0
            least, at = float("inf"), 0
            for first in range(last - 1, -1, -1):
                high, bottom, rows = max(high, length[first]), min(bottom, low[first]), rows + 1
                needed += length[first] - low[first]
                work = rows * (high - bottom)
                cost = best[first] + rows * self.row + work * self.slot
                if cost < least:
                    least, at = cost, first
                elif (work - needed) * self.slot > last * self.call:
                    break  # more padding than any saved calls are worth
            best.append(least + self.call)
            begin.append(at)
        borders = [n]
        while borders[-1]:
            borders.append(begin[borders[-1]])
        return [i + b for b in reversed(borders)]


def _stretches(on: Sequence[int]) -> list[tuple[int, int]]:
    """``[begin, end)`` of neighbours among ascending numbers."""
    begins = [n for k, n in enumerate(on) if not k or on[k - 1] != n - 1]
    ends = [n + 1 for k, n in enumerate(on) if k + 1 == len(on) or on[k + 1] != n + 1]
    return list(zip(begins, ends))
