"""Rounds that are launched before the last verdict is read: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from fake_device import FakeDevice, onto
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec.audit.certify import certify
from specdec.executors import Ahead, Serial
from specdec.graphs.whole_round import RoundShape

PROMPTS = [[5, 6, 7, 8, 9], [3], [9, 9, 4, 2, 7, 7, 1], [11, 12]]
BUDGETS = [23, 17, 40, 31]


def models(graphs="recorded", **others):
    target = sd.HFModel(tiny("llama", **others), graphs=graphs)
    return target, sd.HFModel(tiny("llama", seed=1, **others), graphs=graphs)


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
    return seen, made


@pytest.mark.parametrize("verifier", [sd.Rejection(), sd.Coupled()])
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        pytest.param({"temperature": 0.7, "top_k": 9}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("drafted", [True, False])
def test_texts_and_rounds_are_those_of_serial(drafted, how, verifier):
    target, small = models()
    builder = sd.decoder(target).sampling(**how).verifier(verifier)
    same_rounds(builder.draft(small, 3) if drafted else builder, eos_token_id=())


@pytest.mark.parametrize("graphs", ["eager", pytest.param("recorded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3"])
def test_windows_soft_caps_and_norms(family, graphs):
    target = sd.HFModel(tiny(family), graphs=graphs)
    draft = sd.HFModel(tiny(family, seed=1), graphs=graphs)
    same_rounds(sd.decoder(target).draft(draft, 3), eos_token_id=())


def test_every_field_of_the_rounds():
    target, small = models()
    (serial, ahead), _ = same_rounds(sd.decoder(target).draft(small, 3), eos_token_id=())
    # A row that leaves stops the launches for a round, so the order of rows differs in between, and nothing else.
    for row in range(len(PROMPTS)):
        for a, b in zip(of_request(serial, row), of_request(ahead, row), strict=True):
            assert a == b


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


@pytest.mark.parametrize("verifier", [sd.Rejection(), sd.Coupled()])
def test_stops_that_are_found_a_round_late(verifier):
    target, small = models()
    builder = sd.decoder(target).draft(small, 3).verifier(verifier)
    _, (plain, _) = same_rounds(builder, eos_token_id=())
    ends = [plain.ids[0][6], plain.ids[2][20]]  # the middle of texts
    _, (made, _) = same_rounds(builder, eos_token_id=ends)
    assert "eos" in made.finish
    assert "length" in made.finish or min(map(len, made.ids)) < 17

    def after_nine(ids, scores):
        return ids.shape[1] >= 14

    _, (made, _) = same_rounds(builder, eos_token_id=(), stopping_criteria=[after_nine])
    assert "criteria" in made.finish


def test_texts_grow_out_of_their_bucket():
    target, small = models("eager", max_position_embeddings=512)
    builder = sd.decoder(target).draft(small, 3)
    same_rounds(builder, prompts=[[5, 6, 7] * 70, [8, 9]], budgets=[90, 100], eos_token_id=())
    shapes = [key[0] for storage in target.steps._storages for key in storage.programs]
    assert {(shape.rows, shape.length) for shape in shapes if isinstance(shape, RoundShape)} >= {
        (2, 256),
        (2, 320),
    }


def test_streams_and_runs_between_each_other():
    target, small = models("eager")
    serial, ahead = pair(sd.decoder(target).draft(small, 3))
    wanted = [serial.generate([p], 30, seed=i, eos_token_id=()).ids[0] for i, p in enumerate(PROMPTS)]
    streams = [ahead.stream([p], 30, seed=i, eos_token_id=()) for i, p in enumerate(PROMPTS)]
    made = [[] for _ in PROMPTS]
    open_ = list(range(len(PROMPTS)))
    while open_:
        for i in list(open_):
            chunk = next(streams[i], None)
            if chunk is None:
                open_.remove(i)
            else:
                made[i] += chunk.ids
    assert made == wanted
    abandoned = ahead.stream([PROMPTS[0]], 30, seed=0, eos_token_id=())
    next(abandoned), next(abandoned)
    abandoned.close()
    assert ahead.generate([PROMPTS[1]], 30, seed=1, eos_token_id=()).ids[0] == wanted[1]


def test_a_row_does_not_depend_on_its_batch():
    target, small = models("eager")
    ahead = sd.decoder(target).draft(small, 3).executor(Ahead()).build()
    together = ahead.generate(PROMPTS, BUDGETS, seed=[1, 2, 3, 4], eos_token_id=()).ids
    for i, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS)):
        assert ahead.generate([prompt], budget, seed=[i + 1], eos_token_id=()).ids[0] == together[i]


def test_one_replay_a_round_and_the_next_before_the_last_is_read(monkeypatch):
    from specdec.executors import ahead as module

    target, small = models("eager")
    decoder = sd.decoder(target).draft(small, 3).greedy().executor(Ahead()).build()
    said = []
    launch, read = module._Rounds._launch, module._Flight.read
    monkeypatch.setattr(
        module._Rounds, "_launch", lambda self, fresh: (said.append("launch"), launch(self, fresh))[1]
    )
    monkeypatch.setattr(module._Flight, "read", lambda self: (said.append("read"), read(self))[1])
    calls = []
    score = sd.HFModel.score
    monkeypatch.setattr(
        sd.HFModel, "score", lambda self, *a, **k: (calls.append(self), score(self, *a, **k))[1]
    )
    made = decoder.generate([PROMPTS[0]], 30, seed=0, eos_token_id=())
    assert calls == [target]  # the prefill
    rounds = made.stats.rounds
    assert said.count("read") == rounds
    assert said[:4] == ["launch", "launch", "read", "launch"]
    assert said.count("launch") in (rounds, rounds + 1)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(
    ("verifier", "temperature"), [(sd.Rejection(), 0), (sd.Rejection(), 1.0), (sd.Coupled(), 1.0)]
)
def test_on_a_device_a_round_waits_once(drafted, verifier, temperature):
    def made(on, executor):
        target, small = (sd.HFModel(on(tiny("llama", seed)), graphs="eager") for seed in (0, 1))
        builder = sd.decoder(target).verifier(verifier).sampling(temperature=temperature).executor(executor)
        return (builder.draft(small, 3) if drafted else builder).build()

    expected = made(lambda model: model, Serial()).generate(PROMPTS[:2], 14, seed=3, eos_token_id=()).ids
    seen = []
    with FakeDevice() as device:
        decoder = made(onto, Ahead())
        said = decoder.generate(
            PROMPTS[:2], 14, seed=3, eos_token_id=(), on_round=lambda _: seen.append(device.waits.total())
        )
    middle = len(seen) // 2
    assert said.ids == expected
    # The copy of the result; on a GPU it is not waited for, but its event.
    assert seen[middle] - seen[middle - 1] <= 1, device.waits


def test_logits_that_are_not_finite_are_refused():
    for broken, said in ((0, "^logits of row"), (1, "the draft's logits of row")):
        both = models("eager")
        decoder = sd.decoder(both[0]).draft(both[1], 3).executor(Ahead()).build()
        rounds = []

        def spoil(round, both=both, broken=broken, rounds=rounds):
            rounds.append(round)
            if round.number == 2:
                with torch.no_grad():
                    both[broken].model.lm_head.weight.fill_(float("nan"))

        with pytest.raises(ValueError, match=said):
            decoder.generate(PROMPTS, 30, seed=0, eos_token_id=(), on_round=spoil)
        assert len(rounds) >= 3


def test_other_random_numbers_run_serially():
    target = sd.TableModel([0.7, 0.3])
    assert certify(sd.decoder(target).build(), max_new_tokens=2).lossless
    real, small = models("eager")
    decoder = sd.decoder(real).draft(small, 2).executor(Ahead()).build()

    class Mine(sd.rng.Philox):
        """Somebody's own numbers, which the step would not use."""

        asked = 0

        def accept(self, prob, key):
            Mine.asked += 1
            return super().accept(prob, key)

        def select(self, rows):
            return Mine(self.seed[rows])

    decoder.generate([PROMPTS[0]], 12, rng=Mine(sd.rng.seeds(0, 1)), eos_token_id=())
    assert Mine.asked


class OwnRejection(sd.Rejection):
    pass


class OwnModel(sd.HFModel):
    pass


def refused(which):
    target, small = models("eager")
    base = sd.decoder(target).draft(small, 3).executor(Ahead())
    if which == "verifier":
        base = base.verifier(OwnRejection())
    elif which == "candidates":
        base = base.verifier(sd.Coupled(candidates=2))
    elif which == "processor":
        base = base.sampling(processors=[lambda ids, scores: scores])
    elif which == "temperatures":
        base = base.sampling(temperature=[1.0, 0.5])
    elif which == "draft":
        base = sd.decoder(target).draft(sd.drafts.NGram(), 3).executor(Ahead())
    elif which == "subclass":
        base = sd.decoder(OwnModel(tiny("llama"), graphs="eager")).executor(Ahead())
    elif which == "graphs":
        base = sd.decoder(sd.HFModel(tiny("llama"))).executor(Ahead())
    return base


@pytest.mark.parametrize(
    "which", ["verifier", "candidates", "processor", "temperatures", "draft", "subclass", "graphs"]
)
def test_parts_that_the_step_would_bypass_are_refused(which):
    with pytest.raises(ValueError, match=r"Ahead\(\) .*use executors.Serial\(\)"):
        refused(which).build()


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    """Prompts, budgets, ends, lengths and sampling at random; one executor's texts are the other's."""
    pick = random.Random(seed)
    rows = pick.randint(1, 6)
    prompts = [[pick.randint(0, 96) for _ in range(pick.randint(1, 9))] for _ in range(rows)]
    budgets = [pick.choice([1, 2, 3, 7, 20, 33]) for _ in range(rows)]
    target, small = models("eager", vocab_size=97)
    if pick.random() < 0.3:  # another padding of one vocabulary
        other = tiny("llama", seed=1, vocab_size=pick.choice([90, 104]))
        target = sd.HFModel(target.model, byte_tokenizer(), graphs="eager")
        small = sd.HFModel(other, byte_tokenizer(), graphs="eager")
    if pick.random() < 0.2:
        small = target  # it drafts for itself, and everything is accepted
    drawing = pick.choice([None, None, sd.Sampling(temperature=0), sd.Sampling(temperature=1.3)])
    verifier = pick.choice([sd.Rejection(), sd.Coupled()])
    builder = sd.decoder(target).sampling(temperature=pick.choice([0, 0.8, 1.0])).verifier(verifier)
    builder = builder.draft(sd.drafts.Model(small, drawing), pick.randint(1, 5))
    ends = [pick.randint(0, 96) for _ in range(pick.choice([0, 3, 12]))]
    same_rounds(builder, prompts, budgets, eos_token_id=ends)


def test_fused_rejection_decides_as_rejection():
    target, small = models("eager")
    builder = sd.decoder(target).draft(small, 3).verifier(sd.verifiers.FusedRejection())
    same_rounds(builder, eos_token_id=())  # float64 models: rounding decides nothing


def test_a_capture_that_fails_leaves_the_texts():
    target, small = models("eager")
    builder = sd.decoder(target).draft(small, 3)
    serial, ahead = pair(builder)
    expected = serial.generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids

    def broken(body):
        raise RuntimeError("no capture today")

    target.steps.capture = broken
    with pytest.warns(RuntimeWarning, match="no capture today"):
        assert ahead.generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids == expected


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_texts_that_use_every_learned_position(family):
    """Tokens beyond a row's budget are computed and dropped; they have no position of their own."""
    target, small = (sd.HFModel(tiny(family, seed), graphs="eager") for seed in (0, 1))
    prompts = [[5, 6] * 110, [9] * 3]
    same_rounds(sd.decoder(target).draft(small, 5), prompts, [256 - 220, 30], eos_token_id=())


def test_statistics_can_be_shown():
    target, small = models("eager")
    stats = sd.decoder(target).draft(small, 3).executor(Ahead()).build().generate(PROMPTS, 9, seed=0).stats
    assert stats.shown_tau.startswith("tau ")
    assert min(stats.seconds["prefill"], stats.seconds["target"], stats.seconds["other"]) > 0
