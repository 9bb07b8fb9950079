"""What a first use gets wrong: every call says which argument is wrong and what to give instead."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import lab, zoo
from specdec.arguments import counts
from specdec.drafts.function import FunctionDraft
from specdec.testing import BrokenRule, check_draft

IDS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [4, 4, 4, 4, 4, 4]]


@pytest.fixture(scope="module")
def base(target):
    return sd.decoder(target).greedy()


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    target = sd.TableModel.random(vocab_size=6, order=1, seed=0)
    prompts = [[i] for i in range(6)]
    return lab.record(target, prompts, tmp_path_factory.mktemp("trace"), new_tokens=4, k=2, progress=False)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.generate([1], 4, on_round=3),
        lambda d: d.stream([1], 4, on_round=3),
        lambda d: d.serve([sd.Request([1], 4)], on_round=3),
    ],
)
def test_on_round_is_a_function_before_anything_is_decoded(base, call):
    with pytest.raises(TypeError, match=r"on_round is 3: give a function"):
        call(base.build())


def test_what_a_decoder_does_needs_no_build(base, tmp_path):
    made = base.draft(sd.drafts.NGram(), length=3)
    expected = made.build().generate(IDS, 9, seed=0).ids
    requests = [sd.Request(ids, 9) for ids in IDS]
    served = made.serve(requests, 2, seed=0, clock="rounds")
    assert [one.ids for one in sorted(served, key=lambda one: one.index)] == expected
    made.save(tmp_path / "saved")
    assert sd.load(tmp_path / "saved").generate(IDS, 9, seed=0).ids == expected


def test_a_list_of_texts_is_no_prompt(base):
    with pytest.raises(TypeError, match="prompt 0 is a list of texts: give one text"):
        base.generate([["a", "b"]], 4)


def test_the_bar_ends_with_the_tau_of_the_result(base, capsys):
    out = base.draft(sd.drafts.NGram(), length=3).generate(IDS, 9, progress=True)
    assert capsys.readouterr().err.rstrip().endswith(f"{out.stats.shown_tau}]")


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned a NoneType that is no tensor"),
        ("text", "returned a str that is no tensor"),
        ([[0.0], [0.0, 1.0]], "returned a list that is no tensor"),
    ],
)
def test_what_a_function_draft_returns_is_no_tensor(base, returned, says):
    with pytest.raises(TypeError, match=f"chain_draft: the function <lambda> {says}.*return \\[V\\] logits"):
        base.draft(sd.chain_draft(lambda ids: returned), length=2).generate([1], 4)


@pytest.mark.parametrize("V", [96, 98])
def test_logits_of_another_vocabulary_are_refused(base, V):
    """They were cut or padded in silence, and a function for another tokenizer decoded slowly."""

    def mine(prefix):
        return torch.zeros(V)

    says = f"function mine returned {V} logits and the target's vocabulary has 97 entries: return one for each id"
    with pytest.raises(ValueError, match=says):
        base.draft(sd.chain_draft(mine), length=2).generate([1], 4)


def test_a_pocket_head_is_no_target():
    with pytest.raises(ValueError, match=r"'pocket-medusa' is a draft head .* \.draft\(\.\.\.\)"):
        sd.decoder("pocket-medusa")
    zoo.load("pocket-medusa")


@pytest.mark.parametrize("given", [3, torch.tensor(3), [3], (3,), torch.tensor([3])])
def test_one_number_is_a_list_of_one(given):
    assert counts("batches", given) == [3]


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        (None, TypeError, "batches is None: give a whole number, or several"),
        ("12", TypeError, "batches is '12'"),
        (2.0, TypeError, r"batches is 2\.0"),
        (0, ValueError, "batches is 0: give at least 1"),
        ([1, 0], ValueError, "batches, of one, is 0: give at least 1"),
        ([1, "a"], TypeError, "batches, of one, is 'a'"),
    ],
)
def test_what_are_no_numbers(given, kind, says):
    with pytest.raises(kind, match=says):
        counts("batches", given)


def test_compare_takes_one_batch_size(base):
    found = sd.compare({"plain": base}, IDS, batches=2, repeats=1, new_tokens=3)
    assert list(found.best) == [2]


def test_time_takes_texts_and_decoders_that_are_not_built(base):
    named = {"plain": base, "ngram": base.draft(sd.drafts.NGram(), length=2)}
    times = lab.time(named, ["abcdefgh", "xyz"], batches=1, contexts=4, rounds=1, repeats=1)
    assert times.places == [(1, 4)]
    assert {row["method"]: row["k"] for row in times.rows} == {"plain": 0, "ngram": 2}
    one = lab.time({"plain": base}, "abcdefgh", batches=1, contexts=4, rounds=1, repeats=1)
    assert one.places == [(1, 4)]


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (({}, IDS), ValueError, "decoders is empty"),
        (({"a": "pocket-tiny"}, IDS), TypeError, "decoder 'a' is a str"),
        (({"a": sd.decoder(tiny("llama"))}, IDS, 0), ValueError, "batches is 0"),
        (({"a": sd.decoder(tiny("llama"))}, IDS, 1, (0,)), ValueError, "contexts, of one, is 0"),
        (({"a": sd.decoder(tiny("llama"))}, [[200]], 1, 1), ValueError, "outside the target's vocabulary"),
    ],
)
def test_what_cannot_be_timed(arguments, kind, says):
    with pytest.raises(kind, match=says):
        lab.time(*arguments, rounds=1, repeats=1)


@pytest.mark.parametrize("ask", [lab.compare, lambda replays: lab.decide(replays, lab.Times({}))])
def test_replays_of_one_name_are_not_dropped(trace, ask):
    replay = lab.replay(trace, sd.drafts.NGram(), 2)
    with pytest.raises(ValueError, match="two of one name, 'ngram'"):
        ask([replay, replay])
    with pytest.raises(TypeError, match=r"replay 'a' is a str: give lab\.replay"):
        ask({"a": "ngram"})


def test_a_decision_needs_a_clock(trace):
    replay = lab.replay(trace, sd.drafts.NGram(), 2)
    for clock in (None, sd.cost):
        with pytest.raises(TypeError, match=r"without seconds.*lab\.time"):
            lab.decide([replay], clock)


def test_a_trace_is_not_recorded_into_a_file(tmp_path):
    (tmp_path / "trace").write_text("")
    with pytest.raises(FileExistsError, match="trace is a file: give a new folder"):
        lab.record(sd.TableModel([0.5, 0.5]), [[0]], tmp_path / "trace", new_tokens=2, k=1, progress=False)


def test_a_function_in_float32_is_lossless_up_to_its_rounding():
    logits = torch.arange(6.0) * 0.3
    assert logits.dtype == torch.float32
    check_draft(sd.chain_draft(lambda ids: logits), only=["distribution"])


class Off(FunctionDraft):
    """Declares probabilities that differ a little from those of its draws."""

    def propose(self, *given):
        proposal, state = super().propose(*given)
        if proposal.probs is None:
            return proposal, state
        off = torch.tensor([1e-4, -1e-4, 0, 0, 0, 0]).to(proposal.probs)
        return replace(proposal, probs=proposal.probs + off), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_bias_is_caught_in_both_precisions(dtype):
    logits = torch.zeros(6, dtype=dtype)
    with pytest.raises(BrokenRule, match=r"lossless.*total variation"):
        check_draft(Off(lambda ids: logits), only=["distribution"])


def test_padding_without_its_mask_is_noticed():
    decoder = sd.decoder("pocket-tiny").greedy().build()
    pad = decoder.target.tokenizer.pad_token_id
    ids = torch.tensor([[5, 6, 7], [pad, pad, 8]])
    mask = (ids != pad).long()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = decoder.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3).ids
        assert decoder.generate([[5, 6, 7], [8]], max_new_tokens=3).ids == right
        decoder.generate(ids.tolist(), max_new_tokens=3)  # lists of ids are what they say
        decoder.generate(ids[:1], max_new_tokens=3)
    for given in ({"prompts": ids}, {"input_ids": ids}):
        with pytest.warns(UserWarning, match=f"tensor in which {pad} .*give attention_mask too"):
            decoder.generate(**given, max_new_tokens=3)
