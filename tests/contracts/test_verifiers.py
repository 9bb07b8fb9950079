"""Every verifier of the package keeps the rules of ``specdec.testing.check_verifier``. A new one gets here by itself."""

from __future__ import annotations

import pytest
import torch

import specdec as sd
from contracts import build, modules, parts
from specdec.capabilities import VerifierInfo
from specdec.testing import check_verifier
from specdec.testing.verdicts import committed
from specdec.testing.verifier import TABLE
from specdec.testing.verifier_cases import KINDS, SHAPES, Asked, asked
from specdec.verifiers import KSeq, OptimalTransport

VERIFIERS = parts(sd.verifiers, "__call__", "check", "for_draft")
CHAINS_ONLY = {"BlockVerification", "FLy"}
LOSSLESS = {name: cls for name, cls in VERIFIERS.items() if VerifierInfo.of(build(cls, TABLE)).lossless}
HELPERS = {"acceptance", "apart", "levels", "tree_walk"}  # modules of functions
every_verifier = pytest.mark.parametrize("cls", VERIFIERS.values(), ids=VERIFIERS.keys())
every_lossless = pytest.mark.parametrize("cls", LOSSLESS.values(), ids=LOSSLESS.keys())


LONG = {
    "Coupled",
    "DistinctTransport",
    "FusedRejection",
    "KSeq",
    "OptimalTransport",
    "Traversal",
    "Mixture",
    "Synthetic",
    "TypicalAcceptance",
}  # seconds each


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(cls, id=name, marks=pytest.mark.slow if name in LONG else ())
        for name, cls in VERIFIERS.items()
    ],
)
def test_every_verifier_keeps_the_rules(cls):
    found = check_verifier(build(cls, TABLE))
    if cls in LOSSLESS.values():
        follows_all = cls in (KSeq, OptimalTransport)  # of several equal siblings
        assert list(found.not_tried) == (["shortcuts"] if follows_all else []), (
            "other lossless verifiers compare tokens at temperature 0"
        )


def test_every_module_has_a_part():
    found = {cls.__module__.rpartition(".")[2] for cls in VERIFIERS.values()}
    assert {m.__name__.rpartition(".")[2] for m in modules(sd.verifiers)} == found | HELPERS, (
        "a module without a class that has the methods"
    )
    assert {"Rejection", "Coupled", "BlockVerification"} <= VERIFIERS.keys()


@pytest.mark.parametrize("name", VERIFIERS)
def test_chains_are_taken_and_trees_are_refused_by_name(name):
    verifier = build(VERIFIERS[name], TABLE)
    taken = asked(verifier, TABLE, SHAPES)
    refused = {"siblings", "tree"} if name in CHAINS_ONLY else set()
    assert {one.shape for one in taken if one.kind == "point"} == set(SHAPES) - refused
    for shape in ("chain", "one"):
        assert {one.kind for one in taken if one.shape == shape} == set(KINDS)
    assert not any(one.whole for one in taken)
    for shape in refused:
        parents = torch.tensor([[-1, -1, -1, -1], [-1, 0, 1, 2], [*SHAPES[shape][:3], -1]])
        tree_of_row_2 = sd.Proposal(parents.clamp(min=0), parents, torch.tensor([1, 4, 3]))
        with pytest.raises(ValueError, match=f"{name} takes chains, and row 2 .* is a tree"):
            verifier.check(tree_of_row_2)


@every_lossless
def test_a_draft_that_is_the_target_stands(cls):
    """Under shared distributions nothing is ever rejected: p / q is 1, and a coupled draw is the same draw."""
    verifier = build(cls, TABLE)
    example = Asked("chain", SHAPES["chain"], "same distribution").example(verifier, TABLE)
    assert torch.equal(verifier(*example).accepted, example.proposal.size)


@every_lossless
def test_all_of_a_greedy_targets_path_is_taken(cls):
    verifier = build(cls, TABLE)
    for one in asked(verifier, TABLE, SHAPES):
        if not one.greedy:
            continue
        proposal, probs, context, rng = one.example(verifier, TABLE)
        for b, got in enumerate(committed(verifier(proposal, probs, context, rng))):
            at, said = -1, []
            nodes = list(zip(proposal.parents[b].tolist(), proposal.tokens[b].tolist()))
            while True:
                said.append(int(probs[b, at + 1].argmax()))
                children = [n for n in range(int(proposal.size[b])) if nodes[n] == (at, said[-1])]
                if not children:
                    break
                at = children[0]
            if len(set(nodes)) == len(nodes):  # no two equal siblings to choose from
                assert got == said
