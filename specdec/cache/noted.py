"""Activations of texts that are being decoded, which a prefix cache needs in order to keep answers for drafts that read them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.device import to_device
from specdec.types import Fed, Round


class Noted(NamedTuple):
    """Activations of consecutive positions of one row, and what was noted before them. It never changes, so rows may share it.

    Attributes:
        first: position. layers: layer -> ``[n, E]``.
    """

    before: Noted | None
    first: int
    layers: Mapping[int, Tensor]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + len(next(iter(self.layers.values())))

    def joined(self) -> Noted:
        """All in one, from the first position that was noted."""
        if self.before is None:
            return self
        parts, one = list[Noted](), self
        while one.before is not None:
            parts.append(one)
            one = one.before
        parts.append(one)
        layers = {tap: torch.cat([part.layers[tap] for part in reversed(parts)]) for tap in self.layers}
        return Noted(None, parts[-1].first, layers)


def committed(fed: Fed, round: Round) -> np.ndarray:
    """``[F']`` which of the fed positions hold committed text: tokens that were in the context, and accepted nodes."""
    row, node = fed.row.numpy(), fed.node.numpy()
    accepted, path = round.verdict.accepted.numpy(), round.verdict.path.numpy()
    on_path = (path[row] == node[:, None]) & (np.arange(path.shape[1]) < accepted[row, None])
    return np.flatnonzero((node < 0) | on_path.any(1))


def noted(before: list[Noted | None], round: Round, begin: list[int]) -> list[Noted | None]:
    """What is known of each row after a round, whose scores have activations.

    Args:
        before: of each row. begin: of each row of which nothing is known, the position to begin at.
    Returns:
        ``None`` for rows in which a position was left out.
    """
    fed = round.scores.fed
    assert fed is not None
    index = committed(fed, round)
    row, position = fed.row.numpy()[index], fed.position.numpy()[index]
    wanted = np.array([first if one is None else one.end for one, first in zip(before, begin)])
    new = position >= wanted[row]
    index, row, position = index[new], row[new], position[new]
    order = np.lexsort((position, row))
    index, row, position = index[order], row[order], position[order]
    layers = {tap: x[to_device(torch.from_numpy(index), x.device)] for tap, x in fed.layers.items()}
    bounds = np.searchsorted(row, np.arange(len(before) + 1)).tolist()
    after = list[Noted | None]()
    for b, (start, end) in enumerate(pairwise(bounds)):
        whole = (position[start:end] == wanted[b] + np.arange(end - start)).all()
        if start == end or not whole:
            after.append(before[b] if whole else None)
        else:
            after.append(Noted(before[b], int(wanted[b]), {tap: x[start:end] for tap, x in layers.items()}))
    return after
