"""Rows of a measured grid's constants: of the calibrated model, and of the bare steps that it was fitted to."""

from __future__ import annotations

from specdec.lab.calibrated import Bare, Calibrated
from specdec.lab.grid_rows import Row


def constants(calibrated: Calibrated | None, bare: list[Bare]) -> list[Row]:
    """Rows of the fitted constants, and of the bare steps that they were fitted to, which ran under no executor."""
    rows: list[Row] = [
        {"part": "bare", "method": b.what, "batch": b.batch, "context": b.context, "tokens": b.tokens}
        | {"seconds": b.seconds, "modelled_seconds": calibrated.machine.time(b.step) if calibrated else None}
        | ({"replayed": True} if b.replayed else {})
        for b in bare
    ]
    if calibrated is None:
        return rows
    what = "flops bytes_per_second cached_bytes_per_second cache_bytes overhead overhead_per_layer overlapped"
    values = {name: getattr(calibrated.machine, name) for name in what.split()}
    values["median_error_on_bare_steps"] = calibrated.machine.error
    about = {"part": "constant", "executor": calibrated.executor}
    rows += [{**about, "quantity": name, "value": value} for name, value in values.items()]
    errors = {("", ""): calibrated.error, **calibrated.errors}  # of all pairs, and of each
    rows += [
        {**about, "quantity": "error_of_a_difference", "value": value}
        | ({"method": one, "over": other} if one else {})
        for (one, other), value in errors.items()
    ]
    for method, around in calibrated.hosts.items():
        for where, host in around._asdict().items():
            for name, value in vars(host).items():
                quantity = f"host_{where}_{name}_seconds"
                rows.append({**about, "method": method, "quantity": quantity, "value": value})
    return rows
