"""What recipes share that replay drafts on recorded texts of a target: its settings, the drafts, and the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.drafts.coerce import as_model
from specdec.lab.loading import draft_part, load
from specdec.lab.options import option
from specdec.lab.prompt_file import Entry, pieces, read, shipped
from specdec.lab.recipe import Replayed


@dataclass(frozen=True)
class OnTexts(Replayed):
    """The base of the settings of recipes that replay drafts on recorded texts of a target."""

    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    drafts: tuple[str, ...] = option((), "NAME=DRAFT, or a draft alone", metavar="DRAFT")
    prompts: str | None = option(
        None, "JSON-lines file of prompts (default: the held-out ones)", metavar="FILE"
    )
    count: int | None = option(None, "use the first prompts only", metavar="N")
    window: int = option(64, "window of magicdec and windowed drafts")
    sinks: int = option(1, "first tokens that they keep")

    def loaded(self) -> Any:
        """The target, an ``HFModel`` or an ``OwnCache``."""
        return as_model(load(self.target, self.precision, self.place), "target")

    def parts(self, target: Any, drafts: Sequence[str] | None = None) -> dict[str, Any]:
        """The drafts by name (default: of ``drafts``), as ``loading.draft_part`` makes them."""
        some = self.drafts if drafts is None else drafts
        return dict(draft_part(spec, target, self.window, self.sinks, self.precision) for spec in some)


@dataclass(frozen=True)
class OnDevelopment(OnTexts):
    """The base of the settings of those whose prompts are, by default, of the validation packages."""

    prompts: str | None = option(
        None, "JSON-lines file of prompts (default: the development ones)", metavar="FILE"
    )
    count: int | None = option(48, "use the first prompts only", metavar="N")
    context: int = option(192, "tokens of each prompt")
    temperatures: tuple[float, ...] = option((0.6, 1.0), "of the target and the drafts")

    def pieces(self, target: Any) -> list[Entry]:
        """The prompts, each cut to ``context`` tokens.

        Raises:
            ValueError: as ``prompt_file.read`` and ``prompt_file.pieces``.
        """
        entries = read(self.prompts) if self.prompts else shipped(split="validation")
        return pieces(entries, target.tokenizer, self.context, 1)[: self.count]
