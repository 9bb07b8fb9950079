"""The compositions that the certifier runs on: those that claim to be lossless, and planted biases that it must catch.

Most have a vocabulary of 3, trees of up to 3 nodes and at least 3 tokens: round 0 commits a token without a draft and every round
ends with a bonus, so ``d`` drafted levels take effect only with ``d + 2`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from specdec import drafts
from specdec.arm_policy import Arm
from specdec.audit import candidates, llamas, planted
from specdec.audit.adversaries import (
    MENU,
    AdversarialSelector,
    Adversary,
    Everything,
    Hindsight,
    TwoChains,
    dropped,
)
from specdec.audit.certify import certify_coupled
from specdec.audit.composed import (
    BASE,
    CHAIN,
    GRAMMAR,
    MODEL,
    OTHER,
    PAIRS,
    PENALTIES,
    RAGGED,
    REMEMBERING,
    TREE,
    Composition,
    distribution,
)
from specdec.audit.lossy import lossy
from specdec.builder import Builder, DraftLike, decoder
from specdec.cost.rounds import RoundTable
from specdec.drafts.heads.static_tree import StaticTree
from specdec.drafts.stops import Confidence, Entropy, MaxProb, PathProb
from specdec.executors import Optimistic, Pipelined
from specdec.models import TableModel
from specdec.sampling import Sampling
from specdec.selectors.planner import Planner
from specdec.verifiers import BlockVerification, Coupled, Rejection


def everything() -> list[Composition]:
    """All claims, then what is declared lossy, then all planted biases."""
    parts = (
        chains,
        lookups,
        trees,
        blocks,
        samplings,
        shapes,
        stops,
        adversaries,
        adaptive,
        selectors,
        optimistic,
        pipelined,
        coupled,
        llamas.pairs,
        candidates.traversal,
        candidates.at_once,
        lossy,
        biases,
        candidates.biases,
    )
    return [composition for part in parts for composition in part()]


def chains() -> Iterator[Composition]:
    """One candidate continuation."""
    yield Composition("no draft", BASE)
    for k in (1, 2, 3):
        yield Composition(f"chain k={k}", BASE.draft(CHAIN, length=k), k + 2)
    small = decoder(TableModel.random(2, 1, seed=3)).draft(TableModel.random(2, 1, seed=4), length=3)
    yield Composition("chain k=3, vocabulary 2", small, 6)
    yield Composition(
        "chain k=2, target of order 2", decoder(TableModel.random(3, 2, 2)).draft(CHAIN, length=2), 4
    )
    yield Composition("self draft k=2", BASE.draft(MODEL, length=2), 4)
    yield Composition("function draft k=2", BASE.draft(_function, length=2), 4)
    yield Composition("parallel draft k=3", BASE.draft(drafts.Parallel(OTHER, 2), length=3), 4)
    yield Composition("n-gram k=3", BASE.draft(drafts.NGram(), length=3), 5, ((0, 1, 0), (2, 2)))
    warm = BASE.draft(drafts.Model(OTHER, Sampling(temperature=0.5)), length=2).sampling(temperature=1.3)
    yield Composition("chain k=2 drawn at its own temperature", warm, 4)


def lookups() -> Iterator[Composition]:
    """Drafts that look texts up, a draft that guesses another's tokens, and a selector that plans by seconds."""
    texts = ((0, 1, 0), (2, 2))
    corpus = drafts.Corpus(((0, 1, 2, 0, 1, 0), (2, 2, 1, 0)))
    followers = drafts.Recycling(StaticTree(((0,), (1,), (0, 0))))
    for name, draft in (
        ("suffixes of the text", drafts.Suffix(min_chance=0.0)),
        ("retrieval from a corpus", drafts.Retrieval(corpus, min_match=1, min_chance=0.0)),
        ("the target's own followers, a tree", followers),
        ("cascade, n-gram guesses", drafts.Cascade(OTHER, drafts.NGram(), ahead=2)),
        ("cascade, guesses of a model", drafts.Cascade(OTHER, drafts.Model(MODEL), ahead=2)),
    ):
        yield Composition(name, BASE.draft(draft, length=2), 4, texts)
    drafting, verifying = ((0.0, 0.0), (0.05, 0.06), (0.1, 0.2)), ((0.0, 0.0), (0.35, 0.1), (0.4, 0.15))
    table = RoundTable((1, 4), (1.0, 1.2), drafting, verifying, (0.0,) * 3)
    chances = (((2.0, 2.0), *((2.0, 1.2),) * 2),)
    planner = Planner(
        ((-1, 0), (0, 1), (0, 2)),
        table,
        (chances,),
        ((1.0,),),
        trust=2.0,
        memory=1.0,
        hold_rounds=1,
        margin=0.0,
    )  # a rejection makes it plain, and an acceptance brings it back
    arms = {"none": None, "one": Arm(CHAIN, 1), "two": Arm(CHAIN, 2)}
    yield Composition("a planner that learns while it decodes", BASE.pool(arms, planner), 4)


def trees() -> Iterator[Composition]:
    """Several candidates a node."""
    yield Composition("3 candidates", BASE.draft(drafts.Tree(OTHER, (3,)), length=1))
    yield Composition("tree (2, 1)", BASE.draft(TREE, length=2), 4)
    yield Composition("tree (1, 2)", BASE.draft(drafts.Tree(OTHER, (1, 2)), length=2), 4)
    yield Composition(
        "tree of two drafts' chains, merged", BASE.draft(TwoChains(OTHER.probs, MODEL.probs)), 4
    )
    yield Composition("every point-mass tree", BASE.draft(Everything(3), length=2))
    yield Composition("every point-mass tree of 2", BASE.draft(Everything(3, 2), length=2), 4)


def blocks() -> Iterator[Composition]:
    """Block verification of chains."""
    base, binary = BASE.verifier(BlockVerification()), decoder(TableModel.random(2, 1, seed=3))
    binary = binary.draft(TableModel.random(2, 1, seed=4), length=3).verifier(BlockVerification())
    penalised = base.draft(CHAIN, length=2).sampling(temperature=1.5, top_p=0.9, processors=PENALTIES)
    point = Adversary(MENU, trees=False, point=True)
    arms: dict[str, DraftLike | Arm | None] = {"chain": CHAIN, "point": point, "none": None}
    for name, builder, tokens in (
        ("chain k=1", base.draft(CHAIN, length=1), 3),
        ("chain k=3", base.draft(CHAIN, length=3), 5),
        ("chain k=3, vocabulary 2", binary, 6),
        ("optimistic, chain k=3, vocabulary 2", binary.executor(Optimistic()), 6),
        ("self draft k=2", base.draft(MODEL, length=2), 4),
        ("penalties, temperature 1.5, top-p 0.9", penalised, 4),
        ("adaptive chains", base.draft(Adversary(MENU, trees=False), length=3), 5),
        ("adaptive point masses", base.draft(point, length=3), 5),
        ("adversarial selector", base.pool(arms, AdversarialSelector(1), 2, reward=dropped), 4),
        ("the paper's tests, k=3", base.draft(CHAIN, length=3).verifier(planted.BlockByThePaper()), 5),
    ):
        yield Composition(f"block verification, {name}", builder, tokens)
    for name, target, draft in PAIRS:
        pair = decoder(target).draft(draft, length=2).verifier(BlockVerification())
        yield Composition(f"block verification, chain k=2, {name}", pair, 4)
    builder, stops = base.draft(CHAIN, length=2), {"eos_token_id": (2,)}
    yield Composition("block verification, ragged, stops", builder, **RAGGED, settings=stops)


def samplings() -> Iterator[Composition]:
    """Temperatures, truncations and processors."""
    for name, settings in {
        "temperature 0.7": {"temperature": 0.7},
        "temperature 0": {"temperature": 0.0},
        "top-k 2": {"top_k": 2},
        "top-p 0.8": {"top_p": 0.8},
        "min-p 0.3": {"min_p": 0.3},
        "temperature 1.5, top-k 2, top-p 0.9": {"temperature": 1.5, "top_k": 2, "top_p": 0.9},
        "repetition and prefix penalties": {"processors": PENALTIES},
        "grammar, temperature 0.7": {"grammar": GRAMMAR, "temperature": 0.7},
    }.items():
        yield Composition(f"chain k=2, {name}", BASE.draft(CHAIN, length=2).sampling(**settings), 4)  # type: ignore[arg-type]
    mild = Sampling(temperature=1.5, top_p=0.9, processors=PENALTIES)
    yield Composition(
        "tree (2, 1), penalties, temperature 1.5, top-p 0.9", BASE.draft(TREE, length=2).sampling(mild), 4
    )
    yield Composition("tree (2, 1), grammar", BASE.draft(TREE, length=2).sampling(grammar=GRAMMAR), 4)
    yield Composition("tree (2, 1), temperature 0", BASE.draft(TREE, length=2).greedy(), 4)


def shapes() -> Iterator[Composition]:
    """Distributions with zeros, ties and disjoint supports."""
    for name, target, draft in PAIRS:
        yield Composition(
            f"tree (2, 1), {name}", decoder(target).draft(drafts.Tree(draft, (2, 1)), length=2), 4
        )


def stops() -> Iterator[Composition]:
    """Prompts and budgets of different lengths in one batch, and rows that end early."""
    end, twice = {"eos_token_id": (2,)}, {"stopping_criteria": (_twice,)}
    for name, draft in (("chain k=2", CHAIN), ("tree (2, 1)", TREE)):
        builder = BASE.draft(draft, length=2)  # type: ignore[arg-type]
        yield Composition(f"ragged rows, {name}", builder, **RAGGED)
        yield Composition(
            f"ragged rows, end of sequence inside blocks, {name}", builder, **RAGGED, settings=end
        )
        yield Composition(f"stopping criterion on the last two tokens, {name}", builder, 4, settings=twice)


def adversaries() -> Iterator[Composition]:
    """Lengths, shapes and distributions that depend on everything seen so far, dropped nodes included."""
    starts = ((0,), (1,), (2, 0))
    for salt in range(3):
        draft = Adversary(MENU, salt=salt)
        yield Composition(f"adaptive trees {salt}", BASE.draft(draft, length=3), 4, starts)
        draft = Adversary(MENU, salt=salt, replacement=False)
        yield Composition(
            f"adaptive trees {salt}, siblings without replacement", BASE.draft(draft, length=3), 4, starts
        )
    yield Composition("adaptive chains", BASE.draft(Adversary(MENU, trees=False), length=3), 5, starts)
    yield Composition("adaptive point masses", BASE.draft(Adversary(MENU, point=True), length=3), 5, starts)
    builder = BASE.draft(Adversary(MENU, salt=7), length=3).sampling(top_k=2)
    yield Composition(
        "adaptive trees, ragged, stops, top-k 2", builder, **RAGGED, settings={"eos_token_id": (0,)}
    )
    yield Composition("length adapted to dropped nodes", REMEMBERING, 5)


def adaptive() -> Iterator[Composition]:
    """Lengths that rules decide while chains are drafted, and that follow the rounds before."""
    for name, stop in (
        ("own probability", Confidence(0.5)),
        ("largest probability", MaxProb(0.6)),
        ("entropy", Entropy(0.647)),
        ("path, and largest probability", (PathProb(0.5), MaxProb(0.6))),
    ):
        builder = BASE.draft(drafts.Model(OTHER, stop=stop), length=2)
        yield Composition(f"chain k=2, ended by its {name}", builder, 4)
        paced = BASE.draft(drafts.Paced(drafts.Model(OTHER, stop=stop), 1), length=2)
        yield Composition(f"paced chain, ended by its {name}", paced, 4)
    for name, part in (("optimistic", Optimistic()), ("pipelined", Pipelined())):
        yield Composition(f"ended chain, {name}", builder.executor(part), 4)
    yield Composition("ended chain, block verification", builder.verifier(BlockVerification()), 4)
    yield Composition("ended chain, temperature 0", builder.greedy(), 4)
    yield Composition("ended chain, ragged, stops", builder, **RAGGED, settings={"eos_token_id": (2,)})


def selectors() -> Iterator[Composition]:
    """Arms that depend on everything seen so far, dropped nodes included."""
    for salt in range(3):
        yield Composition(f"adversarial selector {salt}", _pool(salt), 4, ((0,), (1,)))
    yield Composition(
        "adversarial selector, ragged, stops", _pool(3), **RAGGED, settings={"eos_token_id": (2,)}
    )


def optimistic() -> Iterator[Composition]:
    """Blocks drafted ahead on a thread; ``Hindsight`` remembers dropped guesses and blocks."""
    starts = ((0,), (1,))
    builder = BASE.draft(CHAIN, length=1).executor(Optimistic())
    yield Composition("optimistic, chain k=1", builder, 5)
    two = decoder(TableModel.random(2, 1, seed=3)).draft(TableModel.random(2, 1, seed=4), length=2)
    builder = two.executor(Optimistic())
    yield Composition("optimistic, chain k=2, vocabulary 2", builder, 6)
    for salt in range(3):
        builder = BASE.draft(Hindsight(MENU, salt=salt), length=2).executor(Optimistic())
        yield Composition(f"optimistic, hindsight {salt}", builder, 5, starts)
        arms = {"a": TableModel.random(2, 1, seed=4), "b": TableModel.random(2, 1, seed=6), "none": None}
        builder = two.pool(arms, AdversarialSelector(salt), 2, reward=dropped).executor(Optimistic())
        yield Composition(f"optimistic, adversarial selector {salt}", builder, 5)
    builder = two.executor(Optimistic())
    prompts, stops = ((0, 1), (1,), (1, 1, 0)), {"eos_token_id": (1,)}
    yield Composition("optimistic, chain k=2, ragged, stops", builder, (6, 3, 5), prompts, settings=stops)


def pipelined() -> Iterator[Composition]:
    """Micro-batches drafted on a thread while others are verified, with arms chosen a round ahead or late."""
    starts, early, late = ((0,), (1,)), Pipelined(), Pipelined(ahead=False)
    yield Composition("pipelined, chain k=2", BASE.draft(CHAIN, length=2).executor(early), 4, starts)
    yield Composition("pipelined, tree (2, 1)", BASE.draft(TREE, length=2).executor(early), 3, starts)
    barrier = BASE.draft(Adversary(MENU, salt=3), length=3).executor(Pipelined(barrier=True))
    yield Composition("pipelined behind a barrier, adaptive trees", barrier, 4, starts)
    builder, stops = _pool(4).executor(Pipelined(3)), {"eos_token_id": (2,)}
    yield Composition("pipelined, adversarial selector, ragged, stops", builder, **RAGGED, settings=stops)
    for salt, how in ((1, early), (2, late)):
        name = f"pipelined, adversarial selector {salt}, arms chosen {'ahead' if how.ahead else 'late'}"
        yield Composition(name, _everything(salt).executor(how), (3, 4), starts)
    yield Composition("adversarial selector, point masses, chains and trees", _everything(2), (3, 4), starts)


def coupled() -> Iterator[Composition]:
    """``Coupled``, path by path: for all draws and all proposals, the draws are committed."""

    def row(
        name: str, builder: Builder, tokens: Any = 3, prompts: Any = ((0,),), races: int = 1, **settings: Any
    ) -> Composition:
        builder = builder.verifier(Coupled(candidates=races))
        return Composition(f"coupled, {name}", builder, tokens, prompts, settings, True, certify_coupled)

    yield row("every tree", BASE)
    yield row("every tree, 3 candidates", BASE, races=3)
    zeros, small = TableModel.random(3, 1, 5, zeros=0.4), TableModel.random(2, 1, seed=3)
    yield row("every tree of 2, zeros", decoder(zeros).draft(CHAIN, length=2), 4, nodes=2)
    yield row("every tree, vocabulary 2", decoder(small).draft(drafts.NGram(), length=3), 4)
    for races, more in ((1, ""), (2, ", 2 candidates")):
        name, prompts = f"every tree, ragged, stops, top-k 2{more}", ((0, 1), (2,))
        yield row(name, BASE.sampling(top_k=2), (3, 2), prompts, races, eos_token_id=(2,))


def biases() -> Iterator[Composition]:
    """Mistakes that the certifier must detect."""

    def row(name: str, builder: Builder, tokens: int = 3, **settings: Any) -> Composition:
        return Composition(name, builder, tokens, settings=settings, lossless=False)

    p, q = distribution(0.45, 0.45, 0.1), distribution(0.2, 0.3, 0.5)
    one, trust = BASE.draft(CHAIN, length=1), Rejection(trust_declared=True)
    four, two, three = (
        decoder(TableModel(probs)) for probs in (distribution(0.4, 0.3, 0.2, 0.1), distribution(0.7, 0.3), p)
    )
    argmax, looks = (
        planted.DeclaredArgmax(distribution(0.1, 0.4, 0.3, 0.2)),
        planted.LooksThenDrops(distribution(0.5, 0.5), 1),
    )
    yield row("argmax declared as a sample of softmax(q)", four.draft(argmax).verifier(trust))
    yield row("node dropped after looking at its value", two.draft(looks))
    unsure = BASE.draft(planted.DropsUnsure(OTHER), length=2)
    yield row("unlikely token dropped after looking at it", unsure, 4)
    yield row("draws keyed by position alone, adaptive length", REMEMBERING, 4, wrap=planted.PositionKeyed)
    yield row("one number for a draw and its acceptance", one, wrap=planted.StreamsShare)
    pair = BASE.draft(drafts.Tree(OTHER, (2,)), length=1)
    yield row("one number for all siblings", pair, wrap=planted.SiblingsShare)
    for name, draft in {
        "drawn at temperature 0.5, declared at 1": planted.DrawnElsewhere(q**2 / (q**2).sum(), q),
        "drawn after top-k, declared before it": planted.DrawnElsewhere(distribution(0, 0.375, 0.625), q),
        "siblings without replacement, declared independent": planted.DrawnElsewhere(
            q, q, 2, replacement=False
        ),
    }.items():
        yield row(name, three.draft(draft).verifier(trust))
    yield row("bonus from p instead of the residual", one.verifier(planted.BonusFromTarget()))
    yield row(
        "siblings tried against p instead of the residual", pair.verifier(planted.SiblingsForgetResidual())
    )
    yield row("greedy acceptance while sampling", one.verifier(planted.GreedyAcceptance()))
    block = three.draft(TableModel(q), length=2), BASE.draft(CHAIN, length=3)
    for mistake, builder, tokens, what in (
        ("product", block[0], 4, "the whole product is capped"),
        ("first", block[0], 4, "tests end at the first failure"),
        ("residual", block[1], 5, "the token-wise residual"),
        ("behind", block[1], 5, "a test of the distributions before its token"),
    ):
        wrong = builder.verifier(planted.BlockByThePaper(mistake=mistake))
        yield row(f"block verification: {what}", wrong, tokens)
    fair = two.draft(TableModel([0.5, 0.5]), length=2).verifier(BlockVerification())
    yield row("block verification: draws keyed by position alone", fair, 4, wrap=planted.PositionKeyed)
    still = one.verifier(planted.StandsStill())
    name = "coupled draws keyed by the start of the block"
    yield Composition(name, still, 3, settings={"nodes": 1}, lossless=False, certifier=certify_coupled)
    late = BASE.draft(CHAIN, length=2).executor(planted.LateStops())
    yield row("stops seen only at the end of a block", late, 4, eos_token_id=(2,))
    forgetful = one.sampling(planted.ForgetsNodes(processors=PENALTIES))
    yield row(
        "processors that forget the nodes on the way", forgetful, sampling=Sampling(processors=PENALTIES)
    )
    right = Sampling(grammar=GRAMMAR)
    siblings = BASE.draft(TREE, length=2).sampling(planted.AdvancedBySiblings(grammar=GRAMMAR))
    yield row("a grammar's states advanced by rejected siblings", siblings, 4, sampling=right)


def _pool(salt: int) -> Builder:
    """A pool of two drafts and none; an adversary selects the arm and sees dropped nodes."""
    arms = {"a": drafts.Model(OTHER), "b": drafts.Model(TableModel.random(3, 1, seed=8)), "none": None}
    return BASE.pool(arms, AdversarialSelector(salt), 2, reward=dropped)


def _everything(salt: int) -> Builder:
    """Point masses, chains and trees in one pool, so that proposals of different arms are merged in one batch."""
    point = Adversary(MENU, limit=2, point=True)
    arms: dict[str, DraftLike | Arm | None] = {
        "chain": CHAIN,
        "short": Arm(CHAIN, 1),
        "tree": TREE,
        "point": point,
        "none": None,
    }
    return BASE.pool(arms, AdversarialSelector(salt), 2, reward=dropped)


@drafts.chain_draft
def _function(prefix: list[int]) -> Tensor:
    return distribution(0.3 * len(prefix), 0.5, prefix[-1] - 1)


def _twice(ids: Tensor, scores: Any) -> bool:
    return ids.shape[1] > 2 and bool(ids[0, -1] == ids[0, -2])
