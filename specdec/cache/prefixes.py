"""Prompts that begin like earlier ones: their keys and values are copied from memory that lasts between calls, and are not computed again.

Automatic prefix caching, as vLLM has it: texts are cut into blocks of ``SIZE`` tokens. A block's keys and values depend on all tokens before it,
so a block is found by its own tokens and by the block before it. What was not used for the longest time is dropped first; of one text, that
is always its last block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specdec.cache.contiguous import SlotCache
from specdec.cache.paged import PagedCache
from specdec.cache.token_index import Row
from specdec.types import Context, Fed

SIZE = 64  # tokens of a block
SAMPLES = 8  # values of each parameter by which changed weights are noticed

Key = tuple[int, bytes]  # the number of the block before (0: none), and the block's own tokens


class Block(NamedTuple):
    """What a model computed of ``SIZE`` tokens after certain others.

    Attributes:
        number: of the block, never used again. entries: for each kind of a cache's buffers ``[layers, SIZE, H, D]``.
        seen: layer -> its activations ``[SIZE, E]``, of the layers that a draft asked for.
    """

    number: int
    entries: list[Tensor]
    seen: dict[int, Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.entries, *self.seen.values()))


Cache = SlotCache | PagedCache
Lent = Mapping[int, Sequence[Block]]
"""The rows that a call reads from their beginning, and the blocks that each was lent."""


class PrefixCache:
    """Blocks of earlier prompts of one model.

    Args:
        limit: bytes of blocks, on the devices of the model's keys and values. parameters: returns those of the model.
    Attributes:
        asked: tokens of prompts that were to be read so far. found: how many of them were copied.
    """

    def __init__(self, limit: int, parameters: Callable[[], Iterable[Tensor]]):
        self.limit, self._parameters = limit, parameters
        self.asked = self.found = self.bytes = 0
        self._blocks: OrderedDict[Key, Block] = OrderedDict()  # the one that was used last is the last
        self._numbers, self._lock = count(1), Lock()
        self._sample: list[Tensor] = []

    def __reduce__(self) -> Any:  # a copy begins empty
        return PrefixCache, (self.limit, self._parameters)

    def __repr__(self) -> str:
        share = f", {self.found} of {self.asked} prompt tokens found" if self.asked else ""
        return f"PrefixCache({self.bytes / 2**20:.1f} of {self.limit / 2**20:.1f} MiB{share})"

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()
            self.bytes = 0

    def lend(self, cache: Cache, context: Context, rows: Sequence[int], taps: Sequence[int]) -> Lent:
        """Copy to each of ``rows`` the blocks that its text begins with and that it does not hold, but never its last committed token.

        Args:
            rows: those that were ``fresh`` when the call began. taps: layers whose activations are wanted too; all rows are then empty.
        """
        words, length = context.tokens.numpy(), context.length.tolist()
        lent, held = dict[int, Sequence[Block]](), dict[int, int]()
        with self._lock:
            if self._blocks:
                self._drop_if_weights_changed()
            for b in rows:
                has = np.array(cache.row(b), dtype=np.int64)[: length[b]]
                differ = has != words[b, : len(has)]
                same = int(differ.argmax()) if differ.any() else len(has)
                lent[b], held[b] = self._find(words[b, : length[b] - 1], taps), same // SIZE
                self.asked += length[b] - same
                self.found += max(SIZE * len(lent[b]) - same, 0)
        some = [b for b in rows if len(lent[b]) > held[b]]
        if isinstance(cache, PagedCache) and some:
            cache.hold([Row(b, SIZE * held[b], length[b], length[b]) for b in rows])
        with torch.inference_mode(False), torch.no_grad():
            for b in some:
                for i, block in enumerate(lent[b][held[b] :], held[b]):
                    at = 0
                    for part in cache.parts(b, SIZE * i, SIZE * (i + 1)):
                        for into, entries in zip(part, block.entries):
                            into.copy_(entries[:, at : at + into.shape[1]])
                            if entries.is_cuda:  # another thread's stream may have made it
                                entries.record_stream(torch.cuda.current_stream(entries.device))
                        at += part[0].shape[1]
                cache.remember(b, words[b], 0, SIZE * len(lent[b]), 0)
        return lent

    def keep(self, cache: Cache, lent: Lent, fed: Fed | None = None) -> None:
        """Keep the full blocks of what the rows of ``lent`` hold now; ``fed``: the activations of all their tokens."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self._blocks:
                self._sample = self._samples()
            for b in lent:
                text, before, path = np.array(cache.row(b)), 0, list[Key]()
                row = None if fed is None else torch.nonzero((fed.row == b) & (fed.node < 0))[:, 0]
                for at in range(0, len(text) - SIZE + 1, SIZE):
                    key = (before, text[at : at + SIZE].tobytes())
                    block = self._blocks.get(key)
                    if block is None or (fed is not None and not block.seen.keys() >= fed.layers.keys()):
                        block = self._made(
                            cache, b, at, fed, None if row is None else row[at : at + SIZE], block
                        )
                        if (at // SIZE + 1) * block.bytes > self.limit:
                            break
                        self._put(key, block)
                    path.append(key)
                    before = block.number
                    self._blocks.move_to_end(key)
                for key in reversed(path):
                    self._blocks.move_to_end(key)

    def _find(self, text: np.ndarray, taps: Sequence[int]) -> list[Block]:
        blocks, before = list[Block](), 0
        for at in range(0, len(text) - SIZE + 1, SIZE):
            block = self._blocks.get((before, text[at : at + SIZE].tobytes()))
            if block is None or not block.seen.keys() >= set(taps):
                break
            blocks.append(block)
            before = block.number
        return blocks

    def _made(
        self, cache: Cache, b: int, at: int, fed: Fed | None, tokens: Tensor | None, old: Block | None
    ) -> Block:
        seen = {} if old is None else dict(old.seen)
        if fed is not None and tokens is not None:
            seen |= {tap: x[tokens.to(x.device)].clone() for tap, x in fed.layers.items()}
        if old is not None:
            return Block(old.number, old.entries, seen)
        kinds = zip(*cache.parts(b, at, at + SIZE))
        return Block(next(self._numbers), [torch.cat(parts, 1) for parts in kinds], seen)

    def _put(self, key: Key, block: Block) -> None:
        old = self._blocks.pop(key, None)
        self.bytes += block.bytes - (0 if old is None else old.bytes)
        self._blocks[key] = block
        while self.bytes > self.limit:
            self.bytes -= self._blocks.popitem(last=False)[1].bytes

    def _samples(self) -> list[Tensor]:
        """The bytes of a few values of each parameter, one tensor for each device."""
        found: dict[torch.device, list[Tensor]] = {}
        for p in self._parameters():
            if type(p) is nn.Parameter and p.numel():
                some = p.detach().flatten()[:: max(1, p.numel() // SAMPLES)].contiguous()
                found.setdefault(p.device, []).append(some.view(torch.uint8))
        return [torch.cat(some) for some in found.values()]

    def _drop_if_weights_changed(self) -> None:
        now = self._samples()
        if len(now) != len(self._sample) or not all(map(torch.equal, now, self._sample)):
            self._blocks.clear()
            self.bytes = 0


def fresh(cache: Any, rows: Tensor | None) -> list[int]:
    """The empty rows (of ``rows``; ``None``: all) of a cache that can be lent blocks: a ``SlotCache`` or a ``PagedCache``."""
    if type(cache) not in (SlotCache, PagedCache):
        return []
    asked = None if rows is None else set(rows.tolist())
    return [b for b in cache.empty_rows() if asked is None or b in asked]


def with_lent(fed: Fed, lent: Lent) -> Fed:
    """The activations of a call's tokens, and before them, row by row, those of the blocks that its rows were lent."""
    blocks = [(b, i, block) for b, some in lent.items() for i, block in enumerate(some)]
    if not blocks:
        return fed
    one = torch.arange(SIZE)
    row = torch.cat([*(torch.full_like(one, b) for b, _, _ in blocks), fed.row])
    position = torch.cat([*(one + SIZE * i for _, i, _ in blocks), fed.position])
    node = torch.cat([torch.full((SIZE * len(blocks),), -1), fed.node])
    order = row.argsort(stable=True)
    layers = {
        tap: torch.cat([*(block.seen[tap] for _, _, block in blocks), x])[order.to(x.device)]
        for tap, x in fed.layers.items()
    }
    return Fed(layers, row[order], position[order], node[order])
