"""The states of the texts that a grammar has read, so that no token is read twice.

A text is found again by its request and its tokens. So nothing has to be told when rows leave or join, rejected tokens change no state, and
several threads may use one decoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.grammars.contract import ChecksTarget, Forces, Grammar
from specdec.kernels.device import to_device
from specdec.types import common

KEPT = 16
"""States of a text's last tokens that are kept: one that is taken back by as many is not read again."""
TRAILS = 4
"""Texts that are kept of one request number: several runs may use the same numbers at a time."""
REQUESTS = 64
"""Requests that are kept at least; otherwise eight times as many as a batch has rows."""


Tree = tuple[Sequence[int], Sequence[int]]
"""Tokens and parents of nodes after a text."""
Fail = Callable[[list[int], int, Exception], None]
"""Given tokens after a text at which a grammar raised an error, how many of them it took, and the error."""


class BrokenAt(Exception):
    """A grammar raised ``error`` at token ``n``."""

    def __init__(self, n: int, error: Exception):
        super().__init__(n, error)
        self.n, self.error = n, error


class Node:
    """A text and what follows it: ``forbidden``, the tokens that may not come next as bits, and the nodes after those that were read."""

    __slots__ = ("children", "forbidden", "state")

    def __init__(self, state: Any = None, forbidden: np.ndarray | None = None):
        self.state, self.forbidden, self.children = state, forbidden, dict[int, Node]()


ENDED, OUTSIDE = Node(), Node()
"""After an end token, and after a token that was not allowed: nothing is forbidden there."""


class _Trail:
    """A text ``[T]`` and the nodes after its last tokens; the last one is after all of it."""

    def __init__(self, text: np.ndarray, nodes: list[Node]):
        self.text, self.nodes = text, nodes


@dataclass(frozen=True)
class Tracker:
    """A grammar and the states of the texts that it has read. ``Sampling`` makes one of each grammar.

    Raises:
        TypeError: ``grammar`` lacks methods or ``end_ids``.
    """

    grammar: Grammar[Any]
    _trails: OrderedDict[int, list[_Trail]] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )
    _lock: Any = field(default_factory=RLock, init=False, repr=False, compare=False)
    _start: list[Node] = field(default_factory=list, init=False, repr=False, compare=False)
    _probed: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.grammar, type) or not isinstance(self.grammar, Grammar):
            what = self.grammar if isinstance(self.grammar, type) else type(self.grammar)
            raise TypeError(
                f"grammar is a {what.__name__}: give grammars.json_schema(schema, tokenizer), or an object with start(), advance(state, token), "
                "allowed(state) and end_ids"
            )
        if not isinstance(self.grammar.end_ids, tuple):
            raise TypeError(f"end_ids of the grammar is {self.grammar.end_ids!r}: give a tuple of ids")
        for token in self.grammar.end_ids:
            whole("end_ids of the grammar, of one,", token)

    def __repr__(self) -> str:
        return repr(self.grammar)

    def __hash__(self) -> int:  # a user's grammar may have none
        return hash(type(self.grammar))

    def __reduce__(self) -> Any:
        return Tracker, (self.grammar,)

    def check(self, vocab_size: int, tokenizer: Any) -> None:
        """Refuse a grammar that does not fit the target, or whose ``advance`` changes the state that it is given.

        Raises:
            TypeError: ``allowed`` returns no mask. ValueError: no token of the target may begin a text, an end token does not exist, or a state changes.
        """
        if isinstance(self.grammar, ChecksTarget):
            self.grammar.check(vocab_size, tokenizer)
        for token in self.grammar.end_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"end_ids of the grammar has {token}, and the target's vocabulary has ids 0 to {vocab_size - 1}"
                )
        with self._lock:
            if vocab_size not in self._probed:
                self._probe(vocab_size)
                self._probed.add(vocab_size)

    def _probe(self, vocab_size: int) -> None:
        state, seen = self.grammar.start(), list[tuple[Any, np.ndarray]]()
        for _ in range(4):
            forbidden = bits(self.grammar.allowed(state))
            open_ = np.flatnonzero(~unpacked(forbidden[None], vocab_size)[0])
            if not seen and not len(open_):
                raise ValueError(
                    f"grammar {self!r} allows none of the target's {vocab_size} tokens at the start of a text: is it made for another tokenizer?"
                )
            seen.append((state, forbidden))
            going = np.setdiff1d(open_, self.grammar.end_ids)
            if not len(going):
                break
            state = self.grammar.advance(state, int(going[0]))
        if any(not np.array_equal(bits(self.grammar.allowed(state)), before) for state, before in seen):
            raise ValueError(
                f"grammar {self!r}: advance(state, token) changes the state that it is given, or allowed(state) is no function of it, so rejected "
                "tokens would be remembered: return another state (a copy, or a fork of the matcher)"
            )

    # -- texts ----------------------------------------------------------------------------------------------------------

    def masks(
        self,
        request: int,
        text: np.ndarray,
        tree: Tree,
        first: int,
        count: int,
        fail: Fail | None = None,
    ) -> list[tuple[int, np.ndarray]]:
        """``(r, forbidden)`` for each of ``count`` rows of logits that is constrained; row r is after node ``first + r`` (-1: after the text).

        Args:
            text: ``[T]`` the committed generated ids. tree: the existing nodes' tokens and parents. fail: told where the grammar raises; ``None``: the error is raised.
        """
        fail = raises if fail is None else fail
        with self._lock:
            try:
                root = self._at(request, text)
            except Exception as error:
                fail([], 0, error)
                return []
            nodes, found = self._after(root, tree, first + count, fail), []
            for r in range(count):
                n = first + r
                try:
                    forbidden = self._forbidden(nodes[1 + n] if n < len(nodes) - 1 else OUTSIDE)
                except Exception as error:
                    path = _path(tree, n)
                    fail(path, len(path), error)
                    continue
                if forbidden is not None:
                    found.append((r, forbidden))
            return found

    def stray(self, request: int, text: np.ndarray, tokens: Sequence[int]) -> tuple[int, bool] | None:
        """The first of ``tokens`` after a text that is not allowed, and whether any was; ``None`` if all are.

        Raises:
            BrokenAt: the grammar raised an error.
        """
        with self._lock:
            node, n = None, 0
            for n, token in enumerate(tokens):
                try:
                    before = self._at(request, text) if node is None else node
                    node = self._child(before, token)
                except Exception as error:
                    raise BrokenAt(n, error) from error
                if node is OUTSIDE:
                    return n, self._forbidden(before) is not None
        return None

    def allows(self, request: int, text: np.ndarray, tree: Tree) -> list[bool]:
        """Of each node, whether its path is allowed after a text. Where the grammar raises, it is not, nor is anything after an end token."""
        with self._lock:
            nodes = self._after(self._at(request, text), tree, len(tree[0]), ignored)
        above = (nodes[1 + parent] for parent in tree[1])
        return [node is not OUTSIDE and up is not ENDED for node, up in zip(nodes[1:], above)]

    def forced(self, request: int, text: np.ndarray, most: int) -> list[int]:
        """Up to ``most`` tokens that follow a text: each is the only one that is allowed, or what the grammar's own ``forced`` says."""
        found: list[int] = []
        with self._lock:
            node = self._at(request, text)
            while len(found) < most and (new := self._only(node)):
                for token in new:
                    node = self._child(node, token)
                    if node is OUTSIDE or len(found) == most:
                        return found
                    found.append(token)
                    if node is ENDED:
                        return found
        return found

    def reserve(self, rows: int) -> None:
        """Forget the requests that were used the longest ago, if there are many more than a batch has ``rows``."""
        with self._lock:
            while len(self._trails) > max(REQUESTS, 8 * rows):
                self._trails.popitem(last=False)

    def _after(self, root: Node, tree: Tree, end: int, fail: Fail) -> list[Node]:
        """The nodes after the text and after the tree's first ``end`` nodes, the text's first."""
        nodes = [root]
        for n, (token, parent) in enumerate(zip(tree[0][:end], tree[1])):
            try:
                nodes.append(self._child(nodes[1 + parent], token))
            except Exception as error:
                path = _path(tree, n)
                fail(path, len(path) - 1, error)
                nodes.append(OUTSIDE)
        return nodes

    def _at(self, request: int, text: np.ndarray) -> Node:
        """The node after a text; reads only tokens that no earlier text of the request had there."""
        trails = self._trails.setdefault(request, [])
        self._trails.move_to_end(request)
        best, held = None, -1
        for trail in trails:
            same = common(text, trail.text)
            if same > held and len(trail.text) - same < len(trail.nodes):
                best, held = trail, same
        if best is None:
            best, held = _Trail(text[:0], [self._root()]), 0
        elif held < len(best.text):  # taken back, or another run: the other text may go on, too
            best = _Trail(text[:held], best.nodes[: len(best.nodes) - len(best.text) + held])
        if best in trails:
            trails.remove(best)
        trails.append(best)
        del trails[:-TRAILS]
        if held < len(text):
            nodes = list(best.nodes)
            for token in text[held:].tolist():
                up = nodes[-1]
                nodes.append(self._child(up, token))
                if up is not ENDED and up is not OUTSIDE:
                    up.children = {token: nodes[-1]}  # the others were rejected
            best.text, best.nodes = text.copy(), nodes[-KEPT:]
        return best.nodes[-1]

    def _root(self) -> Node:
        if not self._start:
            self._start.append(Node(self.grammar.start()))
        start = self._start[0]
        return Node(start.state, self._forbidden(start))

    def _child(self, node: Node, token: int) -> Node:
        """The node after one more token."""
        if node is ENDED or node is OUTSIDE:
            return node
        child = node.children.get(token)
        if child is None:
            forbidden = self._packed(node)
            if not 0 <= token < 8 * len(forbidden) or forbidden[token >> 3] >> (token & 7) & 1:
                child = OUTSIDE
            elif token in self.grammar.end_ids:
                child = ENDED
            else:
                child = Node(self.grammar.advance(node.state, token))
            node.children[token] = child
        return child

    def _forbidden(self, node: Node) -> np.ndarray | None:
        """What is forbidden after a node; ``None`` after the end, outside the language, and where everything would be."""
        if node is ENDED or node is OUTSIDE:
            return None
        forbidden = self._packed(node)
        return None if bool((forbidden == 255).all()) else forbidden

    def _only(self, node: Node) -> Sequence[int]:
        """The tokens that the grammar forces after a node."""
        if node is ENDED or node is OUTSIDE:
            return ()
        if isinstance(self.grammar, Forces) and (known := list(self.grammar.forced(node.state))):
            return known
        forbidden = self._packed(node)
        some = np.flatnonzero(forbidden != 255)
        if len(some) != 1:
            return ()
        allowed = 255 - int(forbidden[some[0]])
        return (8 * int(some[0]) + allowed.bit_length() - 1,) if allowed.bit_count() == 1 else ()

    def _packed(self, node: Node) -> np.ndarray:
        if node.forbidden is None:
            node.forbidden = bits(self.grammar.allowed(node.state))
        return node.forbidden


_known: WeakValueDictionary[int, Tracker] = WeakValueDictionary()


def tracked(grammar: Any) -> Tracker:
    """The tracker of a grammar, one for all that use the same object."""
    if isinstance(grammar, Tracker):
        return grammar
    found = _known.get(id(grammar))  # a tracker keeps its grammar, so that no other one has its id
    if found is None:
        found = _known.setdefault(id(grammar), Tracker(grammar))
    return found


def bits(allowed: Tensor) -> np.ndarray:
    """uint8 ``[n]``: the tokens that are not allowed, as bits, the lowest first; those beyond the end of ``allowed`` have 1.

    Raises:
        TypeError: it is no mask.
    """
    flat = isinstance(allowed, Tensor) and allowed.dim() == 1 and allowed.is_cpu
    if flat and allowed.dtype == torch.bool:
        return ~np.packbits(allowed.numpy(), bitorder="little")
    if flat and allowed.dtype == torch.int32:
        return ~allowed.contiguous().numpy().view(np.uint8)
    what = (
        f"{list(allowed.shape)} in {allowed.dtype} on {allowed.device}"
        if isinstance(allowed, Tensor)
        else f"a {type(allowed).__name__}"
    )
    raise TypeError(
        f"allowed() of the grammar returned {what}: return a bool tensor [V] on the host, or its bits, int32 [W]"
    )


def unpacked(forbidden: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool ``[K, V]`` of bits ``[K, n]``; what is beyond the end is forbidden."""
    width = -(-vocab_size // 8)
    if forbidden.shape[1] < width:
        forbidden = np.pad(forbidden, ((0, 0), (0, width - forbidden.shape[1])), constant_values=255)
    return np.unpackbits(forbidden, axis=1, count=vocab_size, bitorder="little").view(bool)


def on_device(forbidden: np.ndarray, vocab_size: int, device: torch.device) -> Tensor:
    """``unpacked``, of bits for all tokens, on a device, to which the bits go, an eighth of the bytes."""
    if device.type == "cpu":
        return torch.from_numpy(unpacked(forbidden, vocab_size))
    packed = to_device(torch.from_numpy(forbidden), device)[..., None]
    of_byte = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed >> of_byte & 1).flatten(1)[:, :vocab_size].bool()


def raises(path: list[int], kept: int, error: Exception) -> None:
    """The ``Fail`` of a grammar whose errors are raised."""
    raise error


def ignored(path: list[int], kept: int, error: Exception) -> None:
    """The ``Fail`` of tokens that need not be proposed: where the text gets there, the grammar raises again."""


def _path(tree: Tree, n: int) -> list[int]:
    """The tokens from the text to node ``n``."""
    path: list[int] = []
    while n >= 0:
        path.append(tree[0][n])
        n = tree[1][n]
    return path[::-1]
