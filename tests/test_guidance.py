"""Schemas, regular expressions and context-free grammars that llguidance reads, on the pocket models."""

from __future__ import annotations

import copy
import json
import pickle
import re

import numpy as np
import pytest
import torch

import specdec as sd
from specdec.grammars import LLGuidance

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(*sd.zoo.load("pocket-target"))


@pytest.fixture(scope="module")
def small():
    return sd.HFModel(*sd.zoo.load("pocket-tiny"))


@pytest.mark.parametrize("draft", ["chain", "tree", "lookup"])
def test_json_of_a_schema(draft, target, small):
    drafts = {
        "chain": sd.drafts.Model(small),
        "tree": sd.drafts.Tree(small, (3, 2)),
        "lookup": sd.drafts.NGram(),
    }
    grammar = sd.grammars.json_schema(SCHEMA, target.tokenizer, whitespace=False)
    base = sd.decoder(target).sampling(grammar=grammar, temperature=1.2).verifier(sd.Coupled())
    out = base.draft(drafts[draft], 3).build().generate(["x = ", "def f("], 40, seed=0)
    assert out.finish == ["eos", "eos"]
    assert out.ids == base.build().generate(["x = ", "def f("], 40, seed=0).ids
    for text in out.texts:
        found = json.loads(text)
        assert found.keys() == {"a", "b"}
        assert found["b"] in ("x", "yy")


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[a-c]{2,4}(-[0-9]){0,3}", r"[a-c]{2,4}(-[0-9]){0,3}"),
        ("lark", 'start: "(" start ")" | /[ab]/', r"\(*[ab]\)*"),
    ],
)
def test_other_languages(kind, text, pattern, target, small):
    grammar = getattr(sd.grammars, kind)(text, target.tokenizer)
    decoder = sd.decoder(target).draft(small, 3).sampling(grammar=grammar).build()
    out = decoder.generate(["import os"] * 3, 60, seed=1, eos_token_id=())
    for text, finish in zip(out.texts, out.finish):
        assert finish == "eos"
        assert re.fullmatch(pattern, text)


def test_texts_are_those_of_a_processor_that_reads_them_anew(target, small):
    grammar = sd.grammars.json_schema(SCHEMA, target.tokenizer)
    prompt, end = [5, 6, 7], target.tokenizer.eos_token_id

    def processor(ids, scores):
        state = grammar.start()
        for token in ids[0, len(prompt) :].tolist():
            if token == end:
                return scores
            state = grammar.advance(state, token)
        words = grammar.allowed(state).numpy().view(np.uint8)
        mask = np.unpackbits(words, bitorder="little", count=scores.shape[1]).view(bool)
        return scores.masked_fill(~torch.from_numpy(mask), -torch.inf)

    base = sd.decoder(target).draft(small, 3)
    one = base.sampling(grammar=grammar).build().generate([prompt], 16, seed=1)
    other = base.sampling(processors=(processor,)).build().generate([prompt], 16, seed=1)
    assert one.ids == other.ids


def test_a_schema_is_saved_and_copied(target, tmp_path):
    grammar = sd.grammars.json_schema(json.dumps(SCHEMA), target.tokenizer, whitespace=False)
    decoder = sd.decoder(target).greedy().sampling(grammar=grammar).build()
    decoder.save(tmp_path / "d")
    loaded = sd.load(tmp_path / "d").build()
    out = [d.generate("x = ", 30).ids for d in (decoder, loaded)]
    assert out[0] == out[1]
    for same in (copy.deepcopy(grammar), pickle.loads(pickle.dumps(grammar))):
        assert (same.kind, same.text, same.end_ids) == (grammar.kind, grammar.text, grammar.end_ids)
        assert torch.equal(same.allowed(same.start()), grammar.allowed(grammar.start()))
    assert copy.deepcopy(decoder.sampling).grammar.grammar.text == grammar.text


def test_several_end_tokens_and_one_without(target):
    tokenizer = target.tokenizer
    other = tokenizer.convert_tokens_to_ids("import")
    two = sd.grammars.regex("ab?", tokenizer, end_ids=(tokenizer.eos_token_id, other))
    (a,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    packed = two.allowed(two.advance(two.start(), a)).numpy().view(np.uint8)
    open_ = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    assert {tokenizer.eos_token_id, other} < set(open_)
    bare = copy.deepcopy(tokenizer)
    bare.eos_token = None
    with pytest.raises(ValueError, match=r"no eos_token.*give end_ids="):
        sd.grammars.regex("ab?", bare)


def test_what_is_wrong_is_refused(target):
    tokenizer = target.tokenizer
    with pytest.raises(ValueError, match=r"(?s)regex\('\[ab'\) is no grammar.*unclosed"):
        sd.grammars.regex("[ab", tokenizer)
    with pytest.raises(ValueError, match="is no grammar"):
        sd.grammars.json_schema({"type": "nothing"}, tokenizer)
    with pytest.raises(TypeError, match="tokenizer is a NoneType: give a fast tokenizer"):
        sd.grammars.regex("a", None)
    with pytest.raises(TypeError, match="regex is a int"):
        sd.grammars.regex(3, tokenizer)
    with pytest.raises(ValueError, match="kind is 'ebnf'"):
        LLGuidance("ebnf", "a", tokenizer)
    words = sd.zoo.load("pocket-words")[1]
    with pytest.raises(ValueError, match="made for another tokenizer than the target's"):
        sd.decoder(target).sampling(grammar=sd.grammars.regex("a+", words)).build()
    stream = (
        sd.decoder(target)
        .build()
        .serve(
            [sd.Request("x", 4, sampling=sd.Sampling(grammar=sd.grammars.regex("a+", words)))],
            own_sampling=True,
        )
    )
    with pytest.raises(ValueError, match=r"request 0.*made for another tokenizer"):
        next(stream)


@pytest.mark.parametrize("whitespace", [True, False])
@pytest.mark.parametrize(
    ("schema", "kind", "message"),
    [
        (True, TypeError, "schema is True: give an object"),
        ("true", TypeError, "schema is True: give an object"),
        ("{bad", ValueError, "schema is no JSON"),
    ],
)
def test_what_is_no_schema_is_named(schema, kind, message, whitespace, target):
    with pytest.raises(kind, match=message):
        sd.grammars.json_schema(schema, target.tokenizer, whitespace=whitespace)


@pytest.mark.parametrize("ends", [-1, 10**7])
def test_end_tokens_are_the_tokenizers(ends, target):
    with pytest.raises(ValueError, match=f"end_ids has {ends}: give ids of the tokenizer"):
        sd.grammars.regex("a", target.tokenizer, end_ids=ends)
