"""The contract of attention backends: the functions that ``attention`` calls, and the rules that their results obey.

``conformance.check(name)`` tests a backend against these rules, and ``specdec.testing.check_backend`` one of anybody's;
``tests/contracts/test_attention_backends.py`` tests all of them.

1. **Shapes.** The output is ``[1, T, Hq, Dv]`` in the query's dtype, the log-sum-exp ``[1, T, Hq]`` in float32, or in float64 for a
   float64 query.
2. **Log-sum-exp.** It is the natural logarithm of the sum of ``exp(score)`` over the slots that the query sees, scores after scale and
   soft cap, plus ``exp(logit)`` of the head's sink logit where there is one. It is not negated.
3. **A query that sees nothing** gets the output 0 and the log-sum-exp -inf (or the sink logit, if any).
4. **Slots that no query of a row sees do not affect it**, NaN and infinities included: slots beyond the row's end, below a window, in
   another branch of a tree, outside of a mask, or of another row. On a GPU a backend may require finite values there.
5. **Sink logits** take weight and contribute nothing: the output is scaled by the remaining weight of the slots.
6. **A window** includes the query itself: position p sees positions above ``p - window``, and those below ``initial``. A tree node's
   position is its root's position plus its depth.
7. **A call that a backend cannot serve is refused** with a reason before anything is computed; all other calls are served exactly,
   in slots or in pages, for rows in any order, alone or in a batch.

A call without queries never reaches a backend, and plans have no rows without queries. Keys and values have the query's dtype, except that
those of ``choice.EIGHT_BITS`` are given eight bits as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

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
        """Why this backend cannot serve a call, or ``None``. The caller has checked that the arguments fit each other."""
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
        """The output ``[1, T, Hq, Dv]`` of a call that was not refused."""
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


def without_lse(attend_with_lse: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """``attend`` of a backend that computes its log-sum-exps in any case."""

    def attend(*call: Any, **settings: Any) -> Tensor:
        return attend_with_lse(*call, **settings)[0]

    return attend
