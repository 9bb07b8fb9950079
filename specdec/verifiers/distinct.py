"""Optimal transport for siblings drawn without replacement, by a linear program: exact and optimal, for small vocabularies.

The program is that of SpecTr (Sun et al., arXiv 2310.15141, section 3), with one case for each set of drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations
from math import comb

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import Tensor

from specdec.arguments import at_least
from specdec.capabilities import VerifierInfo
from specdec.rng import Rng
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.levels import descend, of_points
from specdec.verifiers.rejection import Rejection

Plan = tuple[np.ndarray, np.ndarray, np.ndarray]
Planner = Callable[[np.ndarray, np.ndarray, int, int], Plan]


@dataclass(frozen=True)
class DistinctTransport(Rejection):
    """One of k distinct siblings is chosen by an optimal flow and accepted with min(1, p / w); else norm(max(p - w, 0)) gives the token.

    The flow goes from every set of k tokens to the tokens of that set. A set sends at most the probability that it was drawn, and a token
    receives at most p. w is what each token receives. The acceptance probability is ``acceptance.optimum(p, q, k, replacement=False)``. The
    output has the target's distribution however precisely the program was solved, because w is computed from its solution.

    The siblings must be drawn without replacement, and their number must be settled before the first is drawn (``DraftInfo.siblings`` is
    ``"distinct"``). The program has one case for each set, so it is for small vocabularies: to measure what could be won, not to decode
    quickly. Chains and point masses are verified as by ``Rejection``.

    Args:
        trust_declared: as for ``Rejection``. most: the most sets, of the tokens that the draft can draw.
    """

    most: int = 2000

    def __post_init__(self) -> None:
        at_least(1, "most", self.most, "give the number of sets that a linear program may have, at least 1")

    @property
    def info(self) -> VerifierInfo:
        own = type(self).__call__ is DistinctTransport.__call__  # another call gets no shortcut
        return VerifierInfo("distinct transport", lossless=True, compares_tokens=own, siblings=("distinct",))

    def check(self, proposal: Proposal) -> None:
        super().check(proposal)
        check_distinct(proposal, type(self).__name__)

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        return descend(proposal, probs, context, rng, partial(rule, most=self.most), merge=False)


def plan(p: np.ndarray, q: np.ndarray, k: int, most: int) -> Plan:
    """Sets of k tokens ``[S, k]``, ascending; the probability ``[S]`` that each set is drawn; and the flow ``[S, k]`` to its tokens."""
    some = np.flatnonzero(q > 0)
    if k == 1:
        return some[:, None], q[some], np.minimum(p, q)[some, None]
    if comb(len(some), k) > most:
        raise ValueError(
            f"DistinctTransport has a case for every set of {k} among the {len(some)} tokens that the draft can draw, {comb(len(some), k)}, and "
            f"most is {most}: draw fewer siblings or from fewer tokens (top_k), or use Traversal() or Rejection()"
        )
    sets = np.array(list(combinations(some.tolist(), k)))
    within = (sets[:, :, None] == some).any(1)
    # Sums, never differences: a draft may have one token with nearly all probability.
    outside = np.where(within, 0, q[some]).sum(1)
    mass = np.zeros(len(sets))
    for turn in permutations(range(k)):
        way = np.ones(len(sets))
        for n, place in enumerate(turn):
            left = outside + q[sets[:, turn[n:]]].sum(1)
            way = way * q[sets[:, place]] / left
        mass += way
    mass /= mass.sum()
    return sets, mass, flow(p, sets, mass)


def flow(p: np.ndarray, sets: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """``[S, k]`` the largest flow from every set to its tokens: at most ``mass [S]`` from each set, and at most p to each token."""
    S, k = sets.shape
    arcs = np.arange(S * k)
    rows, columns = np.concatenate([arcs // k, S + sets.ravel()]), np.concatenate([arcs, arcs])
    limits = coo_array((np.ones(2 * S * k), (rows, columns)), shape=(S + len(p), S * k)).tocsr()
    solved = linprog(-np.ones(S * k), limits, np.concatenate([mass, p]), method="highs")
    if solved.x is None:
        raise RuntimeError(f"the linear program of DistinctTransport was not solved: {solved.message}")
    found = np.maximum(solved.x.reshape(S, k), 0)
    return found * np.minimum(1, mass[:, None] / np.maximum(found.sum(1, keepdims=True), 1e-300))


def rule(
    p: Tensor, q: Tensor, tokens: Tensor, asked: Tensor, most: int, planned: Planner = plan
) -> tuple[Tensor, Tensor]:
    """The probability that each candidate is the accepted one, and the residual: ``levels.Rule``.

    Raises:
        ValueError: there are more than ``most`` sets.
    """
    chance, rest = torch.zeros(tokens.shape, dtype=torch.float64), p.cpu().clone()
    # Equal rows share a plan.
    plans: dict[tuple[bytes, bytes, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for b in asked.any(1).nonzero()[:, 0].tolist():
        mine = asked[b].nonzero()[:, 0].cpu()
        drawn = tokens[b, mine].tolist()
        target, draft = p[b].cpu().numpy(), q[b].cpu().numpy()
        name = target.tobytes(), draft.tobytes(), len(drawn)
        if name not in plans:
            plans[name] = planned(target, draft, len(drawn), most)
        sets, mass, flow = plans[name]
        reached = np.bincount(sets.ravel(), flow.ravel(), p.shape[1])
        w = torch.from_numpy(reached)
        case = int((sets == np.sort(drawn)).all(1).argmax())
        own = rest[b, drawn] / w[drawn]
        chosen = torch.from_numpy(flow[case, np.searchsorted(sets[case], drawn)] / mass[case])
        chance[b, mine] = torch.where(w[drawn] > 0, chosen * own.clamp(max=1), 0)
        left = (rest[b] - w).clamp(min=0)
        rest[b] = left / left.sum() if left.sum() > 0 else rest[b]
    return chance.to(p.device), rest.to(p.device)


def check_distinct(proposal: Proposal, name: str) -> None:
    """Raise ValueError unless the children of each node were drawn from one distribution without replacement, or the row has point masses alone."""
    if proposal.probs is None:
        return
    N, sources = proposal.nodes, proposal.sources()
    live = (torch.arange(N) < proposal.size[:, None]) & ~of_points(proposal)[:, None]
    for n in range(1, N):
        elder = (proposal.parents[:, :n] == proposal.parents[:, n : n + 1]) & live[:, n : n + 1]
        rows = elder.any(1).nonzero()[:, 0]
        if not len(rows):
            continue
        first = elder[rows].int().argmax(1)
        at = rows.to(proposal.probs.device)
        base, own = (
            proposal.probs[at, sources[rows, node].to(at.device)].double().cpu() for node in (first, n)
        )
        tokens = torch.where(elder[rows], proposal.tokens[at, :n].cpu(), 0)
        gone = torch.zeros_like(base).scatter_add_(1, tokens, elder[rows].double()) > 0
        base = torch.where(gone, 0, base)
        total = base.sum(1, keepdim=True)
        wrong = ~((own - base / total).abs().amax(1) <= 1e-6 + 1e-7 / total[:, 0])
        if bool(wrong.any()):
            b = int(rows[wrong][0])
            raise ValueError(
                f"{name} takes siblings drawn without replacement, each from the first one's distribution without its elder siblings' tokens, and "
                f"node {n} of row {b} is not: use drafts.Tree(model, widths, siblings=Distinct()) with at most as many children as its "
                "sampling leaves tokens, or Traversal() or Rejection(), which take any siblings"
            )
