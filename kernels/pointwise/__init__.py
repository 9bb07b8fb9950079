"""What lies between a block's matrix products and its attention, a launch each: residual and norm, rotary embedding and KV store, SwiGLU."""

from specdec.kernels.pointwise.api import MOST, Place, add_norm, silu_mul, turn, why_not

__all__ = ["MOST", "Place", "add_norm", "silu_mul", "turn", "why_not"]
