"""Logits processors at every node of a tree, each with the node's true prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.per_request import PerRequest, keeps, note
from specdec.purity import check_scores, probe_at
from specdec.types import Context, Proposal

Processor = Callable[[Tensor, Tensor], Tensor]
Fail = Callable[[list[int], Exception], None]
"""Given a text for which something failed, and the error."""


class Processors:
    """The processors of some requests. The first texts of a run are shown to copies of them; ``unseen``: those to which none was shown."""

    def __init__(self, functions: Sequence[Processor]):
        self.functions, self.unseen = tuple(functions), list(functions)

    def __repr__(self) -> str:
        return repr(self.functions)

    def __call__(
        self,
        logits: Tensor,
        context: Context,
        proposal: Proposal | None,
        first: int,
        fail: Fail | None = None,
    ) -> Tensor:
        """As ``processed``.

        Raises:
            TypeError: a processor returns no scores. ValueError: it keeps state.
        """
        for processor in tuple(self.unseen):
            for b in range(context.batch):
                ids = context.tokens[b, : int(context.length[b])].to(logits.device)
                probe_at(processor, ids[None], logits[b, :1])
        self.unseen.clear()
        return processed(self.functions, logits, context, proposal, first, fail)


def of_requests(
    table: PerRequest[Processors],
    logits: Tensor,
    context: Context,
    proposal: Proposal | None,
    first: int,
    drafting: bool = False,
) -> Tensor:
    """As ``processed``, where each request has processors of its own, which fail alone where ``table`` keeps failures; not where they are ``drafting``: the
    target's scores decide whether they fail."""
    made = logits
    for b, request in enumerate(context.request.tolist()):
        processors: Processors = table[request]
        if not processors.functions:
            continue
        row, tree = torch.tensor([b]), None
        one = context.select(row)
        if proposal is not None:
            tree = Proposal(proposal.tokens[b : b + 1], proposal.parents[row], proposal.size[row])

        def fail(ids: list[int], error: Exception, request: int = request) -> None:
            if not (drafting and keeps(table)):
                note(table, request, ids, len(ids), error)

        try:
            scores = processors(logits[b : b + 1], one, tree, first, fail if keeps(table) else None)
        except Exception as error:  # it keeps state, for example
            fail(one.row(0), error)
            continue
        made = logits.clone() if made is logits else made
        made[b] = scores[0]
    return made


def processed(
    processors: Sequence[Processor],
    logits: Tensor,
    context: Context,
    proposal: Proposal | None,
    first: int = -1,
    fail: Fail | None = None,
) -> Tensor:
    """Scores ``[B, R, V]`` of the processors for ``logits [B, R, V]``, whose row r belongs to node ``first + r`` (-1: no node).

    What follows a token that they forbid keeps its logits: no lossless verifier accepts such a token, and many processors fail after it.

    Args:
        fail: told of texts for which a processor raises, or leaves no token; their logits are kept. ``None``: errors are raised.
    Raises:
        TypeError: a processor returns no scores.
    """
    out = logits.clone()
    drafted = [] if proposal is None else proposal.ids
    for b in range(logits.shape[0]):
        ids = context.tokens[b, : int(context.length[b])].to(logits.device)
        dead: set[int] = set()
        for r in range(logits.shape[1]):
            node = first + r
            if node >= 0:
                if proposal is None or node >= int(proposal.size[b]):
                    continue
                parent = int(proposal.parents[b, node])
                # The row of logits that the node's token is drawn from, if it is among these.
                above = parent - first
                token = drafted[b][node]
                if parent in dead or (above >= 0 and float(out[b, above, token]) == -math.inf):
                    dead.add(node)
                    continue
            path: list[int] = []
            while node >= 0:
                path.append(node)
                node = int(proposal.parents[b, node])  # type: ignore[union-attr]
            prefix = torch.cat([ids, proposal.tokens[b, path[::-1]]]) if path else ids  # type: ignore[union-attr]
            scores = out[b, r][None]  # a copy, which a processor may change in place
            try:
                for processor in processors:
                    scores = check_scores(processor, processor(prefix[None], scores), scores)
                if (
                    fail is not None
                    and not bool(scores.amax().isfinite())
                    and bool(logits[b, r].amax().isfinite())
                ):
                    raise ValueError(f"processors {processors!r} allow no token, or return NaN or inf")
            except Exception as error:
                if fail is None:
                    raise
                fail(prefix.cpu().tolist(), error)
                out[b, r] = logits[b, r]
                continue
            out[b, r] = scores[0]
    return out
