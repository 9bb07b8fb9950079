"""What rules that end chains are worth: tokens a round beside chains of one length that draft as many tokens.

    python recipes/stop_rules.py --json stop_rules.json

A rule of ``drafts.stops`` makes some chains short and others long. Each is tried at several thresholds, by exact replays on recorded texts of the target; nothing is
timed. The answer to "is it worth it?" is the ratio of two τ at equal drafted tokens a round, the rule's over that of fixed lengths, each interpolated between its
two nearest points. Intervals are bootstraps over sources of prompts, paired.

Rows: `draft, temperature, rule, least, drafted, tau` for every rule and threshold (rule `length`: a fixed one, and least is that length), and `draft, temperature, rule, at,
ratio, ratio_low, ratio_high` at each of --at drafted tokens a round that the thresholds reach.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch

import specdec as sd
from specdec import lab
from specdec.capabilities import DraftPart
from specdec.drafts.heads import Chain
from specdec.drafts.stops import Confidence, Entropy, MaxProb, PathProb, Stop
from specdec.lab.bootstrap import Clusters, interval
from specdec.lab.console import progress, short_errors, table
from specdec.lab.on_texts import OnTexts
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import entries_from, pieces

RULES: dict[str, Callable[[float], Stop]] = {
    "PathProb": PathProb,
    "Confidence": Confidence,
    "MaxProb": MaxProb,
    "Entropy": Entropy,
}


@dataclass(frozen=True)
class Settings(OnTexts):
    drafts: tuple[str, ...] = option(
        ("vanilla=pocket-vanilla", "spire=pocket-spire", "eagle3=pocket-eagle3"),
        "NAME=DRAFT, or a draft alone: those that draft chains",
        metavar="DRAFT",
    )
    temperatures: tuple[float, ...] = option((0.0, 0.6, 1.0), "of the target and the drafts")
    context: int = option(192, "tokens of each prompt")
    new_tokens: int = option(64, "positions of each text at which rounds start")
    k: int = option(8, "the longest chain")
    least: tuple[float, ...] = option(
        (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9),
        "thresholds of each rule",
        metavar="P",
    )
    greedy_least: tuple[float, ...] = option(
        (0.01, 0.05, 0.2, 0.4, 0.6, 0.8),
        "thresholds at temperature 0, each of which is a replay of its own",
        metavar="P",
    )
    at: tuple[float, ...] = option((2.0, 3.0, 4.0), "drafted tokens a round at which rules are compared")


def ended(name: str, draft: Any, stop: Stop) -> Any:
    """The draft with a rule.

    Raises:
        SystemExit: it takes none.
    """
    if isinstance(draft, sd.drafts.Head):
        return replace(draft, tree=Chain(rules=stop))
    if "stop" not in {field.name for field in fields(draft)}:
        raise SystemExit(
            f"--drafts {name}: rules end chains of models and heads, and this is a {type(draft).__name__}"
        )
    return replace(draft, stop=stop)


class Curve:
    """Drafted tokens, tokens and rounds ``[points, 3, prompts]`` of a draft at several lengths or thresholds: ``(replay, k)``."""

    def __init__(self, made: Iterable[tuple[lab.Replay, int]]):
        sums = [(replay.drafted(k), *replay.efficiency(k)[:2]) for replay, k in made]
        self.sums = np.stack([torch.stack(one).numpy() for one in sums])

    def points(self, clusters: Clusters) -> tuple[np.ndarray, np.ndarray]:
        """Drafted tokens a round and τ, ``[points, draws + 1]``: of all prompts, then of every draw."""
        drafted, tokens, rounds = (
            np.stack([np.concatenate([[one.sum()], clusters.sums(one)]) for one in of])
            for of in self.sums.swapaxes(0, 1)
        )
        return drafted / rounds, tokens / rounds


def along(points: tuple[np.ndarray, np.ndarray], at: float) -> np.ndarray:
    """``[draws + 1]`` τ at ``at`` drafted tokens a round, between the two nearest points; NaN beyond the last ones."""
    return np.array(
        [
            np.interp(at, x[order], y[order], np.nan, np.nan)
            for x, y in zip(points[0].T, points[1].T)
            for order in [x.argsort()]
        ]
    )


def compared(
    s: Settings, curves: dict[str, Curve], thresholds: dict[str, Sequence[float]], clusters: Clusters
) -> Iterator[dict[str, Any]]:
    """The rows of one draft at one temperature."""
    points = {rule: curve.points(clusters) for rule, curve in curves.items()}
    for rule, (drafted, tau) in points.items():
        for least, x, y in zip(thresholds[rule], drafted[:, 0], tau[:, 0]):
            yield {"rule": rule, "least": least, "drafted": x, "tau": y}
    for rule in RULES:
        for at in s.at:
            drawn = along(points[rule], at) / along(points["length"], at)
            if np.isfinite(drawn).all():
                low, high = interval(drawn[1:]) if clusters.enough else (None, None)
                yield {"rule": rule, "at": at, "ratio": drawn[0], "ratio_low": low, "ratio_high": high}


def main(s: Settings) -> None:
    s.begin()
    with short_errors():
        target = s.loaded()
        parts = s.parts(target)
        for name, part in parts.items():
            ended(name, part, PathProb())
        some = pieces(entries_from(s.prompts), target.tokenizer, s.context, 1)[: s.count]
    taps = sorted({tap for part in parts.values() for tap in DraftPart.of(part).info.taps})
    clusters = Clusters([entry.source or str(i) for i, entry in enumerate(some)])
    rows: list[dict[str, Any]] = []
    for temperature in s.temperatures:
        sampling = sd.Sampling(temperature=temperature)
        with tempfile.TemporaryDirectory() as folder, short_errors():
            trace = lab.record(
                target, some, folder, s.new_tokens, s.k, sampling, taps, eos_token_id=(), seed=s.seed
            )
            for name, part in parts.items():
                read_by = target if DraftPart.of(part).reads_target else None
                whole = lab.replay(trace, part, s.k, read_by)
                thresholds: dict[str, Sequence[float]] = {"length": range(1, s.k + 1)}
                curves = {"length": Curve([(whole, k) for k in thresholds["length"]])}
                for rule, make in RULES.items():
                    progress(f"{name}, {rule} at temperature {temperature:g}")
                    thresholds[rule] = s.least if temperature else s.greedy_least
                    stops = [make(least) for least in thresholds[rule]]
                    if temperature:
                        made = [whole.stopping(stop) for stop in stops]
                    else:  # a replay of point masses has no probabilities
                        made = [lab.replay(trace, ended(name, part, stop), s.k, read_by) for stop in stops]
                    curves[rule] = Curve([(replay, s.k) for replay in made])
                label = {"draft": name, "temperature": temperature}
                rows += [label | row for row in compared(s, curves, thresholds, clusters)]
    progress()
    print(
        table(
            [row for row in rows if "at" in row],
            ("draft", "temperature", "rule", "at", "ratio", "ratio_low", "ratio_high"),
        )
    )
    s.save([{"target": s.target, **row} for row in rows])


if __name__ == "__main__":
    main(parse(Settings, __doc__))
