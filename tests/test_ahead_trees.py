"""Whole rounds of trees: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from both_executors import BUDGETS, PROMPTS, a_round_waits_once, batch_of, same_rounds
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec.drafts.siblings import Distinct, Independent, TopAndOne
from specdec.drafts.tree_round import TreeDrafting
from specdec.executors import Ahead, Serial
from specdec.graphs.branches import Branches, TreeShape
from specdec.graphs.tree_round import TreeRound
from specdec.graphs.whole_round import FINITE, RoundShape
from specdec.verifiers import FusedRejection


def models(family="llama", graphs="eager", **others):
    """A target, and a draft that is often right."""
    target, small = tiny(family, **others), tiny(family, **others)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in small.parameters():
            weight += 0.5 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    return sd.HFModel(target, graphs=graphs), sd.HFModel(small, graphs=graphs)


def builder_of(widths=(3, 2), siblings=None, graphs="eager", length=None, drawing=None, **others):
    target, small = models(graphs=graphs, **others)
    draft = sd.drafts.Tree(small, widths, drawing, siblings=siblings or Independent())
    return sd.decoder(target).draft(draft, length or len(widths))


@pytest.mark.parametrize(
    ("siblings", "verifier", "temperature"),
    [
        pytest.param(siblings, verifier, temperature, marks=() if fast else pytest.mark.slow)
        for siblings, fastest in ((Independent(), 0), (Distinct(), 1), (TopAndOne(), 2))
        for i, verifier in enumerate((sd.Rejection(), sd.Coupled(), FusedRejection()))
        for temperature in (0, 1.0)
        for fast in [temperature > 0 and i == fastest]
    ],
)
@pytest.mark.parametrize("graphs", ["eager", pytest.param("recorded", marks=pytest.mark.slow)])
def test_texts_and_rounds_are_those_of_serial(graphs, siblings, verifier, temperature):
    builder = (
        builder_of(siblings=siblings, graphs=graphs).sampling(temperature=temperature).verifier(verifier)
    )
    _, made = same_rounds(builder, eos_token_id=())
    assert made[1].stats.accepted > 10


@pytest.mark.parametrize(
    ("how", "verifier", "siblings"),
    [
        ({"temperature": 0}, sd.Rejection(), Independent()),
        ({"temperature": 1.0}, sd.Coupled(), Distinct()),
    ],
)
def test_a_recorded_round(how, verifier, siblings):
    """Steps run twice on one text, as captures do, and accepted nodes are moved both times."""
    builder = builder_of((2, 2, 2), siblings, "recorded").sampling(**how).verifier(verifier)
    (_, rounds), _ = same_rounds(builder, PROMPTS[:1], [18], eos_token_id=())
    moved = [n != d for r in rounds for path in r.verdict.path.tolist() for d, n in enumerate(path) if n >= 0]
    assert any(moved)


@pytest.mark.parametrize(
    ("widths", "length", "settings"),
    [
        ((1, 1, 1), None, {}),  # a chain
        ((4,), None, {}),  # the draft reads none of its nodes
        ((1, 3, 1), None, {}),
        ((2, 2, 2, 2, 2), 4, {}),  # cut, at 30 nodes
        pytest.param((2, 3), 5, {}, marks=pytest.mark.slow),  # no deeper than its widths
        ((3, 2), None, {"drawing": sd.Sampling(temperature=0)}),  # point masses, and a target that samples
        ((2, 2), None, {"drawing": sd.Sampling(temperature=0.5, top_k=9)}),
    ],
)
def test_shapes_and_settings(widths, length, settings):
    builder = builder_of(widths, length=length, **settings).sampling(temperature=0.8).verifier(sd.Rejection())
    same_rounds(builder, eos_token_id=())


def test_a_tree_of_as_many_nodes_as_a_word_has_bits():
    same_rounds(builder_of((32, 1)).greedy(), PROMPTS[:2], [20, 9], eos_token_id=())
    words = Branches([-1] * 32 + list(range(32)), False, 2, torch.device("cpu")).all.words
    assert words[64] == 1 << 31 | -(1 << 63)
    with pytest.raises(ValueError, match="trees of at most 64 nodes, and the draft's has 65: use"):
        builder_of((65,)).executor(Ahead()).build()


def test_a_chain_is_decided_as_a_chain(monkeypatch):
    """With ``FusedRejection``: from logits, without a tree."""
    decoder = builder_of((1, 1, 1), length=5).verifier(FusedRejection()).executor(Ahead()).build()
    monkeypatch.setattr(TreeRound, "body", None)
    assert decoder.generate(PROMPTS, BUDGETS, seed=3, eos_token_id=()).stats.accepted > 10


@pytest.mark.slow
def test_trees_and_chains_over_one_model_have_programs_of_their_own():
    target, small = models()
    drafts = [
        sd.drafts.Tree(small, (3, 2)),
        sd.drafts.Tree(small, (2, 2, 1)),
        sd.drafts.Tree(small, (3, 2), siblings=Distinct()),
        sd.drafts.Model(small),
    ]
    builders = [sd.decoder(target).verifier(sd.Rejection()).draft(draft, 3) for draft in drafts]
    wanted = [b.build().generate(PROMPTS[:1], 14, seed=3, eos_token_id=()).ids for b in builders]
    decoders = [b.executor(Ahead()).build() for b in builders]
    for _ in range(3):
        for decoder, ids in zip(decoders, wanted):
            assert decoder.generate(PROMPTS[:1], 14, seed=3, eos_token_id=()).ids == ids


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("executor", [Serial(), Ahead()])
def test_logits_that_are_not_finite_are_refused(executor, temperature):
    for broken, said in ((0, "^logits of row"), (1, "^the draft's logits of row|^a draft's logits of row")):
        both = models()
        decoder = (
            sd.decoder(both[0]).draft(sd.drafts.Tree(both[1], (3, 2)), 2).sampling(temperature=temperature)
        )

        def spoil(round, broken=both[broken].model):
            if round.number == 2:
                with torch.no_grad():
                    broken.lm_head.weight.fill_(float("nan"))

        with pytest.raises(ValueError, match=said):
            decoder.executor(executor).build().generate(PROMPTS, 30, seed=0, eos_token_id=(), on_round=spoil)


def round_on(logits, widths=(2, 2), budget=2):
    """A captured round's body on a target's ``logits [1, N + 1, V]``, for a row with a ``budget``; the draft's logits are uniform."""

    class Scripted(TreeDrafting):
        def __init__(self):
            self.widths, self.siblings, self.side = widths, Distinct(), self

        def chain(self, given, state):
            return lambda n, tokens: torch.zeros(1, logits.shape[-1])

        def feed_nodes(self, given, ids, *others):
            return torch.zeros(*ids.shape, logits.shape[-1]).flatten(0, 1)

        def keep_path(self, *others):
            pass

    class Target:
        vocab_size, store = logits.shape[-1], SimpleNamespace(page=0)

        def feed_nodes(self, given, ids, *others):
            return logits.flatten(0, 1)

        def keep_path(self, *others):
            pass

    hot, count = sd.Sampling(temperature=1.0), logits.shape[1] - 1
    shape = RoundShape(1, 64, len(widths), "rejection", hot, hot, TreeShape(count, "test"))
    made = TreeRound(Target(), Scripted(), shape, torch.device("cpu"))
    made.send(torch.tensor([6 + budget]), sd.rng.seeds(0, 1), torch.tensor([[5, 0, 1]]))
    return made.body()[0]


def test_only_logits_of_nodes_within_the_budget_have_to_be_finite():
    fine = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(0))
    for node in range(6):
        spoilt = fine.clone()
        spoilt[0, node + 1] = float("nan")
        for budget in (1, 2):
            exists = node < (2 if budget == 1 else 6)
            assert bool(round_on(spoilt, budget=budget)[0, FINITE]) != exists


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "qwen3"))]
)
def test_windows_soft_caps_and_norms(family):
    target, small = models(family)
    same_rounds(sd.decoder(target).draft(sd.drafts.Tree(small, (3, 2)), 2), eos_token_id=())


@pytest.mark.parametrize("verifier", [sd.Rejection(), pytest.param(sd.Coupled(), marks=pytest.mark.slow)])
def test_the_target_has_pages(verifier):
    """A path may lie in two pages, and is moved from one to the other."""
    small = models()[1]
    target = sd.HFModel(tiny("llama"), page=16, graphs="eager")
    builder = sd.decoder(target).draft(sd.drafts.Tree(small, (4, 3)), 2).verifier(verifier)
    _, made = same_rounds(builder, eos_token_id=())
    assert made[1].stats.accepted > 10


@pytest.mark.parametrize("size", [90, pytest.param(104, marks=pytest.mark.slow)])
def test_vocabularies_of_other_sizes(size):
    target = sd.HFModel(tiny("llama"), byte_tokenizer(), graphs="eager")
    small = sd.HFModel(tiny("llama", seed=1, vocab_size=size), byte_tokenizer(), graphs="eager")
    builder = sd.decoder(target).draft(sd.drafts.Tree(small, (3, 2)), 2)
    for how in ({"temperature": 0}, {"temperature": 1.0}):
        same_rounds(builder.sampling(**how).verifier(sd.Rejection()), PROMPTS[:2], [12, 9], eos_token_id=())


def test_a_text_to_the_last_position_of_the_model():
    """Nodes beyond the budget have no position."""
    same_rounds(builder_of((3, 2, 2)), [[5, 6] * 120, [9] * 3], [256 - 240, 20], eos_token_id=())


@pytest.mark.slow
def test_stops_that_are_found_a_round_late():
    builder = builder_of().verifier(sd.Coupled()).sampling(temperature=1.0)
    _, (plain, _) = same_rounds(builder, eos_token_id=())
    _, (made, _) = same_rounds(builder, eos_token_id=[plain.ids[0][6], plain.ids[2][20]])
    assert "eos" in made.finish


@pytest.mark.slow
def test_texts_grow_out_of_their_bucket():
    builder = builder_of(max_position_embeddings=512)
    same_rounds(builder, prompts=[[5, 6, 7] * 70, [8, 9]], budgets=[90, 100], eos_token_id=())


def test_a_row_does_not_depend_on_its_batch():
    ahead = builder_of().executor(Ahead()).build()
    together = ahead.generate(PROMPTS, BUDGETS, seed=[1, 2, 3, 4], eos_token_id=()).ids
    for i, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS)):
        assert ahead.generate([prompt], budget, seed=[i + 1], eos_token_id=()).ids[0] == together[i]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    pick, prompts, budgets = batch_of(seed, 1)
    widths = tuple(pick.randint(1, 3) for _ in range(pick.randint(1, 4)))
    siblings = pick.choice([Independent(), Distinct(), TopAndOne()])
    verifier = pick.choice([sd.Rejection(), sd.Coupled()])
    builder = builder_of(widths, siblings, pick.choice(["eager", "recorded"])).verifier(verifier)
    builder = builder.sampling(temperature=pick.choice([0, 0.7, 1.3]), top_k=pick.choice([None, 9]))
    same_rounds(builder, prompts, budgets, eos_token_id=())


@pytest.mark.parametrize(
    ("verifier", "temperature", "siblings"),
    [
        (sd.Rejection(), 1.0, Distinct()),
        pytest.param(sd.Rejection(), 0, Independent(), marks=pytest.mark.slow),
        pytest.param(sd.Coupled(), 1.0, TopAndOne(), marks=pytest.mark.slow),
    ],
)
def test_on_a_device_a_round_waits_once(verifier, temperature, siblings):
    def made(on, executor):
        target, small = (sd.HFModel(on(tiny("llama", seed)), graphs="eager") for seed in (0, 1))
        draft = sd.drafts.Tree(small, (3, 2), siblings=siblings)
        base = sd.decoder(target).verifier(verifier).sampling(temperature=temperature)
        return base.executor(executor).draft(draft, 2).build()

    a_round_waits_once(made, PROMPTS[:2], 14)


@dataclass(frozen=True)
class Own(Independent):
    pass


class OwnTree(sd.drafts.Tree):
    pass


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (
            lambda small: sd.drafts.Tree(small, (2, 2), siblings=Own()),
            "draws siblings as the library does, and the draft's are Own",
        ),
        (lambda small: OwnTree(small, (2, 2)), "but the draft is a OwnTree"),
        (
            lambda small: sd.drafts.Tree(sd.HFModel(tiny("llama", 1)), (2, 2)),
            "the draft's model has no graphs",
        ),
        (
            lambda small: sd.drafts.Tree(sd.HFModel(tiny("llama", 1), graphs="eager", page=16), (2, 2)),
            "its model has pages of 16 tokens",
        ),
    ],
)
def test_trees_that_the_step_does_not_compute_are_refused(draft, why):
    target, small = (sd.HFModel(tiny("llama", seed), graphs="eager") for seed in (0, 1))
    base = sd.decoder(target).draft(draft(small), 2).executor(Ahead())
    with pytest.raises(ValueError, match=why):
        base.build()
