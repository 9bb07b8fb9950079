"""Calls functions in a process with another environment, to compare settings that are fixed when a process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

Call = Callable[..., Any]
"""``call(function, *arguments)`` runs a module's function in the other process; arguments and results are pickled."""


@contextmanager
def apart(**environment: str) -> Iterator[Call]:
    """One process for all calls in the context; its exceptions are raised here.

    Args:
        environment: variables that are set before the functions' module is imported.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_set, initargs=(environment,)) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _set(environment: dict[str, str]) -> None:
    os.environ.update(environment)
