"""Log-probabilities and several choices over HTTP: those of the target's own forward, whatever else is served meanwhile."""

# ruff: noqa: F401, F811
from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from test_endpoint import PROMPT, ask, complete, endpoint, events, plain, running, server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specdec as sd
from specdec.rng import seeds
from specdec.serving import engine as engines
from specdec.serving.engine import Engine
from specdec.serving.logprobs import LEAST, TokenNames, entries


def own(target, prompt, ids):
    """``[n, V]`` by transformers' own forward."""
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt + ids]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=2e-4)


def checked(server, choice, text, seed, top, **sampling):
    """That ``logprobs`` of a completion are those of the target, whatever was sampled from."""
    target, said = server.engine.target, choice["logprobs"]
    decoder = server.engine.decoder.with_sampling(sd.Sampling(**sampling))
    out = decoder.generate([PROMPT], 12, seed=seed)
    scores = own(target, out.prompt_ids[0], out.ids[0])
    assert choice["text"] == text == out.texts[0]
    assert "".join(said["tokens"]) == text
    assert said["text_offset"] == [len("".join(said["tokens"][:n])) for n in range(len(said["tokens"]))]
    close(said["token_logprobs"], scores.gather(1, torch.tensor(out.ids).T)[:, 0].tolist())
    for n, (i, made) in enumerate(zip(out.ids[0], said["top_logprobs"])):
        best = scores[n].topk(top)
        names = target.tokenizer.batch_decode([[t] for t in best.indices.tolist()])
        expected = dict(zip(names, best.values.tolist()))
        expected[target.tokenizer.decode([i])] = float(scores[n, i])
        assert made.keys() == expected.keys()
        close([made[name] for name in expected], list(expected.values()))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9}])
def test_those_of_completions_are_the_targets(server, sampling):
    choice = complete(server, logprobs=3, **sampling)["choices"][0]
    checked(server, choice, choice["text"], 3, 3, **sampling)
    bare = complete(server, logprobs=0, **sampling)["choices"][0]["logprobs"]
    assert bare["top_logprobs"] == [None] * 12
    assert bare["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
    assert complete(server, **sampling)["choices"][0]["logprobs"] is None


def test_tokens_after_a_stop_are_left_out(server):
    whole = complete(server, temperature=0, logprobs=1, max_tokens=24)["choices"][0]
    stop = whole["text"][9:12]
    cut = complete(server, temperature=0, logprobs=1, max_tokens=24, stop=stop)["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].find(stop)]
    said, n = cut["logprobs"], len(cut["logprobs"]["tokens"])
    assert said["text_offset"][-1] < len(cut["text"]) <= whole["logprobs"]["text_offset"][n]
    assert said["tokens"] == whole["logprobs"]["tokens"][:n]


def test_an_echo_has_those_of_the_prompt(server):
    """As evaluation harnesses ask for the likelihood of a text."""
    target = server.engine.target
    prompt = target.tokenizer("def mean(values):\n    return sum(values)")["input_ids"]
    for given in ("def mean(values):\n    return sum(values)", prompt, [prompt]):
        said = complete(server, prompt=given, echo=True, logprobs=1, max_tokens=1, temperature=0)
        choice = said["choices"][0]
        text, made = choice["text"], choice["logprobs"]
        assert text.startswith("def mean(values):\n    return sum(values)")
        assert "".join(made["tokens"]) == text
        assert made["text_offset"] == [len("".join(made["tokens"][:n])) for n in range(len(prompt) + 1)]
        assert made["token_logprobs"][0] is made["top_logprobs"][0] is None
        scores = own(target, prompt[:1], prompt[1:])
        close(made["token_logprobs"][1:-1], scores.gather(1, torch.tensor([prompt[1:]]).T)[:, 0].tolist())
        assert max(made["top_logprobs"][-1].values()) == made["token_logprobs"][-1]
        assert said["usage"]["completion_tokens"] == 1
    only, text = (complete(server, echo=e, temperature=0)["choices"][0] for e in (True, False))
    assert only == {**text, "text": PROMPT + text["text"]}


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_seeds_of_their_own(server, stream):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 5, "logprobs": 1}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        *parts, said = events(ask(server, "/v1/completions", body)[2])
        choices = []
        for n in range(5):
            own_parts = [part["choices"][0] for part in parts if part["choices"][0]["index"] == n]
            assert {part["logprobs"] for part in own_parts[:-1]} == {None}
            text = "".join(part["text"] for part in own_parts)
            choices.append({"index": n, "text": text, "logprobs": own_parts[-1]["logprobs"]})
    else:
        said = json.loads(ask(server, "/v1/completions", body)[2])
        choices = said["choices"]
    usage = said["usage"]
    own_seeds = [3, *seeds(3, 5)[1:].tolist()]
    for n, (choice, seed) in enumerate(zip(choices, own_seeds, strict=True)):
        assert choice["index"] == n
        checked(server, choice, choice["text"], seed, 1)
    assert len({choice["text"] for choice in choices}) == 5
    prompt = len(server.engine.target.tokenizer(PROMPT)["input_ids"])
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 60)
    assert usage["total_tokens"] == prompt + 60
    assert not server.engine.open
    assert len({one["text"] for one in complete(server, n=3, seed=None, temperature=1.0)["choices"]}) > 1


def test_chats_have_bytes(endpoint):
    model, tokenizer = sd.zoo.load("pocket-target")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with running(
        endpoint.Server(Engine(sd.decoder((model, tokenizer)).build(), 2), "127.0.0.1", 0, "x", 8)
    ) as made:
        body = {"messages": [{"role": "user", "content": "import os"}], "temperature": 0}
        wanted = {**body, "logprobs": True, "top_logprobs": 2}
        choice = json.loads(ask(made, "/v1/chat/completions", wanted)[2])["choices"][0]
        content, text = choice["logprobs"]["content"], choice["message"]["content"]
        assert bytes(byte for one in content for byte in one["bytes"]).decode() == text
        out = plain(made, 8, temperature=0.0)
        best = own(made.engine.target, out.prompt_ids[0], out.ids[0]).topk(2)
        for one, values in zip(content, best.values.tolist(), strict=True):
            assert one["top_logprobs"][0] == {key: one[key] for key in ("token", "bytes", "logprob")}
            close([top["logprob"] for top in one["top_logprobs"]], values)
        bare = json.loads(ask(made, "/v1/chat/completions", {**body, "logprobs": True})[2])["choices"][0]
        assert {len(one["top_logprobs"]) for one in bare["logprobs"]["content"]} == {0}
        for more, says in (
            ({"logprobs": 3}, "logprobs is 3: give true or false, and in top_logprobs"),
            ({"top_logprobs": 2}, "top_logprobs is 2: give the number with logprobs: true"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21: give a number from 0 to 20"),
            ({"echo": True}, "echo is true: only completions"),
        ):
            status, _, said = ask(made, "/v1/chat/completions", {**body, **more})
            assert status == 400
            assert says in said
        status, _, said = ask(made, "/v1/completions", {"prompt": PROMPT, "echo": True, "stream": True})
        assert (status, "echo is true: only completions that are no stream" in said) == (400, True)


@pytest.mark.parametrize("options", [{"graphs": "recorded"}, {"prefix_cache": 2**24}])
def test_others_are_served_meanwhile(endpoint, options):
    """Streams run on the same target between whose rounds the log-probabilities are computed, all on one thread."""
    model, tokenizer = sd.zoo.load("pocket-target")
    target, threads = sd.HFModel(model, tokenizer, **options), set()
    score = target.score

    def watched(*args, **named):
        threads.add(threading.get_ident())
        return score(*args, **named)

    target.score = watched
    engine = Engine(sd.decoder(target).draft(sd.drafts.NGram(), length=3).build(), 4)
    with running(endpoint.Server(engine, "127.0.0.1", 0, "x", 8)) as made:
        long = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True}
        with ThreadPoolExecutor(6) as pool:
            streams = [pool.submit(ask, made, "/v1/completions", long) for _ in range(2)]
            others = [
                pool.submit(complete, made, logprobs=2, temperature=1.0, seed=seed) for seed in range(3)
            ]
        assert threads == {engine.thread.ident}
        target.score = score
        for seed, one in enumerate(others):
            choice = one.result()["choices"][0]
            checked(made, choice, choice["text"], seed, 2)
        wanted = plain(made, 40, temperature=0.0).texts[0]
        for stream in streams:
            parts = events(stream.result()[2])
            assert "".join(part["choices"][0]["text"] for part in parts) == wanted


def test_an_error_ends_its_request_alone(server, monkeypatch):
    def refuse(*args, **named):
        raise MemoryError("no room for the text")

    monkeypatch.setattr(engines, "log_probs", refuse)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(complete, server, temperature=0)
        body = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 1, "n": 2}
        status, _, text = ask(server, "/v1/completions", body)
        assert (status, "no room for the text" in text) == (500, True)
        last = events(ask(server, "/v1/completions", {**body, "stream": True})[2])[-1]
        assert "no room" in last["error"]["message"]
        assert other.result(60)["choices"][0]["finish_reason"] == "length"
    monkeypatch.undo()
    assert complete(server, logprobs=1)["choices"][0]["logprobs"]["tokens"]


def byte_level():
    """A tokenizer in which every byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def test_names_of_tokens():
    tokenizer = byte_level()
    names = TokenNames(tokenizer)
    euro = tokenizer("€")["input_ids"]
    assert [names[i] for i in euro[:2]] == [("bytes:\\xe2", [0xE2]), ("bytes:\\x82", [0x82])]
    assert names[tokenizer("a")["input_ids"][0]] == ("a", [97])
    assert names[10**6] == ("token_id:1000000", None)
    assert names[tokenizer.eos_token_id] == ("<end>", None)


def test_offsets_of_bytes_and_impossible_tokens():
    tokenizer = byte_level()
    ids = tokenizer("a€b")["input_ids"]
    one = SimpleNamespace(ids=ids, prompt_ids=tokenizer("x")["input_ids"])
    found = sd.likelihood.LogProbs([torch.tensor([-1.0, -math.inf, -2, -3, -4])])
    made = entries(tokenizer, one, found)
    assert [entry.offset for entry in made] == [0, 1, 1, 1, 2]
    assert [entry.logprob for entry in made] == [-1, LEAST, -2, -3, -4]
    assert [entry.id for entry in entries(tokenizer, one, found, shown=2)] == ids[:4]
    assert entries(tokenizer, one, found, shown=0) == []
