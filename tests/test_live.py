"""``sd.compare``: decoders in turn on the same prompts, with ratios by repeat."""

from __future__ import annotations

import re

import pytest
from tiny import tiny

import specdec as sd
from specdec import lab

PROMPTS = [[5, 6, 7], [9], [2, 3], [8, 8, 8]]


@pytest.fixture(scope="module")
def decoders():
    base = sd.decoder(tiny("llama")).greedy()
    return {
        "ngram": base.draft(sd.drafts.NGram(), length=3),
        "plain": base.build(),
        "self": base.draft(tiny("llama"), length=3),
    }


def test_a_row_for_each_decoder_and_batch(decoders, monkeypatch):
    seen = []

    class Watched(sd.Decoder):
        def generate(self, rows, budget, *, seed, **others):
            seen.append((rows, seed))
            return super().generate(rows, budget, seed=seed, **others)

    watched = {name: one.build() if hasattr(one, "build") else one for name, one in decoders.items()}
    for one in watched.values():
        object.__setattr__(one, "__class__", Watched)
    found = sd.compare(watched, PROMPTS, batches=(1, 3), repeats=3, new_tokens=12, seed=7)
    assert found.reference == "plain"
    assert [(row["method"], row["batch"]) for row in found.rows] == [(n, b) for b in (1, 3) for n in decoders]
    # in turn, with the same prompts and seeds; the first round of all warms up
    assert seen[:3] == [seen[0]] * 3 == seen[3:6]
    assert [call[1] for call in seen[3:12:3]] == [[7], [8], [9]]
    assert [call[0] for call in seen[15::3]] == [
        PROMPTS[:3],
        [PROMPTS[3], *PROMPTS[:2]],
        PROMPTS[2:] + PROMPTS[:1],
    ]
    for row in found.rows:
        assert row["same_text"] == 1
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["tau"] == pytest.approx({"plain": 1.0, "self": 4.0}.get(row["method"], row["tau"]))
    plain = [row for row in found.rows if row["method"] == "plain"]
    assert all((row["ratio"], row["ratio_low"], row["ratio_high"]) == (1, 1, 1) for row in plain)
    assert sorted(found.best) == [1, 3]
    assert len(re.findall("best at batch", repr(found))) == 2
    assert list(found.frame().columns)[:2] == ["method", "batch"]
    (axes,) = found.plot().axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(decoders)


def test_rows_end_at_end_tokens_where_asked(decoders):
    """Tokens a second are those of the decoded tokens; a repeat without any is left out for all."""
    plain = sd.decoder(tiny("llama")).greedy()
    texts = plain.build().generate(PROMPTS, 12, eos_token_id=()).ids
    end = texts[0][4]
    assert end not in (text[0] for text in texts)
    made, seen = {"plain": plain.build(), "self": decoders["self"].build()}, []

    class Watched(sd.Decoder):
        def generate(self, *given, **others):
            out = super().generate(*given, **others)
            if self is made["plain"]:
                seen.append(out)
            return out

    for one in made.values():
        object.__setattr__(one, "__class__", Watched)
    rows = sd.compare(made, PROMPTS, batches=(2,), repeats=2, new_tokens=12, eos_token_id=end).rows
    assert rows[0]["same_text"] == rows[1]["same_text"] == 1
    counted = seen[1:]
    lengths = [len(text) for out in counted for text in out.ids]
    assert min(lengths) < 12
    speeds = [
        (sum(map(len, out.ids)) - 2) / (sum(out.stats.seconds.values()) - out.stats.seconds["prefill"])
        for out in counted
    ]
    assert rows[0]["tokens_per_second"] == pytest.approx((speeds[0] * speeds[1]) ** 0.5)
    assert rows[0]["prefill_ms"] == pytest.approx(500 * sum(out.stats.seconds["prefill"] for out in counted))
    first = texts[1][0]  # the second repeat at batch 1 ends with its prefill
    assert first != texts[0][0]
    rows = sd.compare(made, PROMPTS, batches=(1,), repeats=2, new_tokens=12, eos_token_id=first).rows
    assert [(row["repeats"], row["ratio_low"]) for row in rows] == [(1, None)] * 2
    assert all(row["tokens_per_second"] > 0 for row in rows)
    with pytest.raises(
        ValueError, match=f"eos_token_id is {first}, and at batch 1 every repeat has a decoder"
    ):
        sd.compare(made, PROMPTS[1:2], batches=1, repeats=2, new_tokens=12, eos_token_id=first)


def test_a_prompt_that_is_too_long_is_refused_before_anything_runs(decoders, monkeypatch):
    monkeypatch.setattr(sd.Decoder, "generate", lambda *_, **__: pytest.fail("it ran"))
    long = [[5], [6], [7] * 1000]
    with pytest.raises(ValueError, match="prompt 2 has 1000 tokens and max_new_tokens is 8"):
        sd.compare(decoders, long, batches=1, repeats=3, new_tokens=8)
    with pytest.raises(ValueError, match="eos_token_id is 10000"):
        sd.compare(decoders, PROMPTS, batches=1, new_tokens=8, eos_token_id=10_000)


def test_texts_that_need_not_agree_have_no_figure(decoders):
    target = tiny("llama")
    sampled = sd.decoder(target)
    coupled = sampled.verifier(sd.Coupled())
    some = {"plain": sampled, "ngram": sampled.draft(sd.drafts.NGram(), length=2)}
    rows = sd.compare(some, PROMPTS, batches=(2,), repeats=1, new_tokens=6).rows
    assert [row["same_text"] for row in rows] == [None, None]
    both = {"plain": coupled, "ngram": coupled.draft(sd.drafts.NGram(), length=2)}
    assert [row["same_text"] for row in sd.compare(both, PROMPTS, (2,), 1, 6).rows] == [1, 1]
    other = {"plain": decoders["plain"], "other": sd.decoder(tiny("llama", seed=3)).greedy()}
    assert sd.compare(other, PROMPTS, (2,), 1, 6).rows[1]["same_text"] == 0
    with pytest.warns(UserWarning, match="'warm' samples otherwise than 'plain'.*give all the same sampling"):
        sd.compare({"plain": decoders["plain"], "warm": sampled}, PROMPTS, (2,), 1, 6)


def test_wrong_arguments_are_named(decoders):
    for error, says, arguments in (
        (TypeError, "decoders is a list: give a mapping", {"decoders": list(decoders.values())}),
        (TypeError, "decoder 'a' is a NoneType: give sd.decoder", {"decoders": {"a": None}}),
        (ValueError, "decoders is empty", {"decoders": {}}),
        (ValueError, "reference is 'x': there are ngram, plain, self", {"reference": "x"}),
        (ValueError, "new_tokens is 1: give at least 2", {"new_tokens": 1}),
        (ValueError, "repeats is 0: give at least 1", {"repeats": 0}),
        (ValueError, "batches, of one, is 0", {"batches": (0, 2)}),
        (
            ValueError,
            "decoder 'each', or its draft, has sampling settings for each request",
            {"decoders": {"each": sd.decoder(tiny("llama")).sampling(temperature=[1.0] * 8)}},
        ),
    ):
        with pytest.raises(error, match=says):
            sd.compare(**{"decoders": decoders, "prompts": PROMPTS, **arguments})
    assert lab.live.compare is sd.compare


def test_a_lossy_decoder_is_named_and_never_the_best():
    target = sd.TableModel.random(6, 1, seed=0)
    base = sd.decoder(target).draft(target, 3)
    lossy = base.verifier(sd.verifiers.TypicalAcceptance())
    found = sd.compare(
        {"plain": sd.decoder(target), "lossy": lossy}, PROMPTS[2:3], batches=1, repeats=2, new_tokens=40
    )
    assert [row["lossless"] for row in found.rows] == [True, False]
    assert found.best == {1: "plain"}
    assert "lossy, so these texts are not the target's: lossy" in repr(found)
    assert all("lossy" not in row["close"] for row in found.rows)
