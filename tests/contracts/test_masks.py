"""Every mask of the package keeps the rules of ``specdec.testing.check_mask``. A new one gets here by itself.

An example of a mask comes from ``example(model)``, or from construction with 3 for every required argument that is an int.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from contracts import modules, parts
from specdec import masks
from specdec.masks import Causal, Mask, Tree, Window, intervals
from specdec.masks.show import HIDDEN, PARTLY, SEEN
from specdec.testing import BrokenRule, check_mask
from specdec.testing.mask import SUITE

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


# Drive a model as they are; the others are joined, or depend on rows or slots.
WHOLE = {"And", "Causal", "Function", "Intervals"}


@pytest.mark.parametrize("test", [name for name in SUITE.names if name != "drives_a_model"])
@every_mask
def test_every_mask_keeps_the_rules(cls, test, request):
    if cls not in (Causal, Tree):
        request.getfixturevalue("untraced")
    check_mask(instance(cls), part=True, only=[test])


@every_mask
def test_some_masks_drive_a_model_as_they_are(cls):
    if cls.__name__ in WHOLE:
        assert "future" in check_mask(instance(cls), only=["drives_a_model"]).rules
    else:
        with pytest.raises(BrokenRule):
            check_mask(instance(cls), only=["drives_a_model"])


def test_every_module_has_a_mask():
    found = {cls.__module__ for cls in MASKS.values()}
    assert {m.__name__ for m in modules(masks)} - NOT_MASKS == found
    assert {"Sinks", "Window", "Causal", "Tree", "Block", "Strided"} <= MASKS.keys()
    assert MASKS.keys() <= set(masks.__all__)


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
