"""Drafts compared on your prompts: tokens a round by category, paired ratios, intervals; recorded once, replayed exactly.

    python recipes/compare.py --prompts prompts.jsonl --json compare.json
    python recipes/compare.py --drafts vanilla=pocket-vanilla ngram mine=path/to/draft --k 2,4,8

The target's texts after the prompts are recorded in --trace (a later run continues it, and a finished one is read), and every draft is
replayed on them (docs/lab.md), so a new draft costs seconds (`prompts_per_minute`: of the replay, or of reading an earlier one's result). --prompts is a JSON-lines file with a "prompt", a list of "turns" or a chat's "messages" a line, and an
optional "category" and "source" (prompts of one source are one cluster of the bootstrap); default: the held-out prompts of the pocket corpus. A
draft is a pocket model, a folder, a hub id, or one of ngram, suffix, magicdec, mtp (the MTP layer of the target's own checkpoint), windowed:DRAFT and fp8:DRAFT (keys and values of eight bits). One with another
tokenizer than the target's proposes tokens that both have (drafts.Translated), or, as text:DRAFT, its text in the target's tokens (drafts.TextMatch).
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import checkout  # noqa: F401

import specdec as sd
from specdec import lab
from specdec.capabilities import DraftPart
from specdec.lab.console import short_errors
from specdec.lab.on_texts import OnTexts
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import prompt_entries
from specdec.lab.recipe import Plotted


@dataclass(frozen=True)
class Settings(Plotted, OnTexts):
    drafts: tuple[str, ...] = option(
        ("vanilla=pocket-vanilla", "spire=pocket-spire", "magicdec", "ngram"),
        "NAME=DRAFT, or a draft alone; ratios are to the first",
        metavar="DRAFT",
    )
    context: int = option(960, "longer plain prompts are cut to this many tokens at their end (0: never)")
    trace: str = option("runs/trace", "folder of the recorded texts")
    k: tuple[int, ...] = option((4,), "block lengths", metavar="N")
    new_tokens: int = option(64, "positions of each text at which rounds start")
    temperature: float = option(1.0, "of the target and the drafts")


def main(s: Settings) -> None:
    s.begin()
    sampling = sd.Sampling(temperature=s.temperature)
    with short_errors():
        target = s.loaded()
        parts = s.parts(target)
        entries = prompt_entries(s.prompts, target.tokenizer, s.context)[: s.count]
        trace = lab.record(target, entries, s.trace, s.new_tokens, max(s.k), sampling, seed=s.seed)
    print(trace)
    replays, pace = {}, dict[str, float]()
    for name, part in parts.items():
        began = perf_counter()
        read = target if DraftPart.of(part).reads_target else None  # otherwise it is not computed again
        with short_errors():
            replays[name] = lab.replay(trace, part, max(s.k), read, name=name)
        pace[name] = 60 * len(trace) / (perf_counter() - began)
        print(f"{name}: replayed or read, {pace[name]:.0f} prompts a minute")
    with short_errors():
        found = lab.compare(replays, s.k)
    print(f"\n{found}")
    s.save(row | {"prompts_per_minute": pace[row["method"]]} for row in found.rows)
    s.draw({"compare": found.plot})


if __name__ == "__main__":
    main(parse(Settings, __doc__))
