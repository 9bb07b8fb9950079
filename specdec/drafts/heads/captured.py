"""A head's whole chain as one captured step, as ``graphs.chain``: all steps of the head, their draws and the ids in between, without the host.

The slots of a block and what they see follow from the anchors, so the step computes both. Rows of the memory that no row of the batch uses are
padding: they write to their own slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specdec.cache.ring import Ring
from specdec.cache.static import StaticStore
from specdec.drafts.heads.contract import Sight
from specdec.drafts.heads.model import HeadModel
from specdec.drafts.heads.slots import HeadState, whole
from specdec.graphs.chain import Drawn, Draws, first_rows, uniforms_of
from specdec.graphs.programs import Programs
from specdec.graphs.staging import Program, Staged, pad
from specdec.graphs.static import SHORTEST, StaticPlan, power
from specdec.kernels.attention import AttentionPlan, attention
from specdec.kernels.attention.lowered import Lowered
from specdec.kernels.device import to_device
from specdec.masks import sees
from specdec.masks.text import known
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context


class HeadShape(NamedTuple):
    """What a chain is captured for: the first ``rows`` of the memory and the first ``length`` slots of each, and ``steps`` draws.

    ``carried`` and ``kept`` are the shape and the dtype of what ``read`` carried for a row; ``None`` if nothing was.
    """

    rows: int
    length: int
    steps: int
    sampling: Sampling
    carried: tuple[int, ...] | None
    kept: torch.dtype | None


class HeadChain(Program):
    """``steps`` draws of every row.

    Args:
        ring: in the memory of ``store``; its extra slots are those of the block.
    """

    def __init__(self, head: HeadModel, ring: Ring, store: StaticStore, shape: HeadShape):
        self.head, self.store, self.shape = head, store, shape
        # Not the ring itself, which would hold its lease: its memory would never be lent again.
        self.sinks, self.size, self.extra = ring.sinks, ring.size, ring.extra
        # Slots that the text takes by turns; ``None`` where it has one for each position.
        self.wraps = None if whole(ring) else ring.slots - ring.extra
        R = shape.rows
        fields = {
            **dict.fromkeys(("ids", "anchor", "limit"), ("i8", (R,))),
            "uniforms": ("f8", (shape.steps, R)),
        }
        self.staged, self.carry = Staged(fields, head.device), None
        if shape.carried is not None:
            with torch.inference_mode(False):
                self.carry = torch.zeros(R, *shape.carried, dtype=shape.kept, device=head.device)

    def body(self) -> tuple[Tensor, Tensor | None]:
        """Tokens ``[rows, steps]`` and their distributions."""
        on, head = self.staged.on, self.head
        at, memo, token = StaticAnchors(self), self.carry, on["ids"]
        draws = Draws(on, self.shape.sampling)
        for n in range(self.shape.steps):
            logits, memo = head.step(n, memo, token, at)
            token = draws.draw(head.widened(logits))
        return draws.made()


class StaticAnchors:
    """``contract.Anchors`` of a captured chain: as ``slots.SlotAnchors``, in operators that can be captured.

    Where all of the text is held, the block follows it, in the slots of its own positions, so that the slots in use are the first ones.
    """

    def __init__(self, chain: HeadChain):
        self.chain, self.positions = chain, list[Tensor]()

    def count(self, most: int) -> int:
        """As ``contract.Anchors.count``."""
        return min(self.chain.shape.steps, most)

    def slots(self, first: int, count: int | None = None, full: bool = False) -> StaticPass:
        """As ``contract.Anchors.slots``."""
        chain = self.chain
        store, mask, sinks, extra = chain.store, chain.head.mask, chain.sinks, chain.extra
        anchor, wide = chain.staged.on["anchor"][:, None], 1 if count is None else count
        device, R = anchor.device, len(anchor)
        query = anchor + (first + torch.arange(wide, device=device))  # [R, wide]
        used = sum(p.shape[1] for p in self.positions)
        if extra < used + wide:
            raise RuntimeError(f"a block of {used + wide} slots and room for {extra}")
        self.positions.append(query)
        begin = anchor if chain.wraps is None else torch.full_like(anchor, chain.wraps)  # [R, 1]
        s, last = torch.arange(chain.shape.length, device=device), anchor - 1
        node = s - begin  # [R, S] the number in the block, negative in the text
        # The text, as in ``Ring.held``: the position that each slot holds below the anchor.
        held = torch.where(s < sinks, s, last - (last - s) % chain.size)
        text = torch.where(s < sinks, held <= last, held >= sinks)
        end = used + (wide if full else torch.arange(1, wide + 1, device=device)[:, None])
        seen = torch.where(node[:, None] < 0, text[:, None], node[:, None] < end).expand(R, wide, -1)
        if mask is not None:
            q, block = query[..., None], torch.cat(self.positions, 1)
            position = torch.where(
                node < 0, held.clamp(min=0), block.gather(1, node.clamp(0, used + wide - 1))
            )
            seen = seen & sees(mask, q, torch.minimum(position[:, None], q))
        rows = torch.arange(R, device=device)[:, None] * store.slots
        at = (rows + begin + used + torch.arange(wide, device=device)).flatten()
        own = torch.cat(self.positions, 1)

        def narrow(sight: Sight) -> Tensor:
            q, lowest = query[..., None], (anchor if sight.fixed else query + 1) - sight.window
            near = held[:, None] >= lowest[..., None]
            before = own.gather(1, node.clamp(0, used + wide - 1))[:, None] <= q
            return seen & torch.where(node[:, None] < 0, near, before | (not sight.causal))

        store.begin()
        return StaticPass(store, at, seen, query[:, 0] if count is None else query, narrow)


class BlockPlan(StaticPlan):
    """Which slots of their rows the queries of one pass see, ``seen [R, w, S]``; new entries go to flat ``slots [R * w]``."""

    def __init__(self, seen: Tensor, slots: Tensor):
        rows, wide, size = seen.shape
        number = torch.arange(rows + 1, dtype=torch.int32, device=seen.device)
        length = torch.full((rows,), size, dtype=torch.int32, device=seen.device)
        shown = seen.reshape(1, rows * wide, size).to(torch.uint8)
        parts = number * wide, length, number[:-1], length, None, None, None, shown
        super().__init__(Lowered(*parts, max_count=wide, max_length=size), slots)


class StaticPass:
    """``contract.Pass`` of a captured chain: new entries go to flat ``slots [R * w]``, and the queries see ``seen [R, w, S]``; ``narrow`` says what is seen
    in layers that see less."""

    kernels: Mapping[Any, Any] = {}

    def __init__(
        self,
        store: StaticStore,
        slots: Tensor,
        seen: Tensor,
        positions: Tensor,
        narrow: Callable[[Sight], Tensor],
    ):
        self.memory, self.plan, self.positions = store, BlockPlan(seen, slots), positions
        self._narrow = narrow

    def narrowed(self, sight: Sight) -> StaticPass:
        """As ``contract.Pass.narrowed``."""
        made = copy.copy(self)
        made.plan = BlockPlan(self._narrow(sight), self.plan.slots)
        return made

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """As ``contract.Pass.store``."""
        new = (t.reshape(-1, *t.shape[-2:]).transpose(0, 1)[None] for t in (key, value))
        self.memory.append(layer, self.plan.slots, *new)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As ``contract.Pass.__call__``."""
        self.store(layer, key, value)
        flat = query.reshape(-1, *query.shape[-2:]).transpose(0, 1)[None]
        out = attention(flat, *self.memory.layers[layer], cast(AttentionPlan, self.plan))
        return out[0].reshape(*query.shape[:-2], -1)


def drawn(
    programs: Programs,
    head: HeadModel,
    state: HeadState,
    context: Context,
    budget: Tensor,
    rng: Rng,
    sampling: Sampling,
) -> Drawn | None:
    """Chains of ``budget [B]`` tokens in rows whose text has been read up to its last token.

    Returns:
        ``None``, without side effects, where a chain cannot be captured or is not captured yet.
    """
    ring, B, steps = state.ring, context.batch, int(budget.max())
    # A user's mask need not consist of operators.
    if ring is None or sampling.reads_context or not (head.mask is None or known(head.mask)):
        return None
    if not 1 <= steps <= (steps if head.longest is None else head.longest):
        return None
    if bool(((context.length - 1 - state.known)[budget > 0] != 0).any()):
        return None  # the text is ahead of what was read
    uniforms = uniforms_of(rng, context, steps, sampling)
    if uniforms is None:
        return None
    memo = state.carry
    carried = None if memo is None else tuple(memo.shape[1:])
    kept = None if memo is None else memo.dtype
    length, anchor = ring.slots, state.known + head.leading
    if whole(ring):
        length = min(power(int(anchor.max()) + ring.extra, SHORTEST), length)
    shape = HeadShape(min(power(B), ring._whole[0].shape[1]), length, steps, sampling, carried, kept)

    def make(store: StaticStore) -> HeadChain:
        return HeadChain(head, ring, store, shape)

    def update(chain: Any) -> None:
        array = chain.staged.begin()
        pad(array["ids"], context.tokens.gather(1, state.known[:, None])[:, 0])
        pad(array["anchor"], anchor)
        pad(array["limit"], budget)
        array["uniforms"][:] = 0
        array["uniforms"][:, :B] = uniforms
        chain.staged.send()
        if state.carry is not None:
            chain.carry[:B].copy_(to_device(state.carry, chain.carry.device))

    with torch.inference_mode():
        return first_rows(programs.program(ring, (shape, ring.extra), make, update), B)
