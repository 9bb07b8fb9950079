"""What drafts have in common that remember nothing between rounds."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specdec.types import Context, Round


class Stateless:
    """The methods of a draft, except ``propose``, for one whose state is ``None``."""

    def init(self, context: Context, target_cache: Any) -> None:
        return None

    def observe(self, state: None, round: Round) -> None:
        return None

    def select(self, state: None, rows: Tensor) -> None:
        return None

    def join(self, state: None, other: None) -> None:
        return None
