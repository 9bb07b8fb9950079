"""The fast path of a CPU by one name: C kernels where they can serve a call, and PyTorch's fused attention where not."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention import native, packed
from specdec.kernels.attention.plan import AttentionPlan


def supports(
    query: Tensor, softcap: float | None, sinks: Tensor | None, plan: AttentionPlan | None = None
) -> str | None:
    """Why this backend cannot serve a call, or ``None``."""
    if not query.is_cpu:
        return "it runs on the CPU"
    why = native.supports(query, softcap, sinks, plan)
    return why and packed.supports(query, softcap, sinks, plan)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``."""
    c = native.supports(query, softcap, sinks, plan) or native.fits(query, keys, values, plan, window)
    serve = packed.attend if c else native.attend
    return serve(query, keys, values, plan, scale, window, softcap, sinks)
