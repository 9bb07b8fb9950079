"""Every outcome of a decoder on a small vocabulary with its exact probability, and what each round did."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec.audit.walk import Branches, Walk, take


class Did(NamedTuple):
    """One round: the new tokens before it, the accepted nodes, and at how many nodes of their path, the root included, others were tried."""

    before: int
    path: tuple[int, ...]
    tried: int


class Outcome(NamedTuple):
    """``rounds``: those after the prefill."""

    probability: float
    ids: tuple[int, ...]
    rounds: tuple[Did, ...]


def walked(decoder, prompt, new_tokens, batch=4096, eos=()) -> list[Outcome]:
    """All outcomes of ``generate``; those that differ in a random number only are listed apart."""
    stack, outcomes = [Branches.root()], []
    while stack:
        part = take(stack, batch)
        walk = Walk(part)
        rounds = [[] for _ in range(len(part))]

        def note(round, rounds=rounds):
            before = (round.context.length - round.context.prompt_length).tolist()
            proposal, accepted = round.proposal, round.verdict.accepted.tolist()
            for b, row in enumerate(round.context.request.tolist()):
                if before[b]:  # not the prefill
                    path = tuple(round.verdict.path[b, : accepted[b]].tolist())
                    parents = proposal.parents[b, : proposal.size[b]].tolist()
                    rounds[row].append(Did(before[b], path, sum(at in parents for at in (-1, *path))))

        made = decoder.generate(
            [list(prompt)] * len(part), new_tokens, rng=walk.rng(), on_round=note, eos_token_id=eos
        )
        measure = walk.branches.measure()
        outcomes += [
            Outcome(float(m), tuple(ids), tuple(did)) for m, ids, did in zip(measure, made.ids, rounds)
        ]
        stack += [scripts for _, scripts in walk.left]
    assert abs(1 - np.sum([one.probability for one in outcomes])) < 1e-12
    return outcomes
