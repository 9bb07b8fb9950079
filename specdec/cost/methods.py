"""Decoding methods as rounds of steps: autoregressive, vanilla, MagicDec, SPIRe (SPIRe, arXiv 2504.06419, §2 and §3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specdec.arguments import at_least, numbers, positive
from specdec.cost.hardware import Hardware
from specdec.cost.shapes import Shape
from specdec.cost.terms import FULL, PAPER, Forward, Step, Term, kv_refresh, memory_projection, step

View = Callable[[float], float]
"""From the positions of the context to those that a draft reads: ``full``, ``Sparse()``, ``Window(65)``, or any function."""


def full(context: float) -> float:
    """All positions."""
    return context


@dataclass(frozen=True)
class Sparse:
    """``sinks + context // divisor``, the paper's modelled window (§2): 65 positions at a context of 512."""

    divisor: int = 8
    sinks: int = 1

    def __post_init__(self) -> None:
        numbers(self, "divisor", "sinks")
        if self.divisor < 1 or self.sinks < 0:
            raise ValueError(
                f"divisor is {self.divisor} and sinks {self.sinks}: give a divisor of at least 1, and 0 sinks or more"
            )

    def __call__(self, context: float) -> float:
        return self.sinks + context // self.divisor


@dataclass(frozen=True)
class Window:
    """At most ``size`` positions, sinks included: the paper's drafts were measured with ``Window(65)`` (§3.1)."""

    size: int

    def __post_init__(self) -> None:
        numbers(self, "size")
        if self.size < 1:
            raise ValueError(f"size is {self.size}: give at least 1 position")

    def __call__(self, context: float) -> float:
        return min(context, self.size)


@dataclass(frozen=True)
class Load:
    """The workload, and which of its costs are counted.

    Attributes:
        batch: sequences. context: positions of each (a mean if they differ). k: tokens drafted a round.
        bytes_per_weight, bytes_per_kv: as in ``Forward``. terms: counted in every step of drafts and target.
        refresh: whether to count the refresh of a draft's keys and values after a round, for drafts that have one.
    Raises:
        ValueError: no sequence, no context, or nothing drafted.
    """

    batch: int
    context: float
    k: int = 4
    bytes_per_weight: float = 1.0
    bytes_per_kv: float = 1.0
    terms: tuple[Term, ...] = PAPER
    refresh: bool = False

    def __post_init__(self) -> None:
        numbers(self, "batch", "context", "bytes_per_weight", "bytes_per_kv")
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}: give at least 1 sequence")
        if self.context < 1:
            raise ValueError(
                f"context is {self.context}: give at least 1 position; a target attends to its prompt"
            )
        positive(self, "bytes_per_weight", "bytes_per_kv")
        remedy = "draft at least 1 token a round, or use the method AUTOREGRESSIVE"
        at_least(1, "k", self.k, remedy)

    @property
    def full(self) -> Load:
        """The load with the terms that the paper omits: (un)embedding, attention, KV writes, refresh."""
        return replace(self, terms=FULL, refresh=True)

    def forward(self, shape: Shape, tokens: int, kv_length: float) -> Forward:
        """A pass over ``shape`` at this load's batch and bytes."""
        return Forward(shape, self.batch, tokens, kv_length, self.bytes_per_weight, self.bytes_per_kv)


@dataclass(frozen=True)
class Round:
    """One round of a method: draft ``k`` times, verify once, refresh once if that is counted.

    Attributes:
        target: a plain decoding step, to compare with. draft, refresh: ``None`` if the method has none.
    """

    k: int
    target: Step
    verify: Step
    draft: Step | None = None
    refresh: Step | None = None

    def seconds(self, hardware: Hardware) -> float:
        """Seconds for the round."""
        drafting = self.k * hardware.time(self.draft) if self.draft else 0.0
        return drafting + hardware.time(self.verify) + (hardware.time(self.refresh) if self.refresh else 0.0)

    def cost(self, hardware: Hardware) -> float:
        """The paper's Δt: the round's time over that of a plain decoding step."""
        return self.seconds(hardware) / hardware.time(self.target)

    def multiplier(self, tau: float, hardware: Hardware) -> float:
        """Throughput over plain decoding's: τ / Δt (§2).

        Args:
            tau: mean tokens of a round, bonus token included.
        Raises:
            ValueError: τ outside 1 to k + 1.
        """
        check_tau(tau, self.k)
        return tau / self.cost(hardware)


def check_tau(tau: float, k: int) -> None:
    """Raise ValueError for a mean number of tokens that rounds of ``k`` drafted tokens cannot have."""
    if not 1 <= tau <= k + 1:
        raise ValueError(
            f"tau is {tau} at k = {k}: a round produces 1 to {k + 1} tokens, the bonus token included; "
            "give the mean over rounds"
        )


@dataclass(frozen=True)
class Method:
    """A decoding method; for example, a windowed vanilla draft is ``Method("windowed", draft, Window(65))``.

    Attributes:
        draft: ``None`` is plain decoding. view: how much of the context the draft reads. own: terms of the draft alone.
        refresh: whether the draft's keys and values of a round's tokens are computed from the target's activations after it.
    Raises:
        TypeError: a draft, or in ``round`` a target, that is not a ``Shape``.
    """

    name: str
    draft: Shape | None
    view: View = full
    own: tuple[Term, ...] = ()
    refresh: bool = False

    def __post_init__(self) -> None:
        if self.draft is not None:
            _shape("draft", self.draft)

    def round(self, target: Shape, load: Load) -> Round:
        """The steps of a round, at a constant context, as in the paper."""
        _shape("target", target)
        plain = step(load.forward(target, 1, load.context), load.terms)
        if self.draft is None:
            return Round(0, plain, plain)
        kv_length = self.view(load.context)
        draft = step(load.forward(self.draft, 1, kv_length), load.terms + self.own)
        verify = step(load.forward(target, load.k + 1, load.context), load.terms)
        refresh = None
        if self.refresh and load.refresh:
            # All fed tokens, accepted or not: a kernel is launched before acceptance is known.
            refresh = step(load.forward(self.draft, load.k + 1, kv_length), (kv_refresh,))
        return Round(load.k, plain, verify, draft, refresh)


def _shape(name: str, shape: object) -> None:
    if not isinstance(shape, Shape):
        raise TypeError(
            f"{name} is a {type(shape).__name__}: give a Shape; that of a transformers config is Shape.of(config)"
        )


AUTOREGRESSIVE = Method("autoregressive", None)
"""Plain decoding: one token a round, multiplier 1."""


def vanilla(draft: Shape, view: View = full) -> Method:
    """An independent, much smaller draft with all of the context."""
    return Method("vanilla", draft, view)


def magicdec(target: Shape, view: View = Sparse()) -> Method:
    """The target drafts for itself with a sparse KV cache (MagicDec, arXiv 2408.11049)."""
    return Method("magicdec", target, view)


def spire(draft: Shape, view: View = Sparse(), feedback: bool = True) -> Method:
    """A few of the target's layers, a sparse KV cache and, with ``feedback``, a feedback memory (§3)."""
    return Method("spire", draft, view, (memory_projection,) if feedback else (), refresh=True)
