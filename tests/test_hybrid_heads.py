"""Draft heads on recurrent and hybrid targets: what ``OwnCache`` returns of its layers, and decoding with heads that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from forwards import ROWS, accept, propose
from test_heads import observed, shake
from tiny_states import HERE, STATES, stateful
from torch import Tensor

import specdec as sd
from specdec.audit.certify import certify
from specdec.capabilities import DraftInfo
from specdec.configs import blocks_of
from specdec.drafts.heads import MTP, Chain, DFlash, DSpark, DynamicTree, Eagle3, Head, HeadModel, Medusa
from specdec.drafts.heads.features import fresh
from specdec.executors import Optimistic, Pipelined
from specdec.forward.ends import Ends
from specdec.lab.recording import record
from specdec.models import OwnCache
from specdec.testing import check_draft
from specdec.training.anchored import blocks
from specdec.training.states import target_states
from specdec.training.train import Settings, train
from specdec.types import Context, Proposal

PROMPTS = [list(range(5, 17)), [3, 4], [90, 7, 7], [3, 4]]
BUDGETS = [13, 9, 1, 12]
EXACT = 1e-5  # float32, relative to the layer's largest number
NO_VECTORS = "gemma3n_text"  # its blocks give several vectors for a token
TAPPED = [f for f in HERE if f != NO_VECTORS]


def several(fast="lfm2", families=TAPPED):
    return [pytest.param(f, marks=[] if f == fast else pytest.mark.slow) for f in families]


@pytest.fixture(scope="module")
def hybrid():
    return OwnCache(stateful("lfm2"), refeed=2, prefill_chunk=9)


@torch.no_grad()
def layers_of(model, text):
    """``[L + 1, T, E]`` by transformers' own ``output_hidden_states``, the last one before the final norm."""
    L = len(blocks_of(model))
    out = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    states = out.hidden_states
    if "mamba" in model.config.model_type and model.config.model_type != "zamba":  # counted from block 1
        states = (model.get_input_embeddings()(torch.tensor([text])), *states)
    assert len(states) >= L + 1
    last = []
    hook = blocks_of(model)[-1].register_forward_hook(
        lambda module, args, out: last.append(out if isinstance(out, Tensor) else out[0])
    )
    model(torch.tensor([text]), use_cache=False)
    hook.remove()
    norm = Ends.of(model).final(last[0])
    assert (norm - states[-1]).abs().max() <= 1e-6 * norm.abs().max()  # transformers' last is normed
    return torch.cat([*states[:L], last[0]])


def off(model, texts, found, which=slice(None)):
    """The largest difference of activations ``found[b] [L + 1, T, E]`` at the first positions of texts to ``layers_of``, relative to each layer's largest number."""
    worst = 0.0
    for text, layers in zip(texts, found, strict=True):
        expected = layers_of(model, text)[which, : layers.shape[1]]
        worst = max(
            worst,
            *(float((a - e).abs().max() / e.abs().max()) for a, e in zip(layers, expected, strict=True)),
        )
    return worst


@dataclass(frozen=True)
class Reads:
    """Proposes the text that plain decoding makes, with a wrong token at a depth that changes from round to round, and keeps the activations of every
    committed position, as a head reads them."""

    texts: tuple
    layers: tuple
    kept: dict
    revocable = True
    info = property(lambda self: DraftInfo("reads", taps=self.layers))

    class State(NamedTuple):
        known: Tensor
        round: Tensor

    def init(self, context, target_cache):
        zero = torch.zeros(context.batch, dtype=torch.long)
        return self.State(zero, zero)

    def propose(self, state, context, budget, rng):
        size = budget.clone()
        tokens = torch.zeros(context.batch, max(int(budget.max()), 0), dtype=torch.long)
        for b, request in enumerate(context.request.tolist()):
            n = int(context.length[b])
            right = self.texts[request][n : n + int(budget[b])]
            size[b] = len(right)
            tokens[b, : len(right)] = torch.tensor(right, dtype=torch.long)
            wrong = int(state.round[b]) % 5  # at depths 0 to 4, of which the last ones are often past the end
            if wrong < len(right):
                tokens[b, wrong] = (tokens[b, wrong] + 1) % 97
        return Proposal.chain(tokens, size), state

    def observe(self, state, round):
        new = fresh(round, state.known)
        fed = round.scores.fed
        for i, b, p in zip(new.fed.tolist(), new.row.tolist(), new.position.tolist()):
            text = self.kept.setdefault(int(round.context.request[b]), [])
            assert len(text) == p
            text.append(torch.stack([fed.layers[layer][i] for layer in self.layers]))
        end = round.context.length + round.committed - 1
        return self.State(torch.where(round.finished, state.known, end), state.round + 1)

    def select(self, state, rows):
        return self.State(*(x[rows] for x in state))

    def join(self, state, other):
        return self.State(*(torch.cat(pair) for pair in zip(state, other)))


def plain_texts(model, prompts=PROMPTS, budgets=BUDGETS):
    out = sd.decoder(OwnCache(model)).greedy().build().generate(prompts, budgets, eos_token_id=())
    return [p + ids for p, ids in zip(prompts, out.ids)]


@pytest.mark.parametrize("family", several())
@pytest.mark.parametrize("refeed", [8, pytest.param(0, marks=pytest.mark.slow)])
def test_every_committed_position_has_the_activations_of_a_forward_of_the_whole_text(family, refeed):
    """Rejections at every depth, rows of one text, prompts in pieces, rows that leave."""
    model = stateful(family)
    texts = plain_texts(model)
    draft = Reads(tuple(texts), tuple(range(len(blocks_of(model)) + 1)), {})
    target = OwnCache(model, prefill_chunk=7, refeed=refeed)
    decoder = sd.decoder(target).draft(draft, length=4).greedy().build()
    out = decoder.generate(PROMPTS, BUDGETS, eos_token_id=())
    assert [p + ids for p, ids in zip(PROMPTS, out.ids)] == texts
    rows = [b for b in draft.kept if len(draft.kept[b]) > len(PROMPTS[b])]
    assert rows == [0, 1, 3]
    found = [torch.stack(draft.kept[b], 1) for b in rows]
    assert off(model, [texts[b] for b in rows], found) < EXACT


@pytest.mark.parametrize("family", several(families=["lfm2", "qwen3_next"]))
def test_rows_of_a_stream_have_theirs(family):
    model = stateful(family)
    texts = plain_texts(model)
    draft = Reads(tuple(texts), (0, 2, 3), {})
    decoder = sd.decoder(OwnCache(model)).draft(draft, length=3).greedy().build()
    requests = [sd.Request(p, max_new_tokens=n, eos_token_id=()) for p, n in zip(PROMPTS, BUDGETS)]
    served = {one.index: one.ids for one in decoder.serve(requests, limit=2)}
    assert [p + served[b] for b, p in enumerate(PROMPTS)] == texts
    for b in (0, 1, 3):
        found, expected = torch.stack(draft.kept[b], 1), layers_of(model, texts[b])[[0, 2, 3]]
        assert found.shape[1] > len(PROMPTS[b])
        torch.testing.assert_close(
            found, expected[:, : found.shape[1]], rtol=0, atol=EXACT * float(expected.abs().max())
        )


def owners(fed, b):
    mine = fed.row == b
    return fed.position[mine].tolist(), fed.node[mine].tolist()


@pytest.mark.parametrize("refeed", [8, pytest.param(0, marks=pytest.mark.slow)])
def test_what_a_call_returns(refeed):
    model = stateful("lfm2")
    target, context = OwnCache(model, refeed=refeed), Context.of(ROWS)
    cache, proposal = target.cache(4, 64), propose(target, [6, 2, 0, 3])
    first = target.score(cache, context, proposal, taps=(1, 3))
    fed = first.fed
    assert fed.row.tolist() == sorted(fed.row.tolist())
    for b, row in enumerate(ROWS):
        size = int(proposal.size[b])
        assert owners(fed, b) == ([*range(len(row) + size)], [-1] * len(row) + [*range(size)])
        text = [*row, *proposal.tokens[b, :size].tolist()]
        assert (
            off(model, [text], [torch.stack([fed.layers[n][fed.row == b] for n in (1, 3)])], [1, 3]) < EXACT
        )
    assert not fed.layers[1].is_inference()
    without = target.score(target.cache(4, 64), context, proposal)
    assert torch.equal(without.logits, first.logits)
    # rejected at depth 2, everything taken, nothing proposed, rejected at depth 0
    verdict = accept(proposal, [[0, 1], [0, 1], [], []])
    context = context.append(verdict.tokens, verdict.accepted + 1)
    again = propose(target, [3, 3, 3, 0], seed=1)
    fed = target.score(cache, context, again, taps=(1, 3)).fed
    for b in range(4):
        n, size = int(context.length[b]), int(again.size[b])
        position, node = owners(fed, b)
        begin = n - 1
        if b in (0, 3):  # accepted tokens before a rejected one are read again, and a short prompt with them
            begin = len(ROWS[b]) if refeed < len(ROWS[b]) else 0
        assert position == [*range(begin, n + size)], b
        assert node == [max(p - n, -1) for p in position]
        text = [*context.row(b), *again.tokens[b, :size].tolist()]
        found = torch.stack([fed.layers[x][fed.row == b] for x in (1, 3)])
        expected = layers_of(model, text)[[1, 3]][:, begin:]
        assert (found - expected).abs().max() < EXACT * expected.abs().max()


def test_a_token_whose_logits_are_known_is_read_for_its_activations():
    """A dropped node that is drawn after all: the state has read the text, and its activations were those of a node."""
    model = stateful("mamba2")
    target, text, chain = OwnCache(model, refeed=0), [5, 6, 7, 8], torch.tensor([[1, 2]])
    cache = target.cache(1, 32)
    target.score(cache, Context.of([text]), Proposal.chain(chain, torch.tensor([2])), taps=(2,))
    now = Context.of([[*text, 1, 2]])
    fed = target.score(cache, now, Proposal.chain(chain + 1, torch.tensor([2])), taps=(2,)).fed
    assert owners(fed, 0) == ([4, 5, 6, 7], [-1, -1, 0, 1])
    expected = layers_of(model, [*text, 1, 2, 2, 3])[2][4:]
    assert (fed.layers[2] - expected).abs().max() < EXACT * expected.abs().max()
    start = target.score(cache, now, Proposal.chain(chain + 1, torch.tensor([2])), start=1, taps=(2,))
    assert start.logits.shape[1] == 1
    assert owners(start.fed, 0)[1][-1] == 1
    rows = target.score(cache, now, taps=(0, 2), rows=torch.tensor([], dtype=torch.long)).fed
    assert {n: list(x.shape) for n, x in rows.layers.items()} == {0: [0, 32], 2: [0, 32]}


def test_layers_that_do_not_exist_are_refused(hybrid):
    with pytest.raises(ValueError, match=r"taps: layer 4 does not exist; this model has 0 .* to 3"):
        hybrid.score(hybrid.cache(1, 9), Context.of([[1, 2]]), taps=(4,))


@pytest.mark.skipif(NO_VECTORS not in HERE, reason="an older transformers")
@pytest.mark.slow
def test_blocks_that_give_several_vectors_are_refused():
    target, context = OwnCache(stateful(NO_VECTORS)), Context.of([[1, 2]])
    cache = target.cache(1, 9)
    with pytest.raises(ValueError, match="no vector for each token"):
        target.score(cache, context, taps=(1,))
    assert target.score(cache, context).logits.shape == (
        1,
        1,
        97,
    )  # the call left no hooks and no half-read state
    with pytest.raises(ValueError, match="does more to its logits"):
        Eagle3.from_target(target)


def test_the_users_model_has_no_hooks(hybrid):
    seen, mine, theirs = [], blocks_of(hybrid.clone)[0], blocks_of(hybrid.model)[0]
    look = mine.register_forward_hook(
        lambda *a: seen.append((len(mine._forward_hooks), len(theirs._forward_hooks)))
    )
    hybrid.score(hybrid.cache(1, 9), Context.of([[1, 2]]), taps=(1,))
    look.remove()
    assert seen == [(2, 0)]
    assert not mine._forward_hooks


# -- decoding ---------------------------------------------------------------------------------------------------------


def decoded(target, draft=None, sampled=False, executor=None, length=4):
    base = sd.decoder(target).verifier(sd.Coupled())
    base = base.sampling(temperature=1.0) if sampled else base.greedy()
    base = base if draft is None else base.draft(draft, length)
    base = base if executor is None else base.executor(executor)
    return base.build().generate(PROMPTS, BUDGETS, seed=5, eos_token_id=())


MADE = {
    "eagle3": lambda target: Eagle3.from_target(target),
    "mtp": lambda target: MTP.from_target(target),
    "medusa": lambda target: Medusa.from_target(target, heads=4),
    "dflash": lambda target: DFlash.from_target(target, blocks=1, block_size=5),
    "dspark": lambda target: DSpark.from_target(target, blocks=1, block_size=4, rank=8),
}


@pytest.mark.parametrize("family", several())
def test_texts_are_those_of_the_models_own_generate(family):
    model = stateful(family)
    target = OwnCache(model)
    ours = decoded(target).ids
    for prompt, ids in zip(PROMPTS, ours):
        own = model.generate(torch.tensor([prompt]), max_new_tokens=len(ids), do_sample=False)
        assert own[0, len(prompt) :].tolist() == ids
    made = decoded(target, Head(shake(Eagle3.from_target(target))))
    assert made.ids == ours
    assert made.stats.drafted > made.stats.accepted


@pytest.fixture(scope="module")
def plain(hybrid):
    """The greedy and the sampled texts of plain decoding."""
    return {sampled: decoded(hybrid, sampled=sampled).ids for sampled in (False, True)}


@pytest.mark.parametrize("kind", MADE)
def test_any_head_leaves_the_text(hybrid, plain, kind):
    head = Head(shake(MADE[kind](hybrid)))
    for sampled in (False, True):
        made = decoded(hybrid, head, sampled)
        assert made.ids == plain[sampled]
        assert made.stats.drafted > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "nemotron_h"])
def test_any_head_leaves_the_text_of_any_family(family, kind):
    target = OwnCache(stateful(family))
    head = Head(shake(MADE[kind](target)))
    for sampled in (False, True):
        assert decoded(target, head, sampled).ids == decoded(target, sampled=sampled).ids


@pytest.mark.parametrize("executor", [Pipelined(2), Optimistic(threads=False), Optimistic()])
def test_any_executor(hybrid, plain, executor):
    head = Head(shake(MTP.from_target(hybrid)))
    assert decoded(hybrid, head, True, executor).ids == plain[True]


def test_a_stream_with_a_head(hybrid, plain):
    decoder = sd.decoder(hybrid).draft(Head(shake(Eagle3.from_target(hybrid))), length=3).greedy().build()
    requests = [sd.Request(p, max_new_tokens=n, eos_token_id=()) for p, n in zip(PROMPTS, BUDGETS)]
    served = {one.index: one.ids for one in decoder.serve(requests, limit=2)}
    assert [served[i] for i in range(4)] == plain[False]


@pytest.mark.parametrize("graphs", ["eager", pytest.param("recorded", marks=pytest.mark.slow)])
def test_a_captured_chain(hybrid, plain, graphs):
    head = shake(MTP.from_target(hybrid))
    made = decoded(hybrid, Head(head, graphs=graphs))
    assert made.ids == plain[False]
    assert made.stats.accepted == decoded(hybrid, Head(head, graphs=False)).stats.accepted


class Oracle(HeadModel):
    """Knows texts and the target's last states along them: it proposes what follows the state that it reads, and nothing likely if it knows no such state."""

    kv_layers = 0

    def __init__(self, config, taps, **shared):
        super().__init__(config, taps, **shared)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def knows(self, texts, states):
        self.texts, self.states = texts, torch.cat(states)
        self.places = [(t, p) for t, text in enumerate(texts) for p in range(len(text))]
        return self

    def read(self, features, go):
        far = torch.cdist(features.layers["final"], self.states, compute_mode="donot_use_mm_for_euclid_dist")
        least = far.min(-1)
        place = torch.where(least.values < 1e-3, least.indices, -1)
        return place[:, None]

    def step(self, n, memo, token, at):
        logits = torch.zeros(len(memo), self.vocab_size)
        for b, place in enumerate(memo[:, 0].tolist()):
            text, p = self.places[place] if place >= 0 else (0, 10**6)
            if p + 2 + n < len(self.texts[text]):
                logits[b, self.texts[text][p + 2 + n]] = 100.0
        return logits, memo


@pytest.mark.parametrize("family", several(families=["lfm2", "qwen3_next", "mamba"]))
def test_a_head_that_knows_the_text_is_never_rejected(family):
    """It knows the text by the states of transformers' own forward: one wrong activation is a rejection."""
    model = stateful(family)
    target, more = OwnCache(model), [n + 8 for n in BUDGETS]
    texts, ends = plain_texts(model, budgets=more), Ends.of(model)
    states = [ends.final(layers_of(model, text)[-1]) for text in texts]
    head = Oracle.from_target(target).knows(texts, states)
    made = decoded(target, Head(head))
    assert [p + ids for p, ids in zip(PROMPTS, made.ids)] == [
        t[: len(p) + n] for t, p, n in zip(texts, PROMPTS, BUDGETS)
    ]
    assert made.stats.accepted == made.stats.drafted > 20


@torch.no_grad()
@pytest.mark.parametrize("family", several(families=["lfm2", "qwen3_next"]))
def test_what_was_drafted_live_is_what_the_teacher_forced_forward_gives(family):
    target = OwnCache(stateful(family))
    head, rounds = shake(MTP.from_target(target)), []
    decoder = sd.decoder(target).draft(Head(head), 3).sampling(temperature=0.3).build()
    out = decoder.generate(PROMPTS[:2], [14, 14], seed=0, eos_token_id=(), on_round=rounds.append)
    compared, rejected = 0, 0
    for b, prompt in enumerate(PROMPTS[:2]):
        text, known = torch.tensor([prompt + out.ids[b]]), observed(head, rounds, b)
        for r in rounds[1:]:
            rows = r.context.request.tolist()
            if b not in rows or not int(r.proposal.size[rows.index(b)]):
                continue
            i = rows.index(b)
            anchor, size = int(r.context.length[i]) - 1, int(r.proposal.size[i])
            drafted = torch.cat([text[:, : anchor + 1], r.proposal.tokens[i, :size][None]], 1)
            layers = {tap: x[:, :anchor] for tap, x in known.items()}
            made = blocks(head, drafted, layers, size, torch.tensor([[anchor]]))[0, 0]
            torch.testing.assert_close(
                r.proposal.probs[i, :size], (made / 0.3).softmax(-1), rtol=0, atol=1e-5
            )
            compared, rejected = compared + size, rejected + int(r.verdict.accepted[i] < size)
    assert compared >= 16
    assert rejected >= 3


@pytest.mark.parametrize("family", several(families=["lfm2", "qwen3_next", "mamba"]))
def test_a_head_trains_on_what_it_reads(family):
    """The states of training are those of a decoder, and the loss falls."""
    model = stateful(family)
    target, layers = OwnCache(model), (0, 1, len(blocks_of(model)))
    ids = torch.randint(0, 97, (8, 13), generator=torch.Generator().manual_seed(0))
    batch = target_states(model, ids[:2], layers)
    fed = target.score(target.cache(2, 16), Context.of(ids[:2, :-1].tolist()), taps=layers).fed
    pairs = [(batch.inputs[layer], fed.layers[layer]) for layer in layers]
    for states, live in [*pairs, (batch.final, Ends.of(model).final(fed.layers[layers[-1]]))]:
        torch.testing.assert_close(states.flatten(0, 1), live, rtol=0, atol=EXACT * float(live.abs().max()))
    head, losses = MTP.from_target(target), []
    how = Settings(steps=20, batch=8, muon_lr=0.05, adam_lr=0.02, precision=torch.float32)
    train(head, target, ids, settings=how, progress=False, on_step=lambda row: losses.append(row["loss"]))
    assert losses[-1] < 0.95 * losses[0]
    assert decoded(target, Head(head)).ids == decoded(target).ids


def test_activations_are_recorded_for_a_head(tmp_path):
    model = stateful("lfm2")
    trace = record(
        OwnCache(model),
        [[5, 6, 7], [3]],
        tmp_path,
        new_tokens=6,
        k=2,
        taps=(0, 3),
        eos_token_id=(),
        progress=False,
    )
    for i in range(2):
        text, found = [*trace.texts[i].ids], trace.activations(i)
        expected = layers_of(model, text)[[0, 3]].transpose(0, 1)
        assert len(found) == len(text) > 8
        torch.testing.assert_close(
            found[:-1], expected[:-1], rtol=1e-5, atol=1e-5 * float(expected.abs().max())
        )


@pytest.mark.slow
def test_the_output_has_the_targets_distribution_exactly(monkeypatch):
    monkeypatch.setitem(STATES, "lfm2", {**STATES["lfm2"], "vocab_size": 3})
    small = OwnCache(
        stateful("lfm2").double()
    )  # float32, in which most of these families compute, is too coarse
    head = shake(MTP.from_target(small))
    found = certify(sd.decoder(small).draft(Head(head), length=2).build(), [[2, 1]], [3])
    assert found.lossless, found
    assert found.scope.rejected


def test_a_pool_in_which_a_head_is_an_arm(hybrid, plain):
    arms = {"head": Head(shake(Eagle3.from_target(hybrid))), "ngram": sd.drafts.NGram(), "plain": None}
    made = sd.decoder(hybrid).greedy().pool(arms, sd.selectors.Random(), length=3).build()
    out = made.generate(PROMPTS, BUDGETS, seed=5, eos_token_id=())
    assert out.ids == plain[False]
    assert len(out.stats.arms) == 3


@pytest.mark.slow
def test_the_rules_of_drafts():
    target = OwnCache(stateful("lfm2").double())
    only = ["proposals", "repeats", "alone", "leaves", "joins", "coupled"]
    assert check_draft(Head(shake(MTP.from_target(target))), target, only=only)


def test_trees_are_refused(hybrid):
    head = Eagle3.from_target(hybrid)
    with pytest.raises(ValueError, match=r"takes chains only .*heads\.Chain\(\)"):
        sd.decoder(hybrid).draft(Head(head, DynamicTree(2, 2, 3)), 2).build()
    assert sd.decoder(hybrid).draft(Head(head, Chain()), 2).build()


def test_a_decoder_with_a_head_is_saved(hybrid, plain, tmp_path):
    head = shake(MTP.from_target(hybrid))
    decoder = sd.decoder(hybrid).draft(Head(head), 3).greedy().build()
    decoder.save(tmp_path / "saved")
    again = sd.load(tmp_path / "saved").build()
    assert isinstance(again.target, OwnCache)
    assert again.generate(PROMPTS, BUDGETS, eos_token_id=()).ids == plain[False]
