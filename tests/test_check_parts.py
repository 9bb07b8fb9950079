"""``check_mask``, ``check_pruner``, ``check_selector`` and ``check_backend``: every rule is broken by a part with one mistake, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import pruning
from specdec.capabilities import SelectorInfo
from specdec.kernels.attention import reference
from specdec.masks import Causal, Mask, Reach, Window
from specdec.rng import Key
from specdec.selectors.matching import checked, draw
from specdec.testing import BrokenRule, check_backend, check_mask, check_pruner, check_selector
from specdec.testing import mask as masks
from specdec.testing import pruner as pruners
from specdec.testing import selector as selectors
from specdec.types import Feedback

# -- masks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Own(Mask):
    """Causal. The mistakes below are changes of it."""

    def __call__(self, b, h, q_position, kv_position):
        return kv_position <= q_position


class OtherOrder(Own):
    def __call__(self, b, h, kv_position, q_position):
        return kv_position <= q_position


class FlexOrder(Own):
    def __call__(self, b, h, kv_idx, q_idx):
        return kv_idx <= q_idx


class HeadFirst(Own):
    def __call__(self, h, b, q_idx, kv_idx):
        return kv_idx <= q_idx


class FiveArguments(Own):
    def __call__(self, b, h, q_position, kv_position, size):
        return kv_position <= q_position


class Words(Own):
    def __call__(self, b, h, q_position, kv_position):
        return "seen"


class Relative(Own):
    """Counts from the first query that it is given."""

    def __call__(self, b, h, q_position, kv_position):
        q = torch.as_tensor(q_position)
        return kv_position <= q - q.flatten()[0]


class Branches(Own):
    def __call__(self, b, h, q_position, kv_position):
        if kv_position > q_position:
            return torch.tensor(False)
        return torch.tensor(True)


class FlexNames(Own):
    """The parameters have FlexAttention's names."""

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx <= q_idx


class FreeNames(Own):
    """Any names, and a parameter with a default."""

    def __call__(self, batch, head, query, key, size=3):
        return (key <= query) & (key > query - size)


@dataclass(frozen=True, repr=False)
class OneRow(Mask):
    """Every row has the first one's length."""

    length: Tensor

    def __call__(self, b, h, q_position, kv_position):
        row = torch.as_tensor(b).flatten()[0] if torch.as_tensor(b).dim() else b
        return kv_position < self.length[row]


class Shrinks(Own):
    """Its conjunction forgets the other mask."""

    def __and__(self, other):
        return self


@dataclass
class Thawed(Mask):
    size: int = 2

    def __call__(self, b, h, q_position, kv_position):
        return kv_position > q_position - self.size


@dataclass(frozen=True)
class Talks(Mask):
    """Prints its tensors."""

    table: Tensor

    def __call__(self, b, h, q_position, kv_position):
        return self.table[q_position, kv_position]


class Paints(Own):
    """Shows another mask."""

    def show(self, length=None, row=0, head=0):
        return Window(3).show(length, row, head)


class Short(Own):
    """Declares a reach of 2 and shows all."""

    reach = Reach(sinks=0, window=2)


class ByTheRow(Own):
    def __call__(self, b, h, q_position, kv_position):
        return (kv_position <= q_position) & (kv_position >= b - b)


MASKS = [
    ("call", OtherOrder()),
    ("call", FlexOrder()),
    ("call", HeadFirst()),
    ("call", FiveArguments()),
    ("call", lambda b, h, kv, q: kv <= q),
    ("call", lambda b, h, q: q >= 0),
    ("call", Words()),
    ("elementwise", Relative()),
    ("elementwise", Branches()),
    ("elementwise", OneRow(torch.tensor([3, 5]))),
    ("combines", Shrinks()),
    ("value", Thawed()),
    ("value", Talks(torch.ones(12, 12, dtype=torch.bool))),
    ("picture", Paints()),
    ("future", Window(3)),
    ("future", lambda b, h, q, kv: kv <= q + 1),
    ("sight", lambda b, h, q, kv: (kv <= q) & (kv < q - 2)),
    ("sight", lambda b, h, q, kv: (kv <= q) & (q < 100)),
    ("reach", Short()),
    ("positions", ByTheRow()),
]


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("rule", "mask"), MASKS, ids=[f"{n}-{rule}" for n, (rule, _) in enumerate(MASKS)])
def test_a_wrong_mask_is_caught_by_its_rule(rule, mask):
    with pytest.raises(BrokenRule) as caught:
        check_mask(mask)
    assert caught.value.rule == rule, caught.value


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("test", "rule", "name", "wrong"),
    [
        (
            "blocks",
            "blocks",
            "block_mask",
            lambda right: lambda m, *a, first=0, **k: right(m, *a, first=0, **k),
        ),
        (
            "blocks",
            "blocks",
            "block_mask",
            lambda right: lambda m, *a, **k: right(m | Window(6) & Causal(), *a, **k),
        ),
        (
            "has_intervals_or_says_why",
            "intervals",
            "intervals",
            lambda right: lambda m, q, slots=None, **k: [(max(0, q - 3), q + 1)],
        ),
    ],
)
def test_a_wrong_lowering_of_masks_is_caught(monkeypatch, test, rule, name, wrong):
    mask = Causal() & Window(3)
    assert check_mask(mask, only=[test]).rules == (rule,)
    monkeypatch.setattr(masks, name, wrong(getattr(masks, name)))
    with pytest.raises(BrokenRule) as caught:
        check_mask(mask, only=[test])
    assert caught.value.rule == rule


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "mask",
    [FlexNames(), FreeNames(), lambda b, h, q_idx, kv_idx: kv_idx <= q_idx],
    ids=["FlexAttention's names", "other names", "a function"],
)
@pytest.mark.usefixtures("untraced")
def test_the_names_of_a_masks_parameters_are_free(mask):
    assert {"call", "future", "reach", "blocks"} <= set(check_mask(mask).rules)


def test_every_rule_of_masks_is_broken_by_some_plant():
    assert {rule for rule, _ in MASKS} | {"blocks", "intervals"} == masks.SUITE.rules.keys()
    assert set(check_mask(Own()).rules) == masks.SUITE.rules.keys()
    assert check_mask(lambda b, h, q, kv: kv <= q).not_tried == {"value": "it is a function"}
    assert set(check_mask(Window(3), part=True).not_tried) == {"drives_a_model"}
    with pytest.raises(TypeError, match="mask is a int: give a Mask or a function"):
        check_mask(3)


# -- pruners -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """``wrong``: a changed call of a correct pruner."""

    wrong: Callable[..., Tensor]
    needs: pruning.Needs = pruning.Needs()

    def __call__(self, keys, values, length, budget, attention=None):
        return self.wrong(pruning.KeyNorm(), keys, values, length, budget, attention)


def mutates(right, keys, values, length, budget, attention):
    kept = right(keys, values, length, budget)
    keys.mul_(2)
    return kept


def unsorted(right, keys, values, length, budget, attention):
    return right(keys, values, length, budget).flip(-1)


def pads_with_zeros(right, keys, values, length, budget, attention):
    return right(keys, values, length, budget).clamp(min=0)


def whole_buffer(right, keys, values, length, budget, attention):
    return right(keys, values, torch.full_like(length, keys.shape[2]), budget)


def one_short(right, keys, values, length, budget, attention):
    kept = right(keys, values, length, budget).clone()
    kept[..., -1] = -1
    return kept


def floats(right, keys, values, length, budget, attention):
    return right(keys, values, length, budget).float()


def by_the_batch(right, keys, values, length, budget, attention):
    return right(keys - keys[:1, :, :1] * 0.5, values, length, budget)


def by_the_width(right, keys, values, length, budget, attention):
    return right(keys - keys.shape[2] * keys.new_ones(6) / 14, values, length, budget)


def by_chance(right, keys, values, length, budget, attention):
    return right(torch.rand_like(keys), values, length, budget)


def by_the_call(right, keys, values, length, budget, attention, calls=[]):  # noqa: B006
    calls.append(1)
    return right(keys.roll(len(calls), 2), values, length, budget)


def by_the_padding(right, keys, values, length, budget, attention):
    keys = keys.nan_to_num(0)
    return right(keys - keys.mean(2, keepdim=True), values, length, budget)


def coarse(right, keys, values, length, budget, attention):
    """Multiplies in the keys' own precision, a large number among them."""
    return right((keys + 200) - 200, values, length, budget)


def never_refuses(right, keys, values, length, budget, attention):
    return right(keys, values, length, max(budget, 1))


def asserts(right, keys, values, length, budget, attention):
    assert budget > 0
    return right(keys, values, length, budget)


def reads_more_than_it_declares(right, keys, values, length, budget, attention):
    if attention is not None:
        keys = attention.mean((1, 2))[:, None, :, None].expand(keys.shape)
    return right(keys, values, length, budget)


class Thick:
    """A pruner that is no value."""

    needs = pruning.Needs()

    def __call__(self, keys, values, length, budget, attention=None):
        return pruning.KeyNorm()(keys, values, length, budget)


PRUNERS = [
    ("declaration", lambda keys, values, length, budget, attention=None: None),
    ("declaration", Planted(mutates, needs=True)),
    ("slots", Planted(unsorted)),
    ("slots", Planted(pads_with_zeros)),
    ("slots", Planted(whole_buffer)),
    ("slots", Planted(one_short)),
    ("slots", Planted(floats)),
    ("slots", Planted(lambda right, *call: None)),
    ("arguments", Planted(mutates)),
    ("repeatable", Planted(by_chance)),
    ("repeatable", Planted(by_the_call)),
    ("empty slots", Planted(by_the_padding)),
    ("mates", Planted(by_the_batch)),
    ("mates", Planted(by_the_width)),
    ("precision", Planted(coarse)),
    ("needs", Planted(reads_more_than_it_declares)),
    (
        "needs",
        Planted(lambda right, k, v, n, budget, a: right(k, v, n, budget), pruning.Needs(attention=True)),
    ),
    ("refuses", Planted(never_refuses)),
    ("refuses", Planted(asserts)),
    ("value", Thick()),
]


@pytest.mark.parametrize(
    ("rule", "pruner"), PRUNERS, ids=[f"{n}-{rule}" for n, (rule, _) in enumerate(PRUNERS)]
)
def test_a_wrong_pruner_is_caught_by_its_rule(rule, pruner):
    with pytest.raises(BrokenRule) as caught:
        check_pruner(pruner)
    assert caught.value.rule == rule, caught.value


def test_every_rule_of_pruners_is_broken_by_some_plant():
    assert {rule for rule, _ in PRUNERS} == pruners.SUITE.rules.keys()
    right = Planted(
        lambda right, keys, values, length, budget, attention: right(keys, values, length, budget)
    )
    assert set(check_pruner(right).rules) == pruners.SUITE.rules.keys()
    with pytest.raises(TypeError, match=r"pruner is the class Thick"):
        check_pruner(Thick)


# -- selectors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Draws arms in proportion to what a request committed on them, within their capacities. The mistakes below are changes of it."""

    def init(self, arms):
        return torch.ones(512, arms, dtype=torch.float64)  # of each request

    def probs(self, state, context):
        mine = state[context.request]
        return (mine / mine.sum(-1, keepdim=True)).numpy()

    def select(self, state, context, capacities, rng):
        room = checked(capacities, state.shape[1], context.batch)
        arm, prob = draw(self.probs(state, context), room, rng, context.length)
        return torch.from_numpy(arm), torch.from_numpy(prob).float(), state

    def update(self, state, feedback):
        return state.index_put((feedback.request, feedback.arm), feedback.tokens.double(), accumulate=True)


class Pooled(Counts):
    """All requests share what is counted, and it is not declared."""

    def update(self, state, feedback):
        return state.index_add(1, feedback.arm, feedback.tokens.double().expand(len(state), -1))


class PooledSlowly(Counts):
    """The same, with so little weight that other probabilities show it, and other arms do not."""

    def update(self, state, feedback):
        return state.index_add(1, feedback.arm, 1e-4 * feedback.tokens.double().expand(len(state), -1))


class Deaf(Counts):
    select = None


class Wide(Counts):
    def select(self, *call):
        arm, prob, state = super().select(*call)
        return arm.int(), prob, state


class Sure(Counts):
    """Says probabilities of 0."""

    def select(self, *call):
        arm, prob, state = super().select(*call)
        return arm, prob * 0, state


class Crowds(Counts):
    """Ignores capacities."""

    def select(self, state, context, capacities, rng):
        return super().select(state, context, torch.full_like(capacities, max(context.batch, 1)), rng)


class Boasts(Counts):
    """Says another probability than it draws with."""

    def select(self, *call):
        arm, prob, state = super().select(*call)
        return arm, prob.sqrt(), state


class InPlace(Counts):
    def update(self, state, feedback):
        return state.index_put_((feedback.request, feedback.arm), feedback.tokens.double(), accumulate=True)


class Forgetful(Counts):
    """Changes its state in place where a request leaves."""

    def leave(self, state, requests):
        return state.mul_(0.5)


class Global(Counts):
    def select(self, state, context, capacities, rng):
        torch.rand(1)
        return super().select(state, context, capacities, rng)


@dataclass(frozen=True)
class Remembers(Counts):
    """Counts in itself."""

    calls: list[int] = field(default_factory=list)

    def probs(self, state, context):
        self.calls.append(1)
        return super().probs(state + len(self.calls), context)


class ByTheBatch(Counts):
    def probs(self, state, context):
        return super().probs(state + context.batch, context)


class ByThePlace(Counts):
    """Keys by the row's place in the batch."""

    def select(self, state, context, capacities, rng):
        room = checked(capacities, state.shape[1], context.batch)
        place = torch.arange(context.batch)
        arm, prob = draw(self.probs(state, context), room, rng, place)
        return torch.from_numpy(arm), torch.from_numpy(prob).float(), state


class Impatient(Counts):
    """Counts choices when they are made, so that a later micro-batch knows of them."""

    def select(self, *call):
        arm, prob, state = super().select(*call)
        return arm, prob, state.index_add(1, arm, torch.ones(len(state), len(arm), dtype=torch.float64))


class Hoards(Counts):
    """Remembers every request for ever."""

    def init(self, arms):
        return super().init(arms), ()

    def probs(self, state, context):
        return super().probs(state[0], context)

    def select(self, state, context, capacities, rng):
        room = checked(capacities, state[0].shape[1], context.batch)
        arm, prob = draw(self.probs(state, context), room, rng, context.length)
        return torch.from_numpy(arm), torch.from_numpy(prob).float(), state

    def update(self, state, feedback):
        return super().update(state[0], feedback), (*state[1], *feedback.request.tolist())

    def leave(self, state, requests):
        return state


class Two(Counts):
    """Takes the second arm of one."""

    def init(self, arms):
        return super().init(arms if arms > 1 else 2)

    def select(self, state, context, capacities, rng):
        if len(capacities) == 1:
            capacities = torch.tensor([0, int(capacities)])
        return super().select(state, context, capacities, rng)


SELECTORS = [
    ("declaration", Deaf()),
    ("declaration", SimpleNamespace(init=1, select=print, update=print)),
    ("form", Wide()),
    ("form", Sure()),
    ("capacities", Crowds()),
    ("arm_prob", Boasts()),
    ("state", InPlace()),
    ("state", Forgetful()),
    ("keys", Global()),
    ("keys", Remembers()),
    ("mates", ByTheBatch()),
    ("mates", ByThePlace()),
    ("late feedback", Impatient()),
    ("joint", Pooled()),
    ("joint", PooledSlowly()),
    ("leave", Hoards()),
    ("one arm", Two()),
]


@pytest.mark.parametrize(
    ("rule", "selector"),
    [
        pytest.param(rule, selector, id=f"{n}-{rule}", marks=pytest.mark.slow if n % 4 else ())
        for n, (rule, selector) in enumerate(SELECTORS)
    ],
)
def test_a_wrong_selector_is_caught_by_its_rule(rule, selector):
    with pytest.raises(BrokenRule) as caught:
        check_selector(selector)
    assert caught.value.rule == rule, caught.value


def test_every_rule_of_selectors_is_broken_by_some_plant():
    assert {rule for rule, _ in SELECTORS} == selectors.SUITE.rules.keys()
    found = check_selector(Counts())
    assert set(found.rules) == selectors.SUITE.rules.keys() - {"leave"}
    assert found.not_tried == {"requests_come_and_go": "it has no leave(state, requests)"}


def test_a_selector_that_shares_what_it_learns_declares_it():
    with pytest.raises(BrokenRule, match=r"Remedy: declare info = sd.SelectorInfo\(joint=True\)"):
        check_selector(Pooled(), only=["learns_from_own_feedback"])

    class Declared(Pooled):
        info = SelectorInfo(joint=True)

    assert "learns_from_own_feedback" in check_selector(Declared()).not_tried


def test_a_selector_of_two_arms_is_asked_for_two():
    @dataclass(frozen=True)
    class Pair(Counts):
        info: SelectorInfo = SelectorInfo(arms=2)

        def init(self, arms):
            assert arms == 2
            return super().init(arms)

    assert "it is made for more arms" in check_selector(Pair()).not_tried.values()


# -- attention backends ------------------------------------------------------------------------------------------------


def backend(**changed):
    """The reference with a mistake in it."""
    own = {name: getattr(reference, name) for name in ("refuses", "attend", "attend_with_lse")}
    return SimpleNamespace(**{**own, **changed})


def base_two(*call):
    out, lse = reference.attend_with_lse(*call)
    return out, lse / np.log(2.0)


def bounded(*call):
    """Says a large negative number where a query sees nothing."""
    out, lse = reference.attend_with_lse(*call)
    return out, lse.clamp(min=-1e30)


def leaks(query, keys, values, plan, *more):
    """Reads a hidden slot with weight 0."""
    return reference.attend(query, keys, values, plan, *more) + 0 * values[..., :1].sum()


def mean_of_nothing(query, keys, values, plan, *more):
    """NaN for a query that sees nothing."""
    out, lse = reference.attend_with_lse(query, keys, values, plan, *more)
    return torch.where(lse[..., None].isinf(), torch.nan, out)


def fails_on_trees(query, keys, values, plan, *more):
    raise NotImplementedError("trees")


BACKENDS: list[tuple[str, Any]] = [
    ("output", backend(attend=lambda *call: reference.attend(*call) * 1.001)),
    ("output", backend(attend=mean_of_nothing)),
    ("shape", backend(attend=lambda *call: reference.attend(*call).squeeze(0))),
    ("shape", backend(attend=lambda *call: reference.attend(*call).double())),
    ("log-sum-exp", backend(attend_with_lse=base_two)),
    ("log-sum-exp", backend(attend_with_lse=bounded)),
    ("unseen", backend(attend=leaks)),
    ("serves", backend(refuses=lambda *call: "it is a stub")),
    ("serves", backend(attend=fails_on_trees)),
]


@pytest.mark.parametrize(
    ("rule", "wrong"), BACKENDS, ids=[f"{n}-{rule}" for n, (rule, _) in enumerate(BACKENDS)]
)
def test_a_wrong_backend_is_caught_by_its_rule(rule, wrong):
    with pytest.raises(BrokenRule) as caught:
        check_backend(wrong)
    assert caught.value.rule == rule, caught.value


def test_a_backend_is_a_name_or_an_object():
    right = check_backend(backend())
    assert set(right.rules) == {rule for rule, _ in BACKENDS}
    assert right.not_tried == {}
    assert "kinds are refused" in check_backend("packed").not_tried["calls"]
    with pytest.raises(TypeError, match="give an object with attend_with_lse"):
        check_backend(SimpleNamespace(refuses=print, attend=print))


def test_feedback_is_as_the_library_gives_it():
    """A selector that indexes by request and arm works on both."""
    seen = []

    class Watches(Counts):
        def update(self, state, feedback):
            seen.append(feedback)
            return super().update(state, feedback)

    check_selector(Watches(), only=["form"])
    assert all(isinstance(one, Feedback) and one.request.dtype == torch.long for one in seen)
    assert Key(torch.tensor([1])).stream == 0
