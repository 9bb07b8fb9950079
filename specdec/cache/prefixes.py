"""Prompts that begin like earlier texts: their keys and values are copied from memory that lasts between calls, and are not computed again.

Automatic prefix caching, as vLLM has it: texts are cut into blocks of ``SIZE`` tokens. A block's keys and values depend on all tokens before it,
so a block is found by its own tokens and by the block before it. What was not used for the longest time is dropped first; of one text, that
is always its last block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.contiguous import SlotCache
from specdec.cache.kept import Kept, Signs, made_by, use
from specdec.cache.noted import Noted, noted
from specdec.cache.paged import PagedCache
from specdec.cache.token_index import Row
from specdec.kernels.device import to_device
from specdec.types import Context, Fed, Round, common

SIZE = 64  # tokens of a block

Cache = SlotCache | PagedCache
Key = tuple[int, bytes]  # the number of the block before (0: none), and the block's own tokens


class Block(NamedTuple):
    """What a model computed of ``SIZE`` tokens after certain others.

    Attributes:
        number: of the block, never used again. entries: for each kind of a cache's buffers ``[layers, SIZE, H, D]``.
        seen: layer -> its activations ``[SIZE, E]``, of the layers that a draft asked for.
        ready: events of the streams that make it, on GPUs.
    """

    number: int
    entries: list[Tensor]
    seen: dict[int, Tensor]
    ready: list[torch.cuda.Event]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.entries, *self.seen.values()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Begun(NamedTuple):
    """What is known of a row that is being read: the ``version`` of the weights that it began with, the layers ``taps`` that a draft reads, and what was noted of these."""

    version: Signs | None
    taps: tuple[int, ...]
    noted: Noted | None = None


class Lent(NamedTuple):
    """What rows that read their texts from the beginning need not feed: the blocks that each was lent, and the activations of what was ``read`` for several rows at
    once. ``found``: of each row, the tokens of earlier texts that it begins with."""

    prefixes: PrefixCache | None
    blocks: Mapping[int, Sequence[Block]]
    read: Fed | None = None
    found: tuple[int, ...] = ()

    def keep(self, cache: Any, fed: Fed | None = None) -> Fed | None:
        """Keep what the rows hold now; returns the activations ``fed`` of the call's tokens, and before them, row by row, those that were not fed."""
        whole = None if fed is None else self._joined(fed)
        if self.prefixes is not None:
            self.prefixes.keep(cache, self.blocks, whole)
        return whole

    def _joined(self, fed: Fed) -> Fed:
        one = torch.arange(SIZE)
        parts = [
            Fed(block.seen, torch.full_like(one, b), one + SIZE * i, torch.full_like(one, -1))
            for b, some in self.blocks.items()
            for i, block in enumerate(some)
        ]
        parts += [part for part in (self.read, fed) if part is not None]
        if len(parts) == 1:
            return fed
        row, position, node = (
            torch.cat([vars(part)[n] for part in parts]) for n in ("row", "position", "node")
        )
        order = row.argsort(stable=True)
        layers = {
            tap: torch.cat([part.layers[tap] for part in parts])[to_device(order, x.device)]
            for tap, x in fed.layers.items()
        }
        return Fed(layers, row[order], position[order], node[order])


NOTHING = Lent(None, {})


class PrefixCache(Kept[Key, Block]):
    """Blocks of earlier texts of one model. Args, Attributes: as of ``Kept``."""

    def __init__(self, limit: int, weights: Callable[[], Iterable[Tensor]]):
        super().__init__(limit, weights)
        self._numbers = count(1)

    def known(self, context: Context, rows: Sequence[int], taps: Sequence[int]) -> list[int]:
        """Of each row, how many tokens of its text are kept; 0 for those that are not in ``rows``. Weights are not looked at."""
        words, length, found = context.tokens.numpy(), context.length.tolist(), [0] * context.batch
        with self._lock:
            for b in rows:
                found[b] = SIZE * len(self._find(words[b, : length[b] - 1], taps))
        return found

    def lend(self, cache: Cache, context: Context, rows: Sequence[int], taps: Sequence[int]) -> Lent:
        """Copy to each of ``rows`` the blocks that its text begins with and that it does not hold, but never its last committed token.

        Args:
            rows: those that were empty when the call began. taps: layers whose activations are wanted too; all rows are then empty.
        """
        words, length = context.tokens.numpy(), context.length.tolist()
        lent, held = dict[int, Sequence[Block]](), dict[int, int]()
        with self._lock:
            if self._changed():
                return NOTHING
            for b in rows:
                cache.begun[b] = Begun(self.version, tuple(taps))
                same = common(np.array(cache.row(b), dtype=np.int64), words[b, : length[b]])
                lent[b], held[b] = self._find(words[b, : length[b] - 1], taps), same // SIZE
                self.asked += length[b] - same
                self.found += max(SIZE * len(lent[b]) - same, 0)
        some = [b for b in rows if len(lent[b]) > held[b]]
        if isinstance(cache, PagedCache) and some:
            begin = {b: SIZE * held[b] if b in some else length[b] for b in rows}
            cache.hold([Row(b, first, length[b], length[b]) for b, first in begin.items()])
        with torch.inference_mode(False), torch.no_grad():
            for b in some:
                for i, block in enumerate(lent[b][held[b] :], held[b]):
                    use(block.tensors, block.ready)
                    at = 0
                    for part in cache.parts(b, SIZE * i, SIZE * (i + 1)):
                        for into, entries in zip(part, block.entries):
                            into.copy_(entries[:, at : at + into.shape[1]])
                        at += part[0].shape[1]
                cache.remember(b, words[b], 0, SIZE * len(lent[b]), 0)
        return Lent(self, lent)

    def note(self, cache: Cache, round: Round) -> None:
        """Note the activations that a round has of its rows' answers, and of the ends of their prompts that fill no block. Where they take more memory than the
        limit, the texts with the most are not kept; where there is no memory for them, none is."""
        mine: list[Begun | None] = [
            one if one and one.version is self.version else None for one in cache.begun
        ]
        if not any(mine):
            return
        begin = [SIZE * (n // SIZE) for n in round.context.length.tolist()]
        try:
            with torch.inference_mode(False), torch.no_grad():
                now = noted([one and one.noted for one in mine], round, begin)
        except (MemoryError, torch.OutOfMemoryError):
            mine = []
        else:
            mine = [one and one._replace(noted=more) for one, more in zip(mine, now)]
        sizes = [one.noted.bytes if one and one.noted else 0 for one in mine]
        while sum(sizes) > self.limit:
            b = sizes.index(max(sizes))
            mine[b], sizes[b] = None, 0
        cache.begun = mine or [None] * len(cache.begun)

    def keep_ended(self, cache: Cache, rows: Iterable[int]) -> None:
        """Keep the full blocks of ``rows``, whose texts have ended, answers included, unless weights have changed since the rows began to be read."""
        with self._lock:
            same = self._same_weights()
        if same:
            self.keep(cache, rows, None)

    def keep(self, cache: Cache, rows: Iterable[int], fed: Fed | None) -> None:
        """Keep the full blocks of what ``rows`` hold, of those that began to be read with the weights that are known now; ``fed``: the activations of all their
        tokens; ``None``: those that were noted. Where there is no memory for them, all are dropped."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            try:
                for b in rows:
                    begun = cache.begun[b]
                    if begun is not None and begun.version is self.version:
                        self._keep(cache, b, begun.taps, begun.noted if fed is None else _of_row(fed, b))
            except (MemoryError, torch.OutOfMemoryError):
                self._clear()

    def _keep(self, cache: Cache, b: int, taps: Sequence[int], known: Noted | None) -> None:
        text, before, path, total = np.array(cache.row(b), dtype=np.int64), 0, list[Key](), 0
        layers: Mapping[int, Tensor] | None = None
        for at in range(0, len(text) - SIZE + 1, SIZE):
            key = (before, text[at : at + SIZE].tobytes())
            block = old = self._held.get(key)
            if block is None or not block.seen.keys() >= set(taps):
                seen = dict[int, Tensor]()
                if taps:
                    if known is None or not known.first <= at <= known.end - SIZE:
                        break  # its activations are not known (any more)
                    layers, first = layers or known.layers, at - known.first
                    seen = {tap: layers[tap][first : first + SIZE].clone() for tap in taps}
                block = self._made(cache, b, at, seen, block)
            total += block.bytes
            if total > self.limit:
                break
            if block is not old:
                self._put(key, block)
            path.append(key)
            before = block.number
            self._held.move_to_end(key)
        for key in reversed(path):
            self._held.move_to_end(key)

    def _find(self, text: np.ndarray, taps: Sequence[int]) -> list[Block]:
        blocks, before = list[Block](), 0
        for at in range(0, len(text) - SIZE + 1, SIZE):
            block = self._held.get((before, text[at : at + SIZE].tobytes()))
            if block is None or not block.seen.keys() >= set(taps):
                break
            blocks.append(block)
            before = block.number
        return blocks

    def _made(self, cache: Cache, b: int, at: int, seen: dict[int, Tensor], old: Block | None) -> Block:
        """The block of row ``b`` from slot ``at`` on; with more activations, if there is an ``old`` one."""
        if old is not None:
            return old._replace(seen=old.seen | seen, ready=old.ready + made_by(seen.values()))
        entries = [torch.cat(parts, 1) for parts in zip(*cache.parts(b, at, at + SIZE))]
        return Block(next(self._numbers), entries, seen, made_by((*entries, *seen.values())))


def _of_row(fed: Fed, b: int) -> Noted:
    """The activations of the committed tokens of row ``b``, all of which were fed."""
    row = ((fed.row == b) & (fed.node < 0)).nonzero()[:, 0]
    first, end = int(row[0]), int(row[-1]) + 1
    together = end - first == len(row)
    layers = {tap: x[first:end] if together else x[to_device(row, x.device)] for tap, x in fed.layers.items()}
    return Noted(0, len(row), (), (layers,))
