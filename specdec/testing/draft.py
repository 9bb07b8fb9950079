"""``check_draft``: tries the rules of ``docs/drafts.md`` on a draft, the library's or your own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

import specdec.testing.draft_rules as rules
from specdec import tree
from specdec.audit.certify import certify
from specdec.builder import decoder
from specdec.capabilities import DraftInfo, DraftPart, Siblings
from specdec.models import TableModel
from specdec.protocols import JoinableCache, LanguageModel, Verifier
from specdec.rng import ACCEPT, BONUS, TARGET, Key
from specdec.sampling import Sampling
from specdec.testing.recorder import COIN, Decision, Swap
from specdec.testing.rules import BrokenRule, Kept, NotTried, Suite, instance, lacks
from specdec.testing.session import BUDGETS, Seen, Session, differs, prompts, seen
from specdec.testing.states import caches
from specdec.types import Proposal, Round
from specdec.verifiers import Coupled, Rejection

SETTINGS = (Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.6, top_k=3))
LARGEST = 8  # vocabulary whose texts are enumerated
ALTERNATIVES = 6  # other tokens that a decision is answered with
SUITE = Suite("draft")
Log = Sequence[tuple[int, Decision]]
Name = tuple[int, tuple[int, ...]]  # of a decision: the request, and the key


def check_draft(
    draft: Any,
    target: LanguageModel | None = None,
    *,
    samplings: Sequence[Sampling] = SETTINGS,
    only: Collection[str] | None = None,
) -> Kept:
    """Try the rules of drafts on ``draft``: proposals, random decisions, anticipation, states, rows, and the texts that come out.

    Args:
        draft: an object with the methods of ``protocols.Draft``.
        target: the model that it drafts for. The default is a random table over the vocabulary that the draft declares (``DraftInfo.model``),
            or over 6 tokens: give the target of a draft that is made for another vocabulary. A draft that reads its target (``taps``,
            ``follow``) needs a target with layers or a cache, such as a tiny ``HFModel`` in float64. With a vocabulary of at most 8 tokens
            the texts can be enumerated (``certify``).
        samplings: settings to try. only: some tests (``SUITE.names``); ``None``: all.
    Returns:
        the rules that are kept, and what was not tried.
    Raises:
        BrokenRule: the first rule that is broken, and the remedy. TypeError: a class is given. ValueError: this draft needs a target.
    """
    draft = instance(draft, "draft")
    case = Case(draft, _target(draft) if target is None else target, tuple(samplings))
    try:
        return SUITE.run(draft, case, only)
    except BrokenRule as broken:
        cause = broken.__cause__
        raised = cause is not None and not isinstance(cause, BrokenRule)
        guessed = target is None and DraftInfo.of(draft).model is None
        if guessed and (raised or broken.rule == rules.VOCABULARY.name):
            broken.remedy = (
                f"if the draft is not made for {case.target.vocab_size} tokens, the vocabulary of the target by default, give its own target, "
                f"check_draft(draft, target); otherwise {broken.remedy}"
            )
        raise


@dataclass(frozen=True, eq=False)
class Case:
    """A draft, its target, and the samplings to try."""

    draft: Any
    target: LanguageModel
    samplings: tuple[Sampling, ...]

    def session(self, sampling: Sampling, **more: Any) -> Session:
        return Session(self.draft, self.target, sampling, **more)

    def play(self, sampling: Sampling, **more: Any) -> list[dict[int, Seen]]:
        """What each row proposes and commits in every round of ``BUDGETS``, without the batch's padding."""
        session = self.session(sampling, **more)
        return [seen(session.round(budgets)) for budgets in BUDGETS]


def _target(draft: Any) -> LanguageModel:
    part = DraftPart.of(draft)
    if part.info.taps or part.follows is not None:
        raise ValueError(
            f"draft {part.info.name!r} reads its target: give target=, a small HFModel in float64 of the family that it drafts for"
        )
    size = 6 if part.info.model is None else part.info.model.vocab_size
    return TableModel.random(size, order=2 if size <= 16 else 1, seed=0, zeros=0.2)


@SUITE.test(rules.DECLARATION)
def declares(case: Case) -> None:
    missing = lacks(case.draft, "init", "propose", "observe", "select")
    rules.DECLARATION.require(not missing, f"it has no {', '.join(missing)}")
    info = DraftInfo.of(case.draft)
    rules.DECLARATION.require(isinstance(info.name, str) and info.name, f"its name is {info.name!r}")
    rules.DECLARATION.require(info.trees in (False, True), f"trees is {info.trees!r}")
    rules.DECLARATION.require(info.siblings in get_args(Siblings), f"siblings is {info.siblings!r}")
    rules.DECLARATION.require(
        callable(info.nodes), f"nodes is {info.nodes!r} and not a function of the length"
    )


@SUITE.test(
    rules.FORM,
    rules.BUDGET,
    rules.STRUCTURE,
    rules.NODES,
    rules.VOCABULARY,
    rules.PROBABILITIES,
    rules.SIBLINGS,
    rules.STATE,
    also=(rules.PROVENANCE, rules.KEYS),
)
def proposals(case: Case) -> None:
    """Budgets that differ between rows, zero included; the session tests every proposal, and that states are not changed in place."""
    for sampling in case.samplings:
        session = case.session(sampling)
        for budgets in BUDGETS * 2:
            session.round(budgets)


@SUITE.test(rules.PROVENANCE, rules.KEYS)
def draws(case: Case) -> None:
    for sampling in case.samplings:
        session, used = case.session(sampling), set[Name]()
        for budgets in BUDGETS * 2:
            round = session.round(budgets)
            proposal, requests = round.proposal, round.context.request.tolist()
            start = dict(zip(requests, round.context.length.tolist()))
            for row, d in session.log:
                rules.KEYS.require(
                    d.key[0] == start[row],
                    f"the key {_shown({(row, d.key)})} is of a block of row {row} that starts at {start[row]}",
                )
            names = [(row, decision.key) for row, decision in session.log]
            twice = used.intersection(names) or {name for name in names if names.count(name) > 1}
            rules.KEYS.require(not twice, f"the key {_shown(twice)} was used for two decisions")
            used.update(names)
            streams = {dict(zip(Key._fields, d.key))["stream"] for _, d in session.log}
            rules.KEYS.require(
                not streams & {ACCEPT, BONUS, TARGET},
                f"of the streams {sorted(streams)} some are the verifier's",
            )
            dropped(proposal, session.log, requests)
            if proposal.provenance == "point" and not sampling.greedy:
                rules.PROVENANCE.require(
                    not session.log, "tokens were drawn, and the proposal says that they were chosen"
                )


def _shown(names: set[Name]) -> str:
    return ", ".join(str(Key(*key)) for _, key in sorted(names)[:1])  # type: ignore[arg-type]


def dropped(proposal: Proposal, log: Log, requests: Sequence[int]) -> list[tuple[int, Decision]]:
    """The drawn tokens that have no submitted node; breaks ``provenance`` unless each sampled node was drawn from its distribution."""
    left = [entry for entry in log if entry[1].token != COIN]
    if proposal.provenance != "sampled":
        return left
    depth = tree.depths(proposal.parents)
    for b, request in enumerate(requests):
        for n in range(int(proposal.size[b])):
            token, q = int(proposal.tokens[b, n]), proposal.q(n)[b]
            for i, (whose, d) in enumerate(left):
                mine = whose == request and d.token == token and d.key[1] == int(depth[b, n])
                if mine and torch.equal(d.distribution.to(q), q):
                    del left[i]
                    break
            else:
                rules.PROVENANCE.require(
                    float(q[token]) == 1,  # a point mass needs no draw
                    f"node {n} of row {request}, token {token}, was not drawn from the distribution that it carries",
                )
    return left


@SUITE.test(rules.REPEATABLE)
def repeats(case: Case) -> None:
    """One draft object serves any number of runs, because everything that it remembers is in its states."""
    for sampling in case.samplings:
        once, _, again = (case.play(sampling, seed=seed) for seed in (7, 8, 7))
        how = _first_difference(again, once)
        rules.REPEATABLE.require(not how, f"with the same keys, after another run, {how}")


@SUITE.test(rules.ANTICIPATION)
def anticipation(case: Case) -> None:
    """Other values of dropped nodes do not change the proposal. Whether a node is submitted does not depend on its value."""
    drawing = [sampling for sampling in case.samplings if not sampling.greedy]
    for sampling in drawing:
        unseen: dict[Name, int] = {}
        session = case.session(sampling)
        for budgets in BUDGETS:
            for request, d, submitted in _submissions(session, budgets):
                if not submitted and _others(d):
                    unseen[request, d.key] = _others(d)[0]
        how = _first_difference(case.play(sampling, swap=unseen), case.play(sampling)) if unseen else ""
        rules.ANTICIPATION.require(not how, f"other values of dropped nodes change the proposal: {how}")
    for number in (0, 1) if drawing else ():
        _each_otherwise(case, drawing[0], number)


def _each_otherwise(case: Case, sampling: Sampling, number: int) -> None:
    """Replace the outcomes of round ``number``'s decisions by others, for one depth and sibling at a time."""

    def played(swap: Swap) -> list[tuple[int, Decision, bool]]:
        session = case.session(sampling, swap=swap)
        for budgets in BUDGETS[:number]:
            session.round(budgets)
        return _submissions(session, BUDGETS[number])

    plain = played({})
    for node in sorted({d.key[1:] for _, d, _ in plain}):
        here = [(request, d, submitted) for request, d, submitted in plain if d.key[1:] == node]
        for nth in range(min(ALTERNATIVES, max(len(_others(d)) for _, d, _ in here))):
            others = {(r, d.key): _others(d)[nth] for r, d, _ in here if nth < len(_others(d))}
            was = {(r, d.key): submitted for r, d, submitted in here}
            for request, d, submitted in played(others):
                if (request, d.key) in others:
                    rules.ANTICIPATION.require(
                        submitted == was[request, d.key],
                        f"row {request} {'submits' if submitted else 'drops'} its node at depth {d.key[1]} where token {d.token} is drawn, "
                        f"and {'drops' if submitted else 'submits'} it where another token is",
                    )


def _submissions(session: Session, budgets: Sequence[int]) -> list[tuple[int, Decision, bool]]:
    """Each drawn token of a round, and whether it was submitted as a node."""
    requests = session.requests
    left = dropped(session.round(budgets).proposal, session.log, requests)
    return [(r, d, not any(d is other for _, other in left)) for r, d in session.log if d.token != COIN]


def _others(d: Decision) -> list[int]:
    """The other tokens that the decision could have given."""
    return [token for token in d.distribution.nonzero()[:, 0].tolist() if token != d.token]


def _first_difference(found: Sequence[Mapping[int, Seen]], expected: Sequence[Mapping[int, Seen]]) -> str:
    """What differs in the first round that differs; empty if none does."""
    said = (f"round {n}, {how}" for n, pair in enumerate(zip(found, expected), 1) if (how := differs(*pair)))
    return next(said, "")


@SUITE.test(rules.MATES)
def alone(case: Case) -> None:
    for sampling in case.samplings:
        whole = case.play(sampling)
        for request in range(4):
            how = _first_difference(case.play(sampling, rows=(request,)), whole)
            rules.MATES.require(not how, f"alone in {how} in a batch of four")


@SUITE.test(rules.SELECT, also=(rules.STATE,))
def leaves(case: Case) -> None:
    for sampling in case.samplings:
        whole, session = case.play(sampling), case.session(sampling)
        got = [seen(session.round(BUDGETS[0]))]
        session.keep([3, 2, 0])
        got.append(seen(session.round(BUDGETS[1])))
        session.keep([0, 3])
        got += [seen(session.round(budgets)) for budgets in BUDGETS[2:]]
        how = _first_difference(got, whole)
        rules.SELECT.require(not how, f"after rows had left and changed their order, in {how}")


@SUITE.test(rules.JOIN)
def joins(case: Case) -> None:
    session = case.session(case.samplings[-1])
    if session.part.joins is None:
        raise NotTried("it has no join(state, other)")
    if not isinstance(session.cache, JoinableCache):
        raise NotTried("the target's cache cannot be joined")
    for sampling in case.samplings:
        whole, first, second = case.play(sampling), case.session(sampling, rows=(2, 0)), None
        got = [seen(first.round(BUDGETS[0]))]
        second = case.session(sampling, rows=(3, 1))
        second.round(BUDGETS[0])
        first.join(second)
        got += [seen(first.round(budgets)) for budgets in BUDGETS[1:]]
        how = _first_difference(got, whole)
        rules.JOIN.require(not how, f"after two batches had been joined, in {how}")


@SUITE.test(rules.OTHERS)
def others(case: Case) -> None:
    for sampling in case.samplings:
        session = case.session(sampling)
        for number, budgets in enumerate(BUDGETS * 2):
            session.round(budgets, foreign=number % 2 == 1)


@SUITE.test(rules.CACHE)
def consumed(case: Case) -> None:
    """A cache that has missed commits or changes of rows repairs itself, at the price of feeding everything once more."""
    session = case.session(case.samplings[-1])
    if not caches(session.state):
        raise NotTried("its state has no cache, which is an object with sync and commit")
    if session.part.info.reads_cache:
        raise NotTried("it reads the target's cache, which has no tokens to be fed once more")
    for budgets, stay in zip(BUDGETS, ([3, 2, 1, 0], [0, 3, 2], [0, 3, 2], [2, 3], [3])):
        before = dict(zip(session.requests, session.context.length.tolist()))
        session.round(budgets)
        session.keep(stay)
        for path, cache in caches(session.state).items() if min(budgets) else ():
            # New to it are the bonus token, and a last node that nothing was drafted after. One that holds nothing was not used.
            held = cache.sync(session.context)
            least = session.context.length - 2
            if session.part.info.rereads:
                least = torch.tensor([before[request] for request in session.requests])
            rules.CACHE.require(
                bool(((held >= least) | (held == 0).all()).all()),
                f"of {session.context.length.tolist()} committed tokens the draft's cache, {path}, holds {held.tolist()}",
            )


@SUITE.test(rules.GREEDY)
def greedy(case: Case) -> None:
    _same_texts(case, Sampling(temperature=0.0), Rejection(), rules.GREEDY.require)


@SUITE.test(rules.COUPLED)
def coupled(case: Case) -> None:
    for sampling in case.samplings:
        if not sampling.greedy:
            _same_texts(case, sampling, Coupled(), rules.COUPLED.require)


def _same_texts(case: Case, sampling: Sampling, verifier: Verifier, require: Any) -> None:
    """Even and ragged budgets, with and without an end token: the texts are those of plain decoding."""
    base = decoder(case.target).sampling(sampling).verifier(verifier)
    drafted, plain = base.draft(case.draft, length=4).build(), base.build()
    texts, seed = prompts(case.target.vocab_size), [11, 12, 13, 14]
    for budgets in (12, [1, 9, 2, 17]):
        for end in ((), (case.target.vocab_size // 2,)):
            got, wanted = (
                one.generate(texts, budgets, seed=seed, eos_token_id=end).ids for one in (drafted, plain)
            )
            wrong = [b for b in range(4) if got[b] != wanted[b]]
            require(
                not wrong,
                f"row {wrong[:1]} got {[got[b] for b in wrong[:1]]}, plain decoding {[wanted[b] for b in wrong[:1]]}",
            )


@SUITE.test(rules.LOSSLESS)
def distribution(case: Case) -> None:
    """Every text of a few tokens, with its exact probability."""
    size = case.target.vocab_size
    if size > LARGEST:
        raise NotTried(
            f"a vocabulary of {size} has too many texts: give a target of at most {LARGEST} tokens"
        )
    long = size <= 3
    made = decoder(case.target).draft(case.draft, length=2 if long else 1).build()
    texts = [[0], [token % size for token in (2, 1, 2)]] if long else [[0]]
    budgets = [4, 3] if long else 3
    kinds: set[torch.dtype] = set()

    def note(round: Round) -> None:
        if round.proposal.probs is not None:
            kinds.add(round.proposal.probs.dtype)

    made.generate(texts, budgets, seed=0, on_round=note)
    found = certify(made, texts, budgets)
    near = 1e-9 if kinds <= {torch.float64} else 1e-6  # a draft in float32 has sums of 1 up to its rounding
    rules.LOSSLESS.require(found.total_variation <= near and not found.astray, f"{found}")
