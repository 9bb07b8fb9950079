"""Throughput while contexts or batches grow: times summed over a generation, and the context from which larger batches gain more.

The definition is this library's: SPIRe (arXiv 2504.06419) prints its figures at fixed lengths. Every context length is assumed to be
the start of a round with the same probability 1 / τ, so the expected time of the generation is the sum of the rounds' times over
all lengths, divided by τ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from specdec.cost.hardware import Hardware
from specdec.cost.methods import Load, Method, check_tau
from specdec.cost.shapes import Shape

BATCHES, CONTEXTS = (tuple(2**power for power in range(end)) for end in (8, 21))


def growing(
    method: Method,
    target: Shape,
    load: Load,
    tau: float,
    hardware: Hardware,
    new_tokens: int,
    stride: int = 1,
) -> float:
    """Multiplier of a generation of ``new_tokens`` tokens that starts from ``load.context`` positions.

    Args:
        tau: mean tokens a round, the same at every length.
        stride: evaluate only the middle one of every ``stride`` lengths. Exact at 1; 8 is eight times faster and agrees to three digits.
    Raises:
        ValueError: ``new_tokens`` or ``stride`` below 1, or τ outside 1 to k + 1.
    """
    if new_tokens < 1:
        raise ValueError(f"new_tokens is {new_tokens}: generate at least 1")
    if stride < 1:
        raise ValueError(f"stride is {stride}: give at least 1")
    check_tau(tau, load.k if method.draft else 0)
    plain = speculative = 0.0
    for first in range(0, new_tokens, stride):
        length = min(stride, new_tokens - first)
        at = replace(load, context=load.context + first + (length - 1) / 2)
        one = method.round(target, at)
        plain += length * hardware.time(one.target)
        speculative += length * one.seconds(hardware) / tau
    return plain / speculative


def critical_context(
    method: Method,
    target: Shape,
    load: Load,
    tau: float,
    hardware: Hardware,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
) -> int | None:
    """The smallest of ``contexts`` from which the multiplier grows with every step of ``batches``; ``None`` if there is none.

    "From which": it does so at all larger ones of ``contexts`` too.

    Args:
        load: its k, terms and bytes are used. tau: mean tokens a round, the same everywhere. batches, contexts: ascending.
    Raises:
        ValueError: fewer than two batches, or batches or contexts that do not ascend.
    """
    for name, values, least in (("batches", batches, 2), ("contexts", contexts, 1)):
        if len(values) < least or any(a >= b for a, b in pairwise(values)):
            raise ValueError(f"{name} is {tuple(values)}: give at least {least}, in ascending order")
    found = None
    for context in reversed(contexts):
        loads = [replace(load, batch=batch, context=context) for batch in batches]
        multipliers = [method.round(target, one).multiplier(tau, hardware) for one in loads]
        if any(a >= b for a, b in pairwise(multipliers)):
            break
        found = context
    return found
