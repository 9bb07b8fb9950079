"""Requests of a stream and their results: times for latency figures, counts for tau."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.arguments import function, listed, number, whole
from specdec.sampling import Sampling
from specdec.stats import Stats
from specdec.texts import StreamChunk


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt of a stream.

    Args:
        prompt: a text, a chat, or ids, as for ``generate``. max_new_tokens: the budget.
        arrival: time of arrival since the start, in seconds, or in rounds where the clock counts rounds; ``None``: when it is taken from the source.
        seed: makes the same draws as ``generate(prompt, seed=seed)``; ``None`` derives them from the stream's seed.
        key: any object that the caller wants back with the result.
        cancelled: asked after every round, ``threading.Event().is_set`` for example; when it says yes, the request ends with what it has.
        eos_token_id, stop_strings: what ends this request, as for ``generate``; ``None``: what the stream says, ``()``: none.
        sampling: its own ``Sampling`` in place of the decoder's, if the stream takes such (``serve(own_sampling=True)``); ``None``: the decoder's.
        on_chunk: called with a ``StreamChunk`` after every round that commits tokens of this request: ``row`` is its number in the stream, and
            ``finish`` is set in its last chunk. The texts joined are ``Finished.text``. A request that never started has no chunks.
    Raises:
        TypeError: the arrival or the seed is no number, ``sampling`` is no ``Sampling``, or ``cancelled`` or ``on_chunk`` is no function. ValueError:
            the arrival is negative or infinite, or ``sampling`` has settings by request.
    """

    prompt: Any
    max_new_tokens: int = 128
    arrival: float | None = 0.0
    seed: int | None = None
    key: Any = None
    cancelled: Callable[[], bool] | None = None
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    on_chunk: Callable[[StreamChunk], None] | None = None
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        function("cancelled", self.cancelled)
        function("on_chunk", self.on_chunk)
        if self.seed is not None:
            whole("seed", listed(self.seed), ", or None")
        if self.sampling is not None:
            if type(self.sampling) is not Sampling:
                raise TypeError(
                    f"sampling is {self.sampling!r}: give a sd.Sampling(...), or None for the decoder's (a subclass may be the decoder's only)"
                )
            if self.sampling.by_request:
                raise ValueError(
                    f"sampling has a list of {' and of '.join(self.sampling.own)}: give those of this request"
                )
        if self.arrival is None:
            return
        number("arrival", self.arrival, ", or None")
        if not 0 <= self.arrival < float("inf"):
            raise ValueError(
                f"arrival is {self.arrival}: give a time since the start of the stream, 0 or later"
            )


@dataclass(frozen=True, eq=False)
class Finished:
    """A finished request. Times are in units of the stream's clock, since its start.

    Attributes:
        index: number of the request in the stream. ids: generated ids, with the token that ended it (after an error of its own sampling, those before). text: ``None`` without a tokenizer.
        finish: ``"length"``, ``"eos"``, ``"stop_string"``, ``"cancelled"``, or ``"error"``. error: what was wrong with it (``serve(errors="yield")``). prompt_ids: its prompt's, none if it never started.
        cached: how many of these the target's prefix cache had. stats: counts (no seconds: the rows of a batch share them).
        arrived: when it was due. started: when its prefill began. first_token: when its prefill ended. finished: when its
            last token was committed.
    """

    request: Request
    index: int
    ids: list[int]
    text: str | None
    finish: str
    stats: Stats = field(repr=False)
    arrived: float
    started: float
    first_token: float
    finished: float
    error: Exception | None = None
    prompt_ids: list[int] = field(default_factory=list, repr=False)
    cached: int = 0

    @property
    def queueing(self) -> float:
        """Time spent waiting for a free row."""
        return self.started - self.arrived

    @property
    def latency(self) -> float:
        """Time from arrival to the last token."""
        return self.finished - self.arrived

    @property
    def to_first_token(self) -> float:
        """Time from arrival to the first token."""
        return self.first_token - self.arrived


@dataclass(frozen=True)
class Summary:
    """Figures of a stream; times are in units of its clock.

    Attributes:
        requests, tokens: how many were finished and generated. span: from the first arrival to the last end. throughput: tokens a unit of time.
        tau: block efficiency over all full rounds. lossless: whether the verifier declares that texts have the target's
            distribution. queueing, to_first_token, latency: ``mean``, ``p50``, ``p95``, ``max``.
    """

    requests: int
    tokens: int
    span: float
    throughput: float
    tau: float
    lossless: bool
    queueing: dict[str, float]
    to_first_token: dict[str, float]
    latency: dict[str, float]

    @staticmethod
    def of(finished: Iterable[Finished]) -> Summary:
        """The figures of some finished requests; those that never started, refused or cancelled, are left out.

        Raises:
            ValueError: there are none.
        """
        done = [one for one in finished if one.ids]
        if not done:
            raise ValueError("finished is empty: a summary needs at least one finished request")
        tokens = sum(len(one.ids) for one in done)
        span = max(one.finished for one in done) - min(one.arrived for one in done)
        rounds = sum(one.stats.full_rounds for one in done)
        full = sum(one.stats.full_tokens for one in done)
        return Summary(
            requests=len(done),
            tokens=tokens,
            span=span,
            throughput=tokens / span if span else float("nan"),
            tau=full / rounds if rounds else float("nan"),
            lossless=all(one.stats.lossless for one in done),
            queueing=_spread([one.queueing for one in done]),
            to_first_token=_spread([one.to_first_token for one in done]),
            latency=_spread([one.latency for one in done]),
        )


def _spread(values: list[float]) -> dict[str, float]:
    p50, p95 = np.percentile(values, [50, 95])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p95": float(p95), "max": max(values)}
