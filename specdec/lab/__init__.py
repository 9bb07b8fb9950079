"""What measurements share: models and prompts, clocks, steady runs, τ with intervals, calibrated throughput models, and reports.

Each module is one idea; ``docs/lab.md`` shows them at work. Nothing else in the package imports this one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.lab import (
        bare,
        bits,
        calibrated,
        captured,
        clock,
        console,
        device,
        errors,
        grid,
        grid_rows,
        loading,
        methods,
        options,
        paired,
        peak,
        pipeline,
        plots,
        prefill,
        pretraining,
        processes,
        report,
        runs,
        simulated,
        stages,
        states,
        steady,
        streams,
        tau,
        variants,
        workload,
    )

__all__ = [
    "bare",
    "bits",
    "calibrated",
    "captured",
    "clock",
    "console",
    "device",
    "errors",
    "grid",
    "grid_rows",
    "loading",
    "methods",
    "options",
    "paired",
    "peak",
    "pipeline",
    "plots",
    "prefill",
    "pretraining",
    "processes",
    "report",
    "runs",
    "simulated",
    "stages",
    "states",
    "steady",
    "streams",
    "tau",
    "variants",
    "workload",
]


def __getattr__(name: str) -> Any:
    """A module, imported when it is first asked for (``lab.tau``)."""
    if name in __all__:
        return import_module(f"specdec.lab.{name}")
    raise AttributeError(f"module 'specdec.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
