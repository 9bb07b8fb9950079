"""``torch.compile`` for the parts of a model between its attention: norms and MLPs, where it fuses what is one operator after another.

Attention goes to slots by a plan of Python values, which a compiler would specialise on; so it stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARTS = ("RMSNorm", "MLP")


def compile_parts(model: Any, options: Mapping[str, Any]) -> int:
    """Compile all norms and MLPs of ``model`` in place, for any number of tokens; how many there are.

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
