"""The notebooks in docs/notebooks are Python files; each runs from top to bottom in a fresh kernel, warnings and all."""

from __future__ import annotations

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def test_there_is_one():
    assert {"first_steps.py", "spire.py"} <= {path.name for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.name == "first_steps.py" else pytest.mark.slow, id=path.name)
        for path in sorted(FOLDER.glob("*.py"))
    ],
)
def test_runs_from_top_to_bottom(path, tmp_path):
    notebook = jupytext.read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) > 4
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count == number for number, cell in enumerate(cells, 1))
    said = [output["text"] for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert not [text for text in said if "Warning" in text]
    assert any(
        "text/html" in output.get("data", {}) for cell in cells for output in cell.outputs
    )  # the frame
