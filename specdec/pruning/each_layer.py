"""The most important heads or channels of each layer, equally many in all layers (Minitron, arXiv 2407.14679)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def most_important(importance: Tensor, keep: int) -> list[list[int]]:
    """For each layer the ``keep`` entries (heads or channels) of the highest ``importance [layers, X]``, ascending.

    Raises:
        ValueError: ``keep`` is below 1 or above X.
    """
    if importance.dim() != 2 or not 1 <= keep <= importance.shape[1]:
        raise ValueError(
            f"keep is {keep} and importance {list(importance.shape)}: it must be [layers, X], and keep at least 1 and at most X"
        )
    best = importance.argsort(dim=-1, descending=True, stable=True)[:, :keep]
    return best.sort(-1).values.tolist()


def check_each_layer(name: str, kept: Sequence[Sequence[int]], layers: int, most: int) -> int:
    """How many every layer keeps.

    Raises:
        ValueError: not one list for each layer, numbers that do not exist or are out of order, or lists of different lengths.
    """
    if len(kept) != layers:
        raise ValueError(f"{name} has {len(kept)} lists and the model {layers} layers: give one for each")
    for i, one in enumerate(map(list, kept)):
        if not one or one != sorted(set(one)) or one[0] < 0 or one[-1] >= most:
            raise ValueError(f"{name}[{i}] is {one}: give ascending numbers from 0 to {most - 1}, each once")
        if len(one) != len(kept[0]):
            raise ValueError(
                f"{name}[{i}] has {len(one)} numbers and {name}[0] {len(kept[0])}: a config has one size for all layers"
            )
    return len(kept[0])
