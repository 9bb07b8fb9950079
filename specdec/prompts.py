"""Converting prompts of any form to rows of ids, and checking a call before anything is decoded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from inspect import signature
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import listed, whole
from specdec.cache.contiguous import free_bytes
from specdec.capabilities import ModelInfo
from specdec.composition import Composition
from specdec.configs import setting
from specdec.elsewhere import GENERATE, refuse
from specdec.protocols import LanguageModel
from specdec.sampling import Sampling
from specdec.stop_rules import StopRules, special_tokens
from specdec.types import Context

Chat = Sequence[Mapping[str, Any]]  # messages {"role": ..., "content": ...}
Prompt = str | Chat | Sequence[int] | Tensor
Prompts = Prompt | Sequence[Prompt]


def rows_of(target: LanguageModel, prompts: Prompts) -> list[list[int]]:
    """Any form of prompts as rows of ids."""
    rectangle = isinstance(prompts, Tensor)
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise TypeError(
                f"prompts is a {type(prompts).__name__} with keys {sorted(prompts)}: give what a tokenizer returned, with input_ids; one "
                "chat is a list of messages"
            )
        ids, mask = prompts["input_ids"], prompts.get("attention_mask")
        rectangle = rectangle or (mask is None and isinstance(ids, Tensor))
        prompts = unpadded(ids, mask)
    if isinstance(prompts, Set):
        raise TypeError(f"prompts is a {type(prompts).__name__}, which has no order: give a list")
    prompts = listed(prompts)
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Sized):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}: give a text, ids, or a list of prompts (of a generator, list(...); of bytes, "
            "their text)"
        )
    if not isinstance(prompts, str) and len(prompts) == 0:
        raise ValueError("prompts is empty: give at least one prompt")
    batch: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if isinstance(batch[0], (Integral, Mapping)):
        batch = [batch]  # one row of ids, or one chat
    tokenizer = ModelInfo.of(target).tokenizer
    rows = [_ids(tokenizer, b, prompt) for b, prompt in enumerate(batch)]
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"prompt {b} is empty: give at least one token (the tokenizer's BOS token will do)"
            )
        if min(row) < 0 or max(row) >= target.vocab_size:
            raise ValueError(
                f"prompt {b} has an id outside the target's vocabulary of {target.vocab_size}: was it made with "
                "another tokenizer?"
            )
    pad = setting(tokenizer, "pad_token_id")
    if rectangle and pad is not None and len({row.count(pad) for row in rows}) > 1:
        warnings.warn(
            f"the prompts are a tensor in which {pad} (the tokenizer's padding) is read as a token: give attention_mask too, or lists of ids",
            stacklevel=3,
        )
    return rows


def unpadded(input_ids: Any, attention_mask: Any = None) -> list[list[int]]:
    """Rows of ids from what a tokenizer returns, padded on either side: the ids whose mask is not 0.

    Args:
        input_ids: ``[B, L]`` or ``[L]``, a tensor or lists. attention_mask: of the same shape; ``None``: nothing is padding.
    Raises:
        TypeError: they are no rows. ValueError: the shapes differ.
    """
    ids = _rows("input_ids", input_ids)
    if attention_mask is None:
        return ids
    mask = _rows("attention_mask", attention_mask)
    if [len(row) for row in mask] != [len(row) for row in ids]:
        raise ValueError(
            f"attention_mask has rows of {[len(row) for row in mask]} entries and input_ids of {[len(row) for row in ids]}: give the mask "
            "that the tokenizer returned with these ids"
        )
    return [[i for i, m in zip(row, seen) if m] for row, seen in zip(ids, mask)]


def _rows(name: str, value: Any) -> list[list[Any]]:
    rows = listed(value)
    if isinstance(rows, Sequence) and len(rows) and isinstance(rows[0], Integral):
        rows = [rows]
    rows = [listed(row) for row in rows] if isinstance(rows, Sequence) else [None]
    if not all(isinstance(row, Sequence) for row in rows):
        raise TypeError(f"{name} is {value!r}: give rows of numbers, or a tensor [B, L] or [L]")
    return rows


def asked(
    function: Callable[..., Any], prompts: Any, input_ids: Any, attention_mask: Any, others: Mapping[str, Any]
) -> Any:
    """The prompts of a call: ``prompts``, or the ids and the mask of ``**tokenizer(...)``; ``others`` are refused by name."""
    others = {name: value for name, value in others.items() if name != "token_type_ids"}  # of some tokenizers
    if others:
        own = [name for name in signature(function).parameters if name not in ("self", "others")]
        refuse(function.__name__, others, GENERATE, own)
    if input_ids is None:
        if attention_mask is not None:
            raise TypeError(
                "attention_mask is given without input_ids: give both, as the tokenizer returned them"
            )
        return prompts
    if prompts is not None:
        raise TypeError("prompts and input_ids are both given: give one of them")
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _ids(tokenizer: Any, b: int, prompt: Any) -> list[int]:
    chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if isinstance(prompt, str) or chat:
        if tokenizer is None:
            raise ValueError(
                f"prompt {b} is text but the target has no tokenizer: pass ids, or HFModel(model, tokenizer)"
            )
        if isinstance(prompt, str):
            _text(f"prompt {b}", prompt)
            return list(tokenizer(prompt)["input_ids"]) if prompt else []
        return chat_ids(tokenizer, prompt, f"prompt {b}")
    ids = listed(prompt)
    several = isinstance(ids, Sequence) and not isinstance(ids, (bytes, bytearray))
    if not several or not all(type(i) is int or isinstance(i, Integral) for i in ids):
        what = type(ids[0]).__name__ if several else type(ids).__name__
        if what == "str":
            raise TypeError(
                f"prompt {b} is a list of texts: give one text, chat messages, or ids as integers"
            )
        raise TypeError(f"prompt {b} holds {what}: give text, chat messages, or ids as integers")
    return [int(i) for i in ids]


def chat_ids(
    tokenizer: Any, messages: Sequence[Any], name: str, settings: Mapping[str, Any] | None = None
) -> list[int]:
    """The ids of a chat, by the tokenizer's template with the user's ``settings``; a last message of the assistant's is gone on with.

    Raises:
        TypeError, ValueError: these are no messages, or there is no template; they call the chat ``name``.
    """
    if not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise TypeError(
            f"{name} is a list of {type(messages[0]).__name__}s without 'role': give messages {{'role': ..., 'content': ...}} for a chat, or "
            "tokenizer(texts, padding=True) for what a tokenizer returned"
        )
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"{name} is a chat but the tokenizer has no chat template: pass a text, or set tokenizer.chat_template"
        )
    goes_on = messages[-1]["role"] == "assistant"  # as in transformers' pipelines
    how = dict(settings or {})
    goes_on = how.setdefault("continue_final_message", goes_on and not how.get("add_generation_prompt"))
    how.setdefault("add_generation_prompt", not goes_on)
    said = tokenizer.apply_chat_template(list(messages), **how, tokenize=False)
    _text(name, said)
    # The template adds special tokens itself.
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])


def _text(name: str, text: str) -> None:
    """Raise ValueError for a text with half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has {text[error.start]!r} at {error.start}, half of a surrogate pair and no character: give "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None


def prepared(
    composition: Composition,
    rows: list[list[int]],
    max_new_tokens: int | Sequence[int],
    eos_token_id: int | Sequence[int] | None,
    stop_strings: str | Sequence[str],
    criteria: Sequence[Callable[..., Any]],
) -> tuple[Context, StopRules]:
    """The context of ``rows`` with room for the budgets, and the rows' stop rules; arguments as for ``Decoder.generate``.

    Raises:
        TypeError, ValueError, MemoryError: as ``Decoder.generate``.
    """
    limits = stop_rules(composition, rows, max_new_tokens, eos_token_id, stop_strings, criteria, len(rows))
    return next(batches(composition, rows, limits, len(rows))), limits


def check_settings(composition: Composition, rows: int) -> None:
    """Raise ValueError where requests have settings of their own, and some of ``rows`` have none."""
    for one in by_request(composition):
        for name, values in one.own.items():
            if len(values) < rows:
                raise ValueError(
                    f"{name} has {len(values)} entries and there are {rows} prompts: give one for each, or a single one for all"
                )


def by_request(composition: Composition) -> list[Sampling]:
    """The samplings that have a setting for each request: the decoder's, and those of drafts."""
    drafting = [part.info.sampling for part in composition.drafting.parts]
    return [one for one in (composition.sampling, *drafting) if isinstance(one, Sampling) and one.by_request]


def batches(
    composition: Composition, rows: list[list[int]], limits: StopRules, batch_size: int
) -> Iterator[Context]:
    """Contexts of at most ``batch_size`` rows each, as even as they can be, in order and with room for the budgets."""
    for some in torch.arange(len(rows)).tensor_split(-(-len(rows) // batch_size)):
        capacity = int(limits.max_length[some].max()) + composition.nodes
        yield Context.of([rows[b] for b in some.tolist()], capacity, some)


def stop_rules(
    composition: Composition,
    rows: list[list[int]],
    max_new_tokens: int | Sequence[int],
    eos_token_id: int | Sequence[int] | None,
    stop_strings: str | Sequence[str],
    criteria: Sequence[Callable[..., Any]],
    batch_size: int,
) -> StopRules:
    """The stop rules of ``rows``, which are decoded in batches of at most ``batch_size``; arguments as for ``Decoder.generate``.

    Raises:
        TypeError, ValueError, MemoryError: as ``Decoder.generate``.
    """
    target = ModelInfo.of(composition.target)
    vocab_size = composition.target.vocab_size
    budgets = _numbers("max_new_tokens", max_new_tokens, len(rows))
    if len(budgets) != len(rows):
        raise ValueError(
            f"max_new_tokens has {len(budgets)} entries for {len(rows)} prompts: give one, or one for each"
        )
    if min(budgets) < 1:
        raise ValueError(
            f"max_new_tokens is {min(budgets)} for row {budgets.index(min(budgets))}: give at least 1"
        )
    for part in composition.drafting.parts:
        part.info.check_prompts(map(len, rows))
    drafts = (("draft", ModelInfo.of(part.info.model)) for part in composition.drafting.parts)
    for name, model in (("target", target), *drafts):
        limit = model.max_positions
        for b, (row, budget) in enumerate(zip(rows, budgets)):
            if limit is not None and len(row) + budget > limit:
                raise ValueError(
                    f"prompt {b} has {len(row)} tokens and max_new_tokens is {budget}: {len(row) + budget} positions, but "
                    f"the {name} has {limit}: shorten the prompt"
                    + (f", or ask for at most {limit - len(row)} new tokens" if len(row) < limit else "")
                )
    longest = max(len(row) + budget for row, budget in zip(rows, budgets))
    _fits(min(len(rows), batch_size), longest + composition.nodes)
    eos = target.eos_token_ids if eos_token_id is None else eos_token_id
    ends = _numbers("eos_token_id", eos, 1)
    if eos_token_id is not None and not all(0 <= e < vocab_size for e in ends):
        raise ValueError(
            f"eos_token_id is {eos_token_id}: the target's vocabulary has ids 0 to {vocab_size - 1}"
        )
    several = isinstance(stop_strings, Iterable) and not isinstance(stop_strings, (str, Mapping))
    strings: tuple[Any, ...] = tuple(stop_strings) if several else (stop_strings,)
    if not all(isinstance(s, str) for s in strings):
        raise TypeError(f"stop_strings is {stop_strings!r}: give a text, or a list of texts")
    for string in strings:
        _text("stop_strings", string)
    asked = tuple(criteria) if isinstance(criteria, Iterable) else (None,)
    if not all(callable(criterion) for criterion in asked):
        raise TypeError(
            f"stopping_criteria is {criteria!r}: give a list of functions (ids, scores) -> bool, also of one"
        )
    if strings and target.tokenizer is None:
        raise ValueError("stop_strings needs a tokenizer: use HFModel(model, tokenizer), or eos_token_id")
    if any(not s for s in strings):
        raise ValueError("stop_strings contains an empty string: every text contains it; remove it")
    names = {name: i for i, name in special_tokens(target.tokenizer).items()}
    for string in strings:
        within = next((name for name in names if name in string), None)
        if within is not None and string not in names:
            raise ValueError(
                f"stop_strings has {string!r}, which contains the special token {within!r}, and texts do not show special tokens: give the token by "
                f"itself, or eos_token_id={names[within]}"
            )
    ends += [names[string] for string in strings if string in names]  # where transformers stops, too
    strings = tuple(string for string in strings if string not in names)
    sampling = composition.sampling
    if "grammar" not in sampling.own:
        ends += [token for token in sampling.end_ids(0) if token not in ends]
    rules = StopRules(
        max_length=torch.tensor([len(row) + budget for row, budget in zip(rows, budgets)]),
        eos=tuple(ends),
        stop_strings=strings,
        criteria=asked,
        tokenizer=target.tokenizer,
    )
    if isinstance(sampling.own.get("grammar"), tuple):
        for b in range(len(rows)):
            rules.end_at(b, sampling.end_ids(b))
    return rules


def _fits(rows: int, capacity: int) -> None:
    """Raise MemoryError where the buffer of committed tokens (8 bytes each) would not fit."""
    need, free = 8 * rows * capacity, free_bytes(torch.device("cpu"))
    if free is not None and need > free:
        raise MemoryError(
            f"max_new_tokens is so large that {rows} rows of up to {capacity} tokens need {need / 2**30:.3g} GiB for their ids, and "
            f"{free / 2**30:.3g} GiB are free: give a smaller budget, or fewer rows"
        )


def _numbers(name: str, value: Any, rows: int) -> list[int]:
    """A list of whole numbers: one number ``rows`` times, or a sequence unchanged."""
    value = listed(value)
    if isinstance(value, str) or not isinstance(value, Iterable):
        whole(name, value, ", or a list of them")
        return [int(value)] * rows
    numbers = list(value)
    for number in numbers:
        whole(f"{name}, in a list,", number)
    return [int(number) for number in numbers]
