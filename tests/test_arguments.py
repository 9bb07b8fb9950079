"""Constructors given a wrong type, or NaN, say which argument it is, at once."""

from __future__ import annotations

import pytest

import specdec as sd
from specdec import cost, selectors
from specdec.executors import Pipelined

table = sd.TableModel.random(vocab_size=5)
SHAPE = {"layers": 2, "d_model": 8, "heads": 2, "kv_heads": 2, "d_head": 4, "d_ff": 16, "vocab": 9}
WHOLE = [  # (what, arguments of which all named ones are whole numbers, the others)
    (sd.Arm, {"length": 2}, {"draft": table}),
    (sd.Sampling, {"top_k": 2}, {}),
    (sd.drafts.NGram, {"max_match": 3, "min_match": 1}, {}),
    (sd.drafts.Suffix, {"max_match": 3}, {}),
    (sd.drafts.MagicDec, {"window": 8, "sinks": 1, "block": 4, "budget": 9, "refresh": 2, "observation": 3}, {}),
    (Pipelined, {"micro_batches": 2}, {}),
    (selectors.Spin, {"exploration": 2}, {}),
    (cost.Shape, SHAPE, {}),
    (cost.Experts, {"count": 4, "chosen": 2, "d_ff": 8, "shared_d_ff": 0}, {}),
    (cost.Load, {"k": 2}, {"batch": 1, "context": 10}),
]  # fmt: skip
REAL = [
    (sd.Sampling, {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1}, {}),
    (sd.drafts.Suffix, {"factor": 1.0, "min_chance": 0.1}, {}),
    (sd.Request, {"arrival": 0.5}, {"prompt": [1]}),
    (selectors.EXP3, {"gamma": 0.1, "scale": 1.0}, {}),
    (selectors.EpsilonGreedy, {"epsilon": 0.1}, {}),
    (selectors.Hedge, {"rate": 0.1, "scale": 1.0}, {}),
    (selectors.Spin, {"growth": 2.0, "prior": 1.0}, {}),
    (selectors.Thompson, {"scale": 1.0, "spread": 1.0}, {}),
    (selectors.UCB1, {"scale": 1.0}, {}),
    (selectors.UCBSpec, {"delta": 0.1, "length": 4}, {}),
    (selectors.EXP3Spec, {"length": 4}, {}),
    (cost.Load, {"batch": 1, "context": 10, "bytes_per_weight": 1.0, "bytes_per_kv": 1.0}, {}),
    (cost.Window, {"size": 65}, {}),
    (cost.Sparse, {"divisor": 8, "sinks": 1}, {}),
    (cost.Host, {"fixed": 0.0, "per_row": 0.0, "per_token": 0.0, "per_row_token": 0.0}, {}),
    (cost.Investment, {"share": 0.1, "multiplier": 2.0, "serving": 10.0}, {}),
    (
        cost.Hardware,
        {"flops": 1.0, "bytes_per_second": 1.0, "overhead": 0.0, "overhead_per_layer": 0.0},
        {"name": "a"},
    ),
]
CASES = [
    (what, name, {**own, **others}, wrong)
    for kinds, bad in ((WHOLE, ("2", [], 1.5, float("nan"), -7)), (REAL, ("2", [], float("nan"), -7)))
    for what, own, others in kinds
    for name in own
    for wrong in bad
]


@pytest.mark.parametrize(
    ("what", "name", "given", "wrong"),
    CASES,
    ids=[f"{what.__qualname__}-{name}-{wrong}" for what, name, _, wrong in CASES],
)
def test_a_wrong_number_is_named(what, name, given, wrong):
    what(**given)
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        what(**{**given, name: wrong})


@pytest.mark.parametrize("name", ["EXP3", "EXP3Spec", "EpsilonGreedy", "Hedge", "Spin", "Thompson", "UCB1", "UCBSpec"])  # fmt: skip
def test_a_pool_that_is_none(name):
    needed = {"UCBSpec": {"length": 2}, "EXP3Spec": {"length": 2}}.get(name, {})
    selector = getattr(selectors, name)
    for pool in (None, "global", lambda context: [0]):
        selector(**needed, pool=pool)
    with pytest.raises(TypeError, match="pool is 'gobal': give None, \"global\", or a function"):
        selector(**needed, pool="gobal")


def test_other_wrong_types_are_named():
    with pytest.raises(TypeError, match="batch is 'a': give a number"):
        cost.Load("a", 10)
    with pytest.raises(TypeError, match="rows is a str: give a list of lists of ids"):
        sd.Context.of("ids")
    with pytest.raises(TypeError, match="function is 3: give a function"):
        sd.chain_draft(3)
    with pytest.raises(TypeError, match="experts is 8: give Experts"):
        cost.Shape(**SHAPE, experts=8)
    with pytest.raises(TypeError, match="widths is '32': give the children of a node by depth"):
        sd.drafts.Tree(table, "32")
    with pytest.raises(TypeError, match=r"widths, of a depth, is 1.5: give a whole number"):
        sd.drafts.Tree(table, (2, 1.5))
    with pytest.raises(TypeError, match="length is True: give a whole number"):
        sd.Arm(table, True)
    with pytest.raises(TypeError, match="capacity is '9': give a whole number, or None"):
        sd.Context.of([[1]], "9")
    with pytest.raises(ValueError, match=r"workers is \[\]: there are"):
        Pipelined(workers=[])
