"""See speculative decoding work: real (small) models, real prompts, no network, about a minute on two CPU cores.

Decodes held-out prompts with the pocket target alone, with n-gram lookup, with the pocket draft model, with the target itself over
a sparse view of its cache (MagicDec), and with the pocket SPIRe draft; prints a table of efficiency (tau: tokens a round, bonus included), speed, and whether the text is the same as plain decoding's; then shows one
completion, with the tokens that came from the draft marked.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import checkout  # noqa: F401
import torch
from _measure import Case, decode, interleave, passing, quiet, table
from _report import write

import specdec as sd
from specdec import zoo
from specdec.data import prompts


@dataclass
class Settings:
    batches: tuple[int, ...] = (1, 16)
    context: int = 256
    new_tokens: int = 64
    length: int = 4
    repeats: int = 3
    threads: int = 1
    seed: int = 0
    json: str | None = None


def main(s: Settings) -> None:
    torch.set_num_threads(s.threads)
    quiet()
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

    cases = []
    for batch in s.batches:
        some = ids[: max(batch, 4)]
        for method, decoder in decoders.items():
            cases.append(
                Case(
                    "specdec",
                    method,
                    batch,
                    s.context,
                    0.0,
                    lambda d=decoder, p=some, b=batch: decode(d, p, b, s.new_tokens, s.seed),
                    None if method == "plain" else s.length,
                )
            )
    interleave(cases, s.repeats, passing)
    passing()

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
    if s.json:
        write(s.json, rows, s.seed)


def show_one(decoder: sd.Decoder, ids: list[int], s: Settings) -> None:
    """One completion; each round's bonus token is set in brackets, the rest was drafted."""
    tokenizer = decoder.target.tokenizer
    bold, color, end = ("\033[1m", "\033[36m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    pieces = []
    for piece in decoder.stream([ids], s.new_tokens, seed=s.seed, eos_token_id=()):
        *drafted, bonus = piece.ids
        pieces.append(tokenizer.decode(drafted) + f"{bold}[{tokenizer.decode([bonus])}]{end}")
    print(
        "\nOne completion: the end of the prompt, then what was generated; the target chose the [bold] tokens,"
    )
    print("the draft proposed all others and the target agreed.\n")
    print("..." + tokenizer.decode(ids[-60:]) + color + "".join(pieces) + end)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument(
        "--batches", type=int, nargs="+", default=list(d.batches), help="batch sizes (default: 1 16)"
    )
    parser.add_argument("--context", type=int, default=d.context, help="prompt tokens (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=d.new_tokens, help="tokens to decode (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=int, default=d.length, help="tokens drafted a round (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=d.repeats, help="timed repeats (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=d.threads, help="torch threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON")
    a = parser.parse_args()
    main(Settings(tuple(a.batches), a.context, a.new_tokens, a.length, a.repeats, a.threads, a.seed, a.json))
