"""Where SPIN's parts pay, by a time model: selection, decomposition and the pipeline over raggedness, costs, batch and cores.

A derivation for arXiv 2503.15921 that is not the paper's. A pass is its matrix products, by the roofline of ``specdec.cost``, and its attention,
whose work items (a row and a key-value head) are distributed over the cores: the longest item or the fullest core sets the pace. All
configurations that are compared have the same cores. The pipeline divides them between drafting and verification.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from specdec.cost import Forward, Hardware, Shape
from specdec.cost.terms import body, embedding, step, unembedding

Attention = Literal["padded", "packed", "decomposed"]
PAYS = 1.02  # a gain below is within what a time model can say
FRAGMENTS = (2, 4, 8, 16, 32, 64)  # into how many parts the longest row may be cut


@dataclass(frozen=True)
class Machine:
    """Cores (or a GPU's multiprocessors) that share a memory.

    Attributes:
        core: rates of one, and the overheads of a pass, which more cores do not shorten. bytes_per_second: of the memory.
        serial: the part of a product that one core does alone (Amdahl): with c cores it is ``c / (1 + (c - 1) serial)`` times as fast.
        item: seconds to begin a work item of attention, and to merge it if its row is cut.
    """

    core: Hardware
    bytes_per_second: float
    serial: float = 0.0
    item: float = 1e-6

    def cores(self, used: float, of: float) -> Hardware:
        """The rates of some cores while the others are busy: they have their share of the memory."""
        speed = used / (1 + max(used - 1, 0) * self.serial)
        memory = min(used * self.core.bytes_per_second, self.bytes_per_second * used / of)
        core = self.core
        return Hardware(
            core.name, speed * core.flops, memory, core.overhead, core.overhead_per_layer, core.overlapped
        )


@dataclass(frozen=True)
class Regime:
    """A point of the map.

    Attributes:
        raggedness: standard deviation of the logarithm of the rows' lengths (lognormal). ratio: cost of a draft's pass over the target's.
        batch, context: rows, and their mean length. k: drafted tokens. tau: tokens of a round with the best fixed draft.
        headroom: tokens of a round with the best draft of every request over tau. arms: drafts, among which requests are equally divided.
        bytes_per_value: of weights and cached values.
    Raises:
        ValueError: a number of rows, cores or arms below 1, or a negative raggedness or ratio.
    """

    target: Shape
    machine: Machine
    cores: int
    raggedness: float
    ratio: float
    batch: int
    context: int
    k: int = 4
    tau: float = 2.8
    headroom: float = 1.1
    arms: int = 4
    bytes_per_value: float = 2.0

    def __post_init__(self) -> None:
        low = [name for name in ("cores", "batch", "context", "k", "arms") if vars(self)[name] < 1]
        low += [name for name in ("raggedness", "ratio") if vars(self)[name] < 0]
        if low:
            raise ValueError(
                f"{low[0]} is {vars(self)[low[0]]}: give at least {0 if low[0][0] == 'r' else 1}"
            )

    def lengths(self) -> np.ndarray:
        """Lengths of the rows, at even quantiles of their distribution, the longest first."""
        z = [NormalDist().inv_cdf((i + 0.5) / self.batch) for i in range(self.batch)]
        made = np.exp(self.raggedness * np.array(z[::-1]))
        return made * self.context / made.mean()

    def gains(self) -> dict[str, Any]:
        """How many times faster each part makes a round, the others aside, and which of them pay.

        ``speculation``: the best fixed draft over plain decoding. ``selection``: the best draft of every request over the best fixed one;
        ``own_devices``: the same if every draft had another machine like this one, as in the paper, which is not at equal cores.
        ``over_padded``, ``decomposition``: decomposed over padded and over packed attention, which has no padding. ``pipeline``: its best
        steady state over serial rounds. The others are with packed attention.
        """
        every, c = self.lengths(), self.cores
        fixed = self.draft(every, c) + self.verify(every, c)
        plain = self.verify(every, c, tokens=1)
        used = min(self.arms, self.batch)
        drafting = [self.draft(every[a::used], c) for a in range(used)]
        verify = self.verify(every, c)
        whole = {how: self.draft(every, c) + self.verify(every, c, how) for how in ("padded", "decomposed")}
        piped, micro_batches = self.pipeline(every)
        gains = {
            "speculation": self.tau * plain / fixed,
            "selection": self.headroom * fixed / (sum(drafting) + verify),
            "own_devices": self.headroom * fixed / (max(drafting) + verify),
            "over_padded": whole["padded"] / whole["decomposed"],
            "decomposition": fixed / whole["decomposed"],
            "pipeline": fixed / piped,
        }
        pays = [name for name in ("selection", "decomposition", "pipeline") if gains[name] >= PAYS]
        return {**gains, "micro_batches": micro_batches, "cut": self.cut(every), "pays": pays}

    def draft(self, lengths: np.ndarray, cores: float) -> float:
        """Seconds to draft k tokens for some rows."""
        return self.k * self.seconds(lengths, 1, cores, "packed", self.ratio)

    def verify(
        self, lengths: np.ndarray, cores: float, how: str = "packed", tokens: int | None = None
    ) -> float:
        """Seconds of the target's pass over some rows."""
        return self.seconds(lengths, self.k + 1 if tokens is None else tokens, cores, how, 1.0)

    def seconds(self, lengths: np.ndarray, tokens: int, cores: float, how: str, ratio: float) -> float:
        """A pass of a model with ``ratio`` of the target's work and layers (at least one layer)."""
        rows, shape = len(lengths), self.target
        terms = (body, unembedding, embedding) if shape.vocab else (body,)
        made = step(Forward(shape, rows, tokens, 1, self.bytes_per_value, self.bytes_per_value), terms)
        machine = self.machine.cores(cores, self.cores)
        layers = max(1, round(ratio * shape.layers))
        products = ratio * max(made.flops / machine.flops, made.bytes / machine.bytes_per_second)
        attention = ratio * shape.layers * self.attention(lengths, tokens, cores, how)[0]
        return products + attention + machine.overhead + layers * machine.overhead_per_layer

    def attention(self, lengths: np.ndarray, tokens: int, cores: float, how: str) -> tuple[float, int]:
        """Seconds of one layer, and the number of parts of the longest row."""
        if how == "padded":
            return self._items(np.full(len(lengths), lengths.max()), tokens, cores), 1
        best = (self._items(lengths, tokens, cores), 1)
        for n in FRAGMENTS if how == "decomposed" else ():
            seconds = self._items(_cut(lengths, lengths.max() / n), tokens, cores)
            if seconds < best[0] * (1 - 1e-6):  # no cut that gains nothing
                best = seconds, n
        return best

    def cut(self, lengths: np.ndarray) -> bool:
        """Whether decomposition cuts rows of a verification."""
        return self.attention(lengths, self.k + 1, self.cores, "decomposed")[1] > 1

    def _items(self, lengths: np.ndarray, tokens: int, cores: float) -> float:
        """The time of the fullest core when items are assigned in order of length, each to the emptiest core; or the memory's."""
        shape, core = self.target, self.machine.core
        moved = 2 * shape.d_head * self.bytes_per_value * lengths
        work = 4 * shape.heads // shape.kv_heads * shape.d_head * tokens * lengths
        each = np.maximum(work / core.flops, moved / core.bytes_per_second) + self.machine.item
        memory = self.machine.cores(cores, self.cores).bytes_per_second
        return max(
            makespan(tuple(np.repeat(each, shape.kv_heads).tolist()), max(int(cores), 1)),
            shape.kv_heads * moved.sum() / memory,
        )

    def pipeline(self, lengths: np.ndarray) -> tuple[float, int]:
        """Seconds of a round of all rows with the best division of the cores and number of micro-batches, and that number (1: serial)."""
        best = (self.draft(lengths, self.cores) + self.verify(lengths, self.cores), 1)
        for mine in sorted({1, self.cores // 8, self.cores // 4, self.cores // 2} - {0}):
            for m in range(2, min(8, self.batch) + 1 if mine < self.cores else 2):
                parts = [lengths[i::m] for i in range(m)]
                d = [self.draft(part, mine) for part in parts]
                v = [self.verify(part, self.cores - mine) for part in parts]
                best = min(best, (max(sum(d), sum(v), max(map(sum, zip(d, v)))), m))
        return best


def _cut(lengths: np.ndarray, size: float) -> np.ndarray:
    """Rows in equal fragments of at most ``size``."""
    parts = np.ceil(lengths / size - 1e-9).astype(int)
    return np.repeat(lengths / parts, parts)


@lru_cache(4096)
def makespan(items: tuple[float, ...], cores: int) -> float:
    """The time of the fullest core, longest items first, each on the emptiest core."""
    if len(items) > 32 * cores or cores == 1:  # then the order hardly matters
        return max(sum(items) / cores, max(items))
    loads = [0.0] * min(cores, len(items))
    for seconds in sorted(items, reverse=True):
        heapq.heapreplace(loads, loads[0] + seconds)
    return max(loads)


def grid(points: Sequence[Regime]) -> list[dict[str, Any]]:
    """A row for every point: its axes and its gains."""
    return [
        {
            "machine": point.machine.core.name, "raggedness": point.raggedness, "ratio": point.ratio, "batch": point.batch,
            "cores": point.cores, "context": point.context, **point.gains(),
        }
        for point in points
    ]  # fmt: skip
