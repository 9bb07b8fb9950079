"""Grammars at every node of a tree: what may not follow a node's text gets a logit of -inf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.grammars.tracker import BrokenAt, Tracker, ignored, on_device, tracked
from specdec.kernels.device import defer, to_device
from specdec.per_request import PerRequest, keeps, note
from specdec.types import Context, Proposal


def given(grammar: Any) -> Any:
    """The trackers of what a user gives for ``grammar``: one for all requests, a tuple with one for each, or ``PerRequest``.

    Raises:
        TypeError: it is no grammar. ValueError: it is an empty sequence.
    """
    if grammar is None or isinstance(grammar, (Tracker, PerRequest)):
        return grammar
    if isinstance(grammar, (tuple, list)):
        if not grammar:
            raise ValueError("grammar is empty: give a grammar, or one for each request (None for none)")
        return tuple(None if one is None else tracked(one) for one in grammar)
    return tracked(grammar)


def of_request(grammar: Any, request: int) -> Tracker | None:
    """The tracker of a request, if it has a grammar."""
    found: Tracker | None = grammar if grammar is None or isinstance(grammar, Tracker) else grammar[request]
    return found


def every(grammar: Any) -> Iterator[Tracker]:
    """All trackers that are known beforehand, each once."""
    several = (
        grammar
        if isinstance(grammar, tuple)
        else [grammar.default if isinstance(grammar, PerRequest) else grammar]
    )
    yield from {id(one): one for one in several if one is not None}.values()


def constrained(
    grammar: Any,
    logits: Tensor,
    context: Context,
    proposal: Proposal | None,
    first: int = -1,
    processed: bool = False,
    drafting: bool = False,
) -> Tensor:
    """``logits [B, R, V]`` without the tokens that the rows' grammars forbid; row r belongs to node ``first + r`` (-1: no node).

    ``processed``: whether processors may have taken tokens already. ``drafting``: whether the logits are a draft's, which say nothing of the target's.

    What follows a token that is not allowed, an end token, or a text that the grammar cannot continue keeps its logits: no lossless verifier
    accepts the first, a row ends at the second, and ``check_committed`` refuses the third. A node keeps its logits, too, if processors have taken all that
    its grammar allows: a text need not get there.
    """
    rows = list(_of_rows(grammar, context))
    if not rows:
        return logits  # before the host waits for a proposal
    B, R, V = logits.shape
    tokens = parents = size = None
    if proposal is not None:
        tokens, parents, size = proposal.ids, proposal.parents.tolist(), proposal.size.tolist()
    at: list[int] = []
    found: list[np.ndarray] = []
    for b, tracker in rows:
        tree: tuple[Sequence[int], Sequence[int]] = ((), ())
        if tokens is not None and parents is not None and size is not None:
            tree = tokens[b][: size[b]], parents[b]
        tracker.reserve(B)
        request, fail = int(context.request[b]), ignored if drafting else _failing(grammar, context, b)
        for r, forbidden in tracker.masks(request, _text(context, b), tree, first, R, fail):
            at.append(b * R + r)
            found.append(forbidden)
    if not found:
        return logits
    width = max(-(-V // 8), *map(len, found))
    packed = np.full((len(found), width), 255, dtype=np.uint8)
    for row, forbidden in zip(packed, found):
        row[: len(forbidden)] = forbidden
    masks = on_device(packed, V, logits.device)
    if len(at) < B * R:
        all_rows = torch.zeros(B * R, V, dtype=torch.bool, device=logits.device)
        masks = all_rows.index_copy_(0, to_device(torch.tensor(at), logits.device), masks)
    made = logits.masked_fill(masks.view(B, R, V), -torch.inf)
    if not processed:
        return made
    nothing = made.amax(-1) == -torch.inf  # processors took what the grammar allows
    if first < 0 and not drafting:  # the text itself: its row has no distribution
        if keeps(grammar):

            def ends(empty: Tensor) -> None:
                for b in empty.nonzero()[:, 0].tolist():
                    text, error = (
                        context.row(b),
                        ValueError("processors allow no token that the grammar allows"),
                    )
                    note(grammar, int(context.request[b]), text, len(text), error)

            defer(nothing[:, 0], ends)
        else:
            nothing[:, 0] = False
    return logits.where(nothing[..., None], made)


def any_of(grammar: Any, context: Context) -> bool:
    """Whether a row has a grammar."""
    return any(True for _ in _of_rows(grammar, context))


def check_committed(grammar: Any, context: Context, tokens: Tensor, count: Tensor, verifier: str) -> None:
    """Refuse ``tokens[b, :count[b]]``, which are about to be committed after row b, unless the rows' grammars allow them.

    Raises:
        ValueError: a token is not allowed; the message has the row, the request and the position. Where requests fail alone, nothing.
    """
    for b, tracker in _of_rows(grammar, context):
        text, block = _text(context, b), tokens[b, : int(count[b])].tolist()
        request, length = int(context.request[b]), int(context.length[b])
        try:
            stray = tracker.stray(request, text, block)
        except BrokenAt as broken:
            note(grammar, request, context.row(b) + block[: broken.n + 1], length + broken.n, broken.error)
            continue
        if stray is None:
            continue
        n, any_allowed = stray
        where = f"row {b} (request {request}), position {length + n} of the text, {len(text) + n} after the prompt"
        why = f"allows no token{'' if tracker.grammar.end_ids else ' (it has no end_ids, so that a complete text cannot end: declare them)'}"
        error = f"{where}: grammar {tracker!r} {why}"
        if any_allowed:
            error = f"{where}: token {block[n]} is not allowed by grammar {tracker!r}, and verifier {verifier!r} accepted it: use one that is lossless"
        note(grammar, request, context.row(b) + block[:n], length + n, ValueError(error))


def _failing(grammar: Any, context: Context, b: int) -> Callable[[list[int], int, Exception], None]:
    """What is told of tokens after row b's text for which its grammar failed, the first ``kept`` of which are right; raises unless its request fails alone."""

    def fail(path: list[int], kept: int, error: Exception) -> None:
        text = context.row(b)
        note(grammar, int(context.request[b]), text + path, len(text) + kept, error)

    return fail


def permitted(grammar: Any, context: Context, proposal: Proposal) -> Proposal:
    """The nodes of ``proposal`` that the rows' grammars allow, those after an end token excepted: the others would be rejected.

    Only for point masses: a node that was drawn may not be dropped because of its value, even if its probability is 0.
    """
    rows = list(_of_rows(grammar, context)) if proposal.nodes else []
    if not rows:
        return proposal
    tokens, parents, size = proposal.ids, proposal.parents.tolist(), proposal.size.tolist()
    kept = [list(range(n)) for n in size]
    for b, tracker in rows:
        tracker.reserve(context.batch)
        tree = tokens[b][: size[b]], parents[b][: size[b]]
        try:
            allowed = tracker.allows(int(context.request[b]), _text(context, b), tree)
        except Exception:
            if not keeps(grammar):
                raise
            continue  # it fails again where its masks are made
        kept[b] = [n for n in kept[b] if allowed[n]]
    return proposal if [len(nodes) for nodes in kept] == size else proposal.kept(kept)


def allowed_after(
    grammar: Any,
    context: Context,
    b: int,
    tree: tuple[Sequence[int], Sequence[int]],
    node: int,
    tokens: list[int],
) -> list[int]:
    """Those of ``tokens`` that row b's grammar allows after a ``node`` of a tree (-1: after its text): all, where nothing is forbidden. ``tree``: tokens and parents."""
    request = int(context.request[b])
    tracker = of_request(grammar, request)
    found = [] if tracker is None else tracker.masks(request, _text(context, b), tree, node, 1, ignored)
    if not found:
        return tokens
    ((_, forbidden),) = found
    return [i for i in tokens if i < 8 * len(forbidden) and not forbidden[i >> 3] >> (i & 7) & 1]


class Forced(NamedTuple):
    """Tokens that grammars force: of every row the next ones, and ``ended [B]``, whether they end its text."""

    tokens: list[list[int]]
    ended: Tensor


def forced(grammar: Any, context: Context, most: Sequence[int], vocab_size: int | None = None) -> Forced:
    """Up to ``most[b]`` tokens that row b's grammar forces after its text; none without a grammar, and none from one that the vocabulary lacks."""
    found, ended = [list[int]() for _ in most], torch.zeros(context.batch, dtype=torch.bool)
    for b, tracker in _of_rows(grammar, context):
        tracker.reserve(context.batch)
        try:
            said = tracker.forced(int(context.request[b]), _text(context, b), most[b])
            found[b] = list(takewhile(lambda token: vocab_size is None or token < vocab_size, said))
        except Exception:
            if not keeps(grammar):
                raise
            continue  # it fails again where the text gets there
        ended[b] = bool(found[b]) and found[b][-1] in tracker.grammar.end_ids
    return Forced(found, ended)


def _of_rows(grammar: Any, context: Context) -> Iterator[tuple[int, Tracker]]:
    for b, request in enumerate(context.request.tolist()):
        tracker = of_request(grammar, request)
        if tracker is not None:
            yield b, tracker


def _text(context: Context, b: int) -> np.ndarray:
    """The generated ids of a row."""
    found: np.ndarray = context.tokens[b].numpy()[int(context.prompt_length[b]) : int(context.length[b])]
    return found
