"""What a prefix cache saves in conversations: seconds of the prefill and of the whole answer, turn by turn, with one and without.

    python recipes/prefix_cache.py --json prefix_cache.json
    python recipes/prefix_cache.py --target FOLDER_OR_HUB_ID --draft FOLDER_OR_HUB_ID --mib 4096

Conversations begin with one system prompt. A turn adds held-out text and the target's answer to it; the texts are made beforehand, so that all decoders read the
same ones. Turn by turn, decoders with and without a cache decode the answer in turn: plain decoding, a model as draft (with a cache of its own), and SPIRe, which
reads the target's activations of all positions. Every repeat begins with empty caches and goes through all conversations one after another.

Rows: `method, turn, prompt_tokens, found` (share of the target's prompt tokens that the cache had), `prefill_ms, prefill_cached_ms` (medians, without and
with a cache; they include the draft's reading), `prefill_ratio, low, high` (without over with: geometric mean of the pairs, and its 95 % bootstrap interval
over conversations), `call_ratio` (the same for the whole answer).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import checkout  # noqa: F401
import numpy as np

import specdec as sd
from specdec.lab.bootstrap import mean_interval
from specdec.lab.clock import seconds
from specdec.lab.console import progress, short_errors, table
from specdec.lab.loading import load
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import by_turns, pieces, shipped
from specdec.lab.recipe import Recipe
from specdec.parts import as_draft


@dataclass(frozen=True)
class Settings(Recipe):
    target: str = option("pocket-target", "a pocket model, a folder or a hub id")
    draft: str = option("pocket-vanilla", "the same for the draft")
    spire: str = option("pocket-spire", "a SPIRe draft for the target (empty: none)")
    mib: int = option(256, "of each prefix cache")
    conversations: int = option(8, "conversations")
    turns: int = option(5, "turns of each")
    system: int = option(192, "tokens of the system prompt")
    turn: int = option(48, "tokens of a user's turn")
    answer: int = option(112, "tokens of an answer")
    k: int = option(4, "drafted tokens of a round")
    repeats: int = option(3, "times through all conversations")


def texts(s: Settings, target: Any) -> list[list[list[int]]]:
    """Of each conversation the prompt of each turn, with all that was said before."""
    plain = sd.decoder(target).greedy().build()
    longest = max(s.system, s.turn)
    cut = [list(one.given) for one in pieces(by_turns(shipped()), target.tokenizer, longest, 4)]
    need = 1 + s.conversations * s.turns
    if s.repeats < 1:
        raise ValueError(f"--repeats {s.repeats}: give at least 1")
    if len(cut) < need:
        raise ValueError(
            f"--conversations {s.conversations} of --turns {s.turns} need {need} texts of {longest} tokens, and there are {len(cut)}: give fewer"
        )
    system, made = cut[0][: s.system], []
    for c in range(s.conversations):
        said, prompts = list(system), []
        for turn in range(s.turns):
            said += cut[1 + turn * s.conversations + c][: s.turn]
            prompts.append(list(said))
            said += plain.generate([said], s.answer, eos_token_id=()).ids[0]
        made.append(prompts)
    return made


def decoders(s: Settings, model: Any, tokenizer: Any, limit: int | None) -> dict[str, sd.Decoder]:
    """By method; ``limit``: bytes of each prefix cache."""
    target = sd.HFModel(model, tokenizer, prefix_cache=limit)
    base, (small, own) = sd.decoder(target).greedy(), load(s.draft, device=target.device)
    made = {"plain": base, "small model": base.draft(sd.HFModel(small, own, prefix_cache=limit), length=s.k)}
    if s.spire:
        made["SPIRe"] = base.draft(as_draft(s.spire, "--spire", target.device, target), length=s.k)
    return {name: one.build() for name, one in made.items()}


def clear(decoder: sd.Decoder) -> None:
    """Begin with empty caches."""
    for model in (
        decoder.target,
        decoder.draft.model if isinstance(decoder.draft, sd.drafts.Model) else None,
    ):
        if isinstance(model, sd.HFModel) and model.prefixes is not None:
            model.prefixes.clear()


def timed(decoder: sd.Decoder, prompt: list[int], new: int) -> tuple[float, float]:
    """Seconds of the prefill, and of the whole call."""
    outs: list[sd.Generation] = []
    whole = seconds(lambda: outs.append(decoder.generate([prompt], new, eos_token_id=())))
    return outs[0].stats.seconds["prefill"], whole


def main(s: Settings) -> None:
    s.begin()
    with short_errors():
        model, tokenizer = load(s.target)
        said = texts(s, sd.HFModel(model, tokenizer))
        without, cached = (decoders(s, model, tokenizer, limit) for limit in (None, s.mib * 2**20))
    spent: dict[tuple[str, int], list[list[tuple[float, float]]]] = {}  # pairs, by conversation and repeat
    found: dict[tuple[str, int], list[float]] = {}
    for repeat in range(s.repeats + 1):
        for name, one in cached.items():
            clear(one)
            for number, prompts in enumerate(said):
                progress(f"repeat {repeat} of {s.repeats}, {name}, conversation {number + 1}")
                for turn, prompt in enumerate(prompts):
                    before, pair = one.target.prefixes.found, [without[name], one]
                    turned = (number + turn + repeat) % 2  # which of both goes first
                    times = [timed(d, prompt, s.answer) for d in (pair[::-1] if turned else pair)]
                    if repeat:  # the first is warm-up
                        spent.setdefault((name, turn), []).append(times[::-1] if turned else times)
                        share = (one.target.prefixes.found - before) / len(prompt)
                        found.setdefault((name, turn), []).append(share)
    progress()
    rows = []
    for (name, turn), pairs in spent.items():
        ms = 1e3 * np.array(pairs)  # [repeats * conversations, without or with, prefill or whole]
        gains = np.log(ms[:, 0] / ms[:, 1]).reshape(s.repeats, s.conversations, 2).mean(0)
        (low, high), prefill, whole = mean_interval(gains[:, 0]), *gains.mean(0)
        rows.append(
            {
                "method": name,
                "turn": turn + 1,
                "prompt_tokens": len(said[0][turn]),
                "found": median(found[name, turn]),
                "prefill_ms": float(np.median(ms[:, 0, 0])),
                "prefill_cached_ms": float(np.median(ms[:, 1, 0])),
                "prefill_ratio": float(np.exp(prefill)),
                "low": float(np.exp(low)),
                "high": float(np.exp(high)),
                "call_ratio": float(np.exp(whole)),
            }
        )
    print(table(rows, tuple(rows[0])))
    s.save(rows)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
