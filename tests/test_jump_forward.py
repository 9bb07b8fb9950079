"""Tokens that a grammar forces are proposed without a model, and the output stays the target's."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import selectors
from specdec.audit.certify import certify
from specdec.drafts import JumpForward, jump_forward
from specdec.drafts.siblings import Distinct
from specdec.executors import Optimistic, Pipelined, Serial
from specdec.grammars import Table
from specdec.verifiers import DistinctTransport, KSeq

END = 2
# After 0 comes 1, after that 3, then a choice; after 1 at the start 0 and the end are forced.
GRAMMAR = Table(
    ((1, 4, -1, -1), (-1, 2, -1, -1), (-1, -1, -1, 3), (0, 4, 0, 3), (5, -1, -1, -1), (-1, -1, 0, -1)), (END,)
)
MODEL, OTHER = sd.TableModel.random(4, 1, seed=0), sd.TableModel.random(4, 1, seed=1)


def processor(ids, scores):
    """The same language, read from the text after the prompt, which is one token."""
    state = 0
    for token in ids[0, 1:].tolist():
        state = -1 if token == END else GRAMMAR.rows[state][token]
        if state < 0:
            return scores
    return scores.masked_fill(torch.tensor(GRAMMAR.rows[state]) < 0, -torch.inf)


class Guesses(Table):
    """Says that the first token that is allowed follows, and then one that never does."""

    def forced(self, state):
        return [int(self.allowed(state).int().argmax()), 99]


DRAFTS = {
    "none": JumpForward(),
    "chain": JumpForward(OTHER),
    "short chain": JumpForward(OTHER, 1),
    "tree": JumpForward(sd.drafts.Tree(OTHER, (2, 1))),
    "lookup": JumpForward(sd.drafts.NGram()),
    "cascade": JumpForward(sd.drafts.Cascade(OTHER, sd.drafts.NGram(), 2)),
}


@pytest.mark.parametrize(
    "grammar", [GRAMMAR, Guesses(GRAMMAR.rows, GRAMMAR.end_ids)], ids=["only", "guesses"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_distribution_is_that_of_the_processor(draft, temperature, grammar):
    builder = sd.decoder(MODEL).draft(DRAFTS[draft], length=3)
    decoder = builder.sampling(grammar=grammar, temperature=temperature).build()
    plain = sd.Sampling(temperature, processors=(processor,))
    found = certify(decoder, ((3,),), 4, sampling=plain)
    assert found.total_variation < 1e-12


class TwoGuesses(Table):
    """Says after the first token that two will probably follow; where the second is rejected, the next block begins at the place at which the draft began."""

    def forced(self, state):
        return [0, 0] if state == 1 else []


ANY = TwoGuesses(((1, 1), (2, 2), (2, 2)))
BITS, SKEWED = sd.TableModel.random(2, 1, seed=0), sd.TableModel.random(2, 1, seed=1)


@pytest.mark.parametrize(
    ("draft", "verifier"),
    [
        (SKEWED, sd.BlockVerification()),
        (SKEWED, sd.Traversal()),
        (sd.drafts.Tree(SKEWED, (2, 1)), sd.Traversal()),
        (sd.drafts.Tree(SKEWED, (2,)), KSeq()),
        (sd.drafts.Tree(SKEWED, (2,), siblings=Distinct()), DistinctTransport()),
    ],
    ids=["block", "chain, traversal", "traversal", "k-seq", "distinct transport"],
)
def test_no_key_decides_twice(draft, verifier):
    """These verifiers decide about a token by what was drawn after it, so a number that is used again in the next block would bias them."""
    decoder = (
        sd.decoder(BITS).draft(JumpForward(draft), length=3).verifier(verifier).sampling(grammar=ANY).build()
    )
    found = certify(decoder, ((1,),), 5, sampling=sd.Sampling())
    assert found.total_variation < 1e-12


def test_keys_that_are_used_again_would_be_seen(monkeypatch):
    monkeypatch.setattr(jump_forward._Deeper, "rekeyed", lambda self, key: key)
    decoder = sd.decoder(BITS).draft(JumpForward(SKEWED), length=3).verifier(sd.BlockVerification())
    found = certify(decoder.sampling(grammar=ANY).build(), ((1,),), 5, sampling=sd.Sampling())
    assert found.total_variation > 1e-3


TARGET, SMALL = (sd.HFModel(tiny("llama", seed, torch.float64)) for seed in (0, 1))
V = TARGET.vocab_size
# Three tokens are forced after any of the first ten.
RUNS = Table(
    (
        tuple(1 if t < 10 else -1 for t in range(V)),
        *(tuple(n if t == 20 + n else -1 for t in range(V)) for n in (2, 3)),
        tuple(0 if t == 5 else -1 for t in range(V)),
    )
)


@pytest.mark.parametrize("executor", [Serial(), Pipelined(2), Optimistic()], ids=repr)
@pytest.mark.parametrize(
    "draft", [JumpForward(SMALL), JumpForward(sd.drafts.NGram())], ids=["model", "lookup"]
)
def test_texts_are_those_of_plain_decoding(draft, executor):
    base = sd.decoder(TARGET).verifier(sd.Coupled()).sampling(grammar=[RUNS, None, RUNS])
    prompts, budgets = [[1, 2], [3], [4, 5, 6]], [17, 9, 14]
    out = (
        base.draft(draft, length=4)
        .executor(executor)
        .build()
        .generate(prompts, budgets, seed=0, eos_token_id=())
    )
    assert out.ids == base.build().generate(prompts, budgets, seed=0, eos_token_id=()).ids


@pytest.mark.parametrize("inner", [sd.drafts.MagicDec(window=6, sinks=1), sd.drafts.Recycling()], ids=repr)
def test_a_draft_that_reads_the_target_drafts_where_little_is_forced(inner):
    """A draft whose state follows the target's sees rounds of forced tokens, too."""
    other = Table((tuple(0 if t % 3 else -1 for t in range(V)),))
    base = sd.decoder(TARGET).verifier(sd.Coupled()).sampling(grammar=[RUNS, other, RUNS], temperature=0.7)
    prompts = [[*range(1, 12)], [*range(3, 14)], [*range(5, 12)]]
    out = base.draft(JumpForward(inner), length=4).build().generate(prompts, 24, seed=0, eos_token_id=())
    assert out.ids == base.build().generate(prompts, 24, seed=0, eos_token_id=()).ids
    assert out.row_stats[0].accepted >= 15
    assert out.row_stats[1].drafted > 0


def test_a_head_drafts_no_more_than_it_can():
    """More tokens may be forced than the head has, and its own chains stay as short as they are."""
    head = sd.drafts.Head(sd.drafts.heads.Medusa.from_target(TARGET, heads=3))
    base = sd.decoder(TARGET).verifier(sd.Coupled()).sampling(grammar=[RUNS, None])
    decoder = base.draft(JumpForward(head), length=6).build()
    out = decoder.generate([[1, 2], [3, 4]], 20, seed=0, eos_token_id=())
    assert out.ids == base.build().generate([[1, 2], [3, 4]], 20, seed=0, eos_token_id=()).ids


def test_forced_tokens_cost_no_forward():
    """Rounds commit a choice and the three tokens after it: with none drafted, a token of four is free of choice."""
    base = sd.decoder(TARGET).sampling(grammar=RUNS)
    out = base.draft(JumpForward(), length=8).build().generate([[1]], 21, seed=0, eos_token_id=())
    assert out.stats.rounds == 5  # after the prefill's token, five of three forced ones and a choice
    assert out.stats.accepted == 15
    assert out.stats.drafted == 15
    short = base.draft(JumpForward(), length=2).build().generate([[1]], 21, seed=0, eos_token_id=())
    assert short.stats.rounds > 5


def test_a_draft_goes_on_after_what_is_forced():
    seen = []

    def logits(prefix):
        seen.append(len(prefix))
        return torch.zeros(V)

    draft = JumpForward(sd.drafts.chain_draft(logits), most=2)
    decoder = sd.decoder(TARGET).draft(draft, length=6).sampling(grammar=RUNS).build()
    assert len(decoder.generate([[1]], 9, seed=0, eos_token_id=()).ids[0]) == 9
    assert seen[:2] == [5, 6]  # after the prompt, the first token and three forced ones


def test_a_stream_of_grammars_and_a_pool():
    arms = {"jump": JumpForward(SMALL), "none": None}
    base = sd.decoder(TARGET).verifier(sd.Coupled())
    pooled = base.pool(arms, selectors.Random(), 4).build()
    requests = [
        sd.Request([7, n], 10, seed=n, sampling=sd.Sampling(grammar=RUNS) if n % 2 else None, eos_token_id=())
        for n in range(4)
    ]
    for one in pooled.serve(requests, 2, clock="rounds", own_sampling=True):
        alone = base.sampling(one.request.sampling or sd.Sampling()).build()
        assert one.ids == alone.generate([[7, one.index]], 10, seed=one.index, eos_token_id=()).ids[0]


def test_a_schemas_keys_are_spelled_by_the_tokenizer():
    pytest.importorskip("llguidance")
    target = sd.HFModel(*sd.zoo.load("pocket-target"))
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ada", "bob"]}, "surname": {"enum": ["lovelace", "kahn"]}},
        "required": ["name", "surname"],
        "additionalProperties": False,
    }
    grammar = sd.grammars.json_schema(schema, target.tokenizer, whitespace=False)
    base = sd.decoder(target).sampling(temperature=0.0, grammar=grammar)
    plain = base.build().generate(["x = "], max_new_tokens=60)
    jumped = base.draft(JumpForward(), length=12).build().generate(["x = "], max_new_tokens=60)
    assert jumped.ids == plain.ids
    assert set(json.loads(jumped.texts[0])) == {"name", "surname"}
    assert jumped.stats.rounds < plain.stats.rounds / 2


def test_wrong_arguments_are_refused():
    pool = sd.decoder(TARGET).pool({"one": SMALL, "none": None}, selectors.Random(), 2).build()
    with pytest.raises(ValueError, match="draft is a pool: give one of its arms"):
        JumpForward(pool.draft)
    with pytest.raises(ValueError, match="most is 0"):
        JumpForward(OTHER, 0)


def test_without_a_grammar_it_is_the_draft():
    base, draft = sd.decoder(TARGET), sd.drafts.Model(SMALL)
    out, jumped = (
        base.draft(d, length=3).build().generate([[1, 2]], 12, seed=0) for d in (draft, JumpForward(draft))
    )
    assert out.ids == jumped.ids
    assert out.stats.accepted == jumped.stats.accepted
