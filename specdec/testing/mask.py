"""``check_mask``: tries the rules of ``docs/masks.md`` on a mask, the library's or your own."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from specdec.masks import Causal, Function, Mask, Window, block_mask, dense, for_model, intervals
from specdec.masks.show import HIDDEN, SEEN
from specdec.testing.rules import Kept, NotTried, Rule, Suite, instance

B, S = 2, 12  # rows and positions that every mask is asked about
FAR = 160  # positions of one that drives a model

CALL = Rule(
    "call",
    "define __call__(self, b, h, q_position, kv_position) -> bool, in this order, with any names, of masks.Mask or as a function",
)
ELEMENTWISE = Rule(
    "elementwise",
    "make it of operations on its arguments that broadcast, without if, and, or, and without the first or the largest position",
)
COMBINES = Rule("combines", "leave & and | to masks.Mask")
VALUE = Rule(
    "value", "make it a frozen dataclass, with repr=False so that the repr of masks.Mask stays short"
)
PICTURE = Rule("picture", "leave show() to masks.Mask")
BLOCKS = Rule("blocks", "keep the rules above: FlexAttention's blocks are made by calling the mask")
INTERVALS = Rule("intervals", "keep the rules above: intervals are made by calling the mask")
FUTURE = Rule(
    "future",
    "join it with Causal(): Causal() & (...); or say part=True if it is meant to be joined by its users",
)
SIGHT = Rule("sight", "show every position something: Causal() & (... | Window(1)); or say part=True")
REACH = Rule("reach", "declare a reach that covers every position that is shown, or None")
POSITIONS = Rule(
    "positions", "make it a function of positions alone, the same for all rows and heads; or say part=True"
)
SUITE = Suite("mask")


def check_mask(mask: Any, *, part: bool = False, only: Collection[str] | None = None) -> Kept:
    """Try the rules of masks on ``mask``.

    Args:
        mask: a ``masks.Mask``, or a function ``(b, h, q_position, kv_position) -> bool``, with any names of the arguments, defined for 2 rows
            and 12 positions at least.
        part: whether it is to be joined with others before it drives a model, as ``Window`` is; then the rules of models are not tried.
        only: some tests (``SUITE.names``); ``None``: all.
    Returns:
        the rules that are kept, and what was not tried.
    Raises:
        BrokenRule: the first rule that is broken, and the remedy. TypeError: the mask is a class, or cannot be called.
    """
    given = instance(mask, "mask")
    if not callable(given):
        raise TypeError(
            f"mask is a {type(given).__name__}: give a Mask or a function (b, h, q_position, kv_position) -> bool"
        )
    made = given if isinstance(given, Mask) else Function(given)
    return SUITE.run(given, Case(made, isinstance(given, Mask), part), only)


@dataclass(frozen=True)
class Case:
    """A mask. ``whole``: it is a ``masks.Mask``, not a function. ``part``: it is to be joined with others."""

    mask: Mask
    whole: bool
    part: bool

    def one_by_one(self, b: int) -> list[list[bool]]:
        """The mask of row ``b``, asked about one pair at a time."""
        return [[bool(self.mask(b, 0, q, kv)) for kv in range(S)] for q in range(S)]


@SUITE.test(CALL)
def called(case: Case) -> None:
    asked = case.mask.mask_mod if isinstance(case.mask, Function) else case.mask
    names = [p.name for p in inspect.signature(asked).parameters.values() if p.default is p.empty]
    swapped = names[:2] == ["h", "b"] or [name[:1] for name in names[2:4]] == ["k", "q"]
    # FlexAttention tells a mask by four parameters without a default, of any names.
    CALL.require(len(names) == 4 and not swapped, f"its arguments are {', '.join(names)}")
    for b in range(B):
        found = case.mask(b, 0, 3, 2)
        CALL.require(isinstance(found, bool | torch.Tensor), f"it returns a {type(found).__name__}")


@SUITE.test(ELEMENTWISE)
def elementwise(case: Case) -> None:
    """One pair at a time, broadcast, and under FlexAttention's vmap."""
    at, mask = torch.arange(S), case.mask
    whole = dense(mask, at.expand(B, -1), at)
    flex = create_mask(mask, B, 1, S, S, device="cpu")
    # Queries of different places, so that nothing hangs on a shared start.
    some = torch.tensor([[0, 3, 6], [2, 5, 9]])
    for b in range(B):
        expected = case.one_by_one(b)
        for how, found, wanted in (
            ("broadcast over rows", whole[b], expected),
            ("under FlexAttention's vmap", flex[b, 0], expected),
            ("broadcast over one row", dense(mask, at, at, row=b), expected),
            ("at some positions", dense(mask, at[4:7], at[2:], row=b), [line[2:] for line in expected[4:7]]),
            ("at other positions of each row", dense(mask, some, at)[b], [expected[q] for q in some[b]]),
        ):
            ELEMENTWISE.require(
                found.tolist() == wanted, f"{how} it differs from its values pair by pair, in row {b}"
            )


@SUITE.test(COMBINES)
def combines(case: Case) -> None:
    def other(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q + 2 * kv + b) % 3 > 0

    at, mask = torch.arange(S), case.mask
    for b in range(B):
        mine, theirs = (dense(m, at, at, row=b) for m in (mask, other))
        causal, window = dense(Causal(), at, at), dense(Window(2), at, at)
        for how, combined, expected in (
            ("mask & function", mask & other, mine & theirs),
            ("function & mask", other & mask, mine & theirs),
            ("mask | function", mask | other, mine | theirs),
            ("function | mask", other | mask, mine | theirs),
            ("mask & Causal() | Window(2)", mask & Causal() | Window(2), mine & causal | window),
        ):
            COMBINES.require(isinstance(combined, Mask), f"{how} is a {type(combined).__name__}")
            COMBINES.require(
                torch.equal(dense(combined, at, at, row=b), expected), f"{how} shows other pairs"
            )


@SUITE.test(VALUE)
def value(case: Case) -> None:
    if not case.whole:
        raise NotTried("it is a function")
    VALUE.require(dataclasses.is_dataclass(case.mask), "it is no dataclass")
    for field in dataclasses.fields(case.mask):  # type: ignore[arg-type]
        try:
            setattr(copy.copy(case.mask), field.name, None)
        except dataclasses.FrozenInstanceError:
            continue
        VALUE.broken(f"its field {field.name} can be set")
    shown = repr(case.mask)
    VALUE.require(
        0 < len(shown) <= 90 and "\n" not in shown and "tensor(" not in shown, f"its repr is {shown!r}"
    )


@SUITE.test(PICTURE)
def picture(case: Case) -> None:
    for b in range(B):
        drawn = case.mask.show(S, row=b)
        head, *lines, foot = drawn.splitlines()
        PICTURE.require(repr(drawn) == str(drawn), "a notebook does not show it as it is")
        PICTURE.require(head == repr(case.mask) and SEEN in foot, f"its head is {head!r}")
        cells = [[line[7:][i : i + 2] for i in range(0, 2 * S, 2)] for line in lines]
        wanted = [[SEEN if seen else HIDDEN for seen in line] for line in case.one_by_one(b)]
        PICTURE.require(cells == wanted, f"it shows other pairs than the mask, in row {b}")
    default = case.mask.show().splitlines()
    PICTURE.require(
        max(map(len, default)) <= 90 and len(default) <= 26, "by default it is larger than 26 lines of 90"
    )


@SUITE.test(BLOCKS, also=(SIGHT,))
def blocks(case: Case) -> None:
    """Attention through the BlockMask equals attention with the dense mask, where a query sees anything."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, 2, S, 16, dtype=torch.float64, generator=draw) for _ in range(3))
    for first, queries, block in ((0, S, 4), (5, 3, 2), (0, S, 128)):
        part = q[:, :, first : first + queries]
        seen = dense(case.mask, torch.arange(first, first + queries).expand(B, -1), torch.arange(S))
        made = block_mask(case.mask, queries, S, first=first, rows=B, block=block)
        with warnings.catch_warnings():
            # Uncompiled, FlexAttention computes all scores: slow and exact.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            out = flex_attention(part, k, v, block_mask=made)
        expected = scaled_dot_product_attention(part, k, v, attn_mask=seen[:, None])
        looks = seen.any(-1)[:, None, :, None].expand_as(out)
        how = f"{queries} queries from position {first}, in blocks of {block}"
        SIGHT.require(bool(looks.any()), f"{how}: none sees anything")
        BLOCKS.require(
            torch.allclose(out[looks], expected[looks], atol=1e-12), f"{how}: FlexAttention differs"
        )
        # The kernel takes a block's word: no pair outside its blocks, and every pair of its full ones.
        cells = pad(seen, (0, -S % block, 0, -queries % block))
        cells = cells.view(B, cells.shape[1] // block, block, -1, block).transpose(2, 3)
        right = torch.equal(made.to_dense()[:, 0].bool(), cells.any(-1).any(-1))
        BLOCKS.require(right, f"{how}: the blocks are not those of the pairs that are seen")


@SUITE.test(INTERVALS)
def has_intervals_or_says_why(case: Case) -> None:
    for b in range(B):
        lines = case.one_by_one(b)
        for q in range(S):
            try:
                found = intervals(case.mask, q, S, row=b, limit=2)
            except ValueError as error:
                known = any(word in str(error) for word in ("limit", "AttentionPlan", "dense"))
                INTERVALS.require(known, f"intervals refuses it without a remedy: {error}")
                continue
            flat = [edge for pair in found for edge in pair]
            INTERVALS.require(
                flat == sorted(set(flat)) and len(found) <= 2, f"intervals {found} of query {q}"
            )
            covered = [any(start <= kv < end for start, end in found) for kv in range(S)]
            INTERVALS.require(
                covered == lines[q], f"intervals {found} of query {q} show other pairs than the mask"
            )
            causal = intervals(case.mask, q, row=b, limit=S)  # by default up to the query's own slot
            shown = [kv for kv in range(S) if any(start <= kv < end for start, end in causal)]
            INTERVALS.require(
                shown == [kv for kv in range(q + 1) if covered[kv]], f"causal intervals {causal} of query {q}"
            )


@SUITE.test(POSITIONS, FUTURE, SIGHT, REACH)
def drives_a_model(case: Case) -> None:
    if case.part:
        raise NotTried("it is part of a mask")
    at = torch.arange(FAR)
    with POSITIONS.errors(f"a query of {FAR} positions"):
        seen = dense(case.mask, at, at)
    later = (seen & (at > at[:, None])).nonzero().tolist()
    FUTURE.require(
        not later, f"position {later[0][0] if later else 0} sees position {later[0][1] if later else 0}"
    )
    blind = (~seen.any(1)).nonzero()[:, 0].tolist()
    SIGHT.require(not blind, f"positions {blind[:3]} see nothing")
    reach = case.mask.reach
    if reach is not None:
        far = (seen & (at >= reach.sinks) & (at <= at[:, None] - reach.window)).nonzero().tolist()
        REACH.require(not far, f"its reach is {reach} and position {far[:1]} is shown")
    with POSITIONS.errors("a model"):
        for_model(case.mask)
