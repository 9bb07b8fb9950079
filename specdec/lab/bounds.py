"""How far verifiers of several candidates are from the most that any verifier can accept: for any laws, and along recorded texts.

Everything is an expectation over the draws of candidates and verifiers (``verifiers.acceptance``), so only the texts are random.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.builder import DraftLike
from specdec.drafts.coerce import ModelLike
from specdec.lab import plots
from specdec.lab.console import Framed, table
from specdec.lab.replaying import prepared
from specdec.lab.traces import Trace
from specdec.rng import Key, Philox, seeds
from specdec.sampling import Sampling
from specdec.verifiers import acceptance
from specdec.verifiers.rejection import residual

RARE = 1e-8  # tokens that the draft finds less probable are taken out of q
CHUNK = 64  # positions at a time
FIGURES = ("acceptance", "optimum", "independent", "single")


@dataclass(frozen=True, eq=False)
class Optimality(Framed):
    """Acceptance beside its optimum; printed, it is a table.

    Attributes:
        rows: for each depth (``"all"``, 1, 2, ...), number of ``candidates``, way in which they are ``chosen``, and ``verifier``: the mean
            ``acceptance``; the mean ``optimum`` of all verifiers of candidates that are chosen in this way; that of as many ``independent`` ones; the
            acceptance of a ``single`` one, all over the same ``positions``. ``excess``: the most by which the acceptance at a position exceeds its
            optimum; ``share``: the least share of the optimum at a position where that is above 1e-6. ``exact``: the acceptance is no estimate.
    """

    rows: list[dict[str, Any]]

    def __repr__(self) -> str:
        return table(self.rows, ("depth", "candidates", "chosen", "verifier", *FIGURES, "positions"))

    def plot(self) -> Any:
        """A matplotlib figure: acceptance over the number of candidates."""
        return plot({"": self.rows})


def optimality(
    p: Tensor,
    q: Tensor,
    candidates: Sequence[int] = (1, 2, 4, 8),
    depth: Tensor | None = None,
    distinct: int = 1,
    draws: int = 32,
) -> Optimality:
    """Acceptance of k candidates under each verifier, beside the most that is possible.

    Candidates are drawn independently from q (``Rejection``, ``KSeq``); without replacement (``distinct``); as the k - 1 most probable tokens of q
    and one draw from the rest (``greedy set``); or as the k most probable tokens (``most probable``). In the last two, recursive rejection is
    optimal.

    Args:
        p, q: ``[..., V]`` the target's and the draft's distributions. candidates: the numbers k. depth: ``[...]`` in the block, from 0 on.
        distinct: candidates without replacement are computed at every ``distinct``-th position only, because they take most of the time (0: at none).
        draws: with which recursive rejection of more than 2 distinct candidates is estimated.
    Raises:
        ValueError: the shapes differ, a row is no distribution, or a number is too small.
    """
    for k in candidates:
        at_least(1, "candidates", k, "give numbers of candidates, at least 1")
    at_least(0, "distinct", distinct, "give at every how many positions, or 0")
    at_least(1, "draws", draws, "give at least 1")
    p, q = _distributions(p, q)
    depths = None if depth is None else depth.reshape(-1)
    every = torch.arange(len(p))
    held: dict[tuple[int, str, str], list[Tensor]] = defaultdict(list)
    for at in every.split(CHUNK):
        for name, figures in _acceptances(p[at], q[at], candidates):
            held[name].append(figures)
    some = every[::distinct] if distinct else every[:0]
    for at in some.split(CHUNK if len(some) else 1):
        for k in candidates:
            if k > 1 and len(at):
                held[k, "distinct", "recursive rejection"].append(_distinct(p[at], q[at], k, draws))
    rows = []
    for name, parts in held.items():
        figures = torch.cat(parts, 1)
        where = depths if depths is None or figures.shape[1] == len(p) else depths[some]
        label = dict(zip(("candidates", "chosen", "verifier"), name))
        label["exact"] = name[1] != "distinct" or name[0] == 2
        rows += [{"depth": d, **label, **row} for d, row in _means(figures, where)]
    return Optimality(rows)


def along(
    trace: Trace | str | Path,
    draft: DraftLike,
    k: int | None = None,
    target: ModelLike | None = None,
    sampling: Sampling | None = None,
    candidates: Sequence[int] = (1, 2, 4, 8),
    distinct: int = 0,
    batch: int = 16,
) -> Optimality:
    """``optimality`` along recorded texts: at every position, and at every depth of a block that starts there and follows the text.

    Args:
        trace, draft, k, target, sampling, batch: as for ``lab.replay``. candidates, distinct: as for ``optimality``.
    Raises:
        ValueError: as ``lab.replay``; the trace has only the largest probabilities; or the draft does not draw chains.
    """
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def watch(text: Tensor, start: Tensor, q: Tensor, follows: Tensor) -> None:
        r, d = follows.nonzero(as_tuple=True)
        if len(r):
            p = torch.stack([law(int(text[i]))[int(start[i]) + 1 + int(j)] for i, j in zip(r, d)])
            for name, value in (("p", p), ("q", q[r, d].float().cpu()), ("depth", d)):
                seen[name].append(value)

    run = prepared(trace, draft, k, target, sampling, watch)
    trace = run.trace
    if not trace.whole:
        raise ValueError(
            f"the trace in {trace.folder} has the {trace.meta['kept']} largest probabilities, and the optimum depends on all: record with keep="
            f"{trace.vocab_size}"
        )
    law = cache(lambda text: trace.law(text).probs)
    run.check(run.texts[:2])
    seen.clear()
    for at in range(0, len(run.texts), batch):
        run(run.texts[at : at + batch])
    if not seen:
        raise ValueError(
            f"draft {run.part.info.name!r} does not draw chains from distributions: give one that does"
        )
    p, q, depth = (torch.cat(seen[name]) for name in ("p", "q", "depth"))
    return optimality(p, q, candidates, depth, distinct)


def violations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What contradicts the theory: acceptance above its optimum at a position (in the mean, where it is estimated), or k-SEQ below 1 - (1 - 1/k)^k of it."""
    found = []
    for row in rows:
        name = f"{row['verifier']} of {row['candidates']} {row['chosen']} candidates, depth {row['depth']}"
        k, over = row["candidates"], row["excess"] if row["exact"] else row["acceptance"] - row["optimum"]
        if over > 1e-9:
            found.append(f"{name}: {over:.2e} above its optimum")
        if row["verifier"] == "k-SEQ" and row["share"] < 1 - (1 - 1 / k) ** k - 1e-6:
            found.append(f"{name}: {row['share']:.4f} of its optimum, less than is guaranteed")
    return found


def plot(panels: Mapping[str, Sequence[Mapping[str, Any]]], depth: Any = "all") -> Any:
    """A matplotlib figure: acceptance over the number of candidates, a panel for each entry of rows by title.

    The acceptance of distinct candidates, which were computed at some positions only, is moved by the difference between these positions and all in
    the optimum of independent ones.
    """
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    size = (1 + max(2, columns) * 3, 1.2 + 3 * lines)
    figure, grid = plots.panels(lines, columns, size, bare=True, sharey=True)
    axes = list(grid.flat)
    for spare in axes[len(panels) :]:
        spare.remove()
    styles = {
        ("independent", "k-SEQ"): ("#1f77b4", "-"), ("independent", "recursive rejection"): ("#ff7f0e", "-"),
        ("distinct", "recursive rejection"): ("#2ca02c", "-"), ("greedy set", "recursive rejection"): ("#9467bd", "-"),
        ("most probable", "recursive rejection"): ("#8c564b", "-"),
    }  # fmt: skip
    for place, (title, every) in zip(axes, panels.items()):
        rows = [row for row in every if row["depth"] == depth]
        best = {row["candidates"]: row["optimum"] for row in rows if row["chosen"] == "independent"}
        for (chosen, verifier), (color, line) in styles.items():
            own = sorted(
                (k, row["acceptance"] + best.get(k, row["independent"]) - row["independent"])
                for row in rows
                for k in [row["candidates"]]
                if (row["chosen"], row["verifier"]) == (chosen, verifier)
            )
            if own:
                place.plot(*zip(*own), line, color=color, marker="o", ms=3, label=f"{chosen}, {verifier}")
        if best:
            place.plot(*zip(*sorted(best.items())), "--", color="black", lw=1, label="independent, optimum")
            place.axhline(rows[0]["single"], color="grey", lw=0.8, ls=":", label="one candidate")
        ticks = sorted({row["candidates"] for row in rows})
        place.set_xscale("log", base=2)
        place.set_xticks(ticks, map(str, ticks))
        place.set_title(title, loc="left")
        place.set_xlabel("candidates")
    for first in grid[:, 0]:
        first.set_ylabel("acceptance")
    figure.tight_layout(rect=(0, 0.8 / size[1], 1, 1))
    figure.legend(
        *axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="lower center", ncols=2
    )
    return figure


def _distributions(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """``[R, V]`` float64, normalised; tokens that the draft hardly ever draws are taken out of q."""
    if p.shape != q.shape or p.dim() < 1:
        raise ValueError(
            f"p is {list(p.shape)} and q {list(q.shape)}: give distributions over the same tokens, [..., V]"
        )
    p, q = (t.reshape(-1, t.shape[-1]).double() for t in (p, q))
    if not len(p):
        raise ValueError("p and q are empty: give at least one distribution of each")
    for name, t in (("p", p), ("q", q)):
        if bool((t < 0).any()) or not bool(((t.sum(-1) - 1).abs() < 1e-3).all()):
            raise ValueError(f"{name} has a row that is no distribution: give probabilities that sum to 1")
    q = torch.where(q < RARE, 0, q)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def _acceptances(
    p: Tensor, q: Tensor, candidates: Sequence[int]
) -> Iterator[tuple[tuple[int, str, str], Tensor]]:
    """Name -> acceptance, optimum, the optimum of independent candidates, and a single one's acceptance, ``[4, R]``."""
    single = acceptance.single(p, q)
    for k in candidates:
        best, top = acceptance.optimum(p, q, k), acceptance.top_points(p, q, k)
        greedy = acceptance.greedy_set(p, q, k)
        for chosen, verifier, accepted, optimum in (
            ("independent", "recursive rejection", acceptance.recursive(p, q, k), best),
            ("independent", "k-SEQ", acceptance.kseq(p, q, k), best),
            ("greedy set", "recursive rejection", greedy, greedy),
            ("most probable", "recursive rejection", top, top),
        ):
            yield (k, chosen, verifier), torch.stack([accepted, optimum, best, single])


def _distinct(p: Tensor, q: Tensor, k: int, draws: int) -> Tensor:
    """As ``_acceptances``, for candidates that are drawn without replacement."""
    bounds = [acceptance.optimum(p, q, k), acceptance.single(p, q)]
    order = q.topk(int((q > 0).sum(-1).max()), -1).indices
    p, q = p.gather(-1, order), torch.nn.functional.pad(q.gather(-1, order), (0, 1))
    p = torch.cat([p, (1 - p.sum(-1, keepdim=True)).clamp(min=0)], -1)  # what is never drawn, as one token
    best = acceptance.optimum(p, q, k, replacement=False)
    if k == 2:
        return torch.stack([acceptance.recursive(p, q, 2, replacement=False), best, *bounds])
    R = len(p)
    rng, at = Philox(seeds(0, R)), torch.zeros(R, dtype=torch.long)
    total = torch.zeros(R, dtype=torch.float64)
    for draw in range(draws):  # given the candidates, the probability that one is accepted is known
        left, rest, none = p, q, torch.ones(R, dtype=torch.float64)
        for j in range(k):
            more = rest.sum(-1) > 0
            here = torch.where(more[:, None], rest / rest.sum(-1, keepdim=True), 0)
            token = rng.categorical(torch.where(more[:, None], here, 1 / here.shape[-1]), Key(at, draw, j))
            ratio = left.gather(1, token[:, None]) / here.gather(1, token[:, None])
            none = none * (1 - torch.where(more, ratio[:, 0], 0).clamp(max=1))
            left = torch.where(more[:, None], residual(left, here), left)
            rest = rest.scatter(1, token[:, None], 0)
        total += 1 - none
    return torch.stack([total / draws, best, *bounds])


def _means(figures: Tensor, depth: Tensor | None) -> list[tuple[Any, dict[str, Any]]]:
    """By depth, and for all, the means of ``figures [4, R]``, the largest excess over the optimum and the least share of it."""
    made = []
    for d in ["all", *([] if depth is None else depth.unique().tolist())]:
        some = figures if d == "all" else figures[:, depth == d]
        accepted, optimum = some[0], some[1]
        share = torch.where(optimum > 1e-6, accepted / optimum, 1)
        row = dict(zip(FIGURES, some.mean(1).tolist()))
        row |= {
            "excess": float((accepted - optimum).max()),
            "share": float(share.min()),
            "positions": some.shape[1],
        }
        made.append((d if d == "all" else d + 1, row))
    return made
