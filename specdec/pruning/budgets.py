"""How a KV budget is spread over the layers (the pyramid: PyramidKV, Cai et al., arXiv 2406.02069)."""

from __future__ import annotations


def uniform(layers: int, budget: int) -> list[int]:
    """``budget`` slots for each layer.

    Raises:
        ValueError: no layers, or a budget below 1.
    """
    _check(layers, budget)
    return [budget] * layers


def pyramid(
    layers: int, budget: int, *, window: int = 0, beta: float = 20, most: int | None = None
) -> list[int]:
    """An arithmetic sequence from many slots in the first layer to few in the last, with a mean of ``budget``.

    Every layer keeps ``window`` slots. Of the others, ``budget - window`` a layer on average, the last layer has the share
    ``1 / beta`` and the first what makes the mean right (the paper's equations, with its ``beta = 20``).

    Args:
        window: latest slots that every layer keeps; SnapKV's observation window in the paper.
        beta: at least 1, which gives ``uniform``; the larger, the steeper.
        most: slots that there are. What the first layer cannot use goes to the last ones, as in the authors' code.
    Returns:
        ``[layers]`` descending; their sum is ``layers * budget``, or ``layers * most`` where there are no more.
    Raises:
        ValueError: no layers, a budget below 1 or not above the window, beta below 1.
    """
    _check(layers, budget)
    if window < 0 or window >= budget:
        raise ValueError(
            f"window is {window} and budget {budget}: the window must leave something of the budget"
        )
    if beta < 1:
        raise ValueError(f"beta is {beta}: at least 1, where all layers have the same budget")
    if most is not None and most <= budget:
        return [most] * layers
    mean = budget - window
    last = max(mean / beta, 0 if window else 1)  # no layer is left with nothing
    if most is not None:
        last = max(last, 2 * mean - (most - window))
    first = 2 * mean - last
    step = (first - last) / (layers - 1) if layers > 1 else 0
    # Rounded so that the parts add up: floors, and the largest remainders (of the earlier layers first) get what is left.
    exact = [first - step * i if layers > 1 else mean for i in range(layers)]
    floors = [int(x + 1e-9) for x in exact]
    order = sorted(range(layers), key=lambda i: (round(floors[i] - exact[i], 9), i))
    for i in order[: layers * mean - sum(floors)]:
        floors[i] += 1
    return [window + n for n in floors]


def _check(layers: int, budget: int) -> None:
    if layers < 1:
        raise ValueError(f"layers is {layers}: a model has at least 1")
    if budget < 1:
        raise ValueError(f"budget is {budget}: keep at least 1 slot")
