"""Whether a logits processor is a pure function of ids and scores: copies of it are called on made-up texts, or on the first real one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Processors with state, whose result at one node would depend on other nodes.
_STATEFUL = {
    "SynthIDTextWatermarkLogitsProcessor": "it keeps the contexts that it has marked",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs a model with a key-value cache of its own",
    "ClassifierFreeGuidanceLogitsProcessor": "it needs conditional and unconditional rows in one batch",
    "DiaEOSDelayPatternLogitsProcessor": "it counts the steps since the end of a channel",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it needs conditional and unconditional rows in one batch",
    "PrefixConstrainedLogitsProcessor": "it depends on the number of the row in the batch, which changes as rows finish",
    "EncoderRepetitionPenaltyLogitsProcessor": "it keeps the prompts of a fixed batch",
    "EncoderNoRepeatNGramLogitsProcessor": "it keeps the prompts of a fixed batch",
    "MinNewTokensLengthLogitsProcessor": "it has one prompt length for all rows; use MinLengthLogitsProcessor",
}


def refuse_stateful(processor: object) -> None:
    """Raise ValueError for one of transformers' processors with state, with the reason."""
    why = _STATEFUL.get(type(processor).__name__)
    if why:
        raise ValueError(f"processors: {type(processor).__name__} cannot be used with speculation: {why}")


def probe(processor: Callable[..., Any], scores: Tensor) -> None:
    """Refuse a processor whose scores for a text change after other calls, whose attributes do, or that is random. The processor itself is not called.

    One that raises on the made-up texts, as a grammar may, is let through.

    Args:
        scores: ``[1, V]``.
    Raises:
        TypeError: it cannot be copied, or returns no scores. ValueError: it keeps state.
    """
    # Lengths of different parity: a processor with state often remembers how long the prompt was.
    short = torch.zeros(1, 16, dtype=torch.long, device=scores.device)
    long = torch.ones(1, 25, dtype=torch.long, device=scores.device)
    one, two = _copies(processor, 2)
    first = _answer(one, short, scores)
    before = _state(one)
    then, again, alone = (_answer(p, ids, scores) for p, ids in ((one, long), (one, short), (two, long)))
    raised = [isinstance(answer, type) for answer in (first, then, again, alone)]
    changed = not any(raised) and (before != _state(one) or _state(one) != _state(two))
    _judge(processor, scores, [(first, again), (then, alone)], changed)


def probe_at(processor: Callable[..., Any], ids: Tensor, scores: Tensor) -> None:
    """Refuse a processor whose scores for a real text ``ids [1, T]``, or for a longer one, depend on earlier calls. A memo of texts does no harm."""
    one, two, three = _copies(processor, 3)
    first = _answer(one, ids, scores)
    if isinstance(first, type):
        return  # the run will raise it
    token = check_scores(processor, first, scores).argmax(-1, keepdim=True)
    longer = torch.cat([ids, token.to(ids)], 1)
    other = torch.cat([longer, token.to(ids)], 1)
    then, again = _answer(one, longer, scores), _answer(one, ids, scores)
    later, last = _answer(one, other, scores), _answer(one, longer, scores)
    pairs = [
        (first, again),
        (then, last),
        (then, _answer(two, longer, scores)),
        (later, _answer(three, other, scores)),
    ]
    _judge(processor, scores, pairs)


def _judge(
    processor: Callable[..., Any], scores: Tensor, pairs: Sequence[tuple[Any, Any]], changed: bool = False
) -> None:
    """Raise ValueError where answers of a pair differ or ``changed``, and TypeError where one is no scores."""
    for answer in (answer for pair in pairs for answer in pair):
        if not isinstance(answer, type):
            check_scores(processor, answer, scores)
    if changed or not all(_same(a, b) for a, b in pairs):
        raise ValueError(
            f"processors: {named(processor)} keeps state between calls, or is random, so its scores at one node would depend on nodes that were dropped: "
            "make it a pure function of (ids, scores)"
        )


def _copies(processor: Callable[..., Any], n: int) -> list[Any]:
    try:
        return [_copied(processor) for _ in range(n)]
    except Exception as error:
        raise TypeError(
            f"processors: {named(processor)} cannot be copied ({error}), and copies show whether it keeps state between calls: give it a "
            "__deepcopy__ that returns an equal one"
        ) from error


def _answer(processor: Callable[..., Any], ids: Tensor, scores: Tensor) -> Any:
    """What it returns, or the class of what it raises."""
    try:
        return processor(ids, scores.clone())
    except Exception as error:
        return type(error)


def _same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, type) or isinstance(b, type) else torch.equal(a, b)


def check_scores(processor: object, made: Any, scores: Tensor) -> Tensor:
    """What a processor returned; raises TypeError unless these are scores ``[1, V]`` of floats."""
    if isinstance(made, Tensor) and made.shape == scores.shape and made.is_floating_point():
        return made
    what = f"{list(made.shape)} in {made.dtype}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
    raise TypeError(
        f"processors: {named(processor)} returned {what}: return the scores of every token, {list(scores.shape)} in {scores.dtype}"
    )


def named(processor: object) -> str:
    """The name of a function or of a class."""
    return processor.__name__ if isinstance(processor, FunctionType) else type(processor).__name__


def _copied(processor: Any) -> Any:
    """A deep copy; of a function, one with its own closure and defaults, which ``copy.deepcopy`` shares."""
    if not isinstance(processor, FunctionType):
        return copy.deepcopy(processor)
    cells = tuple(CellType(*map(_own, _contents(cell))) for cell in processor.__closure__ or ())
    defaults = copy.deepcopy(processor.__defaults__)
    made = FunctionType(processor.__code__, processor.__globals__, processor.__name__, defaults, cells)
    made.__kwdefaults__ = copy.deepcopy(processor.__kwdefaults__)
    made.__dict__.update(copy.deepcopy(vars(processor)))
    return made


def _own(value: Any) -> Any:
    """A copy of what a function uses; functions, models and tokenizers, which take long to copy, and what cannot be copied are shared."""
    if isinstance(value, (torch.nn.Module, PreTrainedTokenizerBase, FunctionType)):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _contents(cell: CellType) -> list[Any]:
    """What a cell has: one thing, or nothing yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _state(processor: Any) -> dict[str, bytes]:
    """What an object keeps, as far as it can be pickled. What a function notes in its closure is its own business, as long as the scores are equal."""
    if isinstance(processor, MethodType):
        return _state(processor.__self__)
    try:
        return {name: _pickled(value) for name, value in vars(processor).items()}
    except TypeError:  # slots: only the equality of the scores is checked
        return {}


class _Pickler(pickle.Pickler):
    """Pickles tensors by value; their own pickles have addresses."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):  # one that is not seeded in every call shows in the scores
            return bytes, ()
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().reshape(-1).view(torch.uint8)
        return bytes, (f"{value.dtype} {list(value.shape)} ".encode() + flat.numpy().tobytes(),)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception:
        return b""
    return buffer.getvalue()
