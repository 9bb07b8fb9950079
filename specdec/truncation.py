"""Top-k, top-p and min-p with transformers' own warpers, the same for all rows or each request's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers import LogitsProcessor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.arguments import number
from specdec.kernels.device import to_device
from specdec.kernels.nucleus import WIDE, nucleus
from specdec.per_request import PerRequest
from specdec.types import Context


@dataclass(frozen=True)
class Truncation:
    """Which tokens are kept; a sequence has an entry for each request."""

    top_k: Any = None
    top_p: Any = None
    min_p: Any = None

    def check(self) -> None:
        """Raise TypeError for a setting that is no number, and ValueError for one that is out of range."""
        for top_k in _entries(self.top_k):
            if top_k is not None and (not isinstance(top_k, int) or top_k is True or top_k < 1):
                raise ValueError(f"top_k is {top_k}: it must be a whole number >= 1 (None keeps every token)")
        for top_p in _entries(self.top_p):
            if top_p is not None:
                number("top_p", top_p)
                if not 0 < top_p <= 1:
                    raise ValueError(f"top_p is {top_p}: it must be in (0, 1] (None or 1 keeps every token)")
        for min_p in _entries(self.min_p):
            if min_p is not None:
                number("min_p", min_p)
                if not 0 <= min_p <= 1:
                    raise ValueError(f"min_p is {min_p}: it must be in [0, 1] (None or 0 keeps every token)")

    def __call__(self, scores: Tensor, context: Context, row: Callable[[], Tensor]) -> Tensor:
        """``scores [K, V]`` with -inf for tokens that are not kept. ``row()``: ``[K]`` on the host, the row of ``context`` of each."""
        several = [one for one in (self.top_k, self.top_p, self.min_p) if isinstance(one, Sequence)]
        if not several:
            return self._warped(scores)
        if all(isinstance(one, PerRequest) and not one.own for one in several):
            return _shared(*self._of(-1))._warped(scores)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for b, one in enumerate(context.request.tolist()):
            groups.setdefault(self._of(one), []).append(b)
        whole = scores
        for settings, rows in groups.items():
            kind = _shared(*settings)
            if len(groups) == 1:
                return kind._warped(scores)
            if kind.warpers:
                at = torch.isin(row(), torch.tensor(rows)).nonzero()[:, 0]
                if len(at):
                    at = to_device(at, scores.device)
                    scores = whole.clone() if scores is whole else scores
                    scores.index_copy_(0, at, kind._warped(whole.index_select(0, at)))
        return scores

    def _of(self, request: int) -> tuple[Any, ...]:
        """The settings of one request."""
        settings = (self.top_k, self.top_p, self.min_p)
        return tuple(one[request] if isinstance(one, Sequence) else one for one in settings)

    def _warped(self, scores: Tensor) -> Tensor:
        """``scores [K, V]`` with -inf for tokens that are not kept, where all rows share the settings."""
        none = torch.empty(scores.shape[0], 0, dtype=torch.long, device=scores.device)
        for warper in self.warpers:
            scores = warper(none, scores)
        return scores

    @cached_property
    def warpers(self) -> list[LogitsProcessor]:
        made: list[LogitsProcessor] = []
        if self.top_k is not None:
            made.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            made.append(_TopP(float(self.top_p)))
        if self.min_p is not None and self.min_p > 0:
            made.append(MinPLogitsWarper(self.min_p))
        return made


@lru_cache(64)
def _shared(top_k: int | None, top_p: float | None, min_p: float | None) -> Truncation:
    """The truncation of requests with these settings."""
    return Truncation(top_k, top_p, min_p)


def _entries(setting: Any) -> Sequence[Any]:
    """The values of a setting that are known beforehand."""
    if isinstance(setting, PerRequest):
        return (setting.default,)
    return setting if isinstance(setting, tuple) else (setting,)


class _TopP(TopPLogitsWarper):
    """Transformers' warper; on a CPU, where it takes most of its time to sort, without sorting large vocabularies.

    Of equal scores at the threshold, as logits in half precision often have, the two may keep different ones.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # A step that is recorded cannot look at values.
        if scores.is_cpu and scores.shape[-1] > 4 * WIDE and not is_in_torch_dispatch_mode():
            return nucleus(scores, self.top_p)
        return super().__call__(input_ids, scores)
