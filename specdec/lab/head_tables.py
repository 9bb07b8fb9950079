"""Tables and figures of a comparison of draft heads, from the rows of ``lab.contest``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from specdec.lab import console, plots
from specdec.lab.markdown import Column, table

Row = Mapping[str, Any]
FOUR = 4  # a length that all heads reach
INTERVAL = ("tau", "tau_low", "tau_high")
RATIO = ("ratio", "ratio_low", "ratio_high")
SPEED = ("ratio_to_plain", "ratio_low", "ratio_high")
COLUMNS: dict[str, tuple[str, ...]] = {
    "tau": ("method", "temperature", "context", "k", *INTERVAL, *RATIO),
    "depth": ("method", "temperature", "depth", "acceptance", "low", "high"),
    "tree": ("method", "drafting", "temperature", "nodes", *INTERVAL, "chain_tau", *RATIO),
    "equal_ms": ("method", "temperature", "over_k", "budget_ms", "k", "draft_ms", "tau"),
    "speed": ("method", "drafting", "verifier", "temperature", "batch", "k", "tau", "draft_ms", "round_ms", "tokens_per_second", *SPEED, "close"),
    "window": ("method", "drafting", "temperature", "k", "tau", "full_tau", *RATIO, "draft_ms", "full_draft_ms", "kv_positions", "full_kv_positions"),
    "outside": ("method", "temperature", "domain", "k", *INTERVAL, *RATIO),
}  # fmt: skip


def shown(rows: Sequence[Row]) -> str:
    """The tables for a console: τ of all texts at k = 4, and every other part whole."""
    parts = []
    for part, columns in COLUMNS.items():
        some = [row for row in rows if row["part"] == part]
        if part in ("tau", "outside"):
            some = [row for row in some if row["k"] == min(FOUR, _longest(some))]
        if part == "tau":
            some = [row for row in some if row["domain"] == "all"]
        if some:
            parts.append(f"{part}\n{console.table(some, columns)}")
    return "\n\n".join(parts)


def documented(rows: Sequence[Row], report: str) -> str:
    """The documentation's tables in Markdown, each under a heading and with the comment that names the report's file."""
    made: list[tuple[str, str]] = []

    def add(title: str, keys: Mapping[str, str], columns: Sequence[Column], **where: Any) -> None:
        if any(all(row.get(name) == value for name, value in where.items()) for row in rows):
            made.append((title, table(rows, report, keys, columns, where)))

    method = {"draft": "method"}
    add("drafts", method, [Column("parameters", ("parameters",), digits=0)], part="draft")
    temperatures, contexts, domains = (
        _values(rows, name, "tau") for name in ("temperature", "context", "domain")
    )
    for t in temperatures:
        for context in contexts[len(contexts) // 2 :][:1]:
            here = {"part": "tau", "temperature": t, "context": context}
            lengths = _values(rows, "k", "tau")
            by_length = [Column(f"k = {k}", ("tau",), {"k": k}) for k in lengths]
            add(f"τ by length, temperature {t:g}, context {context}", method, by_length, **here, domain="all")
            by_domain = [Column(domain, RATIO, {"domain": domain}) for domain in domains]
            add(
                f"τ over the reference's at k = 4, temperature {t:g}, context {context}",
                method,
                by_domain,
                **here,
                k=FOUR,
            )
        by_context = [Column(f"{context} tokens", INTERVAL, {"context": context}) for context in contexts]
        add(
            f"τ by context at k = 4, temperature {t:g}",
            method,
            by_context,
            part="tau",
            temperature=t,
            k=FOUR,
            domain="all",
        )
    for t in _values(rows, "temperature", "depth"):
        depths = [Column(str(d), ("acceptance",), {"depth": d}) for d in _values(rows, "depth", "depth")]
        add(f"acceptance by depth, temperature {t:g}", method, depths, part="depth", temperature=t)
    for t in _values(rows, "temperature", "tree"):
        columns = [
            Column("τ", INTERVAL),
            Column("τ of the chain", ("chain_tau",)),
            Column("tree over chain", RATIO),
        ]
        add(
            f"trees, temperature {t:g}",
            {"head": "method", "drafting": "drafting"},
            columns,
            part="tree",
            temperature=t,
        )
    for t in _values(rows, "temperature", "equal_ms"):
        columns = [
            Column(f"{title}, {over}", (name,), {"over_k": over}, digits)
            for over in _values(rows, "over_k", "equal_ms")
            for title, name, digits in (("k", "k", 0), ("ms", "draft_ms", 1), ("τ", "tau", 2))
        ]
        add(f"equal drafting time, temperature {t:g}", method, columns, part="equal_ms", temperature=t)
    drafted = [row for row in rows if row["part"] != "speed" or row["method"] != "plain"]
    for t in _values(rows, "temperature", "speed"):
        for batch in _values(rows, "batch", "speed"):
            keys = {"draft": "method", "drafting": "drafting", "verifier": "verifier"}
            columns = [
                Column("k", ("k",), digits=0), Column("τ", ("tau",)), Column("draft ms", ("draft_ms",), digits=1),
                Column("tokens/s", ("tokens_per_second",), digits=0), Column("over plain", SPEED),
            ]  # fmt: skip
            where = {"part": "speed", "temperature": t, "batch": batch}
            made.append(
                (f"speed at batch {batch}, temperature {t:g}", table(drafted, report, keys, columns, where))
            )
    for t in _values(rows, "temperature", "window"):
        columns = [
            Column("τ", ("tau",)), Column("τ, all seen", ("full_tau",)), Column("ratio", RATIO), Column("draft ms", ("draft_ms",)),
            Column("draft ms, all seen", ("full_draft_ms",)), Column("positions kept", ("kv_positions",), digits=0),
            Column("all", ("full_kv_positions",), digits=0),
        ]  # fmt: skip
        add(f"windows, temperature {t:g}", method, columns, part="window", temperature=t)
    for t in _values(rows, "temperature", "outside"):
        columns = [
            Column(domain, INTERVAL, {"domain": domain}) for domain in _values(rows, "domain", "outside")
        ]
        add(
            f"outside prompts at k = 4, temperature {t:g}",
            method,
            columns,
            part="outside",
            temperature=t,
            k=FOUR,
        )
    return "\n".join(f"### {title}\n\n{text}" for title, text in made)


def figures(rows: Sequence[Row]) -> dict[str, Callable[[], Any]]:
    """Figures by file name: τ by length, acceptance by depth, and speed by batch, a panel for each temperature."""
    middle = sorted({row["context"] for row in rows if row["part"] == "depth"})
    tau = [r for r in rows if r["part"] == "tau" and r["domain"] == "all" and r["context"] in middle]
    speed = [
        r for r in rows if r["part"] == "speed" and r["drafting"] == "chain" and r["verifier"] == "rejection"
    ]
    depth = [r for r in rows if r["part"] == "depth"]
    names = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "plain"))
    made = {
        "heads_tau": partial(lines, names, tau, "k", INTERVAL, ("drafted tokens", "tokens a round")),
        "heads_depth": partial(lines, names, depth, "depth", ("acceptance", "low", "high"), ("depth", "acceptance, if reached")),
        "heads_speed": partial(lines, names, speed, "batch", SPEED, ("rows", "speed over plain decoding")),
    }  # fmt: skip
    return {name: figure for name, figure in made.items() if figure.args[1]}


def lines(
    names: Sequence[str], rows: Sequence[Row], across: str, fields: Sequence[str], titles: tuple[str, str]
) -> Any:
    """A matplotlib figure: a line for each of the drafts ``names``, a panel for each temperature.

    Args:
        across: the field of the x-axis. fields: of the y-axis: a value and the two ends of its interval. titles: of both axes.
    """
    up, *ends = fields
    temperatures = sorted({row["temperature"] for row in rows})
    figure, (panels,) = plots.panels(
        1, len(temperatures), (1 + 3.8 * len(temperatures), 4.2), bare=True, sharey=True, layout="constrained"
    )
    for axes, t in zip(panels, temperatures):
        for i, name in enumerate(names):
            some = sorted(
                (r for r in rows if (r["method"], r["temperature"]) == (name, t)), key=lambda r: r[across]
            )
            where, value = [r[across] for r in some], [r[up] for r in some]
            color, style = f"C{i % 10}", "-" if i < 7 else "--"
            axes.plot(where, value, style, color=color, marker="o", ms=3, label=name)
            if some and all(r[end] is not None for r in some for end in ends):
                axes.fill_between(
                    where, *([r[end] for r in some] for end in ends), color=color, alpha=0.12, lw=0
                )
        axes.set_title(f"temperature {t:g}", loc="left")
        axes.set_xticks(sorted({row[across] for row in rows}))
        axes.set_xlabel(titles[0])
    panels[0].set_ylabel(titles[1])
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center"
    )
    return figure


def _values(rows: Sequence[Row], name: str, part: str) -> list[Any]:
    """The values of a field in a part's rows: numbers ascending, texts in the order of the rows."""
    found = list(dict.fromkeys(row[name] for row in rows if row["part"] == part and name in row))
    return found if any(isinstance(value, str) or value is None for value in found) else sorted(found)


def _longest(rows: Sequence[Row]) -> int:
    return max((row["k"] for row in rows), default=0)
