"""Several candidates at a node: the chance that each of them was the accepted one, given the token that was committed.

The rule is recursive rejection, as in ``verifiers.Rejection`` (SpecInfer, Miao et al., arXiv 2305.09781, section 4.3). Sibling i is accepted as
token x with some probability ``flow_i(x)``, before anything is known, and x is committed with probability p(x). So the chance is
``flow_i(x) / p(x)``. It depends on the distributions at this node alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.verifiers.acceptance import left_without, normalised


def sibling_chances(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """``[..., m]`` of m siblings that were drawn independently of one another.

    Elder siblings leave ``w [V]`` of the target's distribution: w is p before the first, and ``max(w - z q, 0)`` after one that was drawn
    from q, where z is the sum of w, the probability that it was tried. So ``flow(x) = min(w(x), z q(x))``.

    Args:
        p: ``[..., V]``, the target's distribution at the node. q: ``[..., m, V]``, what each sibling was drawn from; for m
            draws from one distribution ``q[..., None, :].expand(..., m, V)``, which takes no memory. token: ``[...]``, the committed token.
    """
    left, flows, at = p.double(), [], token[..., None]
    for i in range(q.shape[-2]):
        offered = left.sum(-1, keepdim=True) * q[..., i, :]
        flows.append(torch.minimum(left.gather(-1, at), offered.gather(-1, at))[..., 0])
        left = (left - offered).clamp(min=0)
    return _given(torch.stack(flows, -1), p, at)


def distinct_chances(p: Tensor, q: Tensor, token: Tensor, m: int, most: int = 4096) -> Tensor:
    """``[..., m]`` of m siblings that were drawn from q without replacement: each from q without its elder siblings' tokens, normalised.

    What later siblings are drawn from, and tried against, depends on the tokens of the earlier ones. There is no closed form, so
    these tokens are summed over: one pass over V for two siblings, V passes for three, V^(m - 2) in general. When every token of q was
    drawn, there are no further siblings.

    Args:
        p, q: ``[..., V]``. token: ``[...]``, the committed token. most: the most passes.
    Raises:
        ValueError: more than ``most`` passes.
    """
    V = p.shape[-1]
    if m < 1 or (m > 2 and V ** (m - 2) > most):
        raise ValueError(
            f"m is {m} for a vocabulary of {V}: give 1 or more, and at most {most} passes, V^(m - 2); draw siblings independently "
            "(sibling_chances), or decode and count"
        )
    return _given(torch.stack(_flows(p.double(), q.double(), token[..., None], m), -1), p, token[..., None])


def point_chances(children: Tensor, token: Tensor) -> Tensor:
    """``[..., m]`` of children that were chosen without randomness: the first that is the committed token was accepted.

    Child i is accepted with probability p of its token, whatever the order, so its flow is p there and 0 elsewhere.

    Args:
        children: ``[..., m]`` ids in the order in which they are tried. token: ``[...]``.
    """
    same = children == token[..., None]
    return (same & (same.long().cumsum(-1) == 1)).double()


def _flows(left: Tensor, q: Tensor, at: Tensor, m: int) -> list[Tensor]:
    """``flow_i(x)`` of siblings that are tried with probability z, the sum of ``left [..., V]``, the first drawn from q."""
    z = left.sum(-1, keepdim=True)
    mine = torch.minimum(left.gather(-1, at), z * q.gather(-1, at))[..., 0]
    if m == 1:
        return [mine]
    rejected = (z * q - left).clamp(min=0)  # probability that each token was drawn and rejected
    rest = normalised((left - z * q).clamp(min=0))
    if m == 2:
        without = left_without(q)
        others = torch.where(without > 0, q.gather(-1, at) / without, 0)
        others = others.scatter(-1, at, 0)  # of the token, after another was drawn
        return [mine, torch.minimum(rejected * rest.gather(-1, at), rejected * others).sum(-1)]
    later = [torch.zeros_like(mine) for _ in range(m - 1)]
    for v in range(q.shape[-1]):
        apart = q.index_fill(-1, torch.tensor([v], device=q.device), 0)
        flows = _flows(rejected[..., v : v + 1] * rest, normalised(apart), at, m - 1)
        later = [a + b for a, b in zip(later, flows)]
    return [mine, *later]


def _given(flow: Tensor, p: Tensor, at: Tensor) -> Tensor:
    """Chances, given a token that is possible."""
    own = p.gather(-1, at).double()
    return torch.where(own > 0, flow / own, 0).clamp(max=1)
