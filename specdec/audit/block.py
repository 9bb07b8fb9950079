"""The chance that block verification accepts each token of a committed text (Sun et al., arXiv 2403.10444)."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.audit.tau import chances


def block_chances(p: Tensor, q: Tensor) -> Tensor:
    """``accept [C, n, K]``, for ``efficiency``, of chains under ``verifiers.BlockVerification``.

    With ``a_0 = 1`` and ``a_j = min(1, a_(j-1) p / q)`` along the text, the text's first j tokens are drawn and accepted with probability
    ``a_j`` times their product of q. The next token is drawn and accepted with ``min(q, a_j p)``, and replaced with ``max(a_j p - q, 0)``,
    ``a_j p`` together. So given the text, and that the first j tokens of the block were accepted, the next one is with probability
    ``min(1, q / (a_j p))``. It does not depend on how many tokens the block proposes.

    Args:
        p: ``[C, n, K]``: the target's probability of token ``s + j`` of each text, for a block that starts after s tokens.
        q: ``[C, n, K]``: the draft's.
    """
    p, q = p.double(), q.double()
    out, weight = torch.empty_like(p), torch.ones_like(p[..., 0])
    for j in range(p.shape[-1]):
        wanted, drawn = weight * p[..., j], q[..., j]
        out[..., j] = chances(wanted, drawn)
        weight = torch.where(wanted < drawn, wanted / drawn, 1)
    return out
