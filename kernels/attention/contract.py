"""What an attention backend is: the functions that ``attention`` calls, and the rules that their results keep.

``conformance.check(name)`` tests a backend against these rules, and ``tests/contracts/test_attention_backends.py`` all that there are.

1. **Shapes.** The output is ``[1, T, Hq, Dv]`` in the query's dtype, the log-sum-exp ``[1, T, Hq]`` in float32, or in float64 for a
   float64 query.
2. **Log-sum-exp.** It is the natural logarithm of the sum of ``exp(score)`` over the slots that the query sees, scores after scale and
   soft cap, plus ``exp(logit)`` of the head's sink logit where there is one. It is not negated.
3. **A query that sees nothing** gets 0, and -inf (the sink logit where there is one).
4. **What no query of a row sees does not count**, NaN and infinities included: slots beyond the row's end, below a window, in another
   branch of a tree, outside of a mask, or of another row. On a GPU a backend may ask for finite numbers there.
5. **Sink logits** take weight and contribute nothing: the output is scaled by the share that the slots keep.
6. **A window** counts the query itself: position p sees positions above ``p - window``, and those below ``initial``. A tree's node stands
   at its root's position plus its depth.
7. **A call that a backend cannot serve is refused** with a reason before anything is computed; one that it does not refuse is served
   exactly, in slots or in pages, for rows in any order, alone or in a batch.

A call without queries never reaches a backend, and rows without queries are in no plan.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specdec.kernels.attention.plan import AttentionPlan
from specdec.kernels.attention.reach import Reach


class Backend(Protocol):
    """A module or an object with these functions. Arguments as for ``api.attention``; ``window`` holds ``initial`` too (``reach``)."""

    def refuses(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        window: Reach = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        lse: bool = False,
    ) -> str | None:
        """Why this backend cannot serve a call, or ``None``. Arguments fit each other already."""
        ...

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: Reach = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """``[1, T, Hq, Dv]``, of a call that was not refused."""
        ...

    def attend_with_lse(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: Reach = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As ``attend``, with the log-sum-exp ``[1, T, Hq]``."""
        ...
