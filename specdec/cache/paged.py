"""A KV cache in pages: rows of any length share one pool, so that a long row does not size the others (PagedAttention, arXiv 2309.06180).

Slot ``s`` of a row is slot ``s % page`` of page ``table[s // page]`` of the row's own table. A row holds the pages that its slots need:
they are taken before a forward that needs them, and returned when the row is rolled back (at the next forward) or leaves.

Rows that have the same text may hold the same pages. Who writes to a slot calls ``PagedCache._own`` before, which replaces pages from that slot
on by the row's own where other rows hold them too; so pages below it stay shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specdec.cache.contiguous import free_bytes
from specdec.cache.contract import KVStore
from specdec.cache.slots import KVShape, Slots
from specdec.cache.token_index import Row, TokenIndex
from specdec.kernels.allocation import zeros
from specdec.kernels.native.blocks import Buffers
from specdec.types import Context, Verdict


class PagePool(Slots):
    """Pages of ``page`` slots that rows take and return; none at first.

    The pool does not know what rows will need. It grows, by a copy, by half of its pages or by the number requested, whichever is more, so
    that all copies together move a page about twice. During the copy the old and the new pages both take memory.

    Args:
        shapes: one for each layer. page: slots of a page, at least 1. spare: pages after all others that no row gets.
    Attributes:
        layers: for each layer its keys ``[pages, page, H, D]`` and values ``[pages, page, H, Dv]``; other tensors after it has grown.
        free: numbers of the pages that no row holds. They keep what was last written to them, zeros at first.
        holders: for each page, how many rows hold it.
    """

    def __init__(self, shapes: Sequence[KVShape], page: int, spare: int = 0):
        super().__init__(shapes, spare, page)
        self.page, self.spare = page, spare
        self.free, self.holders = list[int](), list[int]()

    @property
    def pages(self) -> int:
        """All pages, held or free; without spare ones."""
        return self._blocks[0].shape[1] - self.spare

    @property
    def bytes(self) -> int:
        """Memory of all pages, spare ones included."""
        return sum(shape.bytes for shape in self.shapes) * self.page * (self.pages + self.spare)

    def take(self, count: int, reserve: int = 0, rows: str = "") -> list[int]:
        """Take ``count`` free pages and return their numbers.

        Args:
            reserve: how many more will be needed soon; a pool that grows adds these too, if there is memory.
            rows: whose pages they are, for error messages.
        Raises:
            MemoryError: there is no memory to grow; no page is taken, and nothing was allocated.
        """
        lack = count - len(self.free)
        if lack > 0:
            self._grow(lack, reserve, rows)
        taken = [self.free.pop() for _ in range(count)]
        for p in taken:
            self.holders[p] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Note that one more row holds each of these pages, which are held."""
        for p in pages:
            assert self.holders[p], f"page {p} is shared, and no row holds it"
            self.holders[p] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Return the pages of a row to the pool; those that no other row holds become free."""
        for p in reversed(pages):
            assert self.holders[p], f"page {p} is returned, and no row holds it"
            self.holders[p] -= 1
            if not self.holders[p]:
                self.free.append(p)

    def reserve(self, count: int) -> None:
        """Have ``count`` free pages, if there is memory for them."""
        have = self.pages
        pages = max(have + count - len(self.free), have + have // 2)
        if count > len(self.free):
            self._extend(pages)

    def _grow(self, lack: int, reserve: int, rows: str) -> None:
        have = self.pages
        need = have + lack
        short = None
        for pages in (max(need + reserve, have + have // 2), need):
            short = self._extend(pages)
            if short is None:
                return
        assert short is not None
        raise MemoryError(self._refusal(need, *short, rows))

    def _extend(self, pages: int) -> tuple[torch.device, int, int] | None:
        """Have ``pages`` pages, or return what is ``_short`` of them."""
        short = self._short(pages)
        if short is None:
            self._become(pages)
        return short

    def _short(self, pages: int) -> tuple[torch.device, int, int] | None:
        """A device without room for ``pages`` more, the bytes of a page on it, and its free bytes; ``None`` if all have room."""
        for device in {shape.device for shape in self.shapes}:
            each = self.page * sum(shape.bytes for shape in self.shapes if shape.device == device)
            free = free_bytes(device)
            if free is not None and each * (pages + self.spare) > free:
                return device, each, free
        return None

    def _refusal(self, need: int, device: torch.device, each: int, free: int, rows: str) -> str:
        fit = max(free // each - self.spare, 0)
        room = f"{(need + self.spare) * each / 2**30:.2f} GiB on {device} and {free / 2**30:.2f} GiB are free"
        remedy = "decode fewer rows at a time, or shorter ones"
        if not self.pages:
            return (
                f"a paged KV cache{rows} needs {need} pages of {self.page} tokens, {room}: {fit} pages would fit, {fit * self.page} "
                f"tokens over all rows, shared ones counted once; {remedy}"
            )
        return (
            f"all {self.pages} pages of {self.page} tokens are taken and the KV cache{rows} needs {need}: the larger pool takes {room} "
            f"beside the old one, which is copied: {remedy}"
        )

    def _become(self, pages: int) -> None:
        with torch.inference_mode(False):
            blocks = []
            for old in self._blocks:
                layers, _, page, heads, size = old.shape
                shape = layers, pages + self.spare, heads, page, size
                blocks.append(zeros(*shape, dtype=old.dtype, device=old.device).transpose(2, 3))
        self._move(blocks)

    def _move(self, blocks: list[Tensor]) -> None:
        """Keep the pages in other memory, of at least as many pages and zeros from now on."""
        have = self.pages
        with torch.inference_mode(False), torch.no_grad():
            for old, new in zip(self._blocks, blocks):
                new[:, :have] = old[:, :have]
                if old.is_cuda:  # a drafting thread's stream need not be the one that the memory is from
                    old.record_stream(torch.cuda.current_stream(old.device))
        self._whole = self._blocks = blocks
        self._view()
        self.free += range(self.pages - 1, have - 1, -1)
        self.holders += [0] * (self.pages - have)


class PagedCache(TokenIndex, KVStore):
    """As ``SlotCache``, for rows that hold pages of a ``PagePool``.

    Args:
        pool: where the pages come from. batch, capacity: rows, and the most tokens of a row (nodes included). Neither takes
            memory on the device until rows are fed.
    """

    def __init__(self, pool: PagePool, batch: int, capacity: int):
        self.pool = pool
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        super().__init__(batch, capacity)

    def __del__(self) -> None:
        if "_pages" in vars(self):
            self._leave(self._pages)

    def __copy__(self) -> PagedCache:
        """A cache of the same rows, which share their pages until one of them writes; both may be used."""
        new = object.__new__(type(self))
        vars(new).update(vars(self), _pages=[list(pages) for pages in self._pages])
        for pages in new._pages:
            self.pool.share(pages)
        new._hold(*self._rows(list(range(self.batch))))
        return new

    @property
    def page(self) -> int:
        """Slots of a page."""
        return self.pool.page

    @property
    def shapes(self) -> list[KVShape]:
        return self.pool.shapes

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of all pages of the pool; a row's pages are found through ``table``."""
        return self.pool.layers

    @property
    def direct(self) -> list[tuple[Tensor, Tensor]] | None:
        """As ``KVStore.direct``: of all pages of the pool."""
        return self.pool.direct if type(self).append is PagedCache.append else None

    @property
    def buffers(self) -> Buffers | None:
        """As ``KVStore.buffers``."""
        return None if self.direct is None else self.pool.buffers

    def table(self, b: int) -> list[int]:
        """The pages that row ``b`` holds, in the order of its slots."""
        return list(self._pages[b])

    def beside(self, batch: int, capacity: int) -> PagedCache:
        """An empty cache whose rows take their pages from the same pool, so that joining both later copies nothing."""
        return PagedCache(self.pool, batch, capacity)

    def hold(self, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Take pages for all tokens that rows are about to be fed, where no other row holds them, and return those that no row needs.

        The first time, the pool is made large enough for what these rows may grow to: ``capacity`` is the longest text and all that may
        follow it, and as many tokens may follow the other texts.

        Returns:
            row -> its pages.
        Raises:
            MemoryError: there are too few; every row keeps its pages.
        """
        page, ends, reserve = self.page, self._used(), 0
        for r in rows:
            ends[r.b] = max(ends[r.b], r.end)
        if not any(self._pages):
            room = self.capacity - max(ends)
            reserve = sum(-(-(r.end + room) // page) + (-r.end // page) for r in rows)
        self._own({r.b: r.first for r in rows}, ends, reserve)
        return {r.b: self.table(r.b) for r in rows}

    def _own(self, starts: Mapping[int, int], ends: Sequence[int], reserve: int = 0) -> None:
        """Let every row hold the pages of the slots below ``ends [B]``, and no others; those from slot ``starts[b]`` on are row b's own.

        What a row holds in a page that it shared is copied. Of rows that are about to write to the same page, the last one keeps it.

        Raises:
            MemoryError: there are too few pages; every row keeps those of its slots.
        """
        page, wanted = self.page, [-(-end // self.page) for end in ends]
        for pages, want in zip(self._pages, wanted):
            self.pool.give(pages[want:])
            del pages[want:]
        lack, copies = sum(wanted) - sum(map(len, self._pages)), list[tuple[int, int]]()
        left: dict[int, int] = {}  # how many rows hold a page, less those that get another
        for b, start in starts.items():
            for i, p in enumerate(self._pages[b][start // page :], start // page):
                left[p] = left.get(p, self.pool.holders[p]) - 1
                if left[p]:
                    copies.append((b, i))
        if not lack and not copies:
            return
        tokens = f" of {self.batch} rows with {sum(ends)} tokens in all"
        taken = self.pool.take(lack + len(copies), reserve, tokens)
        source, target, used = list[int](), list[int](), self._used()
        for (b, i), new in zip(copies, taken):
            held = range(min(page, used[b] - i * page))
            source += [self._pages[b][i] * page + s for s in held]
            target += [new * page + s for s in held]
        self._fill(taken, source, target)
        for (b, i), new in zip(copies, taken):
            self.pool.give([self._pages[b][i]])
            self._pages[b][i] = new
        some = iter(taken[len(copies) :])
        for pages, want in zip(self._pages, wanted):
            pages += [next(some) for _ in range(want - len(pages))]

    def _used(self) -> list[int]:
        """``[B]``: the slots of each row that hold a token or a node."""
        return [n + fed for n, fed in zip(self._lengths, self._fed)]

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``key [1, H, T, D]`` and ``value [1, H, T, Dv]`` into the pool's flat ``slots [T]``; returns its buffers."""
        return self.pool.append(layer, slots, key, value)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """As ``SlotCache.commit``.

        Raises:
            MemoryError: nodes have to move in pages that other rows hold, and there are no pages for copies; nothing changes.
        """
        self._own({b: n for b, (n, fed) in enumerate(zip(self._lengths, self._fed)) if fed}, self._used())
        source: list[int] = []
        target: list[int] = []
        accepted = self.accepted(context, verdict)
        for b, start, path in accepted:
            moved = [(node, d) for d, node in enumerate(path) if node != d]
            source += self._flat(self._pages[b], [start + node for node, _ in moved])
            target += self._flat(self._pages[b], [start + d for _, d in moved])
        self.pool.copy(source, target)
        self.accept(verdict, accepted)

    def select(self, rows: Tensor) -> PagedCache:
        """The cache of some rows, in the given order; the old object must not be used again.

        Pages of rows that leave are returned. Nothing is copied: a row that is selected more than once shares its pages with itself.
        """
        order = rows.tolist()
        if order == list(range(self.batch)):
            return self
        new = self.beside(0, self.capacity)
        new._pages = [list(self._pages[b]) for b in order]
        new._hold(*self._rows(order))
        for i, b in enumerate(order):
            if b in order[:i]:
                self.pool.share(self._pages[b])
        self._leave([pages for b, pages in enumerate(self._pages) if b not in order])
        self._pages = []
        return new

    def join(self, other: PagedCache) -> PagedCache:
        """A cache of both caches' rows, these first; neither may be used again.

        Where both have the same pool (``beside``) nothing is copied; otherwise the entries of ``other`` are copied to pages of this cache's
        pool, once for all rows that share them.

        Raises:
            MemoryError: there are no pages for them; neither cache changes.
        """
        if other.pool is self.pool:
            more, other._pages = other._pages, []
        else:
            more = self._copies(other)
        new = self.beside(0, max(self.capacity, other.capacity))
        new._pages, self._pages = [*self._pages, *more], []
        new._hold_both(self, other)
        return new

    def take(self, b: int, other: PagedCache, i: int) -> None:
        """Row ``b`` becomes row ``i`` of ``other``, a cache of the same pool (``beside``); nothing is copied.

        Within one cache both rows then share their pages; row ``i`` of another cache must not be used again.
        """
        if other is self:
            self.pool.share(self._pages[i])
            self.pool.give(self._pages[b])
            self._pages[b] = list(self._pages[i])
        else:
            self._pages[b], other._pages[i] = other._pages[i], self._pages[b]
        self._become(b, other, i)

    def parts(self, b: int, first: int, end: int) -> Iterator[list[Tensor]]:
        """As ``SlotCache.parts``, a part for each page, which the row holds."""
        page = self.page
        for s in range(first - first % page, end, page):
            at = slice(max(first - s, 0), min(end - s, page))
            yield [block[:, self._pages[b][s // page], at] for block in self.pool._blocks]

    def expect(self, lengths: Sequence[int], alike: Sequence[tuple[int, int]]) -> None:
        """As ``hold`` does the first time, make the pool large enough for rows of ``lengths`` tokens and for what may follow them.

        Args:
            alike: ``(rows, tokens)`` of each group of rows that will all hold the pages that their first ``tokens`` fill. (Two groups have at
                most one row in common.)
        """
        if any(self._pages):
            return
        room = self.capacity - max(lengths)
        each = sum(-(-(n + room) // self.page) for n in lengths)
        self.pool.reserve(each - sum((rows - 1) * (tokens // self.page) for rows, tokens in alike))

    def _copies(self, other: PagedCache) -> list[list[int]]:
        """Pages of this cache's pool with what the rows of ``other`` hold; where the slots of two pages would be the same, they are one."""
        rows = []
        for pages, used in zip(other._pages, other._used()):
            slots = other._flat(pages, range(used))
            rows.append([tuple(slots[n : n + self.page]) for n in range(0, used, self.page)])
        made = dict.fromkeys(slots for row in rows for slots in row)
        some = self.pool.take(len(made), 0, f" of {self.batch + other.batch} rows")
        at = dict(zip(made, some))
        target = [p * self.page + n for slots, p in at.items() for n in range(len(slots))]
        self._fill(some, [slot for slots in made for slot in slots], target, other.pool)
        more = [[at[slots] for slots in row] for row in rows]
        for pages in more:
            self.pool.share(pages)
        self.pool.give(some)
        return more

    def _fill(
        self, taken: list[int], source: list[int], target: list[int], pool: PagePool | None = None
    ) -> None:
        """Copy flat slots of ``pool`` to pages that were taken, which are returned if that fails: a copy needs memory itself."""
        try:
            self.pool.copy(source, target, pool)
        except BaseException:
            self.pool.give(taken)
            raise

    def _flat(self, pages: list[int], slots: Sequence[int]) -> list[int]:
        """Flat numbers, in the pool, of a row's slots."""
        return [pages[s // self.page] * self.page + s % self.page for s in slots]

    def _leave(self, rows: list[list[int]]) -> None:
        for pages in rows:
            self.pool.give(pages)
