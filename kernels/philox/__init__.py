"""The keyed generator of ``specdec.rng`` on a GPU: the same random numbers, and races in one pass over the probabilities."""

from specdec.kernels.philox.api import race, uniforms

__all__ = ["race", "uniforms"]
