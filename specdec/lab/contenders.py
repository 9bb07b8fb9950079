"""Drafts that are compared with each other: loaded by name, with their sizes, and the ways in which each can draft."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec import drafts
from specdec.capabilities import DraftInfo
from specdec.cost.arms import weights
from specdec.drafts.heads import DDTree, DynamicTree, HeadModel, StaticTree
from specdec.lab import recording, replaying
from specdec.lab.loading import draft_folder, draft_part
from specdec.lab.prompt_file import Entry
from specdec.lab.replays import Replay
from specdec.lab.traces import Trace
from specdec.masks import streaming
from specdec.models.hf import HFModel
from specdec.sampling import Sampling
from specdec.types import Context

TOP_K = 4  # children of a node of a dynamic tree; its nodes are few
DEEP = 5  # levels of a tree


class Way(NamedTuple):
    """One way to draft.

    Attributes:
        method: the contender's name. drafting: such as "chain" or "DDTree of 8". draft: the part. longest: the longest path that it is asked for.
    """

    method: str
    drafting: str
    draft: Any
    longest: int

    @property
    def label(self) -> str:
        """A name of its own."""
        return f"{self.method}, {self.drafting}"

    @property
    def nodes(self) -> int:
        """The most nodes of a proposal."""
        return DraftInfo.of(self.draft).nodes(self.longest)


@dataclass(frozen=True)
class Contender:
    """A draft in a comparison.

    Attributes:
        name: in tables. draft: the part. parameters: its own; a head's are without the target's embedding and output matrix, which it uses.
            tokens_trained: by its model card; ``None``: the card does not say. longest: the longest chain that it is asked for.
    """

    name: str
    draft: Any
    parameters: int
    tokens_trained: float | None
    longest: int

    @property
    def head(self) -> HeadModel | None:
        """Its head, if it is one."""
        return self.draft.model if isinstance(self.draft, drafts.Head) else None

    @property
    def about(self) -> dict[str, Any]:
        """A report's row about this draft."""
        sizes = {"parameters": self.parameters, "tokens_trained": self.tokens_trained}
        return {"part": "draft", "method": self.name, **sizes}

    @property
    def chain(self) -> Way:
        """Drafting a chain."""
        return Way(self.name, "chain", self.draft, self.longest)

    def trees(self, totals: Sequence[int], accuracies: Sequence[Sequence[float]] | None = None) -> list[Way]:
        """Drafting trees of so many nodes: DDTree and Medusa's static tree if the head's distributions are marginal, otherwise EAGLE-2's tree; DDTree of a
        parallel draft. There are none for other drafts, and for heads that do not draft trees.

        Args:
            accuracies: of the ranks, for static trees (``ranks.accuracies``); ``None``: none of these.
        """
        if isinstance(self.draft, drafts.Parallel):
            deep = min(DEEP, self.longest)
            return [
                Way(self.name, f"DDTree of {total}", replace(self.draft, tree=DDTree(total)), deep)
                for total in totals
            ]
        if self.head is None:
            return []
        deep = min(DEEP, self.longest)
        kinds: list[tuple[str, Any]] = []
        for total in totals:
            if not self.head.marginal:
                grower = DynamicTree(top_k=min(TOP_K, total), depth=deep, total=total)
                kinds.append((f"EAGLE-2 tree of {total}", grower))
                continue
            kinds.append((f"DDTree of {total}", DDTree(total)))
            if accuracies is not None:
                kinds.append((f"static tree of {total}", StaticTree.of_accuracies(accuracies[:deep], total)))
        try:
            ways = [(name, drafts.Head(self.head, grower)) for name, grower in kinds]
        except ValueError:  # the head refuses trees
            return []
        return [Way(self.name, name, way, min(deep, DraftInfo.of(way).longest or deep)) for name, way in ways]

    def windowed(self, window: int, sinks: int) -> Way | None:
        """Drafting a chain while it sees ``sinks`` first positions and the latest ``window`` only; ``None`` unless it is a head that sees all."""
        if self.head is None or self.head.mask is not None or not self.head.kv_layers:
            return None
        masked = drafts.Head(self.head.masked(streaming(window, sinks)))
        return Way(self.name, f"window of {window}", masked, self.longest)


def contenders(
    specs: Sequence[str], target: HFModel, longest: int = 8, dtype: torch.dtype | None = None
) -> tuple[list[Contender], dict[str, str]]:
    """The drafts that are there, in order, and why others are not, by name.

    Args:
        specs: ``NAME`` or ``NAME=DRAFT``, where ``DRAFT`` is a pocket model, a folder, a hub id or ``mtp``. longest: the longest chain to ask for; a
            draft that proposes at most fewer is asked for those. dtype: as for ``loading.load``.
    """
    found, missing = [], {}
    for spec in specs:
        name, equals, said = spec.partition("=")
        said = said if equals else name
        folder = draft_folder(said)
        if not folder.is_dir() and "/" not in said and said != "mtp":
            missing[name] = f"there is no folder {said}"
            continue
        try:
            part = draft_part(spec, target, 64, 1, dtype)[1]
        except (ValueError, FileNotFoundError, ConnectionError) as error:
            missing[name] = str(error)
            continue
        info = DraftInfo.of(part)
        size = weights(info.model)
        most = longest if info.longest is None else min(longest, info.longest)
        found.append(Contender(name, part, size, tokens_trained(folder), most))
    return found, missing


def record(
    target: HFModel,
    ways: Sequence[Way],
    entries: Sequence[Entry],
    folder: str | Path,
    sampling: Sampling,
    new_tokens: int = 48,
    k: int = 8,
    seed: int = 0,
) -> Trace:
    """Texts of the target with the activations that the ways read, as ``lab.record``; no token ends a text."""
    taps = sorted({tap for way in ways for tap in DraftInfo.of(way.draft).taps})
    return recording.record(
        target, entries, folder, new_tokens, k, sampling, taps, eos_token_id=(), seed=seed, progress=False
    )


def replay(
    trace: Trace, ways: Sequence[Way], target: HFModel, checked: set[str] | None = None, batch: int = 48
) -> dict[str, Replay]:
    """Every way along a trace, by its label; the target is not computed again.

    Args:
        checked: labels of ways that were found to depend on the text alone, which is not checked again; those of these ways are added.
        trace, batch: as for ``lab.replay``.
    """
    made, known = {}, set() if checked is None else checked
    for way in ways:
        read = target if DraftInfo.of(way.draft).taps else None
        how: dict[str, Any] = {
            "name": way.label,
            "batch": batch,
            "check": way.label not in known,
            "cache": False,
        }
        made[way.label] = replaying.replay(trace, way.draft, way.longest, read, **how)
        known.add(way.label)
    return made


def kept(way: Way, tokens: int) -> int:
    """For how many positions of a text of so many tokens a head keeps keys and values in each layer, those of a block aside."""
    ring = way.draft.init(Context.of([[0]], capacity=tokens), None).ring
    return 0 if ring is None else int(ring.slots)


def by_package(entries: Sequence[Entry]) -> list[Entry]:
    """Prompts of the pocket corpus whose source is the package instead of the file."""
    return [replace(entry, source=entry.source.partition("/")[0]) for entry in entries]


def tokens_trained(folder: Path) -> float | None:
    """The training tokens that a model card names: the first ``... M tokens`` after ``**Training.**``; ``None`` if there are none."""
    card = folder / "README.md"
    if not card.exists():
        return None
    said = card.read_text(encoding="utf-8").partition("**Training.**")[2]
    number = re.search(r"([\d.]+) M tokens", said)
    return float(number[1]) * 1e6 if number else None
