"""See speculative decoding work: real (small) models, real prompts, no network, about a minute on two CPU cores.

Decodes held-out prompts with the pocket target alone, with n-gram lookup, with the pocket draft model, with the target itself over
a sparse view of its cache (MagicDec), and with the pocket SPIRe draft; prints a table of efficiency (tau: tokens a round, bonus
included), speed, and whether the text equals plain decoding's; then shows one completion, with the target's own tokens marked.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import checkout  # noqa: F401

import specdec as sd
from specdec import zoo
from specdec.data import prompts
from specdec.lab.console import progress, table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe
from specdec.lab.runs import Case, decode, interleave


@dataclass(frozen=True)
class Settings(Recipe):
    batches: tuple[int, ...] = option((1, 16), "batch sizes")
    context: int = option(256, "prompt tokens")
    new_tokens: int = option(64, "tokens to decode")
    length: int = option(4, "tokens drafted per round")
    repeats: int = option(3, "timed repeats")


def main(s: Settings) -> None:
    s.begin()
    target, draft = sd.HFModel(*zoo.load("pocket-target")), sd.HFModel(*zoo.load("pocket-vanilla"))
    spire, _ = zoo.load("pocket-spire")
    base = sd.decoder(target).greedy()
    decoders = {
        "plain": base.build(),
        "ngram": base.draft(sd.drafts.NGram(), length=s.length).build(),
        "vanilla": base.draft(draft, length=s.length).build(),
        "magicdec": base.draft(sd.drafts.MagicDec(window=64, sinks=1), length=s.length).build(),
        "spire": base.draft(sd.drafts.Spire(spire, block=max(8, s.length)), length=s.length).build(),
    }
    texts = prompts(n=max(s.batches))
    ids = [target.tokenizer(text)["input_ids"][: s.context] for text in texts]
    if (shortest := min(map(len, ids))) < s.context:
        raise SystemExit(
            f"--context {s.context}: the shortest of these prompts has {shortest} tokens, choose at most that"
        )

    cases = []
    for batch in s.batches:
        some = ids[: max(batch, 4 - 4 % batch)]  # whole batches
        for method, decoder in decoders.items():
            run = partial(decode, decoder, some, batch, s.new_tokens, s.seed)
            k = None if method == "plain" else s.length
            cases.append(Case("specdec", method, batch, s.context, 0.0, run, k))
    interleave(cases, s.repeats, progress)
    progress()

    rows = []
    for case in cases:
        plain = next(c for c in cases if c.method == "plain" and c.batch == case.batch)
        same = all(a.ids == b.ids for a, b in zip(case.samples, plain.samples))
        rows.append({**case.row(plain), "same_text_as_plain": "yes" if same else "no"})
    print(
        f"Greedy decoding of {s.new_tokens} tokens after {s.context}, {s.length} drafted a round, {s.threads} thread(s), "
        f"median of {s.repeats}:\n"
    )
    shown = ("method", "batch", "tau", "tokens_per_second", "ratio_to_plain", "same_text_as_plain")
    print(table(rows, shown))
    print(
        "\ntau: tokens a round, bonus token included (plain decoding: 1). Ratio: speed over plain at the same batch."
    )
    show_one(decoders["vanilla"], ids[0], s)
    s.save(rows)


def show_one(decoder: sd.Decoder, ids: list[int], s: Settings) -> None:
    """Print one completion; each round's bonus token is marked, the rest was drafted."""
    tokenizer = decoder.target.tokenizer
    bold, color, end = ("\033[1m", "\033[36m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    pieces = []
    for piece in decoder.stream([ids], s.new_tokens, seed=s.seed, eos_token_id=()):
        *drafted, bonus = piece.ids
        pieces.append(tokenizer.decode(drafted) + f"{bold}[{tokenizer.decode([bonus])}]{end}")
    print(
        "\nOne completion: the end of the prompt, then the generated text; the target chose the [bold] tokens,"
    )
    print("the draft proposed all others and the target agreed.\n")
    print("..." + tokenizer.decode(ids[-60:]) + color + "".join(pieces) + end)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
