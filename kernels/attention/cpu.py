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
    c = _c(query, keys, values, plan, window, softcap, sinks)
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
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores; where ``no_lse`` has nothing against it."""
    c = _c(query, keys, values, plan, window, softcap, sinks)
    serve = native.attend_with_lse if c else packed.attend_with_lse
    return serve(query, keys, values, plan, scale, window, softcap, sinks)


def no_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> str | None:
    """Why this backend cannot say the log-sum-exp of a call that it could serve, or ``None``."""
    if _c(query, keys, values, plan, window, softcap, sinks):
        return None
    return packed.no_lse(query, keys, values, plan, window, softcap, sinks)


def _c(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach,
    softcap: float | None,
    sinks: Tensor | None,
) -> bool:
    """Whether the C kernels serve a call; if not, it is PyTorch's.

    Raises:
        ValueError: neither can: buffers that C does not read, and what PyTorch does not compute.
    """
    why = native.supports(query, softcap, sinks, plan) or native.fits(query, keys, values, plan, window)
    other = packed.supports(query, softcap, sinks, plan)
    if why and other:
        raise ValueError(f"backend 'cpu' cannot serve this call: {why}, and {other}")
    return why is None
