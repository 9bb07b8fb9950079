"""A linter for policies of length and budget: whether how much a draft submits depends on what it must not.

A policy is lawful if it is a function of the past, and of the nodes drawn before, whether a node is submitted, and if no random number of that
past decides again. ``lint`` enumerates every outcome of a decoder's random decisions, as ``certify`` does, and looks at the draws of the draft,
those that were dropped included. ``certify`` says how much the output is biased; ``lint`` says why, also where the bias is still small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from specdec import tree
from specdec.audit.walk import Branches, Walk, pack, take
from specdec.decoder import Decoder
from specdec.rng import ACCEPT, BONUS, DRAFT, SELECT, TARGET, Key, Rekeyed, Rng
from specdec.types import Round

_STREAMS = {DRAFT: "draft", ACCEPT: "acceptance", BONUS: "bonus", TARGET: "target", SELECT: "selector"}
_Node = tuple[int, int]  # depth, and number among the nodes of that depth


@dataclass(frozen=True)
class Findings:
    """What ``lint`` found.

    Attributes:
        anticipates: one example for each node whose submission depends on its own value or on nodes drawn after it.
        leak: the largest total variation between the distribution of a drawn node, given the text, the nodes of its block before it, and
            whether it was submitted, and the distribution that it was drawn from.
        harm: the largest product of that distance and the probability, given the same text and nodes, of dropping the node.
        reused: stream -> probability that one of its random numbers decides twice.
        mates: whether the text of a row depends on the rows beside it (or on earlier calls).
        branches: number of branches.
    """

    anticipates: tuple[str, ...]
    leak: float
    harm: float
    reused: dict[str, float] = field(default_factory=dict)
    mates: bool = False
    branches: int = 0

    @property
    def lawful(self) -> bool:
        """Nothing is anticipated, no random number decides twice, and rows do not depend on each other."""
        return not self.anticipates and not self.reused and self.leak <= 1e-9 and not self.mates

    def __repr__(self) -> str:
        said = [f"{name} numbers decide twice with probability {p:.3g}" for name, p in self.reused.items()]
        if self.anticipates:
            said = [f"{len(self.anticipates)} nodes anticipated, first: {self.anticipates[0]}", *said]
        if self.mates:
            said.append("a row depends on its batch")
        return f"Findings({'; '.join(said) or 'lawful'}; leak {self.leak:.3g}, harm at most {self.harm:.3g}, {self.branches} branches)"


def lint(
    decoder: Decoder,
    prompt: Sequence[int] = (0,),
    max_new_tokens: int = 4,
    *,
    wrap: Callable[[Rng], Rng] = lambda rng: rng,
    batch: int = 1024,
    limit: int = 100_000,
) -> Findings:
    """Whether the lengths and shapes that ``decoder``'s draft submits are lawful.

    Four questions are put. *Swap*: with the same past and the same nodes before it, is a node submitted whatever its value and those after it?
    *Leak*: does a node have its own distribution, given that it was submitted, and given that it was dropped? *Reuse*: does a random number
    decide twice? Policies that use the confidences of earlier blocks (*lag*) are harmless without reuse only. *Mates*: is a row's text
    the same in another batch?

    Args:
        decoder: with the executor ``Serial``, whose draft draws by ``rng.categorical`` with the depth and the number of the node in the key.
        wrap: wraps the random numbers, as for ``certify``. batch: branches a run. limit: the most branches.
    Raises:
        RuntimeError: more than ``limit`` branches. ValueError: the draft draws a node more than once.
    """
    stack, texts = [Branches.root()], list[tuple[Branches, list[int]]]()
    groups, reused = _Groups(), dict[str, float]()
    while stack:
        part = take(stack, batch)
        walk, notes, ids = _run(decoder, part, prompt, max_new_tokens, wrap)
        measure = walk.branches.measure()
        for row, chance in enumerate(measure.tolist()):
            groups.add(notes.rounds[row], notes.draws[row], chance)
            for stream in notes.twice[row]:
                reused[stream] = reused.get(stream, 0.0) + chance
            if chance > 1e-9:
                texts.append((walk.branches.select(slice(row, row + 1)), ids[row]))
        stack += [scripts for _, scripts in walk.left]
        if len(texts) > limit:
            raise RuntimeError(
                f"more than {limit} branches: use fewer nodes or tokens, or a smaller vocabulary"
            )
    order = np.random.default_rng(0).permutation(len(texts))[:64]
    again = _run(decoder, Branches.join([texts[n][0] for n in order]), prompt, max_new_tokens, wrap)[2]
    return Findings(
        tuple(groups.anticipates()), *groups.leak(), reused, [texts[n][1] for n in order] != again, len(texts)
    )


class _Draw(NamedTuple):
    """A decision: its key, its answer, and, of a draft's draw, its node and its distribution."""

    code: int
    answer: int
    node: _Node | None
    probs: tuple[float, ...]


class _Block(NamedTuple):
    """A round of a row: the text before it, the decisions up to its end, and the nodes that were submitted."""

    text: tuple[int, ...]
    end: int
    submitted: frozenset[_Node]


class _Notes:
    """What was decided in every row of a run."""

    def __init__(self, rows: int):
        self.draws: list[list[_Draw]] = [[] for _ in range(rows)]
        self.rounds: list[list[_Block]] = [[] for _ in range(rows)]
        self.asked: list[set[int]] = [set() for _ in range(rows)]
        self.twice: list[set[str]] = [set() for _ in range(rows)]

    def round(self, round: Round) -> None:
        parents = round.proposal.parents
        depth, number = tree.depths(parents), tree.sibling_numbers(parents)
        for b, row in enumerate(round.context.request.tolist()):
            size = int(round.proposal.size[b])
            nodes = zip(depth[b, :size].tolist(), number[b, :size].tolist())
            self.rounds[row].append(
                _Block(tuple(round.context.row(b)), len(self.draws[row]), frozenset(nodes))
            )


def _run(
    decoder: Decoder, part: Branches, prompt: Sequence[int], tokens: int, wrap: Callable[[Rng], Rng]
) -> tuple[Walk, _Notes, list[list[int]]]:
    walk, notes, rows = Walk(part), _Notes(len(part)), np.arange(len(part))
    rng = _Meant(wrap(_Used(walk.rng(), notes, rows)), notes, rows)
    out = decoder.generate([list(prompt)] * len(part), tokens, rng=rng, on_round=notes.round)
    return walk, notes, [list(ids) for ids in out.ids]


class _Recorder(Rekeyed):
    """Passes decisions on and notes them."""

    def __init__(self, rng: Rng, notes: _Notes, rows: np.ndarray):
        super().__init__(rng)
        self.notes, self.rows = notes, rows

    def select(self, rows: Tensor) -> Any:
        return type(self)(self.rng.select(rows), self.notes, self.rows[rows.numpy()])

    def categorical(self, probs: Tensor, key: Key) -> Tensor:
        out = self.rng.categorical(probs, key)
        self.note(key, out, probs)
        return out

    def accept(self, prob: Tensor, key: Key) -> Tensor:
        out = self.rng.accept(prob, key)
        self.note(key, out, None)
        return out

    def note(self, key: Key, out: Tensor, probs: Tensor | None) -> None:
        raise NotImplementedError


class _Meant(_Recorder):
    """The decisions as the parts ask for them."""

    def note(self, key: Key, out: Tensor, probs: Tensor | None) -> None:
        code = pack(key).reshape(len(self.rows), -1)
        answers = out.long().cpu().numpy().reshape(code.shape)
        depth, sibling = (
            np.broadcast_to(np.asarray(x), pack(key).shape).reshape(code.shape) for x in key[1:3]
        )
        laws = None if probs is None else probs.double().cpu().numpy().reshape(*code.shape, -1)
        if key.stream == DRAFT and laws is not None and np.any(np.asarray(key.attempt)):
            raise ValueError(
                "lint finds a draw's node by depth and sibling, and this draft draws one node again (Attempt): give each draw a sibling number of "
                "its own"
            )
        for b, row in enumerate(self.rows.tolist()):
            for n in range(code.shape[1]):
                drawn = key.stream == DRAFT and laws is not None
                self.notes.draws[row].append(
                    _Draw(
                        int(code[b, n]),
                        int(answers[b, n]),
                        (int(depth[b, n]), int(sibling[b, n])) if drawn else None,
                        tuple(laws[b, n].tolist()) if drawn and laws is not None else (),
                    )
                )


class _Used(_Recorder):
    """The decisions as the random numbers make them: whether a number decides twice."""

    def note(self, key: Key, out: Tensor, probs: Tensor | None) -> None:
        code = pack(key).reshape(len(self.rows), -1)
        for b, row in enumerate(self.rows.tolist()):
            for one in code[b].tolist():
                if one in self.notes.asked[row]:
                    self.notes.twice[row].add(_STREAMS.get(key.stream, f"stream {key.stream}"))
                self.notes.asked[row].add(one)


class _Groups:
    """Draws of all branches, by their past."""

    def __init__(self) -> None:
        self.submitted: dict[Any, set[bool]] = defaultdict(set)
        self.values: dict[Any, dict[bool, dict[int, float]]] = defaultdict(lambda: {True: {}, False: {}})

    def add(self, rounds: list[_Block], draws: list[_Draw], chance: float) -> None:
        start = 0
        for block in rounds:
            before: tuple[Any, ...] = ()
            for n in range(start, block.end):
                draw = draws[n]
                if draw.node is None:
                    continue
                there = draw.node in block.submitted
                past = tuple((one.code, one.answer) for one in draws[:n])
                self.submitted[past, block.text, draw.node].add(there)
                law = self.values[block.text, before, draw.node, draw.probs][there]
                law[draw.answer] = law.get(draw.answer, 0.0) + chance
                before = (*before, (draw.node, draw.answer))
            start = block.end

    def anticipates(self) -> list[str]:
        found = {(text, node) for (_, text, node), there in self.submitted.items() if len(there) > 1}
        return [
            f"after {list(text)} node {node[1]} of depth {node[0]} is submitted or not, with the same past and the same nodes before it"
            for text, node in sorted(found)
        ]

    def leak(self) -> tuple[float, float]:
        most = harm = 0.0
        for (_, _, _, probs), laws in self.values.items():
            total = {there: sum(law.values()) for there, law in laws.items()}
            for there, law in laws.items():
                if total[there] > 1e-9:
                    apart = 0.5 * sum(abs(law.get(x, 0.0) / total[there] - p) for x, p in enumerate(probs))
                    most = max(most, apart)
                    harm = max(harm, apart * total[False] / sum(total.values()))
        return most, harm
