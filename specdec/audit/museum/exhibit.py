"""What the museum shows: a mistake that was read in somebody's code, the smallest case of it, and its repair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.audit.certify import Certificate
from specdec.audit.external import certify_function
from specdec.audit.plain import enumerate_plain, total_variation
from specdec.models import TableModel
from specdec.sampling import Sampling

Rule = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Exhibit:
    """A case with its total variation.

    Attributes:
        name: number and case. source: repository and issue, or file. real_code: the code of ``source`` runs as installed; otherwise a model
            of it, written from what was read. expected: the total variation that was found before, by other
            code; ``None``: there is none.
        broken, fixed: certify the case and its repair (``None``: nothing is to be repaired).
    """

    name: str
    source: str
    expected: float | None
    broken: Callable[[], Certificate]
    fixed: Callable[[], Certificate] | None = None
    real_code: bool = False

    def stands(self, found: Certificate, repaired: Certificate | None) -> bool:
        """Whether the total variation is within 1e-3 of the expected one, and seen (1e-4) where there is to be one.

        What is to be exact is so to 1e-9, and to 1e-6 in code that rounds to float32.
        """
        rounds = "float32" in self.name
        if self.expected == 0:
            near = found.total_variation <= (1e-6 if rounds else 1e-9)
        else:
            wanted = found.total_variation if self.expected is None else self.expected
            near = found.total_variation >= 1e-4 and abs(found.total_variation - wanted) <= 1e-3
        exact = repaired is None or repaired.lossless or (rounds and repaired.total_variation <= 1e-6)
        return near and exact


def law(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64)


class Pair:
    """A target and a draft as tables."""

    def __init__(self, p: Any, q: Any):
        self.target, self.draft = TableModel(p), TableModel(q)

    def p(self, text: list[int]) -> Tensor:
        return after(self.target, text)

    def q(self, text: list[int]) -> Tensor:
        return after(self.draft, text)


def after(model: TableModel, text: list[int]) -> Tensor:
    """``[V]`` the next token's distribution, of tables of order 0 and 1."""
    return model.probs[text[-1]] if model.order else model.probs


T2 = Pair([0.7, 0.3], [0.5, 0.5])
T3 = Pair([0.45, 0.45, 0.1], [0.2, 0.3, 0.5])
T4 = Pair([0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.3, 0.2])
T6 = Pair([0.6, 0.3, 0.1], [0.2, 0.3, 0.5])
M2 = Pair([[0.6, 0.4], [0.1, 0.9]], [[0.5, 0.5], [0.5, 0.5]])


def one_round(pair: Pair, rule: Rule, k: int) -> Certificate:
    """One round of a chain of k drawn tokens after the token 0, extended by the target to k + 1 tokens."""

    def run(prompt: list[int], budget: int) -> list[int]:
        text, q, p = list(prompt), [], [pair.p(prompt)]
        for _ in range(k):
            q.append(pair.q(text))
            text.append(int(torch.multinomial(q[-1], 1)))
            p.append(pair.p(text))
        text = prompt + [
            int(x) for x in rule(torch.tensor(text[len(prompt) :]), torch.stack(q), torch.stack(p))
        ]
        while len(text) < len(prompt) + budget:
            text.append(int(torch.multinomial(pair.p(text), 1)))
        return text[len(prompt) :]

    return of(run, pair.target, k + 1)


def of(run: Callable[[list[int], int], Any], target: TableModel, tokens: int) -> Certificate:
    """Certifies a whole ``generate`` after the token 0."""
    return certify_function(run, enumerate_plain(target, Sampling(), [0], tokens))


def given_first(found: Certificate, token: int) -> Certificate:
    """The same certificate, given that the first new token is ``token``."""

    def given(texts: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        these = {text: mass for text, mass in texts.items() if text[0] == token}
        return {text: mass / sum(these.values()) for text, mass in these.items()}

    distribution, target = given(found.distribution[0]), given(found.target[0])
    return Certificate(
        total_variation(distribution, target),
        found.mass,
        found.branches,
        found.seconds,
        (distribution,),
        (target,),
    )
