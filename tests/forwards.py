"""What tests of ``HFModel`` share: plain forwards of the same model."""

from __future__ import annotations

import torch

from specdec.types import Proposal, Verdict

ROWS = [[5], list(range(3, 36)), [7, 8, 9] * 5, [90, 2]]


TREE = [-1, 0, 0, 1, 2, 4]


# Transformers' eager attention takes its softmax in float32, whatever the model's type.
TOLERANCE = 2e-6


def plain(model, ids):
    """``[n, V]`` logits after every token of ``ids``, by one forward without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def path_to(parents, node):
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = int(parents[node])
    return nodes[::-1]


def error(model, rows, logits, proposal=None, first=-1):
    """Largest relative difference of any logits that ``score`` gave to those of the plain forward."""
    worst = 0.0
    for b, row in enumerate(rows):
        size = 0 if proposal is None else int(proposal.size[b])
        for node in range(first, size):
            if (
                proposal is not None
                and node >= 0
                and node + 1 < size
                and int(proposal.parents[b, node + 1]) == node
            ):
                continue  # its logits are on the way to the next node's
            ids = (
                []
                if proposal is None
                else [int(proposal.tokens[b, n]) for n in path_to(proposal.parents[b], node)]
            )
            expected = plain(model, row + ids)[-len(ids) - 1 :]
            ours = [
                logits[b, n - first]
                for n in [-1, *(path_to(proposal.parents[b], node) if ids else [])]
                if n >= first
            ]
            expected = expected[-len(ours) :]
            worst = max(worst, float((torch.stack(ours) - expected).abs().max() / expected.abs().max()))
    return worst


def propose(target, size, seed=0, rows=4):
    g = torch.Generator().manual_seed(seed)
    N = len(TREE)
    parents = (
        torch.tensor([TREE] * rows) if target.supports_trees else torch.arange(-1, N - 1).expand(rows, N)
    )
    return Proposal(torch.randint(0, 97, (rows, N), generator=g), parents, torch.tensor(size))


def accept(proposal, paths):
    """A verdict that takes these nodes of each row, and the bonus token 11."""
    path = torch.full((len(paths), proposal.nodes), -1)
    for b, nodes in enumerate(paths):
        path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
    return Verdict.of(proposal, path, torch.tensor([len(p) for p in paths]), torch.full((len(paths),), 11))


def hooks_of(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
