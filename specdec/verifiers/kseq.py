"""k-SEQ: each of k independent candidates is accepted with min(1, p / (ρ q)), with one ρ for all of them.

Sun et al., "SpecTr: fast speculative decoding via optimal transport" (arXiv 2310.15141, algorithm 2 and section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import VerifierInfo
from specdec.rng import Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.acceptance import kseq_scale
from specdec.verifiers.levels import descend, of_points
from specdec.verifiers.rejection import Rejection
from specdec.verifiers.tree_walk import residual


@dataclass(frozen=True)
class KSeq(Rejection):
    """The first of k siblings that passes its test is accepted, else the token comes from norm(p - min(q, p / ρ) A / β).

    β, the sum of min(q, p / ρ), is the acceptance of one sibling, and A = 1 - (1 - β)^k is that of all. For each row and node ρ is the
    smallest valid one (``acceptance.kseq_scale``). The output has the target's distribution, and A is at least 1 - (1 - 1/k)^k of the most
    that any verifier can accept (``acceptance.optimum``).

    The siblings must be drawn independently from one distribution, and their number must be settled before (``DraftInfo.siblings`` is
    ``"independent"``). If several siblings have the accepted token, the children of all of them are the next candidates, provided that they
    were drawn from the same distribution. So a tree of k chains is verified as SpecTr verifies k drafts. Chains and point masses are
    verified as by ``Rejection``.

    Args:
        trust_declared: as for ``Rejection``.
    """

    @property
    def info(self) -> VerifierInfo:
        return VerifierInfo("k-SEQ", lossless=True, siblings=("independent",))

    def check(self, proposal: Proposal) -> None:
        super().check(proposal)
        check_independent(proposal, type(self).__name__)

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        return descend(proposal, probs, context, rng, rule, merge=True)


def rule(p: Tensor, q: Tensor, tokens: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """The probability that each candidate is the accepted one, and the residual: ``levels.Rule``."""
    k = asked.sum(1).clamp(min=1)
    return tests(p, q, tokens, asked, k, kseq_scale(p, q, k))


def tests(
    p: Tensor, q: Tensor, tokens: Tensor, asked: Tensor, k: Tensor, rho: Tensor
) -> tuple[Tensor, Tensor]:
    """As ``rule``, with the number of candidates ``k [B]`` and their ``rho [B]``."""
    k, rho = k[:, None], rho[:, None]
    mine = torch.minimum(q, p / rho)
    wanted, drawn = p.gather(1, tokens), rho * q.gather(1, tokens)
    passes = torch.where(asked & (wanted > 0), (wanted / drawn).clamp(max=1), 0)
    before = torch.nn.functional.pad((1 - passes).cumprod(1), (1, 0), value=1.0)[:, :-1]
    beta = mine.sum(1, keepdim=True)
    whole = 1 - (1 - beta).clamp(min=0) ** k
    return passes * before, residual(p, mine * torch.where(beta > 0, whole / beta, 0))


def check_independent(proposal: Proposal, name: str) -> None:
    """Raise ValueError for a node with several children that were not drawn from one distribution, except in rows of point masses."""
    if proposal.probs is None or bool(tree.is_chain(proposal.parents, proposal.size).all()):
        return
    live = torch.arange(proposal.nodes) < proposal.size[:, None]
    pair = torch.tril(proposal.parents[:, :, None] == proposal.parents[:, None, :], -1)
    sources = proposal.sources()
    pair &= live[:, :, None] & live[:, None, :] & (sources[:, :, None] != sources[:, None, :])
    if bool(pair.any()):
        pair &= ~of_points(proposal)[:, None, None]
    if bool(pair.any()):
        b, n, m = pair.nonzero()[0].tolist()
        raise ValueError(
            f"{name} takes siblings that were drawn independently from one distribution, and nodes {m} and {n} of row {b} have "
            "distributions of their own: use drafts.Tree(model, widths), or Traversal() or Rejection(), which take any siblings"
        )
