"""Whole rounds that draft in constant memory, with a windowed model or MagicDec: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

import pytest
import torch
from both_executors import a_round_waits_once, batch_of, pair, same_rounds
from interpreted import interpreter
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec.cache.ring import Ring
from specdec.cache.slots import KVShape
from specdec.cache.static import StaticStore
from specdec.drafts import MagicDec, Model
from specdec.executors import Ahead, Serial
from specdec.executors import whole_rounds as module
from specdec.graphs.ring_chain import RingChain
from specdec.graphs.ring_plan import RingPlans
from specdec.graphs.whole_round import WholeRound
from specdec.kernels.attention import ExplicitPlan, reference, triton_backend
from specdec.masks import Causal, Strided, Window
from specdec.models import Masked, Windowed
from specdec.pruning import SnapKV
from specdec.verifiers import FusedRejection

PROMPTS = [[5, 6, 7, 8, 9], [3, 2, 1], [9, 9, 4, 2, 7, 7, 1]]  # as long as the most sinks
BUDGETS = [14, 6, 11]
NARROWER = Causal() & Window(9) & (Strided(3) | Window(2))
KINDS = pytest.mark.parametrize("kind", ["windowed", "magicdec"])


def draft_of(kind, target, small=None, window=4, sinks=1, block=3, sampling=None, mask=None):
    """A draft over a view of the target, or the windowed ``small`` (default: of the target's weights, so that most is accepted)."""
    if kind == "magicdec":
        how = {"window": window, "sinks": sinks} if mask is None else {"mask": mask}
        return MagicDec(**how, block=block, sampling=sampling)
    small = small or target
    if mask is not None:
        return Model(Masked(small, mask, block=block), sampling)
    return Model(Windowed(small, window, sinks, block=block), sampling)


def builder_of(kind, graphs="eager", length=3, family="llama", **settings):
    target = sd.HFModel(tiny(family), graphs=graphs)
    return sd.decoder(target).draft(draft_of(kind, target, **settings), length)


def accepted(made):
    return made[1].stats.accepted


@KINDS
@pytest.mark.parametrize(
    ("verifier", "temperature", "graphs"),
    [
        (sd.Coupled(), 0.8, "eager"),
        *(
            pytest.param(verifier, temperature, "recorded", marks=pytest.mark.slow)
            for verifier, temperature in (
                *((sd.Rejection(), 0), (sd.Rejection(), 1.0), (sd.Coupled(), 1.0), (FusedRejection(), 1.0)),
            )
        ),
    ],
)
def test_texts_and_rounds_are_those_of_serial(kind, verifier, temperature, graphs):
    builder = builder_of(kind, graphs).verifier(verifier).sampling(temperature=temperature)
    _, made = same_rounds(builder, PROMPTS, BUDGETS, eos_token_id=())
    assert accepted(made) > 5


RINGS = {
    "no sinks": ({"window": 3, "sinks": 0}, 3),
    "sinks": ({"window": 2, "sinks": 3}, 3),
    "one position": ({"window": 1, "block": 1}, 1),
    "long chains": ({"window": 5, "block": 8}, 8),
    "narrower": ({"mask": NARROWER}, 3),
    "wide": ({"window": 30, "sinks": 2}, 3),
    "loose": ({"window": 5, "block": 7}, 2),
}


@pytest.mark.parametrize(
    ("kind", "ring", "rows"),
    [
        *(("windowed", ring, 1) for ring in ("no sinks", "narrower")),
        *(("magicdec", ring, 1) for ring in ("one position", "long chains")),
        *(
            pytest.param(kind, ring, 3, marks=pytest.mark.slow)
            for kind in ("windowed", "magicdec")
            for ring in RINGS
        ),
    ],
)
def test_rings(kind, ring, rows):
    """Memory that wraps several times, and steps that run twice on one text, as captures do; chains as long as the block."""
    settings, length = RINGS[ring]
    builder = builder_of(kind, "recorded" if rows > 1 else "eager", length, **settings)
    _, made = same_rounds(builder, PROMPTS[:rows], [40, 9, 26][:rows], eos_token_id=())
    assert accepted(made) > 10


@pytest.mark.parametrize(("kind", "length"), [("windowed", 2), ("magicdec", 1)])
def test_rings_when_a_step_runs_twice(kind, length):
    builder = builder_of(kind, "recorded", length, window=2, sinks=1, block=length)
    _, made = same_rounds(builder, PROMPTS[:1], [12], eos_token_id=())
    assert accepted(made) > 2


@pytest.mark.parametrize(("length", "block"), [(1, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_captured_chain_as_long_as_the_block_draws_what_the_loop_draws(length, block):
    """A recording runs the chain twice; the second run must see what the first one saw. Longer chains are left to the loop."""
    drawn = []
    for graphs in (False, "recorded"):
        target = sd.HFModel(tiny("llama"), graphs=graphs)
        draft = draft_of("windowed", target, window=block + 1, sinks=0, block=block)
        rounds = []
        decoder = sd.decoder(target).draft(draft, length).build()
        decoder.generate(PROMPTS[:1], 12, seed=3, eos_token_id=(), on_round=rounds.append)
        drawn.append([r.proposal.tokens[0, : r.proposal.size[0]].tolist() for r in rounds])
    assert drawn[0] == drawn[1]
    chains = [step for step in decoder.target.steps.captured if isinstance(step, RingChain)]
    assert any(chain.shape.earlier for chain in chains) == (length == block)


@pytest.mark.parametrize("mask", [None, NARROWER])
def test_two_tokens_of_a_row_are_two_queries_of_its_slots(mask):
    """In the reference that captures use on a CPU, and in Triton's kernel: before the ring, while it fills, and after it was written several times."""
    pytest.importorskip("triton")
    ring = Ring([KVShape(2, 16, 16, torch.float32, torch.device("cpu"))], 4, 0, 9, 3, mask=mask)
    position = torch.tensor([0, 1, 100, 101, 6, 7, 11, 12])
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 8, 16, generator=g)
    keys, values = (torch.randn(4, ring.slots, 2, 16, generator=g) for _ in range(2))
    (plan,) = RingPlans(ring, StaticStore(ring)).of(position[None], 2)
    at = ring.at(torch.arange(8) // 2, position)
    assert plan.slots.equal(at)
    behind = position.numpy()[:, None] - ring.held(position.numpy())
    dense = ExplicitPlan(range(4), [2] * 4, ring.visible(position.numpy()), behind, at)
    expected = reference.attend(query, keys, values, dense, 0.25, None)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(plan.attend(query, keys, values, 0.25, None, None, None), expected, **close)
    with interpreter():
        made = triton_backend.launch(query, keys, values, plan._lowered(None), 0.25)
    torch.testing.assert_close(made, expected, **close)


def watched(monkeypatch):
    """The ``Rounds`` that an ``Ahead`` makes from now on."""
    made, init = [], module.Rounds.__init__

    def remember(self, *args):
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(module.Rounds, "__init__", remember)
    return made


@pytest.mark.parametrize("graphs", ["eager", pytest.param("recorded", marks=pytest.mark.slow)])
def test_committed_positions_of_a_view_are_the_targets_to_the_bit(monkeypatch, graphs):
    runs, checked = watched(monkeypatch), []

    def check(round):
        if not runs:
            return
        run = runs[0]
        view, target = run.memory, run.cache
        length = (round.context.length + round.committed)[~round.finished].tolist()
        for b, n in zip(run.at.tolist(), length):
            seen = [p for p in range(n - 1) if p > n - 1 - view.window or p < view.sinks]
            slots = [int(view.slot(torch.tensor(p).numpy())) for p in seen]
            for mine, theirs in zip(view._whole, target._whole):
                assert mine[:, b, slots].equal(theirs[:, b, seen])
            checked.append(n)

    decoder = builder_of("magicdec", graphs, window=5, sinks=2).executor(Ahead()).build()
    decoder.generate(PROMPTS, [40, 12, 30], seed=3, eos_token_id=(), on_round=check)
    assert len(checked) > 10


@KINDS
def test_the_index_of_a_memory_agrees_when_rows_leave(monkeypatch, kind):
    """What a draft draws on the host from that memory is what it draws from memory of its own."""
    runs, compact, seen = watched(monkeypatch), module.Rounds.compact, []

    def compared(run):
        if not run.stale:
            return
        compact(run)
        context, draft, budget = run.rows.context, run.composition.draft, torch.tensor([3] * len(run.at))
        fresh = draft.init(context, run.cache)
        drawing = draft if kind == "windowed" else draft.draft
        for b, n in enumerate(context.length.tolist()):
            lacks = 2 if kind == "windowed" else 1
            assert run.memory.row(b) == context.tokens[b, : n - lacks].tolist()
            assert (
                run.memory._high[b] >= n + 2 - lacks
            )  # written at most, by a round of which nothing was accepted
            if kind == "magicdec":
                assert run.memory.exact[b] == n - 1
        before = [block.clone() for block in run.memory._whole]
        drawn = []
        for cache in (fresh.cache, run.memory):
            state = sd.drafts.model.ModelState(cache, None)
            drawn.append(drawing.propose(state, context, budget, run.rows.rng)[0])
        assert drawn[0].tokens.equal(drawn[1].tokens)
        assert drawn[0].probs.allclose(drawn[1].probs)
        for block, then in zip(run.memory._whole, before):
            block.copy_(then)
        seen.append(len(run.at))

    monkeypatch.setattr(module.Rounds, "compact", compared)
    decoder = builder_of(kind).executor(Ahead()).build()
    decoder.generate(PROMPTS, [16, 3, 24], seed=3, eos_token_id=())
    assert seen == [2, 1]
    assert len(runs) == 1


@KINDS
def test_stops_that_are_found_a_round_late(kind):
    builder = builder_of(kind)
    plain = builder.build().generate(PROMPTS, BUDGETS, seed=3, eos_token_id=())
    ends = [plain.ids[0][6], plain.ids[2][8]]  # the middle of texts
    _, (made, _) = same_rounds(builder, PROMPTS, BUDGETS, eos_token_id=ends)
    assert made.finish.count("eos") > 1


@KINDS
@pytest.mark.parametrize("executor", [Ahead(), Serial()], ids=["Ahead", "Serial"])
def test_one_memory_and_its_captures_serve_every_call(kind, executor):
    decoder = builder_of(kind, length=2).greedy().executor(executor).build()
    said, captured, memory = [], [], []
    for _ in range(4):
        said.append(decoder.generate(PROMPTS[:2], [5, 7], seed=3, eos_token_id=()).ids)
        steps = decoder.target.steps
        captured.append({id(step) for step in steps.captured if isinstance(step, (WholeRound, RingChain))})
        memory.append([storage.whole[0].data_ptr() for storage in steps._storages])
        assert all(storage.free for storage in steps._storages)
    assert said[0] == said[1] == said[2] == said[3]
    assert memory[0] == memory[3]
    assert len(memory[0]) == 2  # the target's, and a ring
    assert captured[2] == captured[3]
    assert captured[0] & captured[3]


@KINDS
@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("gpt_oss", "eager"),
        *(
            pytest.param(f, "recorded", marks=pytest.mark.slow)
            for f in ("mistral", "gemma2", "gpt_oss", "qwen3")
        ),
    ],
)
def test_windows_soft_caps_and_sinks_of_layers(kind, family, graphs):
    """Layers see 8 positions, and the draft 11."""
    builder = builder_of(kind, graphs, family=family, window=11)
    _, made = same_rounds(builder, PROMPTS, [15, 7, 11], eos_token_id=())
    assert accepted(made) > 5


@KINDS
@pytest.mark.parametrize("mask", [None, NARROWER])
def test_texts_that_use_every_learned_position(kind, mask):
    """Tokens beyond a row's budget are computed and dropped; they have no position of their own."""
    builder = builder_of(kind, length=5, family="gpt2", block=5, mask=mask)
    same_rounds(builder, [[5, 6] * 120, [9] * 3], [256 - 240, 20], eos_token_id=())


@pytest.mark.parametrize("size", [90, pytest.param(104, marks=pytest.mark.slow)])
def test_vocabularies_of_other_sizes(size):
    target = sd.HFModel(tiny("llama"), byte_tokenizer(), graphs="eager")
    small = sd.HFModel(tiny("llama", seed=1, vocab_size=size), byte_tokenizer(), graphs="eager")
    builder = sd.decoder(target).draft(draft_of("windowed", target, small), 3)
    _, made = same_rounds(builder, [[96, 95, 94], [91, 2, 96]], [12, 8], eos_token_id=())
    assert any(token >= 90 for ids in made[1].ids for token in ids)


@KINDS
@pytest.mark.parametrize("temperature", [1.0, pytest.param(0, marks=pytest.mark.slow)])
def test_on_a_device_a_round_waits_once(kind, temperature):
    def made(on, executor):
        target, small = (sd.HFModel(on(tiny("llama", seed)), graphs="eager") for seed in (0, 1))
        builder = sd.decoder(target).sampling(temperature=temperature).executor(executor)
        return builder.draft(draft_of(kind, target, small), 3).build()

    a_round_waits_once(made, PROMPTS[:2], 12)


@KINDS
def test_a_capture_that_fails_leaves_the_texts(kind):
    serial, ahead = pair(builder_of(kind))
    expected = serial.generate(PROMPTS[:2], 7, seed=3, eos_token_id=()).ids

    def broken(body):
        raise RuntimeError("no capture today")

    ahead.target.steps.release()
    ahead.target.steps.capture = broken
    with pytest.warns(RuntimeWarning, match="no capture today"):
        assert ahead.generate(PROMPTS[:2], 7, seed=3, eos_token_id=()).ids == expected


class OwnWindowed(Windowed):
    pass


class OwnMasked(Masked):
    pass


class OwnMagicDec(MagicDec):
    pass


def behind(b, h, q, kv):
    return (kv <= q) & ((q - kv) % 2 == 0) & (q - kv < 9)


behind.reach = None


REFUSED = {
    "own windowed": (lambda m: OwnWindowed(m, 4), "OwnWindowed"),
    "own masked": (lambda m: OwnMasked(m, NARROWER), "OwnMasked"),
    "own magicdec": (lambda m: OwnMagicDec(window=4), "OwnMagicDec"),
    "own mask": (lambda m: Masked(m, Causal() & Window(9) & behind), "runs the library's masks"),
    "own mask of a view": (
        lambda m: MagicDec(mask=Causal() & Window(9) & behind),
        "runs the library's masks",
    ),
    "block": (lambda m: Windowed(m, 4, block=2), "block=3 or more, but the draft's model has block=2"),
    "whole text": (
        lambda m: Masked(sd.HFModel(m.model), Causal() & Window(4), storage="dense"),
        r"in constant memory, but the draft's has storage for the whole text",
    ),
    "no graphs": (lambda m: Windowed(sd.HFModel(m.model), 4), "has no graphs"),
    "pruner": (lambda m: MagicDec(window=4, pruner=SnapKV()), r"without a pruner, .*SnapKV"),
    "no reach": (
        lambda m: vars(m).update(graphs="auto") or MagicDec(mask=Causal()),
        "masks that have a reach",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
def test_parts_that_the_step_would_bypass_are_refused(which):
    made, said = REFUSED[which]
    target = sd.HFModel(tiny("llama"), graphs="eager")
    builder = sd.decoder(target).draft(made(target), 3)
    builder.executor(Serial()).build()
    with pytest.raises(ValueError, match=rf"Ahead\(\) .*{said}.*: use executors.Serial\(\)"):
        builder.executor(Ahead()).build()


def test_a_view_with_a_block_shorter_than_the_chain_is_refused_by_build():
    with pytest.raises(ValueError, match=r"a chain of 3 tokens .*use MagicDec\(block=3\)"):
        builder_of("magicdec", block=2).executor(Ahead()).build()


def random_batch(kind, seed):
    """Both executors over a batch, with a draft, a length, sampling, a verifier and ends at random; returns how much was accepted."""
    pick, prompts, budgets = batch_of(seed, shortest=3 if kind == "magicdec" else 1)
    target, small = (sd.HFModel(tiny("llama", i), graphs="eager") for i in (0, 1))
    length = pick.randint(1, 8)
    draft = draft_of(
        kind,
        target,
        pick.choice([small, None, None]),
        pick.choice([1, 2, 3, 9, 40]),
        pick.choice([0, 1, 3]),
        length + pick.choice([0, 0, 1, 4]),
        pick.choice([None, None, sd.Sampling(temperature=0), sd.Sampling(temperature=1.3)]),
        pick.choice([None, None, NARROWER, Causal() & Window(5)]),
    )
    verifier = pick.choice([sd.Rejection(), sd.Coupled(), FusedRejection()])
    builder = sd.decoder(target).sampling(temperature=pick.choice([0, 0.8, 1.0])).verifier(verifier)
    ends = [pick.randint(0, 96) for _ in range(pick.choice([0, 3, 12]))]
    _, made = same_rounds(builder.draft(draft, length), prompts, budgets, eos_token_id=ends)
    return accepted(made)


@KINDS
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 16))])
def test_random_batches(kind, seed):
    random_batch(kind, seed)
