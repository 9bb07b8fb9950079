"""Chains of drafts as captured steps, beside the loops that they replace; recorded graphs stand for CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted, launches  # noqa: F401 (fixtures)
from stepped import LAWS, builder_of, same
from tiny import tiny

import specdec as sd
from specdec.cache.ring_cache import RingCache
from specdec.drafts.spire import SpireModel
from specdec.drafts.spire.launches import SpireLaunches
from specdec.executors import Ahead, Serial
from specdec.executors.round import staying
from specdec.graphs import chain as chains
from specdec.graphs.ring_chain import RingChain
from specdec.graphs.staging import Program
from specdec.rng import Attempt, Philox
from specdec.sampling import Sampling
from specdec.types import Context


@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("how", ["eager", "recorded"])
def test_a_captured_chain_is_the_loop(sampling, how):
    model = tiny("llama", 1, torch.float32)
    loop, chain = (
        sd.drafts.Model(wrapped).bind(wrapped, sampling)
        for wrapped in (sd.HFModel(model, graphs=g) for g in (False, how))
    )
    text = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]
    context = sd.Context.of(text, 64)
    rng = Philox(torch.tensor([5, 6, 7]))
    one, two = loop.init(context, None), chain.init(context, None)
    replayed = 0
    for step in range(12):
        budget = torch.tensor([[3, 3, 3], [3, 1, 2], [0, 2, 3]][step % 3 if step > 5 else 0])[: context.batch]
        if step == 10:
            rng = Attempt(Attempt(rng, 2), 1)
        a, one = loop.propose(one, context, budget, rng)
        b, two = chain.propose(two, context, budget, rng)
        replayed += any(
            isinstance(p, chains.Chain) for s in chain.model.steps._storages for p in s.programs.values()
        )
        live = torch.arange(a.nodes) < budget[:, None]
        assert a.tokens[live].equal(b.tokens[live])
        assert not b.tokens[~live].any() or a.probs is not None
        assert a.provenance == b.provenance
        assert a.size.equal(b.size)
        if a.probs is not None:
            same([b.probs[live]], [a.probs[live]], 1e-5)
        caches = one.cache, two.cache
        assert caches[0]._lengths == caches[1]._lengths
        assert caches[0]._fed == caches[1]._fed
        text = [row + [int(t)] + ([9] if step % 2 else []) for row, t in zip(text, a.tokens[:, 0])]
        if step == 5:
            stay = torch.tensor([0, 2])
            text, rng = [text[0], text[2]], rng.select(stay)
            one, two = loop.select(one, stay), chain.select(two, stay)
        context = sd.Context.of(text, 64)
    assert replayed > 6
    assert chain.model.steps.why is None


def test_chains_that_are_drawn_one_by_one():
    model = sd.HFModel(tiny("llama", 1, torch.float32), graphs="eager")
    context, cache = sd.Context.of([[1, 2, 3]], 8), model.cache(1, 8)
    rng = Philox(torch.tensor([1]))

    def draws(budget=2, rng=rng, **sampling):
        args = model, cache, context, torch.tensor([budget]), rng, Sampling(**sampling), None
        return [chains.propose(*args) for _ in range(4)][-1]

    assert draws() is not None
    assert draws(0) is None
    assert draws(7) is None  # no room: the loop says so
    assert draws(processors=[lambda ids, scores: scores]) is None
    assert draws(rng=sd.Coupled().for_draft(rng)) is None
    assert draws(rng=sd.Coupled().for_draft(rng), temperature=0) is not None


def spire_of(target, **settings):
    model = SpireModel.from_target(target, 2, **settings)
    if model.memory is not None:
        torch.manual_seed(1)
        torch.nn.init.normal_(model.memory.weights)
    return model


SPIRE = [{"window": 6}, {"window": 5, "sinks": 3, "feedback": False}, {"window": None}]


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        pytest.param(settings, LAWS[j], marks=() if i == j == 1 else pytest.mark.slow, id=f"{name}-{j}")
        for i, (name, settings) in enumerate(zip(("feedback", "plain", "no window"), SPIRE))
        for j in range(3)
    ],
)
@torch.no_grad()
def test_a_captured_spire_chain_is_the_loop(sampling, settings):
    """Proposals of three drafts over the same rounds: the loop, steps of fixed shapes, and their recordings."""
    target = tiny("llama", 0, torch.float32, num_hidden_layers=3)
    model = spire_of(target, **settings)
    prompts, rounds = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [9, 10, 11] * 7], []
    ways = [
        sd.drafts.Spire(model, 4, sampling, graphs=how).bind(sd.HFModel(target), sampling)
        for how in (False, "eager", "recorded")
    ]
    decoder = sd.decoder(sd.HFModel(target)).draft(ways[0], 4).sampling(sampling).build()
    decoder.generate(prompts, [36, 16, 36], seed=5, on_round=rounds.append)
    states, seeds, replayed = [], torch.tensor([3, 4, 5]), 0
    for round in rounds:
        if not round.number:
            states = [way.init(round.context, None) for way in ways]
        else:
            rng = Philox(seeds[round.context.request])
            budget = (
                torch.tensor([4, 3, 1][: round.context.batch]) if round.number % 3 else torch.ones(1).long()
            )
            budget = budget.expand(round.context.batch) if len(budget) == 1 else budget
            (a, _), (b, _), (c, _) = (
                way.propose(state, round.context, budget, rng) for way, state in zip(ways, states)
            )
            assert a.provenance == b.provenance == c.provenance
            live = torch.arange(a.nodes) < budget[:, None]
            assert a.tokens[live].equal(b.tokens[live])
            assert b.tokens.equal(c.tokens)
            if a.probs is not None:
                same([b.probs], [a.probs], 1e-5)
                same([c.probs], [b.probs], 0)
        states = [way.observe(state, round) for way, state in zip(ways, states)]
        if round.finished.any():
            stay = staying(round.finished)  # the decoder's order
            turned = torch.arange(len(stay)).flip(0)
            orders = [stay] if round.number % 2 else [stay[turned], turned]  # or by copies
            for order in orders if len(stay) else ():
                states = [way.select(state, order) for way, state in zip(ways, states)]
            states = states if len(stay) else []
        if states and round.number:
            replayed += bool(ways[2].programs._storages[0].programs)
    assert replayed > 6
    assert all(way.programs.why is None for way in ways[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted", "launches")
@pytest.mark.parametrize("executor", [Serial(), Ahead()], ids=repr)
def test_a_spire_draft_by_few_launches(executor, monkeypatch):
    """The proposals of rounds whose draft runs Triton's operators on merged products, recorded."""
    target, said, ran = tiny("llama", 0, torch.float32, num_hidden_layers=3), [], []
    model = spire_of(target, window=6)
    few = SpireLaunches(model.body, merged=True)
    for name in ("run", "remember"):
        own = getattr(SpireLaunches, name)
        monkeypatch.setattr(
            SpireLaunches, name, lambda *args, _own=own, _name=name: ran.append(_name) or _own(*args)
        )
    for path in (None, few):
        assert not ran
        monkeypatch.setattr(SpireModel, "launches", path)
        spire = sd.drafts.Spire(model, 3, graphs="recorded")
        decoder = sd.decoder(sd.HFModel(target, graphs="recorded")).draft(spire, 3).executor(executor)
        rounds = []
        prompts = [[1, 2, 3, 4, 5] * 2, [7, 8]]
        decoder.greedy().build().generate(prompts, [9, 7], on_round=rounds.append, eos_token_id=())
        said.append([(round.proposal.tokens.tolist(), round.verdict.tokens.tolist()) for round in rounds])
    assert said[0] == said[1]
    assert {"run", "remember"} == set(ran)
    assert few.ops.merged._copies


def test_spire_with_graphs():
    """Whole runs, whose memory and captures serve the next; the target's verification brings activations out of its own steps."""
    target = tiny("llama", 0, torch.float32, num_hidden_layers=3)
    model, said = spire_of(target, window=6), []
    for how in (False, "eager", "recorded"):
        wrapped = sd.HFModel(target, graphs=how)
        spire = sd.drafts.Spire(model, 3, graphs=how)
        decoder = sd.decoder(wrapped).draft(spire, 3).sampling(temperature=1.0).build()
        prompts = [[1, 2, 3, 4, 5] * 4, [7, 8], [9] * 11]
        said += [[decoder.generate(prompts, [20, 9, 14], seed=seed).ids for seed in (3, 3, 4)]]
        if how:
            (storage,) = decoder.draft.programs._storages
            assert {(shape.rows, shape.steps) for shape in storage.programs} >= {(3, 3), (2, 3)}
            assert any(taps for _, _, taps in wrapped.steps._storages[0].programs)
            assert wrapped.steps.why is decoder.draft.programs.why is None
            decoder.draft.programs.release()
            assert not decoder.draft.programs._storages
    assert said[0] == said[1] == said[2]
    rng = sd.Coupled().for_draft(Philox(torch.tensor([1])))
    odd = Sampling(processors=[lambda ids, scores: scores])
    bound = sd.drafts.Spire(model, 3, graphs="eager").bind(sd.HFModel(target), Sampling())
    context = Context.of([[1, 2, 3]], 16)
    three = bound.ring(3, 16)
    copied = three.select(torch.tensor([2, 2, 0]))  # which is in other memory
    assert bound.programs._of(copied).whole is copied._whole is copied._blocks
    args = bound.init(context, None).ring, context, torch.tensor([2]), rng
    assert [bound._drawn(*args, Sampling(0)) is None for _ in range(2)] == [True, False]
    assert all(
        bound._drawn(*args, distribution) is None for distribution in (Sampling(), odd) for _ in range(2)
    )
    with pytest.raises(ValueError, match="on cpu: move it"):
        sd.drafts.Spire(model, graphs=True).bind(sd.HFModel(target), Sampling())


@pytest.mark.parametrize("sampling", [LAWS[0], LAWS[2]])
@torch.no_grad()
def test_a_captured_chain_of_a_windowed_model_is_the_loop(sampling):
    """Rows that lack one token of the text, or two."""
    model = tiny("llama", 1, torch.float32)
    ways = [
        sd.drafts.Model(windowed).bind(windowed, sampling)
        for windowed in (
            sd.models.Windowed(sd.HFModel(model, graphs=how), 6, block=4)
            for how in (False, "eager", "recorded")
        )
    ]
    text = [[1, 2, 3, 4, 5, 6], [7, 8], [9] * 12]
    context, rng, seen = Context.of(text, 80), Philox(torch.tensor([5, 6, 7])), set()
    states = [way.init(context, None) for way in ways]
    for step in range(12):
        budget = torch.tensor([[3, 3, 3], [3, 1, 2], [0, 2, 3]][step % 3])
        made = []
        for i, way in enumerate(ways):
            proposal, states[i] = way.propose(states[i], context, budget, rng)
            made.append(proposal)
        a, b, c = made
        live = torch.arange(a.nodes) < budget[:, None]
        assert a.tokens[live].equal(b.tokens[live])
        assert b.tokens.equal(c.tokens)
        if a.probs is not None:
            same([b.probs[live]], [a.probs[live]], 1e-5)
            same([c.probs], [b.probs], 0)
        seen |= {p.shape.earlier for s in ways[2].model.steps._storages for p in s.programs.values()}
        news = ([9, 8], [4], [3, 1]) if step < 8 else ([9], [4], [3])
        for row, new in zip(text, news):
            row += new
        context = Context.of(text, 80)
    assert seen == {False, True}
    assert ways[2].model.steps.why is None


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("llama", LAWS[0]),
        *(
            pytest.param(family, LAWS[i], marks=pytest.mark.slow)
            for family, i in (("llama", 2), ("gemma2", 0), ("gemma2", 2), ("gpt_oss", 0), ("gpt_oss", 2))
        ),
    ],
)
@torch.no_grad()
def test_a_captured_chain_over_a_ring_is_the_loop(family, sampling):
    """MagicDec's view of a target, over the same rounds: a layer's own window, soft caps and sinks included."""
    model, rounds = tiny(family, 0, torch.float32), []
    targets = [sd.HFModel(model, graphs=how) for how in (False, "eager", "recorded")]
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [9, 10, 11] * 7]
    drafts = [sd.drafts.MagicDec(window=6, sinks=2, block=4).bind(t, sampling) for t in targets]
    caches, states = [t.cache(3, 96) for t in targets], []
    decoder = sd.decoder(targets[0]).draft(sd.drafts.MagicDec(window=6, sinks=2, block=4), 4)
    budgets = [60, 24, 60] if sampling.greedy else [30, 12, 30]  # greedy rounds are fewer
    decoder.sampling(sampling).build().generate(prompts, budgets, seed=5, on_round=rounds.append)
    seeds, replayed = torch.tensor([3, 4, 5]), 0
    for round in rounds:
        B, proposals = round.context.batch, []
        budget = torch.tensor([[4, 3, 1], [4, 4, 4], [0, 2, 1]][round.number % 3][:B])
        for target, cache, draft, i in zip(targets, caches, drafts, range(3)):
            target.prefill(cache, round.context)
            if not round.number:
                states.append(draft.init(round.context, cache))
                continue
            states[i].cache.catch_up()
            proposal, _ = draft.propose(
                states[i], round.context, budget, Philox(seeds[round.context.request])
            )
            proposals.append(proposal)
        if round.number:
            a, b, c = proposals
            live = torch.arange(a.nodes) < budget[:, None]
            assert a.tokens[live].equal(b.tokens[live])
            assert b.tokens.equal(c.tokens)
            if a.probs is not None:
                same([b.probs[live]], [a.probs[live]], 1e-5)
                same([c.probs], [b.probs], 0)
            replayed += any(
                isinstance(p, RingChain) for s in targets[2].steps._storages for p in s.programs.values()
            )
        if round.finished.any():
            stay = staying(round.finished)
            caches = [cache.select(stay) for cache in caches] if len(stay) else caches
            states = [
                d.follow(d.select(s, stay), c) if len(stay) else s for d, s, c in zip(drafts, states, caches)
            ]
    assert replayed > 6
    assert all(target.steps.why is None for target in targets[1:])


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_constant_size_drafts_with_graphs(temperature):
    """Whole runs, whose memory serves the next; where a chain cannot be captured the loop draws it."""
    target, small = tiny("llama", 0, torch.float32), tiny("llama", 1, torch.float32)
    prompts, said = [[1, 2, 3, 4, 5] * 4, [7, 8], [9] * 11], []
    for how in (False, "eager"):
        t, d = (sd.HFModel(m, graphs=how) for m in (target, small))
        view = {"window": 6, "block": 3}
        drafts = [
            sd.drafts.MagicDec(**view),
            sd.drafts.MagicDec(**view, positions="in_cache"),
            sd.drafts.MagicDec(**view, pruner=sd.pruning.SnapKV(), budget=4, observation=2),
            sd.drafts.Model(sd.models.Windowed(d, 6)),
        ]
        for draft, steps in zip(drafts, (t.steps, None, None, d.steps)):
            decoder = sd.decoder(t).draft(draft, 3).sampling(temperature=temperature).build()
            said.append([decoder.generate(prompts, [20, 9, 14], seed=seed).ids for seed in (3, 4)])
            if how and steps is not None:
                rings = [s for s in steps._storages if isinstance(s._model, RingCache)]
                assert len(rings) == 1  # the second run had the memory of the first
                shapes = [p.shape for p in rings[0].programs.values() if isinstance(p, RingChain)]
                assert shapes
                assert any(shape.earlier for shape in shapes) == (steps is d.steps)
    assert said[:4] == said[4:]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_no_distribution(temperature):
    bad = tiny("llama", 1, torch.float32)
    draft = sd.HFModel(bad, graphs="eager")
    decoder = sd.decoder(sd.HFModel(tiny("llama", 0, torch.float32))).draft(draft, 3)
    decoder = decoder.sampling(temperature=temperature).build()

    def spoil(round):
        if round.number == 6:
            with torch.no_grad():
                bad.lm_head.weight.fill_(float("nan"))

    with pytest.raises(ValueError, match=r"not finite|contain nan"):
        decoder.generate([[1, 2, 3]], 30, seed=0, on_round=spoil)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("draft", ["spire", "magicdec"])
def test_logits_over_a_ring_that_are_no_distribution(draft, temperature):
    decoder = builder_of(draft, "eager").sampling(temperature=temperature).build()
    inner = decoder.draft.model.body if draft == "spire" else decoder.target.model

    def spoil(round):
        if round.number == 4:
            with torch.no_grad():
                inner.lm_head.weight.fill_(float("nan"))

    with pytest.raises(ValueError, match="not finite"):
        decoder.generate([[1, 2, 3], [4, 5]], 40, seed=0, on_round=spoil)


@pytest.mark.parametrize("temperature", [0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_whole_runs(temperature):
    target, small = tiny("llama", 0, torch.float32), tiny("llama", 1, torch.float32)
    prompts, said = [[1, 2, 3, 4, 5] * 4, [7, 8], [9] * 11], []
    for how in (False, "recorded"):
        t, d = (sd.HFModel(m, graphs=how) for m in (target, small))
        chain = sd.decoder(t).draft(d, 3).sampling(temperature=temperature).build()
        bush = sd.decoder(t).draft(sd.drafts.Tree(d, (2, 1, 1)), 3).sampling(temperature=temperature).build()
        said += [[x.generate(prompts, [20, 9, 14], seed=3).ids for x in (chain, bush, chain)]]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("draft", "of"),
    [
        ("none", "target"),
        ("spire", "draft"),
        *(("ahead", "target"), ("spire ahead", "draft")),
        *(pytest.param(name, "draft", marks=pytest.mark.slow) for name in ("model", "windowed", "ahead")),
    ],
)
@pytest.mark.slow
def test_weights_whose_storage_was_replaced(draft, of, monkeypatch):
    """``weight.data = ...`` leaves the parameter, and moves the numbers whose address a graph has: no old step is replayed."""
    target, small = (tiny("llama", seed, torch.float32, num_hidden_layers=2) for seed in (0, 1))
    if "spire" in draft:
        small = SpireModel.from_target(target, layers=1, window=8)

    def decoder(graphs):
        builder = sd.decoder(sd.HFModel(target, graphs=graphs)).greedy()
        if "spire" in draft:
            builder = builder.draft(sd.drafts.Spire(small, block=3, graphs=graphs), 3)
        elif draft == "windowed":
            builder = builder.draft(sd.models.Windowed(sd.HFModel(small, graphs=graphs), 6, 1), 3)
        elif draft != "none":
            builder = builder.draft(sd.HFModel(small, graphs=graphs), 3)
        return (builder.executor(sd.executors.Ahead()) if "ahead" in draft and graphs else builder).build()

    def said(decoder):
        rounds = []
        decoder.generate([[1, 2, 3, 4, 5] * 3, [7, 8]], [14, 9], eos_token_id=(), on_round=rounds.append)
        drafted = [
            r.proposal.tokens[b, : r.proposal.size[b]].tolist()
            for r in rounds
            for b in r.context.request.argsort()
        ]
        return drafted, [r.verdict.bonus.tolist() for r in rounds]

    def swap(model):
        for p in model.parameters():
            if p.dim() == 2:
                p.data = p.data.roll(1, 0).clone()

    captured = decoder("recorded")
    before = [said(captured) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    model = getattr(captured.draft, "model", None)
    of_draft = getattr(captured.draft, "programs", None) or getattr(model, "steps", None)
    programs = of_draft if of == "draft" and "ahead" not in draft else captured.target.steps
    stale = set(programs.captured)
    assert stale
    swap(target if of == "target" else small)
    expected, replayed = said(decoder(False)), set()
    assert expected != before[0]
    replay = Program.replay
    monkeypatch.setattr(Program, "replay", lambda self: (replayed.add(self), replay(self))[1])
    assert said(captured) == said(captured) == said(captured) == expected
    assert replayed
    assert not replayed & stale
    assert not stale & set(programs.captured)  # they would keep the old memory
