"""Logits processors at every node of a tree, each with the node's true prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.purity import check_scores
from specdec.types import Context, Proposal


def processed(
    processors: Sequence[Callable[[Tensor, Tensor], Tensor]],
    logits: Tensor,
    context: Context,
    proposal: Proposal | None,
    first: int = -1,
) -> Tensor:
    """Scores ``[B, R, V]`` of the processors for ``logits [B, R, V]``, whose row r belongs to node ``first + r`` (-1: no node).

    What follows a token that they forbid keeps its logits: no lossless verifier accepts such a token, and many processors fail after it.

    Raises:
        TypeError: a processor returns no scores.
    """
    out = logits.clone()
    for b in range(logits.shape[0]):
        ids = context.tokens[b, : int(context.length[b])].to(logits.device)
        dead: set[int] = set()
        for r in range(logits.shape[1]):
            node = first + r
            if node >= 0:
                if proposal is None or node >= int(proposal.size[b]):
                    continue
                parent = int(proposal.parents[b, node])
                above = (
                    parent - first
                )  # the row of logits that the node's token is drawn from, if it is among these
                token = int(proposal.tokens[b, node])
                if parent in dead or (above >= 0 and float(out[b, above, token]) == -math.inf):
                    dead.add(node)
                    continue
            path: list[int] = []
            while node >= 0:
                path.append(node)
                node = int(proposal.parents[b, node])  # type: ignore[union-attr]
            prefix = torch.cat([ids, proposal.tokens[b, path[::-1]]]) if path else ids  # type: ignore[union-attr]
            scores = out[b, r][None]  # a copy, which a processor may change in place
            for processor in processors:
                scores = check_scores(processor, processor(prefix[None], scores), scores)
            out[b, r] = scores[0]
    return out
