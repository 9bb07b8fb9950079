"""Runs the notebooks of this folder, and writes each as a page with its outputs and figures.

python docs/notebooks/publish.py [first_steps ...]
"""

from __future__ import annotations

import base64
import re
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient

from specdec.lab.origin import processor

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(path for path in FOLDER.glob("*.py") if path != Path(__file__))
NOTE = """!!! note
    These are the outputs of [{name}.py]({name}.py) on one thread of {where}, {day}. The file opens as a notebook where jupytext is installed.
    Seconds and speeds are those of a shared machine."""


def source(cell: Any) -> str:
    """A cell as the page shows it."""
    if cell.cell_type == "markdown":
        return str(cell.source)
    code = re.sub(r"  # noqa.*| *%matplotlib inline\n*", "", cell.source).strip()
    return f"```python\n{code}\n```" if code else ""


def html(text: str) -> str:
    """A pandas table without its own style, so that it looks like the site's."""
    text = re.sub(r"<style.*?</style>|<p>.*?</p>", "", text, flags=re.DOTALL)
    text = re.sub(r"<table[^>]*>", "<table>", text).replace('<tr style="text-align: right;">', "<tr>")
    return re.sub(r"\n\s*", "\n", text).strip()


def shown(output: Any, name: str, number: int) -> str:
    """One output as Markdown; a figure is written beside the page."""
    data = output.get("data", {})
    if "image/png" in data:
        (FOLDER / f"{name}_{number}.png").write_bytes(base64.b64decode(data["image/png"]))
        return f"![Figure {number} of this notebook]({name}_{number}.png)"
    if "text/html" in data:
        return html(data["text/html"])
    text = output.get("text", data.get("text/plain", "")).rstrip()
    return f"```text\n{text}\n```" if text else ""


def publish(path: Path) -> None:
    notebook, name = jupytext.read(path), path.stem
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook, timeout=600, coalesce_streams=True, resources={"metadata": {"path": folder}}
        ).execute()
    for old in FOLDER.glob(f"{name}_*.png"):
        old.unlink()
    parts, figures = [], 0
    for number, cell in enumerate(notebook.cells):
        parts.append(source(cell))
        if number == 0:
            parts.append(NOTE.format(name=name, day=date.today(), where=processor()["processor"]))
        for output in cell.get("outputs", []):
            if output.get("name") != "stderr":
                figures += "image/png" in output.get("data", {})
                parts.append(shown(output, name, figures))
    path.with_suffix(".md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if path.stem in (sys.argv[1:] or [path.stem]):
            publish(path)
