"""Several threads in one decoder, and a process that ends while one of them drafts."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny import tiny

import specdec as sd

ROWS = [[[5] * length, [7, 8]] for length in (3, 17, 9)]


@pytest.mark.parametrize(
    "family",
    [
        "gpt_neo",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("mpt", "gptj", "falcon", "llama")),
    ],
)
def test_threads_share_a_decoder(family):
    decoder = sd.decoder(tiny(family)).draft(tiny(family, seed=1), length=3).greedy().build()
    alone = [decoder.generate(rows, 16).ids for rows in ROWS]
    found: list[object] = [None] * 3
    start = threading.Barrier(3)

    def decode(i):
        start.wait()
        try:
            found[i] = [decoder.generate(ROWS[i], 16).ids for _ in range(3)]
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[ids] * 3 for ids in alone]


UNFINISHED = """
import specdec as sd
from specdec.executors import Pipelined
from tiny import tiny

decoder = sd.decoder(tiny("llama")).draft(tiny("llama", seed=1), length=8).executor(Pipelined(workers="threads")).build()
pieces = decoder.stream([[1, 2, 3]] * 4, 100)
for _ in range(5):
    next(pieces)
print("ends", flush=True)
"""


@pytest.mark.slow
def test_a_process_ends_while_a_thread_drafts():
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
