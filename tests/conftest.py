"""Tests run in a checkout that is not installed, too: ``specdec`` and ``recipes`` are found at its root."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)
