"""Whole rounds of MagicDec with positions in the cache, whose sinks are rotated in the step: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

import pytest
from both_executors import batch_of, same_rounds
from tiny import tiny

import specdec as sd
from specdec.drafts import MagicDec
from specdec.executors import Ahead
from specdec.graphs.whole_round import WholeRound
from specdec.verifiers import FusedRejection

PROMPTS, BUDGETS = [[5, 6, 7, 8, 9], [3, 2, 1], [9, 9, 4, 2, 7, 7, 1]], [40, 9, 26]


def builder_of(graphs="eager", length=3, family="llama", positions="in_cache", **settings):
    target = sd.HFModel(tiny(family), graphs=graphs)
    return sd.decoder(target).draft(
        MagicDec(**{"window": 4, "sinks": 2, "block": length, **settings}, positions=positions), length
    )


@pytest.mark.parametrize(
    ("graphs", "length", "settings", "verifier"),
    [
        ("eager", 3, {}, sd.Coupled()),
        ("recorded", 2, {"window": 3, "sinks": 3}, sd.Rejection()),
        *(
            pytest.param("recorded", length, settings, verifier, marks=pytest.mark.slow)
            for verifier in (sd.Rejection(), FusedRejection())
            for length, settings in (
                (1, {"window": 1, "sinks": 1}),
                (5, {"window": 9, "sinks": 1}),
                (3, {"window": 30}),
                (3, {"sinks": 0}),
            )
        ),
    ],
)
def test_texts_and_rounds_are_those_of_serial(graphs, length, settings, verifier):
    rows = slice(0, 1) if graphs == "recorded" else slice(None)
    builder = builder_of(graphs, length, **settings).verifier(verifier)
    _, made = same_rounds(builder, PROMPTS[rows], BUDGETS[rows], eos_token_id=())
    assert made[1].stats.accepted > 10
    assert not builder.build().target.steps.failed


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_families(family):
    same_rounds(builder_of(family=family, window=6), PROMPTS, [20, 9, 26], eos_token_id=())


def test_a_text_to_the_last_position_of_the_model():
    """Tokens beyond the budget have no position, and the table of rotations no row for them."""
    builder = builder_of(length=5, window=1, sinks=1)
    same_rounds(builder, [[5, 6] * 120, [9] * 3], [256 - 240, 20], eos_token_id=())


def test_positions_of_a_text_are_another_draft_in_memory_of_its_own():
    """The same target, window and shapes: neither replays the other's rounds."""
    target, drawn, ids = sd.HFModel(tiny("llama"), graphs="eager"), {}, []
    decoders = {
        positions: sd.decoder(target)
        .draft(MagicDec(window=4, sinks=2, block=3, positions=positions), 3)
        .greedy()
        .executor(Ahead())
        .build()
        for positions in ("in_cache", "original")
    }
    for positions in ("in_cache", "original") * 3:
        rounds = []
        out = decoders[positions].generate(PROMPTS[:1], 16, eos_token_id=(), on_round=rounds.append)
        ids.append(out.ids)
        drawn.setdefault(positions, []).append([r.proposal.tokens.tolist() for r in rounds])
    assert ids == [ids[0]] * 6
    assert all(one == made[0] for made in drawn.values() for one in made)
    assert drawn["in_cache"][0] != drawn["original"][0]
    assert any(isinstance(step, WholeRound) for step in target.steps.captured)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 16))])
def test_random_batches(seed):
    pick, prompts, budgets = batch_of(seed, shortest=3)
    length = pick.randint(1, 6)
    builder = builder_of(
        pick.choice(["eager", "eager", "recorded"]),
        length,
        window=pick.choice([1, 2, 3, 9, 40]),
        sinks=pick.choice([0, 1, 2, 3]),
        block=length + pick.choice([0, 0, 3]),
        sampling=pick.choice([None, None, sd.Sampling(temperature=0), sd.Sampling(temperature=1.3)]),
    )
    verifier = pick.choice([sd.Rejection(), sd.Coupled(), FusedRejection()])
    ends = [pick.randrange(97) for _ in range(pick.choice([0, 3, 12]))]
    builder = builder.sampling(temperature=pick.choice([0, 0.8, 1.0])).verifier(verifier)
    same_rounds(builder, prompts, budgets, eos_token_id=ends)
