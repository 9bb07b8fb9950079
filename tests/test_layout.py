"""The layout of the source: imports go down the floors and never round, files are short, and parts are not probed for abilities."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up. A module imports from its own floor and from those below; what is not listed is on no floor, and fails.
FLOORS: tuple[str, ...] = (
    "kernels",
    "arguments capabilities configs drafts.info elsewhere figures grammars per_request processing protocols purity rng sampling stats stop_rules texts tree truncation types zoo.files",
    "cost masks memory pruning selectors verifiers",
    "arm_policy composition",
    "cache",
    "forward",
    "graphs",
    "models",
    "drafts",
    "prompts",
    "executors",
    "serving",
    "builder custom_generate decoder distributed generation likelihood parts saved serving.engine serving.openai",
    "data training zoo",
    "audit",
    "testing",
    "lab",
    "",  # specdec/__init__.py: names, imported when they are asked for
)

PROBES, MODELS, LINES = 60, 14, 400


def sources(root: Path) -> dict[str, Path]:
    """Module -> file, below ``root``; ``kernels`` is read as ``specdec.kernels``."""
    found = {}
    for name in ("specdec", "kernels"):
        for path in sorted((root / name).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[:2] == ("specdec", "kernels"):
                continue  # the link to kernels/
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join(parts if name == "specdec" else ("specdec", *parts))] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file imports: at its top, inside functions, and for type checkers."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
            names = [one if one in known else module for one in names]
        else:
            continue
        yield from (one for one in names if one in known and one != name)


def graph(root: Path) -> dict[str, set[str]]:
    known = sources(root)
    return {name: set(imports(name, path, known)) for name, path in known.items()}


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules of which each imports, by way of others, all others."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        seen, todo = set[str](), [start]
        while todo:
            new = arrows[todo.pop()] - seen
            seen |= new
            todo += new
        reached[start] = seen
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in arrows if a in reached[a]}
    return sorted(map(set, groups), key=sorted)


def floor(name: str) -> int:
    """The floor of a module, by the longest name in ``FLOORS`` that it begins with."""
    parts = name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        for number, names in enumerate(FLOORS):
            if ".".join(parts[:end]) in names.split():
                return number
    if not parts:
        return len(FLOORS) - 1
    raise AssertionError(f"{name} is on no floor: put it into FLOORS, where its kind belongs")


def upward(arrows: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Imports from a higher floor."""
    return {(a, b) for a, targets in arrows.items() for b in targets if floor(b) > floor(a)}


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    return graph(ROOT)


def test_no_import_goes_round(arrows):
    found = circles(arrows)
    assert not found, f"these import each other: {found}"


def test_imports_go_down(arrows):
    assert not upward(arrows), f"imported from a higher floor: {sorted(upward(arrows))}"


def test_kernels_import_nothing_of_specdec(arrows):
    kernels = {name: targets for name, targets in arrows.items() if name.startswith("specdec.kernels")}
    found = {(a, b) for a, targets in kernels.items() for b in targets if not b.startswith("specdec.kernels")}
    assert not found


def test_files_are_short_and_models_are_few():
    long = {
        str(path.relative_to(ROOT))
        for path in sources(ROOT).values()
        if len(path.read_text().splitlines()) > LINES
    }
    assert not long, f"over {LINES} lines: {sorted(long)}"
    assert len(list((ROOT / "specdec/models").glob("*.py"))) <= MODELS


def test_recipes_have_no_modules_of_their_own():
    private = sorted(path.name for path in (ROOT / "recipes").rglob("_[!_]*.py"))
    assert not private


def test_parts_declare_what_they_can_do():
    """``getattr`` and ``hasattr`` are for what is not ours: transformers' configs and modules, torch, Triton."""
    probes = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources(ROOT).values()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(getattr|hasattr)\(", line)
    ]
    assert len(probes) <= PROBES, f"{len(probes)}: {probes}"


def tree_of(root: Path, **files: str) -> dict[str, set[str]]:
    """The imports of a small package that is written for the occasion."""
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return graph(root)


@pytest.mark.parametrize(
    "planted",
    [
        "from specdec.drafts.model import Model",
        "import specdec.drafts.model",
        "from specdec.drafts import model",
        "from ..drafts import model",
        "def late():\n    from specdec.drafts.model import Model",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from specdec.drafts.model import Model",
    ],
)
def test_a_planted_arrow_is_seen(tmp_path, planted):
    arrow = ("specdec.cache.ring", "specdec.drafts.model")
    assert upward(tree_of(tmp_path, specdec__cache__ring="", specdec__drafts__model="")) == set()
    assert upward(tree_of(tmp_path, specdec__cache__ring=planted)) == {arrow}
    down = "from specdec.cache import ring"
    found = tree_of(tmp_path, specdec__cache__ring=planted, specdec__drafts__model=down)
    assert circles(found) == [set(arrow)]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_kernels_are_a_floor_of_specdec(tmp_path):
    found = tree_of(tmp_path, kernels__api="from specdec import types", specdec__types="")
    assert found["specdec.kernels.api"] == {"specdec.types"}
    assert upward(found) == {("specdec.kernels.api", "specdec.types")}


def test_a_module_without_a_floor_is_refused():
    with pytest.raises(AssertionError, match="on no floor"):
        floor("specdec.utils")
