"""The fast CPU path under one name: C kernels if they can serve a call, else PyTorch's fused attention."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from specdec.kernels.attention import native, packed
from specdec.kernels.attention.plan import AttentionPlan


def refuses(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, *settings: Any, **more: Any
) -> str | None:
    """As ``contract.Backend.refuses``: why neither of the two can serve a call."""
    if not query.is_cpu:
        return "it runs on the CPU"
    call = query, keys, values, plan, *settings
    why = native.refuses(*call, **more)
    other = why and packed.refuses(*call, **more)
    return other and f"{why}, and {other}"


def _server(query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, *settings: Any) -> ModuleType:
    return packed if native.refuses(query, keys, values, plan, *settings[1:]) else native


def attend(*call: Any) -> Tensor:
    """Arguments and result as for ``api.attention``."""
    return _server(*call).attend(*call)


def attend_with_lse(*call: Any) -> tuple[Tensor, Tensor]:
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores; for calls that ``refuses`` allows."""
    return _server(*call).attend_with_lse(*call)
