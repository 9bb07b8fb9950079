"""The HTTP endpoint: its texts are the decoder's, in one piece and in parts, and what it cannot do is refused by name."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection

import pytest
import torch
from recipe_runs import imported
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec.executors import Ahead, Serial
from specdec.serving import penalties
from specdec.serving.engine import Engine, Job, Said
from specdec.serving.openai import NEUTRAL, asked
from specdec.serving.requests import Finished

PROMPT = "import os\n"


@pytest.fixture(scope="module")
def endpoint():
    with imported("endpoint") as module:
        yield module


@contextmanager
def running(made):
    """A server that answers."""
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.end()
        thread.join()


@pytest.fixture(scope="module")
def server(endpoint):
    with running(endpoint.served(endpoint.Settings(port=0, limit=3))) as made:
        yield made


def ask(server, path, body=None, raw=None):
    """Status, content type and text of an answer."""
    connection = HTTPConnection(*server.server_address, timeout=60)
    data = json.dumps(body) if raw is None else raw
    connection.request("GET" if body is raw is None else "POST", path, None if body is raw is None else data)
    answer = connection.getresponse()
    said = answer.status, answer.headers["Content-Type"], answer.read().decode()
    connection.close()
    return said


def complete(server, **body):
    status, _, text = ask(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "seed": 3, **body})
    assert status == 200, text
    return json.loads(text)


def events(text):
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def plain(server, new=12, seed=3, **sampling):
    decoder = sd.decoder(server.engine.target).sampling(**sampling).build()
    return decoder.generate([PROMPT], new, seed=seed)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0, "top_k": -1}])
def test_the_text_is_the_decoders(server, sampling):
    said, wanted = complete(server, **sampling), plain(server, temperature=0.0)
    assert said["choices"] == [
        {"index": 0, "logprobs": None, "text": wanted.texts[0], "finish_reason": "length"}
    ]
    usage = said["usage"]
    prompt = len(server.engine.target.tokenizer(PROMPT)["input_ids"])
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 12)
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert said["object"] == "text_completion"


def test_parts_are_the_whole(server):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 5, "stream": True}
    status, kind, text = ask(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert (status, kind) == (200, "text/event-stream")
    *parts, last, usage = events(text)
    made = "".join(part["choices"][0]["text"] for part in parts)
    assert len(parts) > 1
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 12
    assert made == complete(server, temperature=0.7, top_p=0.9, seed=5)["choices"][0]["text"]


def test_clients_share_batches_and_their_seeds_decide(server):
    most = 0

    def one(seed):
        return complete(server, temperature=1.0, seed=seed, max_tokens=40)["choices"][0]["text"]

    def watch():
        nonlocal most
        while not done.is_set():
            most = max(most, len(server.engine.open))
            time.sleep(0.001)

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(one, range(6)))
    done.set()
    watcher.join()
    assert most > 1
    assert texts == [one(seed) for seed in range(6)]
    assert len(set(texts)) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_is_not_shown(server, stream):
    whole = plain(server, 24, temperature=0.0).texts[0]
    stop = whole[9:12]
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stop": [stop], "stream": stream}
    _, _, text = ask(server, "/v1/completions", body)
    if stream:
        parts = events(text)
        made, end = "".join(part["choices"][0]["text"] for part in parts), parts[-1]["choices"][0]
    else:
        end = json.loads(text)["choices"][0]
        made = end["text"]
    assert made == whole[: whole.find(stop)]
    assert end["finish_reason"] == "stop"


def test_the_beginning_of_a_stop_waits(endpoint):
    job = Job(("END", "\n\n"))
    assert job.shown("a\n", last=False) == "a"
    assert job.shown("a\n", last=True) == "a\n"
    assert job.shown("a EN", last=False) == "a "
    assert job.shown("a END b", last=False) == "a "
    assert job.shown("a\n\nEND", last=True) == "a"


def test_a_schema_is_followed(server):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    said = complete(server, response_format=form, temperature=0, max_tokens=60)["choices"][0]
    assert json.loads(said["text"])["a"] in (1, 2)
    said = complete(server, structured_outputs={"regex": "[0-9]{3}"}, max_tokens=60)["choices"][0]
    assert (len(said["text"]), said["finish_reason"]) == (3, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_the_texts_that_each_has_alone(server, stream):
    """In the order of the prompts, then of their choices, with one usage."""
    ids = server.engine.target.tokenizer(PROMPT)["input_ids"]
    for prompts in (["import os\n", "def f(x):\n", "x = 1\n"], [ids, ids[:1]]):
        settings = {"seed": 7, "n": 2, "max_tokens": 9, "temperature": 0.8}
        alone = [complete(server, prompt=prompt, **settings) for prompt in prompts]
        wanted = [choice["text"] for one in alone for choice in one["choices"]]
        if not stream:
            said = complete(server, prompt=prompts, echo=True, **settings)
            usage = said["usage"]
            texts = [choice["text"] for choice in said["choices"]]
            before = [p if isinstance(p, str) else server.engine.target.tokenizer.decode(p) for p in prompts]
            assert texts == [before[i // 2] + text for i, text in enumerate(wanted)]
        else:
            body = {"prompt": prompts, "stream": True, "stream_options": {"include_usage": True}, **settings}
            rows = events(ask(server, "/v1/completions", body)[2])
            usage = rows[-1]["usage"]
            texts = [""] * len(wanted)
            for row in rows:
                for choice in row["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert texts == wanted
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == sum(one["usage"][name] for one in alone)


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", {"5": 1}), ("presence_penalty", 1), ("structured_outputs", {"regex": "a"})],
)
def test_captured_rounds_refuse_what_they_do_not_run_by_its_field(server, field, value):
    pytest.importorskip("llguidance")
    with pytest.raises(ValueError, match=f"^{field} is given: this endpoint runs --ahead"):
        asked({"prompt": PROMPT, field: value}, False, 8, server.engine.target, captured=True)


def test_ids_end_a_text_where_asked(server):
    tokenizer = server.engine.target.tokenizer
    settings = {"temperature": 0, "ignore_eos": True}
    whole = complete(server, max_tokens=12, **settings)["choices"][0]
    ids = tokenizer(whole["text"])["input_ids"]
    ended = complete(server, max_tokens=12, stop_token_ids=[ids[3]], **settings)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == 1 + ids.index(ids[3])
    assert whole["text"].startswith(ended["choices"][0]["text"])


PENALTIES = [
    {"logit_bias": {"50": 100}},
    {"logit_bias": {"273": -100, "12": 3.5}},
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2},
    {"frequency_penalty": -0.5, "presence_penalty": 1, "repetition_penalty": 1.2, "logit_bias": {"7": 2}},
]


@pytest.mark.parametrize("fields", PENALTIES, ids=lambda fields: ", ".join(fields))
def test_scores_are_changed_as_asked(server, fields):
    """The text is that of plain decoding with the rules written out token by token."""
    target = server.engine.target
    prompt = target.tokenizer(PROMPT)["input_ids"]
    text = list(prompt)
    for _ in range(12):
        scores = target.model(torch.tensor([text])).logits[0, -1].tolist()
        for token, bias in fields.get("logit_bias", {}).items():
            scores[int(token)] += bias
        for token in set(text):
            penalty = fields.get("repetition_penalty", 1)
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        for token in set(text[len(prompt) :]):
            times = text[len(prompt) :].count(token)
            scores[token] -= times * fields.get("frequency_penalty", 0) + fields.get("presence_penalty", 0)
        text.append(max(range(len(scores)), key=scores.__getitem__))
    said, plain = (
        complete(server, temperature=0, max_tokens=12, **more)["choices"][0] for more in (fields, {})
    )
    assert said["text"] == target.tokenizer.decode(text)[len(target.tokenizer.decode(prompt)) :]
    assert said["text"] != plain["text"]


def test_penalised_samples_are_those_of_plain_decoding(endpoint):
    """Beside other requests, with a model as the draft, in races: the text is that of the target alone."""
    target = sd.HFModel.from_pretrained("pocket-target")
    base = sd.decoder(target).verifier(sd.Coupled())
    engine = Engine(base.draft("pocket-tiny", length=3).build(), 4)
    with running(endpoint.Server(engine, "127.0.0.1", 0, "x", 8)) as made:
        bodies = [{**fields, "temperature": 0.9, "seed": i} for i, fields in enumerate([*PENALTIES, {}])]
        with ThreadPoolExecutor(len(bodies)) as pool:
            found = list(pool.map(lambda body: complete(made, **body)["choices"][0]["text"], bodies))
    prompt = len(target.tokenizer(PROMPT)["input_ids"])
    for i, (fields, text) in enumerate(zip([*PENALTIES, {}], found)):
        made = penalties.Penalties(prompt, **penalties.penalties_of(fields, target.vocab_size))
        plain = base.sampling(temperature=0.9, processors=(made,)).build()
        assert plain.generate(PROMPT, max_new_tokens=12, seed=i).texts == [text]


WRONG = [
    ({"prompt": PROMPT, "n": 0}, "n is 0: give a number of choices from 1 to 128"),
    ({"prompt": PROMPT, "n": True}, "n is true: give a whole number"),
    ({"prompt": PROMPT, "n": 2, "best_of": 2}, "best_of is 2: only 1 is supported"),
    ({"prompt": PROMPT, "logprobs": 21}, "logprobs is 21: give a number from 0 to 20"),
    ({"prompt": PROMPT, "logprobs": True}, "logprobs is true: give how many of the most probable tokens"),
    ({"prompt": PROMPT, "top_logprobs": 2}, "top_logprobs is 2: give the number in logprobs"),
    ({"prompt": PROMPT, "truncate": 3}, "truncate is not supported: leave it out"),
    ({"max_tokens": 3}, "prompt is missing"),
    ({"prompt": [PROMPT, ""]}, "prompt 1 is empty: give at least one token"),
    ({"prompt": ["", PROMPT]}, "prompt 0 is empty: give at least one token"),
    ({"prompt": [PROMPT, PROMPT, "x " * 3000]}, "prompt 2 has 3001 tokens and max_tokens is "),
    ({"prompt": [PROMPT, PROMPT], "stop": ["a", ""]}, "stop contains an empty string"),
    ({"prompt": [PROMPT, PROMPT], "max_tokens": 0}, "max_tokens is 0: give at least 1"),
    ({"prompt": [[True, False], [5]]}, "prompt has true or false"),
    ({"prompt": [[{"role": "user", "content": "x"}], "a"]}, "prompt is a chat"),
    ({"prompt": PROMPT, "logit_bias": {"9" * 5000: 1}}, "give ids of tokens"),
    ({"prompt": PROMPT, "repetition_penalty": 10**400}, "give a number from 0.01 to 100"),
    ({"prompt": [{"role": "user", "content": "x"}]}, "prompt is a chat"),
    ({"prompt": ""}, "prompt is empty: give at least one token"),
    ({"prompt": []}, "prompt is empty: give at least one token"),
    ({"prompt": [[]]}, "the prompt is empty"),
    ({"prompt": PROMPT, "messages": []}, "messages is of the other endpoint"),
    ({"prompt": PROMPT, "temperature": -1}, "temperature is -1: give 0 (greedy)"),
    ({"prompt": PROMPT, "temperature": "hot"}, 'temperature is "hot": give a number'),
    ({"prompt": PROMPT, "logit_bias": {"50": 101}}, 'logit_bias has {"50": 101}: give ids of tokens, 0 to'),
    ({"prompt": PROMPT, "logit_bias": {"9999999": 1}}, 'logit_bias has {"9999999": 1}: give ids'),
    ({"prompt": PROMPT, "logit_bias": {"-1": 1}}, 'logit_bias has {"-1": 1}: give ids'),
    ({"prompt": PROMPT, "logit_bias": {"5": True}}, 'logit_bias has {"5": true}: give ids'),
    ({"prompt": PROMPT, "stop_token_ids": [-1]}, "stop_token_ids is [-1]: give a list of ids, 0 to"),
    ({"prompt": PROMPT, "stop_token_ids": 5}, "stop_token_ids is 5: give a list"),
    ({"prompt": PROMPT, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs is given to a completion"),
    ({"prompt": PROMPT, "logit_bias": [5]}, "logit_bias is [5]: give an object"),
    ({"prompt": PROMPT, "presence_penalty": 3}, "presence_penalty is 3: give a number from -2 to 2"),
    ({"prompt": PROMPT, "frequency_penalty": -2.5}, "frequency_penalty is -2.5: give a number from -2 to 2"),
    ({"prompt": PROMPT, "repetition_penalty": 0}, "repetition_penalty is 0: give a number from 0.01 to 100"),
    ({"prompt": PROMPT, "stop": ["a", ""]}, "stop contains an empty string"),
    ({"prompt": PROMPT, "stream_options": {"include_usage": 1}}, "stream_options is "),
    ({"prompt": PROMPT, "stream_options": {"usage": True}}, "stream_options is "),
    ({"prompt": [True]}, "prompt has true or false"),
    ({"prompt": PROMPT, "top_p": 2}, "top_p is 2"),
    ({"prompt": PROMPT, "top_k": False}, "top_k is false: give a whole number"),
    ({"prompt": PROMPT, "ignore_eos": "no"}, 'ignore_eos is "no": give true or false'),
    ({"prompt": PROMPT, "stop": 5}, "stop is 5: give a text or a list"),
    ({"prompt": PROMPT, "stop": [5]}, "stop is [5]: give a text"),
    ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens is 0: give at least 1"),
    ({"prompt": PROMPT, "max_completion_tokens": -1}, "max_completion_tokens is -1: give at least 1"),
    ({"prompt": PROMPT, "max_tokens": 10**6}, "the prompt has 3 tokens and max_tokens is 1000000: "),
    ({"prompt": PROMPT, "seed": -1}, "seed"),
    ({"prompt": PROMPT, "response_format": {"type": "xml"}}, "response_format is"),
    (
        {"prompt": PROMPT, "response_format": {"type": "json_schema", "json_schema": "x"}},
        "response_format is",
    ),
    ({"prompt": PROMPT, "structured_outputs": {"choice": ["a"]}}, "have choice: give one of"),
    ({"prompt": PROMPT, "structured_outputs": {"regex": 5}}, "regex is 5: give a text"),
    ({"prompt": PROMPT, "structured_outputs": {"regex": "5", "json": {}}}, "have json, regex: give one of"),
    ({"prompt": PROMPT, "structured_outputs": {"regex": "("}}, "structured_outputs.regex: regex('(')"),
    (
        {
            "prompt": PROMPT,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}},
        },
        "response_format.json_schema.schema: json_schema(",
    ),
    ([1], "the body is no JSON object"),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_what_is_wrong_is_refused_by_name(server, body, message):
    for stream in (False, True):
        data = {**body, "stream": stream} if isinstance(body, dict) else body
        status, _, text = ask(server, "/v1/completions", data)
        error = json.loads(text)["error"]
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", 400)
        assert message in error["message"]
        if isinstance(body, dict):
            assert error["param"] in {*body, "prompt"}


def test_what_says_nothing_is_taken(server, endpoint):
    quiet = {
        **NEUTRAL,
        **penalties.NEUTRAL,
        "n": 1,
        "echo": False,
        "logprobs": False,
        "top_logprobs": 0,
        "presence_penalty": 0.0,
        "user": None,
        "structured_outputs": {"regex": None},
        "stop_token_ids": [],
        "metadata": {"a": "b"},
    }
    ids = server.engine.target.tokenizer(PROMPT)["input_ids"]
    said = [
        complete(server, temperature=0, **more) for more in ({}, quiet, {"prompt": ids}, {"prompt": [ids]})
    ]
    assert len({one["choices"][0]["text"] for one in said}) == 1


def test_other_answers(server):
    assert ask(server, "/health")[0] == 200
    model = json.loads(ask(server, "/v1/models")[2])["data"][0]
    assert (model["id"], model["max_model_len"]) == ("pocket-target", 2048)
    assert json.loads(ask(server, "/v1/models/pocket-target?x=1")[2]) == model
    assert ask(server, "/v2")[0] == 404
    assert ask(server, "/v2", {})[0] == 404
    assert ask(server, "/v1/completions")[0] == 405
    status, _, text = ask(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert status == 400
    assert "chat template" in json.loads(text)["error"]["message"]


def test_a_model_that_is_not_here_is_refused(server):
    message = "model is 'other', and 'pocket-target' is here: give that, or leave model out"
    wanted = {"message": message, "type": "not_found_error", "param": "model", "code": 404}
    for path, body in (("/v1/completions", {"prompt": PROMPT, "model": "other"}), ("/v1/models/other", None)):
        status, _, text = ask(server, path, body)
        assert (status, json.loads(text)["error"]) == (404, wanted)
    assert complete(server, model="pocket-target")["id"].startswith("cmpl-")


@pytest.mark.parametrize("raw", ["", "{", b"\xff{", "[" * 10**5, '{"seed": ' + "9" * 5000 + "}"])
def test_what_is_no_json_is_refused(server, raw):
    status, _, text = ask(server, "/v1/completions", raw=raw)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, None)
    assert error["message"].startswith("the body is no JSON: ")


def test_other_methods_are_refused_in_json(server):
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD"):
        connection = HTTPConnection(*server.server_address, timeout=60)
        connection.request(method, "/v1/completions", "{}")
        answer = connection.getresponse()
        text = answer.read()
        assert (answer.status, answer.headers["Content-Type"]) == (405, "application/json")
        assert not text if method == "HEAD" else json.loads(text)["error"]["code"] == 405
        connection.close()


def test_what_the_prefix_cache_had_is_in_the_usage(endpoint):
    """By prompt: one that was read before, one of which two blocks of 64 tokens are new, and each also beside another request."""
    long = "".join(f"value_{n} = {n}\n" for n in range(40))
    with running(endpoint.served(endpoint.Settings(port=0, prefix_cache=16, plain=True))) as made:
        ids = made.engine.target.tokenizer(long)["input_ids"]
        assert len(ids) > 200

        def cached(prompt, **more):
            usage = complete(made, prompt=prompt, max_tokens=2, **more)["usage"]
            assert usage["prompt_tokens"] == len(prompt)
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert cached(ids[:150], n=3) == 0  # the others copy what the first one read
        assert cached(ids[:150]) == cached(ids[:150], n=3) == 128
        assert cached(ids[:200]) == 128
        assert cached(ids[:193]) == 192
        assert cached(ids[:192]) == 128  # the last token is always read
        assert cached(ids[1:150]) == 0
        body = {"prompt": ids[:150], "stream": True, "n": 2, "stream_options": {"include_usage": True}}
        last = events(ask(made, "/v1/completions", body)[2])[-1]["usage"]
        assert last["prompt_tokens_details"] == {"cached_tokens": 128}


def test_without_a_prefix_cache_nothing_is_cached(server):
    for _ in range(2):
        said = complete(server, prompt=[5] * 200, max_tokens=1)
    assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_connection_goes_on_after_an_error(server):
    connection = HTTPConnection(*server.server_address, timeout=60)
    for body, status in (({"prompt": ""}, 400), ({"prompt": PROMPT, "max_tokens": 2}, 200)):
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == status
        answer.read()
    for name, value in (("Content-Length", "x"), ("Transfer-Encoding", "chunked")):
        connection.putrequest("POST", "/v1/completions")
        connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 411
        answer.read()
        connection.close()


def test_chats_are_answered(endpoint):
    model, tokenizer = sd.zoo.load("pocket-target")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    engine = Engine(sd.decoder((model, tokenizer)).build(), 2)
    with running(endpoint.Server(engine, "127.0.0.1", 0, "x", 8)) as made:
        wanted = plain(made, 8, temperature=0.0).texts[0]
        body = {"messages": [{"role": "user", "content": "import os"}], "temperature": 0}
        said = json.loads(ask(made, "/v1/chat/completions", body)[2])
        assert said["object"] == "chat.completion"
        assert said["choices"][0]["message"] == {"role": "assistant", "content": wanted}
        parts = [{"type": "text", "text": "import"}, {"type": "text", "text": " os"}]
        body["messages"] = [{"role": "user", "content": parts}]
        deltas = [
            event["choices"][0]["delta"]
            for event in events(ask(made, "/v1/chat/completions", {**body, "stream": True})[2])
        ]
        assert "".join(delta.get("content", "") for delta in deltas) == wanted
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert said["id"].startswith("chatcmpl-")

        for messages, says in (
            ([{"role": "user", "content": [{"type": "image_url"}]}], "messages has content that is no text"),
            ([{"role": "user", "content": [{"type": "text"}]}], "messages has content that is no text"),
            ([{"role": "user", "content": []}], "messages has content that is no text"),
            ([{"role": "user", "content": 5}], "messages has the content 5: give a text"),
            ([{"role": "user"}], "messages has the content None: give a text"),
            ([{"content": "x"}], "messages has the role None: give a text"),
            (["x"], "messages has 'x': give objects"),
            ([], "messages is empty"),
            ("x", 'messages is "x": give a list'),
        ):
            status, _, text = ask(made, "/v1/chat/completions", {"messages": messages})
            error = json.loads(text)["error"]
            assert (status, error["param"]) == (400, "messages")
            assert says in error["message"]
        called = {"role": "assistant", "content": None, "tool_calls": [{}]}
        body = {"messages": [called, {"role": "user", "content": "x"}], "max_tokens": 1}
        assert ask(made, "/v1/chat/completions", body)[0] == 200


def test_settings_of_a_chats_template_are_passed_on(endpoint):
    model, tokenizer = sd.zoo.load("pocket-target")
    tokenizer.chat_template = "{% for m in messages %}{% if loud %}# {% endif %}{{ m.content }}\n{% endfor %}"
    engine = Engine(sd.decoder((model, tokenizer)).build(), 2)
    with running(endpoint.Server(engine, "127.0.0.1", 0, "x", 8)) as made:
        body = {"messages": [{"role": "user", "content": "import os"}], "temperature": 0}
        for loud, text in ((False, "import os\n"), (True, "# import os\n")):
            more = {"chat_template_kwargs": {"loud": loud}}
            said = json.loads(ask(made, "/v1/chat/completions", body | more)[2])
            wanted = engine.decoder.with_sampling(sd.Sampling(0)).generate(text, max_new_tokens=8).texts[0]
            assert said["choices"][0]["message"]["content"] == wanted
            assert said["usage"]["prompt_tokens"] == len(tokenizer(text)["input_ids"])
        for wrong, says in (
            ({"chat_template": "x"}, "chat_template_kwargs has chat_template: give tools, documents"),
            ({"tokenize": True}, "chat_template_kwargs has tokenize: give"),
            ({"conversation": []}, "chat_template_kwargs has conversation: give"),
        ):
            status, _, text = ask(made, "/v1/chat/completions", body | {"chat_template_kwargs": wrong})
            error = json.loads(text)["error"]
            assert (status, error["param"]) == (400, "chat_template_kwargs")
            assert says in error["message"]
        body["messages"].append({"role": "assistant", "content": "x = "})
        asked_for = {"chat_template_kwargs": {"add_generation_prompt": True}}
        both = [ask(made, "/v1/chat/completions", body | more)[0] for more in ({}, asked_for)]
        assert both == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request(server, stream, monkeypatch):
    jobs = []
    submit = server.engine.submit

    def watched(*args, **settings):
        jobs.append(submit(*args, **settings))
        return jobs[-1]

    monkeypatch.setattr(server.engine, "submit", watched)
    connection = HTTPConnection(*server.server_address, timeout=60)
    body = {"prompt": PROMPT, "max_tokens": 900, "temperature": 1.0, "ignore_eos": True, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        connection.getresponse().close()
    while not jobs:
        time.sleep(0.001)
    connection.close()
    until = time.monotonic() + 60
    while jobs[0] in server.engine.open and time.monotonic() < until:
        time.sleep(0.01)
    assert jobs[0].gone.is_set()
    while isinstance(one := jobs[0].said.get(timeout=60).what, sd.StreamChunk):
        pass
    assert one.finish == "cancelled"
    assert len(one.ids) < 900


def test_an_engine_that_breaks_says_so(endpoint, capsys):
    def score(self, *args, **settings):
        raise RuntimeError("out of order")

    model, tokenizer = sd.zoo.load("pocket-target")
    decoder = sd.decoder(sd.HFModel(model, tokenizer)).build()
    broken = type("Broken", (sd.HFModel,), {"score": score})(model, tokenizer)
    engine = Engine(replace(decoder, target=broken), 2)
    with running(endpoint.Server(engine, "127.0.0.1", 0, "x", 8)) as made:
        for status in (500, 503):
            found, _, text = ask(made, "/v1/completions", {"prompt": PROMPT})
            assert found == status
            assert "out of order" in json.loads(text)["error"]["message"]
        assert ask(made, "/health")[0] == 503
    assert "out of order" in capsys.readouterr().err


def test_an_end_ends_what_runs(endpoint):
    made = endpoint.served(endpoint.Settings(port=0, plain=True))
    with running(made), ThreadPoolExecutor(1) as pool:
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
        answer = pool.submit(ask, made, "/v1/completions", body)
        while not made.engine.open:
            time.sleep(0.001)
        made.engine.close()
        status, _, text = answer.result(60)
        assert status == 200
        assert json.loads(text)["choices"][0]["finish_reason"] == "abort"
        assert ask(made, "/v1/completions", body)[0] == 503


def test_models_go_where_they_are_told_to(endpoint, monkeypatch):
    made = endpoint.Settings(port=0, draft="windowed:pocket-tiny", dtype="bfloat16", device="cpu")
    with running(endpoint.served(made)) as server:
        decoder = server.engine.decoder
        assert {decoder.target.dtype, decoder.draft.model.dtype} == {torch.bfloat16}
        assert (str(decoder.target.device), decoder.draft.model.window) == ("cpu", 64)
        assert complete(server)["usage"]["completion_tokens"] == 12
    moved = []

    def load(*given):
        moved.append(given)
        raise ValueError("loaded")

    monkeypatch.setattr(endpoint, "load", load)
    for options in ({}, {"device": "cpu", "dtype": "float32"}):
        with pytest.raises(SystemExit, match="loaded"):
            endpoint.served(endpoint.Settings(port=0, target="mine", **options))
    assert moved == [("mine", None, None), ("mine", torch.float32, "cpu")]
    with pytest.raises(SystemExit, match="--device gpu: give cpu"):
        endpoint.served(endpoint.Settings(port=0, device="gpu"))


def test_wrong_settings_are_refused(endpoint, server):
    with pytest.raises(SystemExit, match="--draft eagle3: no draft 'eagle3'"):
        endpoint.served(endpoint.Settings(port=0, draft="eagle3"))
    with pytest.raises(SystemExit, match="limit is 0"):
        endpoint.served(endpoint.Settings(port=0, limit=0))
    with pytest.raises(SystemExit, match=r"--port \d+: .*: give others"):
        endpoint.served(endpoint.Settings(port=server.server_address[1]))


def texts_of(executor):
    """What an engine says of requests with several temperatures, and the log-probabilities."""
    models = [
        tiny("llama", vocab_size=max(byte_tokenizer().get_vocab().values()) + 1, seed=n) for n in (0, 1)
    ]
    target, draft = (sd.HFModel(model, byte_tokenizer(), graphs="recorded") for model in models)
    engine = Engine(sd.decoder(target).draft(draft, 3).executor(executor).build(), limit=3)
    jobs = [
        engine.submit("ab" * (1 + n), (), top=2, seed=n, max_new_tokens=20, sampling=sd.Sampling(temperature))
        for n, temperature in enumerate([0.0, 1.0, 0.5, 0.0, 2.0])
    ]
    try:
        ends = [next(filter(done, iter(partial(job.said.get, timeout=60), None))) for job in jobs]
    finally:
        engine.close()
    return [(one.what.ids, one.log_probs) for one in ends]


def done(said):
    return isinstance(said, Said) and isinstance(said.what, Finished)


def test_an_engine_of_whole_rounds_says_the_same():
    for (ids, found), (others, expected) in zip(texts_of(Ahead()), texts_of(Serial()), strict=True):
        assert ids == others
        torch.testing.assert_close(found.values, expected.values)


def test_whole_rounds_need_graphs(endpoint):
    with pytest.raises(SystemExit, match="graphs=True"):
        endpoint.served(endpoint.Settings(port=0, ahead=True, draft="pocket-tiny"))
