"""A prompt that several rows have is fed once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import Eagle3
from specdec.drafts.spire import SpireModel
from specdec.models import HFModel, shared_prompts
from specdec.models.stacked import StackedModel

LONG = [(7 * i + 3) % 90 for i in range(60)]
PROMPTS = [LONG, LONG, [5, 6, 7], LONG, [9] * 70, [9] * 70]


def fed(monkeypatch):
    """How many tokens each forward is given."""
    counts = []
    run = sd.HFModel._run
    monkeypatch.setattr(
        sd.HFModel,
        "_run",
        lambda self, cache, packed, *more: (counts.append(packed.tokens), run(self, cache, packed, *more))[1],
    )
    return counts


@pytest.mark.parametrize("graphs", [False, "eager"])
def test_rows_of_one_prompt_read_it_once(monkeypatch, graphs):
    model = sd.HFModel(tiny("llama"), graphs=graphs)
    context = sd.Context.of(PROMPTS, 80)
    counts = fed(monkeypatch)
    logits = model.score(cache := model.cache(6, 80), context).logits
    assert counts == [59 + 69, 5 + 3]  # two prompts without their last tokens, then the rest
    assert [cache.row(b) for b in range(6)] == PROMPTS
    monkeypatch.setattr(shared_prompts, "LEAST", 10**9)
    other = model.cache(6, 80)
    assert torch.allclose(model.score(other, context).logits, logits, atol=1e-9)
    assert counts[2:] == [3 * 60 + 2 * 70 + 3]
    for mine, theirs in zip(cache.layers, other.layers):
        for b, prompt in enumerate(PROMPTS):
            for x, y in zip(mine, theirs):
                assert torch.allclose(x[b, : len(prompt)], y[b, : len(prompt)], atol=1e-9)


def test_only_rows_that_are_asked_for_and_empty(monkeypatch):
    model = sd.HFModel(tiny("llama"))
    context = sd.Context.of([LONG] * 6, 80)
    cache = model.cache(6, 80)
    model.prefill(cache, sd.Context.of([LONG[:20]] * 6, 80), torch.tensor([1]))
    counts = fed(monkeypatch)
    model.prefill(cache, context, torch.tensor([0, 1, 3, 4, 5]))
    assert counts == [59, 59 - 19]  # rows 0, 3, 4 and 5 share, row 1 goes on, row 2 was not asked for
    assert [len(cache.row(b)) for b in range(6)] == [59, 59, 0, 59, 59, 59]


@pytest.mark.parametrize("page", [None, 8])
def test_prompts_that_begin_alike(monkeypatch, page):
    """One beginning of 150 tokens with four endings, one of them twice; two prompts that differ in their last token; one that differs at once."""
    model = sd.HFModel(tiny("llama"), page=page)
    system, other = LONG * 2 + LONG[:30], [4] * 100
    prompts = [
        [*system, 1, 2, 3],
        [*other, 1],
        [*system, 1, 9],
        [*system, 8, 8, 8, 8],
        [*other, 2],
        [*system, 8, 8, 8, 8],
        system,
        [3, *system],
    ]
    context = sd.Context.of(prompts, 160)
    counts = fed(monkeypatch)
    logits = model.score(cache := model.cache(8, 160), context).logits
    # rows 0 and 1; row 3 after the beginning; what is left of all rows, the whole of the last
    assert counts == [152 + 100, 3, 7 + 151]
    assert [cache.row(b) for b in range(8)] == prompts
    monkeypatch.setattr(shared_prompts, "LEAST", 10**9)
    other = model.cache(8, 160)
    assert torch.allclose(model.score(other, context).logits, logits, atol=1e-9)
    assert counts[3:] == [sum(map(len, prompts))]
    if page:
        # with room for 6 tokens more: those of each row alone, less what equal rows share, less what others share with row 0
        assert cache.pool.pages == (20 + 14 + 20 + 20 + 14 + 20 + 20 + 20) - (12 + 19) - 3 * 18
        held = [{p for b in range(8) for p in c.table(b)} for c in (cache, other)]
        assert len(held[1]) == 20 + 13 + 19 + 20 + 13 + 20 + 19 + 19
        assert (
            len(held[0]) == 18 + 2 + 13 + 1 + 2 + 1 + 1 + 1 + 19
        )  # row 1's last page is its own, as those of others
    again = model.score(cache, sd.Context.of([[*p, 7] for p in prompts], 160)).logits
    expected = model.score(other, sd.Context.of([[*p, 7] for p in prompts], 160)).logits
    assert torch.allclose(again, expected, atol=1e-9)


@pytest.mark.parametrize("members", [[0, 0, 0, 0], [0, 1, 1, 0]])
def test_different_prompts_of_one_beginning(monkeypatch, members):
    """No two are equal; the members of a stack read the beginning for themselves."""
    models = [sd.HFModel(tiny("llama", n), page=8) for n in (1, 2)]
    stack = StackedModel(models)
    stack.read_as(torch.tensor(members))
    context = sd.Context.of([[*LONG, *LONG, *LONG[:8], n, n, n] for n in range(4)], 140)
    counts = fed(monkeypatch)
    logits = stack.score(cache := stack.cache(4, 140), context).logits
    assert counts == ([130, 3 * 3 + 1] if len(set(members)) == 1 else [260, 2 * 3 + 2])
    assert cache.pool.pages == 4 * 18 - (4 - len(set(members))) * 16  # room for 9 tokens more
    for b, member in enumerate(members):
        alone = models[member].score(models[member].cache(1, 140), context.select(torch.tensor([b]))).logits
        torch.testing.assert_close(logits[b : b + 1], alone, rtol=1e-4, atol=1e-4)


def test_short_prompts_take_one_forward(monkeypatch):
    model = sd.HFModel(tiny("llama"))
    counts = fed(monkeypatch)
    model.score(model.cache(4, 40), sd.Context.of([[1, 2, 3, 4]] * 4, 40))
    assert counts == [16]
    model.score(model.cache(3, 160), sd.Context.of([[5] + [0] * n for n in (80, 90, 100)], 160))
    assert counts[1:] == [81 + 91 + 101]  # even where the slots after a prompt look like the prompt


def test_samples_are_those_of_single_rows(monkeypatch):
    target, small = (sd.HFModel(tiny("llama", seed)) for seed in (0, 1))
    decoder = sd.decoder(target).draft(small, 3).build()
    seeds = [1, 2, 3, 4]
    alone = [decoder.generate([LONG], 20, seed=[one], eos_token_id=()).ids[0] for one in seeds]
    counts = fed(monkeypatch)
    assert decoder.generate([LONG] * 4, 20, seed=seeds, eos_token_id=()).ids == alone
    assert counts[:3] == [59, 4, 59]  # the target's prompt, its rows' last tokens, the draft's prompt


@pytest.mark.parametrize(
    "settings", [{}, {"page": 16}, {"graphs": "eager"}, {"prefix_cache": 2**20}], ids=str
)
def test_activations_of_every_row_are_given(monkeypatch, settings):
    model, context, taps = sd.HFModel(tiny("llama"), **settings), sd.Context.of(PROMPTS, 80), (0, 1)
    counts = fed(monkeypatch)
    scores = model.score(cache := model.cache(6, 80), context, taps=taps)
    assert counts == [60 + 70, 5 + 3]  # two prompts, then last tokens and the other row
    assert [cache.row(b) for b in range(6)] == PROMPTS
    monkeypatch.setattr(shared_prompts, "LEAST", 10**9)
    plain = sd.HFModel(tiny("llama"))
    other = plain.score(plain.cache(6, 80), context, taps=taps)
    assert counts[2:] == [3 * 60 + 2 * 70 + 3]
    assert torch.allclose(scores.logits, other.logits, atol=1e-9)
    for name in ("row", "position", "node"):
        assert torch.equal(vars(scores.fed)[name], vars(other.fed)[name])
    for tap in taps:
        assert torch.allclose(scores.fed.layers[tap], other.fed.layers[tap], atol=1e-9)


@pytest.mark.parametrize("draft", ["spire", "eagle3"])
def test_samples_with_a_draft_that_reads_activations(monkeypatch, draft):
    model = sd.HFModel(tiny("llama"))
    made = {
        "spire": lambda: sd.drafts.Spire(SpireModel.from_target(model.model, layers=1, window=8)),
        "eagle3": lambda: sd.drafts.Head(Eagle3.from_target(model.model)),
    }
    decoder = sd.decoder(model).draft(made[draft](), 3).build()
    seeds = [1, 2, 3, 4]
    alone = [decoder.generate([LONG], 20, seed=[one], eos_token_id=()).ids[0] for one in seeds]
    counts = fed(monkeypatch)
    assert decoder.generate([LONG] * 4, 20, seed=seeds, eos_token_id=()).ids == alone
    assert counts[:2] == [60, 4]


def test_a_subclass_that_changes_activations_does_so_once(monkeypatch):
    class Doubled(sd.HFModel):
        def score(self, *arguments, **named):
            scores = super().score(*arguments, **named)
            layers = {tap: 2 * x for tap, x in scores.fed.layers.items()}
            return replace(scores, fed=replace(scores.fed, layers=layers))

    context = sd.Context.of([LONG] * 4, 80)
    doubled, plain = Doubled(tiny("llama")), sd.HFModel(tiny("llama"))
    mine, theirs = (m.score(m.cache(4, 80), context, taps=(1,)).fed.layers[1] for m in (doubled, plain))
    assert torch.allclose(mine, 2 * theirs, atol=1e-9)


def test_rows_of_a_call_that_fails_are_empty_again(monkeypatch):
    model, context = sd.HFModel(tiny("llama")), sd.Context.of([LONG] * 4, 80)
    cache, run, calls = model.cache(4, 80), sd.HFModel._run, []

    def second_fails(self, *arguments):
        calls.append(0)
        if len(calls) == 2:
            raise MemoryError
        return run(self, *arguments)

    monkeypatch.setattr(sd.HFModel, "_run", second_fails)
    with pytest.raises(MemoryError):
        model.score(cache, context, taps=(1,))
    assert [cache.row(b) for b in range(4)] == [[]] * 4
    assert len(model.score(cache, context, taps=(1,)).fed.row) == 240


def test_equal_prompts_with_activations_are_kept_once(monkeypatch):
    model, long = sd.HFModel(tiny("llama"), prefix_cache=2**20), [(5 * i + 1) % 90 for i in range(70)]
    context = sd.Context.of([long] * 4, 80)
    first = model.score(model.cache(4, 80), context, taps=(1,))
    counts = fed(monkeypatch)
    again = model.score(model.cache(4, 80), context, taps=(1,))
    assert counts == [70 - 64, 4]
    assert torch.allclose(first.logits, again.logits, atol=1e-9)
    assert torch.equal(first.fed.position, again.fed.position)
    assert torch.allclose(first.fed.layers[1], again.fed.layers[1], atol=1e-9)


def test_a_model_that_decides_what_queries_see_reads_every_row(monkeypatch):
    class Own(sd.HFModel):
        def _pieces(self, *args):
            yield from super()._pieces(*args)

    model = Own(tiny("llama"))
    counts = fed(monkeypatch)
    model.score(model.cache(3, 80), sd.Context.of([LONG] * 3, 80))
    assert counts == [180]


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("family", [{}, {"dtype": torch.float32, "hidden_size": 64}])
def test_members_of_a_stack_read_a_prompt_for_themselves(page, family):
    members = [HFModel(tiny("llama", n, **family), page=page) for n in (1, 2)]
    stack = StackedModel(members)
    who = [0, 1, 0, 1, 1]
    stack.read_as(torch.tensor(who))
    context = sd.Context.of([LONG * 3] * 5, capacity=200)
    cache = stack.cache(5, 200)
    logits = stack.score(cache, context).logits
    for b, member in enumerate(who):
        alone = members[member].score(members[member].cache(1, 200), context.select(torch.tensor([b]))).logits
        torch.testing.assert_close(logits[b : b + 1], alone, rtol=1e-4, atol=1e-4)
    if page:
        assert cache.pool.pages - len(cache.pool.free) == 2 * 11 + 5
