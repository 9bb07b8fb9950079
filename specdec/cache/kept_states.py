"""Prompts that begin with an earlier one, for models whose state cannot be cut: states are kept at the ends of prompts, and where two prompts part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.kept import Kept, made_by
from specdec.cache.states import State
from specdec.configs import setting

LEAST = 64  # tokens that a state must save beyond another one


class _Entry(NamedTuple):
    state: State
    tokens: np.ndarray
    bytes: int
    ready: list[torch.cuda.Event]


class KeptStates(Kept):
    """States of earlier prompts. The one that was not used for the longest time is dropped first.

    A state after a prompt helps only a text that begins with the whole prompt, as the next turn of a conversation does. Where a text has ``LEAST`` tokens in common
    with a kept one and then parts from it, a state is kept there, too; it helps from the third such text on.

    Args, Attributes: as of ``Kept``.
    """

    def __init__(self, limit: int, weights: Callable[[], Iterable[Tensor]]):
        super().__init__(limit, weights)
        self._entries: OrderedDict[bytes, _Entry] = (
            OrderedDict()
        )  # by tokens; the one that was used last is the last

    def _clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def find(self, text: tuple[int, ...]) -> tuple[State, int]:
        """A copy of the longest state that has read a beginning of ``text``, or all of it (an empty one if there is none), and up to where the text should be
        read next to leave a state: to a place where it parts from a kept one, or to its end."""
        words, part, best, nothing = np.array(text, dtype=np.int64), 0, None, (State(), len(text))
        with self._lock:
            if self._changed():
                return nothing
            for key, entry in self._entries.items():
                n = min(len(words), len(entry.tokens))
                differ = words[:n] != entry.tokens[:n]
                same = int(differ.argmax()) if differ.any() else n
                part = max(part, same)
                if same == len(entry.tokens) and (best is None or same > len(self._entries[best].tokens)):
                    best = key
            self.asked += len(text)
            if best is None:
                return State(), part if part >= LEAST else len(text)
            self._entries.move_to_end(best)
            entry = self._entries[best]
        held = len(entry.tokens)
        for tensor in _tensors(entry.state, set()):
            if (
                tensor.is_cuda
            ):  # which another thread's stream may have made, and which may be dropped before it is read
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        for event in entry.ready:
            event.wait()
        try:
            with torch.inference_mode():  # as states are made
                own = entry.state.copy()
        except (MemoryError, torch.OutOfMemoryError):
            self.clear()
            return nothing
        self.found += held
        return own, part if part >= held + LEAST else len(text)

    def keep(self, state: State) -> None:
        """Keep a copy of a state, unless weights have changed since its cache was made, or there is no room for it."""
        words = np.array(state.tokens, dtype=np.int64)
        key = words.tobytes()
        need = sum(tensor.nbytes for tensor in _tensors(state, set())) + 3 * words.nbytes
        with self._lock:
            if not key or need > self.limit or self._changed():
                return
            if key in self._entries:
                self._entries.move_to_end(key)
                return
        try:
            with torch.inference_mode():
                own = _compact(state.copy())
        except (MemoryError, torch.OutOfMemoryError):
            self.clear()
            return
        entry = _Entry(own, words, need, made_by(_tensors(own, set())))
        with self._lock:
            if key not in self._entries:
                self._entries[key] = entry
                self.bytes += need
            while self.bytes > self.limit:
                self.bytes -= self._entries.popitem(last=False)[1].bytes


def _compact(state: State) -> State:
    """The state, whose layers are its own, without memory that no tensor shows: layers with windows hold views of longer texts."""
    for layer in setting(state.memory, "layers") or ():
        for name in ("keys", "values"):
            tensor = setting(layer, name)
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
                setattr(layer, name, tensor.clone())
    return state


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an object holds, each once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    with suppress(TypeError):  # numbers and the like have no attributes
        inside = thing if isinstance(thing, (list, tuple, dict)) else vars(thing)
        for one in inside.values() if isinstance(inside, dict) else inside:
            yield from _tensors(one, seen)
