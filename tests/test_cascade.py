"""A cascade draws the chain of its model, token for token, in fewer forwards."""

from __future__ import annotations

import pytest
import torch
from tiny import byte_tokenizer, tiny
from tiny_states import stateful
from transformers import RepetitionPenaltyLogitsProcessor

import specdec as sd
from specdec.cache.ring_cache import RingCache
from specdec.drafts import Cascade, Model, NGram, Suffix, Tree
from specdec.executors import Optimistic, Pipelined
from specdec.models import masked

TARGET, SMALL, LESS = (
    sd.TableModel.random(6, order=2, seed=0),
    sd.TableModel.random(6, order=1, seed=1),
    sd.TableModel.random(6, order=1, seed=2),
)
PROMPTS = [[0, 1, 2], [3], [4, 5, 4, 5, 4]]
INNER = {
    "lookup": NGram(),
    "suffix": Suffix(),
    "model": Model(LESS),
    "tree": Tree(LESS, (2, 2)),
    "at a temperature": Model(LESS, sd.Sampling(0.7)),
    "cascade": Cascade(LESS, NGram(), 2),
}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 3},
    "of each request": {"temperature": (0.0, 1.0, 0.5)},
}


def same(base, inner, length, ahead, small=SMALL, **settings):
    """Whether the cascade's run is the model's in every token and count."""
    runs = [
        base.draft(draft, length=length).generate(PROMPTS, [40, 33, 20], seed=0, **settings)
        for draft in (Model(small), Cascade(small, inner, ahead))
    ]
    assert runs[0].ids == runs[1].ids
    assert [s.drafted for s in runs[0].row_stats] == [s.drafted for s in runs[1].row_stats]
    assert [s.accepted for s in runs[0].row_stats] == [s.accepted for s in runs[1].row_stats]


@pytest.mark.parametrize(
    ("inner", "sampling", "lengths"),
    [
        pytest.param(INNER[inner], SAMPLINGS[sampling], lengths, id=f"{inner}, {sampling}", marks=marks)
        for i, inner in enumerate(INNER)
        for j, sampling in enumerate(SAMPLINGS)
        for lengths, marks in (
            (((6, 4),), () if i % 4 == j else pytest.mark.slow),
            (((1, 1), (3, 2)), pytest.mark.slow),
        )
    ],
)
def test_the_chain_is_the_models(inner, sampling, lengths):
    for length, ahead in lengths:
        same(sd.decoder(TARGET).sampling(**sampling), inner, length, ahead)


@pytest.mark.parametrize("verifier", [sd.Coupled(), sd.verifiers.BlockVerification()], ids=repr)
@pytest.mark.parametrize("executor", [Optimistic(), Pipelined(2)], ids=repr)
def test_it_is_under_other_verifiers_and_executors_too(verifier, executor):
    same(sd.decoder(TARGET).verifier(verifier).executor(executor), NGram(), 4, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_with_caches_that_remember(temperature):
    target, small, less = (sd.HFModel(tiny("llama", seed=seed, vocab_size=6)) for seed in (1, 2, 3))
    base = sd.decoder(target).sampling(temperature=temperature)
    same(base, Model(less), 5, 3, small)
    same(base, Tree(less, (2, 2)), 5, 3, small)


def test_guesses_save_forwards():
    class Counted(sd.TableModel):
        forwards = 0

        def score(self, *given, **settings):
            self.forwards += 1
            return super().score(*given, **settings)

    small = Counted(TARGET.probs)
    base, counts = sd.decoder(TARGET).greedy(), {}
    for name, draft in {"model": Model(small), "guessed": Cascade(small, Model(TARGET), 5)}.items():
        small.forwards = 0
        out = base.draft(draft, length=6).generate([[0, 1, 2]], 71, seed=0)
        assert out.stats.tau == 7
        counts[name] = small.forwards
    assert counts == {"model": 60, "guessed": 10}  # for ten rounds


def test_rows_join_and_wait():
    pool = sd.decoder(TARGET).pool(
        {"cascade": Cascade(SMALL, NGram()), "none": None}, sd.selectors.Random(), length=3
    )
    alone = pool.verifier(sd.Coupled()).generate(PROMPTS, 20, seed=1)
    plain = sd.decoder(TARGET).verifier(sd.Coupled()).generate(PROMPTS, 20, seed=1)
    assert alone.ids == plain.ids
    decoder = sd.decoder(TARGET).draft(Cascade(SMALL, Model(LESS)), length=3).build()
    alone = decoder.generate(PROMPTS, 20, seed=1)
    served = decoder.serve([sd.Request(ids, 20) for ids in PROMPTS], limit=2, seed=1, clock="rounds")
    assert {one.index: one.ids for one in served} == dict(enumerate(alone.ids))


def test_it_is_saved_with_its_inner_draft(tmp_path):
    target, small = (sd.HFModel(tiny("llama", seed=seed, vocab_size=16)) for seed in (1, 2))
    decoder = sd.decoder(target).draft(Cascade(small, Suffix(factor=2.0), 3), length=5).build()
    decoder.save(tmp_path / "saved")
    loaded = sd.load(tmp_path / "saved").build()
    assert loaded.draft.inner == Suffix(factor=2.0)
    assert loaded.generate(PROMPTS, 20, seed=0).ids == decoder.generate(PROMPTS, 20, seed=0).ids


def test_logits_without_a_distribution_are_named_as_the_drafts():
    broken = sd.TableModel.random(6, order=1, seed=1)
    broken._logits = torch.full_like(broken._logits, float("nan"))
    with pytest.raises(ValueError, match="a draft's logits of row 0"):
        sd.decoder(TARGET).draft(Cascade(broken, NGram()), length=3).generate(PROMPTS, 20)


class Keeps(NGram):
    """A draft that may not be called for a text that is never committed."""

    info = sd.DraftInfo("keeps")


@pytest.mark.parametrize(
    "inner", [Keeps(), sd.drafts.MagicDec(), sd.drafts.Pool((NGram(),)), sd.drafts.Recycling()], ids=repr
)
def test_what_cannot_guess_is_refused(inner):
    with pytest.raises(
        ValueError, match=r"inner is '.*', which cannot guess inside a block .*: give NGram\(\)"
    ):
        Cascade(SMALL, inner)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="ahead is 0: give the most tokens that inner guesses"):
        Cascade(SMALL, NGram(), 0)
    with pytest.raises(TypeError, match=r"ahead is 1\.5"):
        Cascade(SMALL, NGram(), 1.5)


@pytest.mark.parametrize("widths", [(2, 2), (6, 4), (6, 3, 2)])
@pytest.mark.parametrize("length", [2, 3, 4, 6])
def test_there_is_room_for_trees_at_the_end_of_a_text(widths, length):
    base = sd.decoder(TARGET)
    for budget in (1, 2, 5, 8):
        ids = [
            base.draft(draft, length=length).generate([[1, 2, 3], [4]], budget, seed=0).ids
            for draft in (Model(SMALL), Cascade(SMALL, Tree(LESS, widths)))
        ]
        assert ids[0] == ids[1]
    served = base.draft(Cascade(SMALL, Tree(LESS, widths)), length=length).build()
    requests = [sd.Request([1, 2, 3], 8), sd.Request([4], 8)]
    done = {one.index: one.ids for one in served.serve(requests, 2, seed=0, capacity=11 + served.nodes)}
    assert [done[0], done[1]] == base.draft(Model(SMALL), length).generate([[1, 2, 3], [4]], 8, seed=0).ids


@pytest.mark.parametrize("sizes", [(97, 104, 104), (104, 97, 97), (97, 104, 97), (104, 97, 104)])
@pytest.mark.parametrize("inner", [Model, lambda model: Tree(model, (2, 2))], ids=["model", "tree"])
def test_padded_vocabularies_and_processors(sizes, inner):
    target, small, less = (
        sd.HFModel(tiny("llama", seed=seed, vocab_size=size), byte_tokenizer())
        for seed, size in enumerate(sizes)
    )
    base = sd.decoder(target).sampling(processors=(RepetitionPenaltyLogitsProcessor(1.5),))
    same(base, inner(less), 4, 3, small)


def test_a_sampling_of_the_users_own():
    class Own(sd.Sampling):
        def __init__(self, alpha):
            super().__init__(1.0)
            object.__setattr__(self, "alpha", alpha)

        def __call__(self, logits, *text, **named):
            return super().__call__(logits * self.alpha, *text, **named)

    same(sd.decoder(TARGET).sampling(Own(0.3)), NGram(), 4, 3)


def test_the_inner_drafts_model_is_checked_as_the_models_are(monkeypatch):
    target, small = (sd.HFModel(tiny("llama", seed=seed)) for seed in (1, 2))
    base = sd.decoder(target)
    short = sd.HFModel(tiny("llama", seed=3, max_position_embeddings=16))
    with pytest.raises(
        ValueError, match="12 tokens and max_new_tokens is 9: 21 positions, but the draft has 16"
    ):
        base.draft(Cascade(small, Model(short)), length=4).generate([[5] * 12], 9)
    recurrent = sd.models.OwnCache(stateful("mamba2", 1))
    with pytest.raises(ValueError, match="draft 'tree': this model family takes chains only"):
        base.draft(Cascade(small, Tree(recurrent, (2, 2))), length=4).build()
    with pytest.raises(
        ValueError, match="inner is 'tree', which proposes trees, and the cascade's model takes"
    ):
        Cascade(recurrent, Tree(small, (2, 2)))
    ring = Model(sd.models.Windowed(small, 8, 1))

    class Alone(RingCache):  # a class of its own: Python remembers which protocols a class has
        join = None

    monkeypatch.setattr(masked, "RingCache", Alone)
    with pytest.raises(ValueError, match="cannot take in rows during a run"):
        base.draft(Cascade(small, ring), length=4).serve([])
    captured = sd.HFModel(tiny("llama", seed=1), graphs="eager")
    shared = sd.decoder(captured).draft(Cascade(small, Model(captured)), length=3)
    for executor in (Pipelined(2), Optimistic()):
        with pytest.raises(ValueError, match="one call at a time"):
            shared.executor(executor).build()


def test_what_inner_may_be():
    same(sd.decoder(TARGET), LESS, 4, 2)
    for wrong in (NGram, None, len):
        with pytest.raises(TypeError, match="inner is"):
            Cascade(SMALL, wrong)

    class Long(NGram):
        def propose(self, state, context, budget, rng):
            return super().propose(state, context, budget + 5, rng)

    with pytest.raises(ValueError, match=r"inner 'ngram' proposed \d+ nodes in a row, and there is room for"):
        base = sd.decoder(TARGET).draft(Cascade(SMALL, Long()), length=4)
        base.generate([[1, 2, 3, 1, 2, 3, 1, 2]], 20, seed=0)
