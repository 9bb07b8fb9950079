"""Every outcome of a decoder on a small vocabulary with its exact probability, and what each round of it did."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec.audit.certify import _take
from specdec.audit.walk import Branches, Walk


class Outcome(NamedTuple):
    """``rounds``: of each round after the prefill, the number of new tokens before it, of submitted nodes, and of accepted ones."""

    probability: float
    ids: tuple[int, ...]
    rounds: tuple[tuple[int, int, int], ...]


def walked(decoder, prompt, new_tokens, batch=4096, **settings) -> list[Outcome]:
    """All outcomes of ``generate``; those that differ in a random number only are listed apart."""
    stack, outcomes = [Branches.root()], []
    while stack:
        part = _take(stack, batch)
        walk = Walk(part)
        rounds = [[] for _ in range(len(part))]

        def note(round, rounds=rounds):
            before = (round.context.length - round.context.prompt_length).tolist()
            facts = zip(
                round.context.request.tolist(),
                before,
                round.proposal.size.tolist(),
                round.verdict.accepted.tolist(),
            )
            for row, at, size, accepted in facts:
                if at:  # not the prefill
                    rounds[row].append((at, size, accepted))

        made = decoder.generate(
            [list(prompt)] * len(part), new_tokens, rng=walk.rng(), on_round=note, eos_token_id=(), **settings
        )
        measure = walk.branches.measure()
        outcomes += [
            Outcome(float(m), tuple(ids), tuple(did)) for m, ids, did in zip(measure, made.ids, rounds)
        ]
        stack += [scripts for _, scripts in walk.left]
    assert abs(1 - np.sum([one.probability for one in outcomes])) < 1e-12
    return outcomes
