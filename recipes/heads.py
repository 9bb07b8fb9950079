"""Draft heads compared with each other, with SPIRe and with small language models, on the pocket target.

    python recipes/heads.py --json docs/results/heads.json
    python recipes/heads.py --report docs/results/heads.json --markdown tables.md --plots docs/figures

tau: expected tokens a round on texts of the target (docs/lab.md), for every k from one replay, by context and domain, with intervals by a
bootstrap over packages and paired ratios to --reference. depth: acceptance at each depth. tree: EAGLE-2's tree, DDTree and Medusa's static tree beside the chain. equal:
tau at equal milliseconds of drafting, which are measured at batch 1 and the highest temperature. speed: tau times rows over the time of whole rounds, which all methods run in
turn with fresh random numbers. window: heads that see --sinks first positions and the latest --window only, at the longest context. outside: tau
on the texts of --prompts.

The k and the tree of each method in "speed" are chosen on prompts of the validation packages; everything else is measured on the test packages. Rows:
`part, method, drafting, verifier, temperature, context, domain, k, nodes, tau, tau_low, tau_high, ratio, draft_ms, round_ms,
batch, tokens_per_second, ratio_to_plain, ...` (docs/heads_compared.md), and of part draft the parameters and tokens_trained of each method. Drafts that are not there are named and left out; recipes/train_heads.py
trains them. Use one thread on a quiet machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401

import specdec as sd
from specdec.lab import head_tables
from specdec.lab.console import short_errors
from specdec.lab.contenders import contenders
from specdec.lab.contest import Row
from specdec.lab.head_study import PARTS, Known, Study, StudySettings
from specdec.lab.loading import load
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted, Replayed


@dataclass(frozen=True)
class Settings(Plotted, Replayed, StudySettings):
    report: str | None = option(None, "show this finished report instead of measuring", metavar="FILE")
    markdown: str | None = option(None, "write the documentation's tables", metavar="FILE")


def main(s: Settings) -> None:
    s.begin()
    if s.report:
        show(s, json.loads(Path(s.report).read_text())["rows"])
        return
    unknown = set(s.parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"--parts {min(unknown)}: there are {', '.join(PARTS)}")
    with short_errors():
        target, rows = sd.HFModel(*load(s.target, s.precision, s.place)), list[Row]()
    field, missing = contenders(s.methods, target, s.k, s.precision)
    for name, why in missing.items():
        print(f"left out: {name}: {why} (recipes/train_heads.py trains heads)")
    if not field:
        raise SystemExit("--methods: none of these drafts is there")
    known = Known()
    rows += [one.about for one in field]
    for temperature in s.temperatures:
        rows += Study(s, target, field, temperature, known).rows()
        s.save(rows)
    show(s, rows)


def show(s: Settings, rows: list[Row]) -> None:
    """Print the tables, and write the documentation's and the figures where asked."""
    print(head_tables.shown(rows))
    if s.markdown:
        Path(s.markdown).write_text(
            head_tables.documented(rows, Path(s.report or s.json or "heads.json").name)
        )
    s.draw(head_tables.figures(rows))


if __name__ == "__main__":
    main(parse(Settings, __doc__))
