"""Python source that every installation has, as datasets by domain, with whole packages held out.

Three domains are extracted from the same files: `code` (the files), `prose` (their docstrings and comment blocks) and
`tabular` (their large literal collections). A package is a distribution named in packages.txt, or one top-level
module or package of the standard library ("stdlib.json"). Its split is decided before anything is extracted.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import dedup, extract

if TYPE_CHECKING:
    import datasets

DOMAINS = ("code", "prose", "tabular")
SPLITS = ("train", "validation", "test")
HELD_OUT = {
    "test": [
        "flask",
        "h11",
        "pyyaml",
        "seaborn",
        "stdlib.argparse",
        "stdlib.html",
        "stdlib.locale",
        "stdlib.mimetypes",
        "stdlib.opcode",
        "stdlib.statistics",
        "stdlib.tarfile",
    ],
    "validation": [
        "boltons",
        "lark",
        "pdfminer.six",
        "requests",
        "stdlib.colorsys",
        "stdlib.csv",
        "stdlib.curses",
        "stdlib.email",
        "stdlib.textwrap",
        "stdlib.token",
        "stdlib.zipfile",
    ],
}
PACKAGE_LIMIT = 4_000_000  # bytes of code from one training package, so that no single one dominates
MANIFEST = Path(__file__).with_name("manifest.json")
PACKAGES = Path(__file__).with_name("packages.txt")
_VERSION = 2  # of the extraction: a cached corpus of another version is built again
_SKIPPED = {"_vendor", "vendor", "_vendored", "_vendored_packages", "extern", "site-packages", "__pycache__"}
_COPYLEFT = re.compile(r"GPL|General Public|MPL|Mozilla", re.IGNORECASE)


@dataclass(frozen=True)
class Package:
    """A set of files that goes to one split as a whole; `files` are (path in the package, path on disk)."""

    name: str
    version: str
    licence: str
    files: tuple[tuple[str, Path], ...]

    @property
    def split(self) -> str:
        return split_of(self.name)


def split_of(package: str) -> str:
    """The split of a package by its name alone: packages that are not held out are for training."""
    return next((split for split, names in HELD_OUT.items() if package in names), "train")


def requirements() -> list[str]:
    """The distributions that the corpus is made of, as `name==version` lines for pip."""
    return [line for line in PACKAGES.read_text().split("\n") if line and not line.startswith("#")]


def packages(site: str | Path | Sequence[str | Path] = ()) -> list[Package]:
    """The packages found on sys.path and in the folders `site`, by name; sources under the GPL or MPL are left out."""
    wanted = {re.split(r"[=<>~! ]", line)[0].lower() for line in requirements()}
    found = {package.name: package for package in _stdlib()}
    extra = [site] if isinstance(site, (str, Path)) else list(site)
    for distribution in importlib.metadata.distributions(path=[*map(str, extra), *sys.path]):
        name = distribution.metadata["Name"].lower()
        licence = _licence(distribution.metadata)
        if name not in wanted or name in found or _COPYLEFT.search(licence):
            continue
        files = [
            file
            for file in distribution.files or ()
            if file.suffix == ".py" and not _SKIPPED & set(file.parts)
        ]
        located = tuple((str(file), Path(str(distribution.locate_file(file)))) for file in files)
        found[name] = Package(name, distribution.version, licence, located)
    return [found[name] for name in sorted(found)]


def _licence(metadata: Any) -> str:
    """The licence's name: the SPDX expression, else the classifiers, else the first line of the free text."""
    classifiers = [
        line.split("::")[-1].strip() for line in metadata.get_all("Classifier", []) if "License" in line
    ]
    text = (
        metadata.get("License-Expression") or ", ".join(classifiers) or metadata.get("License") or "unknown"
    )
    return text.split("\n")[0][:80]


def _stdlib() -> Iterator[Package]:
    """Each top-level module or package of the standard library as a package of its own."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for top in sorted(root.iterdir()):
        if top.suffix == ".py":
            files = [top]
        elif (top / "__init__.py").exists() and top.name not in _SKIPPED:
            files = sorted(
                file for file in top.rglob("*.py") if not _SKIPPED & set(file.relative_to(root).parts)
            )
        else:
            continue
        located = tuple((str(file.relative_to(root)), file) for file in files)
        yield Package(f"stdlib.{top.stem}", platform.python_version(), "PSF-2.0", located)


def read(package: Package) -> list[dict[str, str]]:
    """The files of a package that pass `extract.clean`, as rows (text, package, path, sha256) in order of hash."""
    rows = []
    for name, path in package.files:
        try:
            text = extract.clean(path.read_bytes())
        except OSError:  # listed by the distribution, but not installed
            continue
        if text is not None:
            digest = hashlib.sha256(text.encode()).hexdigest()
            rows.append({"text": text, "package": package.name, "path": name, "sha256": digest})
    return sorted(rows, key=lambda row: (row["sha256"], row["path"]))


def describe(package: Package, rows: list[dict[str, str]]) -> dict[str, Any]:
    """The manifest's entry: what was read, before limits and deduplication."""
    digest = hashlib.sha256("".join(row["sha256"] for row in rows).encode()).hexdigest()
    size = sum(len(row["text"].encode()) for row in rows)
    head = {
        "package": package.name,
        "version": package.version,
        "split": package.split,
        "licence": package.licence,
    }
    return {**head, "files": len(rows), "bytes": size, "sha256": digest}


def verify(site: str | Path | Sequence[str | Path] = ()) -> list[str]:
    """How this installation differs from the manifest, one sentence per package; empty if results are comparable."""
    here = {package.name: describe(package, read(package)) for package in packages(site)}
    return differences(
        here, {entry["package"]: entry for entry in json.loads(MANIFEST.read_text())["packages"]}
    )


def differences(here: dict[str, dict[str, Any]], there: dict[str, dict[str, Any]]) -> list[str]:
    """Compares two tables of manifest entries by package name."""
    problems = [f"{name} is not installed" for name in sorted(there.keys() - here.keys())]
    problems += [f"{name} is not in the manifest" for name in sorted(here.keys() - there.keys())]
    for name in sorted(there.keys() & here.keys()):
        if here[name]["sha256"] != there[name]["sha256"]:
            problems.append(f"{name} {here[name]['version']} differs from {there[name]['version']}")
    return problems


def _pieces(row: dict[str, str]) -> dict[str, str]:
    """The prose and the tables of one file; a text too short to be a document is empty."""
    tree = extract.parse(row["text"])
    if tree is None:
        return {"prose": "", "tabular": ""}
    pieces = {"prose": extract.prose(row["text"], tree), "tabular": extract.tables(row["text"], tree)}
    return {domain: piece if len(piece) >= extract.MIN_BYTES else "" for domain, piece in pieces.items()}


def _role(file: dict[str, str], piece: dict[str, str]) -> str:
    """The one domain that a held-out file serves. If its docstrings were test text as well, the same bytes would be
    counted twice, and a compressor with a long memory would compress the second copy to nothing."""
    if len(piece["tabular"]) > 0.2 * len(file["text"]):
        return "tabular"
    return "prose" if piece["prose"] and int(file["sha256"][:2], 16) % 2 else "code"


def build(
    site: str | Path | Sequence[str | Path] = (), workers: int | None = None
) -> tuple[list[dict], dict]:
    """Reads, splits, deduplicates and extracts; returns the rows (with `domain` and `split`) and the manifest.

    A training file serves all three domains, a held-out one only one.
    """
    entries, files = [], []
    held_out_first = sorted(packages(site), key=lambda package: SPLITS[::-1].index(package.split))
    for package in held_out_first:
        rows = read(package)
        entries.append(describe(package, rows))
        room = PACKAGE_LIMIT
        for row in rows:
            room -= len(row["text"])
            if package.split == "train" and room < 0:
                break
            files.append({**row, "domain": "code", "split": package.split})
    files = _distinct(files)
    with ProcessPoolExecutor(workers) as pool:
        pieces = list(pool.map(_pieces, files, chunksize=64))
    role = {
        (file["package"], file["path"]): _role(file, piece) for file, piece in zip(files, pieces, strict=True)
    }
    rows = files
    for domain in DOMAINS[1:]:
        parts = [
            {
                **file,
                "domain": domain,
                "text": piece[domain],
                "sha256": hashlib.sha256(piece[domain].encode()).hexdigest(),
            }
            for file, piece in zip(files, pieces, strict=True)
            if piece[domain]
        ]
        rows = rows + _distinct(parts)
    rows = [
        row for row in rows if row["split"] == "train" or row["domain"] == role[row["package"], row["path"]]
    ]
    entries.sort(key=lambda entry: entry["package"])
    return rows, {"python": platform.python_version(), "packages": entries}


def _distinct(rows: list[dict]) -> list[dict]:
    """Drops near-duplicates; held-out rows come first, so that training rows are dropped."""
    guarded = sum(row["split"] != "train" for row in rows)
    keep = dedup.keep_first((row["text"] for row in rows), guarded)
    return [row for row, kept in zip(rows, keep, strict=True) if kept]


def corpus(
    domain: str | None = None,
    split: str = "train",
    site: str | Path | Sequence[str | Path] = (),
    cache: str | Path | None = None,
) -> "datasets.Dataset":
    """The documents of a split as a `datasets.Dataset` with columns text, domain, package, path, sha256.

    `domain` is "code", "prose", "tabular" or None for all; `site` adds folders of packages to those of the running
    interpreter. The first call builds the corpus (minutes) and keeps it in `cache`, by default under
    $XDG_CACHE_HOME/specdec; a warning says when the installation differs from the manifest.
    """
    import datasets

    if split not in SPLITS or domain not in (None, *DOMAINS):
        raise ValueError(
            f"split must be one of {SPLITS} and domain None or one of {DOMAINS}, not {split!r}, {domain!r}"
        )
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specdec"
    folder = Path(cache or home) / f"corpus-{_fingerprint(packages(site))}"
    if not (folder / "manifest.json").exists():
        rows, manifest = build(site)
        columns = ("text", "domain", "package", "path", "sha256")
        for name in SPLITS:
            table = {column: [row[column] for row in rows if row["split"] == name] for column in columns}
            datasets.Dataset.from_dict(table).save_to_disk(folder / name)
        # Written last: its presence marks the rest as complete.
        (folder / "manifest.json").write_text(json.dumps(manifest))
    if MANIFEST.exists():
        here, there = (
            json.loads(path.read_text())["packages"] for path in (folder / "manifest.json", MANIFEST)
        )
        problems = differences({e["package"]: e for e in here}, {e["package"]: e for e in there})
        if problems:
            shown = "; ".join(problems[:3])
            warnings.warn(
                f"{len(problems)} packages differ from the published corpus: {shown} …", stacklevel=2
            )
    dataset = datasets.Dataset.load_from_disk(folder / split)
    if domain is None:
        return dataset
    return dataset.select([index for index, name in enumerate(dataset["domain"]) if name == domain])


def _fingerprint(found: list[Package]) -> str:
    """Names the cached corpus after everything that it depends on."""
    text = json.dumps(
        [[p.name, p.version, len(p.files)] for p in found] + [HELD_OUT, PACKAGE_LIMIT, _VERSION]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
