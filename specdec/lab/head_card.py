"""The validations of a trained draft as a table of its model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def curve(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Lines of a Markdown table, one of each row of ``Trained.curve`` that has a validation."""
    depths = [key for key in rows[-1] if key.startswith("acceptance_")]
    titles = [
        "M tokens",
        "loss",
        "validation loss",
        "acceptance",
        *(f"at {n + 1}" for n in range(len(depths))),
        "τ",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        values = [f"{row['tokens'] / 1e6:.2f}", _number(row.get("loss")), _number(row["validation_loss"])]
        values += [f"{row[key]:.3f}" for key in ("acceptance", *depths)]
        lines.append("| " + " | ".join([*values, f"{row['tau']:.2f}"]) + " |")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
