"""Triton kernels compiled for GPUs that are not there, in a process without the interpreter: registers and spills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def compiled(script: str, kernels: Path, folder: Path) -> str:
    """What ``script`` prints, run on its own with ``build`` and, as ``k``, the module in file ``kernels``, which needs Triton alone."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parent)}
    start = f"""
import importlib.util
from functools import partial
from without_a_gpu import build
spec = importlib.util.spec_from_file_location("kernels", {str(kernels)!r})
k = importlib.util.module_from_spec(spec)
spec.loader.exec_module(k)
"""
    file = folder / "compile_all.py"
    file.write_text(start + textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def build(
    kernel: Any, arch: int, types: Mapping[str, str], aligned: Collection[str], warps: int, **const: Any
) -> None:
    """Compile one kernel for sm_``arch`` and assert that it needs at most 255 registers, and neither stack nor local memory.

    ``types``: of arguments that are not int32. ``aligned``: names of integers that are multiples of 16, as all addresses are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    sig = {a: "constexpr" if a in const else types.get(a, "i32") for a in kernel.arg_names}
    places = [i for i, (a, t) in enumerate(sig.items()) if t[0] == "*" or a in aligned]
    values = {(kernel.arg_names.index(a),): value for a, value in const.items()}
    source = ASTSource(kernel, sig, values, {(i,): [["tt.divisibility", 16]] for i in places})
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(made.asm["cubin"])
        f.flush()
        command = [str(tool), "--dump-resource-usage", f.name]
        said = subprocess.run(command, capture_output=True, text=True).stdout
    found = {key: int(n) for key, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    print(kernel.__name__, arch, found)
    assert found["REG"] <= 255, said
    assert found["STACK"] == found["LOCAL"] == 0, said  # where spilled registers go
