"""Draft heads on recurrent and hybrid targets: what they read, decoding with them, and the MTP layer that Qwen3.5 ships."""

from __future__ import annotations

import pytest
import torch
from forwards import ROWS, accept, propose
from test_heads import shake
from tiny_states import HERE, STATES, stateful

import specdec as sd
from specdec.audit.certify import certify
from specdec.configs import blocks_of
from specdec.drafts.heads import MTP, DFlash, DynamicTree, Eagle3, Head, HeadModel, Medusa
from specdec.executors import Optimistic, Pipelined
from specdec.models import OwnCache
from specdec.training.states import target_states
from specdec.training.train import Settings, train
from specdec.types import Context

PROMPTS, BUDGETS = [list(range(5, 17)), [3, 4], [90, 7, 7], [3, 4]], [15, 9, 1, 12]
SEVERAL = "gemma3n_text"  # its blocks give several vectors for a token
slow = pytest.mark.slow


def families(*fast):
    return [pytest.param(f, marks=[] if f in fast else slow) for f in HERE if f != SEVERAL]


@torch.no_grad()
def layers_of(model, text):
    """``[L + 2, T, E]`` of all layers, and after the final norm: transformers' own hidden states, which lack the last block's output."""
    last, ids, stack = [], torch.tensor([text]), blocks_of(model)
    hook = stack[-1].register_forward_hook(lambda m, given, out: last.extend(out))
    states = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    if model.config.model_type in ("mamba", "mamba2", "falcon_mamba"):  # there they begin after block 1
        states = (model.get_input_embeddings()(ids), *states)
    return torch.cat([*states[: len(stack)], last[0].view_as(states[0]), states[-1]])


def same(found, expected):
    return bool((found - expected).abs().max() < 1e-5 * expected.abs().max())


class Oracle(HeadModel):
    """Knows texts, refuses activations that transformers does not compute along them, and proposes what follows."""

    kv_layers, mistakes = 0, False

    def __init__(self, config, taps, **shared):
        super().__init__(config, taps, **shared)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def knows(self, model, texts):
        self.places = [(text, p) for text in texts for p in range(len(text))]
        self.right = torch.cat([layers_of(model, text) for text in texts], 1)
        return self

    def read(self, features, go):
        read = torch.stack([features.layers[tap] for tap in self.taps])
        best = torch.cdist(read[-1], self.right[-1]).min(-1).indices
        assert all(map(same, read, self.right[:, best]))
        assert [self.places[i][0][self.places[i][1]] for i in best] == features.tokens.tolist()
        return best[:, None]

    def step(self, n, memo, token, at):
        logits = torch.zeros(len(memo), self.vocab_size)
        for b, place in enumerate(memo[:, 0].tolist()):
            text, p = self.places[place]
            logits[b, (text[p + 2 + n] + (self.mistakes and n == p % 5)) % 97] = 100.0
        return logits, memo


def decoded(target, draft=None, executor=None, temperature=0.0, budgets=BUDGETS):
    base = sd.decoder(target).verifier(sd.Coupled()).sampling(temperature=temperature)
    base = base if draft is None else base.draft(draft, 4)
    base = base if executor is None else base.executor(executor)
    return base.build().generate(PROMPTS, budgets, seed=5, eos_token_id=())


@pytest.mark.parametrize("family", families("lfm2"))
def test_heads_read_the_activations_of_a_forward_of_the_whole_text(family):
    """Rejections at every depth and none, rows of one text, prompts in pieces, rows that leave and join."""
    model = stateful(family)
    target = OwnCache(model, prefill_chunk=7)
    long = decoded(target, budgets=[n + 6 for n in BUDGETS]).ids
    own = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=15, do_sample=False)
    assert own[0, len(PROMPTS[0]) :].tolist() == long[0][:15]
    head = Oracle.from_target(target, (*range(len(blocks_of(model)) + 1), "final"))
    draft = Head(head.knows(model, [p + ids for p, ids in zip(PROMPTS, long)]))
    for target.refeed, head.mistakes in ((0, True), (8, False), (8, True)):
        made = decoded(target, draft)
        assert made.ids == [ids[:n] for ids, n in zip(long, BUDGETS)]
        assert (made.stats.drafted - made.stats.accepted > 6) == head.mistakes
        assert made.stats.accepted == made.stats.drafted or head.mistakes
    requests = [sd.Request(p, max_new_tokens=n, eos_token_id=()) for p, n in zip(PROMPTS, BUDGETS)]
    served = sd.decoder(target).greedy().draft(draft, 3).serve(requests, limit=2)
    assert {one.index: one.ids for one in served} == dict(enumerate(made.ids))


@pytest.fixture(scope="module")
def hybrid():
    return OwnCache(stateful("lfm2"), refeed=2)


def test_what_a_call_returns(hybrid):
    cache, context, proposal = hybrid.cache(4, 64), Context.of(ROWS), propose(hybrid, [6, 2, 0, 1])

    def check(proposal, begin):
        fed = hybrid.score(cache, context, proposal, taps=(3,)).fed
        assert fed.row.tolist() == sorted(fed.row.tolist())
        assert not fed.layers[3].is_inference()
        for b, first in enumerate(begin):
            mine, n, size = fed.row == b, int(context.length[b]), int(proposal.size[b])
            assert fed.position[mine].tolist() == [*range(first, n + size)]
            assert fed.node[mine].tolist() == [max(p - n, -1) for p in range(first, n + size)]
            text = [*context.row(b), *proposal.tokens[b, :size].tolist()]
            assert same(fed.layers[3][mine], layers_of(hybrid.model, text)[3, first:])

    check(proposal, [0, 0, 0, 0])
    # Two of six accepted, all, none proposed, and a dropped node that is drawn: the state has read all of the text.
    verdict = accept(proposal, [[0, 1], [0, 1], [], []])
    verdict.tokens[3, 0] = proposal.tokens[3, 0]
    context = context.append(verdict.tokens, verdict.accepted + 1)
    check(propose(hybrid, [3, 3, 3, 1], seed=1), [0, 35, 15, 0])
    empty = hybrid.score(cache, context, taps=(0,), rows=torch.tensor([], dtype=torch.long)).fed
    assert list(empty.layers[0].shape) == [0, 32]


@slow
@pytest.mark.parametrize("kind", [MTP, Medusa, DFlash])
def test_any_head_leaves_the_text(hybrid, kind):
    head, sampled = shake(kind.from_target(hybrid)), decoded(hybrid, temperature=1.0).ids
    for executor in (None, Pipelined(2), Optimistic()):
        assert decoded(hybrid, Head(head, graphs="eager"), executor, 1.0).ids == sampled
    arms = {"head": Head(head), "ngram": sd.drafts.NGram(), "plain": None}
    pool = sd.decoder(hybrid).greedy().pool(arms, sd.selectors.Random(), length=3)
    assert pool.generate(PROMPTS, BUDGETS, eos_token_id=()).ids == decoded(hybrid).ids


@slow
def test_the_output_has_the_targets_distribution_exactly(monkeypatch):
    monkeypatch.setitem(STATES, "lfm2", {**STATES["lfm2"], "vocab_size": 3})
    small = OwnCache(stateful("lfm2").double())
    draft = Head(shake(MTP.from_target(small)))
    found = certify(sd.decoder(small).draft(draft, length=2).build(), [[2, 1]], [3])
    assert found.lossless, found


def test_what_cannot_be_read_is_refused(hybrid):
    with pytest.raises(ValueError, match=r"takes chains only .*heads\.Chain\(\)"):
        sd.decoder(hybrid).draft(Head(Eagle3.from_target(hybrid), DynamicTree(2, 2, 3)), 2).build()
    other = OwnCache(stateful(SEVERAL))
    with pytest.raises(ValueError, match="no vector for each token"):
        other.score(other.cache(1, 9), Context.of([[1, 2]]), taps=(1,))
    assert not any(block._forward_hooks for block in blocks_of(other.clone))


@slow
@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_a_head_trains_on_what_it_reads(family):
    model = stateful(family)
    ids = torch.randint(0, 97, (8, 13), generator=torch.Generator().manual_seed(0))
    layers = layers_of(model, ids[0, :-1].tolist())
    batch = target_states(model, ids[:1], range(len(layers) - 1))
    assert all(same(x[0], layers[n]) for n, x in batch.inputs.items())
    assert same(batch.final[0], layers[-1])
    how = Settings(steps=20, batch=8, muon_lr=0.05, adam_lr=0.02, precision=torch.float32)
    target, losses = OwnCache(model), []
    train(MTP.from_target(target), target, ids, settings=how, progress=False, on_step=losses.append)
    assert losses[-1]["loss"] < 0.95 * losses[0]["loss"]
