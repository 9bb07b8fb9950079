"""An HTTP endpoint over a decoder, with OpenAI's completions and chat completions: for existing load generators and clients.

    python recipes/endpoint.py --target FOLDER_OR_HUB_ID --draft FOLDER_OR_HUB_ID
    curl localhost:8000/v1/completions -d '{"prompt": "import os", "max_tokens": 32, "temperature": 0}'

POST /v1/completions and /v1/chat/completions take `prompt` (a text, ids, or a list of these) or `messages`, `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `seed`,
`stop`, `stop_token_ids`, `ignore_eos`, `chat_template_kwargs`, `stream`, `stream_options`, `n`, `logprobs` (with `top_logprobs` in a chat, `echo` in a completion), `logit_bias`, `presence_penalty`,
`frequency_penalty`, `repetition_penalty`, and a grammar as `response_format` or as
vLLM's `structured_outputs` (`json`, `regex` or `grammar`). An unsupported field is refused by name, unless its value has no effect. GET /v1/models and /health answer, too. All requests share the batches of one decoder (Decoder.serve). The usage of an answer says
how many drafted tokens were accepted and rejected, and how many of the prompt's --prefix-cache had. --draft is a pocket model, a folder or a hub id, of a causal LM, a SPIRe draft or a head, or one of ngram,
suffix, none and what else compare.py takes; --plain decodes with the target alone, so that the same client measures both.

A request without a temperature has 1, whatever the model's generation config says. The endpoint is made for experiments: it has no authentication, no encryption and
no rate limits. It accepts connections from this machine only, unless --host says otherwise.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import checkout  # noqa: F401
import torch

import specdec as sd
from specdec.capabilities import ModelInfo
from specdec.executors import Ahead
from specdec.lab.console import quiet, short_errors
from specdec.lab.loading import load, named_draft
from specdec.lab.options import option, parse
from specdec.lab.recipe import Placement
from specdec.serving.engine import Engine, Said, Stopped
from specdec.serving.openai import Answer, asked, refusal

PATHS = "/v1/completions", "/v1/chat/completions"
HERE = "GET /v1/models or /health, POST /v1/completions or /v1/chat/completions"


@dataclass(frozen=True)
class Settings(Placement):
    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    draft: str = option(
        "ngram", "a pocket model, a folder, a hub id, ngram, suffix, none, and others as for compare.py"
    )
    k: int = option(4, "tokens that the draft proposes in a round")
    plain: bool = option(False, "no draft, whatever --draft says")
    ahead: bool = option(
        False,
        "run whole rounds as CUDA graphs, launched a round ahead (executors.Ahead): on a GPU, without grammars",
    )
    limit: int = option(16, "requests that are decoded at a time")
    capacity: int = option(
        0,
        "the most tokens of a request, for which memory is made at the start; longer ones are refused (0: memory grows as needed)",
    )
    prefix_cache: int = option(
        0,
        "MiB in which the target keeps prompts, for requests that begin like earlier ones (0: it keeps none)",
    )
    max_tokens: int = option(128, "new tokens of a request without max_tokens")
    host: str = option("127.0.0.1", "the address to listen on")
    port: int = option(8000, "the port to listen on (0: any)")
    threads: int = option(1, "torch threads")


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after another."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Server
    asked: tuple[Any, bool] = None, False  # the body of the request, and whether it is a chat

    def log_message(self, *words: Any) -> None:
        """Nothing: a line for each request would be most of what is seen."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """An error of HTTP itself, such as another method, in JSON."""
        self.close_connection = True  # what follows it cannot be told from a next request
        self._refuse(405 if code == 501 else code, f"{message or self.responses[code][0]}: {HERE}")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            self._send(200 if self.server.engine.broken is None else 503, {})
        elif path == "/v1/models":
            self._send(200, {"object": "list", "data": [self.server.model()]})
        elif path.startswith("/v1/models/"):
            if not self._other_model(unquote(path.removeprefix("/v1/models/"))):
                self._send(200, self.server.model())
        elif path in PATHS:
            self._refuse(405, f"{path} takes POST")
        else:
            self._refuse(404, f"{path} is not here: {HERE}")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            self.close_connection = True  # the body cannot be told from a next request
            self._refuse(411, "give a Content-Length")
            return
        data = self.rfile.read(int(length))
        path = self.path.partition("?")[0]
        if path not in PATHS:
            self._refuse(404, f"{path} is not here: {HERE}")
            return
        with self.server.answering():
            self._complete(data, chat=path.startswith("/v1/chat"))

    def _complete(self, data: bytes, chat: bool) -> None:
        engine = self.server.engine
        self.asked = None, chat
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            self._refuse(400, f"the body is no JSON: {error}")
            return
        self.asked = body, chat
        try:
            captured = isinstance(engine.decoder.executor, Ahead)
            wanted = asked(body, chat, self.server.most, engine.target, captured)
            if self._other_model(body.get("model")):
                return
            job = engine.submit(**wanted)
        except Stopped as error:
            self._refuse(503, str(error))
            return
        except Exception as error:  # a chat template may raise anything
            self._refuse(400, str(error))
            return
        answer = Answer(chat, self.server.name, job, body.get("prompt"), engine.names)
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
        ends: list[Any] = []
        while len(ends) < answer.job.choices:
            said: Any = answer.job.next(self.connection)
            if self._failed(said):
                return
            if not is_chunk(said):
                ends.append(said)
        ends.sort(key=lambda said: said.choice)
        self._send(200, answer.made(*map(answer.whole, ends)) | {"usage": answer.usage(ends)})

    def _other_model(self, name: str | None) -> bool:
        """Whether a model is asked for that is not here; then that is the answer."""
        if name in (None, self.server.name):
            return False
        self._refuse(
            404, f"model is {name!r}, and {self.server.name!r} is here: give that, or leave model out"
        )
        return True

    def _failed(self, said: Any) -> bool:
        """Whether an error was said; then it is the answer."""
        error = error_of(said)
        if error is None:
            return False
        self._refuse(400 if isinstance(error, (TypeError, ValueError)) else 500, str(error))
        return True

    def _stream(self, answer: Answer, usage: bool) -> None:
        """Server-sent events, one for every round; an error before the first is an answer of its own."""
        said: Any = answer.job.next(self.connection)
        while is_chunk(said) and said.what.finish == "error":
            said = answer.job.next(self.connection)
        if self._failed(said):
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        texts, sent, ends = dict[int, str](), dict[int, int](), list[Any]()
        while (error := error_of(said)) is None:
            choice = said.choice
            if is_chunk(said):
                text = texts[choice] = texts.get(choice, "") + said.what.text
                shown, before = answer.job.shown(text, last=said.what.finish is not None), sent.get(choice)
                piece = answer.piece(choice, shown[before or 0 :], first=before is None)
                self._event(answer.made(piece, part=True))
                sent[choice] = max(before or 0, len(shown))
            else:
                ends.append(said)
                self._event(answer.made(answer.piece(choice) | answer.end(said), part=True))
            if len(ends) == answer.job.choices:
                break
            said = answer.job.next(self.connection)
        if error is not None:
            status = 400 if isinstance(error, (TypeError, ValueError)) else 500
            self._event(refusal(status, str(error), *self.asked))
        elif usage:
            self._event(answer.made(part=True) | {"usage": answer.usage(ends)})
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
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data if self.command != "HEAD" else b"")
            self.wfile.flush()
        except OSError:  # the client is gone
            self.close_connection = True

    def _refuse(self, status: int, message: str) -> None:
        self._send(status, refusal(status, message, *self.asked))


def is_chunk(said: Any) -> bool:
    return isinstance(said, Said) and isinstance(said.what, sd.StreamChunk)


def error_of(said: Any) -> BaseException | None:
    """The error that was said, if any: of the engine, or of a finished choice."""
    if isinstance(said, BaseException):
        return said
    return None if is_chunk(said) else said.what.error


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
        return named_draft(s.draft, target, dtype=s.precision)
    except (TypeError, ValueError, OSError, SystemExit) as error:
        raise SystemExit(f"--draft {s.draft}: {error}") from None


def served(s: Settings) -> Server:
    """A server that is ready to run.

    Raises:
        SystemExit: the target has no tokenizer, a setting is wrong, or the port is not free.
    """
    torch.set_num_threads(s.threads)
    quiet()
    s.check_device()
    with short_errors():
        if s.prefix_cache < 0:
            raise ValueError(f"--prefix-cache is {s.prefix_cache}: give MiB, or 0 for none")
        target: Any = sd.decoder(load(s.target, s.precision, s.place)).build().target
        if target.tokenizer is None:
            raise SystemExit(f"--target {s.target}: it has no tokenizer: save one into its folder")
        if s.prefix_cache:
            target = type(target)(target.model, target.tokenizer, prefix_cache=s.prefix_cache * 2**20)
        base = sd.decoder(target)
        if not s.plain:
            base = base.draft(draft_of(s, target), length=s.k)
        if s.ahead:
            base = base.executor(Ahead())
        engine = Engine(base.build(), s.limit, s.capacity or None)
    try:
        return Server(engine, s.host, s.port, s.target, s.max_tokens)
    except OSError as error:
        engine.close()
        raise SystemExit(f"--host {s.host} --port {s.port}: {error.strerror}: give others") from None


def main(s: Settings) -> None:
    print(f"loading {s.target}", flush=True)
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
