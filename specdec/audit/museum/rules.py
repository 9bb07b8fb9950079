"""Verification rules as engines write them, with their mistakes: ``rule(tokens [k], q [k, V], p [k + 1, V])`` returns the committed tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from specdec.audit.museum.exhibit import law


def draw(weights: Tensor) -> int:
    return int(torch.multinomial(weights, 1))


def left_over(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)), or p if nothing is left."""
    rest = (p - q).clamp(min=0)
    return rest / rest.sum() if rest.sum() > 0 else p


def ratios(tokens: Tensor, q: Tensor, p: Tensor) -> Tensor:
    return (p[: len(tokens)] / q).gather(1, tokens[:, None])[:, 0]


def token_rule(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
    """Rejection (arXiv 2211.17192), exact."""
    n = int((torch.rand(len(tokens)) < ratios(tokens, q, p)).long().cumprod(0).sum())
    return [*tokens[:n].tolist(), draw(left_over(p[n], q[n]) if n < len(tokens) else p[n])]


def block_rule(
    tokens: Tensor, q: Tensor, p: Tensor, final: str = "", laws: str = "", stop: str = ""
) -> list[int]:
    """Block verification (arXiv 2403.10444, algorithm 2): exact, or with a mistake.

    Args:
        final: ``"uncapped"``: the last test takes min(1, the whole product of p / q) instead of the recursion that is capped at each token.
        laws: ``"before"``: the sum in the test of a token takes the distributions that the token came from, instead of those after it.
        stop: ``"first"``: the tests end at the first failure, instead of the last success.
    """
    k, ratio = len(tokens), ratios(tokens, q, p)
    weight = [torch.ones((), dtype=p.dtype)]
    for n in range(k):
        weight.append((weight[-1] * ratio[n]).clamp(max=1))
    chance = []
    for n in range(1, k):
        at = n - 1 if laws == "before" else n
        left = (weight[n] * p[at] - q[at]).clamp(min=0).sum()
        chance.append(left / (left + 1 - weight[n]) if left + 1 > weight[n] else torch.ones_like(left))
    chance.append(ratio.prod().clamp(max=1) if final == "uncapped" else weight[k])
    passed = torch.rand(k) < torch.stack(chance)
    n = int(passed.long().cumprod(0).sum() if stop == "first" else (passed * torch.arange(1, k + 1)).max())
    return [*tokens[:n].tolist(), draw(left_over(weight[n] * p[n], q[n]) if n < k else p[k])]


def laws_before(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
    return block_rule(tokens, q, p, laws="before")


def uncapped(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
    return block_rule(tokens, q, p, final="uncapped")


def first_failure(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
    return block_rule(tokens, q, p, stop="first")


def products(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
    """The longest prefix stands whose product of min(1, p / q) is at least the product of as many uniforms; then the token-wise residual."""
    n = draw(longest(ratios(tokens, q, p).clamp(max=1)))
    return [*tokens[:n].tolist(), draw(left_over(p[n], q[n]) if n < len(tokens) else p[n])]


def longest(chance: Tensor) -> Tensor:
    """``[k + 1]`` the law of the largest n for which the product of n uniforms is at most that of ``chance[:n]``.

    The minus logarithms of these products are the arrival times of a Poisson process and an increasing sequence of ends ``c``. So n is the
    last number for which the n-th arrival is not before ``c_n``. ``still(s)`` is exp(-s) times the probability that all arrivals after the n-th
    are before their ends, if the n-th came at s: exp(-s) plus a polynomial.
    """
    ends = np.minimum(-np.log(np.maximum(chance.numpy(), 1e-300)).cumsum(), 600)
    k, rest, out = len(ends), Polynomial([0.0]), np.zeros(len(ends) + 1)
    for n in reversed(range(k + 1)):
        if n < k:  # the next arrival is before its end
            whole = rest.integ()
            rest = Polynomial([whole(ends[n]) - np.exp(-ends[n])]) - whole
        if n == 0:
            out[0] = 1 + rest(0)
            continue
        density = Polynomial([0.0] * (n - 1) + [1 / float(torch.lgamma(torch.tensor(float(n))).exp())])
        start, end = ends[n - 1], ends[n] if n < k else np.inf
        out[n] = _gamma(n, start) - _gamma(n, end)
        if n < k:
            area = (density * rest).integ()
            out[n] += area(end) - area(start)
    return torch.from_numpy(out.clip(min=0) / out.clip(min=0).sum())


def _gamma(n: int, s: float) -> float:
    """The probability that the n-th arrival is after s."""
    if s == np.inf:
        return 0.0
    term, total = 1.0, 0.0
    for i in range(n):
        total += term
        term *= s / (i + 1)
    return float(np.exp(-s) * total)


def stands_at_zero(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
    """The acceptance numbers are zeros."""
    n = int((torch.zeros(len(tokens)) < ratios(tokens, q, p)).long().cumprod(0).sum())
    return [*tokens[:n].tolist(), draw(left_over(p[n], q[n]) if n < len(tokens) else p[n])]


def one_number(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
    """The number that rejected a token also picks its replacement, by the inverse distribution function."""
    for n, ratio in enumerate(ratios(tokens, q, p)):
        u = torch.rand(())
        if not u < ratio:
            return [
                *tokens[:n].tolist(),
                int((left_over(p[n], q[n]).cumsum(0) < u).sum().clamp(max=p.shape[1] - 1)),
            ]
    return [*tokens.tolist(), draw(p[-1])]


def shared_noise(fresh: bool) -> Any:
    """A draft of one token by a race, and the residual by a race of the same exponential numbers; repaired: of new ones."""

    def run(prompt: list[int], budget: int) -> list[int]:
        p, q = law(0.45, 0.45, 0.1), law(0.2, 0.3, 0.5)
        noise = torch.empty_like(p).exponential_()
        x = int((q / noise).argmax())
        if torch.rand(()) < p[x] / q[x]:
            return [x]
        if fresh:
            noise = torch.empty_like(p).exponential_()
        return [int((left_over(p, q) / noise).argmax())]

    return run


def noise_of_the_prompt(fresh: bool) -> Any:
    """Two rounds of a draft of one token whose noise is drawn once for the prompt; the first token of each round."""

    def run(prompt: list[int], budget: int) -> list[int]:
        p, q = law(0.45, 0.45, 0.1), law(0.2, 0.3, 0.5)
        noise, out = torch.empty_like(p).exponential_(), []
        for _ in range(2):
            x = int((q / noise).argmax())
            out.append(x if torch.rand(()) < p[x] / q[x] else draw(left_over(p, q)))
            if fresh:
                noise = torch.empty_like(p).exponential_()
        return out

    return run


def top_k(p: Tensor, q: Tensor, k: int, declared: bool) -> Any:
    """The k most probable tokens of q as candidates: ``declared`` as draws without replacement from q on them, or verified as point masses."""

    def run(prompt: list[int], budget: int) -> list[int]:
        chosen = q.topk(k).indices
        left, own = p, torch.zeros_like(q).index_copy(0, chosen, q[chosen] / q[chosen].sum())
        for x in chosen.tolist():
            if not declared:
                own = torch.zeros_like(q).index_fill(0, torch.tensor([x]), 1)
            if torch.rand(()) < left[x] / own[x]:
                return [x]
            left, own = left_over(left, own), own.index_fill(0, torch.tensor([x]), 0)
            own = own / own.sum()
        return [draw(left)]

    return run


def dropped_below(p: Tensor, q: Tensor, least: float, drops: bool) -> Any:
    """A token is drawn, and not submitted if its probability is below ``least``; repaired: it is submitted, and drafting ends after it."""

    def run(prompt: list[int], budget: int) -> list[int]:
        x = draw(q)
        if drops and q[x] < least:
            return [draw(p)]
        return [x if torch.rand(()) < p[x] / q[x] else draw(left_over(p, q))]

    return run


def equality(tokens: Tensor, q: Tensor, p: Tensor) -> list[int]:
    """The target draws at every position, and drafted tokens stand as far as they are the same. It is exact."""
    out: list[int] = []
    for n, drafted in enumerate([*tokens.tolist(), -1]):
        out.append(draw(p[n]))
        if out[-1] != drafted:
            break
    return out
