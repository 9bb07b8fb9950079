"""The FLOPs and bytes of a forward pass, term by term (SPIRe, arXiv 2504.06419, section 2, and the terms that it omits).

A term is a function ``Forward -> Work``; a ``Step`` is a sum of terms. ``PAPER`` has the two that the paper counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.arguments import positive
from specdec.cost.shapes import Shape


@dataclass(frozen=True)
class Forward:
    """One forward pass of a model.

    Attributes:
        batch: sequences. tokens: fed for each of them (1 for a plain step, k + 1 to verify).
        kv_length: cached positions that each sequence attends to; a mean over the batch if they differ.
        bytes_per_weight, bytes_per_kv: of a weight, and of a cached key or value (activations are as wide): 1 for FP8,
            4 for float32.
    Raises:
        ValueError: a value that is not positive.
    """

    shape: Shape
    batch: int
    tokens: int
    kv_length: float
    bytes_per_weight: float = 1.0
    bytes_per_kv: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "batch", "tokens", "kv_length", "bytes_per_weight", "bytes_per_kv")

    @property
    def fed(self) -> int:
        """Tokens of the whole batch."""
        return self.batch * self.tokens


class Work(NamedTuple):
    """FLOPs and bytes moved under one name."""

    name: str
    flops: float
    bytes: float


Term = Callable[[Forward], Work]


@dataclass(frozen=True)
class Step:
    """One pass over a model: its terms, and its number of layers (for per-layer overheads)."""

    work: tuple[Work, ...]
    layers: int

    @property
    def flops(self) -> float:
        """FLOPs; a multiplication and an addition are two."""
        return sum(w.flops for w in self.work)

    @property
    def bytes(self) -> float:
        """Bytes read from and written to memory."""
        return sum(w.bytes for w in self.work)

    @property
    def intensity(self) -> float:
        """Operational intensity, FLOPs a byte (Fig. 3)."""
        return self.flops / self.bytes


def step(forward: Forward, terms: Sequence[Term]) -> Step:
    """The sum of ``terms`` for one pass.

    Raises:
        ValueError: no terms.
    """
    if not terms:
        raise ValueError("terms is empty: give at least one, for example specdec.cost.PAPER")
    return Step(tuple(term(forward) for term in terms), forward.shape.layers)


def body(f: Forward) -> Work:
    """Blocks: 2 FLOPs a weight and token; weights are read once for the whole batch (§2)."""
    return Work("body", 2 * f.shape.active * f.fed, f.shape.touched(f.fed) * f.bytes_per_weight)


def kv_reads(f: Forward) -> Work:
    """Cached keys and values, read once for all tokens of a sequence (§2)."""
    return Work("kv_reads", 0.0, f.batch * f.shape.kv_values(f.kv_length) * f.bytes_per_kv)


def memory_projection(f: Forward) -> Work:
    """SPIRe's second projection to keys and values, of the memory vector (§3.3); ``body`` has counted reading its weights."""
    return Work("memory_projection", 2 * f.shape.kv_projection * f.fed, 0.0)


def attention(f: Forward) -> Work:
    """Scores and weighted sums: 4 FLOPs per query head, head dimension and position, those of the same pass included. Not in the paper."""
    positions = f.shape.positions(f.kv_length + (f.tokens - 1) / 2)
    return Work("attention", 4 * f.shape.heads * f.shape.d_head * positions * f.fed, 0.0)


def kv_writes(f: Forward) -> Work:
    """Keys and values of the tokens fed, written. Not in the paper."""
    return Work("kv_writes", 0.0, f.fed * f.shape.kv_values(1) * f.bytes_per_kv)


def unembedding(f: Forward) -> Work:
    """Logits of every token fed. Not in the paper.

    Raises:
        ValueError: a shape without a vocabulary.
    """
    _need_vocab(f, "unembedding")
    return Work("unembedding", 2 * f.shape.unembedding * f.fed, f.shape.unembedding * f.bytes_per_weight)


def embedding(f: Forward) -> Work:
    """One row per distinct token fed; if tied, ``unembedding`` has counted it. Not in the paper.

    Raises:
        ValueError: a shape without a vocabulary.
    """
    _need_vocab(f, "embedding")
    rows = 0 if f.shape.tied else min(f.fed, f.shape.vocab)
    return Work("embedding", 0.0, rows * f.shape.d_model * f.bytes_per_weight)


def kv_refresh(f: Forward) -> Work:
    """Recomputing a draft's keys and values from the target's activations, for every token fed (§3.3). Not in the paper's costs.

    The projections and one activation per layer are read, keys and values are written.
    """
    moved = f.fed * (f.shape.layers * f.shape.d_model + f.shape.kv_values(1)) * f.bytes_per_kv
    return Work(
        "kv_refresh", 2 * f.shape.kv_projection * f.fed, f.shape.kv_projection * f.bytes_per_weight + moved
    )


def _need_vocab(f: Forward, term: str) -> None:
    if not f.shape.vocab:
        raise ValueError(f"the term {term} needs a vocabulary: set Shape(vocab=...)")


PAPER: tuple[Term, ...] = (body, kv_reads)
"""The terms that the paper counts."""

FULL: tuple[Term, ...] = (body, kv_reads, kv_writes, attention, unembedding, embedding)
"""With the terms of a step that the paper omits. Sampling, prefill and communication are still not counted."""
