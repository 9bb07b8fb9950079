"""The generator on the GPU: bits of the CPU's, and its races; without a GPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from interpreted import interpreted  # noqa: F401 (a fixture)
from without_a_gpu import compiled

from specdec.kernels import philox
from specdec.kernels.philox import reference
from specdec.rng import ACCEPT, BONUS, Key, Philox, race_arrivals, seeds

TRITON = importlib.util.find_spec("triton") is not None
KERNELS = Path(philox.__file__).with_name("triton_kernels.py")
GPU = TRITON and torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not TRITON, reason="needs triton")

SEEDS = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**63 - 1])
AT = torch.tensor([0, 5, 4095, 2**20, 2**31])
KEYS = {
    "one a row": Key(AT, 3),
    "chain": Key(AT[:, None], torch.arange(7), 0, ACCEPT, 3),
    "tree": Key(AT[:, None], torch.arange(7), torch.arange(35).view(5, 7), BONUS),
    "captured round": Key(AT[:, None], torch.arange(5), torch.zeros(5, dtype=torch.long), BONUS),
    "more than a block": Key(AT[:, None], torch.arange(1500)),
    "none": Key(AT[:, None], torch.arange(0)),
}


def same_uniforms(key, device):
    got = philox.uniforms(SEEDS, key, device)
    assert got.device.type == device
    assert torch.equal(got.cpu(), Philox(SEEDS).uniform(key))


def same_race(rows, V, device, dtype=torch.float32, holes=0.3):
    """The first arrival, or one that arrives with it to the last bits."""
    g = torch.Generator().manual_seed(V)
    p = torch.rand(rows, V, generator=g) ** 4 * (torch.rand(rows, V, generator=g) >= holes)
    p[:, V // 2] = 0.1
    p, seed, at = p.to(dtype), seeds(V, rows), torch.arange(rows) * 3
    arrival = race_arrivals(p, seed, at)
    got = philox.race(p.to(device), seed, at).cpu()
    mine = arrival.gather(1, got[:, None])[:, 0]
    assert bool((mine <= arrival.amin(1) * (1 + 1e-14)).all())
    assert bool((p.gather(1, got[:, None]) > 0).all())


@pytest.mark.parametrize("stream", [ACCEPT, BONUS])
def test_uniforms_by_operators_are_the_same_to_the_bit(stream):
    depths = torch.arange(6)
    wanted = Philox(SEEDS).uniform(Key(AT[:, None], depths, 0, stream))
    assert torch.equal(reference.uniforms(SEEDS, AT, depths, stream), wanted)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", KEYS)
def test_interpreted_uniforms_are_the_same_to_the_bit(name):
    same_uniforms(KEYS[name], "cpu")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "V"), [(3, 1), (4, 7), (2, 1024), (2, 5000), (0, 9)])
def test_interpreted_races_have_the_same_winners(rows, V, dtype):
    same_race(rows, V, "cpu", dtype)


@pytest.mark.usefixtures("interpreted")
def test_interpreted_races_read_strided_distributions_and_refuse_shapes_that_do_not_fit():
    distribution = torch.rand(4, 6, 50, generator=torch.Generator().manual_seed(0))
    seed, at = seeds(0, 4), torch.arange(4)
    for view in (distribution[:, 2], distribution.transpose(1, 2)[:, :, 0]):
        assert torch.equal(philox.race(view, seed, at), Philox(seed).race(view, at))
    with pytest.raises(ValueError, match=r"needs \[4\] of each"):
        philox.race(distribution[:, 0], seed[:3], at)
    with pytest.raises(ValueError, match=r"probs is \[4, 6, 50\]: give \[R, V\]"):
        philox.race(distribution, seed, at)


@needs_triton
def test_kernels_that_run_nowhere_here_say_so():
    with pytest.raises(ValueError, match=r"device is on 'cpu' .*TRITON_INTERPRET=1.*rng\.Philox"):
        philox.uniforms(SEEDS, KEYS["chain"], "cpu")
    with pytest.raises(ValueError, match=r"probs is on 'cpu' .*TRITON_INTERPRET=1.*rng\.Philox"):
        philox.race(torch.rand(5, 8), SEEDS, AT)


@pytest.mark.skipif(not GPU, reason="needs triton and a GPU")
def test_on_a_gpu_numbers_and_winners_are_the_same():
    for key in KEYS.values():
        same_uniforms(key, "cuda")
    for rows, V in ((5, 50_000), (80, 4096), (3, 151_936)):
        same_race(rows, V, "cuda")
        same_race(rows, V, "cuda", torch.bfloat16, 0.99)
    distribution = torch.rand(4, 3, 5000)
    at = torch.arange(12).view(4, 3)
    assert torch.equal(
        Philox(SEEDS[:4]).race(distribution.cuda(), at.cuda()).cpu(), Philox(SEEDS[:4]).race(distribution, at)
    )


COMPILE = """
    TYPES = dict.fromkeys(["AT", "NODE", "WHO", "SEED", "TOKEN"], "*i64") | dict.fromkeys(["OUT", "TIME"], "*fp64")

    def one(kernel, arch, distribution, **const):
        build(kernel, arch, {**TYPES, "P": "*" + distribution}, ("V", "stride"), 4, **const)

    for arch in (80, 90):
        one(k.uniform_kernel, arch, "fp32", BLOCK=1024)
        for distribution in ("fp32", "bf16"):
            one(k.race_kernel, arch, distribution, TARGET=3, STEPS=4, BLOCK=1024)
        one(k.race_kernel, arch, "fp64", TARGET=3, STEPS=4, BLOCK=1024, splits=1)
"""


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_kernels_compile_for_gpus_without_spilling(tmp_path):
    said = compiled(COMPILE, KERNELS, tmp_path)
    assert said.count("race_kernel") == 6
