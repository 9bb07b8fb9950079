"""``check_verifier``: every rule is broken once or more, by a verifier with one mistake, and is named."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec as sd
from specdec import tree
from specdec.audit import planted
from specdec.audit.around import verifier_of
from specdec.rng import ACCEPT, BONUS, Key
from specdec.testing import BrokenRule, check_verifier
from specdec.testing.verifier import SUITE


class Chains(sd.Rejection):
    """Refuses trees. The mistakes below are changes of it."""

    @property
    def info(self):
        return sd.VerifierInfo("mine", lossless=True)

    def check(self, proposal):
        super().check(proposal)
        if not bool(tree.is_chain(proposal.parents, proposal.size).all()):
            raise ValueError("it takes chains")


class Calls(Chains):
    """``how``: a whole ``__call__``, of proposals with nodes."""

    def __init__(self, how):
        object.__setattr__(self, "trust_declared", False)
        object.__setattr__(self, "how", how)

    def __call__(self, proposal, probs, context, rng):
        if not proposal.nodes:
            return super().__call__(proposal, probs, context, rng)
        return self.how(proposal, probs, context, rng)


right = Chains()


def steps(proposal, probs, context, rng, *, ratio=None, bonus=None, q=None):
    """Rejection of chains, step by step, with replacements for some of them."""
    B, N = proposal.tokens.shape
    rows, nodes = torch.arange(B), torch.arange(N)
    live = nodes < proposal.size[:, None]
    tokens = torch.where(live, proposal.tokens, 0)
    if q is None:
        q = torch.nn.functional.one_hot(tokens, probs.shape[-1]).to(probs)
        q = q if proposal.probs is None else proposal.distributions()
    p = probs[:, :N].gather(2, tokens[..., None])[..., 0]
    found = torch.where(live, p / q.gather(2, tokens[..., None])[..., 0], 0)
    found = found if ratio is None else ratio(found, live)
    accepts = rng.accept(found, Key(context.length[:, None], nodes, 0, ACCEPT)) & live
    accepted = accepts.long().cumprod(1).sum(1)
    rejected = (accepted < proposal.size)[:, None]
    p, drawn = probs[rows, accepted], q[rows, accepted.clamp(max=N - 1)]
    rest = (p - drawn).clamp(min=0)
    rest = torch.where(rejected & (rest.sum(-1, keepdim=True) > 0), rest, p)
    rest = rest if bonus is None else bonus(rest, p, drawn, rejected)
    token = rng.categorical(rest, Key(context.length, accepted, 0, BONUS))
    return sd.Verdict.of(proposal, torch.where(nodes < accepted[:, None], nodes, -1), accepted, token)


def with_steps(**changes):
    return lambda *call: steps(*call, **changes)


def skips(proposal, probs, context, rng):
    verdict = right(proposal, probs, context, rng)
    return replace(verdict, path=verdict.path.clamp(min=0))


def foreign_bonus(proposal, probs, context, rng):
    verdict = right(proposal, probs, context, rng)
    return replace(verdict, bonus=verdict.bonus + probs.shape[-1])


def forgets_the_bonus(proposal, probs, context, rng):
    verdict = right(proposal, probs, context, rng)
    return replace(
        verdict, tokens=verdict.tokens * (torch.arange(proposal.nodes + 1) < verdict.accepted[:, None])
    )


def in_place(proposal, probs, context, rng):
    verdict = right(proposal, probs, context, rng)
    probs.clamp_(min=1e-3)
    return verdict


def by_the_batch(proposal, probs, context, rng):
    """Rejects all of every row if a row of the batch has no nodes."""
    none = replace(proposal, size=proposal.size * int(proposal.size.min() > 0))
    return right(none, probs, context, rng)


def by_the_place(proposal, probs, context, rng):
    return right(
        replace(proposal, size=proposal.size.clamp(max=3) * (torch.arange(len(probs)) < 20)),
        probs,
        context,
        rng,
    )


def reads_absent(proposal, probs, context, rng):
    """A row is a chain if all its entries are one."""
    chain = (proposal.parents == torch.arange(-1, proposal.nodes - 1)).all(1)
    return right(replace(proposal, size=torch.where(chain, proposal.size, 0)), probs, context, rng)


def reads_absent_tokens(proposal, probs, context, rng):
    p = probs[:, :-1].gather(2, proposal.tokens[..., None])
    assert p is not None
    return right(proposal, probs, context, rng)


def by_node(proposal, probs, context, rng):
    q = proposal.probs
    if q is None:
        return right(proposal, probs, context, rng)
    return steps(proposal, probs, context, rng, q=q)


def needs_a_node(proposal, probs, context, rng):
    assert proposal.nodes, "no node"
    return right(proposal, probs, context, rng)


def certain_without_nodes(proposal, probs, context, rng):
    verdict = right(proposal, probs, context, rng)
    if proposal.nodes:
        return verdict
    best = probs[:, 0].argmax(-1)
    return sd.Verdict.of(proposal, verdict.path, verdict.accepted, best)


class Whole(Calls):
    """``how`` is asked for proposals without nodes, too."""

    def __call__(self, proposal, probs, context, rng):
        return self.how(proposal, probs, context, rng)


class Keyed:
    """Another key for each bonus."""

    def __init__(self, rng, key):
        self.rng, self.key = rng, key

    def categorical(self, probs, key):
        return self.rng.categorical(probs, self.key(key))

    def accept(self, prob, key):
        return self.rng.accept(prob, key)


def keyed(key):
    return lambda proposal, probs, context, rng: steps(proposal, probs, context, Keyed(rng, key))


def global_numbers(proposal, probs, context, rng):
    class Global(Keyed):
        def accept(self, prob, key):
            return torch.rand(prob.shape) < prob

    return steps(proposal, probs, context, Global(rng, lambda key: key))


class Lossy(Chains):
    @property
    def info(self):
        return sd.VerifierInfo("mine", lossless=False)


class NoShortcut(Chains):
    @property
    def info(self):
        return sd.VerifierInfo("mine", lossless=True, takes_logits=True)


class Shortcut(Chains):
    """Compares tokens, and forgets the accepted ones."""

    @property
    def info(self):
        return sd.VerifierInfo("mine", lossless=True, compares_tokens=True)

    def greedy(self, proposal, tokens):
        return super().greedy(replace(proposal, size=proposal.size * 0), tokens)


class ShortcutByTheBatch(Shortcut):
    def greedy(self, proposal, tokens):
        few = len(tokens) < 4
        return sd.Rejection.greedy(self, replace(proposal, size=proposal.size * (not few)), tokens)


class ShortcutReadsAbsent(Shortcut):
    def greedy(self, proposal, tokens):
        chain = (proposal.parents == torch.arange(-1, proposal.nodes - 1)).all(1)
        return sd.Rejection.greedy(self, replace(proposal, size=torch.where(chain, proposal.size, 0)), tokens)


class OfSiblings(sd.Rejection):
    """``takes``, by its declaration; ``check`` takes all, or no independent ones."""

    def __init__(self, takes, refuses=False):
        object.__setattr__(self, "trust_declared", False)
        object.__setattr__(self, "takes", takes)
        object.__setattr__(self, "refuses", refuses)

    @property
    def info(self):
        return sd.VerifierInfo("mine", lossless=True, siblings=self.takes)

    def check(self, proposal):
        super().check(proposal)
        if self.refuses and proposal.source is not None:
            raise ValueError("it takes no independent siblings")


class ByTheFirstShape(OfSiblings):
    """All rows have the first row's tree."""

    def __call__(self, proposal, probs, context, rng):
        parents = proposal.parents[:1].expand_as(proposal.parents)
        return super().__call__(replace(proposal, parents=parents), probs, context, rng)


class Squared(sd.Coupled):
    """Races with the squares of the probabilities."""

    def __call__(self, proposal, probs, context, rng):
        squares = probs**2
        return super().__call__(
            proposal, squares / squares.sum(-1, keepdim=True).clamp(min=1e-9), context, rng
        )


class Never(Chains):
    def check(self, proposal):
        raise ValueError("never")


class Checks(Chains):
    def check(self, proposal):
        super().check(proposal)
        proposal.probs.sum()  # point masses have none


class Trusts(Chains):
    def check(self, proposal):
        replace(self, trust_declared=True)
        if not bool(tree.is_chain(proposal.parents, proposal.size).all()):
            raise ValueError("it takes chains")


class Sharing(Chains):
    """All siblings draw with one number."""

    def for_draft(self, rng):
        return planted.SiblingsShare(rng)


class Unselected(Chains):
    """Rows that leave keep the decisions of all."""

    def for_draft(self, rng):
        class Fixed(planted.PositionKeyed):
            def rekeyed(self, key):
                return key

            def select(self, rows):
                return Fixed(self.rng.select(torch.arange(len(rows))))

        return Fixed(rng)


@dataclass(frozen=True)
class Planted(Chains):
    """One of ``audit.planted``, for chains of drawn nodes."""

    inner: Any = None

    def check(self, proposal):
        super().check(proposal)
        if proposal.nodes and proposal.probs is None:
            raise ValueError("it takes drawn nodes")

    def __call__(self, proposal, probs, context, rng):
        return (self.inner if proposal.nodes else right)(proposal, probs, context, rng)


@dataclass(frozen=True)
class Siblings(Planted):
    """For siblings of the root."""

    def check(self, proposal):
        sd.Rejection.check(self, proposal)
        if proposal.nodes and (proposal.probs is None or bool((proposal.parents >= 0).any())):
            raise ValueError("it takes siblings")


def from_p(rest, p, drawn, rejected):
    return p


def from_q(rest, p, drawn, rejected):
    return torch.where(rejected, drawn, rest)


ALL = sd.VerifierInfo("any").siblings

PLANTED: list[tuple[str, Any]] = [
    ("declaration", Lossy()),
    ("declaration", NoShortcut()),
    ("declaration", OfSiblings(("in sequence",))),
    ("check", OfSiblings(())),
    ("check", OfSiblings(("in turn", "independent"))),
    ("check", OfSiblings(ALL, refuses=True)),
    ("check", Never()),
    ("check", Checks()),
    ("path", Calls(skips)),
    ("path", Calls(foreign_bonus)),
    ("path", Calls(forgets_the_bonus)),
    ("arguments", Calls(in_place)),
    ("support", Calls(with_steps(ratio=lambda ratio, live: ratio.clamp(min=1e-300)))),  # u <= p / q
    ("support", Calls(with_steps(bonus=from_q))),
    ("shortcut", Shortcut()),
    ("shortcut", ShortcutByTheBatch()),
    ("absent nodes", ShortcutReadsAbsent()),
    ("mates", ByTheFirstShape(ALL)),
    ("lossless", Squared()),
    ("mates", Calls(by_the_batch)),
    ("mates", Calls(by_the_place)),
    ("absent nodes", Calls(reads_absent)),
    ("absent nodes", Calls(reads_absent_tokens)),
    ("shared distributions", Calls(by_node)),
    ("empty", Whole(needs_a_node)),
    ("empty", Whole(certain_without_nodes)),
    ("keys", Calls(keyed(lambda key: key._replace(depth=0, stream=ACCEPT)))),
    ("keys", Calls(keyed(lambda key: key._replace(stream=0)))),
    ("keys", Calls(keyed(lambda key: key._replace(at=key.at + key.depth)))),
    ("mates", Calls(global_numbers)),
    ("lossless", Calls(with_steps(bonus=from_p))),
    ("lossless", Calls(with_steps(ratio=lambda ratio, live: ratio**2))),
    ("lossless", Calls(with_steps(ratio=lambda ratio, live: ratio.cumprod(1)))),
    ("lossless", Planted(inner=planted.BonusFromTarget())),
    ("lossless", Planted(inner=planted.GreedyAcceptance())),
    ("lossless", Siblings(inner=planted.SiblingsForgetResidual())),
    *(
        ("lossless", Planted(inner=planted.BlockByThePaper(mistake=mistake)))
        for mistake in ("product", "residual", "first", "behind")
    ),
    ("declared probabilities", Trusts()),
    ("draws", Sharing()),
    ("draws", Unselected()),
]


@pytest.mark.slow
def test_what_is_right_keeps_every_rule():
    found = check_verifier(sd.Rejection())
    assert set(found.rules) == SUITE.rules.keys()
    assert found.not_tried == {}
    without = check_verifier(Calls(steps))
    assert without.not_tried == {"shortcuts": "it declares no shortcut"}
    assert set(without.rules) == SUITE.rules.keys() - {"shortcut"}
    assert check_verifier(Planted(inner=planted.BlockByThePaper()), only=["distribution"]).rules == (
        "lossless",
    )


@pytest.mark.slow
def test_a_function_is_a_verifier():
    def mine(proposal, probs, context, rng):
        return sd.Rejection()(proposal, probs, context, rng)

    found = check_verifier(mine)
    assert found.part == "mine"
    assert set(found.rules) == SUITE.rules.keys() - {"shortcut"}


def test_a_function_is_given_no_declared_probabilities():
    def mine(proposal, probs, context, rng):
        return sd.Rejection()(proposal, probs, context, rng)

    assert check_verifier(mine, only=["declared"]).rules == ("declared probabilities",)
    q = torch.full((1, 1, 3), 1 / 3)
    with pytest.raises(
        ValueError, match="mine is a function, which is given no declared probabilities: draw"
    ):
        verifier_of(mine).check(sd.Proposal.chain(torch.tensor([[1]]), torch.tensor([1]), q))


def test_the_remedy_is_of_what_happened():
    """An exception in the test of the distribution is no bias."""

    def raises(proposal, probs, context, rng):
        if int(context.length.min()) == int(context.length.max()) == 1 and proposal.nodes:
            raise IndexError("index 99 is out of bounds")
        return right(proposal, probs, context, rng)

    with pytest.raises(
        BrokenRule, match=r"index 99 is out of bounds.*change what the message says.*are not masked"
    ):
        check_verifier(Calls(raises), only=["distribution"])
    with pytest.raises(
        BrokenRule, match=r"off by a total variation.*norm\(max.*its own q.*declare lossless=False"
    ):
        check_verifier(Calls(with_steps(bonus=from_p)), only=["distribution"])


def test_the_verifier_of_the_page_keeps_the_rules():
    page = Path(__file__).parents[1] / "docs/howto/verifier.md"
    code = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec("\n".join(code), namespace)
    tests = ["declares", "checks", "verdicts", "absent", "shared", "empty", "declared"]
    assert "absent nodes" in check_verifier(namespace["FirstNode"](), only=tests).rules


@pytest.mark.parametrize(
    ("rule", "verifier"),
    [
        pytest.param(rule, verifier, id=f"{n}-{rule}", marks=pytest.mark.slow if n % 2 else ())
        for n, (rule, verifier) in enumerate(PLANTED)
    ],
)
@pytest.mark.slow
def test_a_planted_mistake_is_caught_by_its_rule(rule, verifier):
    with pytest.raises(BrokenRule) as caught:
        # Those of the audit are made for chains without gaps.
        check_verifier(verifier, only=["distribution"] if isinstance(verifier, Planted) else None)
    assert caught.value.rule == rule, caught.value
    assert caught.value.remedy == SUITE.rules[rule].remedy


def test_every_rule_is_broken_by_some_plant():
    assert {rule for rule, _ in PLANTED} == SUITE.rules.keys()


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match=r"verifier is the class Rejection: give an object"):
        check_verifier(sd.Rejection)
    with pytest.raises(TypeError, match=r"a int: give a built decoder, .* a verifier, or a function"):
        check_verifier(3)
