"""Errors of outputs relative to a float64 reference, and of a verifier's decisions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""The largest relative error of a result's vectors (``worst``) that counts as correct, by dtype."""


def worst(out: Tensor, reference: Tensor) -> float:
    """The largest ``|out - reference| / |reference|`` of the last dimension's vectors: one wrong head of one query is an error of 1.

    It is not finite if any value of ``out`` is not.
    """
    exact = reference.double()
    error, size = (out.to(exact.device).double() - exact).norm(dim=-1), exact.norm(dim=-1)
    return float(torch.where(size > 0, error / size, error).max())


def relative(out: Tensor, reference: Tensor) -> float:
    """``|out - reference| / |reference|`` over all values; not finite if any value of ``out`` is not."""
    exact = reference.double()
    size = float(exact.norm())
    error = float((out.to(exact.device).double() - exact).norm())
    return error / size if size else error


def decision_error(
    made: Any, given: tuple[Any, ...], kind: str, temperature: float, rows: int | None = None
) -> float:
    """How far a random number is outside the float64 interval of the decision that was made; infinite for a wrong greedy decision.

    Args:
        given: as for ``rejection.verify``; the draft comes last. rows: how many rows to check, from the first on; default: all.
    """
    *others, draft = (None if t is None else t[:rows].cpu() for t in given)
    logits, tokens, size, accept, bonus = (t for t in others if t is not None)
    x = logits.double() / (temperature or 1.0)
    accepted, token = made.accepted.cpu(), made.token.cpu()
    p = x.softmax(-1)
    worst = 0.0
    for b in range(len(tokens)):
        n, N = int(accepted[b]), int(size[b])
        if temperature == 0:
            best = logits[b].double().argmax(-1)
            expected = 0
            while expected < N and best[expected] == tokens[b, expected]:
                expected += 1
            worst = max(worst, 0.0 if (n, int(token[b])) == (expected, int(best[n])) else float("inf"))
            continue
        q = None
        if draft is not None:
            q = draft[b].double()
            q = (q / temperature).softmax(-1) if kind == "logits" else q
        if not 0 <= n <= N or not 0 <= int(token[b]) < x.shape[-1]:
            return float("inf")
        for i in range(min(n + 1, N)):  # accepted nodes, and the first rejected one
            t = int(tokens[b, i])
            ratio = float(p[b, i, t] / (1.0 if q is None else q[i, t]))
            over = float(accept[b, i]) - min(ratio, 1.0)
            worst = max(worst, over if i < n else -over)
        weights = p[b, n].clone()
        if n < N:
            if q is None:
                weights[tokens[b, n]] = 0
            else:
                weights = (weights - q[n]).clamp(min=0)
            weights = weights if float(weights.sum()) > 0 else p[b, n]
        ends = weights.cumsum(0) / weights.sum()
        t, u = int(token[b]), float(bonus[b] if bonus.dim() == 1 else bonus[b, n])
        worst = max(worst, u - float(ends[t]), (float(ends[t - 1]) if t else 0.0) - u)
        if float(weights[t]) == 0:
            return float("inf")
    return worst
