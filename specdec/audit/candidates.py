"""The part of the catalogue with verifiers of trees and of several candidates, and the mistakes that are planted in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec import drafts
from specdec.audit.adversaries import MENU, Adversary
from specdec.audit.composed import (
    BASE,
    CHAIN,
    MODEL,
    OTHER,
    PAIRS,
    PENALTIES,
    RAGGED,
    TREE,
    Composition,
    distribution,
)
from specdec.audit.level_adversary import LevelAdversary
from specdec.audit.planted import PositionKeyed
from specdec.audit.planted_siblings import (
    KSeqByHand,
    LooksAtSiblings,
    TopAndWhole,
    TransportUnmoved,
    TraversalByThePaper,
    UnorderedTransport,
)
from specdec.builder import decoder
from specdec.drafts.siblings import Distinct, Drawing, Independent, TopAndOne
from specdec.executors import Optimistic
from specdec.models import TableModel
from specdec.verifiers import DistinctTransport, KSeq, OptimalTransport, Traversal

BINARY, SMALL = decoder(TableModel.random(2, 1, seed=3)), TableModel.random(2, 1, seed=4)
STOPS: dict[str, Any] = {"eos_token_id": (2,)}


def traversal() -> Iterator[Composition]:
    """Traversal verification, of siblings drawn in any way."""
    base, binary, starts = BASE.verifier(Traversal()), BINARY.verifier(Traversal()), ((0,), (1,), (2, 0))
    penalised = base.draft(TREE, length=2).sampling(temperature=1.5, top_p=0.9, processors=PENALTIES)
    for name, builder, tokens in (
        ("chain k=2", base.draft(CHAIN, length=2), 4),
        ("chain k=3, vocabulary 2", binary.draft(SMALL, length=3), 5),
        ("3 candidates", base.draft(drafts.Tree(OTHER, (3,)), length=1), 3),
        ("tree (2, 1)", base.draft(TREE, length=2), 4),
        ("tree (1, 2)", base.draft(drafts.Tree(OTHER, (1, 2)), length=2), 4),
        ("tree (2, 2), vocabulary 2", binary.draft(drafts.Tree(SMALL, (2, 2)), length=2), 4),
        ("tree (2, 1), penalties, temperature 1.5, top-p 0.9", penalised, 4),
        ("self draft, tree (2, 1)", base.draft(drafts.Tree(MODEL, (2, 1)), length=2), 4),
        ("optimistic, chain k=2, vocabulary 2", binary.draft(SMALL, length=2).executor(Optimistic()), 5),
        (
            "the paper's recursion, tree (2, 1), vocabulary 2",
            binary.draft(drafts.Tree(SMALL, (2, 1)), length=2).verifier(TraversalByThePaper()),
            4,
        ),
    ):
        yield Composition(f"traversal, {name}", builder, tokens)
    for salt, how in enumerate((True, False, True)):
        draft = Adversary(MENU, salt=salt, replacement=how)
        name = f"adaptive trees {salt}" + ("" if how else ", siblings without replacement")
        yield Composition(f"traversal, {name}", base.draft(draft, length=3), 4, starts)
    point = base.draft(Adversary(MENU, point=True), length=3)
    yield Composition("traversal, adaptive point masses", point, 5, starts)
    adaptive = base.draft(Adversary(MENU, salt=7), length=3)
    yield Composition("traversal, adaptive trees, ragged, stops", adaptive, **RAGGED, settings=STOPS)
    for name, target, small in PAIRS:
        pair = decoder(target).draft(drafts.Tree(small, (1, 2)), length=2).verifier(Traversal())
        yield Composition(f"traversal, tree (1, 2), {name}", pair, 4)


def at_once() -> Iterator[Composition]:
    """Verifiers that look at all siblings at once, of independent and of distinct ones."""
    for verifier, siblings in (
        (KSeq(), Independent()),
        (OptimalTransport(), Independent()),
        (DistinctTransport(), Distinct()),
    ):
        what, base, binary = verifier.info.name, BASE.verifier(verifier), BINARY.verifier(verifier)

        def tree(*widths: int, model: TableModel = OTHER, siblings: Drawing = siblings) -> drafts.Tree:
            return drafts.Tree(model, widths, siblings=siblings)

        distinct = isinstance(siblings, Distinct)
        for name, builder, tokens in (
            ("chain k=2", base.draft(CHAIN, length=2), 4),
            ("2 candidates", base.draft(tree(2), length=1), 3),
            ("3 candidates", base.draft(tree(3), length=1), 3),
            ("2 chains of 2, vocabulary 2", binary.draft(tree(2, 1, model=SMALL), length=2), 4),
            ("tree (1, 2)", base.draft(tree(1, 2), length=2), 4),
            ("self draft, 2 candidates", base.draft(tree(2, model=MODEL), length=1), 3),
        ):
            yield Composition(f"{what}, {name}", builder, tokens)
        for salt in range(2):
            draft = LevelAdversary(MENU, salt=salt, replacement=not distinct)
            yield Composition(
                f"{what}, adaptive trees {salt}", base.draft(draft, length=3), 4, ((0,), (2, 0))
            )
        wide = LevelAdversary(MENU, limit=4, salt=3, children=3, replacement=not distinct)
        yield Composition(
            f"{what}, adaptive trees, ragged, stops", base.draft(wide, length=3), **RAGGED, settings=STOPS
        )
        for name, target, small in PAIRS[: 5 if not distinct else 2]:
            pair = decoder(target).draft(tree(2, model=small), length=1).verifier(verifier)
            yield Composition(f"{what}, 2 candidates, {name}", pair)
    yield Composition("k-SEQ, tree (2, 1)", BASE.draft(TREE, length=2).verifier(KSeq()), 4)
    yield Composition(
        "optimal transport, tree (2, 1)", BASE.draft(TREE, length=2).verifier(OptimalTransport()), 4
    )
    for drawing in (Distinct(), TopAndOne()):
        name = (
            "siblings without replacement"
            if isinstance(drawing, Distinct)
            else "the most probable and a drawn one"
        )
        for widths, truncated in (((2, 1), None), ((3,), 2)):  # with top-k 2 there is no third token to draw
            made = BASE.draft(drafts.Tree(OTHER, widths, siblings=drawing), length=len(widths))
            made = made.sampling(top_k=truncated)
            yield Composition(f"tree {widths}, {name}", made, len(widths) + 2)


def biases() -> Iterator[Composition]:
    """Mistakes that the certifier must detect."""
    target, q = decoder(TableModel([0.45, 0.45, 0.1])), distribution(0.2, 0.3, 0.5)
    draft = TableModel(q)
    two, chains = (
        target.draft(drafts.Tree(draft, (2,)), length=1),
        BINARY.draft(drafts.Tree(SMALL, (2, 1)), length=2),
    )
    apart = target.draft(drafts.Tree(draft, (2,), siblings=Distinct()), length=1)
    number = LooksAtSiblings(q, "number", declares="independent")
    other = decoder(TableModel([0.45, 0.35, 0.2])).draft(number, length=1)
    for name, builder, tokens in (
        (
            "distinct siblings sorted by probability",
            target.draft(LooksAtSiblings(q, "sorted", False), length=1),
            3,
        ),
        ("equal siblings merged", target.draft(LooksAtSiblings(q, "duplicate"), length=1), 3),
        ("a sibling dropped by its value", target.draft(LooksAtSiblings(q, "value"), length=1), 3),
        (
            "the most probable and a drawn one, declared drawn from all",
            target.draft(TopAndWhole(q), length=1),
            3,
        ),
        ("k-SEQ: ρ is 1, and the residual is clipped", two.verifier(KSeqByHand(mistake="rho")), 3),
        ("k-SEQ: k is the number of the root's candidates", chains.verifier(KSeqByHand(mistake="count")), 4),
        ("k-SEQ: the number of siblings depends on the first", other.verifier(KSeq()), 3),
        (
            "optimal transport: the number of siblings depends on the first",
            other.verifier(OptimalTransport()),
            3,
        ),
        ("optimal transport: the largest p / q is chosen", two.verifier(TransportUnmoved()), 3),
        ("distinct transport: sets as if without order", apart.verifier(UnorderedTransport()), 3),
        (
            "traversal: a node keeps its weight",
            target.draft(draft, length=2).verifier(TraversalByThePaper(mistake="weight")),
            4,
        ),
        (
            "traversal: the residual without the weight",
            chains.verifier(TraversalByThePaper(mistake="residual")),
            4,
        ),
        (
            "traversal: the whole product is capped",
            target.draft(draft, length=2).verifier(TraversalByThePaper(mistake="uncapped")),
            4,
        ),
        ("traversal: siblings against p", chains.verifier(TraversalByThePaper(mistake="siblings")), 4),
    ):
        yield Composition(name, builder, tokens, lossless=False)
    coin = decoder(TableModel([0.7, 0.3])).draft(TableModel([0.5, 0.5]), length=2).verifier(Traversal())
    keyed = {"wrap": PositionKeyed}
    yield Composition("traversal: draws keyed by position alone", coin, 4, settings=keyed, lossless=False)
