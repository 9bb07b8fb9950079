"""Log-probabilities of generated tokens: those of the model's own forward, for every target, row, chunk and sampling."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import byte_tokenizer, tiny
from tiny_states import stateful

import specdec as sd
from specdec import likelihood
from specdec.drafts.translated.model import Translated
from specdec.executors import Ahead, Optimistic, Pipelined
from specdec.grammars import Table
from specdec.models import Masked, OwnCache, Windowed
from specdec.types import Scores

PROMPTS, BUDGETS = [[1, 2, 3], [4] * 20, [7, 8]], [30, 12, 41]
TABLE = sd.TableModel.random(5, 2, seed=3, zeros=0.2)


def model_of(family="llama", **changes):
    model = tiny(family, **changes)
    model.set_attn_implementation("sdpa")  # transformers' eager attention takes its softmax in float32
    return model


@pytest.fixture(scope="module")
def llama():
    return model_of()


@pytest.fixture(scope="module")
def written(llama):
    return sd.decoder(llama).generate(PROMPTS, BUDGETS, seed=0)


def own(model, prompt, ids):
    """``[n, V]`` by transformers' own forward, without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def of(scores, ids):
    return scores.gather(1, torch.tensor(ids)[:, None])[:, 0]


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk", [256, 7, 1])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "mpt"])
def test_they_are_those_of_transformers_own_forward(family, chunk):
    model = tiny(family) if family == "mpt" else model_of(family)
    decoder = sd.decoder(model).draft(sd.drafts.NGram(), length=3)
    out = decoder.generate(PROMPTS, BUDGETS, seed=0)
    found = sd.log_probs(decoder, out, chunk=chunk, top=4)
    for b, (prompt, ids) in enumerate(zip(PROMPTS, out.ids)):
        scores = own(model, prompt, ids)
        close(found[b], of(scores, ids), 2e-6 if family == "mpt" else 1e-9)
        assert found[b].dtype == torch.float64
        assert len(found[b]) == BUDGETS[b]
        assert torch.equal(found.top_ids[b], scores.topk(4).indices)
        close(found.top_values[b], scores.topk(4).values, 2e-6 if family == "mpt" else 1e-9)
        assert torch.equal(found.top_values[b][:, 0] == found[b], found.top_ids[b][:, 0] == torch.tensor(ids))
    close(found.totals, torch.stack([row.sum() for row in found]))
    assert repr(found).startswith("LogProbs(3 rows, 83 tokens, mean -")


@pytest.mark.parametrize("options", [{"page": 8}, {"graphs": "recorded"}, {"prefill_chunk": 4}])
def test_the_way_the_target_runs_does_not_matter(llama, written, options):
    expected = sd.log_probs(sd.decoder(llama), written)
    decoder = sd.decoder(sd.HFModel(llama, **options))
    for chunk in (5, 5, 256):  # steps are captured when a shape occurs again
        for found, same in zip(sd.log_probs(decoder, written, chunk=chunk), expected, strict=True):
            close(found, same)


def test_who_wrote_the_text_does_not_matter(llama, written):
    greedy = sd.decoder(llama).greedy()
    plain = greedy.generate(PROMPTS, 16)
    expected = sd.log_probs(greedy, plain)
    small = tiny("llama", seed=1)
    for other in (
        greedy.draft(small, length=3).verifier(sd.Coupled()),
        greedy.draft(small, length=3).executor(Optimistic()),
        greedy.draft(small, length=2).executor(Pipelined(micro_batches=2)),
        sd.decoder(sd.HFModel(llama, graphs="recorded"))
        .greedy()
        .draft(sd.HFModel(small, graphs="recorded"), length=2)
        .executor(Ahead()),
    ):
        for found, same in zip(sd.log_probs(other, other.generate(PROMPTS, 16)), expected, strict=True):
            close(found, same)
    assert greedy.generate(PROMPTS, 16).ids == plain.ids
    reference = sd.log_probs(sd.decoder(small), written)  # another model's, of the same texts
    close(reference[0], of(own(model_of(seed=1), PROMPTS[0], written.ids[0]), written.ids[0]))


def test_recurrent_windowed_and_masked_targets(llama):
    model = stateful("mamba2")
    out = sd.decoder(OwnCache(model)).generate(PROMPTS, BUDGETS, seed=1)
    for chunk in (256, 9):
        found = sd.log_probs(sd.decoder(OwnCache(model)), out, chunk=chunk)
        for b, (prompt, ids) in enumerate(zip(PROMPTS, out.ids)):
            close(found[b], of(own(model, prompt, ids), ids), 2e-5)
    ring = sd.decoder(Windowed(sd.HFModel(llama), window=6, sinks=2, block=3))
    dense = sd.decoder(Masked(sd.HFModel(llama), sd.masks.streaming(6, 2), storage="dense"))
    out = ring.generate(PROMPTS, BUDGETS, seed=1)
    assert sd.ModelInfo.of(ring.build().target).longest_chain == 3
    assert sd.ModelInfo.of(dense.build().target).longest_chain is None
    for found, same in zip(sd.log_probs(ring, out), sd.log_probs(dense, out), strict=True):
        close(found, same)
    assert float((sd.log_probs(ring, out)[2] - sd.log_probs(sd.decoder(llama), out)[2]).abs().max()) > 0.01


def test_a_model_of_another_tokenizer_says_how_long_its_chains_are(llama):
    own = sd.HFModel(llama, byte_tokenizer())
    wrapped = Translated(own, byte_tokenizer())
    assert sd.ModelInfo.of(wrapped).longest_chain == wrapped.block
    assert sd.ModelInfo.of(Translated(Windowed(own, block=3), byte_tokenizer())).longest_chain == 3


def test_a_table_by_hand():
    prompts, ids = [[2], [0, 1, 3]], [[1, 4, 0, 0, 2], [3]]
    found = sd.log_probs(sd.decoder(TABLE), (prompts, ids))
    for b, (prompt, tokens) in enumerate(zip(prompts, ids)):
        text = list(prompt)
        for n, token in enumerate(tokens):
            expected = float(TABLE.distribution(text)[token])
            assert math.isclose(float(found[b][n].exp()), expected, rel_tol=1e-12)
            text.append(token)
    texts = [list(text) for text in itertools.product(range(5), repeat=3)]
    every = sd.log_probs(sd.decoder(TABLE).greedy(), ([[1, 2]] * len(texts), texts), batch_size=40)
    close(every.totals.exp().view(5, 5, 5), TABLE.joint([1, 2], 3), 1e-14)
    close(every.totals.exp().sum(), torch.tensor(1.0, dtype=torch.float64), 1e-14)
    assert bool((every.totals == -math.inf).any())  # a table with zeros


def test_tiny_probabilities_are_not_zero():
    rare = sd.TableModel(torch.tensor([1 - 1e-60, 1e-60], dtype=torch.float64), dtype=torch.float32)
    found = sd.log_probs(sd.decoder(rare), ([[0]], [[0, 1]]), top=2)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], torch.tensor([0, -60 * math.log(10)]))
    torch.testing.assert_close(found.top_values[0][1], torch.tensor([0, -60 * math.log(10)]))


def test_a_rare_token_that_was_sampled_keeps_its_number():
    """The logarithm of a softmax in float32 would be -inf; rows of temperature 0 are mixed in."""
    rare = sd.TableModel(torch.tensor([1 - 1e-13, 1e-13], dtype=torch.float64), dtype=torch.float32)
    cold = sd.decoder(rare).sampling(temperature=0.25).build()
    wanted = torch.tensor([0, -13 * math.log(10) / 0.25])
    torch.testing.assert_close(sd.log_probs(cold, ([[0]], [[0, 1]]), sampled=True)[0], wanted)
    mixed = sd.decoder(rare).sampling(temperature=[0.25, 0.0]).build()
    found = sd.log_probs(mixed, ([[0], [0]], [[0, 1], [0, 1]]), sampled=True)
    torch.testing.assert_close(found[0], wanted)
    assert found[1].tolist() == [0, -math.inf]


def test_a_batch_has_what_each_row_has_alone(llama, written):
    decoder = sd.decoder(llama).build()
    together = sd.log_probs(decoder, written, top=2)
    for size in (1, 2, 9):
        for one, other in zip(sd.log_probs(decoder, written, batch_size=size), together, strict=True):
            close(one, other)
    for b in range(3):
        alone = sd.log_probs(decoder, ([PROMPTS[b]], [written.ids[b]]), top=2)
        close(alone[0], together[b])
        assert torch.equal(alone.top_ids[0], together.top_ids[b])


def test_texts_that_ended_early_and_rows_without_tokens(llama):
    tokenizer = byte_tokenizer()
    decoder = sd.decoder((llama, tokenizer)).build()
    out = decoder.generate(["ab", "b", "xyz"], 60, seed=3, eos_token_id=list(range(40)), stop_strings="z")
    assert {"eos", "stop_string"} & set(out.finish)
    assert len({len(ids) for ids in out.ids}) > 1
    found = sd.log_probs(decoder, out)
    assert [len(row) for row in found] == [len(ids) for ids in out.ids]
    for b, ids in enumerate(out.ids):
        close(found[b], of(own(llama, out.prompt_ids[b], ids), ids))
    some = sd.log_probs(decoder, (["ab", "b", "xyz"], [[], out.ids[1], []]), top=2)
    assert [tuple(row.shape) for row in some.top_values] == [(0, 2), (len(out.ids[1]), 2), (0, 2)]
    assert {row.dtype for row in some} == {torch.float64}
    assert some.top_ids[0].dtype == torch.long
    assert some.totals.tolist()[::2] == [0, 0]
    close(some[1], found[1])
    nothing = sd.log_probs(decoder, ("ab", [[]]))
    assert len(nothing[0]) == 0
    assert repr(nothing) == "LogProbs(1 rows, 0 tokens)"
    assert [len(row) for row in found[1:]] == [len(ids) for ids in out.ids[1:]]


def no_repeats(ids, scores):
    """Forbids the last token, as a processor that reads the text."""
    return scores.index_fill(1, ids[0, -1:], -math.inf) / (1 + 0.01 * ids.shape[1])


class Sharper(sd.Sampling):
    """A user's subclass, with a distribution of its own."""

    def __call__(self, logits, context, proposal=None, first=-1):
        probs = super().__call__(logits, context, proposal, first) ** (1 + context.length[:, None, None] % 3)
        return probs / probs.sum(-1, keepdim=True)


@pytest.mark.parametrize("chunk", [256, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        sd.Sampling(0.7),
        sd.Sampling(1.3, top_k=9, top_p=0.95),
        sd.Sampling(min_p=0.02),
        sd.Sampling((0.6, 0.0, 2.0), top_k=30),
        sd.Sampling(0.8, processors=(no_repeats,)),
        sd.Sampling((0.0, 1.0, 0.5), processors=(no_repeats,)),
        sd.Sampling(0),
        Sharper(0.9),
    ],
)
def test_what_was_sampled_from(llama, sampling, chunk):
    decoder = sd.decoder(llama).draft(sd.drafts.NGram(), length=3).build().with_sampling(sampling)
    out = decoder.generate(PROMPTS, BUDGETS, seed=5)
    found = sd.log_probs(decoder, out, sampled=True, top=3, chunk=chunk, batch_size=2)
    for b, (prompt, ids) in enumerate(zip(PROMPTS, out.ids)):
        logits = own(llama, prompt, ids)
        for n, token in enumerate(ids):
            context = sd.Context.of([prompt + ids[:n]], request=torch.tensor([b]))
            scores = sampling(logits[None, n : n + 1], context)[0, 0].log()
            close(found[b][n], scores[token])
            close(found.top_values[b][n], scores.topk(3).values)
            assert scores[token] > -math.inf  # it was drawn
        if sampling.greedy_rows(sd.Context.of([prompt], request=torch.tensor([b])))[0]:
            assert found[b].tolist() == [0] * len(ids)
        assert bool(found[b].isfinite().all())
    raw = sd.log_probs(decoder, out)  # the target's own, whatever was sampled from
    close(raw[0], of(own(llama, PROMPTS[0], out.ids[0]), out.ids[0]))


REQUESTS = [
    None,
    sd.Sampling(0),
    sd.Sampling(0.7, top_k=9),
    sd.Sampling(1.4, processors=(no_repeats,)),
    sd.Sampling(2.0, grammar=Table(((*range(10), *[-1] * 87), *[tuple(0 for _ in range(97))] * 9))),
]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_finished_requests_have_the_sampling_that_they_had(llama, batch_size):
    decoder = sd.decoder(llama).draft(sd.drafts.NGram(), length=3).sampling(temperature=0.5).build()
    requests = [
        sd.Request(PROMPTS[b % 3], [30, 12, 41][b % 3], seed=b, sampling=one)
        for b, one in enumerate(REQUESTS)
    ]
    done = list(decoder.serve(requests, limit=3, own_sampling=True))
    done += decoder.serve(requests[1:3], own_sampling=True)
    assert [one.index for one in done] != sorted(one.index for one in done)
    found = sd.log_probs(decoder, done, sampled=True, top=2, batch_size=batch_size)
    raw = sd.log_probs(decoder, done)
    for b, one in enumerate(done):
        assert one.prompt_ids == one.request.prompt
        logits, sampling = own(llama, one.prompt_ids, one.ids), one.request.sampling or decoder.sampling
        close(raw[b], of(logits, one.ids))
        for n, token in enumerate(one.ids):
            context = sd.Context.of([one.prompt_ids + one.ids[:n]])
            context = replace(context, prompt_length=torch.tensor([len(one.prompt_ids)]))
            scores = sampling(logits[None, n : n + 1], context)[0, 0].log()
            close(found[b][n], scores[token])
            close(found.top_values[b][n], scores.topk(2).values)
            assert scores[token] > -math.inf
    pair = ([one.prompt_ids for one in done], [one.ids for one in done])
    assert float((sd.log_probs(decoder, pair, sampled=True).totals - found.totals).abs().max()) > 1


def test_finished_requests_have_the_entries_of_their_numbers(llama):
    """A decoder with lists of settings gives request n entry n, and requests end in another order."""
    decoder = sd.decoder(llama).sampling(temperature=[0.5, 0.0, 2.0]).build()
    requests = [sd.Request(prompt, budget) for prompt, budget in zip(PROMPTS, BUDGETS)]
    done = list(decoder.serve(requests, seed=0))
    assert [one.index for one in done] == [1, 0, 2]
    found = sd.log_probs(decoder, done, sampled=True)
    expected = sd.log_probs(decoder, decoder.generate(PROMPTS, BUDGETS, seed=0), sampled=True)
    for b, one in enumerate(done):
        close(found[b], expected[one.index])
    assert found[0].tolist() == [0] * 12


def test_requests_that_did_not_start_have_no_tokens(llama):
    requests = [sd.Request([1, 2], 3), sd.Request([500], 3), sd.Request([3], 3, cancelled=lambda: True)]
    decoder = sd.decoder(llama).build()
    done = list(decoder.serve(requests, seed=0, errors="yield", own_sampling=True))
    found = sd.log_probs(decoder, tuple(sorted(done, key=lambda one: one.index)), sampled=True)
    assert [len(row) for row in found] == [3, 0, 0]
    with pytest.raises(ValueError, match="generation has at 0 a finished request without prompt_ids"):
        sd.log_probs(decoder, [replace(one, prompt_ids=[]) for one in done if one.ids])
    with pytest.raises(TypeError, match="generation has a int at 1 and finished requests elsewhere"):
        sd.log_probs(decoder, [done[0], 3])
    with pytest.raises(ValueError, match="generation is empty"):
        sd.log_probs(decoder, [])
    with pytest.raises(TypeError, match=r"generation is a generator: .*list\(decoder.serve"):
        sd.log_probs(decoder, decoder.serve(requests))
    narrow = sd.Sampling(grammar=Table((tuple(range(40)), *[(0,) * 40] * 39), end_ids=(50,)))
    wrong = replace(done[0], request=sd.Request([1], 3, sampling=narrow), prompt_ids=[1], ids=[2])
    with pytest.raises(ValueError, match="end_ids of the grammar has 50"):
        sd.log_probs(sd.decoder(TABLE), [wrong], sampled=True)


def test_at_temperature_0_other_tokens_are_impossible(llama):
    greedy = sd.decoder(llama).greedy().build()
    out = greedy.generate(PROMPTS, 8)
    changed = [[*ids[:4], (ids[4] + 1) % 97, *ids[5:]] for ids in out.ids]
    found = sd.log_probs(greedy, (PROMPTS, changed), sampled=True)
    for row in found:
        assert row[:4].tolist() == [0] * 4
        assert row[4] == -math.inf
    assert found.totals.tolist() == [-math.inf] * 3


def test_what_follows_a_forbidden_token_does_not_depend_on_chunks():
    decoder = sd.decoder(TABLE).sampling(processors=(no_repeats,)).build()
    pair = ([[1]], [[1, 2, 2, 3, 0, 0, 1]])
    expected = sd.log_probs(decoder, pair, sampled=True)[0]
    assert expected[0] == expected[2] == -math.inf
    for chunk in range(1, 8):
        close(sd.log_probs(decoder, pair, sampled=True, chunk=chunk)[0], expected)


class Counted(sd.TableModel):
    """A table that counts its calls, and takes chains of limited length."""

    info = sd.ModelInfo(longest_chain=3)

    def score(self, cache, context, proposal=None, *args, **named):
        nodes = 0 if proposal is None else proposal.nodes
        assert cache.length.tolist() == [0] * context.batch or bool(
            (cache.length == context.length - 1).all()
        )
        self.calls = [*getattr(self, "calls", ()), (context.batch, nodes)]
        return super().score(cache, context, proposal, *args, **named)


def test_chains_are_as_long_as_the_model_and_the_memory_allow(monkeypatch):
    model = Counted(TABLE.probs)
    pair = ([[0], [1]], [[1] * 10, [2] * 5])
    expected = sd.log_probs(sd.decoder(TABLE), pair)
    found = sd.log_probs(sd.decoder(model), pair)
    assert model.calls == [(2, 3), (2, 3), (1, 1)]  # 4 tokens, 4 and 1, 2
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    model.calls = []
    monkeypatch.setattr(likelihood, "ENTRIES", 20)  # 4 places of 5 logits
    sd.log_probs(sd.decoder(model), pair)
    assert model.calls == [(2, 1)] * 3 + [(1, 3)]
    monkeypatch.setattr(likelihood, "ENTRIES", 1)
    assert sd.log_probs(sd.decoder(model), pair)[0].tolist() == expected[0].tolist()


def test_nothing_is_changed_and_gradients_may_be_taken(llama):
    decoder = sd.decoder(llama).draft(sd.drafts.NGram(), length=3).build()
    before, state = decoder.generate(PROMPTS, 12, seed=2), copy.deepcopy(llama.state_dict())
    given = copy.deepcopy((before.prompt_ids, before.ids))
    found = sd.log_probs(decoder, before, top=2)
    sd.log_probs(decoder, before, sampled=True)
    assert (before.prompt_ids, before.ids) == given
    assert decoder.generate(PROMPTS, 12, seed=2).ids == before.ids
    assert all(torch.equal(value, state[name]) for name, value in llama.state_dict().items())
    assert not any(t.is_inference() for t in (*found, *found.top_ids, *found.top_values, found.totals))
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    (scale * found[0]).exp().sum().backward()
    assert scale.grad is not None


def test_low_precision_is_widened():
    model = model_of(dtype=torch.bfloat16)
    decoder = sd.decoder(model)
    out = decoder.generate(PROMPTS, 8, seed=0)
    found = sd.log_probs(decoder, out)
    assert {row.dtype for row in found} == {torch.float32}
    close(found[0], of(own(model, PROMPTS[0], out.ids[0]).float(), out.ids[0]), 0.2)


class Broken(sd.TableModel):
    """Its logits are NaN after token 3."""

    def score(self, *args, **named):
        scores = super().score(*args, **named)
        return Scores(scores.logits.masked_fill(scores.logits[..., :1] == self._logits[-1, 0], float("nan")))


def test_logits_without_a_distribution_are_refused():
    broken = Broken(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    with pytest.raises(ValueError, match="logits of row 1, at token 3 of the text, have no distribution"):
        sd.log_probs(sd.decoder(broken), ([[0], [0]], [[0, 0, 1], [0, 1, 0]]))
    with pytest.raises(ValueError, match="logits of row 1"):
        sd.log_probs(sd.decoder(broken), ([[0], [0]], [[0, 0, 1], [0, 1, 0]]), sampled=True)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"decoder": "gpt2"}, TypeError, "decoder is a str: give a decoder"),
        ({"decoder": TABLE}, TypeError, "decoder is a TableModel: give a decoder"),
        ({"decoder": None}, TypeError, "decoder is a NoneType"),
        (
            {"generation": [[1, 2]]},
            TypeError,
            "generation is a list: give what decoder.generate returned, a list of",
        ),
        ({"generation": None}, TypeError, "generation is a NoneType"),
        ({"generation": ([[1]], "ab")}, TypeError, "rows of whole numbers"),
        ({"generation": ([[1]], [[1.5]])}, TypeError, r"rows of whole numbers \(row 0\)"),
        ({"generation": ([[1]], [1, 2])}, TypeError, "rows of whole numbers"),
        ({"generation": ([[1]], None)}, TypeError, "rows of whole numbers"),
        ({"generation": ([[1]], [[1], [2]])}, ValueError, "1 prompts and ids of 2 rows"),
        ({"generation": ([[1]], [[1, 5]])}, ValueError, "id 5 in row 0, and the target's vocabulary has ids"),
        ({"generation": ([[1]], [[-1]])}, ValueError, "the id -1 in row 0"),
        ({"generation": ([[]], [[1]])}, ValueError, "prompt 0 is empty"),
        ({"sampled": 1}, TypeError, "sampled is 1: give True or False"),
        ({"top": 0}, ValueError, "top is 0"),
        ({"top": 1.5}, TypeError, "top is 1.5"),
        ({"top": 6}, ValueError, "top is 6: the target's vocabulary has 5 tokens"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"batch_size": "all"}, TypeError, "batch_size is 'all'"),
        ({"chunk": 0}, ValueError, "chunk is 0"),
        ({"chunk": None}, TypeError, "chunk is None"),
    ],
)
def test_wrong_arguments(given, error, says):
    right = {"decoder": sd.decoder(TABLE), "generation": ([[1]], [[1, 2]])}
    with pytest.raises(error, match=says):
        sd.log_probs(**right | given)


def test_texts_of_other_models_are_refused(llama, written):
    with pytest.raises(
        ValueError, match="row 0, and the target's vocabulary has ids 0 to 4: give a decoder whose"
    ):
        sd.log_probs(sd.decoder(TABLE), written)
    with pytest.raises(ValueError, match="has 260 tokens in row 0, prompt included, and the target has 256"):
        sd.log_probs(sd.decoder(llama), ([[1] * 200], [[2] * 60]))
    mixed = sd.decoder(TABLE).sampling(temperature=[1.0])
    with pytest.raises(ValueError, match="temperature has 1 entries and there is a request 1"):
        sd.log_probs(mixed, ([[0], [1]], [[1], [1]]), sampled=True)


def test_ids_may_be_tensors():
    expected = sd.log_probs(sd.decoder(TABLE), ([[0, 1], [2, 3]], [[1, 2], [3, 4]]), top=1)
    found = sd.log_probs(
        sd.decoder(TABLE), (torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 2], [3, 4]])), top=1
    )
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    one = sd.log_probs(sd.decoder(TABLE), ([[0, 1], [2, 3]], [torch.tensor([1, 2]), np.array([3, 4])]))
    assert one[0].tolist() == expected[0].tolist()
