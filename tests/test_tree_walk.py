"""Trees by depths, against plain loops over nodes: facts of trees, greedy decisions, and recursive rejection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verifiers import context, distributions

from specdec import tree
from specdec.rng import ACCEPT, Attempt, Key, Philox, seeds
from specdec.types import Proposal
from specdec.verifiers.rejection import residual, verify_tree

trees = {
    "rows": st.integers(1, 4),
    "nodes": st.integers(0, 9),
    "vocab": st.integers(2, 5),
    "seed": st.integers(0, 10**6),
}


def parents_and_sizes(rows, nodes, seed):
    """Any order in which parents come first; nodes that do not exist have any parents."""
    g = torch.Generator().manual_seed(seed)
    parents = (torch.rand(rows, nodes, generator=g) * (torch.arange(nodes) + 1)).long() - 1
    size = torch.randint(0, nodes + 1, (rows,), generator=g)
    absent = torch.arange(nodes) >= size[:, None]
    return torch.where(absent, torch.randint(-5, nodes + 5, parents.shape, generator=g), parents), size


def walked(proposal, probs, where, rng):
    """The reference: nodes in order, each row with the residual distribution at its latest accepted node."""
    B, N = proposal.tokens.shape
    key = Key(
        where.length[:, None], tree.depths(proposal.parents), tree.sibling_numbers(proposal.parents), ACCEPT
    )
    paths, laws = torch.full((B, N), -1), probs[:, 0].clone()
    for b in range(B):
        here, path = -1, []
        for n in range(int(proposal.size[b])):
            if proposal.parents[b, n] != here:
                continue
            x = proposal.tokens[b, n]
            q = torch.zeros_like(laws[b])
            q[x] = 1
            if proposal.probs is not None:
                q = proposal.distributions()[b, n]
            ratio = torch.zeros(B, N, dtype=probs.dtype)
            ratio[b, n] = laws[b, x] / q[x]
            if rng.accept(ratio, key)[b, n]:
                here = n
                path.append(n)
                laws[b] = probs[b, n + 1]
            else:
                laws[b] = residual(laws[b : b + 1], q[None])[0]
        paths[b, : len(path)] = torch.tensor(path, dtype=torch.long)
    return paths, (paths >= 0).sum(1), laws


@pytest.mark.parametrize("kind", ["points", "drawn", "shared", "attempt"])
@settings(max_examples=60, deadline=None)
@given(**trees, zeros=st.sampled_from([0.0, 0.4]))
def test_recursive_rejection(kind, rows, nodes, vocab, seed, zeros):
    where, rng = context(rows), Philox(seeds(seed, rows))
    parents, size = parents_and_sizes(rows, nodes, seed)
    p = distributions(rows, nodes + 1, vocab, seed=seed + 1, zeros=zeros)
    g = torch.Generator().manual_seed(seed + 2)
    tokens = torch.randint(0, vocab, (rows, nodes), generator=g)
    probs = source = None
    if kind in ("drawn", "attempt"):
        probs = distributions(rows, nodes, vocab, seed=seed + 3)
    if kind == "shared":
        probs = distributions(rows, 2, vocab, seed=seed + 3)
        source = torch.randint(0, 2, (rows, nodes), generator=g)
    if kind == "attempt":
        rng = Attempt(rng, 1)
    proposal = Proposal(tokens, parents, size, probs, "point" if probs is None else "sampled", source)
    found, expected = verify_tree(proposal, p, where, rng), walked(proposal, p, where, rng)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.allclose(found[2], expected[2], rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(**trees)
def test_facts_and_greedy_decisions(rows, nodes, vocab, seed):
    parents, size = parents_and_sizes(rows, nodes, seed)
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, nodes), generator=g)
    wanted = torch.randint(0, vocab, (rows, nodes + 1), generator=g)
    depths, above, fan = tree.depths(parents), tree.ancestors(parents), tree.fan(parents, size)
    verdict = tree.follow(Proposal(tokens, parents, size), wanted)
    widest = {}
    for b in range(rows):
        lines, up = [], parents[b].tolist()
        for n in range(int(size[b])):
            lines.append([*(lines[up[n]] if up[n] >= 0 else []), n])
            assert depths[b, n] == len(lines[n]) - 1
            assert above[b, n].nonzero()[:, 0].tolist() == lines[n]
            depth, siblings = len(lines[n]) - 1, up[: int(size[b])].count(up[n])
            widest[depth] = max(widest.get(depth, 0), siblings)
        path, here = [], -1
        for n in range(int(size[b])):
            if up[n] == here and tokens[b, n] == wanted[b, here + 1]:
                path, here = [*path, n], n
        assert verdict.path[b].tolist() == path + [-1] * (nodes - len(path))
        assert verdict.bonus[b] == wanted[b, here + 1]
    assert fan == [widest[d] for d in sorted(widest)]
