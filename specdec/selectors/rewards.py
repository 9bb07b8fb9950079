"""Rewards of a round for selectors, and the seconds of it that each row is charged.

Rewards are functions of a ``Round``, one number per row. ``block_divergence`` is MetaSD's reward: it varies less than a token count.
A batch's rows share a round's seconds: a row is charged a share of them (``charge``) or what it adds to them (``marginal``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.types import Round


def tokens_per_round(round: Round) -> Tensor:
    """``[B]`` float64 tokens that each row committed, bonus included."""
    return round.committed.double()


def block_divergence(round: Round) -> Tensor:
    """``[B]`` float64 in [0, 1]: 1 - TV(q, p) at each drafted node, averaged over the row's block (MetaSD).

    q is the distribution that the node was drawn from (one-hot for a point mass), p the target's there. The reward is the mean
    acceptance probability of the nodes, those after a rejection included. Rows without a draft have 0.

    Raises:
        ValueError: the proposal is not a chain, or the verifier computed no probabilities, as ``FusedRejection``, the default on a GPU.
    """
    proposal = round.proposal
    B, N = proposal.tokens.shape
    if not N:
        return torch.zeros(B, dtype=torch.float64)
    if not bool(tree.is_chain(proposal.parents, proposal.size).all()):
        raise ValueError(
            "block_divergence is defined for chains: use tokens_per_round or Goodput for trees of proposals"
        )
    live = torch.arange(N) < proposal.size[:, None]
    if round.target_argmax is not None:  # temperature 0: one-hot distributions
        top = round.target_argmax[:, :N].cpu()
        if proposal.probs is None:
            overlap = (top == proposal.tokens.cpu()).double()
        else:
            overlap = proposal.q_of(top.to(proposal.probs.device)).double().cpu()
        return torch.where(live, overlap, 0).sum(1) / proposal.size.clamp(min=1)
    if round.probs is None:
        raise ValueError(
            "block_divergence needs the target's probabilities, which this verifier does not compute (FusedRejection, the default on a GPU, is one "
            "of these): call verifier(verifiers.Rejection()), or use tokens_per_round or Goodput"
        )
    p = round.probs[:, :N].double().cpu()
    if proposal.probs is None:
        tokens = torch.where(live, proposal.tokens.cpu(), 0)
        overlap = p.gather(2, tokens[..., None])[..., 0]
    else:
        overlap = torch.minimum(p, proposal.distributions().double().cpu()).sum(-1)
    return torch.where(live, overlap, 0).sum(1) / proposal.size.clamp(min=1)


def measured(round: Round) -> Tensor:
    """``[B]`` float64: an equal share of the round's wall-clock seconds."""
    stages = dict(round.seconds)
    total = stages.pop("total", None)
    B = round.context.batch
    return torch.full((B,), (sum(stages.values()) if total is None else total) / max(B, 1)).double()


@dataclass(frozen=True)
class Goodput:
    """``Round -> [B]`` float64 tokens a second of each row, for selectors that take one reward a round.

    A mean of these is a mean of ratios, which is not goodput if an arm's seconds vary. ``EpsilonGreedy`` and ``Spin`` do not use it.

    Attributes:
        seconds: ``Round -> [B]`` seconds charged to each row; ``measured`` by default, or ``Modelled(...)``.
    """

    seconds: Callable[[Round], Tensor] = measured

    def __call__(self, round: Round) -> Tensor:
        return tokens_per_round(round) / self.seconds(round)


@dataclass(frozen=True)
class Modelled:
    """``Round -> [B]`` modelled seconds, the same in every run: ``charge`` with constant times.

    Attributes:
        draft_seconds: one number for each arm. verify_seconds: one number. parallel: the arms draft at the same time.
    """

    draft_seconds: tuple[float, ...]
    verify_seconds: float
    parallel: bool = False

    def __call__(self, round: Round) -> Tensor:
        return charge(round.arm, torch.tensor(self.draft_seconds), self.verify_seconds, self.parallel)


def charge(
    arm: Tensor, draft_seconds: Tensor, verify_seconds: float | Tensor, parallel: bool = False
) -> Tensor:
    """Shares of a round's seconds, which add up to exactly the round's.

    The round takes the sum of its arms' draft times (``parallel``: the longest of them, for arms on separate devices) plus the
    verification. A row is charged its part of its own arm's drafting (with ``parallel`` scaled so that the parts add up to the
    longest) and an equal part of the verification.

    Args:
        arm: ``[B]`` int64. draft_seconds: ``[arms]``, seconds of each arm's drafting for all its rows; those of unused arms are
            ignored. verify_seconds: of the whole batch.
    Returns:
        ``[B]`` float64 seconds.
    """
    _in_range(arm, len(draft_seconds))
    B = len(arm)
    draft = torch.as_tensor(draft_seconds).double()
    count = torch.bincount(arm, minlength=len(draft))
    used = torch.where(count > 0, draft, 0)
    share = (draft / count.clamp(min=1))[arm]
    if parallel and float(used.sum()) > 0:
        share = share * (used.max() / used.sum())
    return share + torch.as_tensor(verify_seconds).double() / max(B, 1)


def marginal(
    arm: Tensor,
    draft_fixed: Tensor,
    draft_per_row: Tensor,
    verify_fixed: float,
    verify_per_row: float,
    parallel: bool = False,
) -> Tensor:
    """What each row adds to the round: the round's time with the row minus that without it, under a linear model.

    An arm with n > 0 rows drafts for ``fixed + per_row * n`` seconds, the verification of B > 0 rows takes the same form; the round is
    their sum (``parallel``: the longest draft plus the verification). The parts do not add up to the round: costs that rows share
    are charged to none, and with ``parallel`` only the longest arm's rows add drafting.

    Args:
        arm: ``[B]`` int64. draft_fixed, draft_per_row: ``[arms]`` seconds. verify_fixed, verify_per_row: seconds.
    Returns:
        ``[B]`` float64 seconds.
    """
    _in_range(arm, len(draft_fixed))
    count = torch.bincount(arm, minlength=len(draft_fixed))

    def round_seconds(n: Tensor) -> Tensor:
        """``[...]`` from the rows of each arm ``[..., arms]``."""
        draft = torch.where(
            n > 0, torch.as_tensor(draft_fixed).double() + torch.as_tensor(draft_per_row).double() * n, 0
        )
        rows = n.sum(-1)
        verify = torch.where(rows > 0, verify_fixed + verify_per_row * rows.double(), 0.0)
        return (draft.amax(-1) if parallel else draft.sum(-1)) + verify

    without = count - torch.eye(len(count), dtype=torch.long)  # row j: arm j has one row less
    adds = round_seconds(count) - round_seconds(without.clamp(min=0))
    return adds[arm]


def _in_range(arm: Tensor, arms: int) -> None:
    if len(arm) and not 0 <= int(arm.min()) <= int(arm.max()) < arms:
        raise ValueError(
            f"arm has {int(arm.min())}..{int(arm.max())}: there are seconds for arms 0..{arms - 1}"
        )
