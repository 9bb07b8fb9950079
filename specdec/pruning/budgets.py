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

    Every layer keeps ``window`` slots. Of the others, ``budget - window`` per layer on average, the last layer gets the share
    ``1 / beta`` and the first layer whatever makes the mean right (the paper's equations, with its ``beta = 20``).

    Args:
        window: latest slots that every layer keeps; SnapKV's observation window in the paper.
        beta: steepness, at least 1, which gives ``uniform``.
        most: slots that exist. What the first layer cannot use goes to the last ones, as in the authors' code.
    Returns:
        ``[layers]`` descending; their sum is ``layers * budget``, or ``layers * most`` if that is smaller.
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
    last = max(mean / beta, 0 if window else 1)  # every layer keeps something
    if most is not None:
        last = max(last, 2 * mean - (most - window))
    first = 2 * mean - last
    step = (first - last) / (layers - 1) if layers > 1 else 0
    # Rounded by largest remainder, earlier layers first, so that the parts add up.
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
