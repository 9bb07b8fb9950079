"""Verdicts: whether one is valid for its proposal, and whether two are equal."""

from __future__ import annotations

import torch

from specdec.testing.verifier_cases import Example
from specdec.testing.verifier_rules import PATH, SUPPORT
from specdec.types import Verdict


def check_verdict(name: str, example: Example, verdict: Verdict, lossless: bool) -> None:
    """A path from the root and one more token, all possible under the target."""
    proposal, probs = example.proposal, example.probs
    B, N = proposal.tokens.shape
    shapes = [list(t.shape) for t in (verdict.path, verdict.accepted, verdict.bonus, verdict.tokens)]
    PATH.require(shapes == [[B, N], [B], [B], [B, N + 1]], f"{name}: the verdict's shapes are {shapes}")
    for t in (verdict.path, verdict.accepted, verdict.bonus, verdict.tokens):
        PATH.require(t.dtype == torch.long and t.is_cpu, f"{name}: the verdict has {t.dtype} on {t.device}")
    for b in range(B):
        n, at, path, bonus = int(verdict.accepted[b]), -1, verdict.path[b].tolist(), int(verdict.bonus[b])
        PATH.require(path[n:] == [-1] * (N - n), f"{name}: path {path} of row {b} with {n} accepted nodes")
        for node in path[:n]:
            child = 0 <= node < int(proposal.size[b]) and int(proposal.parents[b, node]) == at
            PATH.require(
                child, f"{name}: path {path} of row {b}, whose parents are {proposal.parents[b].tolist()}"
            )
            possible = not lossless or float(probs[b, at + 1, proposal.tokens[b, node]]) > 0
            SUPPORT.require(possible, f"{name}: row {b} accepts node {node}, whose token has probability 0")
            at = node
        PATH.require(0 <= bonus < probs.shape[-1], f"{name}: the bonus of row {b} is token {bonus}")
        possible = not lossless or float(probs[b, at + 1, bonus]) > 0
        SUPPORT.require(possible, f"{name}: the bonus of row {b} is token {bonus}, of probability 0")
        tokens = [int(proposal.tokens[b, node]) for node in path[:n]]
        PATH.require(
            verdict.tokens[b].tolist() == [*tokens, bonus, *[0] * (N - n)],
            f"{name}: tokens {verdict.tokens[b].tolist()} of row {b} are not the accepted ones and the bonus",
        )


def same(a: Verdict, b: Verdict) -> bool:
    """Whether two verdicts are equal."""
    return all(
        map(torch.equal, (a.path, a.accepted, a.bonus, a.tokens), (b.path, b.accepted, b.bonus, b.tokens))
    )


def committed(verdict: Verdict) -> list[list[int]]:
    """The tokens that each row commits."""
    return [t[: n + 1] for t, n in zip(verdict.tokens.tolist(), verdict.accepted.tolist())]
