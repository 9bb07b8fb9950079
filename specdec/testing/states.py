"""Finds changes that a part must not make: of states, which are values, and of the generators of torch, numpy and Python."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.testing.rules import Rule, lacks

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def snapshot(value: Any, name: str = "state") -> dict[str, str]:
    """Path -> a digest of each plain value, tensor and generator within ``value``.

    Caches (objects with ``sync`` and ``commit``, and stores of keys and values) are left out, because they are used once and follow the
    tokens by themselves. Models, functions, and whatever else has no attributes are left out, too.
    """
    return dict(_leaves(value, name, set()))


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The paths whose values differ."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _leaves(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, str]]:
    if isinstance(value, _PLAIN):
        yield path, repr(value)
    elif isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield path, f"{value.dtype} {list(value.shape)} {hashlib.sha256(data.tobytes()).hexdigest()}"
    elif isinstance(value, np.ndarray | np.generic):
        data = np.ascontiguousarray(value)
        shown = repr(value) if data.dtype == object else hashlib.sha256(data.tobytes()).hexdigest()
        yield path, f"{data.dtype} {data.shape} {shown}"
    elif isinstance(value, torch.Generator):
        yield from _leaves(value.get_state(), path, above)
    elif isinstance(value, np.random.Generator):
        yield path, repr(value.bit_generator.state)
    elif isinstance(value, random.Random):
        yield path, repr(value.getstate())
    elif id(value) not in above:
        yield from _within(value, path, above | {id(value)})


def _within(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, str]]:
    if isinstance(value, list | tuple) and not _named(value):
        yield f"len({path})", str(len(value))
    if isinstance(value, set | frozenset):
        yield path, repr(sorted(map(repr, value)))
    elif not _follows_tokens(value):
        for at, part in _parts(value, path):
            yield from _leaves(part, at, above)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of the entries and fields of a state; nothing of models and functions."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif _named(value):
        yield from ((f"{path}.{name}", part) for name, part in value._asdict().items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
    elif not callable(value):
        yield from ((f"{path}.{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def caches(value: Any, path: str = "state", above: frozenset[int] = frozenset()) -> dict[str, Any]:
    """Path -> the caches within a state: objects with ``sync`` and ``commit``."""
    if lacks(value, "sync", "commit"):
        inside = above | {id(value)}
        parts = [one for one in _parts(value, path) if id(one[1]) not in inside]
        return {at: cache for where, part in parts for at, cache in caches(part, where, inside).items()}
    return {path: value}


def _named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _follows_tokens(value: Any) -> bool:
    return KVStore in type(value).__mro__ or not lacks(value, "sync", "commit")


@contextmanager
def no_global_draws(rule: Rule, call: str) -> Iterator[None]:
    """A context in which any use of a global generator breaks ``rule``."""
    before = _generators()
    yield
    after = _generators()
    for name in before:
        rule.require(before[name] == after[name], f"{call} drew from {name}'s global generator")


def _generators() -> dict[str, bytes]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": pickle.dumps(np.random.get_state()),
        "Python": pickle.dumps(random.getstate()),
    }
