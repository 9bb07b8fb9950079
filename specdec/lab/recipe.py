"""The common options of recipes: threads, seed, a JSON report, device and precision of models, and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specdec.lab import plots
from specdec.lab.console import quiet
from specdec.lab.options import option
from specdec.lab.report import write


@dataclass(frozen=True)
class Reported:
    """The base of the settings of a recipe that needs no random numbers of its own."""

    threads: int = option(1, "torch threads")
    json: str | None = option(None, "write the rows as JSON", metavar="FILE")

    def begin(self) -> None:
        """Set the number of threads, and silence transformers' advice."""
        torch.set_num_threads(self.threads)
        quiet()

    def save(self, rows: Iterable[Mapping[str, Any]], seed: int | None = None) -> None:
        """Write the report, with the ``seed`` of its figures, if ``json`` is set."""
        if self.json:
            write(self.json, rows, seed)


@dataclass(frozen=True)
class Recipe(Reported):
    """The base of a recipe's settings."""

    seed: int = option(0, "random seed (default: 0)")

    def save(self, rows: Iterable[Mapping[str, Any]], seed: int | None = None) -> None:
        """As ``Reported.save``, by default with the settings' seed."""
        super().save(rows, self.seed if seed is None else seed)


Precision = Literal["auto", "float32", "bfloat16", "float16"]
PRECISIONS: dict[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Placement:
    """The settings of where models go, and of their precision."""

    device: str = option(
        "",
        "where models go, such as cpu or cuda:1 (default: the GPU if there is one; beside a pocket target, the CPU)",
    )
    dtype: Precision = option(
        "auto", "of weights (default: auto, as they are stored; float32 for pocket models)"
    )

    def check_device(self) -> None:
        """Raise SystemExit if there is no such device."""
        try:
            kind = torch.device(self.device or "cpu").type
        except RuntimeError:
            raise SystemExit(f"--device {self.device}: give cpu, cuda, or cuda:1 and the like") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise SystemExit(
                f"--device {self.device}: PyTorch sees no CUDA device: give cpu, or leave it out"
            )

    @property
    def place(self) -> str | None:
        """Where ``loading.load`` puts a target; ``None``: it chooses."""
        return self.device or None

    @property
    def precision(self) -> torch.dtype | None:
        """The dtype of ``loading.load``; ``None``: as stored."""
        return PRECISIONS[self.dtype]


@dataclass(frozen=True)
class Placed(Placement, Recipe):
    """The base of the settings of recipes for models of the user's own."""

    def begin(self) -> None:
        """As ``Recipe.begin``.

        Raises:
            SystemExit: there is no such device.
        """
        super().begin()
        self.check_device()


@dataclass(frozen=True)
class Replayed(Placed):
    """The base of the settings of recipes that replay drafts on recorded texts."""

    dtype: Precision = option(
        "float32",
        "of weights (default: float32, in which replays are exact; auto: as they are stored; in half precision a draft's probabilities depend "
        "on the shape of the batch, and the check of a replay may refuse the draft)",
    )


@dataclass(frozen=True)
class WithPlots(Reported):
    """The base of the settings of recipes that draw figures, and need no random numbers of their own."""

    plots: str | None = option(None, "write PNGs into this folder (needs matplotlib)", metavar="DIR")

    def begin(self) -> None:
        """As ``Reported.begin``.

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


@dataclass(frozen=True)
class Plotted(WithPlots, Recipe):
    """The base of the settings of recipes that draw figures."""
