"""Everything but what needs them works without triton and flash-attn, and without C kernels; errors say what to install or to set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import sys

sys.modules["triton"] = sys.modules["flash_attn"] = sys.modules["flash_attn_interface"] = None
import torch
from tiny import tiny

import specdec as sd
from specdec.kernels import attention, rejection
from specdec.kernels.native import build, library, reason
from specdec.verifiers import FusedRejection

model = tiny("llama", dtype=torch.float32)
target = sd.HFModel(model)
decoder = sd.decoder(target).draft(tiny("llama", seed=1, dtype=torch.float32), length=3)
plain = sd.decoder(target).greedy().build().generate([[5, 6, 7], [9]], 8).ids
assert decoder.greedy().build().generate([[5, 6, 7], [9]], 8).ids == plain
for verifier in (sd.Rejection(), sd.Coupled(), FusedRejection()):
    assert decoder.verifier(verifier).build().generate([[5, 6, 7], [9]], 8, seed=0).stats.tokens == 16
for name in ("triton", "flash_attn"):
    assert name not in attention.available()
    try:
        sd.HFModel(model, attention=name)
    except ImportError as error:
        print(error)
logits = torch.randn(2, 4, 8)
try:
    rejection.verify(logits, torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 3]), torch.rand(2, 3), torch.rand(2), backend="triton")
except ImportError as error:
    print(error)
os.environ["SPECDEC_CACHE"] = sys.argv[1]  # of kernels, empty
for name, value in (("SPECDEC_NATIVE", "0"), ("CC", "no-such-compiler"), ("CC", "false"), ("CC", 'gcc "')):
    os.environ[name] = value
    build._made.cache_clear()
    assert library() is None
    print(reason())
    assert sd.decoder(sd.HFModel(model)).greedy().build().generate([[5, 6, 7], [9]], 8).ids == plain
    del os.environ[name]
"""


@pytest.mark.slow
def test_without_triton_and_flash_attn_and_then_without_a_compiler(tmp_path):
    here, words = Path(__file__).parent, [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert "pip install triton" in lines[0]
    assert "pip install flash-attn" in lines[1]
    assert "pip install triton" in lines[2]
    for line, why in zip(
        lines[3:], ("SPECDEC_NATIVE=0", "no-such-compiler", "false", "quotation"), strict=True
    ):
        assert why in line
    assert done.stderr.count("the C kernels for the CPU are missing") == 3  # not where the user asks for it
    assert "SPECDEC_NATIVE=0 in the environment ends this warning" in done.stderr
