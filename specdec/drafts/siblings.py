"""How the children of a node are drawn from the distribution after it: for ``drafts.Tree``.

Candidates without replacement: Sequoia (Chen et al., arXiv 2402.12374). The most probable tokens and one drawn token: the greedy sets of Hu et
al. (arXiv 2502.18779, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.capabilities import Siblings
from specdec.kernels.device import to_device
from specdec.rng import Key, Rng


class Drawn(NamedTuple):
    """Children of ``L`` nodes, ``W`` each.

    ``tokens [B, L, W]`` in the order in which they are to be tried; ``distributions [B, Q, V]`` that they were drawn from, and
    ``source [L, W]`` or ``[B, L, W]``, which of these each child was drawn from.
    """

    tokens: Tensor
    distributions: Tensor
    source: Tensor

    def with_points(self, rows: Tensor, tokens: Tensor) -> Drawn:
        """The same children, but those of ``rows [B]`` (bool) are ``tokens [B, L, W]``, which were chosen without randomness."""
        _, L, W = tokens.shape
        laws, device = self.distributions, self.distributions.device
        laws = torch.nn.functional.pad(laws, (0, 0, 0, max(0, L * W - laws.shape[1])))
        tokens, here = tokens.to(device), to_device(rows, device)[:, None, None]
        points = torch.zeros_like(laws).scatter_(2, tokens.flatten(1)[..., None], 1)
        return Drawn(
            torch.where(here, tokens, self.tokens.to(device)),
            torch.where(here, points, laws),
            torch.where(rows[:, None, None], _apiece(L, W), self.source),
        )


class Drawing(Protocol):
    """A way to draw siblings."""

    @property
    def kind(self) -> Siblings:
        """What ``DraftInfo.siblings`` says of a draft that draws so."""
        ...

    def __call__(self, q: Tensor, width: int, key: Key, rng: Rng) -> Drawn:
        """``width`` children after each of L nodes, from ``q [B, L, V]``; ``key`` is of shape ``[B, L, width]``."""
        ...


@dataclass(frozen=True)
class Independent:
    """Each child is drawn from q, whatever the others are; equal ones may occur."""

    kind: ClassVar[Siblings] = "independent"

    def __call__(self, q: Tensor, width: int, key: Key, rng: Rng) -> Drawn:
        L = q.shape[1]
        tokens = rng.categorical(q[:, :, None].expand(-1, -1, width, -1), key)
        return Drawn(tokens, q, torch.arange(L)[:, None].expand(L, width))


@dataclass(frozen=True)
class Distinct:
    """Each child is drawn from q without its elder siblings' tokens. When q has no more tokens, the children are the first others, as
    point masses."""

    kind: ClassVar[Siblings] = "distinct"

    def __call__(self, q: Tensor, width: int, key: Key, rng: Rng) -> Drawn:
        taken, tokens, laws = torch.zeros_like(q, dtype=torch.bool), [], []
        for w in range(width):
            law = _without(q, taken)
            tokens.append(rng.categorical(law, _of_child(key, w)))
            laws.append(law)
            taken = taken.scatter(2, tokens[-1][..., None].to(q.device), True)
        return Drawn(torch.stack(tokens, 2), torch.stack(laws, 2).flatten(1, 2), _apiece(q.shape[1], width))


@dataclass(frozen=True)
class TopAndOne:
    """The most probable tokens of q, as point masses, and one that is drawn from the rest. It is the first to be tried: then recursive
    rejection accepts as much as any verifier can (``verifiers.acceptance.greedy_set``)."""

    kind: ClassVar[Siblings] = "in turn"

    def __call__(self, q: Tensor, width: int, key: Key, rng: Rng) -> Drawn:
        top = q.topk(width - 1, -1).indices
        law = _without(q, torch.zeros_like(q, dtype=torch.bool).scatter(2, top, True))
        first = rng.categorical(law, _of_child(key, 0)).to(q.device)
        laws = torch.cat([law[:, :, None], _points(top, q)], 2).flatten(1, 2)
        return Drawn(torch.cat([first[..., None], top], 2), laws, _apiece(q.shape[1], width))


def _without(q: Tensor, taken: Tensor) -> Tensor:
    """norm(q without the tokens ``taken``); the first token that was not taken, if q has no others."""
    left = torch.where(taken, 0, q)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, _points((~taken).byte().argmax(-1), q))


def _points(tokens: Tensor, q: Tensor) -> Tensor:
    """Point masses at ``tokens [...]``: ``[..., V]``, in the dtype of ``q``."""
    return q.new_zeros(*tokens.shape, q.shape[-1]).scatter_(-1, tokens[..., None], 1)


def _of_child(key: Key, w: int) -> Key:
    def part(field: Tensor | int) -> Tensor | int:
        return field if isinstance(field, int) else field[..., min(w, field.shape[-1] - 1)]

    return key._replace(at=part(key.at), depth=part(key.depth), sibling=part(key.sibling))  # type: ignore[arg-type]


def _apiece(nodes: int, width: int) -> Tensor:
    return torch.arange(nodes * width).view(nodes, width)
