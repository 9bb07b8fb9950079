"""Whole rounds of a head's dynamic trees: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import test_ahead_heads as chains
import torch
from both_executors import BUDGETS, PROMPTS, a_round_waits_once, batch_of, same_rounds
from test_fast_heads import shake
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import DDTree, DynamicTree, Medusa, StaticTree, tree_round
from specdec.executors import Ahead, Serial
from specdec.verifiers import FusedRejection

TREES = {
    "all nodes": (DynamicTree(3, 3, 39), 3),
    "some": (DynamicTree(6, 4, 30), 4),
    "one depth": (DynamicTree(4, 1, 3), 3),
    "a chain": (DynamicTree(1, 5, 9), 4),
    "wide": (DynamicTree(10, 4, 59), 5),
    "cut": (DynamicTree(4, 8, 59), 3),
}


def builder_of(name="eagle3", tree="some", graphs="eager", vocab_size=16, page=None, **settings):
    """A target of few tokens, of which even a head that was never trained guesses many if they are hot."""
    target = sd.HFModel(tiny("llama", vocab_size=vocab_size), graphs=graphs, page=page)
    kind, own = chains.HEADS[name]
    head = shake(kind.from_target(target, **own | settings))
    grower, length = TREES[tree]
    return sd.decoder(target).draft(sd.drafts.Head(head, grower, graphs=graphs), length)


@pytest.mark.parametrize(
    ("name", "tree", "graphs", "verifier", "temperature"),
    [
        ("eagle3", "some", "eager", sd.Rejection(), 5.0),
        ("eagle3", "all nodes", "recorded", sd.Rejection(), 0),
        ("mtp", "all nodes", "eager", sd.Coupled(), 5.0),
        pytest.param("all flags", "cut", "eager", FusedRejection(), 5.0, marks=pytest.mark.slow),
        ("state before the norm", "one depth", "eager", sd.Rejection(), 5.0),
        ("eagle3", "a chain", "eager", sd.Coupled(), 5.0),
        *(
            pytest.param(name, tree, graphs, verifier, temperature, marks=pytest.mark.slow)
            for name in ("eagle3", "mtp", "own ends")
            for tree in TREES
            for graphs, verifier, temperature in (
                ("eager", sd.Rejection(), 5.0),
                ("recorded", sd.Coupled(), 5.0),
                ("eager", sd.Rejection(), 0),
            )
        ),
    ],
)
def test_texts_and_rounds_are_those_of_serial(name, tree, graphs, verifier, temperature):
    builder = builder_of(name, tree, graphs).verifier(verifier).sampling(temperature=temperature)
    prompts, budgets = PROMPTS[:3], BUDGETS[:3]  # a step has four rows, and the memory three
    _, made = same_rounds(builder, prompts, budgets, eos_token_id=())
    if temperature and tree not in ("a chain", "one depth"):
        assert made[1].stats.accepted > 5


MARGINAL = {
    "medusa": StaticTree.of_widths((3, 2, 1)),
    "peagle": StaticTree(((0,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 3))),
    "dflash": StaticTree.of_widths((4, 2, 2)),
    "dflash, sliding, window": StaticTree.of_widths((3, 2)),
}


def marginal(name, graphs, length):
    target = sd.HFModel(tiny("llama", vocab_size=16), graphs=graphs)
    kind, own = (Medusa, {"heads": 5}) if name == "medusa" else chains.HEADS[name]
    if "mask_token" in own:
        own = own | {"mask_token": 15}
    head = sd.drafts.Head(shake(kind.from_target(target, **own)), MARGINAL[name], graphs=graphs)
    return sd.decoder(target).draft(head, length)


@pytest.mark.parametrize(
    ("name", "graphs", "length", "verifier", "temperature"),
    [
        ("medusa", "eager", 3, sd.Rejection(), 5.0),
        ("peagle", "eager", 3, sd.Rejection(), 0),
        ("dflash", "eager", 2, sd.Coupled(), 5.0),
        ("dflash, sliding, window", "eager", 3, FusedRejection(), 5.0),
        *(
            pytest.param(name, graphs, length, verifier, temperature, marks=pytest.mark.slow)
            for name in MARGINAL
            for graphs, length, verifier, temperature in (
                ("eager", 3, sd.Rejection(), 5.0),
                ("recorded", 2, sd.Coupled(), 1.0),
                ("recorded", 4, sd.Rejection(), 0),
            )
        ),
    ],
)
def test_static_trees_of_marginal_distributions(name, graphs, length, verifier, temperature):
    builder = marginal(name, graphs, length).verifier(verifier).sampling(temperature=temperature)
    _, made = same_rounds(builder, PROMPTS[:3], BUDGETS[:3], eos_token_id=())
    assert made[1].stats.accepted > 5 or temperature < 5


@pytest.mark.parametrize(
    ("verifier", "temperature", "tokens"),
    [
        (sd.Rejection(), 0, 16),
        pytest.param(sd.Rejection(), 1.0, 40, marks=pytest.mark.slow),
        pytest.param(sd.Coupled(), 1.0, 40, marks=pytest.mark.slow),
    ],
)
def test_deep_paths_of_a_trained_head(verifier, temperature, tokens):
    target = sd.HFModel(*sd.zoo.load("pocket-target"), graphs="eager")
    head = sd.drafts.Head("pocket-eagle3", DynamicTree(6, 5, 40), graphs="eager")
    builder = sd.decoder(target).draft(head, 5).verifier(verifier).sampling(temperature=temperature)
    prompts = [target.tokenizer(text).input_ids[:100] for text in sd.data.prompts(n=2)]
    (_, rounds), _ = same_rounds(builder, prompts, [tokens] * 2, eos_token_id=())
    assert max(int(round.verdict.accepted.max()) for round in rounds) > 3


@pytest.mark.slow
def test_the_target_has_pages():
    _, made = same_rounds(builder_of(page=16).sampling(temperature=5.0), eos_token_id=())
    assert made[1].stats.accepted > 15


@pytest.mark.slow
def test_a_head_of_fewer_tokens_than_children():
    same_rounds(builder_of(tree="wide", vocabulary=[1, 4, 5, 9]), PROMPTS[:2], [12, 9], eos_token_id=())


def test_a_text_to_the_last_position_of_the_model():
    same_rounds(builder_of(tree="wide"), [[5, 6] * 120, [9] * 3], [256 - 240, 20], eos_token_id=())


@pytest.mark.slow
def test_stops_that_are_found_a_round_late():
    builder = builder_of().verifier(sd.Coupled())
    _, (plain, _) = same_rounds(builder, eos_token_id=())
    _, (made, _) = same_rounds(builder, eos_token_id=[plain.ids[0][6], plain.ids[2][20]])
    assert "eos" in made.finish


@pytest.mark.slow
def test_one_memory_serves_every_call_and_a_row_does_not_depend_on_its_batch():
    ahead = builder_of().executor(Ahead()).build()
    together = ahead.generate(PROMPTS, BUDGETS, seed=[1, 2, 3, 4], eos_token_id=()).ids
    for _ in range(2):
        for i, (prompt, budget) in enumerate(zip(PROMPTS[:2], BUDGETS)):
            assert ahead.generate([prompt], budget, seed=[i + 1], eos_token_id=()).ids[0] == together[i]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    pick, prompts, budgets = batch_of(seed, 1)
    prompts = [[t % 16 for t in prompt] for prompt in prompts]
    builder = builder_of(
        pick.choice(["eagle3", "mtp"]), pick.choice(list(TREES)), pick.choice(["eager", "recorded"])
    )
    builder = builder.sampling(temperature=pick.choice([0, 1.3, 5.0]), top_k=pick.choice([None, 5]))
    same_rounds(
        builder.verifier(pick.choice([sd.Rejection(), sd.Coupled()])), prompts, budgets, eos_token_id=()
    )


def test_nodes_that_are_read_and_dropped_have_room_at_the_end_of_a_row(monkeypatch):
    """Nodes that are kept are fewer than those that the head reads, and all of these are seen."""
    seen = []

    class Anchors(tree_round._TreeAnchors):
        def slots(self, *arguments, **named):
            made = super().slots(*arguments, **named)
            seen.append(self.longest - int(self.anchor.max()) - self.used)
            return made

    monkeypatch.setattr(tree_round, "_TreeAnchors", Anchors)
    target = sd.HFModel(tiny("llama", vocab_size=16), graphs="eager")
    head = sd.drafts.Head(shake(chains.Eagle3.from_target(target)), DynamicTree(10, 6, 10), graphs="eager")
    builder = sd.decoder(target).draft(head, 6).sampling(temperature=5.0)
    prompts = [[t % 16 for t in range(200)], [3 * t % 16 for t in range(150)]]
    same_rounds(builder, prompts, [40, 60], eos_token_id=())
    assert min(seen) >= 0


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    ("name", "executor"),
    [*product(["eagle3", "medusa", "dflash"], [Serial(), Ahead()]), ("best of marginals", Serial())],
)
def test_a_head_with_logits_that_are_not_finite_is_refused(name, executor, temperature):
    kind = "dflash" if name == "best of marginals" else name
    builder = builder_of("own ends") if kind == "eagle3" else marginal(kind, "eager", 2)
    if name != kind:
        builder = builder.draft(replace(builder.build().draft, tree=DDTree(8)), 2)
    decoder = builder.sampling(temperature=temperature).executor(executor).build()

    def spoil(round):
        if round.number == 2:
            with torch.no_grad():
                for weight in decoder.draft.model.parameters():
                    weight.fill_(float("nan"))

    with pytest.raises(ValueError, match="draft's logits of row"):
        decoder.generate(PROMPTS, 30, seed=0, eos_token_id=(), on_round=spoil)


@pytest.mark.parametrize("temperature", [0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_on_a_device_a_round_waits_once(temperature):
    like = shake(chains.HEADS["eagle3"][0].from_target(sd.HFModel(tiny("llama"))))

    def made(on, executor):
        base = chains.head_on(on, like)
        head = sd.drafts.Head(base.build().draft.model, DynamicTree(3, 3, 8), graphs="eager")
        builder = sd.decoder(base.build().target).draft(head, 3).verifier(sd.Rejection())
        return builder.sampling(temperature=temperature).executor(executor).build()

    a_round_waits_once(made, PROMPTS[:2], 14)


@pytest.mark.parametrize(
    ("name", "tree", "settings", "why"),
    [
        (
            "peagle",
            DynamicTree(2, 2, 4),
            {},
            "runs dynamic trees of the heads Eagle3 and MTP, but the draft's head is a PEagle",
        ),
        ("eagle3", DynamicTree(9, 9, 65), {}, "runs trees of at most 64 nodes, and the draft's has 65"),
        ("eagle3", DynamicTree(), {"mask": sd.masks.Causal() & sd.masks.Window(4)}, "has a mask or windows"),
        ("eagle3", DynamicTree(), {"windows": [4]}, "has a mask or windows"),
        (
            "dflash",
            DDTree(8),
            {},
            "runs chains without a stop, DynamicTree and StaticTree, but the draft's tree is DDTree",
        ),
        (
            "dflash",
            StaticTree.of_widths((65,)),
            {},
            "runs trees of at most 64 nodes, and the draft's has 65",
        ),
    ],
)
def test_trees_that_the_step_does_not_compute_are_refused(name, tree, settings, why):
    target = sd.HFModel(tiny("llama"), graphs="eager")
    kind, own = chains.HEADS[name]
    head = sd.drafts.Head(kind.from_target(target, **own | settings), tree, graphs="eager")
    with pytest.raises(ValueError, match=why):
        sd.decoder(target).draft(head, 3).executor(Ahead()).build()
