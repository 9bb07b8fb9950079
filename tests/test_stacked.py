"""Models of one shape behind one forward: each row's logits are its member's, and nothing that comes out changes."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts import Stacked
from specdec.executors import Pipelined
from specdec.models import StackedModel
from specdec.types import Context, Proposal

PROMPTS = [[5], [7, 8, 9], [1, 2, 3, 4, 5, 6] * 3, [50] * 9, [3, 1], [90, 4, 5, 6]]
BUDGETS = [30, 3, 40, 1, 20, 25]


def members(family="llama", dtype=None, **changes):
    return [sd.HFModel(tiny(family, seed, dtype, num_hidden_layers=2, **changes)) for seed in (0, 3, 4)]


class Rotates:
    """Arm (request + length // every) mod arms."""

    def __init__(self, every):
        self.every = every

    def init(self, arms):
        return None

    def select(self, state, context, capacities, rng):
        arm = (context.request + context.length // self.every) % len(capacities)
        return arm, torch.ones(len(arm)), state

    def update(self, state, feedback):
        return state


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("member", [[0, 1, 2, 0, 2, 1], [1] * 6], ids=["mixed", "one"])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float64, {}),
        (torch.float32, {}),
        (torch.float32, {"vocab_size": 96, "hidden_size": 64, "head_dim": 16}),
    ],
    ids=["PyTorch", "by operators", "at once"],
)
def test_every_row_is_read_by_its_member(dtype, sizes, family, member):
    models = members(family, dtype, **sizes)
    stack, context = StackedModel(models), Context.of(PROMPTS, capacity=64)
    stack.read_as(torch.tensor(member))
    cache = stack.cache(6, 64)
    stack.prefill(cache, context)
    proposal = Proposal.chain(torch.arange(12).view(6, 2), torch.tensor([2, 0, 1, 2, 2, 1]))
    got = stack.score(cache, context, proposal).logits
    for b, m in enumerate(member):
        alone = Context.of([PROMPTS[b]], capacity=64)
        chain = proposal.select(torch.tensor([b]))
        own = models[m].score(models[m].cache(1, 64), alone, chain).logits[0]
        n = int(proposal.size[b]) + 1
        torch.testing.assert_close(got[b, :n], own[:n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("every", [1, 5, 1000])
@pytest.mark.parametrize("executor", [sd.executors.Serial(), Pipelined(2), Pipelined(3, workers="processes")])
def test_texts_are_those_of_separate_drafts(every, executor):
    target, (a, b, c) = sd.HFModel(tiny("llama", 0)), members()
    arms = {"a": a, "b": b, "ngram": sd.drafts.NGram(), "c": sd.Arm(c, 2), "none": None}
    base = sd.decoder(target).verifier(sd.Coupled())
    plain = base.build().generate(PROMPTS, BUDGETS, seed=0, eos_token_id=(5, 40))
    stacked = base.pool(arms, Rotates(every), 3, stacked=True).executor(executor).build()
    assert [type(d).__name__ for d in stacked.draft.drafts] == ["Stacked", "NGram"]
    assert stacked.generate(PROMPTS, BUDGETS, seed=0, eos_token_id=(5, 40)).ids == plain.ids


def test_what_is_proposed_is_what_separate_drafts_propose():
    target, (a, b, c) = sd.HFModel(tiny("llama", 0)), members()
    base = sd.decoder(target)
    apart, together = (
        base.pool({"a": a, "b": b, "c": c}, Rotates(4), 3, stacked=s)
        .build()
        .generate(PROMPTS, BUDGETS, seed=0)
        for s in (False, True)
    )
    assert together.ids == apart.ids
    assert together.stats.accepted == apart.stats.accepted


LONG = [[7 + b, *range(20 + b, 80)] for b in range(4)]
KINDS = {  # of members, and of caches
    "PyTorch": (torch.float64, {}, {}),
    "by operators, pages": (torch.float32, {}, {"page": 16}),
    "at once": (torch.float32, {"vocab_size": 96, "hidden_size": 64, "head_dim": 16}, {}),
    "PyTorch, pages": (torch.float64, {}, {"page": 4}),
}


def arms(kind):
    dtype, sizes, how = KINDS[kind]
    return [sd.HFModel(tiny("llama", seed, dtype, num_hidden_layers=2, **sizes), **how) for seed in (0, 3, 4)]


@pytest.fixture
def read(monkeypatch):
    """What the forwards of stacks were given, by who asked: ``(name of the method, tokens)``."""
    said, asking, run = [], [], StackedModel._run

    def asked(name):
        method = getattr(Stacked, name)

        def noted(*args):
            asking.append(name)
            try:
                return method(*args)
            finally:
                asking.pop()

        monkeypatch.setattr(Stacked, name, noted)

    for name in ("prepare", "read_ahead", "propose"):
        asked(name)
    monkeypatch.setattr(
        StackedModel,
        "_run",
        lambda self, cache, packed, *rest: (
            said.append((asking[-1], packed.tokens)) or run(self, cache, packed, *rest)
        ),
    )
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_reads_its_rows_while_another_drafts_them(kind, read):
    """At the change only what the last round committed is read; without reading ahead, the whole text. Proposals stay the same."""
    target, k = arms(kind)[0], 3
    base = sd.decoder(target)
    drafts = dict(zip("abc", arms(kind)))
    for ahead in (True, False):
        apart, together = (
            base.pool(drafts, Rotates(9), k, stacked=stacked)
            .executor(Pipelined(2, ahead=ahead))
            .build()
            .generate(LONG, [30, 7, 40, 21], seed=0)
            for stacked in (False, True)
        )
        assert together.ids == apart.ids
        assert together.stats.accepted == apart.stats.accepted
        most = {
            name: max((n for who, n in read if who == name), default=0) for name in ("propose", "read_ahead")
        }
        # Two rows a micro-batch; what was committed while the new member read is at most a block and its bonus token.
        assert (most["propose"] <= 2 * (k + 1)) == ahead
        assert (most["read_ahead"] >= 60) == ahead
        read.clear()


@pytest.mark.parametrize("kind", ["PyTorch", "PyTorch, pages"])
def test_rows_that_come_and_go_while_members_read_ahead(kind, read):
    drafts = dict(zip("abc", arms(kind)))
    base = sd.decoder(drafts["a"]).pool(drafts, Rotates(4), 3, stacked=True).executor(Pipelined(2))
    requests = [
        sd.Request(LONG[i % 4][i:], 3 + 7 * i % 23, arrival=float(i), seed=i, key=i) for i in range(9)
    ]
    plain = sd.decoder(drafts["a"]).verifier(sd.Coupled()).build()
    coupled = base.verifier(sd.Coupled()).build().serve(requests, 4, clock="rounds")
    assert {one.index: one.ids for one in coupled} == {
        i: plain.generate(r.prompt, r.max_new_tokens, seed=i).ids[0] for i, r in enumerate(requests)
    }
    assert any(who == "read_ahead" for who, _ in read)


def test_without_memory_to_read_ahead_rows_are_read_at_the_change(read, monkeypatch):
    drafts = dict(zip("abc", arms("PyTorch")))
    pool = sd.decoder(drafts["a"]).pool(drafts, Rotates(9), 3, stacked=True)
    decoder = pool.executor(Pipelined(2)).build()
    expected = decoder.generate(LONG, 30, seed=0)
    cache, made = StackedModel.cache, []

    def full(self, batch, capacity):
        made.append(batch)
        if len(made) > 2:  # those of the two micro-batches
            raise MemoryError("no room")
        return cache(self, batch, capacity)

    monkeypatch.setattr(StackedModel, "cache", full)
    read.clear()
    out = decoder.generate(LONG, 30, seed=0)
    assert (out.ids, out.stats.accepted) == (expected.ids, expected.stats.accepted)
    assert len(made) > 2
    assert not any(who == "read_ahead" for who, _ in read)


def test_what_cannot_be_stacked_is_refused_or_left_alone():
    a, b, _ = members()
    with pytest.raises(ValueError, match="needs at least two"):
        StackedModel([a])
    with pytest.raises(ValueError, match="member 1 has another shape"):
        StackedModel([a, sd.HFModel(tiny("llama", 1, num_hidden_layers=1))])
    with pytest.raises(ValueError, match="member 1 is a"):
        StackedModel([a, sd.HFModel(tiny("qwen2", 1))])
    other = sd.HFModel(tiny("llama", 1, num_hidden_layers=1))
    pool = sd.decoder(a).pool({"b": b, "other": other}, Rotates(1), stacked=True).build().draft
    assert not any(isinstance(d, Stacked) for d in pool.drafts)
