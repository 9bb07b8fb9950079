"""Drafts that need no training, beside plain decoding, a trained draft and the trained draft in a cascade: tokens a round, and speed.

    python recipes/untrained.py --json docs/results/untrained.json

All decode the same held-out prompts in turn (``sd.compare``), with fresh prompts and seeds in each repeat. Retrieval searches in documents of the training corpus,
which the first run of it builds. Settings were chosen with ``--split validation``. Rows `method, temperature, batch, tau, tokens_per_second, ratio, ratio_low,
ratio_high`: speed over plain decoding's; `plain again` is plain decoding a second time, and how far its ratio is from 1 is noise. Rows of part `forwards` have
the trained draft's forwards for each round, alone and in cascades, whose proposals are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import checkout  # noqa: F401

import specdec as sd
from specdec import drafts, pruning, zoo
from specdec.drafts.heads import StaticTree
from specdec.lab.console import progress, table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe
from specdec.models import Windowed

RANKS = [[0.5, 0.14, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01]] * 6
SKIPPED = (0, 1, 2, 5, 6, 7)  # of eight layers; the best six for validation prompts


@dataclass(frozen=True)
class Settings(Recipe):
    draft: str = option("pocket-vanilla", "the trained draft, a pocket model")
    batches: tuple[int, ...] = option((1, 8), "rows at a time")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "of the sampling")
    context: int = option(256, "prompt tokens")
    new_tokens: int = option(96, "of each row")
    documents: int = option(2000, "of the training corpus, to retrieve from")
    repeats: int = option(8, "counted runs of each decoder")
    split: Literal["test", "validation"] = option(
        "test", "packages of the prompts; validation: to choose settings on"
    )


class Counted:
    """A language model that counts its forwards."""

    def __init__(self, model: sd.HFModel):
        self.model, self.forwards = model, 0
        self.vocab_size, self.supports_trees = model.vocab_size, model.supports_trees
        self.cache, self.prefill = model.cache, model.prefill

    def score(self, *given: Any, **settings: Any) -> sd.Scores:
        """As the model's."""
        self.forwards += 1
        return self.model.score(*given, **settings)


def corpus(documents: int, tokenizer: Any) -> drafts.Corpus:
    """Documents of the training packages."""
    progress("corpus")
    return drafts.Corpus.of(sd.data.corpus()["text"][:documents], tokenizer)


def main(s: Settings) -> list[dict[str, Any]]:
    s.begin()
    model, tokenizer = zoo.load("pocket-target")
    target, small = sd.HFModel(model, tokenizer), sd.HFModel(*zoo.load(s.draft))
    skipping = sd.HFModel(pruning.keep_layers(model, SKIPPED, share=True), tokenizer)
    windowed = Windowed(target, window=64, sinks=1)
    kinds: dict[str, tuple[Any, int]] = {
        "lookup": (drafts.NGram(max_match=4, min_match=2), 4),
        "suffix": (drafts.Suffix(), 8),
        "retrieval": (drafts.Retrieval(corpus(s.documents, tokenizer)), 4),
        "recycling, chain": (drafts.Recycling(StaticTree.of_widths((1,) * 3)), 3),
        "recycling, 8 nodes": (drafts.Recycling(StaticTree.of_accuracies(RANKS, 8)), 6),
        "recycling, 24 nodes": (drafts.Recycling(), 6),
        "six of eight layers": (skipping, 2),
        s.draft: (small, 2),
        f"{s.draft}, 6 tokens": (small, 6),
        f"lookup before {s.draft}, 6 tokens": (drafts.Cascade(small, drafts.NGram(), 3), 6),
        "windowed target, 4 tokens": (windowed, 4),
        "lookup before windowed target, 4 tokens": (drafts.Cascade(windowed, drafts.NGram(), 3), 4),
    }
    texts = sd.data.prompts(tokens=s.context, tokenizer=tokenizer, split=s.split)
    ids = [row[: s.context] for row in tokenizer(texts)["input_ids"]]
    rows: list[dict[str, Any]] = []
    for temperature in s.temperatures:
        base = sd.decoder(target).sampling(temperature=temperature)
        decoders = {"plain": base, "plain again": base} | {
            name: base.draft(draft, length=k) for name, (draft, k) in kinds.items()
        }
        found = sd.compare(decoders, ids, s.batches, s.repeats, s.new_tokens, "plain", s.seed)
        print(f"\ntemperature {temperature:g}\n{found}")
        rows += [{"part": "speed", "temperature": temperature, **row} for row in found.rows]
        rows += [
            {"part": "forwards", "temperature": temperature, **row} for row in forwards(s, base, small, ids)
        ]
    print(
        "\n"
        + table(
            [row for row in rows if row["part"] == "forwards"], ("temperature", "inner", "tau", "forwards")
        )
    )
    s.save(rows)
    return rows


def forwards(s: Settings, base: Any, small: sd.HFModel, ids: list[list[int]]) -> list[dict[str, Any]]:
    """The draft's forwards for each round of one row, with and without an inner draft, for chains of 6."""
    rows, counted = [], Counted(small)
    inner = {"none": None, "lookup": drafts.NGram(), "suffix": drafts.Suffix()}
    for name, guess in inner.items():
        draft = drafts.Model(counted) if guess is None else drafts.Cascade(counted, guess, 3)
        decoder, counted.forwards, rounds, tokens = base.draft(draft, length=6).build(), 0, 0, 0
        for n, prompt in enumerate(ids[: s.repeats]):
            stats = decoder.generate(prompt, s.new_tokens, seed=s.seed + n, eos_token_id=()).stats
            rounds, tokens = rounds + stats.rounds, tokens + stats.tokens
        rows.append({"inner": name, "tau": tokens / rounds, "forwards": counted.forwards / rounds})
    return rows


if __name__ == "__main__":
    main(parse(Settings, __doc__))
