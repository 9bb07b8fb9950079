"""Imported first by recipes: makes this checkout's ``specdec`` importable if none is installed, and refuses another project of that name."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

spec = find_spec("specdec")
if spec is None or spec.origin is None:
    sys.path.insert(0, str(ROOT))
elif '"Builder"' not in Path(spec.origin).read_text():  # the file of whichever project was installed last
    raise SystemExit(
        f"`import specdec` finds {spec.origin}, which belongs to another project of that name: run `pip uninstall specdec`, then "
        f"`pip install -e .` in {ROOT}"
    )
