"""Attention of packed ragged queries over KV slots: chooses a backend by what a call needs, or by name."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention import decomposed, packed, padded, reference
from specdec.kernels.attention.plan import AttentionPlan

BACKENDS = {"packed": packed, "padded": padded, "decomposed": decomposed, "reference": reference}
"""Ways to compute the same: ``auto`` is ``packed`` where it can serve the call, and else ``reference``."""


def check(backend: str, name: str = "backend") -> None:
    """Raise ValueError for an argument ``name`` that is not ``"auto"`` or one of ``BACKENDS``."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"{name} is {backend!r}: there are auto, {', '.join(BACKENDS)}")


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
        backend: a name of ``BACKENDS``, which serves the call or refuses it; ``None`` or ``"auto"`` chooses one that can.
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
    if backend is None or backend == "auto":
        chosen = packed if softcap is None and sinks is None else reference
    else:
        check(backend)
        chosen = BACKENDS[backend]
        why = chosen.supports(query, softcap, sinks)
        if why:
            raise ValueError(
                f"backend {backend!r} cannot serve this call: {why}; 'auto' chooses one that can"
            )
    return chosen.attend(query, keys, values, plan, scale, window, softcap, sinks)
