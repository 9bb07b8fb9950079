"""Logits to probabilities: any stateless Hugging Face ``LogitsProcessor``, a grammar, temperature, top-k, top-p and min-p.

The same object is applied to target and draft, at every node of a tree, with that node's true prefix. The truncations
are transformers' own warpers, in the order in which ``generate`` applies them, so that settings have the same meaning; top-p over a large
vocabulary is computed in another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor

from specdec.arguments import number
from specdec.grammars import masks
from specdec.grammars.contract import Grammar
from specdec.kernels.device import Check, defer, to_device
from specdec.per_request import PerRequest
from specdec.processing import Processors, of_requests
from specdec.purity import probe, refuse_stateful
from specdec.truncation import Truncation
from specdec.types import Context, Proposal

_WHOSE = ContextVar("whose", default="")  # whose logits are being looked at, for messages


@contextmanager
def logits_of(whose: str) -> Iterator[None]:
    """A context in which an error about logits begins with ``whose``, also where it is raised later."""
    before = _WHOSE.set(whose)
    try:
        yield
    finally:
        _WHOSE.reset(before)


def check_temperature(temperature: Any) -> None:
    """Raise TypeError or ValueError for what is no temperature."""
    number("temperature", temperature)
    if temperature != 0 and not 1e-30 <= temperature <= 1e30:
        raise ValueError(
            f"temperature is {temperature}: give 0 (greedy), or a number from 1e-30 to 1e30, by which float32 logits can be divided"
        )


class SamplingSettings(TypedDict, total=False):
    """The arguments of ``Sampling`` by name, for type checkers and completion in editors."""

    temperature: float | Sequence[float]
    top_k: int | Sequence[int | None] | None
    top_p: float | Sequence[float | None] | None
    min_p: float | Sequence[float | None] | None
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...]
    grammar: Grammar[Any] | Sequence[Grammar[Any] | None] | None


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits.

    Args:
        temperature: 0 is greedy: all probability on the largest logit (the first of several). Several numbers are those of the
            requests, by ``Context.request``: the first is that of the first prompt of a call.
        top_k, top_p, min_p: truncations with transformers' meaning; ``None`` leaves them out. Several are those of the requests.
        processors: stateless ``LogitsProcessor`` objects or functions ``(ids [B, L], scores [B, V]) -> scores``, applied before
            the temperature.
        grammar: what may be generated (``specdec.grammars``), applied after the processors. Several, or ``None``, are those of the requests.
    Raises:
        TypeError: a setting is no number, or processors are no sequence of functions.
        ValueError: a setting is out of range, or a processor keeps state between calls.
    """

    temperature: float | Sequence[float] = 1.0
    top_k: int | Sequence[int | None] | None = None
    top_p: float | Sequence[float | None] | None = None
    min_p: float | Sequence[float | None] | None = None
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()
    grammar: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.processors, PerRequest):
            if not isinstance(self.processors, Iterable):
                raise TypeError(
                    f"processors is a {type(self.processors).__name__}: give a tuple, also of a single one: processors=(processor,)"
                )
            object.__setattr__(self, "processors", tuple(self.processors))
            for processor in self.processors:
                if not callable(processor) or isinstance(processor, type):
                    raise TypeError(
                        f"processors has {processor!r}: give objects or functions (ids, scores) -> scores"
                    )
        for name in ("temperature", "top_k", "top_p", "min_p"):
            several = vars(self)[name]
            if isinstance(several, Sequence) and not isinstance(several, str | PerRequest):
                if not several:
                    raise ValueError(f"{name} is empty: give a number, or one for each request")
                object.__setattr__(self, name, tuple(several))
        for temperature in self.temperature if isinstance(self.temperature, tuple) else (self.temperature,):
            if not isinstance(temperature, PerRequest):
                check_temperature(temperature)
        self._truncation.check()
        object.__setattr__(self, "grammar", masks.given(self.grammar))
        if not isinstance(self.processors, PerRequest):
            for processor in self.processors:
                refuse_stateful(processor)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def coldest(self) -> Sampling:
        """The same at temperature 0."""
        return self if self.greedy else replace(self, temperature=0.0)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings, by name, as entries of tables that have one for each request."""
        made = {name: vars(self)[name] for name in ("temperature", "top_k", "top_p", "min_p", "grammar")}
        return made | {"processors": self._processors}

    @cached_property
    def own(self) -> dict[str, Sequence[Any]]:
        """The settings of which every request has its own, by name."""
        return {name: one for name, one in self.settings.items() if isinstance(one, tuple | PerRequest)}

    @cached_property
    def _by_number(self) -> bool:
        """Whether settings are lists with one entry for each request."""
        return any(isinstance(one, tuple) for one in self.own.values())

    @property
    def by_request(self) -> bool:
        """Whether every request has a setting of its own."""
        return bool(self.own)

    def greedy_rows(self, context: Context) -> Tensor:
        """``[B]`` bool, on the host: the rows whose temperature is 0."""
        own = isinstance(self.temperature, Sequence)
        return self._by_row(context) == 0 if own else torch.full((context.batch,), self.greedy)

    @property
    def reads_text(self) -> bool:
        """Whether a row's distribution depends on its text: on processors, or on a grammar."""
        return bool(self.processors) or self.grammar is not None

    @property
    def reads_context(self) -> bool:
        """Whether a row's distribution depends on more than its logits: on its text, on its request, or on what a subclass does, which may be
        anything."""
        return self.reads_text or self.by_request or self.overridden

    def for_draft(self, own: Sampling | None) -> Sampling:
        """The sampling of a draft that has its ``own``, or none: this one, or its own with this grammar, where it has no grammar itself."""
        if not isinstance(own, Sampling | None):
            raise TypeError(f"sampling of a draft is {own!r}: give a sd.Sampling(...), or None")
        if own is None or own.grammar is not None or self.grammar is None:
            return self if own is None else own
        return replace(own, grammar=self.grammar)

    @property
    def overridden(self) -> bool:
        """Whether a subclass makes the probabilities, which may come from no scores."""
        return type(self).__call__ is not Sampling.__call__ or type(self).scores is not Sampling.scores

    @property
    def only_temperature(self) -> bool:
        """Whether the distribution is the softmax of ``logits / temperature``, one for all rows: no processors, no truncations."""
        return not self.reads_context and (self.greedy or not self._truncation.warpers)

    @cached_property
    def _processors(self) -> Any:
        return self.processors if isinstance(self.processors, PerRequest) else Processors(self.processors)

    @cached_property
    def _truncation(self) -> Truncation:
        return Truncation(self.top_k, self.top_p, self.min_p)

    @cached_property
    def _untouched(self) -> bool:
        """Whether the scores are those after processors and grammar, but for requests' own temperatures."""
        one = isinstance(self.temperature, Sequence) or self.temperature == 1
        kept = self.top_k is None and self.top_p is None and self.min_p is None
        return self.greedy or (one and kept)

    @cached_property
    def _temperatures(self) -> Tensor:
        return torch.tensor(self.temperature, dtype=torch.float64)

    def probe(self, vocab_size: int, device: torch.device | str = "cpu", tokenizer: Any = None) -> None:
        """Refuse processors that return other scores after other calls, or whose state depends on them, on made-up texts, and grammars that
        do not fit the target's vocabulary and ``tokenizer``, or whose states change.

        The first texts of a run are another occasion: a processor may raise on made-up ones, or leave them as they are.
        """
        scores = torch.linspace(-2, 2, vocab_size, device=device)[None]
        known = self._processors.default if isinstance(self._processors, PerRequest) else self._processors
        for processor in known.functions:
            probe(processor, scores)
        for tracker in masks.every(self.grammar):
            tracker.check(vocab_size, tokenizer)

    def fetch(self, context: Context, proposal: Proposal) -> None:
        """Copy a proposal's tokens to the host before the target's forward is launched, if a row's grammar will read them. The host then follows grammars
        while the device works."""
        if self.grammar is not None and not proposal.tokens.is_cpu and masks.any_of(self.grammar, context):
            _ = proposal.ids

    def scores(self, logits: Tensor, context: Context, proposal: Proposal | None, first: int = -1) -> Tensor:
        """``logits [B, R, V]`` after processors, grammar and truncations; row r belongs to node ``first + r`` (-1: no node).

        Logits of a row of temperature 0 among others are not divided: their largest one is taken.

        Raises:
            ValueError: a row has NaN, +inf, or nothing but -inf, or its request has no temperature.
        """
        logits = self.constrained(logits, context, proposal, first)
        if isinstance(self.temperature, Sequence):
            by_row = self._by_row(context)
            by_row = torch.where(by_row > 0, by_row, 1).to(logits.dtype)
            logits = logits / to_device(by_row, logits.device)[:, None, None]
        if self._untouched:
            return logits
        *_, R, V = logits.shape
        flat = logits.reshape(-1, V)
        return self._truncated(flat, context, lambda: torch.arange(len(flat)) // R).view(logits.shape)

    def _truncated(self, scores: Tensor, context: Context, row: Callable[[], Tensor]) -> Tensor:
        """``scores [K, V]`` of rows ``row() [K]`` after the temperature, where all rows share one, and the truncations."""
        if not isinstance(self.temperature, Sequence) and self.temperature != 1:
            # A GPU multiplies by the reciprocal of a number, and divides by a tensor, as kernels and rows of several temperatures do.
            scores = scores / scores.new_full((), float(self.temperature))
        return self._truncation(scores, context, row)

    def argmax(
        self, logits: Tensor, context: Context, proposal: Proposal | None = None, first: int = -1
    ) -> Tensor:
        """``[B, R]`` the most probable tokens, without computing distributions (but those of a subclass)."""
        if type(self).__call__ is not Sampling.__call__:
            return _largest(self(logits, context, proposal, first))[1]
        logits = widened(logits) if self.processors else logits  # as ``__call__`` passes them to processors
        top, token = _largest(self.scores(logits, context, proposal, first))
        check_finite(top)
        return token

    def __call__(
        self, logits: Tensor, context: Context, proposal: Proposal | None = None, first: int = -1
    ) -> Tensor:
        """Probabilities ``[B, R, V]`` in float32 (float64 for float64 logits); arguments as for ``scores``.

        Entries of nodes that do not exist are valid distributions, but arbitrary ones.
        """
        wide = widened(logits)
        own = self._by_row(context) if isinstance(self.temperature, Sequence) else None
        mixed = own is not None and bool((own == 0).any())
        if own is not None and mixed and type(self).scores is Sampling.scores:
            return self._mixed(wide, own, context, proposal, first)
        scores = self.scores(wide, context, proposal, first)
        if self.greedy:
            top, token = _largest(scores)
            check_finite(top)
            return torch.zeros_like(scores).scatter_(-1, token[..., None], 1)
        probs, whose = scores.softmax(-1), _WHOSE.get()

        def refuse(finite: Tensor) -> None:
            if not bool(finite.all()):
                _refuse(self.scores(logits, context, proposal, first).amax(-1), whose)

        _defer_finite(probs.select(-1, 0), refuse)  # NaN everywhere in a row that has no distribution
        if own is not None and mixed:  # a subclass has scores of its own
            rows = (own == 0).nonzero()[:, 0].to(probs.device)
            token = _largest(scores[rows])[1]
            probs[rows] = torch.zeros_like(scores[rows]).scatter_(-1, token[..., None], 1)
        return probs

    def _mixed(
        self, logits: Tensor, own: Tensor, context: Context, proposal: Proposal | None, first: int
    ) -> Tensor:
        """``__call__`` for rows of temperatures ``own [B]``, some of them 0, with a softmax only where a token is drawn: on a CPU it takes longer than all else here."""
        logits = self.constrained(logits, context, proposal, first)
        R, V = logits.shape[1:]
        drawn = (own > 0)[:, None].expand(-1, R)
        if proposal is not None:
            drawn = drawn & (torch.arange(first, first + R) < proposal.size[:, None])
        by = to_device(torch.where(own > 0, own, 1).to(logits.dtype), logits.device)[:, None]
        top, token = _largest(logits)
        check_finite(top / by)
        # ``view`` below must not copy, so the strides of ``logits`` are not taken over.
        probs = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        probs.scatter_(2, token[..., None], 1)
        found = drawn.flatten().nonzero()[:, 0]
        if len(found):
            at = to_device(found, logits.device)
            scores = logits.flatten(0, 1).index_select(0, at)
            scores /= by[at // R]
            probs.view(-1, V).index_copy_(
                0, at, self._truncated(scores, context, lambda: found // R).softmax(-1)
            )
        return probs

    def _by_row(self, context: Context) -> Tensor:
        """``[B]`` float64: each row's own temperature."""
        assert isinstance(self.temperature, Sequence)
        if isinstance(self.temperature, PerRequest):
            return torch.tensor([self.temperature[r] for r in context.request.tolist()], dtype=torch.float64)
        self.check_requests(int(context.request.max()) if context.batch else 0)
        return self._temperatures[context.request]

    def end_ids(self, request: int) -> tuple[int, ...]:
        """The tokens with which a request's grammar ends its text; none without a grammar."""
        tracker = masks.of_request(self.grammar, request)
        return () if tracker is None else tracker.grammar.end_ids

    def check_requests(self, last: int) -> None:
        """Raise ValueError where requests have settings of their own, and the request ``last`` has none."""
        for name, values in self.own.items():
            if last >= len(values):
                raise ValueError(
                    f"{name} has {len(values)} entries and there is a request {last} (the first is 0): give one for each request, or a single one "
                    "for all"
                )

    def check_committed(self, context: Context, tokens: Tensor, count: Tensor, verifier: str) -> None:
        """Raise ValueError where the grammar does not allow ``tokens[b, :count[b]]`` after row b: a lossy verifier accepted one, or it allows none."""
        if self.grammar is not None:
            masks.check_committed(self.grammar, context, tokens, count, verifier)

    def constrained(self, logits: Tensor, context: Context, proposal: Proposal | None, first: int) -> Tensor:
        """``logits`` after the processors and the grammar. Where a draft's logits are looked at, errors of both change nothing: the target's decide."""
        if self._by_number:
            self.check_requests(int(context.request.max()) if context.batch else 0)
        drafting = bool(_WHOSE.get())
        if isinstance(self.processors, PerRequest):
            logits = of_requests(self._processors, logits, context, proposal, first, drafting)
        elif self.processors:
            logits = self._processors(logits, context, proposal, first, _ignored if drafting else None)
        if self.grammar is not None:
            processed = bool(self.processors)
            logits = masks.constrained(self.grammar, logits, context, proposal, first, processed, drafting)
        return logits


def _ignored(ids: list[int], error: Exception) -> None:
    """What is told of texts that only a draft has got to."""


def fit(logits: Tensor, vocab_size: int | None) -> Tensor:
    """Logits over the target's vocabulary: surplus entries (padding) are cut, missing ones get -inf."""
    if vocab_size is None or logits.shape[-1] == vocab_size:
        return logits
    if logits.shape[-1] > vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=float("-inf"))


def widened(logits: Tensor) -> Tensor:
    """In float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """``scores.max(-1)``: the first of equal ones, NaN above all. On a CPU NumPy's argmax is vectorised and PyTorch's is not."""
    if not scores.is_cpu or scores.dtype not in (torch.float32, torch.float64):
        top, token = scores.max(-1)
        return top, token
    token = torch.from_numpy(scores.detach().numpy().argmax(-1))
    return scores.gather(-1, token[..., None])[..., 0], token


def check_finite(top: Tensor) -> None:
    """Raise ValueError for rows with NaN, +inf or nothing but -inf, which ``top``, each row's largest logit, shows."""
    whose = _WHOSE.get()

    def refuse(finite: Tensor) -> None:
        if not bool(finite.all()):
            _refuse(top, whose)

    _defer_finite(top, refuse)


def _defer_finite(values: Tensor, check: Check) -> None:
    """``defer(torch.isfinite(values), check)``, only where it may fail: NaN and inf show in a sum and never cancel."""
    if not (values.is_cpu and math.isfinite(values.sum().item())):
        defer(torch.isfinite(values), check)


def _refuse(top: Tensor, whose: str) -> None:
    top = top.cpu()
    where = (~torch.isfinite(top)).nonzero()[0].tolist()
    raise ValueError(
        f"{whose}logits of row {where[0]}, entry {where[1]} contain {float(top[tuple(where)])} as their maximum: NaN or inf logits have "
        "no distribution (a model in float16 may need bfloat16 or float32; a processor or the grammar may have masked every token)"
    )
