"""The figures in the documentation's tables are those of the reports in ``docs/results``, and the reports say which code made them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from doc_tables import REPORT, Table, fill, numbers, tables, wrong

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TABLES = [table for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))] for table in tables(page)]
NAMED = [
    table for table in TABLES if table.comment is not None and not table.comment.startswith("no report: ")
]


def where(table: Table) -> str:
    """By number, which ``slow_tier.txt`` can name while lines move."""
    return f"{table.page.name}, table {[t for t in TABLES if t.page == table.page].index(table) + 1}"


@pytest.mark.parametrize("table", NAMED, ids=where)
def test_a_tables_numbers_are_its_reports(table):
    assert wrong(table, DOCS) == [], f"in line {table.line}"


def test_every_table_of_figures_says_where_it_comes_from():
    """On the pages that name a report."""
    named = {page for page in {table.page for table in TABLES} if REPORT.search(page.read_text())}
    assert [where(t) for t in TABLES if t.page in named and t.of_figures and t.comment is None] == []
    assert len(NAMED) > 10


def test_the_reports_that_tables_and_pages_name_exist():
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    made = re.compile(r"gpu_suite\.json")  # the GPU suite's, which has not run
    said = {name for page in pages for name in REPORT.findall(page.read_text()) if not made.search(name)}
    assert [name for name in sorted(said) if not (ROOT / name).is_file()] == []


def reports() -> dict[str, dict]:
    return {file.name: json.loads(file.read_text())["meta"] for file in (DOCS / "results").glob("*.json")}


def test_reports_name_the_commit_of_their_code():
    without = {name for name, meta in reports().items() if not meta.get("commit")}
    assert without == set(), "measured outside a checkout: measure again"
    assert [name for name, meta in reports().items() if meta.get("dirty")] == [], (
        "measured with uncommitted changes"
    )


def test_the_commit_has_the_script_that_the_report_names():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    for name, meta in reports().items():
        if not meta.get("commit"):
            continue
        known = subprocess.run(
            ["git", "-C", str(ROOT), "cat-file", "-e", meta["commit"]], capture_output=True
        )
        if known.returncode == 0:  # history may have been cut or squashed
            script = meta["command"].split()[1]
            object = f"{meta['commit']}:{script}"
            found = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", object], capture_output=True)
            assert found.returncode == 0, f"{name}: {object} does not exist"


# -- the reader of tables ----------------------------------------------------------------------------------------------------------

ROWS = [
    {"method": "plain", "batch": 1, "speed": 10.0, "done": True},
    {"method": "spire", "batch": 1, "speed": 17.34, "low": 0.0124, "done": False},
    {"method": "spire", "batch": 16, "speed": 160.0, "done": False},
]
PAGE = """
# A page

```text
| not | a table |
```

<!-- from: results/r.json, results/s.json
where: method == "spire"
let: plain = of("speed", method="plain", batch=1)
let: weight = of("weight", batch=None) * float(key("batch"))
cells: =batch | speed | speed /
plain , low | - | of("speed", batch=16) / max(every("speed", method="plain")) * weight
label: one -> 1
-->

| batch | tokens/s | over plain | paper | over all |
|---|---|---|---|---|
| {batch} | **{speed}** | {over} (low 0.012) | 99 | 16 |
"""


def read(tmp_path: Path, **cells: str) -> list[str]:
    (tmp_path / "results").mkdir(exist_ok=True)
    (tmp_path / "results/r.json").write_text(json.dumps({"rows": ROWS}))
    (tmp_path / "results/s.json").write_text(json.dumps({"rows": [{"weight": 1.0}]}))
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(**{"batch": "one", "speed": "17.3", "over": "1.73", **cells}))
    (table,) = tables(page)
    assert table.line == PAGE.splitlines().index("| batch | tokens/s | over plain | paper | over all |") + 1
    return wrong(table, tmp_path)


def test_a_table_is_compared_at_the_digits_that_it_prints(tmp_path):
    assert read(tmp_path) == []
    assert read(tmp_path, speed="17.34", over="1.7", batch="`1`") == []
    (said,) = read(tmp_path, speed="17.4")
    assert "page.md:19, tokens/s: says **17.4**, and the report has [17.34]" in said
    assert len(read(tmp_path, over="1.74", speed="17.35")) == 2
    assert "[1.734, 0.0124]" in read(tmp_path, over="1.734, 1.7")[0]  # more numbers than expressions


def test_a_row_that_is_not_in_the_report_is_wrong(tmp_path):
    assert "no row with" in read(tmp_path, batch="2")[0]
    (said,) = (line for line in read(tmp_path, batch="16") if "tokens/s" in line)
    assert "[160.0]" in said


def test_an_expression_that_fits_several_rows_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr("test_docs_results.ROWS", [*ROWS, ROWS[1]])
    assert "2 rows have" in read(tmp_path)[0]


def test_a_page_is_filled_from_its_reports(tmp_path):
    page = tmp_path / "page.md"
    for said, right in (("9.99", "1.73"), ("9,", "2,"), ("9.9e+03", "1.7e+00"), ("1.734", "1.734")):
        read(tmp_path, speed="0.0", over=said)
        before = page.read_text()
        assert fill(page, tmp_path) == []
        assert page.read_text() == before.replace("**0.0**", "**17.3**").replace(
            f"{said} (low", f"{right} (low"
        )
    assert "[1.734, 0.0124]" in read(tmp_path, over="1, 2, 3")[0]
    assert "[1.734, 0.0124]" in fill(page, tmp_path)[0]  # more numbers than expressions: left as it is
    assert "1, 2, 3 (low" in page.read_text()


def test_numbers_are_found_with_their_precision():
    assert numbers("**1046** (2.84), 2.3e-15 in `pocket-1` x2 −3 (-4)") == [
        (1046, 0.5), (2.84, 0.005), (2.3e-15, pytest.approx(5e-17)), (-3, 0.5), (-4, 0.5)
    ]  # fmt: skip
    assert numbers("1.29 (1.27 to 1.32)") == [(1.29, 0.005), (1.27, 0.005), (1.32, 0.005)]
    assert [n for n, _ in numbers("100,000 rounds, 18 / 18: 1.02")] == [100_000, 18, 18, 1.02]
