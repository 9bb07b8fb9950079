"""How Triton's attention is tiled: queries and slots of a tile, warps, stages and registers, for each kind of call."""

from __future__ import annotations

from typing import NamedTuple

import torch

REGISTERS = 255  # of a thread: all that there are


class Config(NamedTuple):
    """How a call is tiled: ``queries`` (times heads that share a KV head) and ``slots`` of a tile, for Triton.

    ``registers``: a bound on those of a thread, if only the hardware's own, 0 for none. Without one NVIDIA's assembler spills a few
    where that lets one more program share a multiprocessor; with one it takes more where it need not.
    """

    queries: int
    slots: int
    warps: int
    stages: int
    registers: int = 0


def config(
    size: int,
    packed: int,
    itemsize: int,
    fixed: bool = False,
    written_out: bool = False,
    tree: bool = False,
    paged: bool = False,
    bent: bool = False,
) -> Config:
    """The tile for a head size, from reasoning and compiled resource usage, not from timings.

    A query tile is as small as holds all ``packed`` queries (queries of a row times heads of a group), up to 64; ``fixed``
    makes it independent of them. A slot tile keeps keys and values of three stages in at most half of an A100's shared memory,
    so that two programs share a multiprocessor where registers allow; with a mask that is ``written_out``, and with a ``tree`` or
    pages beside 64 queries, it is smaller, since these take registers, too. Bits depend on tiles and warps, so with ``fixed``
    chains have those of trees in pages. Where slots are ``paged``, a page's number is loaded ahead of its slots, which takes two
    stages for each. ``bent``: with a window or a soft cap. Nothing is tuned at run time: equal calls are to run equal code.
    """
    queries = 64 if fixed or packed > 32 else 32 if packed > 16 else 16
    wide = power(size) * itemsize  # bytes of a slot's keys
    if itemsize == 4:  # no tensor cores for exact float32: small tiles, for registers
        return Config(min(queries, 16), 32 if size <= 64 else 16, 4 if 64 < size <= 128 else 8, 2, REGISTERS)
    stages = 5 if paged else 3
    small = fixed or tree or paged or written_out
    if wide > 256:
        slots = 16 if written_out or paged or (queries == 64 and small) else 32
        queries = min(queries, 32) if written_out else queries
        return Config(queries, slots, 4 if queries == 16 else 8, stages, REGISTERS)
    if written_out:
        slots = 16 if queries == 64 and wide > 128 else 32
        return Config(queries, slots, 8 if queries == 64 else 4, stages, REGISTERS)
    if queries < 64:
        return Config(queries, 64, 4, stages, REGISTERS if bent or (tree and wide <= 128) else 0)
    if wide <= 128:
        return Config(queries, 64, 8 if small else 4, stages)
    return Config(queries, 32 if small else 64, 8, stages)


def bound(c: Config) -> dict[str, int]:
    """On a thread's registers, as Triton takes it for NVIDIA."""
    return {"maxnreg": c.registers} if c.registers and torch.version.hip is None else {}


def power(size: int) -> int:
    """The least power of two that holds ``size``, and a matrix product takes: 16 at least."""
    return max(16, 1 << (size - 1).bit_length())
