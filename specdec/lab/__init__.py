"""Measurements: record a target once, replay any draft on the record, compare, time, decide; and the tools that recipes share.

``record``, ``replay``, ``compare``, ``time`` and ``decide`` are functions of this package; docs/lab.md lists the modules. Nothing else in the package imports it.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

FUNCTIONS = {
    "record": "recording",
    "replay": "replaying",
    "simulate": "simulating",
    "compare": "comparing",
    "differences": "differing",
    "time": "timing",
    "decide": "deciding",
    "optimality": "bounds",
    "Distance": "distance",
    "Times": "timing",
    "Trace": "traces",
}
MODULES = tuple(module.name for module in iter_modules(__path__))

__all__ = sorted({*MODULES, *FUNCTIONS})


def __getattr__(name: str) -> Any:
    """A function, or a module, imported at its first use (``lab.record``, ``lab.tau``)."""
    if name in FUNCTIONS:
        return getattr(import_module(f"specdec.lab.{FUNCTIONS[name]}"), name)
    if name in MODULES:
        return import_module(f"specdec.lab.{name}")
    raise AttributeError(f"module 'specdec.lab' has no attribute {name!r}: there are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
