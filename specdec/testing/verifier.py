"""``check_verifier``: tries the rules of ``docs/verifiers.md`` on a verifier, the library's or your own, with plain tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.audit.around import verifier_of
from specdec.capabilities import Siblings, VerifierInfo
from specdec.models import TableModel
from specdec.rng import ACCEPT, BONUS, Key, Philox, seeds
from specdec.sampling import Sampling
from specdec.testing.recorder import Recorder
from specdec.testing.rules import Kept, NotTried, Suite, instance, lacks
from specdec.testing.states import no_global_draws
from specdec.testing.verdicts import check_verdict, committed, same
from specdec.testing.verifier_cases import ROWS, SHAPES, SMALL, Asked, Example, Extreme, asked
from specdec.testing.verifier_law import Races, first_token, off, p_value
from specdec.testing.verifier_rules import (
    ABSENT,
    ARGUMENTS,
    CHECK,
    DECLARATION,
    DECLARED,
    DISTRIBUTION,
    DRAWS,
    EMPTY,
    KEYS,
    MATES,
    PATH,
    SHARED,
    SHORTCUT,
    SUPPORT,
)
from specdec.types import Context, Proposal, Verdict

V = 5
TABLE = TableModel.random(V, order=1, seed=4, zeros=0.25)
DENSE = TableModel.random(3, order=1, seed=0)
SPARSE = TableModel([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.3, 0.0, 0.7]])
LEAST = 1e-4  # p-value: below it, seeded rows do not have the distribution
CERTAIN = 1e-9  # total variation

SUITE = Suite("verifier")


def check_verifier(verifier: Any, *, only: Collection[str] | None = None) -> Kept:
    """Try the rules of verifiers on ``verifier``, with every kind of proposal that its ``check`` takes.

    For a verifier that is declared lossless, the text of one round is enumerated exactly. ``certify(verifier)`` enumerates whole decodings.

    Args:
        verifier: an object with the methods of ``protocols.Verifier``, or a function ``(proposal, probs, context, rng) -> Verdict``.
        only: some tests (``SUITE.names``); ``None``: all.
    Returns:
        the rules that are kept, and what was not tried.
    Raises:
        BrokenRule: the first rule that is broken, and the remedy. TypeError: ``verifier`` is no verifier, or a class.
    """
    part = instance(verifier, "verifier")
    return SUITE.run(part, Case(verifier_of(part)), only)


@dataclass(frozen=True, eq=False)
class Case:
    """A verifier and the proposals that it takes."""

    verifier: Any

    @cached_property
    def info(self) -> VerifierInfo:
        return VerifierInfo.of(self.verifier)

    @cached_property
    def asked(self) -> list[Asked]:
        return asked(self.verifier, TABLE, SHAPES)

    @cached_property
    def examples(self) -> list[tuple[Asked, Example, Verdict]]:
        """Every kind of proposal, with an example of it and the verdict on it."""
        made = [(one, one.example(self.verifier, TABLE)) for one in self.asked]
        return [(one, example, self.verifier(*example)) for one, example in made]


@SUITE.test(DECLARATION)
def declares(case: Case) -> None:
    missing = lacks(case.verifier, "__call__", "check", "for_draft")
    DECLARATION.require(not missing, f"it has no {', '.join(missing)}")
    info = case.info
    DECLARATION.require(isinstance(info.name, str) and info.name, f"its name is {info.name!r}")
    DECLARATION.require(isinstance(info.lossless, bool), f"lossless is {info.lossless!r}")
    DECLARATION.require(
        info.lossless or "lossy" in info.name, f"it is not lossless and its name is {info.name!r}"
    )
    unknown = set(info.siblings) - set(get_args(Siblings))
    DECLARATION.require(not unknown, f"siblings is {info.siblings!r}")
    for shortcut, method in ((info.compares_tokens, "greedy"), (info.takes_logits, "from_logits")):
        DECLARATION.require(
            not shortcut or not lacks(case.verifier, method),
            f"it declares the shortcut {method} and has no such method",
        )


@SUITE.test(CHECK)
def checks(case: Case) -> None:
    CHECK.require(case.asked, "it refuses chains, trees and single nodes, drawn by the library or chosen")
    case.verifier.check(Proposal.none(3))
    for shape in ("siblings", "tree"):
        taken = {one.kind for one in case.asked if one.shape == shape}
        for kind, drawn in (("sampled", "in turn"), ("independent", "independent"), ("distinct", "distinct")):
            CHECK.require(
                not taken or (kind in taken) == (drawn in case.info.siblings),
                f"it {'takes' if kind in taken else 'refuses'} siblings that are drawn {drawn!r}, and declares siblings={case.info.siblings}",
            )


@SUITE.test(PATH, ARGUMENTS, SUPPORT)
def verdicts(case: Case) -> None:
    for one in case.asked:
        example = one.example(case.verifier, TABLE)
        given = [
            t
            for t in (*vars(example.proposal).values(), example.probs, *vars(example.context).values())
            if isinstance(t, Tensor)
        ]
        copies = [t.clone() for t in given]
        verdict = case.verifier(*example)
        ARGUMENTS.require(all(map(torch.equal, given, copies)), f"{one}: an argument was changed")
        check_verdict(str(one), example, verdict, case.info.lossless)
        for u in (0.0, 1 - 2.0**-53):
            extreme = example._replace(rng=Extreme(u))
            check_verdict(f"{one}, every number {u}", extreme, case.verifier(*extreme), case.info.lossless)


@SUITE.test(SHORTCUT)
def shortcuts(case: Case) -> None:
    if not (case.info.compares_tokens or case.info.takes_logits):
        raise NotTried("it declares no shortcut")
    for one, example, verdict in case.examples:
        for rows in (torch.arange(ROWS), torch.tensor([20, 3, 4])):
            proposal, probs, context, rng = example.rows(rows)
            whole = (verdict.path[rows], verdict.tokens[rows])
            if one.greedy and case.info.compares_tokens:
                found = case.verifier.greedy(proposal, probs.argmax(-1))
                alike = all(map(torch.equal, (found.path, found.tokens), whole))
                SHORTCUT.require(alike, f"{one}: greedy decides otherwise than __call__")
            if not one.greedy and case.info.takes_logits:
                logits = torch.where(probs.sum(-1, keepdim=True) > 0, probs.log(), 0)
                found = case.verifier.from_logits(proposal, logits, Sampling(), context, rng)
                alike = all(map(torch.equal, (found.path, found.tokens), whole))
                SHORTCUT.require(alike, f"{one}: from_logits decides otherwise than __call__")


@SUITE.test(MATES)
def mates(case: Case) -> None:
    for name, example, whole in case.examples:
        MATES.require(same(case.verifier(*example), whole), f"{name}: asked again, it decides otherwise")
        for rows in (torch.arange(ROWS).flip(0), torch.tensor([5, 3, 20]), torch.tensor([4])):
            some = case.verifier(*example.rows(rows))
            alike = committed(some) == [committed(whole)[b] for b in rows.tolist()]
            MATES.require(
                alike and torch.equal(some.path, whole.path[rows]),
                f"{name}: rows {rows.tolist()[:3]} alone or in another order are decided otherwise",
            )
        if name.shape in ("siblings", "tree"):
            _among_chains(case, name, example, whole)


def _among_chains(case: Case, name: Asked, example: Example, whole: Verdict) -> None:
    """Rows of one shape among rows of another."""
    proposal, rest = example.proposal, torch.arange(1, ROWS, 2)
    parents = proposal.parents.clone()
    parents[::2] = torch.arange(-1, proposal.nodes - 1)
    mixed = example._replace(proposal=replace(proposal, parents=parents))
    try:
        case.verifier.check(mixed.proposal)
    except ValueError:
        return
    found = case.verifier(*mixed)
    MATES.require(
        torch.equal(found.path[rest], whole.path[rest])
        and torch.equal(found.tokens[rest], whole.tokens[rest]),
        f"{name}: among chains, rows are decided otherwise",
    )
    for rows in (torch.arange(0, ROWS, 2), torch.tensor([20, 3, 2])):
        some = case.verifier(*mixed.rows(rows))
        MATES.require(
            torch.equal(some.path, found.path[rows]) and torch.equal(some.tokens, found.tokens[rows]),
            f"{name}: chains are decided otherwise than among trees",
        )


@SUITE.test(ABSENT)
def absent(case: Case) -> None:
    """The verdict does not depend on what the entries of nodes that do not exist hold, nor on how many there are."""
    for name, example, expected in case.examples:
        proposal, probs, context, rng = example
        N, size = proposal.nodes, probs.shape[-1]
        dead = torch.arange(N) >= proposal.size[:, None]
        q, sources = proposal.probs, proposal.sources()
        for token, parent, source in ((size - 1, torch.arange(N) - 1, 0), (99, 99, 99), (-99, -99, -99)):
            wild = replace(
                proposal,
                tokens=torch.where(dead, token, proposal.tokens),
                parents=torch.where(dead, parent, proposal.parents),
                probs=None if q is None else torch.where(dead[..., None], torch.nan, q),
                source=None if q is None else torch.where(dead, source, sources),
            )
            nothing = torch.where(dead[..., None], torch.nan, probs[:, 1:])
            found = case.verifier(wild, torch.cat([probs[:, :1], nothing], 1), context, rng)
            ABSENT.require(
                same(found, expected), f"{name}: what absent nodes hold ({token}) changes the verdict"
            )
            if name.greedy and case.info.compares_tokens:
                found = case.verifier.greedy(wild, probs.argmax(-1))
                ABSENT.require(
                    same(found, expected),
                    f"{name}: what absent nodes hold ({token}) changes what greedy decides",
                )
        wider = replace(
            proposal,
            tokens=pad(proposal.tokens, (0, 2), value=1),
            parents=pad(proposal.parents, (0, 2), value=-1),
            probs=None if proposal.probs is None else pad(proposal.probs, (0, 0, 0, 2), value=1 / size),
            source=None if proposal.source is None else pad(proposal.source, (0, 2)),
        )
        found = case.verifier(wider, pad(probs, (0, 0, 0, 2), value=1 / size), context, rng)
        ABSENT.require(
            committed(found) == committed(expected), f"{name}: more absent nodes change the verdict"
        )


@SUITE.test(SHARED)
def shared(case: Case) -> None:
    tried = 0
    for name, example, verdict in case.examples:
        proposal, probs, context, rng = example
        if proposal.probs is None:
            continue
        N = proposal.nodes
        turned = replace(
            proposal,
            probs=proposal.distributions().flip(1),
            source=torch.arange(N).flip(0).expand(len(probs), N),
        )
        try:
            case.verifier.check(turned)
        except ValueError:
            continue
        tried += 1
        SHARED.require(
            same(case.verifier(turned, probs, context, rng), verdict),
            f"{name}: the same distributions, stored in another order, change the verdict",
        )
    if not tried:
        raise NotTried("it takes no drawn nodes")


@SUITE.test(KEYS)
def keys(case: Case) -> None:
    for one, example, _ in case.examples:
        recorder = Recorder(example.rng, list(range(len(example.probs))), KEYS, races=True)
        with no_global_draws(KEYS, "__call__()"):
            case.verifier(*example._replace(rng=recorder))
        names = [(row, d.key) for row, d in recorder.log]
        twice = (
            sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        )
        KEYS.require(not twice, f"{one}: the key {[str(Key(*key)) for _, key in twice[:1]]} decides twice")  # type: ignore[arg-type]
        streams = {key[3] for _, key in names}
        KEYS.require(streams <= {ACCEPT, BONUS}, f"{one}: keys are of the streams {sorted(streams)}")
        starts = example.context.length.tolist()
        foreign = [key for row, key in names if key[0] != starts[row]]
        KEYS.require(not foreign, f"{one}: keys {foreign[:1]} do not name the block's start")


@SUITE.test(EMPTY)
def empty(case: Case) -> None:
    one = case.asked[0]
    proposal, probs, context, rng = one.example(case.verifier, TABLE)
    none = case.verifier(Proposal.none(len(probs)), probs[:, :1], context, rng)
    EMPTY.require(
        none.path.shape == (len(probs), 0), f"no nodes give a path of shape {list(none.path.shape)}"
    )
    EMPTY.require(
        not none.accepted.any() and torch.equal(none.tokens[:, 0], none.bonus),
        "no nodes, and some are accepted",
    )
    zero = case.verifier(replace(proposal, size=torch.zeros_like(proposal.size)), probs, context, rng)
    EMPTY.require(
        not zero.accepted.any() and torch.equal(zero.bonus, none.bonus),
        "sizes of 0 commit other tokens than a proposal without nodes",
    )


@SUITE.test(DISTRIBUTION)
def distribution(case: Case) -> None:
    if not case.info.lossless:
        raise NotTried("it is not declared lossless")
    for one in asked(case.verifier, DENSE, SMALL):
        if one.greedy:
            continue
        nodes, dense = len(one.parents), one.kind in ("sampled", "independent", "distinct")
        rounds = [(nodes, last) for last in range(3 if dense else 1)]
        rounds += [(nodes - 1, 0)] if dense and not one.whole else []
        try:
            for size, last in rounds:
                far = off(case.verifier, one, DENSE if dense else SPARSE, size, last)
                DISTRIBUTION.require(
                    far <= CERTAIN,
                    f"{one}: the text of a round of {size} nodes is off by a total variation of {far:.2e}",
                )
        except Races:
            found = first_token(case.verifier, one, SPARSE)
            DISTRIBUTION.require(found > LEAST, f"{one}: first tokens do not have p (p-value {found:.1e})")


@SUITE.test(DECLARED)
def declared(case: Case) -> None:
    """An argmax that is declared as a sample of its distribution, the field's most common mistake, is refused, or verified exactly."""
    if not case.info.lossless:
        raise NotTried("it is not declared lossless")
    p, q = (
        torch.tensor(probs, dtype=torch.float64) for probs in ([0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2])
    )
    rows = 20_000
    tokens = q.argmax().expand(rows, 1)
    proposal = Proposal.chain(tokens, torch.ones(rows, dtype=torch.long), q.expand(rows, 1, -1))
    try:
        case.verifier.check(proposal)
    except ValueError:
        return
    context, rng = Context.of([[0]] * rows), Philox(seeds(0, rows))
    first = case.verifier(proposal, p.expand(rows, 2, -1), context, rng).tokens[:, 0]
    seen = torch.bincount(first, minlength=4).double()
    DECLARED.require(
        p_value(seen, p) > LEAST,
        f"an argmax declared as a sample of q is taken, and first tokens are {(seen / rows).tolist()} instead of {p.tolist()}",
    )


@SUITE.test(DRAWS)
def draws(case: Case) -> None:
    rows = 20_000
    rng, p = case.verifier.for_draft(Philox(seeds(5, rows))), torch.tensor([0.5, 0.0, 0.3, 0.2]).double()
    drawn: dict[tuple[int, int], Tensor] = {}
    at, some = torch.full((rows,), 7), torch.tensor([9, 2, 400])
    for depth in (0, 1):
        for sibling in (0, 1):
            key = Key(at, depth, sibling)
            tokens = drawn[depth, sibling] = rng.categorical(p.expand(rows, -1), key)
            found = p_value(torch.bincount(tokens, minlength=4).double(), p)
            DRAWS.require(found > LEAST, f"draws do not have their distribution (p = {found:.1e})")
            DRAWS.require(
                torch.equal(tokens, rng.categorical(p.expand(rows, -1), key)),
                "a key gives another token when asked again",
            )
            part = rng.select(some).categorical(p.expand(3, -1), Key(at[:3], depth, sibling))
            DRAWS.require(
                torch.equal(part, tokens[some]), "select(rows) gives other decisions than those of the rows"
            )
    for other in ((1, 0), (0, 1)):
        DRAWS.require(
            not torch.equal(drawn[0, 0], drawn[other]), f"node (0, 0) and node {other} share their number"
        )
    share = float(rng.accept(torch.full((rows,), 0.25), Key(at, 3)).double().mean())
    DRAWS.require(abs(share - 0.25) < 0.02, f"accept(0.25) is true in {share:.2f} of all rows")
