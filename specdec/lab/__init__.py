"""Tools for measurements: models and prompts, clocks, steady runs, τ with intervals, calibrated throughput models, and reports.

docs/lab.md lists the modules. Nothing else in the package imports this one.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

__all__ = sorted(module.name for module in iter_modules(__path__))


def __getattr__(name: str) -> Any:
    """A module, imported at its first use (``lab.tau``)."""
    if name in __all__:
        return import_module(f"specdec.lab.{name}")
    raise AttributeError(f"module 'specdec.lab' has no attribute {name!r}: there are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
