"""``torch.compile`` for norms and MLPs, whose operators it fuses.

Attention is not compiled: its plan consists of Python values, for which a compiler would specialise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARTS = ("RMSNorm", "MLP")


def compile_parts(model: Any, options: Mapping[str, Any]) -> int:
    """Compile all norms and MLPs of ``model`` in place, for any number of tokens; returns how many there are.

    Args:
        options: for ``torch.compile`` (``backend``, ``mode``, ...).
    Raises:
        ValueError: the model has neither.
    """
    parts = [part for part in model.modules() if type(part).__name__.endswith(PARTS)]
    if not parts:
        raise ValueError(
            f"compile is set but {type(model).__name__} has no module whose class ends in {' or '.join(PARTS)}: leave it False"
        )
    for part in parts:
        part.compile(**{"dynamic": True, **options})
    return len(parts)
