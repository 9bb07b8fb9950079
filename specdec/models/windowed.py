"""Any packed Hugging Face model with constant-size KV: every layer attends to the first tokens and a window of the latest.

StreamingLLM's mask (Xiao et al., arXiv 2309.17453) at positions of the original text.
"""

from __future__ import annotations

from specdec.masks import streaming
from specdec.models.hf import HFModel
from specdec.models.masked import Masked


class Windowed(Masked):
    """``Masked`` under ``masks.streaming(window, sinks)``: the first ``sinks`` tokens and the latest ``window``, the query included.

    Memory and time of a step do not depend on the length of the text.

    Args:
        model: of a family that runs packed. It is shared, not copied, and not changed.
        window: at least 1. sinks: 0 or more; a text that is shorter sees all of itself.
        block: the most proposed tokens a row that are in flight at a time.
    Raises:
        ValueError: a window below 1, negative sinks, a block below 1.
        UnsupportedModel: a family that is run padded: its mask goes by slot.
    """

    def __init__(self, model: HFModel, window: int = 64, sinks: int = 1, *, block: int = 16):
        if window is None:
            raise TypeError("window is None: give a whole number; without a window use the HFModel itself")
        super().__init__(model, streaming(window, sinks), block=block, storage="ring")
        self.window, self.sinks = window, sinks

    def __repr__(self) -> str:
        return f"Windowed({HFModel.__repr__(self)}, window={self.window}, sinks={self.sinks})"
