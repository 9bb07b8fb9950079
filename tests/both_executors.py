"""What tests of whole rounds share: both executors' rounds beside each other, random batches, and waits on a device."""

from __future__ import annotations

import random

from fake_device import FakeDevice, onto

from specdec.executors import Ahead, Serial
from specdec.rng import Philox

PROMPTS = [[5, 6, 7, 8, 9], [3], [9, 9, 4, 2, 7, 7, 1], [11, 12]]
BUDGETS = [23, 17, 40, 31]


def pair(builder):
    return builder.executor(Serial()).build(), builder.executor(Ahead()).build()


def same_rounds(builder, prompts=PROMPTS, budgets=BUDGETS, **options):
    """Both executors' results, after a comparison of their rounds."""
    seen, made = [], []
    for decoder in pair(builder):
        rounds = []
        made.append(decoder.generate(prompts, budgets, seed=3, on_round=rounds.append, **options))
        seen.append(rounds)
    serial, ahead = made
    assert ahead.ids == serial.ids
    assert ahead.finish == serial.finish
    assert ahead.stats.tau == serial.stats.tau or not serial.stats.full_rounds
    assert (ahead.stats.rounds, ahead.stats.drafted, ahead.stats.accepted) == (
        serial.stats.rounds,
        serial.stats.drafted,
        serial.stats.accepted,
    )
    # A row that leaves stops the launches for a round, so the order of rows differs in between, and nothing else.
    for row in range(len(prompts)):
        for a, b in zip(*(of_request(rounds, row) for rounds in seen), strict=True):
            assert a == b
    return seen, made


def of_request(rounds, request):
    """What each round says about a request, as plain values."""
    out = []
    for round in rounds:
        for b in (round.context.request == request).nonzero()[:, 0].tolist():
            n, size = int(round.context.length[b]), int(round.proposal.size[b])
            accepted = int(round.verdict.accepted[b])
            out.append(
                (
                    round.context.tokens[b, :n].tolist(),
                    round.proposal.tokens[b, :size].tolist(),
                    round.proposal.parents[b, :size].tolist(),
                    round.verdict.path[b, :accepted].tolist(),
                    round.verdict.tokens[b, : accepted + 1].tolist(),
                    int(round.verdict.bonus[b]),
                    int(round.committed[b]),
                    bool(round.finished[b]),
                    bool(round.truncated[b]),
                    int(round.budget[b]),
                    round.lossless,
                )
            )
    return out


def batch_of(seed, shortest):
    """A source of choices, and up to six prompts with their budgets."""
    pick = random.Random(seed)
    rows = pick.randint(1, 6)
    prompts = [[pick.randint(0, 96) for _ in range(pick.randint(shortest, 9))] for _ in range(rows)]
    return pick, prompts, [pick.choice([1, 2, 3, 7, 20, 33]) for _ in range(rows)]


def a_round_waits_once(made, prompts, tokens):
    """``made(on, executor)`` is a decoder whose models are put where ``on`` puts them: its texts are those on the host, and it waits for the result only."""
    expected = made(lambda model: model, Serial()).generate(prompts, tokens, seed=3, eos_token_id=()).ids
    seen = []
    with FakeDevice() as device:
        decoder = made(onto, Ahead())
        said = decoder.generate(
            prompts, tokens, seed=3, eos_token_id=(), on_round=lambda _: seen.append(device.waits.total())
        )
    middle = len(seen) // 2
    assert said.ids == expected
    # The copy of the result; on a GPU it is not waited for, but its event.
    assert seen[middle] - seen[middle - 1] <= 1, device.waits


class OwnNumbers(Philox):
    """Somebody's own numbers, which a step would not use; ``asked``: how often a decision was asked for."""

    def __init__(self, seed, asked=None):
        super().__init__(seed)
        self.asked = [] if asked is None else asked

    def accept(self, prob, key):
        self.asked.append(key)
        return super().accept(prob, key)

    def select(self, rows):
        return OwnNumbers(self.seed[rows], self.asked)
