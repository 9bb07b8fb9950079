"""The captured steps of one model: which calls use them, the memory that they are captured on, and when they are dropped.

A graph contains addresses, so a step is captured for the memory of one cache. That memory is kept when the cache is gone and is lent to
the next cache that fits, so that the steps of one ``generate`` serve the next.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specdec.cache.contiguous import SlotCache, check_memory
from specdec.cache.paged import PagedCache
from specdec.cache.slots import KVShape, Slots
from specdec.cache.static import StaticStore, held, memory_of
from specdec.cache.static_pool import StaticPool
from specdec.cache.token_index import TokenIndex
from specdec.configs import setting
from specdec.forward.contract import Forward, Runner
from specdec.forward.pack import PackedBatch
from specdec.graphs.capture import CAPTURES, capture_for, quiet
from specdec.graphs.staging import Program
from specdec.graphs.static import StaticStep, bucket_of, fits, nodes_of, rows_for
from specdec.kernels.attention import triton_backend

Kept = TypeVar("Kept", bound=Slots)
MOST = 16  # captured steps over one memory
SMALL = 64  # new tokens of a row up to which a call is decoding or verification
DRAFTED = 64  # proposed tokens a row that may stay on the device
PATIENCE = 2  # captures that fail one after another until no more is tried


class Lease:
    """Held by a cache and by the results of its ``select`` and ``join``: the memory is in use while any of them exists."""


class Storage:
    """The memory of a cache, and the programs captured on it."""

    def __init__(self, cache: Slots):
        lease = cache.lease = cache.lease or Lease()
        self.lease = weakref.ref(lease)
        self.whole, self.store = cache._whole, StaticStore(cache)
        self._model = cache.unleased()
        self.programs: OrderedDict[Hashable, Program] = OrderedDict()
        self.seen: OrderedDict[Hashable, None] = OrderedDict()
        self.too_large: set[Hashable] = set()
        self.failed: set[Hashable] = set()

    @property
    def free(self) -> bool:
        return self.lease() is None

    def lend(self, batch: int | None) -> Any:
        """The memory's first ``batch`` rows (``None``: all) as an empty cache of its kind; the caller makes its token index."""
        new = copy.copy(self._model)
        new.lease = lease = Lease()
        self.lease = weakref.ref(lease)
        with torch.inference_mode(False):
            new._blocks = [block[:, :batch] for block in self.whole]
            for block in new._blocks:
                block.zero_()
        new._whole = self.whole
        new._view()
        return new


class Programs:
    """Captured programs over the memory of caches, for one thread at a time.

    Args:
        device: of all of them. capture: an entry of ``capture.CAPTURES``. most: programs over one memory; beyond that, the least
            recently used one is dropped.
    Attributes:
        why: why nothing more is captured until ``release``, or ``None``. A shape whose capture failed runs without a graph for as long as
            its memory exists; only when several fail one after another, and not for lack of memory, nothing more is tried.
    """

    def __init__(self, device: torch.device, capture: str, most: int = MOST):
        self.device, self.most = device, most
        self.capture = capture_for(capture, device)
        self.why: str | None = None
        self._failures = 0  # since the last success
        self._parts: dict[int, list[Any]] = {}
        self._storages: list[Storage] = []

    def __repr__(self) -> str:
        stopped = f", stopped: {self.why}" if self.why else ""
        return f"{type(self).__name__}({len(self.captured)} captured{stopped})"

    @property
    def captured(self) -> list[Program]:
        """All captured programs; over each memory, in the order of last use."""
        return [program for storage in self._storages for program in storage.programs.values()]

    @property
    def too_large(self) -> set[Hashable]:
        """Names of the programs that there was too little memory to capture."""
        return {name for storage in self._storages for name in storage.too_large}

    @property
    def failed(self) -> set[Hashable]:
        """Names of the programs that could not be captured for another reason."""
        return {name for storage in self._storages for name in storage.failed}

    def lent(self, batch: int | None, fits: Callable[[Any], bool]) -> Any:
        """As ``Storage.lend``, of free memory with enough rows whose cache ``fits``. If there is none, free the unused memory and return ``None``."""
        for storage in self._storages:
            if storage.free and storage.whole[0].shape[1] >= (batch or 0) and fits(storage._model):
                return storage.lend(batch)
        self._drop(lambda storage: storage.free)
        return None

    def kept(self, cache: Kept) -> Kept:
        """``cache``. Its memory is lent when it is free, even if no program is captured on it."""
        self._of(cache)
        return cache

    def moved(self, old: Slots, new: Slots) -> None:
        """Note that ``new`` has replaced ``old``, which had become too small: from now on ``new``'s memory is lent.

        Otherwise the next cache would be the small one, on which the names of larger steps have occurred already.
        """
        if any(storage.whole is old._whole for storage in self._storages):
            self._drop(lambda storage: storage.whole is old._whole)
            self._of(new)

    def release(self) -> None:
        """Drop all captured programs and the memory that no cache uses; captures that failed may be tried again."""
        self._drop(lambda _: True)
        self.why, self._failures = None, 0

    def check(self, modules: Iterable[nn.Module], of: object = None) -> None:
        """Drop all programs if a part or a weight was replaced, or a hook added or removed, since the last call, and those whose owner is gone;
        called when texts begin.

        Args:
            of: the model whose modules these are, if it is another one that programs run as well.
        """
        self._forget()
        parts = [_identity(module) for module in modules]
        if self._parts.setdefault(id(of), parts) != parts:
            self.release()
        self._parts[id(of)] = parts

    def program(
        self,
        cache: Slots,
        key: Hashable,
        make: Callable[[StaticStore], Program],
        update: Callable[[Any], None],
    ) -> Program | None:
        """The captured program of a name over a cache's memory, with its inputs up to date.

        ``None`` for a name that occurs for the first time, or after a failed capture, of which a warning was given.
        """
        storage = self._of(cache)
        programs, seen = storage.programs, storage.seen
        program = programs.get(key)
        if program is not None:
            programs.move_to_end(key)
            update(program)
            return program
        if self.why is not None or key in storage.too_large or key in storage.failed:
            return None
        if key not in seen:
            seen[key] = None
            if len(seen) > 16 * self.most:
                seen.popitem(last=False)
            return None
        try:
            program = make(storage.store)
            update(program)
            program.capture(self.capture)
        except Exception as error:
            self._note(storage, key, error)
            return None
        self._failures = 0
        programs[key] = program
        if len(programs) > self.most:
            with quiet(self.device):
                programs.popitem(last=False)
        return program

    def _note(self, storage: Storage, key: Hashable, error: Exception) -> None:
        """Warn of a capture that failed, and do not try it again."""
        said, what = f"{type(error).__name__}: {error}", "a step of this shape cannot be captured"
        if _out_of_memory(error):
            storage.too_large.add(key)
            what = "there was too little memory to capture a step of this shape"
        else:
            storage.failed.add(key)
            self._failures += 1
        what += ", so it runs without a graph"
        if self._failures >= PATIENCE:
            self.why, what = said, "steps of this model cannot be captured, so it runs without graphs"
        warnings.warn(f"graphs: {what}: {said}", RuntimeWarning, stacklevel=3)

    def _of(self, cache: Slots) -> Storage:
        for storage in self._storages:
            if storage.whole is cache._whole:
                return storage
        lease = cache.lease  # a cache that was copied no longer uses its old memory
        self._drop(lambda storage: storage.free or (lease is not None and storage.lease() is lease))
        storage = Storage(cache)
        self._storages.append(storage)
        return storage

    def _forget(self) -> None:
        """Drop the programs whose owner is gone."""
        gone = [
            (storage.programs, key)
            for storage in self._storages
            for key, program in storage.programs.items()
            if program.owner is not None and program.owner() is None
        ]
        with quiet(self.device) if gone else nullcontext():
            for programs, key in gone:
                del programs[key]

    def _drop(self, which: Callable[[Storage], bool]) -> None:
        captured = any(which(storage) and storage.programs for storage in self._storages)
        with quiet(self.device) if captured else nullcontext():
            self._storages = [storage for storage in self._storages if not which(storage)]


class Steps(Programs):
    """Captured steps of one ``HFModel``.

    Args:
        path: a forward of operators that can be captured (``Runner.capturable``). others: as for ``Programs``.
    """

    def __init__(self, path: Forward, device: torch.device, capture: str, most: int = MOST):
        super().__init__(device, capture, most)
        self.forward = path.forward

    def cache(
        self, shapes: Sequence[KVShape], batch: int, capacity: int, page: int | None = None
    ) -> SlotCache | PagedCache:
        """An empty cache, in slots or pages, in memory used before where that is free and large enough (pages: when rows first need them).

        Raises:
            MemoryError: the cache does not fit.
        """
        if page is not None:
            return PagedCache(StaticPool(shapes, page, self._pages), batch, capacity)
        lent = self.lent(batch, lambda cache: type(cache) is SlotCache and cache.slots > capacity)
        if lent is not None:
            TokenIndex.__init__(lent, batch, capacity)
            return lent
        spare = 64 - capacity % 64  # at least one, for padding
        check_memory(shapes, batch, capacity, spare)
        cache = SlotCache(shapes, batch, capacity, spare)
        self._of(cache)
        return cache

    def _pages(self, page: int, pages: int | None) -> Any:
        """For ``StaticPool``."""
        if pages is None:
            self._drop(lambda storage: storage.free)
            return None
        return self.lent(
            None, lambda pool: type(pool) is StaticPool and pool.page == page and pool.pages >= pages
        )

    def step(
        self, cache: Any, packed: PackedBatch, wanted: bool, taps: Sequence[int] = ()
    ) -> Callable[[], tuple[Tensor | None, dict[int, Tensor]]] | None:
        """A function that feeds a call's tokens and returns the logits ``[K, V]`` that are wanted, and activations ``[T, E]`` of the
        layers ``taps``. They hold until the next step.

        Returns:
            ``None`` where the call is not one for steps, or its step is not captured yet: a shape is captured when it occurs again.
        """
        memory = memory_of(cache)
        if memory is None or not packed.rows:
            return None
        if self.why is not None and not self.captured:
            return None
        counts = [r.end - r.first for r in packed.rows]
        if max(counts) > SMALL or len(counts) * max(counts) > 2 * sum(counts) + 64:
            return None
        kept = [r.end - max(r.first, r.length - 1) if wanted else 0 for r in packed.rows]
        slots, table, page = held(cache, packed.rows)
        plan = packed.plan(slots, table, page)
        if not fits(plan):
            return None
        bucket = bucket_of(counts, kept, max(plan.length), slots, nodes_of(plan))
        drafted, source = packed.drafted, list[int]()
        room = 0
        if drafted is not None:
            N, room = drafted.shape[1], rows_for(len(drafted)) * DRAFTED  # of rows that are not fed, too
            if drafted.numel() > room:
                return None
            source = [
                r.b * N + s - r.length if s >= r.length else -1
                for r in packed.rows
                for s in range(r.first, r.end)
            ]
        keep, t = list[int](), 0
        for count, k in zip(counts, kept):
            keep += range(t + count - k, t + count)
            t += count

        def make(store: StaticStore) -> StaticStep:
            return StaticStep(self.forward, store, bucket, self.device, room, taps)

        def update(step: Any) -> None:
            step.update(plan, packed.ids, packed.positions, keep, drafted, source)

        step = self.program(memory, (bucket, room, tuple(taps)), make, update)
        if step is None:
            return None

        def run() -> tuple[Tensor | None, dict[int, Tensor]]:
            out, seen = step.replay()
            fed = {tap: x[: packed.tokens] for tap, x in zip(taps, seen)}
            return None if out is None or not keep else out[: len(keep)], fed

        return run


def steps_for(
    graphs: bool | str,
    path: Runner,
    model: Any,
    device: torch.device,
    attention: str,
    kv_dtype: torch.dtype | None = None,
) -> Steps | None:
    """The steps for ``HFModel(graphs=...)``; ``None``: no steps.

    Raises:
        ValueError: ``graphs`` asks for steps, and this model does not support them.
    """
    if graphs is False:
        return None
    name = capture_named(graphs, device, model.dtype)
    forward = path.capturable()
    why = forward if isinstance(forward, str) else _why_not(model, device, attention)
    if kv_dtype is not None:  # a step on a GPU has no other kernel
        why = why or triton_backend.reads(device, model.dtype, kv_dtype)
    if name is None or (graphs == "auto" and why):
        return None
    if why:
        raise ValueError(f"graphs is {graphs!r} but {why}: give graphs=False")
    assert not isinstance(forward, str)
    return Steps(forward, device, name)


def capture_named(graphs: bool | str, device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """The entry of ``CAPTURES`` for an argument ``graphs`` and a model; ``None``: no capture.

    Raises:
        ValueError: there is no such entry, or there are no kernels for the model's dtype on a GPU.
    """
    if graphs not in (False, True, "auto", *CAPTURES):
        raise ValueError(f"graphs is {graphs!r}: give False, True, 'auto', or one of {', '.join(CAPTURES)}")
    served = device.type != "cuda" or dtype in triton_backend.DTYPES
    if graphs == "auto":
        return "cuda" if device.type == "cuda" and served and find_spec("triton") is not None else None
    if graphs and not served:
        said = f"graphs is {graphs!r} but the model is {dtype}, for which captured steps have no kernels"
        raise ValueError(f"{said}: give graphs=False")
    return "cuda" if graphs is True else graphs or None


def _identity(module: nn.Module) -> tuple[Any, ...]:
    """What a captured program depends on in a module and cannot see change. Values of weights may change in place."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    places = [None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
    hooks = tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
    return id(module), type(module), *hooks, *places


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, also where that broke a capture, whose end then raises another error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _why_not(model: Any, device: torch.device, attention: str) -> str | None:
    if attention not in ("auto", "triton"):
        return f"attention is {attention!r}, and only the Triton kernel (or 'auto') can be captured"
    if any(p.device != device for p in model.parameters()) or setting(model, "_hf_hook") is not None:
        return "the model is spread over devices"
    return None
