"""Attention of packed ragged queries over KV slots: chooses a backend by what a call needs, or by name."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention import cpu, reference
from specdec.kernels.attention.plan import AttentionPlan

BACKENDS = {"cpu": cpu, "reference": reference}  # in the order in which they are preferred


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Each packed query over the slots that it sees; the new keys and values are in their slots already.

    Args:
        query: ``[1, Hq, T, D]``. keys: ``[B, S, Hkv, D]`` and values: ``[B, S, Hkv, Dv]``, slots; ``Hkv`` divides ``Hq``.
        plan: which row each query belongs to and what it sees.
        scale: of the scores, by default ``D ** -0.5``.
        window: a query at position p sees positions above ``p - window`` only.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: ``[Hq]`` one more logit a head, which takes weight and contributes nothing.
        backend: a name of ``BACKENDS``; by default the first that can serve the call.
    Returns:
        ``[1, T, Hq, Dv]``.
    Raises:
        ValueError: no such backend, or it cannot serve this call.
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if plan.watch is not None:
        plan.watch(query)
    if query.shape[2] == 0:
        return query.new_empty(1, 0, query.shape[1], values.shape[-1])
    if backend is None:
        chosen = cpu if softcap is None and sinks is None else reference
    else:
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}: there are {', '.join(BACKENDS)}")
        chosen = BACKENDS[backend]
        why = chosen.supports(query, softcap, sinks)
        if why:
            raise ValueError(
                f"backend {backend!r} cannot serve this call: {why}; leave backend out to have one chosen"
            )
    return chosen.attend(query, keys, values, plan, scale, window, softcap, sinks)
