"""Token trees as parent lists: ancestors, depths, chains and merging, for ragged batches.

``parents[b, n]`` is -1 for a child of the last committed token and otherwise a node stored before ``n``
(SpecInfer, Miao et al., arXiv 2305.09781, verifies such trees in one pass).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.device import to_device, to_host
from specdec.types import Proposal, Verdict


def is_chain(parents: Tensor, size: Tensor) -> Tensor:
    """``[B]`` whether the existing nodes of a row, ``parents[b, :size[b]]``, are -1, 0, 1, ...; true for rows without nodes."""
    n = np.arange(parents.shape[1])
    return torch.from_numpy(((parents.numpy() == n - 1) | (n >= size.numpy()[:, None])).all(1))


def check(parents: Tensor, size: Tensor) -> None:
    """Raise ValueError unless each existing node's parent is -1 or an earlier node."""
    n = torch.arange(parents.shape[1])
    bad = ((parents < -1) | (parents >= n)) & (n < size[:, None])
    if bool(bad.any()):
        b, i = bad.nonzero()[0].tolist()
        raise ValueError(
            f"parents[{b}, {i}] is {int(parents[b, i])}: give -1 (the last committed token) or a node stored before"
        )


def depths(parents: Tensor) -> Tensor:
    """``[B, N]`` depth of each node; 0 for a child of the last committed token. Position = length + depth.

    Here and below, nodes that do not exist may have any parents; the values returned for them are arbitrary.
    """
    up = _upward(parents)
    depth = np.zeros_like(up)
    here = up
    while (above := here >= 0).any():
        depth += above
        here = np.where(above, np.take_along_axis(up, here.clip(0), 1), -1)
    return torch.from_numpy(depth)


def ancestors(parents: Tensor) -> Tensor:
    """``[B, N, N]`` bool: entry ``[b, n, m]`` says that node ``m`` is ``n`` itself or above it."""
    up = _upward(parents)
    B, N = up.shape
    found = np.broadcast_to(np.eye(N, dtype=bool), (B, N, N)).copy()
    here = up
    while (above := here >= 0).any():
        b, n = above.nonzero()
        found[b, n, here[b, n]] = True
        here = np.where(above, np.take_along_axis(up, here.clip(0), 1), -1)
    return torch.from_numpy(found)


def _upward(parents: Tensor) -> np.ndarray:
    """``parents`` of which all come before their nodes, also those of nodes that do not exist."""
    return np.minimum(parents.numpy(), np.arange(parents.shape[1]) - 1)


def fan(parents: Tensor, size: Tensor) -> list[int]:
    """For each depth, the most children of one parent, over all rows."""
    b, n = np.nonzero(np.arange(parents.shape[1]) < size.numpy()[:, None])
    up, depth = parents.numpy()[b, n] + 1, depths(parents).numpy()[b, n]
    parent = b * (parents.shape[1] + 1) + up
    children = np.bincount(parent)[parent]
    return [int(children[depth == d].max()) for d in range(depth.max(initial=-1) + 1)]


def path_to(parents: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """``path [B, N]``, padded with -1, and its length ``[B]``: the nodes from the root to ``last [B]``, -1 for none; both where ``last`` is."""
    B, N = parents.shape
    if N == 0:
        return last.new_zeros(B, 0), last.new_zeros(B)
    rows, nodes = (torch.arange(n, device=last.device) for n in (B, N))
    above = to_device(ancestors(parents), last.device)
    taken = above[rows, last.clamp(min=0)] & (last >= 0)[:, None]
    path = torch.full((B, N + 1), -1, device=last.device)  # the last column takes the other nodes
    path.scatter_(1, torch.where(taken, taken.cumsum(1) - 1, N), nodes.expand(B, N))
    return path[:, :N].contiguous(), taken.sum(1)


def sibling_numbers(parents: Tensor) -> Tensor:
    """``[B, N]`` number of each node among all nodes of its depth; with the depth it identifies the node."""
    depth = depths(parents)
    same = depth[:, :, None] == depth[:, None, :]
    return torch.tril(same, -1).sum(-1)


def merge(a: Proposal, b: Proposal) -> Proposal:
    """One tree with the nodes of both: ``a``'s first, then ``b``'s.

    Two trees of point masses share equal prefixes. Nodes that were drawn keep their own distributions and are never merged:
    a second draw of the same token is another candidate, for which recursive rejection accounts. Their draws must be
    independent: give the drafts ``rng.Attempt(rng, 0)`` and ``rng.Attempt(rng, 1)``.
    """
    if a.tokens.shape[0] != b.tokens.shape[0]:
        raise ValueError(f"cannot merge proposals of {a.tokens.shape[0]} and {b.tokens.shape[0]} rows")
    if (a.probs is None) != (b.probs is None):
        if not a.nodes or not b.nodes:  # an empty proposal has no point masses
            return a if a.nodes else b
        raise ValueError(
            "cannot merge point masses with drawn nodes: give the point masses one-hot probs first"
        )
    B, N, M = a.tokens.shape[0], a.nodes, b.nodes
    tokens = torch.nn.functional.pad(a.tokens, (0, M))
    parents = torch.nn.functional.pad(a.parents, (0, M), value=-1)
    probs = source = theirs = None
    if a.probs is not None and b.probs is not None:
        probs = torch.cat([a.probs, b.probs.to(a.probs.device)], 1)
        source = torch.nn.functional.pad(a.sources(), (0, M))
        theirs = b.sources() + a.probs.shape[1]
    size, place = a.size.clone(), torch.full((B, M), -1)
    rows, slots = torch.arange(B), torch.arange(N + M)
    for m in range(M):
        up = b.parents[:, m]
        up = torch.where(up >= 0, place[rows, up.clamp(0, M - 1)], -1)
        token, live = b.tokens[:, m], m < b.size
        same = (tokens == token[:, None]).cpu() & (parents == up[:, None]) & (slots < size[:, None])
        found = same.any(1) if probs is None else torch.zeros(B, dtype=torch.bool)
        place[:, m] = torch.where(found, same.int().argmax(1), size)
        new = (live & ~found).nonzero()[:, 0]
        at = place[new, m]
        tokens[new, at], parents[new, at] = token[new], up[new]
        if source is not None and theirs is not None:
            source[new, at] = theirs[new, m]
        size[new] += 1
    width = int(size.max()) if B else 0
    provenance = "declared" if "declared" in (a.provenance, b.provenance) else a.provenance
    return Proposal(
        tokens[:, :width],
        parents[:, :width],
        size,
        probs,
        provenance,
        None if source is None else source[:, :width],
    )


def follow(proposal: Proposal, wanted: Tensor) -> Verdict:
    """From the root on, accept the first child that equals the wanted token there; the wanted token after the last one is the bonus.

    Args:
        wanted: ``[B, N + 1]`` int64, after the last committed token and after every node.
    """
    B, N = proposal.tokens.shape
    drafted, wanted = to_host(proposal.tokens, wanted)  # one copy from a device
    parents, size = proposal.parents, proposal.size
    if bool(is_chain(parents, size).all()):
        return _follow_chain(drafted.numpy(), wanted.numpy(), size.numpy())
    up, rows = parents.numpy(), np.arange(B)
    hit = np.arange(N) < size.numpy()[:, None]
    hit &= drafted.numpy() == np.take_along_axis(wanted.numpy(), (up + 1).clip(0, N), 1)
    here, path, accepted = np.full(B, -1), np.full((B, N), -1), np.zeros(B, dtype=np.int64)
    for depth in range(N):
        child = hit & (up == here[:, None])
        found = child.any(1)
        if not found.any():
            break
        hit &= found[:, None]
        here = np.where(found, child.argmax(1), here)
        path[:, depth] = np.where(found, here, -1)
        accepted += found
    bonus = wanted.numpy()[rows, here + 1]
    made = map(torch.from_numpy, (path, accepted, bonus))
    return Verdict.of(Proposal(drafted, parents, size), *made, checked=True)


def _follow_chain(drafted: np.ndarray, wanted: np.ndarray, size: np.ndarray) -> Verdict:
    """``follow`` for chains ``drafted [B, N]``."""
    B, N = drafted.shape
    nodes, rows = np.arange(N), np.arange(B)
    hit = (drafted == wanted[:, :N]) & (nodes < size[:, None])
    accepted = np.where(hit.all(1), N, (~hit).argmax(1)) if N else np.zeros(B, dtype=np.int64)
    taken, bonus = nodes < accepted[:, None], wanted[rows, accepted]
    tokens = np.zeros((B, N + 1), dtype=np.int64)
    np.multiply(drafted, taken, out=tokens[:, :N])
    tokens[rows, accepted] = bonus
    return Verdict(*map(torch.from_numpy, (np.where(taken, nodes, -1), accepted, bonus, tokens)))
