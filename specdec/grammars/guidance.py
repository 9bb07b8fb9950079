"""JSON schemas, regular expressions and context-free grammars by llguidance (Microsoft, github.com/guidance-ai/llguidance).

Its matcher reads tokens as bytes, so a text may be cut into tokens in any way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdec.arguments import whole

KINDS = ("json_schema", "regex", "lark")
_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LLGuidance:
    """A grammar that llguidance reads; ``json_schema``, ``regex`` and ``lark`` make them.

    Args:
        kind: of ``text``: ``"json_schema"``, ``"regex"`` or ``"lark"``.
        tokenizer: the target's, a fast one. end_ids: tokens that end a text; by default the tokenizer's ``eos_token_id``.
    Raises:
        ImportError: llguidance is not installed. TypeError: the tokenizer is no fast one. ValueError: the grammar is invalid, or there is no end token.
    """

    kind: str
    text: str
    tokenizer: Any
    end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: give one of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise TypeError(f"{self.kind} is a {type(self.text).__name__}: give a text")
        if not isinstance(self.tokenizer, PreTrainedTokenizerFast):
            raise TypeError(
                f"tokenizer is a {type(self.tokenizer).__name__}: give a fast tokenizer of transformers', such as the target's, target.tokenizer"
            )
        ends = self.end_ids if isinstance(self.end_ids, Iterable) else (self.end_ids,)
        if not ends and self.tokenizer.eos_token_id is not None:
            ends = (self.tokenizer.eos_token_id,)
        for token in ends:
            whole("end_ids, of one,", token)
            if not 0 <= token < len(self.tokenizer):
                raise ValueError(
                    f"end_ids has {token}: give ids of the tokenizer, 0 to {len(self.tokenizer) - 1}"
                )
        object.__setattr__(self, "end_ids", tuple(ends))
        if not ends:
            raise ValueError("the tokenizer has no eos_token, with which a text would end: give end_ids=")
        _ = self._matcher

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        return f"{self.kind}({text!r})"

    def __reduce__(self) -> Any:  # without the matcher, which cannot be pickled
        return LLGuidance, (self.kind, self.text, self.tokenizer, self.end_ids)

    @cached_property
    def _matcher(self) -> Any:
        """A matcher that has read nothing; it is copied only."""
        library = _library()
        source = library.grammar_from(self.kind, self.text)
        made = library.LLMatcher(_tokenizer(self.tokenizer, self.end_ids), source, log_level=0)
        if made.is_error():
            raise ValueError(f"{self!r} is no grammar: {made.get_error().strip()}")
        return made

    def start(self) -> Any:
        return self._matcher.deep_copy()

    def advance(self, state: Any, token: int) -> Any:
        made = state.deep_copy()
        if not made.consume_token(token):
            raise ValueError(f"{self!r} cannot go on after token {token}: {made.get_error().strip()}")
        return made

    def allowed(self, state: Any) -> Tensor:
        found = torch.frombuffer(bytearray(state.compute_bitmask()), dtype=torch.int32)
        if state.is_error():
            raise ValueError(f"{self!r} cannot go on: {state.get_error().strip()}")
        return found

    def forced(self, state: Any) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer spells it."""
        found: list[int] = state.deep_copy().compute_ff_tokens()
        return found

    def check(self, vocab_size: int, tokenizer: Any) -> None:
        """Raise ValueError for a target with another tokenizer."""
        if (
            tokenizer is not None
            and tokenizer is not self.tokenizer
            and tokenizer.get_vocab() != self.tokenizer.get_vocab()
        ):
            raise ValueError(
                f"{self!r} is made for another tokenizer than the target's: give target.tokenizer"
            )


def json_schema(
    schema: str | Mapping[str, Any],
    tokenizer: Any,
    end_ids: int | Iterable[int] = (),
    whitespace: bool = True,
) -> LLGuidance:
    """Texts that are JSON of a schema, given as a mapping or as JSON; ``{"type": "object"}`` is any object.

    What of JSON Schema is known is llguidance's.

    Args:
        tokenizer, end_ids: as for ``LLGuidance``. whitespace: between the tokens of JSON, as much as the model likes; ``False``: none.
    Raises:
        ImportError, TypeError, ValueError: as for ``LLGuidance``.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"schema is no JSON ({error}): give a JSON schema") from None
    if not isinstance(schema, Mapping):
        raise TypeError(f"schema is {schema!r}: give an object, such as {{'type': 'object'}}")
    if not whitespace:
        schema = {**schema, "x-guidance": {"whitespace_flexible": False, **(schema.get("x-guidance") or {})}}
    return LLGuidance("json_schema", json.dumps(schema), tokenizer, _ends(end_ids))


def regex(pattern: str, tokenizer: Any, end_ids: int | Iterable[int] = ()) -> LLGuidance:
    """Texts that match a regular expression as a whole, in the syntax of Rust's ``regex``; arguments as for ``json_schema``."""
    return LLGuidance("regex", pattern, tokenizer, _ends(end_ids))


def lark(grammar: str, tokenizer: Any, end_ids: int | Iterable[int] = ()) -> LLGuidance:
    """Texts of a context-free grammar in llguidance's dialect of Lark's EBNF, whose first rule is ``start``; arguments as for ``json_schema``."""
    return LLGuidance("lark", grammar, tokenizer, _ends(end_ids))


def _ends(end_ids: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(end_ids) if isinstance(end_ids, Iterable) else (end_ids,)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as missing:
        raise ImportError(
            "llguidance is not installed, which reads schemas and grammars: pip install llguidance"
        ) from missing
    return llguidance


def _tokenizer(tokenizer: Any, ends: tuple[int, ...]) -> Any:
    """llguidance's form of a tokenizer, made once: it takes up to a second."""
    known = _tokenizers.setdefault(tokenizer, {})
    if ends not in known:
        from llguidance.hf import from_tokenizer

        try:
            known[ends] = from_tokenizer(tokenizer, eos_token=list(ends))
        except ValueError as error:
            raise ValueError(
                f"tokenizer: llguidance cannot read this {type(tokenizer).__name__} ({error})"
            ) from error
    return known[ends]
