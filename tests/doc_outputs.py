"""The Python of a page of the documentation, and what it prints.

A block of Python may be followed by what it prints, in a block that begins with the line ```` ```text title="It prints" ````. Numbers and texts differ between
processors, so the tests compare the first line only, without its numbers, and nothing where the title is "It prints, for example". ``python tests/doc_outputs.py docs/auto.md`` runs a page on one thread and writes what its blocks print into the page.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```(?P<kind>\S*)[^\n]*\n(?P<text>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(
    r'\n```text title="It prints(?P<varies>, for example)?"\n(?P<text>.*?)^```\s*$', re.MULTILINE | re.DOTALL
)
NOT_RUN = "# not run:"


class Block(NamedTuple):
    """A fenced block, the line on which its text begins, where the text of what it prints is in the page (``None``: the page does not show it), and whether that varies."""

    kind: str
    text: str
    line: int
    shown: slice | None
    varies: bool


def blocks(page: Path, kind: str) -> list[Block]:
    """The blocks of one kind that are to be run."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        after = SHOWN.match(text, match.end())
        shown = None if after is None else slice(after.start("text"), after.end("text"))
        line = text[: match.start("text")].count("\n") + 1
        varies = after is not None and after["varies"] is not None
        found.append(Block(match["kind"], match["text"], line, shown, varies))
    return [block for block in found if block.kind == kind and not block.text.startswith(NOT_RUN)]


def printed(page: Path) -> list[tuple[Block, str]]:
    """Every block of a page and what it prints; the blocks run one after the other in one namespace."""
    namespace, made = {"__name__": f"docs_{page.stem}"}, []
    for block in blocks(page, "python"):
        # The padding puts the page's own line numbers into a traceback.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
        with redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        made.append((block, out.getvalue()))
    return made


def first_line(text: str) -> list[str]:
    """The words of the first line, without numbers."""
    return re.sub(r"\d[\d.,/]*(e[-+]\d+)?", "#", text.partition("\n")[0]).split()


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    for page in [Path(name).resolve() for name in sys.argv[1:]]:
        text = page.read_text(encoding="utf-8")
        os.chdir(tempfile.mkdtemp())
        for block, out in reversed(printed(page)):
            if block.shown is not None:
                text = text[: block.shown.start] + out.rstrip() + "\n" + text[block.shown.stop :]
        page.write_text(text, encoding="utf-8")
