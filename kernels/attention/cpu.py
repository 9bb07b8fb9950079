"""The fast CPU path under one name: C kernels if they can serve a call, else PyTorch's fused attention."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention import native, packed
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach


def refuses(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    lse: bool = False,
) -> str | None:
    """As ``contract.Backend.refuses``: why neither of the two can serve a call."""
    if not query.is_cpu:
        return "it runs on the CPU"
    why = _no_c(query, keys, values, plan, window, softcap, sink_logits)
    if why is None:
        return None
    other = packed.refuses(query, keys, values, plan, window, softcap, sink_logits, lse)
    return other and f"{why}, and {other}"


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Arguments and result as for ``api.attention``."""
    c = _no_c(query, keys, values, plan, window, softcap, sink_logits) is None
    serve = native.attend if c else packed.attend
    return serve(query, keys, values, plan, scale, window, softcap, sink_logits)


def attend_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: Reach = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``attend``, with the log-sum-exp ``[1, T, Hq]`` of the scores; for calls that ``refuses`` allows."""
    c = _no_c(query, keys, values, plan, window, softcap, sink_logits) is None
    serve = native.attend_with_lse if c else packed.attend_with_lse
    return serve(query, keys, values, plan, scale, window, softcap, sink_logits)


def _no_c(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: Reach,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> str | None:
    """Why the C kernels cannot serve a call, or ``None``."""
    return native.supports(query, softcap, sink_logits, plan) or native.fits(
        query, keys, values, plan, window
    )
