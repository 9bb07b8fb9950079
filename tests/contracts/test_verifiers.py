"""What every verifier promises, on plain tensors. See ``contracts/__init__.py`` for how a verifier gets here: by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare

import specdec as sd
from contracts import build, modules, parts
from specdec import tree
from specdec.audit import planted
from specdec.capabilities import VerifierInfo
from specdec.rng import Key, seeds

V = 5
TABLE = sd.TableModel.random(V, order=1, seed=4, zeros=0.25)
VERIFIERS = parts(sd.verifiers, "__call__", "check", "for_draft")
HELPERS = {"acceptance", "levels"}  # modules of functions
SHAPES = {  # parents of a row's nodes
    "chain": [-1, 0, 1, 2],
    "siblings": [-1, -1, -1],
    "tree": [-1, -1, 0, 0, 1, 2, 2],
    "one": [-1],
}
KINDS = [
    *("point", "sampled", "same distribution", "disjoint", "greedy draft", "zeros", "independent", "distinct")
]  # what the nodes were drawn from; siblings in turn, but for the last two

CHAINS_ONLY = (sd.BlockVerification, sd.verifiers.FLy)

LOSSLESS = {name: cls for name, cls in VERIFIERS.items() if VerifierInfo.of(build(cls, TABLE)).lossless}


def takes(cls: type, shape: list[int], kind: str = "point") -> bool:
    """Whether ``check`` takes proposals of a shape and kind. What it refuses must be refused by name, and is not tested further."""
    verifier = build(cls, TABLE)
    return not refuses(verifier, case(verifier, shape, kind)[0])


def with_shapes(verifiers):
    """Every verifier with every shape that it takes, of nodes each drawn from a distribution of its own."""
    return pytest.mark.parametrize(
        ("cls", "shape"),
        [
            pytest.param(cls, shape, id=f"{name}-{what}")
            for name, cls in verifiers.items()
            for what, shape in SHAPES.items()
            if takes(cls, shape, "sampled")
        ],
    )


def with_cases(verifiers):
    """Every verifier with every shape and kind that it takes."""
    return pytest.mark.parametrize(
        ("cls", "shape", "kind"),
        [
            pytest.param(cls, shape, kind, id=f"{name}-{what}-{kind}")
            for name, cls in verifiers.items()
            for what, shape in SHAPES.items()
            for kind in (KINDS if what in ("siblings", "tree") else KINDS[:6])
            if takes(cls, shape, kind)
        ],
    )


every_verifier = pytest.mark.parametrize("cls", VERIFIERS.values(), ids=VERIFIERS.keys())
every_lossless = pytest.mark.parametrize("cls", LOSSLESS.values(), ids=LOSSLESS.keys())


def refuses(verifier, proposal):
    try:
        verifier.check(proposal)
    except ValueError:
        return True
    return False


def instance(cls):
    return build(cls, TABLE)


CASES = {}  # verifiers that give drafts the same decisions share them


def case(verifier, shape, kind, rows=64, seed=0, greedy=False):
    """A proposal for ragged rows, the target's distributions at its nodes, the context and the decisions that are left.

    Node by node, the tokens are drawn with the draft's own keys, as a real draft would draw them.
    """
    name = type(verifier).for_draft, tuple(shape), kind, rows, seed, greedy
    if name not in CASES:
        CASES[name] = _case(verifier, shape, kind, rows, seed, greedy)
    return CASES[name]


def _case(verifier, shape, kind, rows, seed, greedy):
    N = len(shape)
    context = sd.Context.of([[b % V] * (1 + b % 4) for b in range(rows)])
    rng = sd.Philox(seeds(seed, rows))
    drafts_rng = verifier.for_draft(rng)
    parents = torch.tensor(shape).expand(rows, N).contiguous()
    size = torch.arange(rows) % (N + 1)
    depth, sibling = tree.depths(parents), tree.sibling_numbers(parents)
    distributions = np.random.default_rng(1).dirichlet([0.7] * V, size=(40, N))[np.arange(rows) % 40]
    if kind == "zeros":
        distributions[..., ::2] = 0
        distributions[..., 1] += 1e-3
        distributions /= distributions.sum(-1, keepdims=True)
    q = torch.from_numpy(distributions)
    tokens = torch.zeros(rows, N, dtype=torch.long)
    elders = [[m for m in range(n) if shape[m] == shape[n]] for n in range(N)]
    for n in range(N):
        above = torch.where(
            parents[:, n] >= 0, tokens.gather(1, parents[:, n : n + 1].clamp(min=0))[:, 0], -1
        )
        before = torch.where(above >= 0, above, context.tokens.gather(1, context.length[:, None] - 1)[:, 0])
        target_distribution = TABLE.probs[before]
        if kind == "same distribution":
            q[:, n] = target_distribution
        elif kind == "disjoint":
            free = (target_distribution == 0).double()
            uniform = torch.full_like(free, 1 / V)
            q[:, n] = torch.where(free.sum(-1, keepdim=True) > 0, free / free.sum(-1, keepdim=True), uniform)
        elif kind == "greedy draft":
            q[:, n] = torch.nn.functional.one_hot(target_distribution.argmax(-1), V)
        if kind in ("independent", "distinct") and elders[n]:
            q[:, n] = q[:, elders[n][0]]
            if kind == "distinct":
                q[:, n].scatter_(1, tokens[:, elders[n]], 0)
                q[:, n] /= q[:, n].sum(-1, keepdim=True)
        key = Key(context.length, depth[:, n], sibling[:, n])
        tokens[:, n] = drafts_rng.categorical(q[:, n], key)
    tokens = torch.where(torch.arange(N) < size[:, None], tokens, 0)
    proposal = sd.Proposal(tokens, parents, size, q, "sampled")
    if kind == "independent":
        first = torch.tensor([min([*mine, n]) for n, mine in enumerate(elders)])
        proposal = replace(proposal, source=first.expand(rows, N))
    if kind == "point":
        proposal = sd.Proposal(tokens, parents, size)
    logits = TABLE.score(TABLE.cache(rows, 16), context, proposal).logits
    probs = sd.Sampling(temperature=0.0 if greedy else 1.0)(logits, context, proposal)
    live = torch.cat([torch.ones(rows, 1, dtype=torch.bool), torch.arange(N) < size[:, None]], 1)
    return proposal, torch.where(live[..., None], probs, 0), context, rng


every_verifier_and_shape = with_shapes(VERIFIERS)
every_verifier_case, every_lossless_case = with_cases(VERIFIERS), with_cases(LOSSLESS)


def equal(a, b):
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("path", "accepted", "bonus", "tokens"))


def committed(verdict):
    """Row -> the tokens that the round commits."""
    return [t[: n + 1] for t, n in zip(verdict.tokens.tolist(), verdict.accepted.tolist())]


def test_every_module_has_a_part():
    found = Counter(cls.__module__.rpartition(".")[2] for cls in VERIFIERS.values())
    assert {m.__name__.rpartition(".")[2] for m in modules(sd.verifiers)} == set(found) | HELPERS, (
        "a module without a class that has the methods"
    )
    assert {"Rejection", "Coupled", "BlockVerification"} <= VERIFIERS.keys()


@every_verifier
def test_chains_are_taken_and_a_shape_is_refused_by_name(cls):
    assert takes(cls, SHAPES["chain"])
    assert takes(cls, SHAPES["one"])
    refused = {what for what, shape in SHAPES.items() if not takes(cls, shape)}
    assert refused == ({"siblings", "tree"} if cls in CHAINS_ONLY else set())
    info = VerifierInfo.of(instance(cls))
    for kind, drawn in (("sampled", "in turn"), ("independent", "independent"), ("distinct", "distinct")):
        taken = {what for what, shape in SHAPES.items() if takes(cls, shape, kind)}
        assert taken == (set(SHAPES) if drawn in info.siblings else {"chain", "one"}) - refused
    for what in refused:
        parents = torch.tensor([[-1, -1, -1, -1], [-1, 0, 1, 2], [*SHAPES[what][:3], -1]])
        tree_of_row_2 = sd.Proposal(parents.clamp(min=0), parents, torch.tensor([1, 4, 3]))
        with pytest.raises(ValueError, match=f"{cls.__name__} takes chains, and row 2 .* is a tree"):
            instance(cls).check(tree_of_row_2)


@every_verifier
def test_has_a_name_that_admits_a_loss(cls):
    info = VerifierInfo.of(instance(cls))
    assert isinstance(info.lossless, bool)
    assert info.name
    assert info.lossless or "lossy" in info.name


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@every_verifier_case
def test_the_verdict_is_a_path_from_the_root(cls, shape, kind, greedy):
    verifier = instance(cls)
    proposal, probs, context, rng = case(verifier, shape, kind, greedy=greedy)
    B, N = proposal.tokens.shape
    copies = [t.clone() for t in (proposal.tokens, proposal.parents, proposal.size, probs, context.length)]
    verdict = verifier(proposal, probs, context, rng)
    untouched = (proposal.tokens, proposal.parents, proposal.size, probs, context.length)
    assert all(map(torch.equal, copies, untouched))
    assert verdict.path.shape == (B, N)
    assert verdict.accepted.shape == verdict.bonus.shape == (B,)
    assert verdict.tokens.shape == (B, N + 1)
    for t in (verdict.path, verdict.accepted, verdict.bonus, verdict.tokens):
        assert t.dtype == torch.long
        assert t.device == torch.device("cpu")
    for b in range(B):
        n, at = int(verdict.accepted[b]), -1
        path = verdict.path[b].tolist()
        assert path[n:] == [-1] * (N - n)
        for node in path[:n]:
            assert 0 <= node < int(proposal.size[b])
            assert int(proposal.parents[b, node]) == at
            if VerifierInfo.of(verifier).lossless:
                assert float(probs[b, at + 1, proposal.tokens[b, node]]) > 0
            at = node
        bonus = int(verdict.bonus[b])
        assert 0 <= bonus < V
        if VerifierInfo.of(verifier).lossless:
            assert float(probs[b, at + 1, bonus]) > 0
        drafted = [int(proposal.tokens[b, node]) for node in path[:n]]
        assert verdict.tokens[b].tolist() == [*drafted, bonus, *[0] * (N - n)]


@every_lossless_case
def test_comparing_tokens_at_temperature_0_is_the_same_verdict(cls, shape, kind):
    verifier = instance(cls)
    proposal, probs, context, rng = case(verifier, shape, kind, greedy=True)
    assert equal(verifier.greedy(proposal, probs.argmax(-1)), verifier(proposal, probs, context, rng))


@every_verifier_case
def test_a_row_does_not_depend_on_its_batch(cls, shape, kind):
    verifier = instance(cls)
    proposal, probs, context, rng = case(verifier, shape, kind)
    whole = verifier(proposal, probs, context, rng)
    assert equal(whole, verifier(proposal, probs, context, rng))  # asked again, the same numbers
    for rows in (torch.arange(64).flip(0), torch.tensor([5, 3, 60]), torch.tensor([4])):
        some = verifier(proposal.select(rows), probs[rows], context.select(rows), rng.select(rows))
        assert committed(some) == [committed(whole)[b] for b in rows.tolist()]
        assert torch.equal(some.path, whole.path[rows])


@every_verifier_case
def test_nodes_that_do_not_exist_are_not_looked_at(cls, shape, kind):
    verifier = instance(cls)
    proposal, probs, context, rng = case(verifier, shape, kind)
    N = proposal.nodes
    dead = torch.arange(N) >= proposal.size[:, None]
    expected = verifier(proposal, probs, context, rng)
    drawn = proposal.probs is not None
    for token, parent, source in ((V - 1, torch.arange(N) - 1, 0), (99, 99, 99), (-99, -99, -99)):
        wild = replace(
            proposal,
            tokens=torch.where(dead, token, proposal.tokens),
            parents=torch.where(dead, parent, proposal.parents),
            probs=torch.where(dead[..., None], torch.nan, proposal.probs) if drawn else None,
            source=torch.where(dead, source, proposal.sources()) if drawn else None,
        )
        nothing = torch.where(dead[..., None], torch.nan, probs[:, 1:])
        found = verifier(wild, torch.cat([probs[:, :1], nothing], 1), context, rng)
        assert equal(found, expected)
        if VerifierInfo.of(verifier).lossless:
            assert equal(verifier.greedy(wild, probs.argmax(-1)), verifier.greedy(proposal, probs.argmax(-1)))
    junk = replace(
        proposal,
        tokens=torch.where(dead, V - 1, proposal.tokens),
        parents=torch.where(dead, torch.arange(N) - 1, proposal.parents),
        probs=None if proposal.probs is None else torch.where(dead[..., None], 1 / V, proposal.probs),
    )
    wider = replace(
        junk,
        tokens=torch.nn.functional.pad(junk.tokens, (0, 2), value=1),
        parents=torch.nn.functional.pad(junk.parents, (0, 2), value=-1),
        probs=None if junk.probs is None else torch.nn.functional.pad(junk.probs, (0, 0, 0, 2), value=1 / V),
        source=None if junk.source is None else torch.nn.functional.pad(junk.source, (0, 2)),
    )
    probs_of_junk = torch.cat([probs[:, :1], torch.where(dead[..., None], 1 / V, probs[:, 1:])], 1)
    assert committed(verifier(junk, probs_of_junk, context, rng)) == committed(expected)
    probs_of_wider = torch.nn.functional.pad(probs_of_junk, (0, 0, 0, 2), value=1 / V)
    assert committed(verifier(wider, probs_of_wider, context, rng)) == committed(expected)


@pytest.mark.parametrize("mixed", [False, True], ids=["one shape", "chains among trees"])
@every_verifier_and_shape
def test_nodes_may_share_a_distribution(cls, shape, mixed):
    """Stored once or once a node, in whatever order, it is the same distribution."""
    verifier = instance(cls)
    proposal, probs, context, rng = case(verifier, shape, "sampled")
    B, N = proposal.tokens.shape
    parents = proposal.parents.clone()
    if mixed:
        parents[::2] = torch.arange(-1, N - 1)
    draw = torch.Generator().manual_seed(0)
    source = torch.randint(0, 2, (B, N), generator=draw)
    shared = replace(proposal, parents=parents, probs=proposal.probs[:, :1].expand(B, 2, V).clone())
    shared.probs[:, 1] = proposal.probs[:, -1].roll(1, -1)
    shared = replace(shared, source=source)
    apiece = replace(
        shared, probs=torch.stack([shared.probs[torch.arange(B), s] for s in source.T], 1), source=None
    )
    assert torch.equal(shared.distributions(), apiece.probs)
    verdict = verifier(shared, probs, context, rng)
    assert equal(verdict, verifier(apiece, probs, context, rng))
    if isinstance(verifier, sd.Rejection):
        assert not equal(verdict, verifier(replace(shared, source=1 - source), probs, context, rng))
    rows = torch.tensor([40, 3, 2])
    some = verifier(shared.select(rows), probs[rows], context.select(rows), rng.select(rows))
    assert torch.equal(some.path, verdict.path[rows])
    if hasattr(verifier, "from_logits"):
        logits, plain = torch.where(probs.sum(-1, keepdim=True) > 0, probs.log(), 0), sd.Sampling()
        found = verifier.from_logits(shared, logits, plain, context, rng)
        assert equal(found, verifier.from_logits(apiece, logits, plain, context, rng))
        alone = verifier.from_logits(
            shared.select(rows), logits[rows], plain, context.select(rows), rng.select(rows)
        )
        assert torch.equal(alone.tokens, found.tokens[rows])


@every_verifier
def test_nothing_proposed_commits_one_token(cls):
    verifier = instance(cls)
    proposal, probs, context, rng = case(verifier, SHAPES["chain"], "sampled")
    none = verifier(sd.Proposal.none(64), probs[:, :1], context, rng)
    assert none.path.shape == (64, 0)
    assert none.accepted.tolist() == [0] * 64
    assert torch.equal(none.tokens[:, 0], none.bonus)
    zero = replace(proposal, size=torch.zeros_like(proposal.size))
    assert verifier(zero, probs, context, rng).accepted.tolist() == [0] * 64
    assert torch.equal(verifier(zero, probs, context, rng).bonus, none.bonus)


@every_lossless_case
def test_a_greedy_target_takes_its_own_path_and_all_of_it(cls, shape, kind):
    verifier = instance(cls)
    proposal, probs, context, rng = case(verifier, shape, kind, greedy=True)
    for b, got in enumerate(committed(verifier(proposal, probs, context, rng))):
        at, said = -1, []
        while True:
            said.append(int(probs[b, at + 1].argmax()))
            children = [
                n
                for n in range(int(proposal.size[b]))
                if int(proposal.parents[b, n]) == at and int(proposal.tokens[b, n]) == said[-1]
            ]
            if not children:
                break
            at = children[0]
        assert got[: len(said)] == said[: len(got)]
        if len(set(zip(shape, proposal.tokens[b].tolist()))) == len(
            shape
        ):  # no two equal siblings to choose from
            assert got == said


@every_lossless
def test_a_draft_that_is_the_target_stands(cls):
    """Under shared distributions nothing is ever rejected: p / q is 1, and a coupled draw is the same draw."""
    verifier = instance(cls)
    proposal, probs, context, rng = case(verifier, SHAPES["chain"], "same distribution")
    assert torch.equal(verifier(proposal, probs, context, rng).accepted, proposal.size)


@every_lossless_case
def test_the_first_token_has_the_targets_distribution(cls, shape, kind):
    """8,000 seeded rows; the exact distribution of whole texts is the certifier's business."""
    first_token(instance(cls), shape, kind)


def first_token(verifier, shape, kind, rows=8_000):
    proposal, probs, context, rng = case(verifier, shape, kind, rows=rows, seed=3)
    first = verifier(proposal, probs, context, rng).tokens[:, 0]
    last = context.tokens.gather(1, context.length[:, None] - 1)[:, 0]
    statistic, freedom = 0.0, 0
    for token in range(V):
        here = last == token
        seen = torch.bincount(first[here], minlength=V).double()
        distribution = TABLE.distribution([token])
        assert float(seen[distribution == 0].sum()) == 0
        some = distribution > 0
        statistic += chisquare(seen[some], distribution[some] * int(here.sum())).statistic
        freedom += int(some.sum()) - 1
    assert chi2.sf(statistic, freedom) > 1e-4  # one test for all prefixes


@pytest.mark.parametrize(
    ("verifier", "shape", "kind"),
    [
        (planted.BonusFromTarget(), "one", "sampled"),
        (planted.GreedyAcceptance(), "one", "greedy draft"),
        (planted.SiblingsForgetResidual(), "siblings", "sampled"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_suite_sees_a_bias(verifier, shape, kind):
    with pytest.raises(AssertionError):
        first_token(verifier, SHAPES[shape], kind, rows=40_000)


@every_verifier
def test_what_the_library_drew_is_never_refused(cls):
    verifier = instance(cls)
    for shape in SHAPES.values():
        if takes(cls, shape):
            verifier.check(case(verifier, shape, "point")[0])
            for kind in VerifierInfo.of(verifier).siblings:
                verifier.check(case(verifier, shape, "sampled" if kind == "in turn" else kind)[0])
    verifier.check(sd.Proposal.none(3))


@every_lossless
def test_a_false_declaration_is_refused_or_does_no_harm(cls):
    """An argmax that is declared as a sample of its distribution, the field's most common mistake."""
    verifier = instance(cls)
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    rows = 20_000
    context, rng = sd.Context.of([[0]] * rows), sd.Philox(seeds(0, rows))
    tokens = q.argmax().expand(rows, 1)
    declared = sd.Proposal.chain(tokens, torch.ones(rows, dtype=torch.long), q.expand(rows, 1, -1))
    if refuses(verifier, declared):
        with pytest.raises(ValueError, match="sampled"):  # the message names the remedy
            verifier.check(declared)
    else:
        first = verifier(declared, p.expand(rows, 2, -1), context, rng).tokens[:, 0]
        assert chisquare(torch.bincount(first, minlength=4).double(), p * rows).pvalue > 1e-4


@every_verifier
def test_the_decisions_for_drafts_are_draws_and_follow_their_rows(cls):
    verifier = instance(cls)
    rows = 20_000
    rng = verifier.for_draft(sd.Philox(seeds(5, rows)))
    p = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    drawn = {}
    for depth in (0, 1):
        for sibling in (0, 1):
            key = Key(torch.full((rows,), 7), depth, sibling)
            drawn[depth, sibling] = rng.categorical(p.expand(rows, -1), key)
            seen = torch.bincount(drawn[depth, sibling], minlength=4).double()
            assert float(seen[1]) == 0
            assert chisquare(seen[p > 0], p[p > 0] * rows).pvalue > 1e-4
            assert torch.equal(drawn[depth, sibling], rng.categorical(p.expand(rows, -1), key))
            some = torch.tensor([9, 2, 400])
            part = rng.select(some).categorical(p.expand(3, -1), Key(torch.full((3,), 7), depth, sibling))
            assert torch.equal(part, drawn[depth, sibling][some])
    assert not torch.equal(drawn[0, 0], drawn[1, 0])
    assert not torch.equal(drawn[0, 0], drawn[0, 1])
    share = rng.accept(torch.full((rows,), 0.25), Key(torch.full((rows,), 7), 3)).double().mean()
    assert abs(float(share) - 0.25) < 0.02
