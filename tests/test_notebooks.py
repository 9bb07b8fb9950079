"""The notebooks in docs/notebooks are Python files; each runs from top to bottom in a fresh kernel, warnings and all (slow)."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path

import jupytext
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


PUBLISH = FOLDER / "publish.py"
NOTEBOOKS = sorted(path for path in FOLDER.glob("*.py") if path != PUBLISH)


def test_there_is_one():
    assert {"first_steps.py", "spire.py"} <= {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_its_page_is_up_to_date(path):
    """Run ``python docs/notebooks/publish.py`` after a change. Outputs are not compared: they have seconds."""
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    source = run_path(str(PUBLISH))["source"]
    at = 0
    for cell in jupytext.read(path).cells:
        at = page.find(source(cell), at)
        assert at >= 0, f"not on the page, or not in this place: {cell.source[:80]!r}"
    assert re.search(r"^```text$", page, re.MULTILINE)


def test_the_figures_are_small_and_used():
    figures = sorted(FOLDER.glob("*.png"))
    assert figures
    assert [figure.name for figure in figures if figure.stat().st_size > 100_000] == []
    said = "".join(page.read_text() for page in FOLDER.glob("*.md"))
    assert [figure.name for figure in figures if f"]({figure.name})" not in said] == []


def test_the_code_of_the_first_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_path(str(FOLDER / "first_steps.py"))
    assert found["out"].stats.tau > 1


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_from_top_to_bottom(path, tmp_path):
    notebook = jupytext.read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 4
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count == number for number, cell in enumerate(cells, 1))
    said = [output["text"] for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert not [text for text in said if "Warning" in text]
    # A frame is shown as a table.
    assert any("text/html" in output.get("data", {}) for cell in cells for output in cell.outputs)
