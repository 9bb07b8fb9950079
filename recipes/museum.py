"""The bug museum: mistakes of real speculative decoders, each with its exact total variation and that of its repair.

For each exhibit the smallest case is enumerated: every outcome of every random decision with its exact probability. The total variation
between the distribution of the output and the target's is compared with the expected one (to 1e-3), and a repair must be exact (1e-9). Rows
with real code run transformers as it is installed; the others are models, written from the code and the issues that they name. False
alarms must be exact. It takes about a minute on one core; the exit status is 1 if something is not as expected.

    python recipes/museum.py --only B7 --json m.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401

from specdec.audit.museum import everything
from specdec.lab.options import option, parse
from specdec.lab.recipe import Reported


@dataclass(frozen=True)
class Settings(Reported):
    only: str = option("", "run only exhibits whose name or source contains this text", metavar="TEXT")
    list: bool = option(False, "list the names of the exhibits and exit")


def main(s: Settings) -> int:
    s.begin()
    chosen = [e for e in everything() if s.only.lower() in f"{e.name} {e.source}".lower()]
    if s.list or not chosen:
        print("\n".join(e.name for e in chosen) or f"no exhibit contains {s.only!r}: see --list")
        return 0 if chosen else 2
    rows: list[dict[str, Any]] = []
    wrong = []
    print(f"{'exhibit':92} {'code':5} {'total variation':>15} {'expected':>8} {'repaired':>9}")
    for exhibit in chosen:
        found = exhibit.broken()
        repaired = exhibit.fixed() if exhibit.fixed else None
        fits = exhibit.stands(found, repaired)
        said = "-" if exhibit.expected is None else f"{exhibit.expected:.4g}"
        if not fits:
            wrong.append(exhibit.name)
        print(
            f"{exhibit.name:92} {'real' if exhibit.real_code else 'model':5} {found.total_variation:15.3g} {said:>8} "
            + ("" if repaired is None else f"{repaired.total_variation:9.1e}")
            + ("" if fits else "  <- WRONG"),
            flush=True,
        )
        rows.append(
            {
                "exhibit": exhibit.name, "source": exhibit.source, "real_code": exhibit.real_code,
                "total_variation": found.total_variation, "expected": exhibit.expected,
                "fixed_total_variation": None if repaired is None else repaired.total_variation, "branches": found.branches,
            }
        )  # fmt: skip
    print(
        f"\n{len(rows)} exhibits. {'All as expected.' if not wrong else 'NOT AS EXPECTED: ' + '; '.join(wrong)}"
    )
    s.save(rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(parse(Settings, __doc__)))
