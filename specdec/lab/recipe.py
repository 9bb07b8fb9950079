"""The common options of recipes: threads, seed, a JSON report, and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specdec.lab import plots
from specdec.lab.console import quiet
from specdec.lab.options import option
from specdec.lab.report import write


@dataclass(frozen=True)
class Recipe:
    """The base of a recipe's settings."""

    threads: int = option(1, "torch threads")
    seed: int = option(0, "random seed (default: 0)")
    json: str | None = option(None, "write the rows as JSON", metavar="FILE")

    def begin(self) -> None:
        """Set the number of threads, and silence transformers' advice."""
        torch.set_num_threads(self.threads)
        quiet()

    def save(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the report if ``json`` is set."""
        if self.json:
            write(self.json, rows, self.seed)


@dataclass(frozen=True)
class Plotted(Recipe):
    """The base of the settings of recipes that draw figures."""

    plots: str | None = option(None, "write PNGs into this folder (needs matplotlib)", metavar="DIR")

    def begin(self) -> None:
        """As ``Recipe.begin``.

        Raises:
            SystemExit: ``plots`` is set and matplotlib is missing.
        """
        super().begin()
        if self.plots:
            plots.needed()

    def draw(self, drawings: Mapping[str, Callable[[], Any]], dpi: int = 110) -> None:
        """Make and write figures, by file name, if ``plots`` is set."""
        if self.plots:
            files = [plots.save(self.plots, name, make(), dpi) for name, make in drawings.items()]
            print("\nplots:", ", ".join(files))
