"""Which decoder, for your target, at your batch, on your machine, and is it faster than plain? One command.

    python recipes/decide.py --target FOLDER_OR_HUB_ID --drafts small=FOLDER_OR_HUB_ID ngram --prompts prompts.jsonl
    python recipes/decide.py --temperature 0 --plots plots

Every draft is tried with every length of --k, and heads and parallel drafts that draft trees with trees of --trees nodes, beside plain decoding: all in turn on one half of the
prompts (sd.compare). The fastest at each batch is then decoded beside plain decoding again, on the other half, since the fastest of many owes a part
of its lead to luck. A draft is a pocket model, a folder or a hub id, of a causal LM, a SPIRe draft or a head, or one of ngram, suffix, magicdec and mtp, the
MTP layer of the target's own checkpoint; windowed:DRAFT and fp8:DRAFT (keys and values of eight bits) as well. One with another tokenizer is translated;
text:DRAFT proposes its text instead. --prompts is a JSON-lines file with a "prompt", a list of "turns" (of which the first is decoded) or a chat's "messages" a
line, and an optional "source" (prompts of one source are in one half); default: the shipped development prompts.

With --schema, every answer is JSON of a schema, written without whitespace, and a draft may be jump (tokens that the schema forces) or jump:DRAFT (these,
then the draft's). Answers end where their JSON is complete.

Rows `part, method, batch, tokens_per_second, tau, ratio, ratio_low, ratio_high, ...` as of sd.compare; part is `search`, or `again` for the second
comparison. Seconds are of all rounds, without the target's reading of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401

import specdec as sd
from specdec.capabilities import DraftInfo, ModelInfo
from specdec.lab.console import progress, short_errors
from specdec.lab.contenders import Contender
from specdec.lab.live import Live
from specdec.lab.loading import load, named_draft
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import by_turns, cut, read, shipped
from specdec.lab.recipe import Placed, Plotted
from specdec.prompts import stop_rules

PLAIN = "plain"


@dataclass(frozen=True)
class Settings(Plotted, Placed):
    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    drafts: tuple[str, ...] = option(
        ("small=pocket-vanilla", "spire=pocket-spire", "ngram"),
        "NAME=DRAFT, or a draft alone, also windowed:DRAFT and text:DRAFT; mtp is the target's own layer",
        metavar="DRAFT",
    )
    k: tuple[int, ...] = option((2, 4, 8), "block lengths", metavar="N")
    trees: tuple[int, ...] = option(
        (16,), "nodes of the trees of heads and parallel drafts (0: chains only)", metavar="N"
    )
    prompts: str | None = option(
        None, "JSON-lines file of prompts (default: the shipped development prompts)", metavar="FILE"
    )
    context: int = option(512, "longer plain prompts are cut to this many tokens at their end (0: never)")
    new_tokens: int = option(64, "of each row")
    batches: tuple[int, ...] = option((1, 4), "rows at a time", metavar="N")
    window: int = option(64, "window of magicdec and windowed drafts")
    sinks: int = option(1, "first tokens that they keep")
    temperature: float = option(1.0, "of the target and the drafts (0: greedy)")
    repeats: int = option(6, "counted runs of each decoder and batch, in each comparison")
    schema: str | None = option(
        None, "JSON schema of the answers (needs llguidance, the extra grammar)", metavar="FILE"
    )
    eos: bool = option(
        False,
        "rows end at the target's end tokens, as for eos_token_id=None of sd.compare (default: all rows have --new-tokens)",
    )


def halves(s: Settings, target: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to choose on, and others to compare on; prompts of one source are in one half."""
    found = read(s.prompts) if s.prompts else by_turns(shipped(split="validation"))
    entries = cut(found, target.tokenizer, s.context)
    sources = [entry.source or entry.name for entry in entries]  # without one, a prompt is its own
    order = {source: number for number, source in enumerate(dict.fromkeys(sources))}
    if len(order) < 2:
        raise SystemExit(
            f"--prompts {s.prompts}: all prompts have one source, and the fastest decoder is measured again on prompts of others: give prompts of at least two"
        )
    rows = [entry.ids(target.tokenizer) for entry in entries]
    limit = ModelInfo.of(target).max_positions
    for entry, row in zip(entries, rows):
        if limit is not None and len(row) + s.new_tokens > limit:
            raise SystemExit(
                f"{entry.name} has {len(row)} tokens, and with --new-tokens {s.new_tokens} they exceed the target's {limit} positions: shorten it or leave "
                "it out (plain prompts are cut with --context, chats are not)"
            )
    first, second = (
        [row for row, source in zip(rows, sources) if order[source] % 2 == half] for half in (0, 1)
    )
    return first, second


def part(s: Settings, given: str, target: Any) -> Any:
    """A draft by what was said."""
    if given == "jump":
        return sd.drafts.JumpForward()
    if given.startswith("jump:"):
        return sd.drafts.JumpForward(part(s, given.removeprefix("jump:"), target))
    return named_draft(given, target, s.window, s.sinks, s.precision)


def decoders(s: Settings, target: Any) -> dict[str, sd.Decoder]:
    """By name: plain decoding, every draft with every length, and trees."""
    base = sd.decoder(target).sampling(temperature=s.temperature, grammar=grammar(s, target))
    made = {PLAIN: base.build()}
    for spec in s.drafts:
        name, _, given = spec.partition("=")
        given = given or name
        try:
            draft = part(s, given, target)
        except (TypeError, ValueError, OSError, SystemExit) as error:
            raise SystemExit(f"--drafts {spec}: {error}") from None
        longest = DraftInfo.of(draft).longest
        for k in sorted({k if longest is None else min(k, longest) for k in s.k}):
            try:
                made[f"{name}/{k}"] = base.draft(draft, length=k).build()
            except ValueError as refused:  # this draft, or this length of it
                progress(f"{name}/{k} is left out: {refused}", stays=True)
        trees = [nodes for nodes in s.trees if nodes and target.supports_trees]
        for way in Contender(name, draft, 0, None, max(s.k)).trees(trees):
            made[way.label] = base.draft(way.draft, length=way.longest).build()
    return made


def grammar(s: Settings, target: Any) -> Any:
    """That of --schema."""
    if s.schema is None:
        return None
    try:
        return sd.grammars.json_schema(Path(s.schema).read_text("utf-8"), target.tokenizer, whitespace=False)
    except (ImportError, ValueError) as error:
        raise SystemExit(f"--schema {s.schema}: {error}") from None


def check(s: Settings) -> None:
    """Refuse settings that need no model to be wrong."""
    if s.schema is not None and not Path(s.schema).is_file():
        raise SystemExit(f"--schema {s.schema}: there is no such file")
    given = {spec: spec.partition("=")[2] or spec for spec in s.drafts}
    jumps = [spec for spec, one in given.items() if one == "jump" or one.startswith("jump:")]
    if jumps and s.schema is None:
        raise SystemExit(f"--drafts {jumps[0]}: nothing is forced without a schema: give --schema FILE")
    names = [spec.partition("=")[0] for spec in s.drafts]
    wrong = [name for name in names if not name or name == PLAIN or names.count(name) > 1]
    if wrong:
        raise SystemExit(
            f"--drafts: the name {wrong[0]!r} is empty, plain decoding's, or there twice: give NAME=DRAFT"
        )
    if s.repeats < 2:
        raise SystemExit(f"--repeats {s.repeats}: one run of each shows no winner: give at least 2, better 6")
    for k in s.k:
        if k < 1:
            raise SystemExit(f"--k {k}: give lengths of at least 1")


def main(s: Settings) -> Live:
    check(s)
    s.begin()
    ends = None if s.eos else ()
    with short_errors():
        target: Any = sd.decoder(load(s.target, s.precision, s.place)).build().target
        if target.tokenizer is None:
            raise SystemExit(f"--target {s.target}: it has no tokenizer: save one into its folder")
        learn, test = halves(s, target)
        if (few := min(len(learn), len(test))) < max(s.batches):
            print(f"half of the prompts are {few}: larger batches have some of them more than once")
        made = decoders(s, target)
        for one in made.values():  # drafts may have room for fewer tokens than the target
            stop_rules(one, [*learn, *test], s.new_tokens, ends, (), (), max(s.batches))
        found = sd.compare(made, learn, s.batches, s.repeats, s.new_tokens, PLAIN, s.seed, ends)
    print(f"{found}\n")
    rows = [{"part": "search", **row} for row in found.rows]
    s.save(rows)
    for batch in dict.fromkeys(row["batch"] for row in found.rows):
        best = found.best.get(batch)
        if best is None:
            print(f"batch {batch}: all repeats but one ended with their first tokens: raise --repeats")
            continue
        if best == PLAIN:
            print(f"batch {batch}: do not speculate; {least(found, batch)}")
            continue
        pair = {PLAIN: made[PLAIN], best: made[best]}
        with short_errors():
            again = sd.compare(pair, test, batch, s.repeats, s.new_tokens, PLAIN, s.seed + 100_000, ends)
        rows += [{"part": "again", **row} for row in again.rows]
        print(f"batch {batch}: {verdict(again.rows[-1])}")
    progress()
    s.save(rows)
    s.draw({"decide": found.plot})
    return found


def least(found: Live, batch: int) -> str:
    """How near the best draft came to plain decoding."""
    others = [row for row in found.rows if row["batch"] == batch and row["method"] != PLAIN]
    if not others:
        return "there is nothing else"
    near = max(others, key=lambda row: row["ratio"])
    return f"the fastest draft is {near['method']}, {said(near)}"


def verdict(row: dict[str, Any]) -> str:
    """What to use, by its rows beside plain decoding on prompts on which it was not chosen."""
    if row["ratio_low"] is None:
        return f"{row['method']} is not confirmed: all repeats but one ended with their first tokens: raise --repeats"
    if row["ratio_low"] > 1:
        return f"use {row['method']}, {said(row)} on other prompts"
    return f"{row['method']} may not be faster than plain decoding: {said(row)} on other prompts"


def said(row: dict[str, Any]) -> str:
    """The speed over plain decoding."""
    return f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}] x plain"


if __name__ == "__main__":
    main(parse(Settings, __doc__))
