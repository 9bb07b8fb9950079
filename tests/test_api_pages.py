"""The API pages give every argument, attribute and error a line of its own, though docstrings put short ones on one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # the documentation's packages are there when these tests run
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def library():
    griffe = pytest.importorskip("griffe")
    sys.path.insert(0, str(ROOT / "docs/api"))
    try:
        from sections import Sections
    finally:
        sys.path.remove(str(ROOT / "docs/api"))
    extensions = griffe.load_extensions(Sections())
    return griffe.load("specdec", search_paths=[str(ROOT)], extensions=extensions, docstring_parser="google")


def items(library, path: str, kind: str) -> dict[str, str]:
    """The items of a section, whose descriptions are on one line."""
    sections = library[path].docstring.parse("google", warnings=False)
    found = [item for section in sections if section.kind.value == kind for item in section.value]
    return {getattr(item, "name", str(item.annotation)): " ".join(item.description.split()) for item in found}


def test_every_argument_of_a_function_has_a_line(library):
    for path in ("builder.Builder.pool", "lab.live.compare", "lab.deciding.decide"):
        names = [one.name for one in library[path].parameters if one.name != "self"]
        told = [name for given in items(library, path, "parameters") for name in given.split(", ")]
        assert told == names, path
    pool = items(library, "builder.Builder.pool", "parameters")
    assert pool["selector"] == "from ``specdec.selectors``."
    assert pool["length"] == "of arms without one."


def test_a_word_with_a_colon_that_is_no_argument_stays(library):
    reference = items(library, "lab.live.compare", "parameters")["reference"]
    assert reference.endswith("default: the first that does not speculate, or the first.")


def test_attributes_and_errors_have_a_line(library):
    assert list(items(library, "lab.deciding.decide", "raises")) == ["TypeError", "ValueError"]
    assert {"rank", "markov"} <= set(items(library, "drafts.heads.dspark.DSpark", "parameters")) | set(
        items(library, "drafts.heads.dspark.DSpark", "attributes")
    )
