"""The documentation is true: its Python runs, its commands exist, and its tables are those of the code.

Every fenced block that is marked ``python`` runs, page by page, each page in one namespace. A block whose first line is
``# not run: <reason>`` does not.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
from doc_outputs import FENCE, NOT_RUN, blocks, first_line, printed

from specdec.kernels.attention import choice
from specdec.models import SUPPORTED

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "notebooks"),
]
"""The notebooks' pages are written from files that tests/test_notebooks.py runs."""
SLOW = {"docs/howto/compare.md"}  # a second and more each
SLOW |= {
    f"docs/{page}.md"
    for page in (
        *("auto", "certifier", "drafts", "executors", "heads", "lab", "lossy", "models", "museum", "pruning"),
        *("speculate", "spin", "testing", "training", "verifiers", "howto/processes", "howto/tau"),
    )
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=pytest.mark.slow if name(page) in SLOW else ())
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a block writes is not left in the repository
    monkeypatch.setattr(choice._backends, "registered", {})  # nor a backend that it registers in this process
    text = page.read_text(encoding="utf-8")
    for block, out in printed(page):
        if block.shown is not None and not block.varies:
            assert first_line(text[block.shown]) == first_line(out)


def test_there_is_python_on_every_page_about_a_part():
    pages = (
        "models",
        "drafts",
        "verifiers",
        "sampling",
        "decoder",
        "certifier",
        "pocket_models",
        "design",
        "index",
    )
    assert [page for page in pages if not blocks(ROOT / "docs" / f"{page}.md", "python")] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs/howto").glob("*.md")), ids=name)
def test_a_task_takes_at_most_25_lines(page):
    text = "\n".join(match["text"] for match in FENCE.finditer(page.read_text()) if match["kind"] == "python")
    lines = [line.strip() for line in text.splitlines()]
    assert 0 < len([line for line in lines if line and not line.startswith(("#", '"""'))]) <= 25


def test_the_trace_of_the_first_page_is_a_run_of_the_library():
    """Its words, without its figures, which differ in the last digit between processors."""
    namespace = run_path(str(ROOT / "docs/figures/trace.py"))

    def words(text):
        return re.sub(r"\d+\.\d+", "", text)

    written = (ROOT / "docs/figures/trace.html").read_text(encoding="utf-8")
    assert written.count("<figure>") == 4 * namespace["ROUNDS"]
    assert words(namespace["page"]()) == words(written)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_not_run_says_why(page):
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        assert match["kind"] in ("python", "bash", "text"), f"a block without a kind: {match['text'][:60]!r}"
        if match["text"].startswith(NOT_RUN):
            assert match["text"].splitlines()[0].removeprefix(NOT_RUN).strip()


def test_the_lists_of_families_are_the_codes():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    section = page[page.index("## Supported families") : page.index("## What HFModel refuses, and why")]
    packed = re.findall(
        r"`([\w-]+)`[,.]", "".join(re.findall(r"^- \*.+?\.$", section, re.MULTILINE | re.DOTALL))
    )
    padded = re.findall(r"^\| `([\w-]+)` \| (.+?) \|$", section, re.MULTILINE)
    listed = {**dict.fromkeys(packed, "packed")}
    listed |= {family: "padded" if trees == "yes" else f"padded, {trees}" for family, trees in padded}
    assert len(listed) == len(packed) + len(padded)
    assert listed == SUPPORTED


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every recipe that a page tells its reader to run, in blocks, tables and text."""
    return [
        (name(page), command)
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for command in re.findall(r"""python (recipes/[^\n`"]*)""", page.read_text(encoding="utf-8"))
    ]


def options_of(script: Path) -> str:
    """The source of a script, and of the lab's modules and the scripts that it imports: settings are dataclasses whose fields are options."""
    source = script.read_text(encoding="utf-8")
    lab = [
        ROOT / "specdec/lab" / f"{name}.py" for name in re.findall(r"from specdec\.lab\.(\w+) import", source)
    ]
    beside = [
        script.parent / f"{name}.py" for name in re.findall(r"^from (\w+) import", source, re.MULTILINE)
    ]
    return "\n".join([source, *map(options_of, [*lab, *(one for one in beside if one.exists())])])


def test_the_commands_exist():
    assert len(commands()) > 8
    for page, command in commands():
        script, *words = command.split()
        source = options_of(ROOT / script)
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            name = option.removeprefix("--").replace("-", "_")
            field = rf"^    {name}: |^    {name.removeprefix('no_')}: bool = option\(True"
            assert f'"{option}"' in source or re.search(field, source, re.MULTILINE), f"{page}: {command}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_the_links_outside_the_site_lead_somewhere(page):
    """mkdocs checks those inside it."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_module_is_in_the_api_once():
    """By its name, in a package that is shown with all its modules, or by the hook that lists the modules of a package."""
    hook = SimpleNamespace(**run_path(str(ROOT / "docs/api/modules.py")))
    pages = [hook.expand(page.read_text()) for page in sorted((ROOT / "docs/api").glob("*.md"))]
    shown = [
        one
        for name, whole in re.findall(
            r"^::: (specdec[\w.]*)$(\n    options:\n      show_submodules: true)?", "\n".join(pages), re.M
        )
        for one in [name, *(hook.modules(name) if whole else [])]
    ]
    assert [name for name, times in Counter(shown).items() if times > 1] == []
    everything = {
        *hook.modules("specdec"),
        "specdec.kernels",
        *hook.modules("specdec.kernels"),
    }  # a link, not a folder
    assert set(shown) <= everything
    bare = {name for name in everything - set(shown) if (ROOT / name.replace(".", "/")).is_dir()}
    assert everything - set(shown) - bare == set()
