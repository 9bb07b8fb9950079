"""Model shapes: the weights that a step multiplies and reads, and the keys and values that it caches (SPIRe, arXiv 2504.06419, §2)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from specdec.arguments import whole
from specdec.cost.configs import read


@dataclass(frozen=True)
class Experts:
    """The feed-forward layers of a mixture of experts.

    Attributes:
        count: experts in a layer. chosen: experts per token. d_ff: width of one expert.
        shared_d_ff: width of the shared expert that every token uses, 0 for none.
        layers: how many of the model's layers have experts, the others being dense; ``None``: all.
    """

    count: int
    chosen: int
    d_ff: int
    shared_d_ff: int = 0
    layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("count", "chosen", "d_ff", "shared_d_ff"):
            whole(name, vars(self)[name])
        if self.d_ff < 1 or self.shared_d_ff < 0:
            raise ValueError(
                f"d_ff is {self.d_ff} and shared_d_ff {self.shared_d_ff}: give at least 1, and 0 or more"
            )
        if not 1 <= self.chosen <= self.count:
            raise ValueError(f"chosen is {self.chosen} of {self.count} experts: give 1 to count")

    def distinct(self, tokens: float) -> float:
        """Expected number of different experts of ``tokens`` tokens, each choosing uniformly and independently."""
        return self.count * (1 - (1 - self.chosen / self.count) ** tokens)


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only Transformer that its cost depends on.

    Attributes:
        layers, d_model, heads (of queries), kv_heads, d_head: as usual. d_ff: width of a dense feed-forward layer.
        vocab: number of ids, 0 to ignore the (un)embedding. tied: whether the unembedding is the embedding.
        gated: three feed-forward matrices (SwiGLU) instead of two. experts: replace dense feed-forward layers.
        window: positions that each of ``windowed_layers`` layers caches; the other layers cache all.
    Raises:
        ValueError: a size below 1, heads that kv_heads do not divide, or a window without layers.
    """

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_ff: int
    vocab: int = 0
    tied: bool = False
    gated: bool = True
    experts: Experts | None = None
    window: int | None = None
    windowed_layers: int = 0

    def __post_init__(self) -> None:
        sizes = [(field.name, vars(self)[field.name]) for field in fields(self)[:7]]
        for name, size in sizes:
            whole(name, size)
        if not (self.experts is None or isinstance(self.experts, Experts)):
            raise TypeError(f"experts is {self.experts!r}: give Experts(count, chosen, d_ff), or None")
        for name, size in sizes[:6]:
            if size < 1:
                raise ValueError(f"{name} is {size}: give at least 1")
        if self.vocab < 0:
            raise ValueError(
                f"vocab is {self.vocab}: give the number of ids, or 0 to leave the (un)embedding out"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads} and kv_heads {self.kv_heads}: each key-value head serves as many query heads"
            )
        if (self.window is None) != (
            self.windowed_layers == 0
        ) or not 0 <= self.windowed_layers <= self.layers:
            raise ValueError(
                f"window is {self.window} and windowed_layers {self.windowed_layers} of {self.layers}: give both or neither"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: give at least 1 position, or None")
        if self.experts is not None and not 0 <= self._layers_with_experts <= self.layers:
            raise ValueError(
                f"experts.layers is {self.experts.layers} of {self.layers} layers: give at most as many"
            )

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The shape of a transformers config (or of a model that has one, or of an ``HFModel``); see ``specdec.cost.configs``.

        Raises:
            TypeError: ``config`` is a name or a dictionary.
            ValueError: a config with missing fields, or one whose cost this model does not describe.
        """
        found = read(config)
        experts = found.pop("experts")
        return cls(**found, experts=None if experts is None else Experts(**experts))

    def with_layers(self, layers: int) -> Shape:
        """The same with another number of layers: SPIRe's draft is ``target.with_layers(2)`` (section 3.2).

        Raises:
            ValueError: layers of more than one kind, so that it is unclear which are kept.
        """
        if self.windowed_layers not in (0, self.layers) or self._layers_with_experts not in (0, self.layers):
            raise ValueError(
                "the layers are of more than one kind: use dataclasses.replace and say which are kept"
            )
        experts = None if self.experts is None else replace(self.experts, layers=None)
        return replace(
            self, layers=layers, experts=experts, windowed_layers=layers if self.windowed_layers else 0
        )

    @property
    def body(self) -> int:
        """Parameters without embedding, unembedding, biases and last norm: the paper's N."""
        return self._per_token + self._unchosen * (
            self.experts.count - self.experts.chosen if self.experts else 0
        )

    @property
    def active(self) -> int:
        """Body parameters that one token uses: ``body`` with the chosen experts only."""
        return self._per_token

    def touched(self, tokens: float) -> float:
        """Expected body parameters that a step over ``tokens`` tokens reads, each once: ``body`` with the chosen experts only."""
        if self.experts is None:
            return float(self.body)
        return self._per_token + self._unchosen * (self.experts.distinct(tokens) - self.experts.chosen)

    @property
    def unembedding(self) -> int:
        """Parameters of the unembedding (as many as the embedding's)."""
        return self.vocab * self.d_model

    @property
    def parameters(self) -> int:
        """Body, embedding and unembedding; tied ones count once."""
        return self.body + self.unembedding * (1 if self.tied else 2)

    @property
    def kv_projection(self) -> int:
        """Parameters of all layers' key and value projections."""
        return 2 * self.layers * self.kv_heads * self.d_model * self.d_head

    def positions(self, kv_length: float) -> float:
        """Positions attended to by a query that may see ``kv_length`` of them, summed over the layers."""
        windowed = 0.0 if self.window is None else self.windowed_layers * min(kv_length, self.window)
        return (self.layers - self.windowed_layers) * kv_length + windowed

    def kv_values(self, kv_length: float) -> float:
        """Keys and values (numbers, not bytes) of one sequence over ``kv_length`` positions."""
        return 2 * self.kv_heads * self.d_head * self.positions(kv_length)

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def _layers_with_experts(self) -> int:
        if self.experts is None:
            return 0
        return self.layers if self.experts.layers is None else self.experts.layers

    @property
    def _unchosen(self) -> int:
        """Parameters of one expert, in every layer that has experts."""
        width = self.experts.d_ff if self.experts else 0
        return self._layers_with_experts * self._matrices * self.d_model * width

    @property
    def _per_token(self) -> int:
        norms = 2 * self.d_model
        attention = 2 * (self.heads + self.kv_heads) * self.d_model * self.d_head
        common = self.layers * (norms + attention)
        sparse = self._layers_with_experts
        dense = (self.layers - sparse) * self._matrices * self.d_model * self.d_ff
        if self.experts is None:
            return common + dense
        router = sparse * self.d_model * self.experts.count
        shared = sparse * self._matrices * self.d_model * self.experts.shared_d_ff
        return common + dense + router + shared + self._unchosen * self.experts.chosen
