"""The format of a measurement's JSON: ``{"meta": {command, date, commit, versions, machine, ...}, "rows": [{...}, ...]}``."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specdec.lab import origin


def meta(seed: int | None = None, packages: Iterable[str] = ()) -> dict[str, Any]:
    """How the figures were made.

    Returns:
        ``command`` (file names without folders), UTC ``date``, ``commit`` and ``dirty`` (``origin.code``), ``versions`` (also of
        ``packages``), ``machine``, ``processor``, ``generation``, ``instruction_sets`` and ``cores`` (``origin.processor``), ``threads``
        (``origin.threads``), ``c_kernels`` (``origin.c_kernels``), ``seed``.
    """
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "specdec", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **origin.code(),
        "versions": versions,
        "machine": machine(),
        **origin.processor(),
        "threads": origin.threads(),
        "c_kernels": origin.c_kernels(),
        "seed": seed,
    }


def command() -> str:
    """The command line, with the script's path from ``recipes`` on and absolute paths shortened to their last part."""
    parts = Path(sys.argv[0]).parts
    start = parts.index("recipes") if "recipes" in parts else -1
    words = ["python", "/".join(parts[start:])]
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        words.append(option + equals + (Path(value).name if os.path.isabs(value) else value))
    return shlex.join(words)


def machine() -> str:
    """The cores that this process may use, CPU model, memory, and GPU if any."""
    cpu = origin.processor()
    parts = [f"{cpu['cores']} core{'' if cpu['cores'] == 1 else 's'}", cpu["processor"]]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        parts.append(f"{memory / 2**30:.0f} GiB RAM")
    import torch

    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name(0))
    return ", ".join(parts)


def write(
    path: str | Path,
    rows: Iterable[Mapping[str, Any]],
    seed: int | None = None,
    packages: Iterable[str] = (),
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write flat ``rows``, one a line, with ``about`` (``meta(seed, packages)``) to ``path``; NaN and infinities become null.

    The file is replaced atomically: a process that is killed meanwhile leaves the old one.
    """
    close = (",", ":")  # reports are a large part of the repository
    lines = [
        json.dumps({k: plain(v) for k, v in row.items()}, allow_nan=False, separators=close) for row in rows
    ]
    head = json.dumps(meta(seed, packages) if about is None else about, indent=1, allow_nan=False)
    text = ",\n".join(lines)
    new = Path(f"{path}.part")
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        new.write_text(f'{{"meta": {head},\n"rows": [\n{text}\n]}}\n', encoding="utf-8")
        new.replace(path)
    finally:  # a process that is asked to end meanwhile leaves no part
        new.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """A value as JSON can express it, floats to six significant digits."""
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
