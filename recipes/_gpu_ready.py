"""Makes ``specdec`` importable from a checkout that is not installed, and chooses Triton's interpreter where there is no GPU.

The tests use the first half (``tests/conftest.py``). To be imported before torch, triton and specdec: Triton decides once, at its import, whether kernels are interpreted.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "specdec.kernels"  # the package that lies beside the others, in kernels/ (pyproject.toml)


class _Kernels:
    """Finds ``specdec.kernels`` in the checkout."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != KERNELS:
            return None
        folder = ROOT / "kernels"
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def importable() -> None:
    """``specdec`` comes from this checkout where it is not installed; ``_Kernels`` is asked for what no other finder knows."""
    if importlib.util.find_spec("specdec") is None:
        sys.path.insert(0, str(ROOT))
    if _Kernels not in sys.meta_path:
        sys.meta_path.append(_Kernels)  # type: ignore[arg-type]


def ready(device: str) -> None:
    """Call before anything heavy is imported."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # training takes a GPU wherever it sees one
    importable()
