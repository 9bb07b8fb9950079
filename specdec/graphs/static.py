"""Steps of fixed shapes: a forward whose inputs are all in tensors at fixed addresses, so that it can be captured and replayed.

A step is made for a ``Bucket``: a number of rows, and the most new tokens and slots of a row. Calls that fit write their inputs into its
tensors and replay it. The rest of the bucket is *padding*: tokens that belong to no row, whose keys and values go to a spare slot that
no query sees, and rows without tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache.static import StaticStore
from specdec.graphs.staging import Program, Staged, pad
from specdec.kernels.attention import AttentionPlan, static_reference
from specdec.kernels.attention.lowered import NODES, Lowered, lower, written_out
from specdec.kernels.attention.reach import Reach, binding

SHORTEST = 256  # slots of the smallest bucket
ALL = -1  # every token's logits are wanted
Forward = Callable[..., Tensor | None]  # as ``Packed.forward``


class Bucket(NamedTuple):
    """The most that a step is made for: ``rows`` of ``queries`` new tokens and of ``length`` slots, the new ones included.

    ``kept``: tokens of a row whose logits are wanted; 0 for no logits, ``ALL`` where all are. ``nodes``: of a tree, 0 for chains.
    """

    rows: int
    queries: int
    kept: int
    length: int
    nodes: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.queries

    @property
    def chosen(self) -> int:
        """How many tokens are selected by index for their logits."""
        return self.rows * max(self.kept, 0)


def bucket_of(counts: Sequence[int], kept: Sequence[int], longest: int, slots: int, nodes: int = 0) -> Bucket:
    """The bucket for rows of ``counts [R]`` new tokens, of which the last ``kept [R]`` are wanted, in rows of ``slots`` slots.

    Counts are not rounded, since they repeat from round to round. Rows are rounded up by ``rows_for``, slots and nodes to powers of two.
    """
    most = ALL if list(kept) == list(counts) else max(kept)
    return Bucket(
        rows_for(len(counts)),
        max(counts),
        most,
        min(power(longest, SHORTEST), slots),
        power(nodes) if nodes else 0,
    )


def rows_for(n: int) -> int:
    """Rows of a step for ``n`` rows: a power of two, above 8 a multiple of 8."""
    return -(-n // 8) * 8 if n > 8 else power(n)


def power(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << (n - 1).bit_length())


class StaticPlan:
    """Stands in for an ``AttentionPlan`` in a step, with its contents in tensors."""

    watch = None
    tree = None
    bounded = False

    def __init__(self, lowered: Lowered, slots: Tensor, ordered: bool = False):
        """``ordered``: slot numbers are positions, and all positions are below ``lowered.max_length`` in every replay."""
        self.lowered, self.slots, self.ordered = lowered, slots, ordered

    @property
    def length(self) -> list[int]:
        """The most slots of any row."""
        return [self.lowered.max_length]

    def slots_on(self, device: torch.device) -> Tensor:
        if device != self.slots.device:
            raise RuntimeError(f"a layer is on {device} and the first one on {self.slots.device}")
        return self.slots

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: Reach,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Attention of ``query [1, Hq, T, D]``, as ``kernels.attention.attention``."""
        window = binding(window, self.lowered.max_length)
        return attend(query, keys, values, self.lowered, scale, window, softcap, sink_logits)


def attend(query: Tensor, keys: Tensor, values: Tensor, lowered: Lowered, *more: Any) -> Tensor:
    if query.device.type != "cuda":
        return static_reference.attend(query, keys, values, lowered, *more)
    from specdec.kernels.attention import triton_backend

    _, _, softcap, sink_logits = more
    why = triton_backend.supports(query, softcap, sink_logits)
    if why:
        raise RuntimeError(f"Triton's kernel cannot serve the step: {why}")
    return triton_backend.launch(query, keys, values, lowered, *more)


class StaticStep(Program):
    """One forward of a bucket.

    Args:
        forward: as ``Packed.forward``. store: where keys and values go. device: of the model.
        drafted: how many proposed tokens may stay on the device (``update``). taps: layers whose activations are wanted.
    """

    def __init__(
        self,
        forward: Forward,
        store: StaticStore,
        bucket: Bucket,
        device: torch.device,
        drafted: int = 0,
        taps: Sequence[int] = (),
    ):
        self.forward, self.store, self.bucket, self.taps = forward, store, bucket, tuple(taps)
        R, T = bucket.rows, bucket.tokens
        fields: dict[str, tuple[str, tuple[int, ...]]] = {
            **dict.fromkeys(("ids", "positions", "slots", "source"), ("i8", (T,))),
            "keep": ("i8", (bucket.chosen,)),
            "starts": ("i4", (R + 1,)),
            **dict.fromkeys(("length", "rows", "root"), ("i4", (R,))),
        }
        fields |= table_of(store, R, bucket.length)
        if bucket.nodes:
            fields |= {"words": ("i8", (T,)), "depth": ("i4", (R, bucket.nodes))}
        self.staged = Staged(fields, device)
        on = self.staged.on
        with torch.inference_mode(False):
            self.drafted = torch.zeros(drafted, dtype=torch.long, device=device)
        self.plan: Any = StaticPlan(
            Lowered(
                starts=on["starts"],
                length=on["length"],
                rows=on["rows"],
                root=on["root"],
                words=on.get("words"),
                depth=on.get("depth"),
                table=on.get("table"),
                seen=None,
                max_count=bucket.queries,
                max_length=bucket.length,
            ),
            on["slots"],
            ordered=True,
        )

    def body(self) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Wanted logits ``[K, V]``, followed by the padding's (``None`` where none are wanted), and activations ``[T, E]`` of each tap."""
        on, bucket = self.staged.on, self.bucket
        self.store.begin()
        ids = on["ids"]
        if len(self.drafted):
            source = on["source"]
            ids = torch.where(source < 0, ids, self.drafted.index_select(0, source.clamp(min=0)))
        keep: Any = False
        if bucket.kept:
            keep = None if bucket.kept == ALL else on["keep"]
        caught: dict[int, list[Tensor]] = {tap: [] for tap in self.taps}
        logits = self.forward(self.store, self.plan, ids, on["positions"], keep, caught)
        return logits, tuple(x for (x,) in caught.values())

    def update(
        self,
        plan: AttentionPlan,
        ids: Sequence[int],
        positions: Sequence[int],
        keep: Sequence[int],
        drafted: Tensor | None = None,
        source: Sequence[int] = (),
    ) -> None:
        """Send the inputs of a call that fits the bucket, in one copy.

        Args:
            plan: made on the host. ids, positions: ``[T]``. keep: the tokens whose logits are wanted, ascending.
            drafted: proposed tokens on the device. source: ``[T]`` the index of a token in ``drafted``, -1 for one of ``ids``.
        """
        array, T, R = self.staged.begin(), len(ids), len(plan.rows)
        assert plan.slots is not None
        pad(array["ids"], ids)
        pad(array["positions"], positions)
        pad(array["slots"], plan.slots.numpy(), self.store.spare)
        pad(array["source"], source, -1)
        if self.bucket.chosen:
            pad(array["keep"], keep)
        array["starts"][0] = 0
        pad(array["starts"][1:], np.cumsum(plan.counts), T)
        pad(array["length"], plan.length)
        pad(array["rows"], plan.rows)
        pad(array["root"], plan.length if plan.tree is None else np.asarray(plan.tree.root))
        if plan.table is not None:
            tabulate(array["table"], plan.table)
        if self.bucket.nodes:
            low = lower(plan, "cpu")
            assert low.words is not None
            assert low.depth is not None
            pad(array["words"], low.words.numpy())
            array["depth"][:] = 0
            array["depth"][:R, : low.depth.shape[1]] = low.depth.numpy()
        if drafted is not None:
            self.drafted[: drafted.numel()].copy_(drafted.reshape(-1), non_blocking=True)
        self.staged.send()


def table_of(store: StaticStore, rows: int, length: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The input of a step that has the pages of ``rows`` rows of at most ``length`` slots; none where the store has no pages."""
    return {"table": ("i4", (rows, -(-length // store.page)))} if store.page else {}


def tabulate(array: np.ndarray, table: Sequence[Sequence[int]]) -> None:
    """Put the pages of each row of ``table`` into a row of ``array [R, P]``, followed by 0. Pages beyond a step's slots are left out."""
    array[:] = 0
    for row, pages in zip(array, table):
        row[: len(pages)] = pages[: len(row)]


def fits(plan: AttentionPlan) -> bool:
    """Whether what a plan's queries see follows from a few integers a row, as a step needs."""
    return not written_out(plan)


def nodes_of(plan: AttentionPlan) -> int:
    """Nodes of a plan's largest tree; 0 for chains."""
    if plan.tree is None:
        return 0
    used = np.asarray(plan.length) - plan.tree.root
    return max(1, min(int(used.max()), plan.tree.depth.shape[1], NODES))
