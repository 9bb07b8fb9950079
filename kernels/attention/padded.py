"""Every row works on as many slots as the longest has, masked, in one call a layer: what request decomposition improves on (SPIN).

A baseline. One call serves neighbouring rows with equally many queries, as in a verify pass. Slots between a shorter row's end and
the longest row's are read with weight 0; rows are computed one by one if one of them was not finite.
"""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention.fused import fused_supports
from specdec.kernels.attention.packed import careful, join
from specdec.kernels.attention.plan import AttentionPlan

supports = fused_supports


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
    widest = max(plan.length)
    if window is not None and plan.ordered and window >= widest:
        window = None
    return join(
        [
            careful(query, keys, values, plan, plan.at(s, s.r0, s.r1, widest), 0, scale, window)
            for s in plan.runs()
        ]
    )
