"""``check_pruner``: tries the rules of ``docs/pruning.md`` on a KV pruner, the library's or your own, with plain tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.pruning import pruner as contract
from specdec.testing.rules import Kept, Rule, Suite, instance
from specdec.testing.states import no_global_draws

B, H, S, D = 4, 2, 14, 6
LENGTH = (9, 14, 5, 11)
BUDGETS = (6, 5, 7, 9, 14, 20)

DECLARATION = Rule(
    "declaration", "declare needs = pruning.Needs(attention=...) and define the call of pruning.Pruner"
)
SLOTS = Rule(
    "slots",
    "return int64 [B, H, min(budget, S)]: for each head different slots below length[b], ascending, then -1; pruning.top does it",
)
ARGUMENTS = Rule("arguments", "do not change keys, values, length or attention in place")
REPEATABLE = Rule(
    "repeatable",
    "compute the choice from the arguments alone, or draw by a seed that is an argument of the pruner",
)
EMPTY = Rule("empty slots", "mask by slot < length[b] before anything is compared or summed; 0 * NaN is NaN")
MATES = Rule("mates", "choose for a row from its own slots, whatever the batch and the buffer's width are")
PRECISION = Rule("precision", "sum and compare scores in float32")
NEEDS = Rule(
    "needs",
    "read attention if and only if needs.attention says so, and raise ValueError where it is needed and missing",
)
REFUSES = Rule("refuses", "call pruning.pruner.check(self, keys, values, length, budget) first")
VALUE = Rule("value", "make it a frozen dataclass")
SUITE = Suite("pruner")


def check_pruner(
    pruner: Any, *, budgets: Sequence[int] = BUDGETS, only: Collection[str] | None = None
) -> Kept:
    """Try the rules of KV pruners on ``pruner``.

    Args:
        pruner: an object that is called as ``pruning.Pruner`` is. budgets: those that it must serve, for rows with 5 to 14 slots; most tests
            use the first.
        only: some tests (``SUITE.names``); ``None``: all.
    Returns:
        the rules that are kept, and what was not tried.
    Raises:
        BrokenRule: the first rule that is broken, and the remedy. TypeError: a class is given.
    """
    part = instance(pruner, "pruner")
    return SUITE.run(part, Case(part, tuple(budgets)), only)


@dataclass(frozen=True)
class Case:
    """A pruner and the budgets to try."""

    pruner: Any
    budgets: tuple[int, ...]

    def kept(self, given: dict[str, Tensor] | None = None, budget: int | None = None) -> Tensor:
        return self.pruner(budget=self.budgets[0] if budget is None else budget, **(given or arguments()))


def arguments(dtype: torch.dtype = torch.float64, group: int = 2) -> dict[str, Tensor]:
    """Keys, values, lengths and attention weights of four ragged rows."""
    draw = torch.Generator().manual_seed(0)
    return {
        "keys": torch.randn(B, H, S, D, generator=draw, dtype=torch.float64).to(dtype),
        "values": torch.randn(B, H, S, D + 1, generator=draw, dtype=torch.float64).to(dtype),
        "length": torch.tensor(LENGTH),
        "attention": torch.rand(B, H * group, 3, S, generator=draw, dtype=torch.float64).to(dtype),
    }


@SUITE.test(DECLARATION)
def declares(case: Case) -> None:
    with DECLARATION.errors("pruning's own check"):
        contract.check_pruner(case.pruner)


@SUITE.test(SLOTS)
def slots(case: Case) -> None:
    """Different slots of the row, ascending, as many as the budget or the row allows, then -1."""
    for budget in case.budgets:
        for group in (1, 3):
            given = arguments(group=group)
            kept = case.kept(given, budget)
            K = min(budget, S)
            right = isinstance(kept, Tensor) and kept.shape == (B, H, K) and kept.dtype == torch.long
            what = f"{list(kept.shape)} {kept.dtype}" if isinstance(kept, Tensor) else type(kept).__name__
            SLOTS.require(right, f"with a budget of {budget} it returns {what} instead of {[B, H, K]} int64")
            for b, row in enumerate(kept.tolist()):
                for h, entries in enumerate(row):
                    some = [slot for slot in entries if slot != -1]
                    where = f"row {b}, head {h} of {LENGTH[b]} slots, budget {budget}: {entries}"
                    SLOTS.require(all(0 <= slot < LENGTH[b] for slot in some), f"slots out of range, {where}")
                    SLOTS.require(some == sorted(set(some)), f"slots not ascending, or one twice, {where}")
                    SLOTS.require(entries == some + [-1] * (K - len(some)), f"-1 before a slot, {where}")
                    SLOTS.require(len(some) == min(budget, LENGTH[b]), f"too few slots, {where}")


@SUITE.test(ARGUMENTS)
def leaves_its_arguments_alone(case: Case) -> None:
    given = arguments()
    before = {name: t.clone() for name, t in given.items()}
    case.kept(given)
    other = [name for name in given if not torch.equal(before[name], given[name])]
    ARGUMENTS.require(not other, f"it changes {', '.join(other)} in place")


@SUITE.test(REPEATABLE)
def repeats(case: Case) -> None:
    with no_global_draws(REPEATABLE, "the call"):
        first = case.kept()
    REPEATABLE.require(torch.equal(first, case.kept()), "the same arguments give another choice")


@SUITE.test(EMPTY)
def empty_slots(case: Case) -> None:
    given, kept = arguments(), case.kept()
    for b, length in enumerate(LENGTH):
        given["keys"][b, :, length:] = given["values"][b, :, length:] = float("nan")
        given["attention"][b, :, :, length:] = float("nan")
    EMPTY.require(
        torch.equal(case.kept(given), kept), "what slots beyond a row's length hold changes the choice"
    )


@SUITE.test(MATES)
def mates(case: Case) -> None:
    given, kept = arguments(), case.kept()
    for rows in (torch.tensor([2]), torch.tensor([3, 0, 0, 1])):
        some = case.kept({name: t[rows] for name, t in given.items()})
        MATES.require(torch.equal(some, kept[rows]), f"rows {rows.tolist()} alone get another choice")
    wide = {
        name: pad(given[name], by, value=9.0)
        for name, by in (("keys", (0, 0, 0, 4)), ("values", (0, 0, 0, 4)), ("attention", (0, 4)))
    }
    MATES.require(torch.equal(case.kept({**given, **wide}), kept), "four more empty slots change the choice")


@SUITE.test(PRECISION)
def low_precision(case: Case) -> None:
    given = arguments(torch.bfloat16)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    low, high = case.kept(given).tolist(), case.kept(wide).tolist()
    for b in range(B):
        for h in range(H):  # sums in float32 may swap what is nearly equal
            apart = set(low[b][h]) ^ set(high[b][h])
            PRECISION.require(
                len(apart) <= 2, f"in bfloat16 {low[b][h]}, in float64 {high[b][h]}, row {b}, head {h}"
            )


@SUITE.test(NEEDS)
def needs(case: Case) -> None:
    given, kept = arguments(), case.kept()
    less = {name: t for name, t in given.items() if name != "attention"}
    other = case.kept({**given, "attention": given["attention"].flip(-1) ** 2})
    if not case.pruner.needs.attention:
        NEEDS.require(torch.equal(other, kept), "it reads attention and does not declare that it needs it")
        NEEDS.require(torch.equal(case.kept(less), kept), "without attention it chooses otherwise")
        return
    NEEDS.require(not torch.equal(other, kept), "it declares that it needs attention and does not read it")
    try:
        case.kept(less)
    except ValueError as error:
        NEEDS.require("attention" in str(error), f"without attention its error does not name it: {error}")
    else:
        NEEDS.broken("it needs attention and takes a call without it")


@SUITE.test(REFUSES)
def refuses(case: Case) -> None:
    for what, change in (
        ("a budget of 0", {"budget": 0}),
        ("a budget of -2", {"budget": -2}),
        ("a length of 15 for 14 slots", {"length": torch.tensor([9, 15, 5, 11])}),
        ("a length of -1", {"length": torch.tensor([9, -1, 5, 11])}),
        ("one length for 4 rows", {"length": torch.tensor([9])}),
        ("keys of three dimensions", {"keys": torch.zeros(B, H, S)}),
        ("more values than keys", {"values": torch.zeros(B, H, S + 1, D)}),
    ):
        try:
            case.pruner(**{"budget": case.budgets[0], **arguments(), **change})
        except ValueError:
            continue
        except Exception as error:
            REFUSES.broken(f"{what} raises {type(error).__name__} instead of ValueError: {error}")
        REFUSES.broken(f"it takes {what}")


@SUITE.test(VALUE)
def small_value(case: Case) -> None:
    kind: Any = type(case.pruner)
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore
    VALUE.require(frozen, "it is no frozen dataclass")
    VALUE.require(case.pruner == copy.deepcopy(case.pruner), "it differs from its copy")
    VALUE.require("\n" not in repr(case.pruner), "its repr has several lines")
