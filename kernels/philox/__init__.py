"""The keyed generator of ``specdec.rng`` on a GPU: the same numbers, and whole races in one pass over the probabilities."""

from specdec.kernels.philox.api import race, uniforms

__all__ = ["race", "uniforms"]
