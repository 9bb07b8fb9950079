"""Stage p of the GPU suite: where the time of a round goes, by PyTorch's profiler: the device's kernels, and what the host calls.

Rounds of plain decoding and of a draft with an eighth of the layers, at the 8B shape with random weights, after their steps are captured.
``busy`` is the share of a round in which a kernel runs. The chrome traces are in an archive beside the report.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging

import specdec as sd
from recipes.gpu.rounds import PLAIN, K, decoders, prompts
from recipes.gpu.stage import Stage

POINTS = ((1, 1024), (16, 1024))
TOY_POINTS = ((2, 16),)
PROFILED = (PLAIN, "a draft, greedy", "a draft, sampled", "a draft, greedy, ahead")
ROUNDS = 5
WARM = 12  # rounds before: shapes are captured when they occur again
TOP = 12  # kernels of a row
TRACES = "traces.tar"
CALLS = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaStreamSynchronize",
         "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc")  # fmt: skip


def run(stage: Stage) -> None:
    logging.set_verbosity_error()
    # With CUDA graphs alive, CUPTI may crash when it is set up for a second profile: PyTorch sets both for its own graphs.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    if stage.folder is not None:
        (stage.folder / TRACES).unlink(missing_ok=True)  # an earlier run's
    # Graphs that are made before the first profile may hide their kernels from it.
    if stage.device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            torch.zeros(1, device=stage.device)
    made = {name: decoder for name, decoder in decoders(stage).items() if name in PROFILED}
    for batch, context in TOY_POINTS if stage.toy else POINTS:
        ids = prompts(stage, batch, context)
        for name, decoder in made.items():
            case = f"{name}, {batch} x {context}"
            if stage.late(case, 0.0 if stage.toy else 8.0):
                continue
            with stage.case(case):
                one(stage, case, decoder, ids)


def one(stage: Stage, case: str, decoder: sd.Decoder, ids: torch.Tensor) -> None:
    """A row of a decoder's rounds."""
    warm = 3 if stage.toy else WARM
    tracer = Tracer(stage, warm)
    new = (warm + ROUNDS + 3) * (1 if case.startswith("plain") else K + 1)
    decoder.generate(ids, new, seed=0, eos_token_id=(), on_round=tracer)
    made = tracer.profiled
    events = made.key_averages()
    kernels = [e for e in events if e.device_type.name == "CUDA"]
    if stage.device.type == "cuda":
        spent = {e.key: (e.self_device_time_total / ROUNDS, e.count / ROUNDS) for e in kernels}
    else:  # a dry run: operators of the host
        spent = {e.key: (e.self_cpu_time_total / ROUNDS, e.count / ROUNDS) for e in events}
    device = sum(microseconds for microseconds, _ in spent.values()) * 1e-6
    calls = {e.key: e.count / ROUNDS for e in events if e.key in CALLS}
    top = sorted(spent.items(), key=lambda item: -item[1][0])[:TOP]
    stage.row(
        case, tracer.seconds, device_seconds=device, busy=device / tracer.seconds,
        kernels={key[:90]: [round(t, 2), n] for key, (t, n) in top}, launches=sum(n for _, n in spent.values()),
        calls=calls, note=f"busy {device / tracer.seconds:.0%} of {1e3 * tracer.seconds:.2f} ms, with the profiler",
    )  # fmt: skip
    for key, (microseconds, count) in top[:6]:
        stage.row(f"{case}: {key[:70]}", microseconds * 1e-6, per_round=count, note=f"{count:g} a round")
    if stage.folder is not None and stage.device.type == "cuda":
        with tempfile.TemporaryDirectory() as folder, tarfile.open(stage.folder / TRACES, "a") as traces:
            file = Path(folder, f"{case.replace(', ', '_').replace(' ', '')}.json.gz")
            made.export_chrome_trace(str(file))
            traces.add(file, file.name)


class Tracer:
    """Profiles some rounds; called after every one.

    Attributes:
        profiled: the profile. seconds: of a profiled round.
    """

    def __init__(self, stage: Stage, warm: int):
        self.stage, self.warm, self.number = stage, warm, 0
        activities = [ProfilerActivity.CPU]
        if stage.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiled: Any = profile(activities=activities)
        self.seconds = 0.0

    def __call__(self, _: Any) -> None:
        self.number += 1
        if self.number == self.warm:
            self.stage.sync()
            self.profiled.start()
            self.began = perf_counter()
        if self.number == self.warm + ROUNDS:
            self.stage.sync()
            self.seconds = (perf_counter() - self.began) / ROUNDS
            self.profiled.stop()
