"""Runs foreign code with random numbers that a ``Tape`` decides, instead of torch's, Python's and numpy's generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from specdec.audit.external.lazy import Lazy, lazy, refused, words
from specdec.audit.external.mode import DRAWS, Foreign
from specdec.audit.external.tape import CannotWalk, Tape

_SEED = 0x5EC0DEC
_TAPE: ContextVar[Tape] = ContextVar("tape")
_SEEDED: ContextVar[list[bytes]] = ContextVar("seeded")  # the states that torch's generator was seeded to
_manual_seed = torch.manual_seed


@contextmanager
def scripted(tape: Tape) -> Iterator[None]:
    """Random numbers come from ``tape``; torch's, Python's and numpy's generators are left as they were.

    Raises:
        CannotWalk: something drew from one of them past the tape.
    """
    torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in _PATCHES]
    set_tape, set_seeded = _TAPE.set(tape), _SEEDED.set([])
    try:
        torch.default_generator.manual_seed(_SEED)  # torch.manual_seed would touch the other devices
        tape.advanced(id(torch.default_generator), _state())
        for owner, name, new in _PATCHES:
            setattr(owner, name, new)
        with Foreign(tape):
            yield
        expected = [tape.state(id(torch.default_generator)), *_SEEDED.get()]
        _past(_state() not in expected, "torch's generator, in an operator that Python does not see")
        _past(random.getstate() != pythons, "Python's `random`, by a function that was imported earlier")
        now = np.random.get_state(legacy=False)
        moved = now["state"]["pos"] != numpys["state"]["pos"]
        moved |= not np.array_equal(now["state"]["key"], numpys["state"]["key"])
        _past(moved, "`numpy.random`, by a function that was imported earlier")
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
        _TAPE.reset(set_tape)
        _SEEDED.reset(set_seeded)
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)


def _state() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _past(drew: bool, what: str) -> None:
    if drew:
        raise CannotWalk(f"the function drew from {what}: {DRAWS}")


# -- what is put in the place of functions ----------------------------------------------------------------------------------------


def _torch_seed(seed: Any) -> torch.Generator:
    out = _manual_seed(seed)
    _SEEDED.get().append(_state())
    return out


def _seed(*what: Any, **more: Any) -> None:
    _TAPE.get().seeded("python", repr((what, more)).encode())


def _numbers(*shape: int) -> Lazy:
    tape = _TAPE.get()
    return lazy(torch.empty(shape, dtype=torch.float64), tape, tape.numbers(shape, "python"))


def _uniform(low: float = 0.0, high: float = 1.0, size: Any = ()) -> Any:
    shape = (size,) if isinstance(size, int) else tuple(size or ())
    return _numbers(*shape) * (high - low) + low


def _sized(size: Any = ()) -> Any:
    return _uniform(size=size)


def _choice(a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
    options = np.arange(a) if isinstance(a, int) else np.asarray(a)
    shape = () if size is None else (size,) if isinstance(size, int) else tuple(size)
    if not replace and int(np.prod(shape)) > 1:
        raise refused("numpy.random.choice(replace=False)", DRAWS)
    drawn = options[_draw(shape or (1,), np.ones(len(options)) if p is None else p)]
    return drawn if shape else drawn[0]


def _choices(population: Any, weights: Any = None, *, cum_weights: Any = None, k: int = 1) -> list[Any]:
    if cum_weights is not None:
        weights = np.diff(cum_weights, prepend=0)
    return [population[n] for n in _draw((k,), np.ones(len(population)) if weights is None else weights)]


def _draw(shape: tuple[int, ...], weights: Any) -> np.ndarray:
    law, tape = torch.as_tensor(np.asarray(weights, dtype=np.float64)), _TAPE.get()
    return tape.draw(tape.numbers(shape, "python"), law.expand(*shape, -1)).numpy()


def _no(name: str) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        also = "random.random, random.choices, numpy.random.rand and numpy.random.choice can, too"
        raise refused(name, f"{DRAWS}; {also}")

    return raises


_NOT_PYTHON = words(
    "randint randrange gauss normalvariate expovariate shuffle sample choice betavariate getrandbits Random"
)
_NOT_NUMPY = words(
    "randn randint normal standard_normal exponential standard_exponential gumbel permutation shuffle multinomial default_rng RandomState"
)
_PATCHES: list[tuple[Any, str, Any]] = [
    (torch, "manual_seed", _torch_seed),
    (random, "seed", _seed),
    (random, "random", _numbers),
    (random, "uniform", _uniform),
    (random, "choices", _choices),
    *((random, name, _no(f"random.{name}")) for name in _NOT_PYTHON),
    (np.random, "seed", _seed),
    (np.random, "rand", _numbers),
    (np.random, "random", _sized),
    (np.random, "random_sample", _sized),
    (np.random, "uniform", _uniform),
    (np.random, "choice", _choice),
    *((np.random, name, _no(f"numpy.random.{name}")) for name in _NOT_NUMPY),
]
