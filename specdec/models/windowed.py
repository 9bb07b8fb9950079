"""Any packed Hugging Face model with constant-size KV: every layer attends to the first tokens and a window of the latest.

StreamingLLM's mask (Xiao et al., arXiv 2309.17453) at positions of the original text.
"""

from __future__ import annotations

import os
from typing import Literal

from specdec.masks import streaming
from specdec.models.hf import HFModel
from specdec.models.masked import Masked


class Windowed(Masked):
    """``Masked`` under ``masks.streaming(window, sinks)``: the first ``sinks`` tokens and the latest ``window``, the query included.

    Memory and time of a step do not depend on the length of the text.

    Args:
        model: of a family that runs packed, or its name or folder. It is shared, neither copied nor changed.
        window: at least 1. sinks: 0 or more; in a shorter text all tokens are sinks.
        block: the most proposed tokens of a row in flight.
    Raises:
        ValueError: the window or the block is below 1, or sinks are negative.
        UnsupportedModel: the family runs padded, where masks are by slot.
    """

    def __init__(
        self, model: HFModel | str | os.PathLike[str], window: int = 64, sinks: int = 1, *, block: int = 16
    ):
        if window is None:
            raise TypeError("window is None: give a whole number; without a window use the HFModel itself")
        super().__init__(model, streaming(window, sinks), block=block, storage="ring")
        self.window, self.sinks = window, sinks

    @property
    def fast_chain(self) -> Literal["slots", "ring"] | None:
        return "ring" if type(self) is Windowed else None

    def __repr__(self) -> str:
        return f"Windowed({HFModel.__repr__(self)}, window={self.window}, sinks={self.sinks})"
