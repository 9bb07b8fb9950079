"""Functions called in a process that was started with another environment, to compare what a process decides once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

Call = Callable[..., Any]
"""``call(function, *arguments)`` calls there and returns here; functions of a module, and values that pickle."""


@contextmanager
def apart(**environment: str) -> Iterator[Call]:
    """One process for all calls in here, which waits between them; its exceptions are raised here."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_set, initargs=(environment,)) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _set(environment: dict[str, str]) -> None:
    os.environ.update(environment)
