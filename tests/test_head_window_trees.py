"""Windows of a head's layers in trees: a node's logits are those of the chain of the tokens above it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_heads import shake
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import Eagle3
from specdec.drafts.heads.features import Features
from specdec.drafts.heads.slots import SlotAnchors, empty, reading
from specdec.masks import streaming

KNOWN, LEVELS, WIDTH = (14, 3), 3, 3
HOST = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3))


def begun(head):
    """Anchors after texts of ``KNOWN`` lengths, and the memo of the last pair of each."""
    draw, rows = torch.Generator().manual_seed(0), len(KNOWN)
    ring = empty(head.shapes, rows, 40, head.mask)
    row, position = np.repeat(np.arange(rows), KNOWN), np.concatenate([np.arange(n) for n in KNOWN])
    tokens = torch.randint(0, 96, (2, len(row)), generator=draw)
    layers = {tap: torch.randn(len(row), 32, dtype=torch.float64, generator=draw) for tap in head.taps}
    kept = head.read(Features(layers, *tokens), reading(ring, row, position, head.mask, HOST))
    at = SlotAnchors(ring, torch.arange(rows), torch.tensor(KNOWN), head.mask, HOST)
    return at, kept[np.cumsum(KNOWN) - 1]


def chain(head, tokens):
    """``[V]`` by row: the logits after a chain ``tokens [R, n]``."""
    at, memo = begun(head)
    for n in range(tokens.shape[1]):
        logits, memo = head.step(n, memo, tokens[:, n], at)
    return logits


def tree(head, tokens):
    """The logits ``[R, WIDTH, V]`` of each level below the anchors' ``tokens [R, 1]``, and the paths ``[R, WIDTH, n]`` to them."""
    draw, rows = torch.Generator().manual_seed(1), torch.arange(len(KNOWN))[:, None]
    at, memo = begun(head)
    _, memo = head.step(0, memo, tokens[:, 0], at)
    memo = memo[:, None].expand(-1, WIDTH, *memo.shape[1:])
    above, paths = np.full((len(KNOWN), WIDTH), at.used - 1), tokens[:, None].expand(-1, WIDTH, -1)
    for level in range(1, LEVELS + 1):
        begin = at.used
        at.under(torch.as_tensor(above))
        new = torch.randint(0, 96, (len(KNOWN), WIDTH), generator=draw)
        paths = torch.cat([paths, new[..., None]], -1)
        logits, memo = head.step(level, memo, new, at)
        yield logits, paths
        parent = torch.randint(0, WIDTH, (len(KNOWN), WIDTH), generator=draw)
        paths, above, memo = paths[rows, parent], begin + parent.numpy(), memo[rows, parent]


@pytest.mark.parametrize(
    ("windows", "mask"),
    [([2], None), ([5, None], None), ([None, 3], streaming(8, 1)), ([1, 4], None)],
    ids=str,
)
@torch.no_grad()
def test_a_node_sees_what_its_chain_sees(target, windows, mask):
    more = {} if mask is None else {"mask": mask}
    head, free = (
        shake(Eagle3.from_target(target, (0, 2), blocks=len(windows), windows=some, **more))
        for some in (windows, None)
    )
    free.load_state_dict(head.state_dict())
    tokens = torch.tensor([[7], [9]])
    for (logits, paths), (other, _) in zip(tree(head, tokens), tree(free, tokens), strict=True):
        assert (logits[0] - other[0]).abs().max() > 1e-3  # a tree without windows would be seen
        for node in range(WIDTH):
            torch.testing.assert_close(logits[:, node], chain(head, paths[:, node]))
