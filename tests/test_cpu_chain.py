"""A chain's later steps, prepared at once, against scoring every token: the same bits, and the same memory of what was fed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts import chain as drafts_chain
from specdec.drafts.cpu_chain import CpuChain, cpu_chain
from specdec.kernels.attention import ExplicitPlan
from specdec.kernels.native import library, reason
from specdec.models import StackedModel
from specdec.rng import Philox
from specdec.sampling import Sampling
from specdec.types import Context

pytestmark = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [50], [3, 1]]


def models(kind):
    family = "mistral" if kind == "window" else "llama"
    page = {"pages": 16, "odd pages": 24}.get(kind)
    made = [sd.HFModel(tiny(family, seed, torch.float32, **SIZES), page=page) for seed in (0, 3)]
    if kind != "stack":
        return made[0]
    stack = StackedModel(made)
    stack.read_as(torch.tensor([0, 1, 1, 0]))
    return stack


@pytest.mark.parametrize("budget", [[4, 4, 4, 4], [4, 1, 0, 3]], ids=["uniform", "ragged"])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("kind", ["slots", "pages", "odd pages", "window", "stack"])
def test_proposals_are_those_of_scoring(kind, temperature, budget, monkeypatch):
    model = models(kind)
    sampling = Sampling(temperature=temperature)
    draft = sd.drafts.Model(model).bind(model, sampling)
    context, rng = Context.of(PROMPTS, capacity=32), Philox(torch.arange(4))
    used = []

    def proposed():
        state = draft.init(context, None)
        for _ in range(2):  # the second time over its own nodes
            proposal, state = draft.propose(state, context, torch.tensor(budget), rng)
        held = state.cache
        keys = [torch.stack([k, v]) for k, v in held.layers]
        return proposal, held._lengths, held._fed, keys

    def spied(*args):
        found = cpu_chain(*args)
        used.append(found)
        return found

    monkeypatch.setattr(drafts_chain, "cpu_chain", spied)
    fast, *memory = proposed()
    assert used
    assert all(isinstance(f, CpuChain) == (kind != "odd pages") for f in used)
    draft = sd.drafts.Model(model, sampling, 96)  # without bind, the plain way
    slow, *expected = proposed()
    live = torch.arange(fast.nodes) < fast.size[:, None]
    assert torch.equal(fast.size, slow.size)
    assert torch.equal(fast.tokens[live], slow.tokens[live])
    if temperature:
        assert torch.equal(fast.probs[live], slow.probs[live])
    assert memory[:2] == expected[:2]
    if "pages" not in kind:
        assert all(torch.equal(a, b) for a, b in zip(memory[2], expected[2]))


def test_processors_see_the_nodes_before():
    model = models("slots")

    def no_repeats(ids, scores):
        return scores.scatter(1, ids, -torch.inf)

    decoder = sd.decoder(model).sampling(temperature=0, processors=(no_repeats,))
    plain = decoder.build().generate(PROMPTS, 12, seed=0, eos_token_id=())
    drafted = decoder.draft(model, length=4).build().generate(PROMPTS, 12, seed=0, eos_token_id=())
    assert plain.ids == drafted.ids
    assert drafted.stats.tau > 4


def test_only_where_it_can_be_done():
    budget, length = torch.tensor([3]), torch.tensor([2])
    model = models("slots")
    cache = model.cache(1, 8)
    assert cpu_chain(model, cache, length, budget) is not None
    assert cpu_chain(model, cache, length, torch.tensor([1])) is None  # there are no later steps
    assert cpu_chain(model, model.cache(1, 3), length, budget) is None  # no room: scoring says so
    assert cpu_chain(sd.TableModel([0.5, 0.5]), None, length, budget) is None
    wide = sd.HFModel(tiny("llama"))  # float64
    assert cpu_chain(wide, wide.cache(1, 8), length, budget) is None
    assert cpu_chain(with_more(model), cache, length, budget) is None  # a class speaks for itself
    assert cpu_chain(with_more(model, fast_chain="slots"), cache, length, budget) is not None
    ring = sd.models.Windowed(model, 8, 1)
    assert type(ring).score is type(model).score
    assert cpu_chain(ring, ring.cache(1, 8), length, budget) is None  # slots of a ring are no positions
    handle = model.clone.model.layers[0].register_forward_hook(lambda *_: None)
    assert cpu_chain(model, cache, length, budget) is None  # somebody listens to the blocks
    handle.remove()


class EverySecond(sd.HFModel):
    """A query sees itself and every second slot before it."""

    def _pieces(self, cache, packed, limit, wanted):
        for store, piece in super()._pieces(cache, packed, limit, wanted):
            plan = piece.plan
            query = np.concatenate([np.arange(f, f + c) for f, c in zip(plan.first, plan.counts)])[:, None]
            slot = np.arange(plan.capacity)
            seen = (slot <= query) & ((slot % 2 == 0) | (slot == query))
            own = ExplicitPlan(plan.rows, plan.counts, seen, query - slot, plan.slots)
            yield store, piece._replace(plan=own)


def test_a_subclass_with_its_own_mask_is_not_passed_by():
    def proposed(kind, bound):
        model = kind(tiny("llama", 0, torch.float32, **SIZES))
        draft = sd.drafts.Model(model, Sampling(), 96)
        draft = draft.bind(model, Sampling()) if bound else draft
        context, rng = Context.of(PROMPTS, capacity=32), Philox(torch.arange(4))
        state = draft.init(context, None)
        return draft.propose(state, context, torch.tensor([4, 4, 4, 4]), rng)[0]

    masked, plain = proposed(EverySecond, True), proposed(EverySecond, False)
    assert torch.equal(masked.tokens, plain.tokens)
    assert torch.equal(masked.probs, plain.probs)
    assert (masked.probs - proposed(sd.HFModel, True).probs).abs().max() > 1e-3  # the mask is seen


def test_captured_steps_do_not_pass_by_a_subclass_with_its_own_mask():
    def logits(kind, **options):
        model = kind(tiny("llama"), **options)
        context = Context.of(PROMPTS, capacity=32)
        cache = model.cache(4, 32)
        model.prefill(cache, context)
        return [model.score(cache, context).logits for _ in range(4)][
            -1
        ]  # shapes are captured when they occur again

    masked = logits(EverySecond)
    for graphs in ("eager", "recorded"):
        assert torch.equal(logits(EverySecond, graphs=graphs), masked)
    assert (logits(sd.HFModel) - masked).abs().max() > 1e-3


def with_more(model, **more):
    """``model`` as one of a class below its own."""
    made = object.__new__(type("More", (type(model),), more))
    vars(made).update(vars(model))
    return made
