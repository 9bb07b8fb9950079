"""One suite for every part of a kind: the parts are found by looking at the package, so that a new one needs no edit here.

A part is a public class that a module (or a folder) of the package defines and that has the methods of its kind. An instance comes
from the first of these that the class has:

1. ``example(model)``, a static or class method on the part;
2. construction without arguments;
3. construction from a ``TableModel`` alone.

A draft that reads its target, which it says by ``DraftInfo.taps`` or ``follow``, is built from the target: a tiny ``HFModel``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any


def modules(package: ModuleType) -> list[ModuleType]:
    """The package's modules, one algorithm each."""
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def parts(package: ModuleType, *methods: str) -> dict[str, type]:
    """Name -> class of every part with these methods that some module of the package defines."""
    return {
        name: cls
        for module in modules(package)
        for name, cls in vars(module).items()
        if inspect.isclass(cls)
        and not inspect.isabstract(cls)
        and f"{cls.__module__}.".startswith(f"{module.__name__}.")
        and not name.startswith("_")
        and all(callable(getattr(cls, method, None)) for method in methods)
    }


def build(cls: type, model: Any) -> Any:
    """An instance by the convention above; a ``TypeError`` that names it when there is none."""
    if hasattr(cls, "example"):
        return cls.example(model)
    required = [
        p
        for p in inspect.signature(cls).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) > 1:
        raise TypeError(
            f"{cls.__name__} needs {', '.join(p.name for p in required)}: give it a static method example(model) that "
            "returns an instance, so that the contract tests can build one"
        )
    return cls(model) if required else cls()
