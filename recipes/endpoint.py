"""An HTTP endpoint over a decoder, with OpenAI's completions and chat completions: for existing load generators and clients.

    python recipes/endpoint.py --target FOLDER_OR_HUB_ID --draft FOLDER_OR_HUB_ID
    curl localhost:8000/v1/completions -d '{"prompt": "import os", "max_tokens": 32, "temperature": 0}'

POST /v1/completions and /v1/chat/completions take `prompt` (a text or ids) or `messages`, `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `seed`,
`stop`, `ignore_eos`, `stream`, `stream_options`, and a grammar as `response_format` or as vLLM's `structured_outputs` (`json`, `regex` or `grammar`). An
unsupported field is refused by name, unless its value has no effect. GET /v1/models and /health answer, too. All requests share the batches of one decoder (Decoder.serve). The usage of an answer says
how many drafted tokens were accepted and rejected. --draft is a pocket model, a folder or a hub id, of a causal LM, a SPIRe draft or a head, or one of ngram,
suffix and none; --plain decodes with the target alone, so that the same client measures both.

A request without a temperature has 1, whatever the model's generation config says. The endpoint is made for experiments: it has no authentication, no encryption and
no rate limits. It accepts connections from this machine only, unless --host says otherwise.
"""

from __future__ import annotations

import json
import queue
import re
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import checkout  # noqa: F401
import torch

import specdec as sd
from specdec.capabilities import ModelInfo
from specdec.lab.console import quiet, short_errors
from specdec.lab.options import option, parse
from specdec.parts import as_draft
from specdec.prompts import rows_of

UNTRAINED = {"ngram": sd.drafts.NGram, "suffix": sd.drafts.Suffix, "none": sd.drafts.NoDraft}
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
TAKEN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "seed", "top_k"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
    **dict.fromkeys(("stream", "ignore_eos"), (bool,)),
    **dict.fromkeys(("stream_options", "response_format", "structured_outputs"), (dict,)),
    **dict.fromkeys(("prompt", "stop"), (str, list)),
    **dict.fromkeys(("model", "user"), (str,)),
    "messages": (list,),
}
"""What a body may have, and its types."""
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    str: "a text",
    list: "a list",
}
NEUTRAL = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty"), 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs", "min_tokens", "priority"), 0),
    **dict.fromkeys(("echo", "logprobs", "use_beam_search", "include_stop_str_in_output"), False),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens", "spaces_between_special_tokens"), True),
    **{"logit_bias": {}, "tools": [], "stop_token_ids": [], "tool_choice": "none", "suffix": ""},
}
"""What else clients send, with the value that does nothing, which alone is taken."""


@dataclass(frozen=True)
class Settings:
    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    draft: str = option("ngram", "a pocket model, a folder, a hub id, ngram, suffix or none")
    k: int = option(4, "tokens that the draft proposes in a round")
    plain: bool = option(False, "no draft, whatever --draft says")
    limit: int = option(16, "requests that are decoded at a time")
    capacity: int = option(
        0,
        "the most tokens of a request, for which memory is made at the start; longer ones are refused (0: memory grows as needed)",
    )
    max_tokens: int = option(128, "new tokens of a request without max_tokens")
    host: str = option("127.0.0.1", "the address to listen on")
    port: int = option(8000, "the port to listen on (0: any)")
    threads: int = option(1, "torch threads")


class Stopped(RuntimeError):
    """No more requests are taken."""


@dataclass(eq=False)
class Job:
    """A request of a client: what the engine has to say of it (chunks, then what is finished, or an error), and whether the client is gone."""

    prompt_tokens: int
    stops: tuple[str, ...]
    said: queue.Queue[Any] = field(default_factory=queue.Queue)
    gone: threading.Event = field(default_factory=threading.Event)

    def next(self, connection: socket.socket) -> Any:
        """What is said next; raises ConnectionResetError if the client goes before."""
        while True:
            try:
                said = self.said.get(timeout=0.2)
            except queue.Empty:
                said = None
            if said is not None and not isinstance(said, sd.StreamChunk):
                return said
            try:
                if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    raise ConnectionResetError("the client is gone")
            except BlockingIOError:  # it waits
                pass
            if said is not None:
                return said

    def shown(self, text: str, last: bool) -> str:
        """What of a text may be shown: what is before a stop, and, while there may be more, not the beginning of one."""
        cut = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if cut is not None:
            return text[:cut]
        held = 0
        if not last:
            held = max((n for s in self.stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        return text[: len(text) - held]


class Engine:
    """A thread that serves requests from a queue with one decoder.

    Raises:
        TypeError, ValueError: the decoder cannot serve, or a number is wrong.
    """

    def __init__(self, decoder: sd.Decoder, limit: int, capacity: int | None = None):
        self.decoder = decoder
        self.target: Any = decoder.target
        self.inbox: queue.Queue[sd.Request | None] = queue.Queue()
        self.open, self.lock = set[Job](), threading.Lock()
        self.broken: BaseException | None = None
        rows_of(self.target, "a")  # a tokenizer may change itself when it is first used
        self.stream = decoder.serve(
            self._arrivals(), limit, capacity=capacity, errors="yield", own_sampling=True
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(self, prompt: Any, stops: tuple[str, ...], **settings: Any) -> Job:
        """Queue a request.

        Raises:
            Stopped: no more are taken. TypeError, ValueError: it is no request, or what its tokenizer's chat template raises.
        """
        rows = rows_of(self.target, prompt)
        if len(rows) > 1:
            raise ValueError(f"prompt holds {len(rows)} prompts: send a request for each")
        job = Job(len(rows[0]), stops)
        request = sd.Request(
            rows[0], key=job, arrival=None, cancelled=job.gone.is_set, on_chunk=job.said.put, stop_strings=stops, **settings
        )  # fmt: skip
        with self.lock:
            if self.broken is not None:
                raise Stopped(str(self.broken))
            self.open.add(job)
            self.inbox.put(request)
        return job

    def close(self) -> None:
        """Stop; requests end with what they have."""
        with self.lock:
            self.broken = self.broken or Stopped("the server is ending")
            for job in self.open:
                job.gone.set()
            self.inbox.put(None)
        self.thread.join()

    def _arrivals(self) -> Iterator[sd.Request | None]:
        while True:
            try:
                request = self.inbox.get_nowait()
            except queue.Empty:
                yield None
                continue
            if request is None:
                return
            yield request

    def _run(self) -> None:
        error: BaseException = Stopped("the server is ending")
        try:
            for one in self.stream:
                job: Any = one.request.key
                with self.lock:
                    self.open.discard(job)
                job.said.put(one)
        except BaseException as raised:
            error = raised
            traceback.print_exc()
        finally:
            with self.lock:
                self.broken = self.broken or error
                for job in self.open:
                    job.said.put(error)
                self.open.clear()


_compiling = threading.Lock()


@lru_cache(64)
def _grammar(kind: str, text: str, tokenizer: Any) -> Any:
    made = {"json": sd.grammars.json_schema, "regex": sd.grammars.regex, "grammar": sd.grammars.lark}
    return made[kind](text, tokenizer)


def grammar_of(body: Mapping[str, Any], tokenizer: Any) -> Any:
    """The grammar of a request, or ``None``. Equal ones are made once, so that requests share what was read.

    Raises:
        ValueError: it is invalid, or not supported.
    """
    wanted = {name: one for name, one in body.get("structured_outputs", {}).items() if one is not None}
    form = body.get("response_format", {"type": "text"})
    kind, schema = form.get("type"), form.get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict):
        wanted["response_format.json_schema.schema"] = schema.get("schema") or {"type": "object"}
    elif kind == "json_object":
        wanted["response_format.json_schema.schema"] = {"type": "object"}
    elif kind != "text":
        raise ValueError(
            f"response_format is {form}: give the type text, json_object, or json_schema with its json_schema"
        )
    if len(wanted) > 1 or wanted.keys() - {"json", "regex", "grammar", "response_format.json_schema.schema"}:
        raise ValueError(
            f"structured_outputs and response_format have {', '.join(sorted(wanted))}: give one of json, regex and grammar"
        )
    for name, text in wanted.items():
        if not isinstance(text, str) and (name in ("regex", "grammar") or not isinstance(text, dict)):
            raise ValueError(
                f"{name} is {text!r}: give a text{'' if name in ('regex', 'grammar') else ' or an object'}"
            )
        with _compiling:
            kind = "json" if "schema" in name else name
            return _grammar(kind, text if isinstance(text, str) else json.dumps(text), tokenizer)
    return None


def prompt_of(body: Mapping[str, Any], chat: bool) -> Any:
    """The prompt of a completion, or the messages of a chat, with the texts of their parts joined; raises ValueError for others."""
    name = "messages" if chat else "prompt"
    if name not in body:
        raise ValueError(f"{name} is missing")
    if not chat:
        if any(isinstance(one, dict) for one in body[name]):
            raise ValueError("prompt is a chat: POST it to /v1/chat/completions as messages")
        if any(isinstance(one, bool) for one in body[name]):
            raise ValueError("prompt has true or false: give a text, or ids")
        return body[name]
    made = []
    for message in body[name]:
        if not isinstance(message, dict):
            raise ValueError(f"messages has {message!r}: give objects with role and content")
        parts = message.get("content")
        if isinstance(parts, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
                raise ValueError("messages has content that is no text: give parts of the type text")
            message = {**message, "content": "".join(part["text"] for part in parts)}
        made.append(message)
    return made


def asked(body: Any, chat: bool, most: int, tokenizer: Any) -> dict[str, Any]:
    """The arguments of ``Engine.submit`` that a body asks for.

    Raises:
        TypeError, ValueError: the body is no object, has no prompt, or has what is not supported.
    """
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name in TAKEN and type(value) not in TAKEN[name]:
            raise ValueError(
                f"{name} is {json.dumps(value)}: give {' or '.join(map(WORDS.get, TAKEN[name]))}"
            )
        if name not in TAKEN and name not in NEUTRAL:
            raise ValueError(f"{name} is not supported: leave it out")
        if name in NEUTRAL and (
            value != NEUTRAL[name] or isinstance(value, bool) != isinstance(NEUTRAL[name], bool)
        ):
            raise ValueError(f"{name} is {json.dumps(value)}: only {json.dumps(NEUTRAL[name])} is supported")
    settings = {name: body[name] for name in SAMPLING if name in body}
    if settings.get("top_k", 1) in (0, -1):  # vLLM's words for all
        del settings["top_k"]
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"stop is {stops!r}: give a text, or a list of texts")
    made = {
        "prompt": prompt_of(body, chat),
        "stops": tuple(stops),
        "max_new_tokens": body.get("max_completion_tokens", body.get("max_tokens", most)),
        "seed": body.get("seed"),
        "eos_token_id": () if body.get("ignore_eos") else None,
    }
    rules = grammar_of(body, tokenizer)
    if settings or rules is not None:
        made["sampling"] = sd.Sampling(**settings, grammar=rules)
    return made


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after another."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Server

    def log_message(self, *words: Any) -> None:
        """Nothing: a line for each request would be most of what is seen."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200 if self.server.engine.broken is None else 503, {})
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [self.server.model()]})
        else:
            self._refuse(
                404,
                f"{self.path} is not here: GET /v1/models or /health, POST /v1/completions or /v1/chat/completions",
            )

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            self.close_connection = True  # the body cannot be told from a next request
            self._refuse(411, "give a Content-Length")
            return
        data = self.rfile.read(int(length))
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._refuse(404, f"{self.path} is not here: POST /v1/completions or /v1/chat/completions")
            return
        with self.server.answering():
            self._complete(data, chat=self.path.startswith("/v1/chat"))

    def _complete(self, data: bytes, chat: bool) -> None:
        engine = self.server.engine
        try:
            body = json.loads(data)
            job = engine.submit(**asked(body, chat, self.server.most, engine.target.tokenizer))
        except Stopped as error:
            self._refuse(503, str(error))
            return
        except Exception as error:  # a chat template may raise anything
            self._refuse(400, str(error))
            return
        answer = Answer(chat, self.server.name, job)
        try:
            if body.get("stream"):
                self._stream(answer, bool((body.get("stream_options") or {}).get("include_usage")))
            else:
                self._whole(answer)
        except OSError:  # the client is gone
            self.close_connection = True
        finally:
            job.gone.set()

    def _whole(self, answer: Answer) -> None:
        while isinstance(said := answer.job.next(self.connection), sd.StreamChunk):
            pass
        if not self._failed(said):
            text = answer.job.shown(said.text, last=True)
            content: Any = (
                {"message": {"role": "assistant", "content": text}} if answer.chat else {"text": text}
            )
            self._send(200, answer.made({**content, **answer.end(said)}) | {"usage": answer.usage(said)})

    def _failed(self, said: Any) -> bool:
        """Whether an error was said; then it is the answer."""
        error = said if isinstance(said, BaseException) else said.error
        if error is None:
            return False
        self._refuse(400 if isinstance(error, (TypeError, ValueError)) else 500, str(error))
        return True

    def _stream(self, answer: Answer, usage: bool) -> None:
        """Server-sent events, one for every round; an error before the first is an answer of its own."""
        said = answer.job.next(self.connection)
        if isinstance(said, sd.StreamChunk) and said.finish == "error":
            said = answer.job.next(self.connection)
        if not isinstance(said, sd.StreamChunk) and self._failed(said):
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        text, sent, first = "", 0, True
        while isinstance(said, sd.StreamChunk):
            text += said.text
            shown = answer.job.shown(text, last=said.finish is not None)
            self._event(
                answer.made(answer.piece(shown[sent:], first=first) | {"finish_reason": None}, part=True)
            )
            sent, first = max(sent, len(shown)), False
            said = answer.job.next(self.connection)
        error = said if isinstance(said, BaseException) else said.error
        if error is not None:
            self._event({"error": {"message": str(error), "type": type(error).__name__}})
        else:
            self._event(answer.made(answer.piece() | answer.end(said), part=True))
            if usage:
                self._event(answer.made(None, part=True) | {"usage": answer.usage(said)})
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()

    def _event(self, row: Mapping[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(row)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, row: Mapping[str, Any]) -> None:
        data = json.dumps(row).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:  # the client is gone
            self.close_connection = True

    def _refuse(self, status: int, message: str) -> None:
        kind = {400: "invalid_request_error", 404: "not_found_error"}.get(status, "server_error")
        message = re.sub(r"^request \d+: ", "", message).replace("prompt 0", "the prompt")
        self._send(status, {"error": {"message": message, "type": kind, "code": status}})


@dataclass(frozen=True)
class Answer:
    """What is sent of a job, in OpenAI's words."""

    chat: bool
    model: str
    job: Job
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def made(self, choice: Mapping[str, Any] | None, part: bool = False) -> dict[str, Any]:
        kind = f"chat.completion{'.chunk' if part else ''}" if self.chat else "text_completion"
        choices = [] if choice is None else [{"index": 0, "logprobs": None, **choice}]
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def piece(self, text: str | None = None, first: bool = False) -> dict[str, Any]:
        if not self.chat:
            return {"text": text or ""}
        role = {"role": "assistant"} if first else {}
        return {"delta": role if text is None else {**role, "content": text}}

    def end(self, one: sd.Finished) -> dict[str, str]:
        return {"finish_reason": {"length": "length", "cancelled": "abort"}.get(one.finish, "stop")}

    def usage(self, one: sd.Finished) -> dict[str, Any]:
        """Counts of tokens. Drafted ones that were accepted or rejected are not among ``completion_tokens``: a stop may drop accepted ones."""
        accepted, drafted = one.stats.accepted, one.stats.drafted
        return {
            "prompt_tokens": self.job.prompt_tokens,
            "completion_tokens": len(one.ids),
            "total_tokens": self.job.prompt_tokens + len(one.ids),
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
            },
        }  # fmt: skip


class Server(ThreadingHTTPServer):
    """Clients, each in a thread of its own, over one ``engine``. ``name``: of the model. ``most``: new tokens of requests without ``max_tokens``."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, engine: Engine, host: str, port: int, name: str, most: int):
        self.engine, self.name, self.most, self.began = engine, name, most, int(time.time())
        self.answers, self.idle = 0, threading.Condition()
        super().__init__((host, port), Handler)

    def model(self) -> dict[str, Any]:
        """The entry of the list of models."""
        longest = ModelInfo.of(self.engine.target).max_positions
        made = {"id": self.name, "object": "model", "created": self.began, "owned_by": "specdec"}
        return {**made, "root": self.name, "parent": None, "max_model_len": longest}

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A context in which a request is answered, for which ``end`` waits."""
        with self.idle:
            self.answers += 1
        try:
            yield
        finally:
            with self.idle:
                self.answers -= 1
                self.idle.notify_all()

    def end(self) -> None:
        """Stop; requests end with what they have, and their answers are written."""
        self.server_close()
        self.engine.close()
        with self.idle:
            self.idle.wait_for(lambda: not self.answers, timeout=5)


def draft_of(s: Settings, target: Any) -> Any:
    """The draft of the settings; raises SystemExit if it is none."""
    try:
        return (
            UNTRAINED[s.draft]() if s.draft in UNTRAINED else as_draft(s.draft, "it", target.device, target)
        )
    except TypeError as error:
        raise SystemExit(f"--draft {s.draft}: {error}") from None


def served(s: Settings) -> Server:
    """A server that is ready to run.

    Raises:
        SystemExit: the target has no tokenizer, a setting is wrong, or the port is not free.
    """
    torch.set_num_threads(s.threads)
    quiet()
    with short_errors():
        base = sd.decoder(s.target)
        target: Any = base.build().target
        if target.tokenizer is None:
            raise SystemExit(f"--target {s.target}: it has no tokenizer: save one into its folder")
        if not s.plain:
            base = sd.decoder(target).draft(draft_of(s, target), length=s.k)
        engine = Engine(base.build(), s.limit, s.capacity or None)
    try:
        return Server(engine, s.host, s.port, s.target, s.max_tokens)
    except OSError as error:
        engine.close()
        raise SystemExit(f"--host {s.host} --port {s.port}: {error.strerror}: give others") from None


def main(s: Settings) -> None:
    server = served(s)
    print(f"{s.target} at http://{s.host}:{server.server_address[1]}/v1 (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("ending")
    finally:
        server.end()


if __name__ == "__main__":
    main(parse(Settings, __doc__))
