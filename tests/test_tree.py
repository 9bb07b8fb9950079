"""Ragged token trees against the plainest possible computation."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import tree
from specdec.types import Proposal


@st.composite
def proposals(draw, rows: int, vocab: int = 3, drawn: bool = False) -> Proposal:
    N = draw(st.integers(0, 6))
    size = draw(st.lists(st.integers(0, N), min_size=rows, max_size=rows))
    parents = [[draw(st.integers(-1, n - 1)) for n in range(N)] for _ in range(rows)]
    tokens = [[draw(st.integers(0, vocab - 1)) for _ in range(N)] for _ in range(rows)]
    long = {"dtype": torch.long}
    probs = torch.rand(rows, N, vocab) if drawn else None
    shared = drawn and N > 0 and draw(st.booleans())  # by nodes that need not even be siblings
    source = [[draw(st.integers(0, 1)) for _ in range(N)] for _ in range(rows)] if shared else None
    return Proposal(
        torch.tensor(tokens, **long).reshape(rows, N),
        torch.tensor(parents, **long).reshape(rows, N),
        torch.tensor(size),
        torch.rand(rows, 2, vocab) if shared else probs,
        "sampled" if drawn else "point",
        None if source is None else torch.tensor(source, **long),
    )


def _path(parents: list[int], n: int) -> list[int]:
    """Nodes from the root's child to ``n``."""
    return [] if n < 0 else [*_path(parents, parents[n]), n]


@given(proposals(rows=3))
def test_depths_ancestors_and_sibling_numbers(proposal):
    depth, above = tree.depths(proposal.parents), tree.ancestors(proposal.parents)
    number = tree.sibling_numbers(proposal.parents)
    tree.check(proposal.parents, proposal.size)
    for b in range(3):
        parents = proposal.parents[b].tolist()
        for n in range(proposal.nodes):
            path = _path(parents, n)
            assert depth[b, n] == len(path) - 1
            assert above[b, n].nonzero()[:, 0].tolist() == sorted(path)
        names = list(zip(depth[b].tolist(), number[b].tolist()))
        assert len(set(names)) == len(names)


def test_chains():
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 0], [-1, 0, 0], [-1, -1, 1], [7, -9, 3]])
    assert tree.is_chain(parents, torch.tensor([3, 3, 2, 2, 0])).tolist() == [True, False, True, False, True]
    assert tree.is_chain(torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 0])).tolist() == [True, True]
    chain = Proposal.chain(torch.tensor([[4, 5, 6]]), torch.tensor([3]))
    assert tree.is_chain(chain.parents, chain.size).tolist() == [True]
    assert chain.provenance == "point"


@given(proposals(rows=3), st.sampled_from([-99, -1, 0, 5, 99]))
def test_nodes_that_do_not_exist_may_have_any_parents(proposal, parent):
    dead = torch.arange(proposal.nodes) >= proposal.size[:, None]
    wild = replace(proposal, parents=torch.where(dead, parent, proposal.parents))
    tree.check(wild.parents, wild.size)
    for of in (tree.depths, tree.ancestors, tree.sibling_numbers):
        assert torch.equal(of(wild.parents)[~dead], of(proposal.parents)[~dead])
    assert torch.equal(tree.is_chain(wild.parents, wild.size), tree.is_chain(proposal.parents, proposal.size))
    one, other = tree.merge(wild, wild), tree.merge(proposal, proposal)
    for row in range(3):
        assert _texts(one, row) == _texts(other, row)
    wanted = torch.randint(0, 3, (3, proposal.nodes + 1), generator=torch.Generator().manual_seed(0))
    assert torch.equal(tree.follow(wild, wanted).path, tree.follow(proposal, wanted).path)


def test_parents_must_come_first():
    with pytest.raises(ValueError, match=r"parents\[0, 1\] is 1"):
        tree.check(torch.tensor([[-1, 1]]), torch.tensor([2]))
    with pytest.raises(ValueError, match="stored before"):
        tree.check(torch.tensor([[-2]]), torch.tensor([1]))
    # A node that does not exist has no parent to check.
    tree.check(torch.tensor([[-1, 7]]), torch.tensor([1]))


def _texts(proposal: Proposal, b: int) -> list[tuple[int, ...]]:
    parents, tokens = proposal.parents[b].tolist(), proposal.tokens[b].tolist()
    return [tuple(tokens[m] for m in _path(parents, n)) for n in range(int(proposal.size[b]))]


@settings(deadline=None)
@given(proposals(rows=2), proposals(rows=2))
def test_merging_point_masses_gives_the_union_of_their_prefixes(a, b):
    # A tree may hold a prefix twice; merged into nothing, it holds it once.
    one = tree.merge(Proposal.none(2), a)
    both = tree.merge(one, b)
    tree.check(both.parents, both.size)
    for row in range(2):
        texts = _texts(both, row)
        assert texts[: int(one.size[row])] == _texts(one, row)
        assert len(set(texts)) == len(texts)
        assert set(texts) == set(_texts(a, row)) | set(_texts(b, row))
    assert both.nodes == int(both.size.max())


@settings(deadline=None)
@given(proposals(rows=2, drawn=True), proposals(rows=2, drawn=True))
def test_merging_drawn_trees_keeps_every_node_with_its_own_distribution(a, b):
    both = tree.merge(a, b)
    tree.check(both.parents, both.size)
    assert both.provenance == "sampled"
    assert both.size.tolist() == (a.size + b.size).tolist()
    for row in range(2):
        assert _texts(both, row) == _texts(a, row) + _texts(b, row)
        n, m = int(a.size[row]), int(b.size[row])
        q = both.distributions()
        assert torch.equal(q[row, :n], a.distributions()[row, :n])
        assert torch.equal(q[row, n : n + m], b.distributions()[row, :m])


def test_merge_refuses_what_cannot_be_one_tree():
    point = Proposal.chain(torch.tensor([[1]]), torch.tensor([1]))
    drawn = Proposal.chain(torch.tensor([[1]]), torch.tensor([1]), torch.ones(1, 1, 3) / 3, "sampled")
    with pytest.raises(ValueError, match="one-hot"):
        tree.merge(point, drawn)
    with pytest.raises(ValueError, match="2 and 1 rows"):
        tree.merge(Proposal.none(2), point)
    declared = Proposal.chain(torch.tensor([[1]]), torch.tensor([1]), torch.ones(1, 1, 3) / 3)
    assert tree.merge(drawn, declared).provenance == "declared"
