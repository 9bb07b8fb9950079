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

    def __init__(self, limit: int, parameters: Callable[[], Iterable[Tensor]]):
        super().__init__(limit, parameters)
        self._entries: OrderedDict[tuple[int, ...], _Entry] = (
            OrderedDict()
        )  # the one that was used last is the last

    def _clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def find(self, text: tuple[int, ...]) -> tuple[State, int]:
        """A copy of the longest state that has read a beginning of ``text`` (an empty one without), and up to where the text should be read next to
        leave a state: to a place where it parts from a kept one, or to its end."""
        words, part, best = np.array(text, dtype=np.int64), 0, None
        with self._lock:
            if self._changed():
                return State(), len(text)
            for key, entry in self._entries.items():
                n = min(len(words), len(entry.tokens))
                differ = words[:n] != entry.tokens[:n]
                same = int(differ.argmax()) if differ.any() else n
                part = max(part, same)
                if same == len(entry.tokens) and (best is None or same > len(best)):
                    best = key
            self.asked += len(text)
            if best is None:
                return State(), part if part >= LEAST else len(text)
            self._entries.move_to_end(best)
            self.found += len(best)
            entry = self._entries[best]
        for event in entry.ready:
            event.wait()
        with torch.inference_mode():
            return entry.state.copy(), part if part >= len(best) + LEAST else len(text)

    def keep(self, state: State) -> None:
        """Keep a copy of a state, unless one of its text is kept already or there is no memory."""
        if not state.tokens or state.tokens in self._entries:
            return
        try:
            with torch.inference_mode():  # as states are made
                own = state.copy()
        except (MemoryError, torch.OutOfMemoryError):
            self.clear()
            return
        tensors = list(_tensors(own, set()))
        entry = _Entry(
            own, np.array(own.tokens, dtype=np.int64), sum(t.nbytes for t in tensors), made_by(tensors)
        )
        with self._lock:
            if entry.bytes > self.limit or own.tokens in self._entries:
                return
            self._entries[own.tokens] = entry
            self.bytes += entry.bytes
            while self.bytes > self.limit:
                self.bytes -= self._entries.popitem(last=False)[1].bytes


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
