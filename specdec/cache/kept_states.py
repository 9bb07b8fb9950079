"""Prompts that begin with an earlier text, for models whose state cannot be cut: states are kept at the ends of prompts and answers, and where two prompts
part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.kept import Kept, Signs, made_by, use
from specdec.cache.states import State
from specdec.configs import setting
from specdec.types import common

LEAST = 64  # tokens that a state must save beyond another one


class _Entry(NamedTuple):
    """A state, its tokens, the bytes of both, and events of the streams that make it, on GPUs."""

    state: State
    tokens: np.ndarray
    bytes: int
    ready: list[torch.cuda.Event]


class KeptStates(Kept[bytes, _Entry]):
    """States of earlier texts, by their tokens.

    A state after a text helps only a prompt that begins with the whole text, as the next turn of a conversation does. Where a text has ``LEAST`` tokens in common
    with a kept one and then parts from it, a state is kept there, too; it helps from the third such text on.

    Args, Attributes: as of ``Kept``.
    """

    def find(self, text: tuple[int, ...]) -> tuple[State, int]:
        """A copy of the longest kept state that ``text`` begins with (an empty one if there is none), and the length at which the next state is to be kept: where
        ``text`` parts from a kept text, or its end."""
        words, part, best = np.array(text, dtype=np.int64), 0, None
        with self._lock:
            if self._changed():
                return State(), len(text)
            for entry in self._held.values():
                same = common(words, entry.tokens)
                part = max(part, same)
                if same == len(entry.tokens) and (best is None or same > len(best.tokens)):
                    best = entry
            if best is not None:
                self._held.move_to_end(best.tokens.tobytes())
        own = State()
        if best is not None:
            use(_tensors((best.state.memory, best.state.logits), set()), best.ready)
            try:
                own = best.state.copy()
            except (MemoryError, torch.OutOfMemoryError):
                self.clear()
        held = len(own.tokens)
        with self._lock:
            self.asked += len(text)
            self.found += held
        return own, part if part >= held + LEAST else len(text)

    def keep(self, state: State, begun: Signs | None = None) -> None:
        """Keep a copy of a state, unless weights have changed since its cache was made, or there is no room for it.

        Args:
            begun: ``version`` when its row began to be read; ``None``: it is the present one.
        """
        words = np.array(state.tokens, dtype=np.int64)
        key = words.tobytes()
        with self._lock:
            current = begun is None or (begun is self.version and self._same_weights())
            if not key or not current or (begun is None and self._changed()):
                return
            if key in self._held:
                self._held.move_to_end(key)
                return
            version = self.version
        tensors = _tensors((state.memory, state.logits), set())
        need = sum(tensor.nbytes for tensor in tensors) + 3 * words.nbytes
        if need > self.limit:
            return
        try:
            own = _compact(state.copy())
        except (MemoryError, torch.OutOfMemoryError):
            self.clear()
            return
        ready = made_by(_tensors((own.memory, own.logits), set()))
        with self._lock:
            if self.version is version:
                self._put(key, _Entry(own, words, need, ready))


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
