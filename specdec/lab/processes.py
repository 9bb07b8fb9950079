"""Functions called in a process with another environment, to compare what a process decides once, at its start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

Call = Callable[..., Any]
"""``call(function, *arguments)`` calls in the other process and returns here; functions of a module, and values that pickle."""


@contextmanager
def apart(**environment: str) -> Iterator[Call]:
    """One process for all calls in the context, which waits between them; its exceptions are raised here.

    Args:
        environment: variables that are set there before the functions' module is imported.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_set, initargs=(environment,)) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _set(environment: dict[str, str]) -> None:
    os.environ.update(environment)
