"""Tokens a round of block verification and of traversal beside rejection's, on the same texts and on the same trees.

    python recipes/verifier_rounds.py --json verifier_rounds.json

Texts of the target are recorded after development prompts. Chains are replayed on them, so that tokens a round are exact for given texts, under
``Rejection`` and ``BlockVerification``. Trees are decoded live under ``Rejection``, and each round's tree is verified --draws times by each verifier
with fresh random numbers, so that the verifiers see the same trees and distributions. Intervals are bootstraps over sources of prompts, paired. Nothing is
timed (`recipes/verifiers.py` times whole decoders).

Rows: `part, target, draft, temperature, category, k, verifier, tau, tau_low, tau_high, ratio, ratio_low, ratio_high, texts, sources`, where part is `chains` or
`trees`, and ratios are to ``Rejection``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch

import specdec as sd
from specdec import lab
from specdec.capabilities import DraftPart
from specdec.drafts.siblings import Distinct, Independent, TopAndOne
from specdec.lab.bootstrap import DRAWS, Clusters, figures
from specdec.lab.console import progress, short_errors, table
from specdec.lab.on_texts import OnDevelopment
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import Entry
from specdec.lab.verifying import accepted_by
from specdec.protocols import Verifier


@dataclass(frozen=True)
class Settings(OnDevelopment):
    drafts: tuple[str, ...] = option(
        ("vanilla=pocket-vanilla", "tiny=pocket-tiny", "spire=pocket-spire", "ngram"),
        "NAME=DRAFT, or a draft alone",
        metavar="DRAFT",
    )
    trees: tuple[str, ...] = option(
        ("2x2", "3x2x1", "4x2x1x1", "2x2:distinct", "3x2x1:distinct"),
        "children by depth, of trees of the first draft; distinct: drawn without replacement; greedy: the most probable ones and a draw",
    )
    new_tokens: int = option(32, "positions of each text at which blocks start, or tokens decoded")
    k: tuple[int, ...] = option((4, 8), "block lengths of chains", metavar="N")
    draws: int = option(4, "verifications of each tree")


TREES: dict[str, Verifier] = {"rejection": sd.Rejection(), "traversal": sd.verifiers.Traversal()}
INDEPENDENT: dict[str, Verifier] = {
    **TREES,
    "k-SEQ": sd.verifiers.KSeq(),
    "optimal transport": sd.verifiers.OptimalTransport(),
}


def by_category(
    sums: dict[str, np.ndarray], some: list[Entry], draws: int = DRAWS
) -> Iterator[dict[str, Any]]:
    """Tokens a round by verifier and category, from tokens and rounds ``[2, prompts]``, and ratios to the first verifier's."""
    categories = np.array([entry.category for entry in some])
    sources = np.array([entry.source or str(i) for i, entry in enumerate(some)])
    for category in ["all", *sorted(set(categories))]:
        at = (categories == category) | (category == "all")
        clusters = Clusters(sources[at], draws)
        first = next(iter(sums.values()))[:, at]
        for verifier, mine in sums.items():
            row = figures(mine[:, at], first, clusters, least=1)
            yield {"category": category, "verifier": verifier, **row}


KINDS: dict[str, Any] = {"": Independent(), "distinct": Distinct(), "greedy": TopAndOne()}


def tree(model: Any, shape: str) -> sd.drafts.Tree:
    """A draft by its shape, such as 3x2x1 or 3x2x1:distinct."""
    widths, _, kind = shape.partition(":")
    return sd.drafts.Tree(model, tuple(map(int, widths.split("x"))), siblings=KINDS[kind])


def rules(shape: str) -> dict[str, Verifier]:
    """The verifiers that take the trees of a shape."""
    return TREES if ":" in shape else INDEPENDENT


def chains(
    s: Settings, target: sd.HFModel, parts: dict[str, Any], some: list[Entry]
) -> Iterator[dict[str, Any]]:
    """Replayed chains."""
    taps = sorted({tap for part in parts.values() for tap in DraftPart.of(part).info.taps})
    for temperature in s.temperatures:
        sampling = sd.Sampling(temperature=temperature)
        with tempfile.TemporaryDirectory() as folder, short_errors():
            trace = lab.record(
                target, some, folder, s.new_tokens, max(s.k), sampling, taps, eos_token_id=(), seed=s.seed
            )
            for name, part in parts.items():
                progress(f"{name} at temperature {temperature:g}")
                read_by = target if DraftPart.of(part).reads_target else None
                replay = lab.replay(trace, part, max(s.k), read_by)
                for k in s.k:
                    made = {
                        "rejection": replay.efficiency(k, "rejection"),
                        "block": replay.efficiency(k, "block"),
                    }
                    sums = {v: torch.stack([e.tokens, e.rounds]).numpy() for v, e in made.items()}
                    label = {"part": "chains", "draft": name, "temperature": temperature, "k": str(k)}
                    yield from (label | row for row in by_category(sums, some))


def trees(s: Settings, target: sd.HFModel, model: Any, some: list[Entry]) -> Iterator[dict[str, Any]]:
    """Live trees, each verified by all verifiers."""
    prompts = [list(entry.given) for entry in some]
    for temperature in s.temperatures:
        for shape in s.trees:
            progress(f"tree {shape} at temperature {temperature:g}")
            base = sd.decoder(target).sampling(temperature=temperature)
            decoder = base.draft(tree(model, shape)).build()
            sums = accepted_by(decoder, prompts, rules(shape), s.new_tokens, s.draws, seed=s.seed)
            label = {"part": "trees", "draft": "tree", "temperature": temperature, "k": shape}
            yield from (label | row for row in by_category(sums, some))


def main(s: Settings) -> None:
    s.begin()
    with short_errors():
        target = s.loaded()
        some, parts = s.pieces(target), s.parts(target)
    model = next(iter(parts.values())).model
    rows = [*chains(s, target, parts, some), *trees(s, target, model, some)]
    shown = (
        *("part", "draft", "temperature", "k", "category"),
        *("verifier", "tau", "ratio", "ratio_low", "ratio_high"),
    )
    progress()
    print(table([row for row in rows if row["category"] == "all"], shown))
    for part, verifier in (("chains", "block"), ("trees", "traversal")):
        ratios = [row["ratio"] for row in rows if (row["part"], row["verifier"]) == (part, verifier)]
        if ratios:
            print(
                f"{part}: {verifier} over rejection, {min(ratios):.4f} to {max(ratios):.4f} over {len(ratios)} sets of texts"
            )
    s.save([{"target": s.target, **row} for row in rows])


if __name__ == "__main__":
    main(parse(Settings, __doc__))
