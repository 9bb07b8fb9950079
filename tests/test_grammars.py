"""Grammars: the distribution is the target's, masked and renormalised token by token, whatever drafts, verifies and executes."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import lab, selectors
from specdec.audit.certify import certify, certify_coupled
from specdec.drafts.stateless import Stateless
from specdec.executors import Ahead, Optimistic, Pipelined, Serial
from specdec.grammars import Table
from specdec.grammars.tracker import bits, tracked, unpacked
from specdec.pruning.vocabulary import keep_tokens
from specdec.verifiers import Synthetic

END = 2
# Tokens 0 and 1 in turn with runs of at most two, the end after an even number of runs; token 3 begins prompts and is never generated.
ROWS = ((1, 3, -1, -1), (2, 3, -1, -1), (-1, 3, -1, -1), (1, 4, 0, -1), (1, -1, 0, -1))
GRAMMAR = Table(ROWS, (END,))
MODEL, OTHER = sd.TableModel.random(4, 1, seed=0), sd.TableModel.random(4, 1, seed=1)
BASE = sd.decoder(MODEL)
CHAIN, TREE = sd.drafts.Model(OTHER), sd.drafts.Tree(OTHER, (2, 1))
PROMPTS = ((3,), (3, 3, 3))


def processor(ids, scores):
    """The same language as a stateless processor: it reads the whole text after the prompt."""
    text = ids[0].tolist()
    state = 0
    for token in text[len(text) - text[::-1].index(3) :]:
        state = -1 if token == END else ROWS[state][token]
        if state < 0:
            return scores
    return scores.masked_fill(torch.tensor(ROWS[state]) < 0, -torch.inf)


def follows(ids, grammar=GRAMMAR):
    """Whether ids are a text of a table's language, or begin one."""
    state = 0
    for n, token in enumerate(ids):
        if grammar.rows[state][token] < 0:
            return False
        if token in grammar.end_ids:
            return n == len(ids) - 1
        state = grammar.rows[state][token]
    return True


class Counting:
    """A grammar that counts how often it is asked to advance."""

    broken = False

    def __init__(self, grammar=GRAMMAR):
        self.grammar, self.end_ids, self.count = grammar, grammar.end_ids, 0

    def start(self):
        return self.grammar.start()

    def advance(self, state, token):
        self.count += 1
        assert self.grammar.allowed(state)[token]
        assert token not in self.end_ids
        if self.broken:
            raise RuntimeError("broken")
        return self.grammar.advance(state, token)

    def allowed(self, state):
        return self.grammar.allowed(state)


# -- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("draft", "verifier"),
    [
        (CHAIN, sd.Rejection()),
        (TREE, sd.Rejection()),
        (TREE, sd.Traversal()),
        (CHAIN, sd.BlockVerification()),
        (sd.drafts.Cascade(OTHER, sd.drafts.NGram(), 2), sd.Rejection()),
        (sd.drafts.Model(OTHER, sd.Sampling(0.5)), sd.Rejection()),
        (sd.drafts.NGram(), sd.Rejection()),
    ],
    ids=["chain", "tree", "traversal", "block", "cascade", "own temperature", "lookup"],
)
def test_the_distribution_is_that_of_the_processor(draft, verifier, temperature):
    builder = BASE.draft(draft, length=2).verifier(verifier)
    decoder = builder.sampling(grammar=GRAMMAR, temperature=temperature).build()
    plain = sd.Sampling(temperature, processors=(processor,))
    found = certify(decoder, PROMPTS, 4, sampling=plain)
    assert found.total_variation < 1e-12
    assert all(follows(ids) for one in found.distribution for ids in one)


def test_every_tree_is_verified_under_a_grammar():
    decoder = BASE.verifier(sd.Coupled()).sampling(grammar=GRAMMAR).build()
    assert certify_coupled(decoder, ((3,),), 3, nodes=2, eos_token_id=(END,)).lossless


@pytest.mark.parametrize(
    "settings", [{"top_k": 2}, {"temperature": (0.0, 1.0, 0.6)}, {"top_p": 0.8}], ids=str
)
def test_texts_are_those_of_the_processor(settings):
    base = BASE.draft(TREE, length=2).sampling(**settings)
    prompts = [[3], [3, 3], [3]]
    one = base.sampling(grammar=GRAMMAR).build().generate(prompts, 30, seed=0, eos_token_id=(END,))
    other = base.sampling(processors=(processor,)).build().generate(prompts, 30, seed=0, eos_token_id=(END,))
    assert one.ids == other.ids
    assert one.finish == other.finish


def test_a_grammar_is_applied_after_processors_and_before_the_temperature():
    def resurrects(ids, scores):
        return torch.zeros_like(scores)

    logits = torch.tensor([[[0.0, 1.0, 5.0, 9.0]]])
    context = sd.Context.of([[3]])
    probs = sd.Sampling(0.5, processors=(resurrects,), grammar=GRAMMAR)(logits, context)
    assert probs[0, 0].tolist() == [0.5, 0.5, 0, 0]
    alone = sd.Sampling(0.5, grammar=GRAMMAR)(logits, context)[0, 0]
    torch.testing.assert_close(alone, torch.tensor([0.0, 2.0, -torch.inf, -torch.inf]).softmax(-1))
    assert sd.Sampling(0, grammar=GRAMMAR).argmax(logits, context).item() == 1


# -- every part -------------------------------------------------------------------------------------------------------

TARGET = sd.HFModel(tiny("llama", 0, torch.float64))
SMALL = sd.HFModel(tiny("llama", 1, torch.float64))
V = TARGET.vocab_size
WIDE = Table(
    tuple(tuple((s * 7 + t) % 5 if (s * 3 + t) % 4 == 0 else -1 for t in range(V)) for s in range(5)), (8,)
)
ARMS = {"model": sd.drafts.Model(SMALL), "n-gram": sd.drafts.NGram(), "none": None}
DRAFTS = {
    "chain": sd.drafts.Model(SMALL),
    "tree": sd.drafts.Tree(SMALL, (3, 2)),
    "lookup": sd.drafts.NGram(),
    "cascade": sd.drafts.Cascade(SMALL, sd.drafts.NGram(), 2),
    "few tokens": sd.models.TrimmedModel(keep_tokens(tiny("llama", 1, torch.float64), range(1, 4))),
}


def plain_ids(prompts, budgets, seeds, grammar=WIDE, **settings):
    decoder = sd.decoder(TARGET).verifier(sd.Coupled()).sampling(grammar=grammar, **settings).build()
    return decoder.generate(prompts, budgets, seed=seeds, eos_token_id=()).ids


EXECUTED = [(d, e) for d in DRAFTS for e in (Serial(), Pipelined(2), Optimistic())]
EXECUTED.remove(("tree", Optimistic()))  # takes chains only


@pytest.mark.parametrize(("draft", "executor"), EXECUTED, ids=lambda one: one if one in DRAFTS else repr(one))
def test_coupled_texts_are_those_of_plain_decoding(draft, executor):
    prompts, budgets, seeds = [[1, 2], [3], [4, 5, 6]], [14, 5, 11], [0, 1, 2]
    builder = sd.decoder(TARGET).draft(DRAFTS[draft], 3).verifier(sd.Coupled()).sampling(grammar=WIDE)
    out = builder.executor(executor).build().generate(prompts, budgets, seed=seeds, eos_token_id=())
    assert out.ids == plain_ids(prompts, budgets, seeds)
    assert all(follows(ids, WIDE) for ids in out.ids)


def test_a_pool_and_requests_with_grammars_of_their_own():
    other = Table((tuple(0 if t in (5, 6) else -1 for t in range(V)),))
    grammars, prompts = [WIDE, None, other, WIDE], [[1, 2], [3], [4, 5, 6], [7]]
    base = sd.decoder(TARGET).verifier(sd.Coupled()).pool(ARMS, selectors.Random(), 3)
    decoder = base.sampling(grammar=grammars, temperature=[1, 0.5, 0, 2]).build()
    out = decoder.generate(prompts, 12, seed=[0, 1, 2, 3], batch_size=2, eos_token_id=())
    for b, temperature in enumerate((1, 0.5, 0, 2)):
        assert [out.ids[b]] == plain_ids([prompts[b]], 12, [b], grammars[b], temperature=temperature)
    assert set(out.ids[2]) <= {5, 6}


@pytest.mark.parametrize("draft", ["model", "tree"])
def test_captured_steps_leave_sampling_to_the_host(draft):
    target, small = (sd.HFModel(tiny("llama", seed), graphs="eager") for seed in (0, 1))
    part = sd.drafts.Model(small) if draft == "model" else sd.drafts.Tree(small, (2, 2))
    proposed = []
    builder = sd.decoder(target).draft(part, 3).sampling(grammar=WIDE)
    out = builder.build().generate([[1, 2], [3]], 9, seed=0, eos_token_id=(), on_round=proposed.append)
    assert all(follows(ids, WIDE) for ids in out.ids)
    for round in proposed:
        for b in range(round.context.batch):
            text = round.context.row(b)[int(round.context.prompt_length[b]) :]
            chain = round.proposal.tokens[
                b, : int(round.proposal.size[b]) if draft == "model" else 1
            ].tolist()
            chain = chain[: chain.index(8) + 1] if 8 in chain else chain  # anything may follow an end
            assert follows(text + chain, WIDE)
    with pytest.raises(ValueError, match="without processors or a grammar"):
        sd.decoder(target).draft(sd.drafts.Model(small), 3).sampling(grammar=WIDE).executor(Ahead()).build()


def test_a_draft_with_its_own_sampling_takes_the_decoders_grammar():
    own = sd.drafts.Model(OTHER, sd.Sampling(0.5))
    mine = tracked(GRAMMAR)
    assert BASE.draft(own).sampling(grammar=GRAMMAR).build().draft.sampling == sd.Sampling(0.5, grammar=mine)
    assert BASE.draft(own).build().draft.sampling.grammar is None
    theirs = sd.Sampling(grammar=Table(((0, 0, 0, 0),)))
    kept = BASE.draft(sd.drafts.Model(OTHER, theirs)).sampling(grammar=GRAMMAR).build()
    assert kept.draft.sampling is theirs
    plain = BASE.sampling(grammar=GRAMMAR).build()
    assert plain.with_sampling(sd.Sampling()).sampling.grammar is None


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [CHAIN, TREE, sd.drafts.NGram()], ids=["chain", "tree", "lookup"])
def test_no_token_is_read_twice(draft):
    grammar = Counting()
    decoder = BASE.draft(draft, length=2).sampling(grammar=grammar).build()
    nodes, grammar.count = [0], 0
    out = decoder.generate(
        [[3], [3, 3]],
        200,
        seed=0,
        eos_token_id=(),
        on_round=lambda r: nodes.append(int(r.proposal.size.sum())),
    )
    assert 0 < grammar.count <= sum(nodes) + sum(map(len, out.ids))


def test_rows_that_leave_and_threads_that_share_a_decoder():
    grammar = Counting(WIDE)
    decoder = sd.decoder(TARGET).draft(SMALL, 3).verifier(sd.Coupled()).sampling(grammar=grammar).build()
    prompts, budgets, found = [[1, 2], [3], [4, 5, 6]], [18, 3, 9], {}

    def run(seed):
        rows = [prompts[seed % 3], *prompts]
        found[seed] = rows, decoder.generate(rows, [9, *budgets], seed=[seed] * 4, eos_token_id=()).ids

    threads = [Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, (rows, ids) in found.items():
        assert ids == plain_ids(rows, [9, *budgets], [seed] * 4)


def test_a_text_that_is_taken_back_is_found_again():
    grammar = Counting(Table(((0, 0),)))
    tracker = tracked(grammar)
    text, no_tree = np.arange(100) % 2, ((), ())
    masks = tracker.masks(0, text, no_tree, -1, 1)
    assert [r for r, _ in masks] == [0]
    assert grammar.count == 100
    for shorter in (95, 90, 96):
        tracker.masks(0, text[:shorter], no_tree, -1, 1)
    assert grammar.count == 100
    other = text.copy()
    other[92:] = 1 - other[92:]
    tracker.masks(0, other, no_tree, -1, 1)
    assert grammar.count == 108
    tracker.masks(0, text, no_tree, -1, 1)  # both go on
    tracker.masks(0, other, no_tree, -1, 1)
    assert grammar.count == 108
    tracker.masks(1, text, no_tree, -1, 1)
    assert grammar.count == 208
    grammar.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        tracker.masks(0, np.append(text, [0, 1]), no_tree, -1, 1)
    grammar.broken = False
    tracker.masks(0, text, no_tree, -1, 1)
    assert grammar.count == 209
    for request in range(500):
        tracker.masks(request, text[:1], no_tree, -1, 1)
        tracker.reserve(1)
    assert len(tracker._trails) == 64


def test_bits_are_read_as_masks_are():
    mask = torch.rand(77) < 0.5
    words = torch.zeros(96, dtype=torch.long)
    words[:77] = mask.long()
    packed = (words.view(3, 32) << torch.arange(32)).sum(1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    for given in (mask, packed):
        for size in (77, 90, 50):
            wanted = torch.nn.functional.pad(mask, (0, max(size - 77, 0)))[:size]
            assert unpacked(bits(given)[None], size)[0].tolist() == (~wanted).tolist()


# -- ends, and what is refused ----------------------------------------------------------------------------------------


def test_a_row_ends_where_its_grammar_does():
    twice = Table(((1, 1, -1, -1), (2, 2, -1, -1), (-1, -1, 0, -1)), (END,))
    for settings in ({"grammar": twice}, {"grammar": [twice, None, twice]}):
        decoder = BASE.draft(CHAIN, length=3).sampling(**settings).build()
        out = decoder.generate([[3], [3], [3]], 9, seed=0, eos_token_id=())
        assert [len(out.ids[0]), out.ids[0][-1], out.finish[0]] == [3, END, "eos"]
        assert out.finish[1] == ("length" if isinstance(settings["grammar"], list) else "eos")
        assert len(list(decoder.stream([[3]] * 3, 9, seed=0, eos_token_id=()))) > 2


@pytest.mark.parametrize("draft", [None, CHAIN, sd.drafts.NGram()], ids=["plain", "chain", "lookup"])
def test_a_grammar_that_leaves_no_token_is_refused_where_the_text_gets_there(draft):
    stuck = Table(((1, 1, -1, -1), (2, 2, -1, -1), (-1, -1, -1, -1)))
    builder = BASE.sampling(grammar=stuck)
    decoder = (builder if draft is None else builder.draft(draft, 3)).build()
    assert len(decoder.generate([[3], [3]], 2, seed=0).ids[1]) == 2
    with pytest.raises(
        ValueError, match=r"row 0 \(request 0\), position 4 of the text, 2 after the prompt.*no end_ids"
    ):
        decoder.generate([[3, 3]], 9, seed=0)


class Threes(Stateless):
    """Proposes a token that the grammar never allows."""

    def propose(self, state, context, budget, rng):
        return sd.Proposal.chain(torch.full((context.batch, 1), 3), budget.clamp(max=1)), None


def test_a_lossy_verifier_may_not_accept_what_is_forbidden():
    decoder = BASE.draft(Threes(), 2).verifier(Synthetic(1.0)).sampling(grammar=GRAMMAR).build()
    with pytest.raises(ValueError, match=r"is not allowed by grammar Table.*use one that is lossless"):
        decoder.generate([[3, 3, 3, 0, 3, 3, 3, 0]], 20, seed=0)


class InPlace(Counting):
    """Changes the state that it is given, as a matcher does."""

    def start(self):
        return [0]

    def advance(self, state, token):
        state[0] = self.grammar.advance(state[0], token)
        return state

    def allowed(self, state):
        return self.grammar.allowed(state[0])


def test_what_is_no_grammar_is_refused():
    with pytest.raises(ValueError, match=r"advance.*changes the state that it is given"):
        BASE.sampling(grammar=InPlace()).build()
    for wrong in (processor, "json", Table, 3):
        with pytest.raises(TypeError, match="grammar is a"):
            BASE.sampling(grammar=wrong)
    with pytest.raises(ValueError, match="grammar is empty"):
        BASE.sampling(grammar=[])
    with pytest.raises(ValueError, match="allows none of the target's 4 tokens at the start"):
        BASE.sampling(grammar=Table(((-1, -1, -1, -1, 0),))).build()
    with pytest.raises(ValueError, match="end_ids of the grammar has 7"):
        BASE.sampling(grammar=Table(((0, 0, 0, 0),), (7,))).build()
    with pytest.raises(ValueError, match=r"rows.*is 5: give a state"):
        Table(((5, 0),))

    class Floats(Counting):
        def allowed(self, state):
            return torch.ones(4)

    with pytest.raises(TypeError, match=r"allowed.. of the grammar returned .4. in torch.float32"):
        BASE.sampling(grammar=Floats()).build()
    few = BASE.sampling(grammar=[GRAMMAR, GRAMMAR]).build()
    with pytest.raises(ValueError, match="grammar has 2 entries and there are 3 prompts"):
        few.generate([[3]] * 3, 4)
    with pytest.raises(ValueError, match="grammar has 2 entries and there is a request 2"):
        few.sampling(torch.zeros(3, 1, 4), sd.Context.of([[3]] * 3))
    with pytest.raises(TypeError, match=r"no setting 'guided_json': give \.sampling\(grammar=sd\.grammars"):
        BASE.sampling(guided_json="{}")
    with pytest.raises(ValueError, match="a trace does not store"):
        lab.record(MODEL, [[3]], "nowhere", 4, 2, sampling=sd.Sampling(grammar=GRAMMAR))


# -- other callers ----------------------------------------------------------------------------------------------------


def test_log_probabilities_under_a_grammar():
    decoder = BASE.sampling(grammar=GRAMMAR, temperature=0.8).build()
    with_processor = BASE.sampling(processors=(processor,), temperature=0.8).build()
    texts = ([[3], [3, 3]], [[0, 1, 1, END], [0, 1, 0, 0, 0, 1]])  # the second has a run of three
    for chunk in (1, 2, 256):
        found, wanted = (sd.log_probs(d, texts, sampled=True, chunk=chunk) for d in (decoder, with_processor))
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other)
        assert found[1][4] == -torch.inf
        assert found[0].isfinite().all()
    torch.testing.assert_close(sd.log_probs(decoder, texts)[0], sd.log_probs(BASE, texts)[0])


def test_a_table_is_saved_and_a_users_grammar_is_named(tmp_path):
    decoder = sd.decoder(sd.HFModel(tiny("llama", 0))).sampling(grammar=[WIDE, None], top_k=3).build()
    decoder.save(tmp_path / "d")
    loaded = sd.load(tmp_path / "d").build()
    assert loaded.sampling == decoder.sampling
    out = [d.generate([[1], [2]], 5, seed=0).ids for d in (decoder, loaded)]
    assert out[0] == out[1]
    mine = sd.decoder(sd.HFModel(tiny("llama", 0))).sampling(grammar=Counting(WIDE)).build()
    with pytest.raises(TypeError, match=r"sampling.grammar.* cannot name"):
        mine.save(tmp_path / "e")


def test_transformers_generate_uses_the_decoders_grammar():
    model = tiny("llama", 0, torch.float64)
    decoder = sd.decoder(model).draft(SMALL, 3).greedy().sampling(grammar=WIDE).build()
    ids = model.generate(
        torch.tensor([[1, 2]]), max_new_tokens=6, custom_generate=decoder, pad_token_id=0, do_sample=False
    )
    assert ids[0, 2:].tolist() == plain_ids([[1, 2]], 6, [0], temperature=0.0)[0]
    assert follows(ids[0, 2:].tolist(), WIDE)


@dataclass(frozen=True)
class OwnScores(sd.Sampling):
    def scores(self, logits, context, proposal, first=-1):
        scores = super().scores(logits, context, proposal, first).clone()
        scores[..., 0] = -torch.inf
        return scores


def test_a_subclass_of_sampling_keeps_the_grammar():
    decoder = BASE.draft(CHAIN, 2).sampling(OwnScores(grammar=Table(((0, 0, -1, -1),)))).build()
    assert set(decoder.generate([[3]], 12, seed=0).ids[0]) == {1}


@pytest.mark.parametrize("draft", ["chain", "tree"])
def test_a_node_of_which_processors_leave_nothing_ends_no_text(draft):
    """The grammar wants 3 after a 2, a processor bans 3, and the draft likes 2, which the target never takes."""
    likes = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 4), torch.tensor([[0.0, 0.1, 0.9, 0.0]] * 4)
    target, small = (sd.models.TableModel((p * 0.96 + 0.01).double()) for p in likes)
    grammar = Table(((0, 0, 1, 0), (-1, -1, -1, 0)))

    def ban(ids, scores):
        scores[:, 3] = -torch.inf
        return scores

    part = sd.drafts.Model(small) if draft == "chain" else sd.drafts.Tree(small, (2, 1, 1))
    base = sd.decoder(target).sampling(temperature=0.0, processors=(ban,), grammar=grammar)
    plain = base.build().generate([[0], [1, 0]], 6).ids
    assert plain == [[1] * 6] * 2
    assert base.draft(part, 3).build().generate([[0], [1, 0]], 6).ids == plain
