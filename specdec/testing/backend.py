"""``check_backend``: tries the rules of ``kernels.attention.contract`` on an attention backend, the library's or your own."""

from __future__ import annotations

from typing import Any

import torch

from specdec.arguments import name_of
from specdec.kernels.attention import choice, conformance
from specdec.testing.rules import BrokenRule, Kept, Rule, lacks

OUTPUT = Rule("output", "compare with kernels.attention.reference.attend on the call that is named")
SHAPE = Rule(
    "shape",
    "return [1, T, Hq, Dv] in the query's dtype, and log-sum-exps [1, T, Hq] in float32 (float64 for float64)",
)
LSE = Rule(
    "log-sum-exp",
    "return the natural logarithm of the sum of exp(score), positive in sign, and -inf (or the sink logit) where a query sees nothing",
)
UNSEEN = Rule(
    "unseen",
    "leave slots that no query sees out of every sum: 0 * NaN is NaN, so select instead of multiplying by 0",
)
SERVES = Rule(
    "serves", "refuse with a reason only what cannot be computed; a plain call of one token must be"
)
_RULES = {rule.name: rule for rule in (OUTPUT, SHAPE, LSE, UNSEEN)}


def check_backend(
    backend: Any,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    size: int = 16,
) -> Kept:
    """Run calls of every kind through an attention backend, and compare with the reference in float64.

    Args:
        backend: an object or a module with ``refuses``, ``attend`` and ``attend_with_lse``, or a name of ``BACKENDS``.
        device, dtype: of the tensors. heads: how many the query has (keys have 2). size: of a head.
    Returns:
        the rules that are kept, and how many kinds of calls the backend refused.
    Raises:
        BrokenRule: the first rule that is broken, the call and the remedy. TypeError: the backend lacks a method.
    """
    name = backend if isinstance(backend, str) else name_of(backend)
    if not isinstance(backend, str):
        missing = lacks(backend, "refuses", "attend", "attend_with_lse")
        if isinstance(backend, type) or missing:
            raise TypeError(
                f"backend is {backend!r}: give an object with {', '.join(missing) or 'methods, not a class'}"
            )
    with choice.lent(backend) as asked:
        try:
            served = conformance.check(asked, device, dtype, heads, size)
        except conformance.Broken as error:
            broken = BrokenRule(_RULES[error.rule], str(error))
        except ValueError as error:
            broken = BrokenRule(SERVES, str(error))
        except Exception as error:
            broken = BrokenRule(
                SERVES, f"a call that it did not refuse raised {type(error).__name__}: {error}"
            )
        else:
            every = sum(1 for _ in conformance.cases(heads))
            left = every - len(served)
            refused = {"calls": f"{left} of {every} kinds are refused"} if left else {}
            return Kept(name, tuple(rule for rule in (*_RULES, SERVES.name)), refused)
    broken.part = name
    raise broken
