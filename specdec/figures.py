"""Matplotlib figures that a notebook shows, also where pyplot was never imported."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure as the last line of a cell is shown. Matplotlib's own needs ``%matplotlib inline`` for this, and otherwise prints its name."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()
