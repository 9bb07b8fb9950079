"""Tests run in a checkout that is not installed, too: ``specdec`` is found there, and ``specdec.kernels`` beside it (``kernels/``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def _importable() -> None:
    file = Path(__file__).parents[1] / "recipes/_gpu_ready.py"
    spec = importlib.util.spec_from_file_location("_gpu_ready", file)
    assert spec is not None
    assert spec.loader is not None
    ready = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ready)
    ready.importable()


_importable()
