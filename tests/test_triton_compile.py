"""The Triton attention kernel compiles for sm_80 and sm_90, in each mode with its tile, and no register is spilled.

As many programs as wanted fit a multiprocessor beside each other, by their registers and their shared memory.

Neither a GPU nor a driver is needed: Triton brings its assembler, and cuobjdump, which says what a kernel takes. This runs in a
process of its own, since the interpreter (``test_triton_attention``) is a choice for a whole process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

SHARED = {80: 164 << 10, 90: 228 << 10}  # bytes of shared memory of a multiprocessor
RESERVED = 1 << 10  # of these for each program
REGISTERS = 1 << 16  # of a multiprocessor, given out to warps by eights a thread
STRIDES = {"q_t", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "o_c", "o_t", "o_h"}  # multiples of 16
STRIDES |= {"p_n", "p_f", "p_q", "o_n", "o_q"}

ALL: dict[str, Any] = dict.fromkeys(("tree", "window", "initial", "softcap", "sinks"), True)

CASES: dict[str, dict[str, Any]] = {
    "decode": {"packed": 4, "direct": False},
    "verify": {"packed": 24, "sinks": True},
    "verify, window and soft cap": {"packed": 48, "softcap": True, "window": True},
    "tree": {"packed": 24, "tree": True},
    "tree, window, in chunks": {"packed": 48, "tree": True, "window": True, "direct": False},
    "first positions and a window": {"packed": 24, "window": True, "initial": True},
    "tree, first positions and a window": {
        "packed": 48,
        "tree": True,
        "window": True,
        "initial": True,
        "direct": False,
    },
    "pages, first positions and a window": {"packed": 24, "page": 16, "window": True, "initial": True},
    "mask": {"packed": 32, "seen": True},
    "ring": {"packed": 4, "ring": True},
    "pages": {"packed": 24, "page": 64},
    "small pages, equal bits": {"packed": 24, "page": 16, "tree": True, "direct": False, "fixed": True},
    "head size 64": {"packed": 48, "size": 64, "tree": True},
    "head size 80": {"packed": 24, "size": 80, "tree": True},
    "one query head a KV head": {"packed": 6, "group": 1},
    "eight query heads a KV head": {"packed": 48, "group": 8},
    "head size 256": {"packed": 48, "size": 256, "tree": True},
    "head size 256, mask": {"packed": 16, "size": 256, "seen": True},
    "float32": {"packed": 24, "dtype": "fp32", "tree": True},
    "decode, eight bits": {"packed": 4, "direct": False, "kv": "fp8e4nv"},
    "tree, eight bits": {"packed": 24, "tree": True, "kv": "fp8e4nv"},
    "all, 64 queries, eight bits": {"packed": 48, "group": 8, **ALL, "page": 256, "kv": "fp8e4nv"},
    "pages, eight bits of e5m2": {"packed": 24, "page": 64, "kv": "fp8e5"},
    "all, head size 256, eight bits": {"packed": 24, "size": 256, **ALL, "page": 16, "kv": "fp8e4nv"},
    "mask, head size 64, eight bits": {"packed": 64, "group": 1, "size": 64, "seen": True, "kv": "fp8e4nv"},
    "ring, eight bits": {"packed": 4, "ring": True, "kv": "fp8e4nv"},
    # Those with most in registers of their class:
    "mask, 64 queries": {"packed": 64, "group": 8, "seen": True},
    "mask, head size 80, pages": {"packed": 4, "size": 80, "seen": True, "page": 16},
    "mask, head size 64, pages": {"packed": 64, "group": 1, "size": 64, "seen": True, "page": 16},
    "mask, head size 256, pages": {"packed": 48, "group": 8, "size": 256, "seen": True, "page": 16},
    "pages, first positions and a window, 64 queries": {
        "packed": 48,
        "group": 8,
        "page": 16,
        "window": True,
        "initial": True,
    },
    "tree, window, pages": {"packed": 48, "group": 8, "tree": True, "window": True, "page": 64},
    "all": {"packed": 24, **ALL, "page": 16},
    "all, 64 queries": {"packed": 48, "group": 8, **ALL, "page": 256},
    "all, head size 64": {"packed": 48, "group": 8, "size": 64, **ALL, "page": 256},
    "all, head size 256": {"packed": 24, "size": 256, **ALL, "page": 16},
    "head size 256, in chunks": {"packed": 24, "size": 256, "direct": False},
    "first positions, a window and a soft cap, head size 80": {
        "packed": 24,
        "size": 80,
        "window": True,
        "initial": True,
        "softcap": True,
        "direct": False,
    },
    "tree, window, head size 64": {"packed": 24, "size": 64, "tree": True, "window": True},
    "all, head size 256, equal bits": {"packed": 4, "size": 256, **ALL, "page": 256, "fixed": True},
    "all, float32, head size 80": {"packed": 24, "size": 80, "dtype": "fp32", **ALL, "page": 16},
    "pages, first positions and a window, float32": {
        "packed": 24,
        "dtype": "fp32",
        "page": 16,
        "window": True,
        "initial": True,
    },
    "all, float32, head size 256": {"packed": 24, "size": 256, "dtype": "fp32", **ALL, "page": 16},
}

# Registers of a thread, recorded as the most of Triton 3.6.0 and 3.9.0 and sm_80 and sm_90, with a few to spare, and how many
# programs are to share a multiprocessor. Kernels of eight bits are compiled for sm_90 alone. 255 is all that there are: such a kernel is
# bounded, or at that limit, and its stack tells.
LIMITS: dict[str, tuple[int, int]] = {
    "decode": (160, 2),
    "verify": (200, 2),
    "verify, window and soft cap": (208, 1),
    "tree": (216, 2),
    "tree, window, in chunks": (200, 1),
    "first positions and a window": (255, 2),
    "tree, first positions and a window": (200, 1),
    "pages, first positions and a window": (255, 2),
    "mask": (255, 2),
    "ring": (160, 2),
    "pages": (224, 2),
    "small pages, equal bits": (200, 1),
    "head size 64": (208, 1),
    "head size 80": (216, 2),
    "one query head a KV head": (136, 2),
    "eight query heads a KV head": (192, 1),
    "head size 256": (255, 1),
    "head size 256, mask": (176, 3),
    "float32": (255, 2),
    "decode, eight bits": (136, 2),
    "tree, eight bits": (255, 2),
    "all, 64 queries, eight bits": (192, 1),
    "pages, eight bits of e5m2": (255, 2),
    "all, head size 256, eight bits": (176, 1),
    "mask, head size 64, eight bits": (176, 1),
    "ring, eight bits": (144, 2),
    "mask, 64 queries": (255, 1),
    "mask, head size 80, pages": (192, 2),
    "mask, head size 64, pages": (240, 1),
    "mask, head size 256, pages": (224, 1),
    "pages, first positions and a window, 64 queries": (208, 1),
    "tree, window, pages": (224, 1),
    "all": (255, 2),
    "all, 64 queries": (248, 1),
    "all, head size 64": (216, 1),
    "all, head size 256": (184, 1),
    "head size 256, in chunks": (168, 1),
    "first positions, a window and a soft cap, head size 80": (248, 2),
    "tree, window, head size 64": (208, 2),
    "all, head size 256, equal bits": (255, 1),
    "all, float32, head size 80": (248, 2),
    "pages, first positions and a window, float32": (240, 2),
    "all, float32, head size 256": (240, 1),
    "merge": (40, 16),
}


def attend_job(
    packed: int,
    size: int = 128,
    dtype: str = "bf16",
    kv: str | None = None,
    group: int = 4,
    tree: bool = False,
    window: bool = False,
    initial: bool = False,
    softcap: bool = False,
    seen: bool = False,
    ring: bool = False,
    sinks: bool = False,
    page: int = 0,
    direct: bool = True,
    fixed: bool = False,
) -> dict[str, Any]:
    """What ``triton_backend.launch`` would compile."""
    from specdec.kernels.attention import tiles

    itemsize = 4 if dtype == "fp32" else 2
    c = tiles.config(
        size, packed, itemsize, fixed, written_out=seen, tree=tree, paged=page > 0, bent=window or softcap
    )
    wide = tiles.power(size)
    given = dict.fromkeys(("Keys", "Values"), f"*{kv or dtype}") | {"Query": f"*{dtype}"}
    given |= dict.fromkeys(("Starts", "Length", "Rows", "Root"), "*i32")
    given |= {"Out": f"*{dtype}" if direct else "*fp32", "Lse": None if direct else "*fp32"}
    given |= {"Words": "*i64" if tree else None, "Depth": "*i32" if tree else None}
    given |= {"initial": "i32" if initial else None}
    given |= {"Table": "*i32" if page else None, "Seen": "*u8" if seen else None}
    given |= {"Position": "*i64" if ring else None}
    given |= {"Sinks": f"*{dtype}" if sinks else None, "factor": "fp32", "bend": "fp32"}
    constants = {"G": group, "D": size, "DV": size, "BD": wide, "BDV": wide, "BM": c.queries, "BN": c.slots}
    constants |= {"PAGE": page, "WINDOW": window, "SOFTCAP": softcap, "DIRECT": direct, "UPCAST": False}
    return {
        "kernel": "attend_kernel",
        "given": given,
        "constants": constants,
        "warps": c.warps,
        "stages": c.stages,
        "options": tiles.bound(c),
    }


def merge_job() -> dict[str, Any]:
    given = {"Parts": "*fp32", "PartLse": "*fp32", "Out": "*bf16", "Lse": "*fp32", "Sinks": "*bf16"}
    constants = {"DV": 128, "BDV": 128, "NATURAL": False}
    return {"kernel": "merge_kernel", "given": given, "constants": constants, "warps": 2, "stages": 1}


def build(kernels: Any, job: dict[str, Any], arch: int) -> dict[str, Any]:
    """Registers, stack and shared memory of a compiled job."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, given = getattr(kernels, job["kernel"]), job["given"]
    constants = job["constants"] | {name: None for name, kind in given.items() if kind is None}
    signature = {a: "constexpr" if a in constants else given.get(a, "i32") for a in kernel.arg_names}
    places = {a: (i,) for i, a in enumerate(kernel.arg_names)}
    aligned = {
        places[a]: [["tt.divisibility", 16]]
        for a, kind in signature.items()
        if kind[0] == "*" or a in STRIDES
    }
    source = ASTSource(kernel, signature, {places[a]: value for a, value in constants.items()}, aligned)
    options = {"num_warps": job["warps"], "num_stages": job["stages"]} | job.get("options", {})
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = made.asm["ptx"]
    tensor_cores = "wgmma.mma_async" in ptx or "mma.sync" in ptx
    return {
        "warps": job["warps"],
        "shared": made.metadata.shared,
        "tensor_cores": tensor_cores,
        "copies": "cp.async" in ptx,
        **resources(made.asm["cubin"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and local memory: those of spilled registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = {key: int(n) for key, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said.stdout)}
    return {"registers": found["REG"], "stack": found["STACK"], "local": found["LOCAL"]}


def main() -> None:
    """A job from standard input; the kernels' file needs nothing but triton."""
    path, job, arch = json.load(sys.stdin)
    spec = spec_from_file_location("triton_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    kernels = module_from_spec(spec)
    sys.modules["triton_kernels"] = kernels
    spec.loader.exec_module(kernels)
    print(json.dumps(build(kernels, job, arch)))


if __name__ == "__main__":
    main()
else:
    import pytest

    # Of each kind one; the others are slow.
    FAST = {("all", 90), ("merge", 80)}

    def compiled(job: dict[str, Any], arch: int, cache: Path) -> dict[str, Any]:
        pytest.importorskip("triton")
        import specdec.kernels.attention as package

        path = Path(package.__file__).parent / "triton_kernels.py"
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps([str(path), job, arch]),
            env={**environment, "TRITON_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    @pytest.mark.parametrize(
        ("name", "arch"),
        [
            pytest.param(name, arch, marks=() if (name, arch) in FAST else pytest.mark.slow)
            for name in [*CASES, "merge"]
            for arch in SHARED
            if arch >= 89 or "eight bits" not in name  # which the backend refuses there
        ],
    )
    def test_compiles_without_spills(name, arch, tmp_path):
        job = merge_job() if name == "merge" else attend_job(**CASES[name])
        got = compiled(job, arch, tmp_path)
        registers, programs = LIMITS[name]
        assert got["registers"] <= registers
        assert got["stack"] == got["local"] == 0
        assert programs <= REGISTERS // (-(-got["registers"] // 8) * 8 * 32 * got["warps"])
        assert programs <= SHARED[arch] // (got["shared"] + RESERVED)
        if name != "merge":
            assert got["copies"]  # slots are loaded ahead
            assert got["tensor_cores"] == ("float32" not in name)
        if name in ("decode", "verify", "tree", "pages", "all"):
            # There is room for keys and values twice; those of pages need more stages for it, since a page's number comes first.
            tile = job["constants"]
            assert got["shared"] >= 2 * tile["BN"] * (tile["BD"] + tile["BDV"]) * 2
