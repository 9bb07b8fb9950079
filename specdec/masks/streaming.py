"""First tokens and a window of the latest: the mask of StreamingLLM (arXiv 2309.17453) and of SPIRe's drafts (arXiv 2504.06419)."""

from __future__ import annotations

from specdec.arguments import at_least
from specdec.masks.causal import Causal
from specdec.masks.mask import Mask
from specdec.masks.sinks import Sinks
from specdec.masks.window import Window


def streaming(window: int | None = 64, sinks: int = 1) -> Mask:
    """``Causal() & (Sinks(sinks) | Window(window))``, without the parts that change nothing.

    Args:
        window: latest positions, the query's own included; ``None`` for all. sinks: first positions.
    Raises:
        TypeError: not a whole number. ValueError: a window below 1, negative sinks.
    """
    if isinstance(window, Mask):
        raise TypeError(
            f"window is {window!r}: give the number of positions, such as window=64. A mask is given as one, to models.Masked(model, mask), or "
            "as mask= to SpireModel.from_target, MagicDec and training's Parallel"
        )
    if window is not None:
        remedy = "a query must see at least itself, which is window=1"
        at_least(1, "window", window, remedy, ", or None for all positions")
    at_least(0, "sinks", sinks, "how many first positions stay visible, 0 or more")
    if window is None:
        return Causal()
    return Causal() & (Sinks(sinks) | Window(window)) if sinks else Causal() & Window(window)
