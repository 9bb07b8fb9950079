"""Multipliers without the luck of acceptance: noise-free τ times measured round times, with intervals over packages and repeats.

A short run's tokens a round differ by a quarter from prompt to prompt, and a multiplier of tokens a second inherits that. Times of rounds
need few prompts; τ needs many texts and no decoding at all (``lab.tau``: expected rounds on texts of the target). Their product is the
multiplier of all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec.audit.tau import Efficiency
from specdec.data.prompts import entries
from specdec.lab.bootstrap import DRAWS, LEAST, Clusters, ends
from specdec.lab.clock import middle
from specdec.lab.steady import Measured
from specdec.lab.tau import Texts, each_k, sample


@dataclass(frozen=True)
class Taus:
    """Tokens a round of every method, context and k, on texts of the target.

    Attributes:
        scores: by method, context and k: expected tokens and rounds of each text. packages: by context: ``[C]``, the package of each
            text. Texts of one package are one cluster of the bootstrap.
    """

    scores: Mapping[tuple[str, int, int], Efficiency]
    packages: Mapping[int, np.ndarray]

    def tau(self, method: str, context: int, k: int) -> float:
        """Tokens a round over all texts; 1 for plain decoding (k = 0)."""
        return self.scores[method, context, k].tau if k else 1.0

    def drawn(self, method: str, context: int, k: int) -> np.ndarray | None:
        """``[DRAWS]``: τ over packages drawn with replacement, the same ones for every method and k; ``None`` for too few packages."""
        clusters = Clusters(self.packages[context])
        if not clusters.enough:
            return None
        if not k:
            return np.ones(DRAWS)
        made = self.scores[method, context, k]
        return clusters.ratios(made.tokens.numpy(), made.rounds.numpy())

    def rows(self, about: str) -> list[dict[str, Any]]:
        """Rows for a report, summed by package, which is all that τ and its intervals need. ``about`` names models and texts."""
        packages = {context: Clusters(names) for context, names in self.packages.items()}
        out: list[dict[str, Any]] = [
            {"part": "texts", "about": about, "context": context, "packages": clusters.names.tolist()}
            for context, clusters in packages.items()
        ]
        for (method, context, k), made in self.scores.items():
            sums = {
                f"expected_{name}": packages[context].by_cluster(values.numpy()).tolist()
                for name, values in (("tokens", made.tokens), ("rounds", made.rounds))
            }
            out.append({"part": "score", "method": method, "context": context, "k": k, **sums})
        return out

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]], about: str) -> Taus:
        """The same from ``rows``, with one text a package.

        Raises:
            ValueError: the rows are about other models or texts.
        """
        texts = [row for row in rows if row["part"] == "texts"]
        if {row["about"] for row in texts} != {about}:
            raise ValueError("the rows are of other models, contexts, lengths or texts: record them again")
        none, scores = torch.zeros(0), {}
        for row in rows:
            if row["part"] == "score":
                tokens, rounds = (
                    torch.tensor(row[f"expected_{name}"], dtype=torch.float64)
                    for name in ("tokens", "rounds")
                )
                scores[row["method"], row["context"], row["k"]] = Efficiency(tokens, rounds, none, none)
        return Taus(scores, {row["context"]: np.array(row["packages"]) for row in texts})


@dataclass(frozen=True)
class Recording:
    """How texts are recorded.

    Attributes:
        positions: of each text at which rounds start. per_prompt: the most contexts cut from one prompt. prompts: ``None``: all.
    """

    positions: int = 64
    per_prompt: int = 1
    prompts: int | None = None
    seed: int = 0

    def taus(
        self,
        methods: Any,
        contexts: Sequence[int],
        lengths: Sequence[int],
        tell: Callable[[str], None] = lambda line: None,
    ) -> Taus:
        """Sample texts after prompts of each length, and score every method of ``methods`` (a ``lab.methods.Methods``) on them."""
        scores: dict[tuple[str, int, int], Efficiency] = {}
        packages: dict[int, np.ndarray] = {}
        target, tokenizer = methods.target.model, methods.target.tokenizer
        layers = range(target.config.num_hidden_layers)
        for context in contexts:
            tell(f"noise-free tau after {context} tokens")
            texts = sample(
                target, tokenizer, context, self.positions, max(lengths), layers, self.seed, self.per_prompt, self.prompts
            )  # fmt: skip
            packages[context] = packages_of(texts, self.prompts)
            for at_k, found in each_k(methods.evaluated, texts, lengths):
                scores |= {(method, context, at_k.k): made for method, made in found.items()}
        return Taus(scores, packages)


def packages_of(texts: Texts, prompts: int | None = None) -> np.ndarray:
    """``[C]``: the package that each text's source file is from; ``prompts`` as for ``lab.tau.sample``."""
    files = dict.fromkeys((entry["package"], entry["path"]) for entry in entries()[:prompts])
    return np.array([package for package, _ in files])[texts.prompt]


def round_seconds(case: Measured) -> np.ndarray:
    """``[DRAWS]``: seconds of a round (``clock.middle``), over visits drawn with replacement, and then repeats of each, the same for every method of a point."""
    runs = sorted(case.runs, key=lambda run: run.visit)
    seconds = np.array([run.round_seconds for run in runs])
    _, first, count = np.unique([run.visit for run in runs], return_index=True, return_counts=True)
    draw = np.random.default_rng(1)
    visit = draw.integers(0, len(first), (DRAWS, len(first), 1))
    place = draw.random((DRAWS, len(first), count.max())) * count[visit]
    return np.asarray(middle(seconds[first[visit] + place.astype(np.int64)].reshape(DRAWS, -1)))


def speed(case: Measured, context: int, taus: Taus | None) -> float:
    """Tokens a second of a row: τ over a round's seconds."""
    tau = case.tau if taus is None else taus.tau(case.method, context, case.k)
    return tau / case.round_seconds


def ratio(
    case: Measured, other: Measured, context: int, taus: Taus
) -> tuple[float, float | None, float | None]:
    """The speed of one method over another's at a grid point, with a paired interval; ``None`` for too few packages or repeats."""
    drawn = [taus.drawn(one.method, context, one.k) for one in (case, other)]
    draws = None
    if min(len(case.runs), len(other.runs)) >= LEAST and drawn[0] is not None and drawn[1] is not None:
        draws = drawn[0] / drawn[1] * round_seconds(other) / round_seconds(case)
    return (speed(case, context, taus) / speed(other, context, taus), *ends(draws))
