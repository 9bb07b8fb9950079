"""Compiles the C kernels of this folder at first use with the machine's C compiler, and keeps them in the user's cache folder.

They need a compiler (gcc 11 or clang 14, or newer) but no headers of Python or torch: plain functions on pointers, called by ctypes.
Without a compiler, or with ``SPECDEC_NATIVE=0`` in the environment, ``library`` returns ``None`` and ``reason`` says why; everything
then runs on PyTorch alone. ``SPECDEC_CACHE`` sets another cache folder, ``CC`` another compiler.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent
_FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
# For some processors GCC would fuse multiplications and additions in some loops only, and a row's bits would depend on its batch.
_CHAINS = ["--param=avoid-fma-max-bits=0"]

LONGEST = 300  # seconds for the compiler


@lru_cache(maxsize=1)
def _made() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("SPECDEC_NATIVE", "1") == "0":
        return None, "SPECDEC_NATIVE=0 is set in the environment"
    try:
        made = _compile()
        try:
            return ctypes.CDLL(str(made)), None
        except OSError:  # truncated, or compiled on a similar machine with other libraries
            made.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compile())), None
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return None, str(error)


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or ``None``."""
    return _made()[0]


def loaded() -> bool:
    """Whether this process has loaded the compiled kernels; compiles nothing."""
    return _made.cache_info().currsize > 0 and library() is not None


def reason() -> str | None:
    """Why there are no compiled kernels; ``None`` where there are."""
    return _made()[1]


def say_missing() -> None:
    """Warns that there are no compiled kernels, unless ``SPECDEC_NATIVE=0`` asks for that."""
    if library() is None and os.environ.get("SPECDEC_NATIVE", "1") != "0":
        warnings.warn(
            f"the C kernels for the CPU are missing ({reason()}); PyTorch's operators are used, which take about twice as long. "
            "SPECDEC_NATIVE=0 in the environment ends this warning",
            RuntimeWarning,
            stacklevel=2,
        )


_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


@cache
def function(name: str, takes: str) -> Any:
    """A kernel; ``takes`` has a letter for each argument: p for pointers, l for int64, i for int and f for float.

    Raises:
        RuntimeError: there are no compiled kernels.
    """
    lib = library()
    if lib is None:
        raise RuntimeError(f"there are no C kernels: {reason()}")
    made: Any = lib[name]
    made.argtypes = [_KINDS[kind] for kind in takes]
    return made


def compiler() -> str | None:
    """The C compiler's command, with the options in ``CC``; ``None`` if there is none."""
    return os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)


def _compile() -> Path:
    """Path of the compiled library for these sources, this compiler and this processor, from the cache or newly made."""
    if os.name == "nt":
        raise RuntimeError("there are no C kernels on Windows")
    command = compiler()
    if command is None:
        raise RuntimeError("there is no C compiler: install gcc or clang, or set CC to one")
    words = shlex.split(command)
    try:
        version = _run([*words, "--version"], check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"the C compiler {command!r} does not run: {error}") from None
    gnu = "Free Software Foundation" in version
    openmp = _openmp() if gnu else None  # clang uses another thread pool
    flags = [*_FLAGS, *(_CHAINS if gnu else ())]
    sources, headers = sorted(_HERE.glob("*.c")), sorted(_HERE.glob("*.h"))
    what = hashlib.sha256()
    for part in (
        command,
        version,
        " ".join(flags),
        openmp,
        _processor(),
        *(s.read_text() for s in [*sources, *headers]),
    ):
        what.update(str(part).encode() + b"\0")
    made = _folder() / f"native-{what.hexdigest()[:20]}.so"
    if _trusted(made):
        return made
    tuned = ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        out = Path(folder) / made.name
        parallel = (["-fopenmp", *tuned], [str(openmp)]) if openmp else (tuned, [])
        for more, pool in (parallel, (tuned, []), ([], [])):  # the best options that this compiler supports
            line = [*words, *flags, *more, *map(str, sources), *pool, "-o", str(out), "-lm"]
            try:
                done = _run(line)
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"{command!r} did not compile the C kernels in {LONGEST} seconds: start again when the machine has less to do"
                ) from None
            if done.returncode == 0:
                out.chmod(0o700)
                digest = Path(folder) / _digest(made).name
                digest.write_text(_sha256(out))
                os.replace(digest, _digest(made))
                os.replace(out, made)  # atomic: another process may be compiling the same
                return made
    raise RuntimeError(f"{command!r} cannot compile the C kernels: {done.stderr.strip()[:400]}")


def _run(line: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line, capture_output=True, text=True, errors="replace", timeout=LONGEST, check=check
    )


def _openmp() -> Path | None:
    """PyTorch's thread pool, to be shared: two pools would compete for cores."""
    root = Path(torch.__file__).parent
    found = [*sorted(root.glob("lib/libgomp*.so*")), *sorted(root.parent.glob("torch.libs/libgomp*.so*"))]
    if found:
        return found[0]
    others = _loaded()  # PyTorch of a distribution, whose libraries lie elsewhere
    return others[0] if len(others) == 1 else None


def _loaded() -> list[Path]:
    """The OpenMP libraries of this process; each has the functions that GCC calls."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {Path(line.split(maxsplit=5)[-1]) for line in lines}
    return sorted(f for f in files if re.match(r"lib(gomp|omp|iomp5)[-.]", f.name))


def _processor() -> str:
    """The processor, on which ``-march=native`` depends: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.node()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _digest(made: Path) -> Path:
    return made.with_suffix(".sha256")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _trusted(made: Path) -> bool:
    """Whether a library in the cache folder may be loaded: a file of this user that nobody else can write, with the content it was made with."""
    try:
        for file in (made, _digest(made)):
            found = file.lstat()
            own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
            if not (stat.S_ISREG(found.st_mode) and own) or found.st_mode & 0o022:
                return False
        return _digest(made).read_text() == _sha256(made)
    except OSError:
        return False


def _folder() -> Path:
    """The cache folder. Only this user may own and write it, since its files are loaded and run.

    Raises:
        RuntimeError: it belongs to another user, or others can write it.
    """
    root = (
        os.environ.get("SPECDEC_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    )
    folder = Path(root)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            raise RuntimeError(f"{folder} belongs to another user: set SPECDEC_CACHE to a folder of your own")
        if folder.stat().st_mode & 0o022:
            raise RuntimeError(
                f"others can write {folder}, so its files may be anybody's: remove it, or set SPECDEC_CACHE to a folder that only you can write"
            )
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.mkdtemp(prefix="specdec-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
