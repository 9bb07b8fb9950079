"""Drafts that choose their tokens without randomness propose only what the rows' grammars allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_grammars import BASE, END, GRAMMAR, PROMPTS, follows, processor
from test_translated import Known, toy
from tiny import tiny

import specdec as sd
from specdec.audit.certify import certify
from specdec.drafts import recycling, stateless
from specdec.drafts.heads import DDTree, DFlash, DynamicTree, Eagle3, Medusa, StaticTree
from specdec.drafts.translated import text
from specdec.grammars import Table
from specdec.grammars.masks import given, permitted
from specdec.types import Proposal

LOOKUPS = {
    "n-gram": sd.drafts.NGram(),
    "suffix": sd.drafts.Suffix(),
    "retrieval": sd.drafts.Retrieval(sd.drafts.Corpus(((3, 0, 0, 0, 1, 2, 3), (3, 3, 1, 1, 1))), min_match=1),
    "recycling": sd.drafts.Recycling(StaticTree.of_widths((2, 2, 1))),
}


def watched(decoder, prompts, **more):
    """Decode, and check that every proposed path is allowed. Returns the texts and how many tokens were proposed."""
    proposed = 0

    def check(round):
        nonlocal proposed
        for b, size in enumerate(round.proposal.size.tolist()):
            text = round.context.row(b)[int(round.context.prompt_length[b]) :]
            for n in range(size):
                path, node = [], n
                while node >= 0:
                    path.append(int(round.proposal.tokens[b, node]))
                    node = int(round.proposal.parents[b, node])
                assert follows(text + path[::-1], table), (text, path[::-1])
                proposed += 1

    table = decoder.sampling.grammar.grammar
    out = decoder.generate(prompts, on_round=check, **more)
    return out, proposed


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_propose_what_is_allowed(name, monkeypatch):
    prompts = [[3, 0, 0, 1, 1, 0, 2, 3], [3, 3, 0, 0, 0, 1, 3, 3]] * 4
    budget = {"max_new_tokens": 24, "seed": 1}
    built = BASE.draft(LOOKUPS[name], length=3).verifier(sd.Coupled()).sampling(grammar=GRAMMAR).build()
    out, proposed = watched(built, prompts, **budget)
    assert proposed
    assert (
        out.ids
        == BASE.verifier(sd.Coupled()).sampling(grammar=GRAMMAR).build().generate(prompts, **budget).ids
    )
    monkeypatch.setattr(recycling, "allowed_after", lambda grammar, context, b, tree, node, tokens: tokens)
    for module in (stateless, recycling):
        monkeypatch.setattr(module, "permitted", lambda grammar, context, proposal: proposal)
    with pytest.raises(AssertionError, match="\\["):  # the same draft proposes others
        watched(built, prompts, **budget)


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_left_out_biases_nothing(name, temperature):
    decoder = BASE.draft(LOOKUPS[name], length=2).sampling(grammar=GRAMMAR, temperature=temperature).build()
    found = certify(decoder, PROMPTS, 4, sampling=sd.Sampling(temperature, processors=(processor,)))
    assert found.total_variation < 1e-12


def test_a_matched_text_ends_before_what_is_forbidden(monkeypatch):
    """The draft knows a text with a letter that the grammar forbids."""
    ours, theirs = toy("abcde", [("a", "b")]), toy("edcba")
    known = Known(theirs, "abcde" * 20)
    allowed = [-1 if "e" in ours.decode([i]) else 0 for i in range(len(ours))]
    grammar = Table((tuple(allowed),), ())
    target = sd.TableModel.random(len(ours), order=1, seed=0)
    target.tokenizer = ours
    base = sd.decoder(target).verifier(sd.Coupled()).sampling(grammar=grammar)
    decoder = base.draft(sd.drafts.TextMatch(known, ours), length=5).build()
    prompts, budget = [ours.encode("ab"), ours.encode("abcdea")], {"max_new_tokens": 12, "seed": 1}
    out, proposed = watched(decoder, prompts, **budget)
    assert proposed
    assert out.ids == base.build().generate(prompts, **budget).ids
    monkeypatch.setattr(text, "permitted", lambda grammar, context, proposal: proposal)
    with pytest.raises(AssertionError, match="\\["):
        watched(decoder, prompts, **budget)


def test_recycling_takes_the_best_allowed_tokens_instead():
    """The target's most probable follower of every token is forbidden; the second best is as good a guess then."""
    V = 6
    probs = torch.full((V, V), 0.02)
    for token in range(V):
        probs[token, 0], probs[token, 1 + token % (V - 1)] = 0.6, 0.3
    target = sd.TableModel(probs / probs.sum(1, keepdim=True))
    grammar = Table(((-1, *[0] * (V - 1)),), ())
    chain = sd.drafts.Recycling(StaticTree.of_widths((1,) * 4))
    decoder = sd.decoder(target).greedy().sampling(grammar=grammar).draft(chain, length=4).build()
    out, _ = watched(decoder, [[0, 1], [2]], max_new_tokens=60, eos_token_id=())
    assert out.stats.tau > 3.5
    assert (
        out.ids
        == sd.decoder(target)
        .greedy()
        .sampling(grammar=grammar)
        .generate([[0, 1], [2]], 60, eos_token_id=())
        .ids
    )
    free = replace(chain, grammar=None)
    rows = sd.decoder(target).greedy().sampling(grammar=[grammar, None]).draft(free, length=4).build()
    made = rows.generate([[0, 1], [0, 1]], 60, eos_token_id=())
    alone = sd.decoder(target).greedy().draft(free, length=4).generate([[0, 1]], 60, eos_token_id=())
    assert (made.ids[1], made.row_stats[1]) == (alone.ids[0], alone.row_stats[0])


def test_recycling_remembers_what_was_allowed_elsewhere():
    """After one token, two others take turns: each is forbidden where the other one is not."""
    target = sd.TableModel(torch.tensor([[0.1, 0.5, 0.4], [0.8, 0.1, 0.1], [0.8, 0.1, 0.1]]))
    turns = Table(((-1, 1, -1), (2, -1, -1), (-1, -1, 3), (0, -1, -1)), ())
    chain = sd.drafts.Recycling(StaticTree.of_widths((1,) * 4))
    decoder = sd.decoder(target).greedy().sampling(grammar=turns).draft(chain, length=4).build()
    out, _ = watched(decoder, [[0]], max_new_tokens=80, eos_token_id=())
    assert out.ids[0][:8] == [1, 0, 2, 0] * 2
    assert out.stats.tau > 4


HEADS = {
    "dynamic": (Eagle3, {}, DynamicTree(3, 3, 8)),
    "static": (Medusa, {"blocks": 3}, StaticTree.of_widths((3, 2, 1))),
    "ddtree": (DFlash, {"block_size": 4}, DDTree(8)),
}


def alternating(vocab_size, end):
    """Even and odd tokens in turn; the end after any odd one."""
    even = [1 if token % 2 == 0 and token != end else -1 for token in range(vocab_size)]
    odd = [0 if token % 2 or token == end else -1 for token in range(vocab_size)]
    return Table((tuple(even), tuple(odd)), (end,))


@pytest.mark.parametrize("name", HEADS)
def test_trees_of_heads_have_allowed_tokens(name):
    kind, settings, tree = HEADS[name]
    target = sd.HFModel(tiny("llama").to(torch.float64))
    head = kind.from_target(target.model, **settings)
    grammar = alternating(target.vocab_size, 0)
    base = sd.decoder(target).greedy().sampling(grammar=grammar)
    decoder = base.draft(sd.drafts.Head(head, tree), length=3).build()
    prompts = [[1, 2, 3, 4, 5], [7, 6, 5]]
    sizes = []
    free = base.draft(sd.drafts.Head(head, tree), length=3).sampling(grammar=None, temperature=0.0).build()
    free.generate(prompts, 16, eos_token_id=(), on_round=lambda r: sizes.append(int(r.proposal.size.max())))
    out, proposed = watched(decoder, prompts, max_new_tokens=16, eos_token_id=())
    assert proposed > 2 * out.stats.rounds  # the first level has as many tokens as without a grammar
    found, roots = [], []

    def look(round):
        found.append(int(round.proposal.size.max()))
        for b, size in enumerate(round.proposal.size.tolist()):
            roots.append(round.proposal.parents[b, :size].tolist().count(-1))

    decoder.generate(prompts, 16, eos_token_id=(), on_round=look)
    assert sum(n >= 2 for n in roots) > len(roots) / 2  # other tokens take the places of forbidden ones
    if name == "dynamic":
        assert max(found) == max(sizes) == 8
        assert sum(n == 8 for n in found) > len(found) / 2
    assert out.ids == base.build().generate(prompts, 16, eos_token_id=()).ids


def test_a_reduced_vocabulary_that_has_nothing_allowed_proposes_nothing():
    target = sd.HFModel(tiny("llama").to(torch.float64))
    head = Eagle3.from_target(target.model, vocabulary=[1, 3, 5, 7, 9])
    base = sd.decoder(target).greedy().sampling(grammar=alternating(target.vocab_size, 0))
    decoder = base.draft(sd.drafts.Head(head, DynamicTree(2, 2, 4)), length=2).build()
    sizes = {}

    def look(round):
        done = int(round.context.length[0] - round.context.prompt_length[0])
        if not bool(round.truncated[0]):
            sizes.setdefault(done % 2, set()).add(int(round.proposal.size[0]))

    out = decoder.generate([[1, 2, 3]], 12, eos_token_id=(), on_round=look)
    assert sizes[0] == {0}  # an even token is next, and the head has none
    assert min(sizes[1]) > 0
    assert out.ids == base.build().generate([[1, 2, 3]], 12, eos_token_id=()).ids


def test_nodes_are_kept_with_their_parents():
    tokens = torch.tensor([[0, 3, 0, 1, 1, END], [1, 1, 0, 2, 0, 0]])
    parents = torch.tensor([[-1, -1, 0, 2, 1, 3], [-1, 0, 0, 2, 3, -1]])
    tree = Proposal(tokens, parents, torch.tensor([6, 3]))
    context = sd.Context.of([[3], [3, 3]], 20)
    made = permitted(given(GRAMMAR), context, tree)
    for b in range(2):
        kept = [path(made, b, n) for n in range(int(made.size[b]))]
        assert kept == [p for n in range(int(tree.size[b])) if follows(p := path(tree, b, n))]
    assert permitted(None, context, tree) is tree
    assert permitted(given((None, None)), context, tree) is tree


def path(proposal, b, n):
    out = []
    while n >= 0:
        out.append(int(proposal.tokens[b, n]))
        n = int(proposal.parents[b, n])
    return out[::-1]


class Broken(Table):
    """A grammar that raises after token 1."""

    def advance(self, state, token):
        if token == 1:
            raise RuntimeError("broken")
        return super().advance(state, token)


def test_where_a_grammar_raises_nothing_is_proposed():
    broken = Broken(GRAMMAR.rows, GRAMMAR.end_ids)
    chain = Proposal.chain(torch.tensor([[0, 0, 1, 1]]), torch.tensor([4]))
    made = permitted(given(broken), sd.Context.of([[3]], 20), chain)
    assert made.size.tolist() == [2]


class Fragile(Table):
    """A grammar that raises after tokens which no text has."""

    texts = range(10**6)

    def advance(self, state, token):
        if token not in self.texts:
            raise RuntimeError("broken")
        return super().advance(state, token)


@pytest.mark.parametrize("name", HEADS)
def test_what_fails_after_tokens_that_only_a_draft_tries_ends_no_run(name):
    kind, settings, tree = HEADS[name]
    target = sd.HFModel(tiny("llama").to(torch.float64))
    head = sd.drafts.Head(kind.from_target(target.model, **settings), tree)
    grammar = alternating(target.vocab_size, 0)
    base, prompts = sd.decoder(target).greedy(), [[1, 2, 3, 4, 5], [7, 6, 5]]
    plain = base.sampling(grammar=grammar, temperature=0.0).build().generate(prompts, 16, eos_token_id=()).ids
    fragile = Fragile(grammar.rows, grammar.end_ids)
    made = base.sampling(grammar=fragile, temperature=0.0).draft(head, length=3).build()
    object.__setattr__(fragile, "texts", {token for ids in plain for token in ids})
    assert made.generate(prompts, 16, eos_token_id=()).ids == plain

    def follow(ids, scores):
        """The same language, for prompts of known lengths; a text outside of it is an error."""
        text = ids[0].tolist()
        text = text[5:] if text[:5] == prompts[0] else text[3:]
        state = 0
        for token in text:
            state = {-1: None}.get(grammar.rows[state][token], grammar.rows[state][token])
            assert state is not None, "a token that is forbidden"
        return scores.masked_fill(torch.tensor(grammar.rows[state]) < 0, -torch.inf)

    made = base.sampling(processors=(follow,), temperature=0.0).draft(head, length=3).build()
    assert made.generate(prompts, 16, eos_token_id=()).ids == plain
