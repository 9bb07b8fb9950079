"""The operators between a block's matrix products and its attention, one launch each: residual and norm, rotary embedding and KV store, SwiGLU."""

from specdec.kernels.pointwise.api import MOST, Place, add_norm, apply_rotary, silu_mul, why_not

__all__ = ["MOST", "Place", "add_norm", "apply_rotary", "silu_mul", "why_not"]
