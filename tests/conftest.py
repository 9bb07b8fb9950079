"""Tests use one thread a process, under any command: more wait for each other on the cores that pytest's workers already keep busy.

Child processes inherit both settings from the environment; a test of threading sets its own.
"""

from __future__ import annotations

import os
from pathlib import Path

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"  # read when torch and numpy are imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = str(Path(__file__).parents[1])
import torch  # noqa: E402

torch.set_num_threads(1)
