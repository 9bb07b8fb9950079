"""Whole rounds that draft with Medusa, which has no keys and values: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

import pytest
import torch
from both_executors import PROMPTS, a_round_waits_once, batch_of, same_rounds
from test_ahead_heads import head_on
from test_fast_heads import shake
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import Head, Medusa
from specdec.drafts.heads.layers import config_like
from specdec.executors import Ahead
from specdec.graphs.whole_round import WholeRound
from specdec.verifiers import FusedRejection

BUDGETS = [12, 7, 19, 15]


def head_of(target, graphs="eager", sampling=None, seed=1, **settings):
    return Head(shake(Medusa.from_target(target, **settings), seed), sampling=sampling, graphs=graphs)


def builder_of(graphs="eager", length=3, vocab_size=97, **settings):
    target = sd.HFModel(tiny("llama", vocab_size=vocab_size), graphs=graphs)
    return sd.decoder(target).draft(head_of(target, graphs, **settings), length)


def accepted(made):
    return made[1].stats.accepted


@pytest.mark.parametrize(
    ("graphs", "length", "verifier", "settings"),
    [
        ("eager", 3, sd.Rejection(), {}),
        ("eager", 5, sd.Coupled(), {"blocks": 2, "own_head": False}),
        ("eager", 1, FusedRejection(), {"heads": 1, "taps": (1,)}),
        *(
            pytest.param("recorded", 4, verifier, settings, marks=pytest.mark.slow)
            for verifier in (sd.Rejection(), sd.Coupled(), FusedRejection())
            for settings in ({"own_head": False}, {"blocks": 2, "taps": (2,)})
        ),
    ],
)
def test_texts_and_rounds_are_those_of_serial(graphs, length, verifier, settings):
    builder = builder_of(graphs, length, **settings).verifier(verifier)
    _, made = same_rounds(builder, PROMPTS, BUDGETS, eos_token_id=())
    assert accepted(made) > 3


def test_greedy_texts_of_a_few_ids():
    prompts = [[token % 4 for token in prompt] for prompt in PROMPTS]
    _, made = same_rounds(builder_of(vocab_size=4).greedy(), prompts, BUDGETS, eos_token_id=())
    assert 5 < accepted(made) < made[1].stats.drafted


def test_two_heads_of_one_target_have_captured_rounds_of_their_own():
    """Nothing but the head tells their rounds apart; a copy of a head that is bound to the target once more is another one."""
    target = sd.HFModel(tiny("llama"), graphs="eager")
    base = sd.decoder(target).greedy()
    decoders = [base.draft(head_of(target, seed=seed), 3).executor(Ahead()).build() for seed in (1, 2)]
    drawn, ids = [], []
    for decoder in (*decoders, *decoders, *decoders):
        rounds = []
        ids.append(decoder.generate(PROMPTS[:1], 14, seed=3, eos_token_id=(), on_round=rounds.append).ids)
        drawn.append([r.proposal.tokens[0].tolist() for r in rounds])
    assert ids == [ids[0]] * 6
    assert drawn[0] == drawn[2] == drawn[4] != drawn[1] == drawn[3] == drawn[5]
    storages = target.steps._storages
    rounds = [p for storage in storages for p in storage.programs.values() if isinstance(p, WholeRound)]
    assert len(rounds) == 2
    assert len({id(p.draft.model) for p in rounds}) == 2


def test_rows_that_leave_take_what_they_carry():
    builder = builder_of().sampling(temperature=0.8)
    plain = builder.build().generate(PROMPTS, 20, seed=3, eos_token_id=())
    ends = [plain.ids[0][4], plain.ids[2][12]]
    _, (made, _) = same_rounds(builder, PROMPTS, [20, 3, 20, 11], eos_token_id=ends)
    assert "eos" in made.finish


def test_on_a_device_a_round_waits_once():
    raw = tiny("llama")
    like = shake(Medusa(config_like(raw), ("final",))).to(torch.float64)

    def made(on, executor):
        return head_on(on, like).executor(executor).build()

    a_round_waits_once(made, PROMPTS[:2], 10)


def test_chains_longer_than_the_head_are_refused():
    with pytest.raises(ValueError, match=r"a path of 6 tokens .* this Medusa proposes at most 5: .*length=5"):
        builder_of(length=6).executor(Ahead()).build()
    builder_of(length=5).executor(Ahead()).build()


@pytest.mark.parametrize("seed", [1, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in range(24))])
def test_random_batches(seed):
    pick, prompts, budgets = batch_of(seed, shortest=1)
    vocab_size = pick.choice([97, 7])
    prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    target = sd.HFModel(tiny("llama", vocab_size=vocab_size), graphs="eager")
    more = {"own_head": pick.random() < 0.5}
    if pick.random() < 0.4:
        more["vocabulary"] = sorted(pick.sample(range(vocab_size), vocab_size // 2))
    drawing = pick.choice([None, None, sd.Sampling(temperature=0), sd.Sampling(temperature=1.3)])
    draft = head_of(target, pick.choice(["eager", "eager", "recorded"]), drawing, **more)
    verifier = pick.choice([sd.Rejection(), sd.Coupled(), FusedRejection()])
    builder = sd.decoder(target).sampling(temperature=pick.choice([0, 0.8, 1.0])).verifier(verifier)
    ends = [pick.randrange(vocab_size) for _ in range(pick.choice([0, 3, 12 if vocab_size > 7 else 1]))]
    same_rounds(builder.draft(draft, pick.randint(1, 5)), prompts, budgets, eos_token_id=ends)
