"""An mkdocs hook that lists the modules of a package on an API page.

``::: specdec.drafts.* public`` becomes a block for each module whose names the package exports, and ``::: specdec.drafts.* internal`` one for
each of the others that no page names itself; ``internal a-m`` takes those with such names. New modules appear without an edit.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LINE = re.compile(r"^::: (specdec[\w.]*)\.\* (public|internal)(?: ([a-z])-([a-z]))?$", re.MULTILINE)
NAMED = re.compile(r"^::: (specdec[\w.]*)$", re.MULTILINE)


def modules(package: str) -> list[str]:
    """All modules below a package; a package inside it is one of them where it defines something itself."""
    base = ROOT.joinpath(*package.split("."))
    files = sorted(file for file in base.rglob("*.py") if file.parent != base or file.name != "__init__.py")
    names = [".".join(file.relative_to(base).with_suffix("").parts) for file in files]
    return [f"{package}.{name}".removesuffix(".__init__") for name in names]


def public(package: str) -> list[str]:
    """The modules whose names the package, or a package inside it, imports in its ``__init__``."""
    found: set[str] = set()
    for file in ROOT.joinpath(*package.split(".")).rglob("__init__.py"):
        here = ".".join(file.parent.relative_to(ROOT).parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(f"{here}.{node.module}" if node.level else node.module)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FUNCTIONS":
                found |= {f"{here}.{name}" for name in ast.literal_eval(node.value).values()}
    return [name for name in modules(package) if name in found]


def named() -> set[str]:
    """The modules that some page names itself."""
    return {name for page in FOLDER.glob("*.md") for name in NAMED.findall(page.read_text(encoding="utf-8"))}


def listed(package: str, which: str, first: str | None, last: str | None) -> list[str]:
    shown, own = set(public(package)), named()
    chosen = [name for name in modules(package) if (name in shown) == (which == "public") and name not in own]
    return [name for name in chosen if (first or "a") <= name[len(package) + 1] <= (last or "z")]


def expand(text: str) -> str:
    """A page with its lines of packages replaced."""
    return LINE.sub(lambda line: "\n\n".join(f"::: {name}" for name in listed(*line.groups())), text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return expand(markdown)
