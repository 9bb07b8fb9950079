"""Rounds that are launched before the last verdict is read: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

import pytest
import torch
from both_executors import BUDGETS, PROMPTS, OwnNumbers, a_round_waits_once, batch_of, pair, same_rounds
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec.audit.certify import certify
from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.cache.static import StaticStore
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead
from specdec.graphs.ring_plan import RingPlans
from specdec.graphs.whole_round import RoundShape
from specdec.masks import Causal, Strided, Window


def models(graphs="recorded", **others):
    target = sd.HFModel(tiny("llama", **others), graphs=graphs)
    return target, sd.HFModel(tiny("llama", seed=1, **others), graphs=graphs)


def spire(target, graphs="recorded", block=3, layers=1, **settings):
    """A draft whose memory weights are not all equal."""
    model = SpireModel.from_target(
        target, layers, **({"window": 4} if "mask" not in settings else {}) | settings
    )
    if model.memory is not None:
        torch.manual_seed(1)
        torch.nn.init.normal_(model.memory.weights)
    return sd.drafts.Spire(model, block, graphs=graphs)


def parts(kind, graphs="recorded", **others):
    """A target, and a draft of the kind; ``None`` for no draft."""
    target, small = models(graphs, **others)
    return target, {"model": lambda: small, "spire": lambda: spire(target, graphs), None: lambda: None}[
        kind
    ]()


def builder_of(kind, graphs="recorded", **others):
    target, draft = parts(kind, graphs, **others)
    return sd.decoder(target) if draft is None else sd.decoder(target).draft(draft, 3)


BOTH = pytest.mark.parametrize("kind", ["model", "spire"])


@pytest.mark.parametrize(
    ("verifier", "how"),
    [
        (sd.Rejection(), {"temperature": 0}),
        (sd.Coupled(), {"temperature": 1.0}),
        *(
            pytest.param(verifier, how, marks=pytest.mark.slow)
            for verifier, how in (
                (sd.Rejection(), {"temperature": 1.0}),
                (sd.Coupled(), {"temperature": 0}),
                (sd.Rejection(), {"temperature": 0.7, "top_k": 9}),
                (sd.Coupled(), {"temperature": 0.7, "top_k": 9}),
            )
        ),
    ],
)
@pytest.mark.parametrize("kind", ["model", "spire", None])
def test_texts_and_rounds_are_those_of_serial(kind, how, verifier):
    same_rounds(builder_of(kind).sampling(**how).verifier(verifier), eos_token_id=())


def behind(b, h, q, kv):
    return (kv <= q) & ((q - kv) % 2 == 0)


RINGS = {
    "tight": {"window": 4},
    "no sinks": {"window": 3, "sinks": 0},
    "sinks": {"window": 2, "sinks": 3},
    "one position": {"window": 1},
    "narrower": {"mask": Causal() & Window(9) & (Strided(3) | Window(2))},
    "wide": {"window": 30, "sinks": 2},
    "plain": {"window": 4, "feedback": False},
    "loose": {"window": 5, "block": 7},
    "all layers": {"window": 6, "layers": 3},
    "no window": {"window": None},
}


@pytest.mark.parametrize("graphs", ["recorded", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("ring", "temperature"),
    [
        pytest.param(ring, temperature, marks=() if i % 16 == 2 * temperature else pytest.mark.slow)
        for i, ring in enumerate(RINGS)
        for temperature in (0, 1)
    ],
)
def test_rings(ring, temperature, graphs):
    """Chains as long as the block, memory that wraps, and steps that run twice on one text, as captures do."""
    target = sd.HFModel(tiny("llama", num_hidden_layers=3), graphs=graphs)
    draft = spire(target, graphs, **RINGS[ring])
    prompts, budgets = [[5, 6, 7, 8, 9], [3, 2, 1], [9, 9, 4, 2, 7, 7, 1]], [33, 9, 26]
    builder = sd.decoder(target).draft(draft, 3).sampling(temperature=temperature)
    (_, rounds), _ = same_rounds(builder, prompts, budgets, eos_token_id=())
    assert sum(int(round.verdict.accepted.sum()) for round in rounds) > (30 if temperature else 0)


def test_slots_of_a_ring_are_those_of_its_row():
    """Wherever a row's text ends, and however far beyond it a chain goes."""
    shapes = [KVShape(1, 2, 2, torch.float32, torch.device("cpu"))]
    for sinks, window, block in ((0, 1, 2), (1, 4, 4), (3, 2, 6)):
        ring = Ring(shapes, 3, sinks, window, block)
        position = torch.randint(0, 60, (7, 3), generator=torch.Generator().manual_seed(0))
        plans = RingPlans(ring, StaticStore(ring))
        # On a GPU the kernel reads positions as they lie in memory, without a stride.
        assert all(plan.ring.position.is_contiguous() for plan in plans.of(position.t().contiguous().t()))
        slots = plans.slots(position)
        assert (slots // ring.slots).equal(torch.arange(3).expand(7, 3))
        rows = torch.arange(3).repeat(7)
        assert slots.flatten().equal(ring.at(rows, position.flatten()))


def test_one_memory_and_its_captures_serve_every_call():
    decoder = builder_of("spire", "eager").executor(Ahead()).build()
    said, captured, held = [], [], []
    for _ in range(4):
        said.append(decoder.generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids)
        captured.append(set(decoder.target.steps.captured))
        held.append([storage.whole[0].data_ptr() for storage in decoder.draft.programs._storages])
    assert captured[1] == captured[2] == captured[3]
    assert captured[0] <= captured[1]
    assert held[0] == held[3]
    assert len(held[0]) == 1
    assert said[0] == said[1] == said[2] == said[3]
    # Fewer rows in the same memory, and then more rows, which need a larger one.
    for rows in (3, 1, 4):
        fewer = decoder.generate(PROMPTS[:rows], BUDGETS[:rows], seed=3, eos_token_id=()).ids
        assert fewer == said[0][:rows]
    more = decoder.generate(PROMPTS + PROMPTS[:1], [*BUDGETS, 9], seed=3, eos_token_id=()).ids
    assert more[:4] == said[0]


@pytest.mark.parametrize("graphs", ["eager", pytest.param("recorded", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("model", "mistral"), ("model", "gemma2"), ("model", "qwen3")),
        *(("spire", "mistral"), ("spire", "qwen3")),
    ],
)
def test_windows_soft_caps_and_norms(kind, family, graphs):
    target = sd.HFModel(tiny(family), graphs=graphs)
    draft = sd.HFModel(tiny(family, seed=1), graphs=graphs)
    if kind == "spire":
        draft = spire(target, graphs)
    same_rounds(sd.decoder(target).draft(draft, 3), eos_token_id=())


@pytest.mark.parametrize(
    ("kind", "verifier"),
    [
        ("model", sd.Coupled()),
        pytest.param("spire", sd.Rejection(), marks=pytest.mark.slow),
        pytest.param("model", sd.Rejection(), marks=pytest.mark.slow),
        pytest.param("spire", sd.Coupled(), marks=pytest.mark.slow),
    ],
)
def test_stops_that_are_found_a_round_late(verifier, kind):
    builder = builder_of(kind).verifier(verifier)
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


@BOTH
def test_streams_and_runs_between_each_other(kind):
    serial, ahead = pair(builder_of(kind, "eager"))
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


@BOTH
def test_a_row_does_not_depend_on_its_batch(kind):
    ahead = builder_of(kind, "eager").executor(Ahead()).build()
    together = ahead.generate(PROMPTS, BUDGETS, seed=[1, 2, 3, 4], eos_token_id=()).ids
    for i, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS)):
        assert ahead.generate([prompt], budget, seed=[i + 1], eos_token_id=()).ids[0] == together[i]


@BOTH
def test_one_replay_a_round_and_the_next_before_the_last_is_read(monkeypatch, kind):
    from specdec.executors import whole_rounds as module

    decoder = builder_of(kind, "eager").greedy().executor(Ahead()).build()
    said = []
    launch, read = module.Rounds._launch, module._Flight.read
    monkeypatch.setattr(
        module.Rounds, "_launch", lambda self, fresh: (said.append("launch"), launch(self, fresh))[1]
    )
    monkeypatch.setattr(module._Flight, "read", lambda self: (said.append("read"), read(self))[1])
    calls = []
    score = sd.HFModel.score
    monkeypatch.setattr(
        sd.HFModel, "score", lambda self, *a, **k: (calls.append(self), score(self, *a, **k))[1]
    )
    made = decoder.generate([PROMPTS[0]], 30, seed=0, eos_token_id=())
    assert calls == [decoder.target]  # the prefill
    rounds = made.stats.rounds
    assert said.count("read") == rounds
    assert said[:4] == ["launch", "launch", "read", "launch"]
    assert said.count("launch") in (rounds, rounds + 1)


@pytest.mark.parametrize(
    ("kind", "verifier", "temperature"),
    [
        pytest.param(kind, verifier, temperature, marks=() if kind in fast else pytest.mark.slow)
        for verifier, temperature, fast in (
            (sd.Rejection(), 0, ["spire"]),
            (sd.Rejection(), 1.0, ["model", "spire"]),
            (sd.Coupled(), 1.0, ["model", None]),
        )
        for kind in ("model", "spire", None)
    ],
)
def test_on_a_device_a_round_waits_once(kind, verifier, temperature):
    def made(on, executor):
        target, small = (sd.HFModel(on(tiny("llama", seed)), graphs="eager") for seed in (0, 1))
        builder = sd.decoder(target).verifier(verifier).sampling(temperature=temperature).executor(executor)
        if kind == "spire":
            model = SpireModel.from_target(tiny("llama"), 1, window=4)
            small = sd.drafts.Spire(SpireModel(on(model.body), model.layers, window=4), 3, graphs="eager")
        return (builder.draft(small, 3) if kind else builder).build()

    a_round_waits_once(made, PROMPTS[:2], 14)


@BOTH
def test_logits_that_are_not_finite_are_refused(kind):
    for broken, said in ((0, "^logits of row"), (1, "the draft's logits of row")):
        target, draft = parts(kind, "eager")
        decoder = sd.decoder(target).draft(draft, 3).executor(Ahead()).build()
        both = target.model, draft.model if kind == "model" else draft.model.body
        rounds = []

        def spoil(round, both=both, broken=broken, rounds=rounds):
            rounds.append(round)
            if round.number == 2:
                with torch.no_grad():
                    both[broken].lm_head.weight.fill_(float("nan"))

        with pytest.raises(ValueError, match=said):
            decoder.generate(PROMPTS, 30, seed=0, eos_token_id=(), on_round=spoil)
        assert len(rounds) >= 3


def test_other_random_numbers_run_serially():
    target = sd.TableModel([0.7, 0.3])
    assert certify(sd.decoder(target).build(), max_new_tokens=2).lossless
    real, small = models("eager")
    decoder = sd.decoder(real).draft(small, 2).executor(Ahead()).build()

    rng = OwnNumbers(sd.rng.seeds(0, 1))
    decoder.generate([PROMPTS[0]], 12, rng=rng, eos_token_id=())
    assert rng.asked


class OwnRejection(sd.Rejection):
    pass


class OwnModel(sd.HFModel):
    pass


class OwnSpire(sd.drafts.Spire):
    pass


class OwnSpireModel(SpireModel):
    def logits(self, x):
        return super().logits(x) * 2


def refused(which):
    target, small = models("eager")
    base = sd.decoder(target).draft(small, 3).executor(Ahead())
    if which == "verifier":
        base = base.verifier(OwnRejection())
    elif which == "candidates":
        base = base.verifier(sd.Coupled(candidates=2))
    elif which == "processor":
        base = base.sampling(processors=[lambda ids, scores: scores])
    elif which == "draft":
        base = sd.decoder(target).draft(sd.drafts.NGram(), 3).executor(Ahead())
    elif which == "subclass":
        base = sd.decoder(OwnModel(tiny("llama"), graphs="eager")).executor(Ahead())
    elif which == "graphs":
        base = sd.decoder(sd.HFModel(tiny("llama"))).executor(Ahead())
    elif which.startswith("spire"):
        model = spire(target, mask=behind).model if which == "spire mask" else spire(target).model
        if which == "spire model":
            model = OwnSpireModel(model.body, model.layers, window=4)
        how = False if which == "spire graphs" else "eager"
        cls = OwnSpire if which == "spire subclass" else sd.drafts.Spire
        base = sd.decoder(target).draft(cls(model, graphs=how), 3).executor(Ahead())
    return base


@pytest.mark.parametrize(
    "which",
    [
        *("verifier", "candidates", "processor", "draft", "subclass", "graphs"),
        *("spire subclass", "spire model", "spire graphs", "spire mask"),
    ],
)
def test_parts_that_the_step_would_bypass_are_refused(which):
    with pytest.raises(ValueError, match=r"Ahead\(\) .*use executors.Serial\(\)"):
        refused(which).build()


def test_a_block_shorter_than_the_chain_is_refused_by_build():
    target, _ = models("eager")
    builder = sd.decoder(target).draft(spire(target, "eager", block=2), 3)
    with pytest.raises(ValueError, match=r"a chain of 3 tokens .*use Spire\(model, block=3\)"):
        builder.executor(Ahead()).build()


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_of_spire(seed):
    pick, prompts, budgets = batch_of(seed, shortest=3)  # as long as the most sinks
    target = sd.HFModel(tiny("llama"), graphs="eager")
    length = pick.randint(1, 5)
    draft = spire(
        target,
        "eager",
        block=length + pick.choice([0, 0, 1, 4]),
        layers=pick.randint(1, 2),
        window=pick.choice([1, 2, 3, 9, None]),
        sinks=pick.choice([0, 1, 3]),
        feedback=pick.random() < 0.7,
    )
    drawing = pick.choice([None, None, sd.Sampling(temperature=0), sd.Sampling(temperature=1.3)])
    draft = sd.drafts.Spire(draft.model, draft.block, drawing, graphs=pick.choice(["eager", "recorded"]))
    verifier = pick.choice([sd.Rejection(), sd.Coupled(), sd.verifiers.FusedRejection()])
    builder = sd.decoder(target).sampling(temperature=pick.choice([0, 0.8, 1.0])).verifier(verifier)
    ends = [pick.randint(0, 96) for _ in range(pick.choice([0, 3, 12]))]
    same_rounds(builder.draft(draft, length), prompts, budgets, eos_token_id=ends)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    """Prompts, budgets, ends, lengths and sampling at random; one executor's texts are the other's."""
    pick, prompts, budgets = batch_of(seed, shortest=1)
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


@BOTH
def test_fused_rejection_decides_as_rejection(kind):
    builder = builder_of(kind, "eager").verifier(sd.verifiers.FusedRejection())
    same_rounds(builder, eos_token_id=())  # float64 models: rounding decides nothing


@BOTH
def test_a_capture_that_fails_leaves_the_texts(kind):
    serial, ahead = pair(builder_of(kind, "eager"))
    expected = serial.generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids

    def broken(body):
        raise RuntimeError("no capture today")

    ahead.target.steps.capture = broken
    with pytest.warns(RuntimeWarning, match="no capture today"):
        assert ahead.generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).ids == expected


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_texts_that_use_every_learned_position(family):
    """Tokens beyond a row's budget are computed and dropped; they have no position of their own."""
    target, small = (sd.HFModel(tiny(family, seed), graphs="eager") for seed in (0, 1))
    prompts = [[5, 6] * 110, [9] * 3]
    same_rounds(sd.decoder(target).draft(small, 5), prompts, [256 - 220, 30], eos_token_id=())


@BOTH
def test_statistics_can_be_shown(kind):
    stats = builder_of(kind, "eager").executor(Ahead()).build().generate(PROMPTS, 9, seed=0).stats
    assert stats.shown_tau.startswith("tau ")
    assert min(stats.seconds["prefill"], stats.seconds["target"], stats.seconds["other"]) > 0
