"""Wall clock of SPIRe and its baselines over batch and context on this machine, next to the throughput model with its constants.

Methods: plain decoding; vanilla (a small draft that reads the whole context); windowed (the same draft with SPIRe's sparse KV, a
control that the paper lacks); with --distilled, a second small draft that reads the whole context, trained on the target's
distributions (another control); MagicDec (the target's weights over a window of its KV), with positions of the text and, as in the
paper, positions inside the cache; SPIRe. Each runs at k = 4 and its best k.

multiplier = tau x plain round / round. tau is noise-free: expected tokens a round on texts of the target after held-out prompts, for
every method, context and k, before anything is timed. Rounds are timed from the second after the prefill until the batch has made
--new-tokens more tokens per row on average; no row leaves before, as the model assumes. Methods alternate at each grid point, with the same
prompts and fresh random numbers in every repeat. Repeats are short and many (--repeats, or up to four times as many if rounds are short), so that a slow
second of the machine hits all methods; all points are visited six times, so that a slow minute hits all points. Figures are means without the slowest and the
fastest tenth. Intervals are 95 % bootstraps over packages (for tau), and over visits and their repeats (for times).
ratio: SPIRe over every other draft, paired.

--executor ahead (with --graphs) runs all methods as whole captured rounds, launched a round ahead, and leaves out those that have none. A round
is always in flight there, so the clock runs from the first round's verdict on.

Best k: short runs at k = 4 and at the k farthest from it give the time of a round; the two k with the best estimate are measured,
besides k = 4.

modelled = tau / (round / plain round), with the same tau (an input of the model, as in the paper) and times from specdec.cost: FLOP/s,
bytes/s and overheads are fitted to bare steps at the corners of the grid, host work around them to the rounds there and at every second
point inside (docs/cost.md); on a GPU a draft's bare step is its share of the captured chain. Each point inside is left out of a fit of
its own, and the errors there are the model's error: where the best two methods are closer than that, the model says "too close".
Rows of fitted points say fitted: true; the summary leaves them out, and its last lines say whether the model holds there: it names the
fastest of all methods, or says "too close" and is right within 3 %, at 90 % of the points, at most a third of them too close, and following it
costs at most 10 % at the worst. --report FILE says it of a finished report, and --again FILE what another run of the grid would do in the model's place,
which is what the machine's noise costs. --taus FILE keeps tau for later runs, and --only-taus computes nothing
else, so that a quiet machine is needed for the times alone. The time that all of this takes is printed first; --quick is a toy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import checkout  # noqa: F401

from specdec.lab import plots
from specdec.lab.console import progress, table
from specdec.lab.grid import Grid, GridSettings
from specdec.lab.grid_plan import estimate, minutes
from specdec.lab.grid_rows import K, Row
from specdec.lab.grid_summary import noise, report, summary
from specdec.lab.methods import Methods
from specdec.lab.multipliers import Recording, Taus
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted
from specdec.lab.report import write
from specdec.lab.stages import profile
from specdec.training.checkpoints import hash_of


@dataclass(frozen=True)
class Settings(Plotted, GridSettings):
    in_cache: bool = option(
        True, "also MagicDec with positions inside its cache, as method magicdec_in_cache"
    )
    positions: int = option(64, "positions of each recorded text at which rounds start, for tau")
    prompts: int | None = option(None, "held-out prompts for tau (default: all)")
    taus: str | None = option(
        None, "keep the noise-free tau in this report, and take it from there if it exists", metavar="FILE"
    )
    only_taus: bool = option(False, "end when the noise-free tau is recorded; this needs no quiet machine")
    report: str | None = option(None, "show this finished report instead of measuring", metavar="FILE")
    again: str | None = option(
        None, "with --report: another run's report, to say how far two runs agree", metavar="FILE"
    )
    quick: bool = option(False, "a toy of a few minutes: a small grid and few texts")
    profile: tuple[int, int] | None = option(
        None, "only print a profile of each method's rounds at B x L", metavar=("B", "L")
    )


PROFILED = 20
"""New tokens per row of a profiled run."""


def main(s: Settings) -> None:
    s.begin()
    if s.again and not s.report:
        raise SystemExit("--again compares two finished reports: give --report FILE with it")
    if s.report:
        rows = json.loads(Path(s.report).read_text())["rows"]
        shown(s, rows)
        if s.again:
            try:
                runs = noise(rows, json.loads(Path(s.again).read_text())["rows"])
            except ValueError as why:
                raise SystemExit(f"--again {s.again}: {why}") from None
            print(f"\nanother run in the model's place:\n{table(runs, tuple(runs[0]))}")
        return
    if s.profile:
        batch, context = s.profile
        methods = Methods(replace(s, batches=(batch,), contexts=(context,), new_tokens=PROFILED))
        groups = methods.groups(batch, context)
        for name in methods.names:
            profile(name, methods.decoder(name, K if name != "plain" else 0), groups, PROFILED)
        return

    if s.temperature != 1:
        raise SystemExit(f"--temperature {s.temperature:g}: tau is of texts sampled at temperature 1")
    if s.quick:
        s = replace(
            s,
            batches=(1, 2, 4, 8),
            contexts=(64, 128, 256),
            lengths=(2, 4),
            positions=16,
            prompts=12,
            repeats=1,
            new_tokens=20,
        )
    started, methods = perf_counter(), Methods(s)
    recording = Recording(s.positions, prompts=s.prompts, seed=s.seed)
    if not s.only_taus:
        record, measure = estimate(Grid(s, methods), recording)
        known = s.taus is not None and Path(s.taus).is_file()
        progress(f"about {minutes(0.0 if known else record, measure)}", stays=True)
    taus = recorded(s, methods, recording)
    if s.only_taus:
        return
    rows = Grid(s, methods, taus=taus).measure(s.save)
    rows += summary(rows, perf_counter() - started)
    s.save(rows)
    shown(s, rows)


def recorded(s: Settings, methods: Methods, recording: Recording) -> Taus:
    """τ of every method, context and k: from ``taus`` if that report exists, else computed and kept there."""
    about = hash_of((methods.identity, sorted(s.contexts), methods.lengths, recording))
    if s.taus and Path(s.taus).is_file():
        try:
            return Taus.of(json.loads(Path(s.taus).read_text())["rows"], about)
        except ValueError as why:
            raise SystemExit(f"--taus {s.taus}: {why}") from None
    taus = recording.taus(methods, s.contexts, methods.lengths, lambda line: progress(line, stays=True))
    if s.taus:
        write(s.taus, taus.rows(about), s.seed)
    return taus


def shown(s: Settings, rows: list[Row]) -> None:
    """Print the tables and whether the model holds, and draw the figures where asked."""
    report(rows)
    grid = [r for r in rows if r["part"] == "grid" and r["method"] in NAMES]
    best = "Throughput multiplier at each method's own best k"
    s.draw(
        {
            "measured_k4": lambda: maps([r for r in grid if r["k"] == 4], "Throughput multiplier at k = 4"),
            "measured_best_k": lambda: maps([r for r in grid if r["best_k"]], best),
        }
    )


NAMES = {
    "vanilla": "Vanilla",
    "windowed": "Vanilla, sparse KV",
    "distilled_vanilla": "Vanilla, distilled",
    "magicdec": "MagicDec",
    "magicdec_in_cache": "MagicDec, in-cache positions",
    "spire": "SPIRe",
}


def maps(rows: list[Row], title: str) -> Any:
    """Two lines of panels on one scale: measured, and modelled with constants of the same run. Fitted points are italic."""
    batches, contexts = sorted({r["batch"] for r in rows}), sorted({r["context"] for r in rows})
    names = {method: shown for method, shown in NAMES.items() if any(r["method"] == method for r in rows)}
    lines = ("multiplier", "measured"), ("modelled", "modelled")
    norm = plots.around_one(max(r[c] for r in rows for c, _ in lines if r[c] is not None), 2.0)
    wide, high = 0.75 * len(contexts) + 0.4, 0.42 * len(batches) + 0.6
    drawing, panels = plots.panels(2, len(names), (wide * len(names), 2 * high), sharex=True, sharey=True)
    for line, (column, label) in zip(panels, lines):
        for axes, (method, shown) in zip(line, names.items()):
            found = {(r["batch"], r["context"]): r for r in rows if r["method"] == method}
            said = column == "multiplier" and "best" in title
            image = plots.heat(
                axes, batches, contexts, norm,
                {at: float("nan") if r[column] is None else r[column] for at, r in found.items()},
                after=(lambda at, found=found: f"\nk={found[at]['k']}") if said else lambda at: "",
                italic={at for at, r in found.items() if r["fitted"] and column == "modelled"},
            )  # fmt: skip
            if column == "multiplier":
                axes.set_title(shown, loc="left", fontsize=10)
            else:
                axes.set_xlabel("context length")
        line[0].set_ylabel(f"{label}\nbatch size")
    drawing.subplots_adjust(wspace=0.06, hspace=0.1, top=0.87, right=0.93)
    low, up = panels[1][-1].get_position(), panels[0][-1].get_position()
    plots.scale(drawing, image, (0.94, low.y0, 0.008, up.y1 - low.y0))
    drawing.suptitle(
        f"{title} (italic: the model's constants were fitted there)", x=0.125, y=0.985, ha="left", fontsize=12
    )
    return drawing


if __name__ == "__main__":
    main(parse(Settings, __doc__))
