"""Optional C kernels for the CPU, compiled at first use if there is a compiler."""

from specdec.kernels.native.build import library, reason

__all__ = ["library", "reason"]
