"""Requests of different samplings in one batch or stream: each is drawn as it would be alone, and one whose own setting fails ends alone."""

from __future__ import annotations

import re

import pytest
import torch
from tiny import tiny
from transformers import RepetitionPenaltyLogitsProcessor

import specdec as sd
from specdec import lab
from specdec.executors import Pipelined, Serial
from specdec.grammars import Table

TARGET = sd.HFModel(tiny("llama", 0, torch.float64))
SMALL = sd.HFModel(tiny("llama", 1, torch.float64))
V = TARGET.vocab_size
EVEN = Table((tuple(0 if t % 2 == 0 else -1 for t in range(V)),))
ENDING = Table(
    (tuple(1 if t < 4 else -1 for t in range(V)), tuple(0 if t == 9 else -1 for t in range(V))), (9,)
)


def halved(ids, scores):
    """Even tokens lose half of their scores."""
    return torch.where(torch.arange(scores.shape[-1]) % 2 == 0, scores / 2, scores)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": (2, None, 3)},
        {"top_p": (0.7, 1, 0.3)},
        {"min_p": (0.5, None, 0.1)},
        {"top_k": (4, None, 4), "top_p": (0.7, None, 0.7), "temperature": (0.5, 0.0, 2.0)},
        {"top_p": (0.7, 0.2, None), "min_p": 0.1, "processors": (halved,)},
    ],
)
def test_every_request_may_have_its_own_truncation(settings):
    logits = torch.randn(4, 3, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    context = sd.Context.of([[1]] * 4, request=torch.tensor([2, 1, 0, 1]))  # rows in another order
    each = sd.Sampling(**settings)
    probs, best = each(logits, context), each.argmax(logits, context)
    for b, request in enumerate(context.request.tolist()):
        single = {
            name: one[request] if isinstance(one, tuple) and name != "processors" else one
            for name, one in settings.items()
        }
        row = torch.tensor([b])
        assert torch.equal(probs[b], sd.Sampling(**single)(logits[row], context.select(row))[0])
        assert torch.equal(best[b], probs[b].argmax(-1))
    assert torch.equal(logits, before)
    assert not torch.equal(probs[0] > 0, probs[2] > 0)
    with pytest.raises(ValueError, match="has 3 entries and there is a request 3"):
        each(logits[:1], sd.Context.of([[1]], request=torch.tensor([3])))
    with pytest.raises(ValueError, match="has 3 entries and there are 4 prompts"):
        sd.decoder(TARGET).sampling(**settings).build().generate([[1]] * 4, 2)


@pytest.mark.parametrize(
    "wrong", [{"top_k": (2, 0)}, {"top_p": (0.5, 1.5)}, {"min_p": ()}, {"top_p": ("1",)}]
)
def test_wrong_truncations_of_requests_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))} is"):
        sd.Sampling(**wrong)


def test_the_lab_takes_one_truncation(tmp_path):
    each = sd.Sampling(top_p=(0.5, 1.0))
    with pytest.raises(ValueError, match="sampling has a top_p for each request: record a trace for each"):
        lab.record(TARGET, [[1], [2]], tmp_path / "t", 4, 2, sampling=each)


def test_truncations_by_number_are_saved(tmp_path):
    decoder = sd.decoder(TARGET).sampling(top_p=[0.3, None], top_k=3).build()
    decoder.save(tmp_path / "d")
    assert sd.load(tmp_path / "d").build().sampling == decoder.sampling


SAMPLINGS = (
    None,
    sd.Sampling(0.0),
    sd.Sampling(0.7, top_p=0.6),
    sd.Sampling(1.5, top_k=4, min_p=0.01),
    sd.Sampling(processors=(RepetitionPenaltyLogitsProcessor(1.5), halved)),
    sd.Sampling(grammar=ENDING),
    sd.Sampling(0.0, processors=(halved,), grammar=EVEN),
    None,
)


@pytest.mark.parametrize("verifier", [sd.Rejection(), sd.Coupled()], ids=repr)
@pytest.mark.parametrize("executor", [Serial(), Pipelined(2)], ids=repr)
def test_requests_of_a_stream_may_have_samplings(executor, verifier):
    base = sd.decoder(TARGET).draft(SMALL, length=3).verifier(verifier)
    usual = sd.Sampling(1.2, top_k=20, processors=(halved,), grammar=EVEN)
    requests = [
        sd.Request([7, 8, n], 6 + n, seed=n, sampling=own, eos_token_id=()) for n, own in enumerate(SAMPLINGS)
    ]
    served = base.sampling(usual).executor(executor).build()
    done = {one.index: one for one in served.serve(requests, 3, clock="rounds", own_sampling=True)}
    for n, own in enumerate(SAMPLINGS):
        alone = base.sampling(usual if own is None else own).build()
        assert done[n].ids == alone.generate([[7, 8, n]], 6 + n, seed=n, eos_token_id=()).ids[0]
    assert (len(done[5].ids), done[5].finish) == (2, "eos")


def test_a_stream_forgets_the_samplings_of_what_has_ended():
    decoder = sd.decoder(TARGET).draft(sd.drafts.NGram(), length=2).build()
    requests = (sd.Request([1, 2, 3 + n], 4, sampling=sd.Sampling(0.5)) for n in range(4))
    seen = []
    stream = decoder.serve(
        requests, 2, own_sampling=True, on_round=lambda round: seen.append(len(table.own)), clock="rounds"
    )
    tables = stream.gi_frame.f_locals["self"].composition.sampling.own
    table = tables["temperature"]
    assert len(list(stream)) == 4
    assert max(seen) == 2
    assert len(tables) == 6
    assert all(one.own == {} for one in tables.values())
    with pytest.raises(TypeError, match="no end"):
        0.5 in table  # noqa: B015


def test_wrong_samplings_of_a_streams_requests_are_refused():
    plain = sd.decoder(TARGET).draft(sd.drafts.NGram(), length=2)
    one = sd.Request([1], 4, sampling=sd.Sampling(0.5))
    with pytest.raises(ValueError, match=r"request 0: it has a sampling: give serve\(\.\.\., own_sampling"):
        next(plain.build().serve([one]))
    with pytest.raises(TypeError, match=r"sampling is 0\.5: give a sd\.Sampling"):
        sd.Request([1], 4, sampling=0.5)
    with pytest.raises(
        ValueError, match="sampling has a list of temperature and of top_p: give those of this"
    ):
        sd.Request([1], 4, sampling=sd.Sampling([0.5, 1], top_p=[0.5, 1]))
    with pytest.raises(ValueError, match="has a list of temperature: give single settings"):
        plain.sampling(temperature=[0, 1]).build().serve([], own_sampling=True)
    with pytest.raises(ValueError, match="drafts run in another process"):
        piped = plain.executor(Pipelined(2, workers="processes")).build()
        piped.serve([], own_sampling=True)


class Breaks:
    """A grammar of all tokens that fails after six of them, which is later than ``build`` looks."""

    end_ids = ()

    def __init__(self, how):
        self.how = how

    def start(self):
        return 0

    def advance(self, state, token):
        if state == 5 and self.how == "advance":
            raise RuntimeError("broken")
        return state + 1

    def allowed(self, state):
        if state == 6 and self.how == "allowed":
            raise RuntimeError("broken")
        return torch.full((V,), state != 6)


def fails(ids, scores):
    if ids.shape[1] - 3 == 4:
        raise RuntimeError("broken")
    return scores


def takes_all(ids, scores):
    return scores.masked_fill(torch.tensor(ids.shape[1] - 3 == 4), -torch.inf)


class Remembers:
    """A processor that keeps state, but not on made-up texts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        assert ids[0, 0] == 7
        self.calls += 1
        return scores * self.calls


def returns_nan(ids, scores):
    return scores * (float("nan") if ids.shape[1] - 3 == 4 else 1)


def bans_one(ids, scores):
    return scores.index_fill(1, torch.tensor([1]), -torch.inf)


ONES = Table((tuple(0 if t == 1 else -1 for t in range(V)),))
BROKEN = {  # and how many tokens there are before
    "advance": (sd.Sampling(grammar=Breaks("advance")), RuntimeError, "broken", 5),
    "allowed": (sd.Sampling(grammar=Breaks("allowed")), RuntimeError, "broken", 6),
    "no token": (sd.Sampling(grammar=Breaks("nothing")), ValueError, "allows no token", 6),
    "processor": (sd.Sampling(processors=(fails,)), RuntimeError, "broken", 4),
    "masks all": (sd.Sampling(processors=(takes_all,)), ValueError, "allow no token|masked every", 4),
    "nan": (sd.Sampling(processors=(returns_nan,)), ValueError, "return NaN|contain nan", 4),
    "both": (
        sd.Sampling(processors=(bans_one,), grammar=ONES),
        ValueError,
        "that the grammar allows|masked every",
        0,
    ),
    "state": (sd.Sampling(processors=(Remembers(),)), ValueError, "keeps state between calls", 0),
}
RUNS = {
    "chain": (sd.drafts.Model(SMALL), Serial()),
    "pipelined": (sd.drafts.Model(SMALL), Pipelined(2)),
    "tree": (sd.drafts.Tree(SMALL, (2, 2)), Serial()),
    "jump": (sd.drafts.JumpForward(SMALL), Serial()),
    "cascade": (sd.drafts.Cascade(SMALL, sd.drafts.NGram(), 2), Serial()),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("how", BROKEN)
def test_a_request_whose_own_sampling_fails_ends_alone(how, run):
    sampling, kind, message, kept = BROKEN[how]
    draft, executor = RUNS[run]
    base = sd.decoder(TARGET).draft(draft, 3).verifier(sd.Coupled())
    shown = []
    requests = [
        sd.Request(
            [7, 8, n],
            9,
            seed=n,
            sampling=sampling if n == 1 else None,
            eos_token_id=(),
            on_chunk=shown.append,
        )
        for n in range(4)
    ]
    decoder = base.executor(executor).build()
    stream = decoder.serve(requests, 3, clock="rounds", own_sampling=True, errors="yield")
    done = {one.index: one for one in stream}
    plain = [base.build().generate([[7, 8, n]], 9, seed=n, eos_token_id=()).ids[0] for n in range(4)]
    assert [done[n].ids for n in (0, 2, 3)] == [plain[n] for n in (0, 2, 3)]
    assert {done[n].finish for n in (0, 2, 3)} == {"length"}
    failed = done[1]
    assert failed.finish == "error"
    assert isinstance(failed.error, kind)
    assert re.search(message, str(failed.error))
    assert failed.ids == plain[1][:kept]
    assert failed.stats.tokens == kept
    chunks = [chunk for chunk in shown if chunk.row == 1]
    assert [token for chunk in chunks for token in chunk.ids] == failed.ids
    assert [chunk.finish for chunk in chunks[-1:]] == ["error"]
    with pytest.raises(kind, match=message):
        list(decoder.serve(requests, 3, clock="rounds", own_sampling=True))


def test_a_failure_after_tokens_that_are_not_committed_ends_nothing():
    """The draft proposes token 1, after which the grammar breaks, and the target never takes it."""

    class Breaks1:
        end_ids = ()

        def start(self):
            return ()

        def advance(self, state, token):
            if token == 1:
                raise RuntimeError("broken")
            return ()

        def allowed(self, state):
            return torch.ones(V, dtype=torch.bool)

    draft = sd.chain_draft(lambda prefix: torch.arange(V) == 1)
    never = sd.Sampling(0.0, processors=(bans_one,), grammar=Breaks1())
    decoder = sd.decoder(TARGET).draft(draft, 3).build()
    request = sd.Request([7, 8, 9], 9, sampling=never, eos_token_id=())
    (one,) = decoder.serve([request], own_sampling=True, errors="yield")
    assert (one.finish, len(one.ids)) == ("length", 9)
    assert one.stats.drafted > 0


@pytest.mark.parametrize("run", ["chain", "pipelined", "tree"])
@pytest.mark.parametrize("end", ["eos", "stop_string"])
def test_what_fails_after_the_end_fails_nowhere(run, end):
    """Drafts that guess the end show a processor the text with it, which plain decoding never does."""
    model, tokenizer = sd.zoo.load("pocket-target")
    target, text = sd.HFModel(model, tokenizer), "import os\n"
    whole = sd.decoder(target).greedy().build().generate([text], 12)
    ids = tokenizer(text)["input_ids"] + whole.ids[0]
    last = whole.ids[0][7]
    end_at = ids.index(last, len(tokenizer(text)["input_ids"])) + 1
    seen = []

    def breaks(prefix, scores):
        if prefix.shape[1] >= end_at:
            seen.append(prefix.shape[1])
            raise RuntimeError("after the end")
        return scores

    _, executor = RUNS[run]
    guess = sd.drafts.Tree(target, (2, 1, 1)) if run == "tree" else sd.drafts.Model(target)
    stops = (
        {"eos_token_id": last}
        if end == "eos"
        else {"stop_strings": tokenizer.decode(ids[end_at - 2 : end_at]), "eos_token_id": ()}
    )
    decoder = sd.decoder(target).draft(guess, 3).executor(executor).greedy().build()
    request = sd.Request(text, 12, sampling=sd.Sampling(0.0, processors=(breaks,)), **stops)
    found = [*decoder.serve([request, request], 2, own_sampling=True, errors="yield")]
    assert seen
    for one in found:
        assert (one.finish, one.error) == (end, None)
        assert one.ids == ids[len(tokenizer(text)["input_ids"]) : end_at]


def test_an_error_says_whose_it_is():
    request = sd.Request([7, 8, 9], 9, sampling=BROKEN["processor"][0], eos_token_id=())
    with pytest.raises(RuntimeError, match="broken") as raised:
        list(sd.decoder(TARGET).build().serve([request], own_sampling=True))
    assert raised.value.__notes__ == [
        "This is of the sampling of request 0: serve(errors='yield') ends it alone."
    ]


def test_a_subclass_is_no_request_s_default():
    class Other(sd.Sampling):
        def __call__(self, *args):
            return super().__call__(*args)

    decoder = sd.decoder(TARGET).sampling(Other()).build()
    with pytest.raises(ValueError, match="own_sampling is set and the decoder's sampling is of class Other"):
        decoder.serve([], own_sampling=True)


def banned(ids, scores):
    return scores.index_fill(1, torch.tensor([3]), -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, [0.0, 1.0]])
def test_a_tree_with_greedy_rows_tries_processors_once(monkeypatch, temperature):
    """As every draft does: on the first texts of a run, and not in every round."""
    tried = []
    monkeypatch.setattr("specdec.processing.probe_at", lambda *_: tried.append(1))
    target, draft = (sd.HFModel(tiny("llama", seed=n)) for n in range(2))
    tree = sd.drafts.Tree(draft, (2, 1))
    decoder = sd.decoder(target).draft(tree).sampling(temperature=temperature, processors=(banned,)).build()
    seen = []
    decoder.generate([[5, 6, 7], [3, 4]], 24, seed=0, on_round=lambda _: seen.append(len(tried)))
    assert 0 < seen[2] == seen[-1]


def best_two(ids, scores):
    """A processor whose choice depends on the scores."""
    return scores.masked_fill(scores < scores.topk(2).values[..., -1:], -torch.inf)


@pytest.mark.parametrize("draft", ["chain", "tree", "greedy tree"])
@pytest.mark.parametrize("errors", ["raise", "yield"])
def test_a_draft_whose_tokens_are_all_refused_ends_nothing(draft, errors):
    """What processors leave of a draft's scores may miss the grammar; the target's scores decide."""
    target, small = sd.TableModel([0.4, 0.3, 0.2, 0.1]), sd.TableModel([0.1, 0.2, 0.3, 0.4])
    one = sd.drafts.Model(small) if draft == "chain" else sd.drafts.Tree(small, (2, 1))
    decoder = sd.decoder(target).draft(one, length=2).build()
    sampling = sd.Sampling(
        0.0 if draft == "greedy tree" else 1.0, processors=(best_two,), grammar=Table(((0, 0, -1, -1),))
    )
    requests = [sd.Request([n], 6, sampling=sampling) for n in range(2)]
    done = list(decoder.serve(requests, seed=0, errors=errors, own_sampling=True))
    assert [(one.error, len(one.ids)) for one in done] == [(None, 6)] * 2
    assert {token for one in done for token in one.ids} <= {0, 1}
