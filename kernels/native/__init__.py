"""Small C kernels for the CPU, compiled at first use where there is a compiler; nothing needs them."""

from specdec.kernels.native.build import library, reason

__all__ = ["library", "reason"]
