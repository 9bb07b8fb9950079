"""``python -m recipes.gpu.tied MODULE ...`` runs a module as ``python -m MODULE ...`` in a process that is killed when its parent ends.

However the parent ends, SIGKILL included. On Linux; elsewhere the process only ends by itself or by its parent.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

PDEATHSIG = 1  # of prctl: the signal that this process gets when its parent ends


def tie() -> None:
    """From now on this process is killed when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    tie()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
