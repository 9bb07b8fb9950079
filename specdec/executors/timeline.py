"""When each worker ran which stage of which micro-batch: a picture, or Chrome-trace JSON (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One piece of work; ``began`` and ``ended`` in seconds of ``time.perf_counter``, the same clock in all workers."""

    worker: str
    stage: str
    micro_batch: int
    began: float
    ended: float


class Timeline:
    """Spans of runs, collected until ``clear``. Pass one to an executor: ``Pipelined(timeline=Timeline())``."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def __repr__(self) -> str:
        return f"Timeline({len(self.spans)} spans of {', '.join(self.workers) or 'no worker'}, {self.seconds:.3f} s)"

    def add(self, worker: str, stage: str, micro_batch: int, began: float, ended: float) -> None:
        self.spans.append(Span(worker, stage, micro_batch, began, ended))

    def clear(self) -> None:
        self.spans.clear()

    @property
    def workers(self) -> list[str]:
        return sorted({span.worker for span in self.spans}, reverse=True)

    @property
    def seconds(self) -> float:
        """From the start of the first span to the end of the last."""
        return max(s.ended for s in self.spans) - min(s.began for s in self.spans) if self.spans else 0.0

    def busy(self) -> dict[str, float]:
        """Worker -> share of the time in which it was busy."""
        return {
            worker: sum(s.ended - s.began for s in self.spans if s.worker == worker) / self.seconds
            for worker in self.workers
        }

    def chrome(self, path: str | Path) -> None:
        """Write the JSON that chrome://tracing and ui.perfetto.dev open, in microseconds from the first span."""
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))

    def events(self) -> list[dict[str, Any]]:
        start = min((s.began for s in self.spans), default=0.0)
        places = {worker: {"pid": 0, "tid": i} for i, worker in enumerate(self.workers)}
        named = [
            {"ph": "M", "name": "thread_name", "args": {"name": w}} | place for w, place in places.items()
        ]
        return named + [
            {"ph": "X", "name": f"{s.stage} {s.micro_batch}", "cat": s.stage, "args": {"lane": s.micro_batch}}
            | {"ts": 1e6 * (s.began - start), "dur": 1e6 * (s.ended - s.began)}
            | places[s.worker]
            for s in self.spans
        ]

    def plot(self, path: str | Path, seconds: tuple[float, float] | None = None) -> None:
        """Save a picture: one line for each worker, one colour for each micro-batch, stages by their first letter. Needs matplotlib (the ``plots`` extra).

        Args:
            seconds: the part to show, counted from the first span (default: all).
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as missing:
            raise ImportError("plot() needs matplotlib: pip install matplotlib") from missing
        start = min((s.began for s in self.spans), default=0.0)
        low, high = seconds or (0.0, self.seconds)
        shown = [s for s in self.spans if s.ended - start >= low and s.began - start <= high]
        figure = Figure(figsize=(11, 1.2 + 0.7 * len(self.workers)))
        axes = figure.subplots()
        lines = {worker: i for i, worker in enumerate(reversed(self.workers))}
        edge: dict[str, Any] = {"height": 0.7, "edgecolor": "white", "linewidth": 0.5}
        for s in shown:
            left, width = 1e3 * (s.began - start), 1e3 * (s.ended - s.began)
            color, alpha = f"C{s.micro_batch % 10}", {"prefill": 0.45, "prepare": 0.3}.get(s.stage, 0.85)
            box = axes.barh(lines[s.worker], width, left=left, color=color, alpha=alpha, **edge)
            if s.ended - s.began > 0.02 * (high - low):
                name = f"{s.stage[0]}{s.micro_batch}"
                axes.bar_label(box, [name], label_type="center", fontsize=7, color="white")
        axes.set_yticks(list(lines.values()), list(lines))
        axes.set_xlim(1e3 * low, 1e3 * max(high, low + 1e-6))
        axes.set_xlabel("milliseconds")
        share = ", ".join(f"{worker} {part:.0%}" for worker, part in self.busy().items())
        axes.set_title(f"a colour a micro-batch; busy: {share}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, dpi=150)
