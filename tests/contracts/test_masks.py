"""What every mask promises, on plain tensors. See ``contracts/__init__.py`` for how a mask gets here: by itself.

An example of a mask comes from ``example(model)``, or from construction with 3 for every required argument that is an int.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from contracts import modules, parts
from specdec import masks
from specdec.masks import Causal, Mask, Tree, Window, block_mask, dense, intervals
from specdec.masks.show import HIDDEN, PARTLY, SEEN

# Uncompiled, FlexAttention computes all scores: slow, exact, and what a test wants.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

B, S = 2, 12  # rows and positions that every example can be asked about
NOT_MASKS = {f"specdec.masks.{name}" for name in ("lower", "reach", "show", "sight", "streaming", "text")}
MASKS = {
    name: cls
    for name, cls in parts(masks, "show").items()
    if issubclass(cls, Mask) and not inspect.isabstract(cls)
}


def instance(cls: type) -> Any:
    if hasattr(cls, "example"):
        return cls.example(None)
    required = [p for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    if any(p.annotation != "int" for p in required):
        raise TypeError(
            f"{cls.__name__}: give it a static method example(model), so that a mask can be built"
        )
    return cls(*[3] * len(required))


every_mask = pytest.mark.parametrize("cls", MASKS.values(), ids=MASKS.keys())


def one_by_one(mask: Any, b: int) -> list[list[bool]]:
    """The mask of row ``b``, asked about one pair at a time."""
    return [[bool(mask(b, 0, q, kv)) for kv in range(S)] for q in range(S)]


# The checks, apart from pytest so that planted mistakes can be sent through them too.


def check_is_a_mask_mod(mask: Any) -> None:
    names = list(inspect.signature(mask).parameters)
    assert names == ["b", "h", "q_position", "kv_position"]
    for b in range(B):
        assert type(mask(b, 0, 3, 2)) in (bool, torch.Tensor)


def check_is_elementwise(mask: Any) -> None:
    """One pair at a time, broadcast, and under FlexAttention's vmap."""
    at = torch.arange(S)
    whole = dense(mask, at.expand(B, -1), at)
    flex = create_mask(mask, B, 1, S, S, device="cpu")
    for b in range(B):
        expected = one_by_one(mask, b)
        assert whole[b].tolist() == expected
        assert flex[b, 0].tolist() == expected
        assert dense(mask, at, at, row=b).tolist() == expected
        assert dense(mask, at[4:7], at[2:], row=b).tolist() == [line[2:] for line in expected[4:7]]
    # queries of different places, so that nothing hangs on a shared start
    some = torch.tensor([[0, 3, 6], [2, 5, 9]])
    assert dense(mask, some, at).tolist() == [[one_by_one(mask, b)[q] for q in some[b]] for b in range(B)]


def check_combines(mask: Any) -> None:
    def other(b, h, q, kv):
        return (q + 2 * kv + b) % 3 > 0

    at = torch.arange(S)
    for b in range(B):
        mine, theirs = (dense(m, at, at, row=b) for m in (mask, other))
        for combined, expected in (
            (mask & other, mine & theirs),
            (other & mask, mine & theirs),
            (mask | other, mine | theirs),
            (other | mask, mine | theirs),
            (mask & Causal() | Window(2), mine & dense(Causal(), at, at) | dense(Window(2), at, at)),
        ):
            assert isinstance(combined, Mask)
            assert torch.equal(dense(combined, at, at, row=b), expected)


def check_is_a_small_value(mask: Any) -> None:
    assert dataclasses.is_dataclass(mask)
    for field in dataclasses.fields(mask):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(mask, field.name, None)
    assert 0 < len(repr(mask)) <= 90
    assert "\n" not in repr(mask)
    assert "tensor(" not in repr(mask)


def check_shows_what_it_does(mask: Any) -> None:
    for b in range(B):
        picture = mask.show(S, row=b)
        head, *lines, foot = picture.splitlines()
        assert repr(picture) == str(picture)  # a notebook shows it as it is
        assert head == repr(mask)
        assert SEEN in foot
        cells = [[line[7:][i : i + 2] for i in range(0, 2 * S, 2)] for line in lines]
        assert [int(line[:6]) for line in lines] == list(range(S))
        assert cells == [[SEEN if seen else HIDDEN for seen in line] for line in one_by_one(mask, b)]
    default = mask.show().splitlines()
    assert max(map(len, default)) <= 90
    assert len(default) <= 26


def check_serves_flex_attention(mask: Any) -> None:
    """Attention through the BlockMask equals attention with the dense mask, where a query sees anything."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, 2, S, 16, dtype=torch.float64) for _ in range(3))
    for first, queries, block in ((0, S, 4), (5, 3, 2), (0, S, 128)):
        part = q[:, :, first : first + queries]
        seen = dense(mask, torch.arange(first, first + queries).expand(B, -1), torch.arange(S))
        made = block_mask(mask, queries, S, first=first, rows=B, block=block)
        out = flex_attention(part, k, v, block_mask=made)
        expected = scaled_dot_product_attention(part, k, v, attn_mask=seen[:, None])
        looks = seen.any(-1)[:, None, :, None].expand_as(out)
        assert looks.any()
        assert torch.allclose(out[looks], expected[looks], atol=1e-12)
        # The kernel takes a block's word: no pair outside its blocks, and every pair of its full ones.
        blocks = torch.nn.functional.pad(seen, (0, -S % block, 0, -queries % block))
        blocks = blocks.view(B, blocks.shape[1] // block, block, -1, block).transpose(2, 3)
        assert torch.equal(made.to_dense()[:, 0].bool(), blocks.any(-1).any(-1))


def check_has_intervals_or_says_why(mask: Any) -> None:
    for b in range(B):
        for q in range(S):
            try:
                found = intervals(mask, q, S, row=b, limit=2)
            except ValueError as error:
                assert any(word in str(error) for word in ("limit", "AttentionPlan", "dense"))  # noqa: PT017
                continue
            flat = [edge for pair in found for edge in pair]
            assert flat == sorted(set(flat))  # ascending, not empty, and not touching
            assert len(found) <= 2
            covered = [any(start <= kv < end for start, end in found) for kv in range(S)]
            assert covered == one_by_one(mask, b)[q]
            causal = intervals(mask, q, row=b, limit=S)  # by default up to the query's own slot
            assert [kv for kv in range(S) if any(s <= kv < e for s, e in causal)] == [
                kv for kv in range(q + 1) if covered[kv]
            ]


CHECKS = [
    check_is_a_mask_mod,
    check_is_elementwise,
    check_combines,
    check_is_a_small_value,
    check_shows_what_it_does,
    check_serves_flex_attention,
    check_has_intervals_or_says_why,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@every_mask
def test_every_mask(cls, check):
    check(instance(cls))


def test_every_module_has_a_mask():
    found = {cls.__module__ for cls in MASKS.values()}
    assert {m.__name__ for m in modules(masks)} - NOT_MASKS == found
    assert {"Sinks", "Window", "Causal", "Tree", "Block", "Strided"} <= MASKS.keys()
    assert MASKS.keys() <= set(masks.__all__)


# Mistakes that the suite must catch.


@dataclass(frozen=True, repr=False)
class _OtherOrder(Mask):
    """Keys before queries."""

    def __call__(self, b: Any, h: Any, kv_position: Any, q_position: Any) -> Any:
        return kv_position <= q_position


@dataclass(frozen=True, repr=False)
class _Relative(Mask):
    """Counts from the first query that it is given."""

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        q = torch.as_tensor(q_position)
        return kv_position <= q - q.flatten()[0]


@dataclass(frozen=True, repr=False)
class _OneRow(Mask):
    """Every row has the first one's length."""

    length: torch.Tensor

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        row = torch.as_tensor(b).flatten()[0] if torch.as_tensor(b).dim() else b
        return kv_position < self.length[row]


@dataclass(frozen=True, repr=False)
class _Shrinks(Mask):
    """Its conjunction forgets the other mask."""

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return kv_position <= q_position

    def __and__(self, other: Any) -> Any:
        return self


@dataclass
class _Thawed(Mask):
    size: int = 2

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return kv_position > q_position - self.size


@dataclass(frozen=True)
class _Talks(Mask):
    """Prints its tensors."""

    table: torch.Tensor

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return self.table[q_position, kv_position]


@dataclass(frozen=True, repr=False)
class _Paints(Mask):
    """Shows another mask."""

    def __call__(self, b: Any, h: Any, q_position: Any, kv_position: Any) -> Any:
        return kv_position <= q_position

    def show(self, length: Any = None, row: int = 0, head: int = 0) -> Any:
        return Window(3).show(length, row, head)


PLANTED = {
    check_is_a_mask_mod: _OtherOrder(),
    check_is_elementwise: _Relative(),
    check_combines: _Shrinks(),
    check_shows_what_it_does: _Paints(),
}


@pytest.mark.parametrize(("check", "mask"), PLANTED.items(), ids=lambda x: type(x).__name__)
def test_planted_mistakes_are_caught(check, mask):
    with pytest.raises(AssertionError):
        check(mask)


def test_planted_mistakes_of_several_rows_and_values_are_caught():
    with pytest.raises(AssertionError):
        check_is_elementwise(_OneRow(torch.tensor([3, 5])))
    with pytest.raises(AssertionError):
        check_is_a_small_value(_Talks(torch.ones(S, S, dtype=torch.bool)))
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        check_is_a_small_value(_Thawed())


def test_planted_mistakes_in_the_lowerings_are_caught(monkeypatch):
    mask = Causal() & Window(3)
    check_serves_flex_attention(mask)
    check_has_intervals_or_says_why(mask)
    here = globals()
    right = block_mask
    monkeypatch.setitem(here, "block_mask", lambda m, *a, first=0, **k: right(m, *a, first=0, **k))
    with pytest.raises(AssertionError):
        check_serves_flex_attention(mask)
    monkeypatch.setitem(here, "block_mask", lambda m, *a, **k: right(m | Window(6) & Causal(), *a, **k))
    with pytest.raises(AssertionError):
        check_serves_flex_attention(mask)
    monkeypatch.setitem(here, "intervals", lambda m, q, slots=None, **k: [(max(0, q - 3), q + 1)])
    with pytest.raises(AssertionError):
        check_has_intervals_or_says_why(mask)


def test_trees_never_have_intervals():
    """Some nodes' slots are contiguous, but whether they are is the draft's doing: a kernel cannot rely on it."""
    for mask in (
        Tree.example(None),
        Tree.example(None) & Window(4),
        Causal() & (Window(2) | Tree.example(None)),
    ):
        with pytest.raises(ValueError, match="AttentionPlan"):
            intervals(mask, 3)


def test_the_picture_of_several_positions_a_cell():
    cells = (Causal() & Window(64)).show(128).splitlines()[1:-1]
    rows = [[line[7:][i : i + 2] for i in range(0, 32, 2)] for line in cells]
    assert len(rows) == 16  # 8 positions a cell
    for q, line in enumerate(rows):
        for kv, cell in enumerate(line):
            pairs = [
                (i <= j) and (i > j - 64) for j in range(8 * q, 8 * q + 8) for i in range(8 * kv, 8 * kv + 8)
            ]
            assert cell == (SEEN if all(pairs) else PARTLY if any(pairs) else HIDDEN)
