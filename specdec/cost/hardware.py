"""A machine as two rates and two overheads, and the time of a step on it: the roofline of SPIRe (arXiv 2504.06419, §2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.arguments import numbers, positive
from specdec.cost.terms import Step


@dataclass(frozen=True)
class Hardware:
    """A machine's peak or measured rates.

    Attributes:
        name: shown in tables. flops: FLOP/s. bytes_per_second: of memory.
        overhead: fixed seconds per step. overhead_per_layer: seconds per layer of a step.
        overlapped: whether memory moves while the machine computes: a step then takes the longer of the two times, else their sum.
    Raises:
        ValueError: a rate that is not positive, or a negative overhead.
    """

    name: str
    flops: float
    bytes_per_second: float
    overhead: float = 0.0
    overhead_per_layer: float = 0.0
    overlapped: bool = True

    def __post_init__(self) -> None:
        numbers(self, "flops", "bytes_per_second", "overhead", "overhead_per_layer")
        positive(self, "flops", "bytes_per_second", hint=", per second")
        for name, extra in (("overhead", self.overhead), ("overhead_per_layer", self.overhead_per_layer)):
            if extra < 0:
                raise ValueError(f"{name} is {extra}: give seconds, at least 0")

    @property
    def intensity(self) -> float:
        """FLOPs in the time of one byte (the paper's HOI): steps of lower intensity are memory-bound."""
        return self.flops / self.bytes_per_second

    @property
    def not_overlapped(self) -> Hardware:
        """The same machine when computing waits for memory."""
        return replace(self, overlapped=False)

    def time(self, step: Step) -> float:
        """Seconds for a step."""
        compute, memory = step.flops / self.flops, step.bytes / self.bytes_per_second
        roof = max(compute, memory) if self.overlapped else compute + memory
        return roof + self.overhead + self.overhead_per_layer * step.layers


H100_PAPER = Hardware("H100 SXM, FP8, as in the paper", flops=600 * 3.35e12, bytes_per_second=3.35e12)
"""The paper's rounded ratio of 600 FLOPs a byte, the only property that multipliers depend on."""

# NVIDIA's data sheets, whose FP8 figures are with 2:4 sparsity: dense matrices reach half.
H100_FP8 = Hardware("H100 SXM, FP8", flops=1979e12, bytes_per_second=3.35e12)
H200_FP8 = Hardware("H200 SXM, FP8", flops=1979e12, bytes_per_second=4.8e12)
A100_BF16 = Hardware("A100 80 GB SXM, BF16", flops=312e12, bytes_per_second=2.039e12)
