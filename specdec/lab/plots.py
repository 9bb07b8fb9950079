"""Shared code of the recipes' figures: panels without a window system, heat maps over batch and context, files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

STYLE: Any = {"font.size": 10}
BARE: Any = {"axes.spines.top": False, "axes.spines.right": False}
"""Settings of matplotlib: for all figures, and for those with bare panels."""


def needed() -> None:
    """Check for matplotlib before anything is measured; without it raises SystemExit, which says how to install it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "matplotlib":
            raise
        raise SystemExit("--plots needs matplotlib: pip install matplotlib") from None


def panels(
    rows: int, columns: int, size: tuple[float, float], bare: bool = False, **how: Any
) -> tuple[Any, Any]:
    """A figure and its panels ``[rows, columns]``.

    Args:
        size: inches. bare: frames without the upper and the right side. how: of ``Figure.subplots``, and the figure's ``layout``.
    """
    import matplotlib

    from specdec.figures import ShownFigure

    with matplotlib.rc_context({**STYLE, **(BARE if bare else {})}):
        drawing = ShownFigure(figsize=size, layout=how.pop("layout", None))
        return drawing, drawing.subplots(rows, columns, squeeze=False, **how)


def save(folder: str | Path, name: str, drawing: Any, dpi: int = 110) -> str:
    """Write ``<folder>/<name>.png``; returns its path."""
    import matplotlib

    file = Path(folder) / f"{name}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        drawing.savefig(file, dpi=dpi, bbox_inches="tight")
    return str(file)


def short(n: int) -> str:
    """1024 as 1k, 1048576 as 1M."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if n >= size and n % size == 0:
            return f"{n // size}{letter}"
    return str(n)


def around_one(top: float, least: float) -> Any:
    """Colour norm for ratios: white is 1, red below, blue above, up to ``max(top, least)``."""
    from matplotlib.colors import TwoSlopeNorm

    return TwoSlopeNorm(vcenter=1, vmin=0, vmax=max(least, top))


def heat(
    axes: Any,
    batches: Sequence[int],
    contexts: Sequence[int],
    norm: Any,
    value: Mapping[tuple[int, int], float],
    after: Callable[[tuple[int, int]], str] = lambda at: "",
    italic: Collection[tuple[int, int]] = (),
) -> Any:
    """The image (for ``scale``) of a heat map with printed values: a line per batch, a column per context.

    Args:
        value: by (batch, context). after: text below a value. italic: points whose text is italic.
    """
    cells = [[value[b, c] for c in contexts] for b in batches]
    image = axes.imshow(cells, cmap="RdBu", norm=norm, origin="lower", aspect="auto")
    for i, b in enumerate(batches):
        for j, c in enumerate(contexts):
            dark = abs(norm(value[b, c]) - 0.5) > 0.3
            axes.text(
                j, i, f"{value[b, c]:.2f}{after((b, c))}", ha="center", va="center", fontsize=8, linespacing=0.9,
                style="italic" if (b, c) in italic else "normal", color="white" if dark else "black",
            )  # fmt: skip
    axes.set_xticks(range(len(contexts)), [short(c) for c in contexts], fontsize=9)
    axes.set_yticks(range(len(batches)), [str(b) for b in batches], fontsize=9)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def scale(drawing: Any, image: Any, box: tuple[float, float, float, float]) -> None:
    """Draw the colour bar in a box of the figure."""
    drawing.colorbar(image, cax=drawing.add_axes(box)).outline.set_visible(False)
