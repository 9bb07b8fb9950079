"""Prove losslessness exactly: enumerate all random outcomes of decoders and compare with the target's distribution.

For each composition every outcome of every random decision is run through the real decoder, over a vocabulary of 3 tokens,
with its exact probability. The table shows the total variation between the output's distribution and the target's: rounding error
(below 1e-9) for every composition that claims to be lossless. Verifiers that are declared lossy must have their known distance.
Planted biases, mistakes of real decoders, must be detected (at least 1e-3). It takes about two minutes on one core; the exit status is
1 if a claim fails, a distance is another one, or a bias is missed.

    python recipes/certify.py --only tree --json trees.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401

from specdec.audit.catalogue import everything
from specdec.audit.composed import Composition
from specdec.lab.options import option, parse
from specdec.lab.recipe import Reported


@dataclass(frozen=True)
class Settings(Reported):
    only: str = option("", "run only compositions whose name contains this text", metavar="TEXT")
    list: bool = option(False, "list the names of the compositions and exit")


CLAIM, LOSSY, BIAS = "claimed lossless", "declared lossy, measured", "planted biases, to be detected"


def kind(composition: Composition) -> str:
    """The title under which a composition is listed."""
    return CLAIM if composition.lossless else BIAS if composition.distance is None else LOSSY


def main(s: Settings) -> int:
    s.begin()
    chosen = [c for c in everything() if s.only.lower() in c.name.lower()]
    if s.list or not chosen:
        print("\n".join(c.name for c in chosen) or f"no composition's name contains {s.only!r}: see --list")
        return 0 if chosen else 2
    rows: list[dict[str, Any]] = []
    wrong = []
    title = ""
    for composition in chosen:
        claim = composition.lossless
        if kind(composition) != title:
            title = kind(composition)
            print(f"\n{title:62} {'total variation':>15} {'unaccounted':>11} {'branches':>9} {'seconds':>8}")
        found = composition.run()
        if not composition.stands(found):
            wrong.append(composition.name)
        print(
            f"{composition.name:62} {found.total_variation:15.2e} {found.mass:11.1e} {found.branches:9d} {found.seconds:8.1f}"
            + ("" if composition.stands(found) else "  <- MISSED" if title == BIAS else "  <- WRONG"),
            flush=True,
        )
        rows.append(
            {
                "composition": composition.name, "lossless": claim, "declared_lossy": composition.distance is not None,
                "total_variation": found.total_variation, "share_of_paths_astray": found.astray,
                "mass": found.mass, "branches": found.branches, "seconds": round(found.seconds, 3),
            }
        )  # fmt: skip
    claims = [row for row in rows if row["lossless"]]
    biases = [row for row in rows if not row["lossless"] and not row["declared_lossy"]]
    lossy = sum(row["declared_lossy"] for row in rows)
    if claims:
        worst = max(row["total_variation"] for row in claims)
        print(f"\n{len(claims)} claims, the largest total variation is {worst:.1e} (allowed: 1e-9).", end="")
    if lossy:
        print(f"\n{lossy} compositions are declared lossy; each must have its known distance.", end="")
    if biases:
        least = min(row["total_variation"] for row in biases)
        print(
            f"\n{len(biases)} planted biases, the smallest total variation is {least:.1e} (required: 1e-3).",
            end="",
        )
    print(f"\n{'All as claimed.' if not wrong else 'NOT AS CLAIMED: ' + '; '.join(wrong)}")
    s.save(rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(parse(Settings, __doc__)))
