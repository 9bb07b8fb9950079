"""OpenAI's completions and chat completions in JSON: what a body asks for, and how it is answered.

Bodies may have vLLM's fields, too. What is not supported is refused by name.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any

from specdec.grammars.guidance import json_schema, lark, regex
from specdec.prompts import chat_ids
from specdec.sampling import Sampling
from specdec.serving.engine import Job, Said
from specdec.serving.logprobs import TokenNames, entries, of_chat, of_completion
from specdec.serving.penalties import RANGES, penalties_of
from specdec.texts import added

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
TAKEN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "seed", "top_k", "n", "top_logprobs"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "min_p", *RANGES), (int, float)),
    **dict.fromkeys(("stream", "ignore_eos", "echo"), (bool,)),
    **dict.fromkeys(("stream_options", "response_format", "structured_outputs", "logit_bias"), (dict,)),
    **dict.fromkeys(("chat_template_kwargs", "metadata"), (dict,)),
    "stop_token_ids": (list,),
    **dict.fromkeys(("prompt", "stop"), (str, list)),
    **dict.fromkeys(("model", "user"), (str,)),
    "messages": (list,),
    "logprobs": (int, bool),
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
    **dict.fromkeys(("best_of", "length_penalty"), 1),
    **dict.fromkeys(("min_tokens", "priority"), 0),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "store"), False),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens", "spaces_between_special_tokens"), True),
    **{"tools": [], "tool_choice": "none", "suffix": ""},
    **{"parallel_tool_calls": True, "service_tier": "auto"},
}
"""What else clients send, with the value that does nothing, which alone is taken."""
TEMPLATE = ("tools", "documents", "add_generation_prompt", "continue_final_message")
"""Arguments of ``apply_chat_template`` that a request may give; others are the server's."""
CHOICES, TOP = 128, 20
"""The most choices of a request, and tokens in each place whose log-probabilities are given, as at OpenAI."""


_compiling = threading.Lock()
MAKERS: dict[str, Callable[..., Any]] = {"json": json_schema, "regex": regex, "grammar": lark}


@lru_cache(64)
def _grammar(kind: str, text: str, tokenizer: Any) -> Any:
    return MAKERS[kind](text, tokenizer)


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
        kind, where = ("json", name) if "schema" in name else (name, f"structured_outputs.{name}")
        if not isinstance(text, str if kind in ("regex", "grammar") else (str, dict)):
            raise ValueError(f"{where} is {text!r}: give a text{' or an object' * (kind == 'json')}")
        try:
            with _compiling:
                return _grammar(kind, text if isinstance(text, str) else json.dumps(text), tokenizer)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return None


def prompt_of(body: Mapping[str, Any], chat: bool) -> Any:
    """The prompt of a completion, or the messages of a chat, with the texts of their parts joined; raises ValueError for others."""
    name, other = ("messages", "prompt") if chat else ("prompt", "messages")
    if name not in body:
        raise ValueError(f"{name} is missing: a {'chat' if chat else 'completion'} needs it")
    if other in body:
        raise ValueError(f"{other} is of the other endpoint: leave it out, or POST it there")
    if not body[name]:
        raise ValueError(f"{name} is empty: give at least one {'message' if chat else 'token'}")
    if not chat:
        flat = [part for one in body[name] for part in (one if isinstance(one, list) else [one])]
        if any(isinstance(part, dict) for part in flat):
            raise ValueError("prompt is a chat: POST it to /v1/chat/completions as messages")
        if any(isinstance(part, bool) for part in flat):
            raise ValueError("prompt has true or false: give a text, or ids")
        return body[name]
    made = []
    for message in body[name]:
        if not isinstance(message, dict):
            raise ValueError(f"messages has {message!r}: give objects with role and content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages has the role {message.get('role')!r}: give a text, such as user")
        parts = message.get("content")
        if isinstance(parts, list):
            texts: list[Any] = [
                part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"
            ]
            if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
                raise ValueError("messages has content that is no text: give parts of the type text")
            message = {**message, "content": "".join(texts)}
        elif not isinstance(parts, str) and not (parts is None and message.get("tool_calls")):
            raise ValueError(f"messages has the content {parts!r}: give a text, or parts of the type text")
        made.append(message)
    return made


def likely_of(body: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """The choices and log-probabilities that a body asks for, as arguments of ``Engine.submit``; raises ValueError for numbers out of range."""
    n, wanted, top = body.get("n", 1), body.get("logprobs", False), body.get("top_logprobs", 0)
    echo = bool(body.get("echo"))
    if not 1 <= n <= CHOICES:
        raise ValueError(f"n is {n}: give a number of choices from 1 to {CHOICES}")
    if chat and not isinstance(wanted, bool):
        raise ValueError(f"logprobs is {wanted}: give true or false, and in top_logprobs how many")
    if not chat and wanted is True:
        raise ValueError(f"logprobs is true: give how many of the most probable tokens, 0 to {TOP}")
    if top and not (chat and wanted):
        name = "with logprobs: true" if chat else "in logprobs"
        raise ValueError(f"top_logprobs is {top}: give the number {name}")
    if echo and (chat or body.get("stream")):
        raise ValueError("echo is true: only completions that are no stream have it; leave it out")
    most = top if chat else int(wanted)
    if not 0 <= most <= TOP:
        raise ValueError(f"{'top_logprobs' if chat else 'logprobs'} is {most}: give a number from 0 to {TOP}")
    return {"n": n, "top": None if wanted is False else most, "echo": echo}


def asked(body: Any, chat: bool, most: int, target: Any, captured: bool = False) -> dict[str, Any]:
    """The arguments of ``Engine.submit`` that a body asks of a decoder's target; ``captured``: in captured rounds, which take neither grammars nor penalties.

    Raises:
        TypeError, ValueError: the body is no object, has no prompt, or has what is not supported.
    """
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name in TAKEN and type(value) not in TAKEN[name]:
            kinds = [kind for kind in TAKEN[name] if kind is not int or float not in TAKEN[name]]
            raise ValueError(
                f"{name} is {json.dumps(value)}: give {' or '.join(WORDS[kind] for kind in kinds)}"
            )
        if name not in TAKEN and name not in NEUTRAL:
            raise ValueError(f"{name} is not supported: leave it out")
        if name in NEUTRAL and (
            value != NEUTRAL[name] or isinstance(value, bool) != isinstance(NEUTRAL[name], bool)
        ):
            raise ValueError(f"{name} is {json.dumps(value)}: only {json.dumps(NEUTRAL[name])} is supported")
    asked_for = body.get("stream_options", {})
    options = {name: value for name, value in asked_for.items() if value is not None and value is not False}
    if "stream_options" in body and not body.get("stream"):
        raise ValueError("stream_options is given without stream: give it with stream: true")
    if options.keys() - {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
        raise ValueError(
            f"stream_options is {json.dumps(options)}: give include_usage, true or false, and no others"
        )
    settings = {name: body[name] for name in SAMPLING if name in body}
    if settings.get("top_k", 1) in (0, -1):  # vLLM's words for all
        del settings["top_k"]
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"stop is {stops!r}: give a text, or a list of texts")
    prompt, ends = prompt_of(body, chat), body.get("stop_token_ids", [])
    if "chat_template_kwargs" in body:
        if not chat:
            raise ValueError("chat_template_kwargs is given to a completion: only chats have a template")
        own = body["chat_template_kwargs"]
        taken = signature(target.tokenizer.apply_chat_template).parameters
        if wrong := [name for name in own if name in taken and name not in TEMPLATE]:
            raise ValueError(
                f"chat_template_kwargs has {wrong[0]}: give {', '.join(TEMPLATE)}, and what the template itself takes"
            )
        prompt = chat_ids(target.tokenizer, prompt, "messages", own)
    if not all(type(end) is int and 0 <= end < target.vocab_size for end in ends):
        raise ValueError(f"stop_token_ids is {ends}: give a list of ids, 0 to {target.vocab_size - 1}")
    own = () if body.get("ignore_eos") else target.eos_token_ids
    made = {
        "prompt": prompt,
        "stops": tuple(stops),
        "max_new_tokens": body.get("max_completion_tokens", body.get("max_tokens", most)),
        "seed": body.get("seed"),
        "eos_token_id": (*own, *ends),
        **likely_of(body, chat),
    }
    rules = grammar_of(body, target.tokenizer)
    penalties = penalties_of(body, target.vocab_size)
    if captured and (penalties or rules is not None):
        grammar = "response_format" if "response_format" in body else "structured_outputs"
        name = next(iter(penalties), grammar)
        raise ValueError(
            f"{name} is given: this endpoint runs --ahead, whose captured rounds do not support it"
        )
    if settings or penalties or rules is not None:
        made["sampling"] = Sampling(**settings, grammar=rules)
    return {**made, "penalties": penalties} if penalties else made


def refusal(status: int, message: str, body: Any = None, chat: bool = False) -> dict[str, Any]:
    """OpenAI's error object: the library's ``message`` in the words of the request's ``body``, and the field that it is about, if it begins with one."""
    given = body if isinstance(body, dict) else {}
    prompts = given.get("prompt")
    several = isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int)
    longest = "max_completion_tokens" if given.get("max_completion_tokens") is not None else "max_tokens"
    for ours, theirs in (
        (r"\brequest \d+: | for row \d+", ""),
        (r"\bits prompt\b" if several else r"\bprompt 0\b|\bits prompt\b", "the prompt"),
        (r"\bmax_new_tokens\b", longest),
        (r"\bstop_strings\b", "stop"),
    ):
        message = re.sub(ours, theirs, message)
    found = re.match(r"(?:the |its )?(\w+)", message)
    param = found[1] if found and (found[1] in TAKEN or found[1] in given) else None
    param = "messages" if chat and param == "prompt" else param
    kind = {404: "not_found_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True)
class Answer:
    """What is sent of a job, in OpenAI's words.

    Args:
        prompt: as it came, one or several, for an echo. names: of the target's tokens.
    """

    chat: bool
    model: str
    job: Job
    prompt: Any
    names: TokenNames
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def made(self, *choices: Mapping[str, Any], part: bool = False) -> dict[str, Any]:
        kind = f"chat.completion{'.chunk' if part else ''}" if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [{"logprobs": None, **choice} for choice in choices],
        }

    def piece(self, choice: int, text: str | None = None, first: bool = False) -> dict[str, Any]:
        """New text of a choice of a stream."""
        if not self.chat:
            return {"index": choice, "text": text or "", "finish_reason": None}
        role = {"role": "assistant"} if first else {}
        delta = role if text is None else {**role, "content": text}
        return {"index": choice, "delta": delta, "finish_reason": None}

    def whole(self, said: Said) -> dict[str, Any]:
        """A choice that is not a stream's."""
        text = self.job.shown(said.what.text, last=True)
        content: Any = (
            {"message": {"role": "assistant", "content": text}}
            if self.chat
            else {"text": self._echo(said) + text}
        )
        return {"index": said.choice, **content, **self.end(said)}

    def end(self, said: Said) -> dict[str, Any]:
        """Why a choice ended, and its log-probabilities."""
        one = said.what
        made = {"finish_reason": {"length": "length", "cancelled": "abort"}.get(one.finish, "stop")}
        if said.log_probs is None:
            return made
        shown = self.job.shown(one.text, last=True)
        found = entries(
            self.names.tokenizer,
            one,
            said.log_probs,
            len(shown) if len(shown) < len(one.text) else None,
            self._echo(said) if self.job.echo else None,
        )
        return {**made, "logprobs": (of_chat if self.chat else of_completion)(found, self.names)}

    def _echo(self, said: Said) -> str:
        """The text of a choice's prompt, where it is wanted."""
        if not self.job.echo:
            return ""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        own = prompts[said.choice // self.job.each]
        return own if isinstance(own, str) else added(self.names.tokenizer, [], said.what.prompt_ids)

    def usage(self, ends: Sequence[Said]) -> dict[str, Any]:
        """Counts of tokens, of all choices, and of each prompt once, which its first choice read. Drafted ones that were accepted or rejected are not among ``completion_tokens``: a stop may drop accepted ones."""
        first = [said.what for said in ends if said.choice % self.job.each == 0]
        prompt, new = sum(len(one.prompt_ids) for one in first), sum(len(said.what.ids) for said in ends)
        accepted = sum(said.what.stats.accepted for said in ends)
        drafted = sum(said.what.stats.drafted for said in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in first)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted,
            },
        }  # fmt: skip
