"""How much of the best possible acceptance verifiers of several candidates reach, and how much is left to win.

    python recipes/optimality.py --json optimality.json --plots plots

Texts of the target are recorded after development prompts, and every draft is replayed on them (docs/lab.md), which gives the distributions p of
the target and q of the draft at every position and depth of a block. From these the acceptance of k candidates is computed, without noise: by
recursive rejection (``Rejection``) and k-SEQ (``KSeq``) of independent candidates, and by recursive rejection of candidates that are drawn without
replacement, of the k - 1 most probable tokens and one draw from the rest, and of the k most probable tokens. ``optimum`` is the most that any
verifier can accept of candidates that are chosen in the same way, ``independent`` of as many independent ones, ``single`` of one. The exit status is 1 if
an acceptance exceeds its optimum at any position, or k-SEQ has less than 1 - (1 - 1/k)^k of it.

Rows: `target, draft, temperature, depth, candidates, chosen, verifier, exact, acceptance, optimum, independent, single, excess, share, positions`.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import checkout  # noqa: F401

import specdec as sd
from specdec import lab
from specdec.capabilities import DraftPart
from specdec.lab import bounds
from specdec.lab.console import progress, short_errors, table
from specdec.lab.on_texts import OnDevelopment
from specdec.lab.options import option, parse
from specdec.lab.recipe import Plotted


@dataclass(frozen=True)
class Settings(Plotted, OnDevelopment):
    drafts: tuple[str, ...] = option(
        ("vanilla=pocket-vanilla", "tiny=pocket-tiny", "spire=pocket-spire"),
        "NAME=DRAFT, or a draft alone",
        metavar="DRAFT",
    )
    new_tokens: int = option(16, "positions of each text at which blocks start")
    candidates: tuple[int, ...] = option((1, 2, 4, 8), "their numbers", metavar="K")
    k: int = option(4, "depths of a block")
    distinct: int = option(
        16, "positions to each one at which candidates without replacement are computed (0: none)"
    )


def main(s: Settings) -> int:
    s.begin()
    with short_errors():
        target = s.loaded()
        some, parts = s.pieces(target), s.parts(target)
    taps = sorted({tap for part in parts.values() for tap in DraftPart.of(part).info.taps})
    rows: list[dict[str, Any]] = []
    for temperature in s.temperatures:
        sampling = sd.Sampling(temperature=temperature)
        with tempfile.TemporaryDirectory() as folder, short_errors():
            trace = lab.record(
                target, some, folder, s.new_tokens, s.k, sampling, taps, target.vocab_size, (), seed=s.seed
            )
            for name, part in parts.items():
                progress(f"{name} at temperature {temperature:g}")
                read_by = target if DraftPart.of(part).reads_target else None
                found = bounds.along(trace, part, s.k, read_by, candidates=s.candidates, distinct=s.distinct)
                label = {"target": s.target, "draft": name, "temperature": temperature}
                rows += [{**label, **row} for row in found.rows]
    progress()
    shown = [row for row in rows if row["depth"] == "all"]
    names = ("draft", "temperature", "candidates", "chosen", "verifier", *bounds.FIGURES, "positions")
    print(table(shown, names))
    wrong = bounds.violations(rows)
    print("\n".join(wrong) or "\nNothing is above its optimum, and k-SEQ has at least its share of it.")
    s.save(rows)
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(f"{row['draft']}, temperature {row['temperature']:g}", []).append(row)
    s.draw({"optimality": partial(bounds.plot, panels)})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(parse(Settings, __doc__)))
