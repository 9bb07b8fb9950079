"""Rules that end a chain while it is drafted.

A rule is asked *before* a token is drawn, or *after* it was, in which case the token is submitted whatever it is. It sees what is known at that time. So it
cannot look at a token and then drop it, which would bias the output (docs/design.md, "Anticipation").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.arguments import number, positive

When = Literal["before", "after"]


class Drafted(NamedTuple):
    """What a draft knows of a chain of K tokens, drawn one after another.

    Before draw n + 1, rules see n columns of ``token`` and ``own``, and n + 1 of ``most`` and ``entropy``; after it, n + 1 of all. At temperature 0 they
    see the softmax of the scores whose largest one is taken.

    Attributes:
        token: ``[..., K]``. own: ``[..., K]``, its probability under the distribution that it was drawn from.
        most, entropy: ``[..., K]``, the largest probability of that distribution and its entropy in nats, both known before the token.
        known: ``[..., F]``, any numbers that are known before the round, such as the time or what the text accepted so far.
    """

    token: Tensor
    own: Tensor
    most: Tensor
    entropy: Tensor
    known: Tensor | None = None

    @staticmethod
    def of(q: Tensor, token: Tensor, known: Tensor | None = None) -> Drafted:
        """From distributions ``[..., K, V]`` and tokens ``[..., K]``."""
        own = q.gather(-1, token[..., None])[..., 0]
        return Drafted(token, own, q.amax(-1), torch.special.entr(q).sum(-1), known)

    def each(self, change: Callable[[Tensor], Tensor]) -> Drafted:
        """With every part changed."""
        return Drafted(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]

    def grown(self, **columns: Tensor) -> Drafted:
        """With one more column ``[...]`` in some parts."""
        old = self._asdict()
        return self._replace(
            **{name: torch.cat([old[name].to(new), new[..., None]], -1) for name, new in columns.items()}
        )

    def first(self, draws: int, laws: int) -> Drafted:
        """What was known after ``draws`` tokens, from ``laws`` distributions."""
        most, entropy = self.most[..., :laws], self.entropy[..., :laws]
        return Drafted(self.token[..., :draws], self.own[..., :draws], most, entropy, self.known)


@runtime_checkable
class Stop(Protocol):
    """A rule, asked ``when``. It gives ``[...]`` bool: the chains that end, each by what is seen of itself."""

    @property
    def when(self) -> When: ...

    def __call__(self, seen: Drafted) -> Tensor: ...


Stops = float | Stop | Sequence[Stop] | None


@dataclass(frozen=True)
class Rule:
    """A function of yours: ``Rule("after", lambda seen: seen.own.prod(-1) < 0.3)``. Before the first token, ``own`` and ``token`` have no columns."""

    when: When
    rule: Callable[[Drafted], Tensor]

    def __post_init__(self) -> None:
        if self.when not in ("before", "after"):
            raise ValueError(f"when is {self.when!r}: give 'before' or 'after'")
        if not callable(self.rule):
            raise TypeError(f"rule is {self.rule!r}: give a function of what is seen")

    def __call__(self, seen: Drafted) -> Tensor:
        return self.rule(seen)


@dataclass(frozen=True)
class Confidence:
    """Ends a chain after a token whose own probability is below ``least``, transformers' ``assistant_confidence_threshold`` (which also moves
    while it decodes, if scikit-learn is there)."""

    least: float = 0.4
    when: ClassVar[When] = "after"

    def __post_init__(self) -> None:
        _probability("least", self.least)

    def __call__(self, seen: Drafted) -> Tensor:
        return seen.own[..., -1] < self.least


@dataclass(frozen=True)
class MaxProb(Confidence):
    """Ends a chain before a token whose distribution has no probability of ``least``."""

    when: ClassVar[When] = "before"

    def __call__(self, seen: Drafted) -> Tensor:
        return seen.most[..., -1] < self.least


@dataclass(frozen=True)
class Entropy(Confidence):
    """Ends a chain before a token of entropy H if ``1 - sqrt(scale * H) < least``: AdaEDL (arXiv 2410.18351), which also moves ``least``."""

    scale: float = 0.2
    when: ClassVar[When] = "before"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "scale")

    def __call__(self, seen: Drafted) -> Tensor:
        return 1 - (self.scale * seen.entropy[..., -1]).sqrt() < self.least


@dataclass(frozen=True)
class PathProb(Confidence):
    """Ends a chain before a token if the product of its tokens' own probabilities and of the next token's largest one is below ``least``."""

    least: float = 0.1
    when: ClassVar[When] = "before"

    def __call__(self, seen: Drafted) -> Tensor:
        return seen.own.prod(-1) * seen.most[..., -1] < self.least


def as_stops(stop: Any) -> tuple[Stop, ...]:
    """The rules of an argument ``stop``: ``None`` or 0, another probability (``Confidence``), a rule, or several.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if isinstance(stop, tuple | list):
        return tuple(one for each in stop for one in as_stops(each))
    if isinstance(stop, type) or callable(stop):
        if isinstance(stop, type) or not isinstance(stop, Stop) or stop.when not in ("before", "after"):
            raise TypeError(
                f"stop is {stop!r}, which is no rule: give an object of drafts.stops, such as Rule('after', function)"
            )
        return (stop,)
    if stop is None:
        return ()
    _probability("stop", stop, ", or rules of drafts.stops")
    return (Confidence(float(stop)),) if stop else ()


def ends(stops: Sequence[Stop], when: When, seen: Drafted) -> Tensor:
    """``[...]`` bool: the chains that a rule ends at this time.

    Raises:
        ValueError: a rule gives something else.
    """
    found = torch.zeros_like(seen.most[..., 0], dtype=torch.bool)
    for stop in stops:
        if stop.when == when:
            here: Any = stop(seen)
            if not isinstance(here, Tensor) or here.dtype != torch.bool or here.shape != found.shape:
                raise ValueError(
                    f"{stop!r} gave {here!r}: give one bool for each chain, such as seen.most[..., -1] < 0.4"
                )
            found = found | here
    return found


def _probability(name: str, value: Any, hint: str = "") -> None:
    number(name, value, hint)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}: give a probability{hint}")


def why_stop(stop: Stops) -> str | None:
    """Why a captured round cannot draw chains with these rules, or ``None``."""
    return f"runs chains without a stop, but the draft's is {stop!r}" if stop else None
