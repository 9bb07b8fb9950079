"""The fast path of a CPU by one name: C kernels where they can serve a call, and PyTorch's fused attention where not."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention import native, packed
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach


def supports(
    query: Tensor, softcap: float | None, sinks: Tensor | None, plan: AttentionPlan | None = None
) -> str | None:
    """Why this backend cannot serve a call, or ``None``."""
    if not query.is_cpu:
        return "it runs on the CPU"
    why = native.supports(query, softcap, sinks, plan)
    return why and packed.supports(query, softcap, sinks, plan)


def refuses(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: bool = False,
) -> str | None:
    """Why neither can serve a call with these buffers, or ``None``."""
    why = _no_c(query, keys, values, plan, window, softcap, sinks)
    if why is None:
        return None
    other = packed.supports(query, softcap, sinks, plan)
    other = other or packed.refuses(query, keys, values, plan, window, softcap, sinks, lse)
    return other and f"{why}, and {other}"


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``."""
    c = _no_c(query, keys, values, plan, window, softcap, sinks) is None
    serve = native.attend if c else packed.attend
    return serve(query, keys, values, plan, scale, window, softcap, sinks)


def attend_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores; where ``refuses`` has nothing against it."""
    c = _no_c(query, keys, values, plan, window, softcap, sinks) is None
    serve = native.attend_with_lse if c else packed.attend_with_lse
    return serve(query, keys, values, plan, scale, window, softcap, sinks)


def _no_c(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach,
    softcap: float | None,
    sinks: Tensor | None,
) -> str | None:
    """Why the C kernels cannot serve a call, or ``None``."""
    return native.supports(query, softcap, sinks, plan) or native.fits(query, keys, values, plan, window)
