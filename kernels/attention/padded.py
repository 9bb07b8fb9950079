"""All rows padded to the longest, masked, in one call per layer: the baseline of request decomposition (SPIN).

One call serves neighbouring rows with equally many queries, as in a verification pass. Slots between a shorter row's end and the
longest row's, and hidden ones, are read with weight 0; if they are not finite, rows are computed one by one (``packed``).
"""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.attention.packed import Part, Segmented, careful
from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach, binding


def parts(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float, window: Reach, lse: bool
) -> list[Part]:
    """One call for neighbouring rows, as long as the longest of all."""
    widest = max(plan.length)
    if plan.ordered:
        window = binding(window, widest)
    segments = [plan.at(s, s.r0, s.r1, widest) for s in plan.runs()]
    return [careful(query, keys, values, plan, s, 0, scale, window, lse) for s in segments]


_backend = Segmented(parts)
refuses, attend, attend_with_lse = _backend.refuses, _backend.attend, _backend.attend_with_lse
