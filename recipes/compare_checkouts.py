"""Two checkouts of the library, in turn on one machine: tokens a second of whole decoders, tau, and whether the texts are equal.

Each checkout has a process of its own, and the processes are asked in turn, so that a slow minute of the machine affects both. Where a
process's memory lies changes its speed by up to 10 %, so --pairs pairs of processes are started. ratio is the new speed over the base's: the
median of each pair's repeats, then the median of the pairs; low and high are its 95 % bootstrap interval over pairs and repeats.
Speeds exclude the prefill; call_ratio is the ratio of the seconds of whole calls, base over new.

A checkout that is older than the link specdec/kernels needs one: ln -s ../kernels specdec/kernels.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import checkout
import numpy as np

from specdec.lab.console import progress, table
from specdec.lab.options import option, parse
from specdec.lab.recipe import Recipe

METHODS = ("plain", "vanilla", "windowed", "magicdec", "spire", "tree")


@dataclass(frozen=True)
class Settings(Recipe):
    base: str = option(str(checkout.ROOT), "folder of the checkout to compare with (default: this checkout)")
    new: str = option(str(checkout.ROOT), "folder of the other checkout (default: this checkout)")
    methods: tuple[str, ...] = option(METHODS, f"some of {', '.join(METHODS)} (default: all)")
    batches: tuple[int, ...] = option((1, 8), "rows at a time")
    contexts: tuple[int, ...] = option((256, 900), "prompt tokens, 900 at most")
    new_tokens: int = option(64, "tokens to decode")
    length: int = option(4, "k, tokens drafted per round")
    temperature: float = option(1.0, "0 is greedy (default: 1)")
    repeats: int = option(5, "timed calls of each process")
    pairs: int = option(4, "pairs of processes")


def serve() -> None:
    """Decode what standard input asks for. This function's source is what the processes run, so it uses long-lived public names only."""
    import json
    import sys
    from time import perf_counter

    import torch

    import specdec as sd
    from specdec import zoo
    from specdec.data import prompts
    from specdec.models import Windowed

    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    target, small = sd.HFModel(*zoo.load("pocket-target")), sd.HFModel(*zoo.load("pocket-vanilla"))
    make = {
        "vanilla": lambda: small,
        "windowed": lambda: Windowed(small, 64, 1),
        "magicdec": lambda: sd.drafts.MagicDec(),
        "spire": lambda: sd.drafts.Spire(zoo.load("pocket-spire")[0]),
        "tree": lambda: sd.drafts.Tree(small, (3, 2)),
    }
    ids, decoders = [target.tokenizer(text)["input_ids"] for text in prompts(tokens=None)], {}
    print(json.dumps(sd.__file__), flush=True)
    for line in sys.stdin:
        method, batch, context = json.loads(line)
        if method not in decoders:
            builder = sd.decoder(target).sampling(temperature=settings["temperature"])
            if method != "plain":
                builder = builder.draft(make[method](), length=settings["length"])
            decoders[method] = builder.build()
        rows = [row[:context] for row in ids if len(row) >= context][:batch]
        if len(rows) < batch:
            raise SystemExit(
                f"only {len(rows)} prompts have {context} tokens: choose a smaller --contexts or --batches"
            )
        start = perf_counter()
        out = decoders[method].generate(rows, settings["new_tokens"], seed=settings["seed"], eos_token_id=())
        seconds, stats = perf_counter() - start, out.stats
        print(json.dumps([stats.tokens_per_second, seconds, stats.tau, out.ids]), flush=True)


class Worker:
    """A process that runs ``serve`` with the library of a folder.

    Raises:
        SystemExit: the process ended (its errors are on stderr), or imports the library from elsewhere.
    """

    def __init__(self, folder: str, settings: str, stack: ExitStack):
        self.folder = Path(folder).resolve()
        code = f"from __future__ import annotations\n{inspect.getsource(serve)}\nserve()"
        paths = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        command, pipe = [sys.executable, "-P", "-c", code, settings], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        stack.callback(self.process.wait)
        stack.callback(self.process.terminate)
        found = Path(self._answer())
        if found.parent.parent != self.folder:
            raise SystemExit(
                f"{self.folder} has no specdec, which was found in {found.parent}: give the folder of a checkout"
            )

    def ask(self, question: tuple[str, int, int]) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"the process of {self.folder} ended, with the error above: is it a checkout of specdec?"
            )
        return json.loads(line)


def main(s: Settings) -> None:
    s.begin()
    if not s.methods or set(s.methods) - set(METHODS):
        raise SystemExit(f"--methods is {' '.join(s.methods)}: give some of {', '.join(METHODS)}")
    questions = [(m, b, c) for c in s.contexts for b in s.batches for m in s.methods]
    settings = json.dumps(
        {n: getattr(s, n) for n in ("threads", "seed", "length", "temperature", "new_tokens")}
    )
    answers: dict[Any, list[list[tuple[Any, Any]]]] = {question: [] for question in questions}
    for pair in range(s.pairs):
        with ExitStack() as stack:
            workers = [Worker(folder, settings, stack) for folder in (s.base, s.new)]
            for question in questions:
                progress(f"pair {pair + 1} of {s.pairs}: {question}")
                turns = []
                for repeat in range(s.repeats + 1):
                    order = workers if repeat % 2 else workers[::-1]
                    found = {worker: worker.ask(question) for worker in order}
                    turns.append((found[workers[0]], found[workers[1]]))
                answers[question].append(turns[1:])  # the first is warm-up
    progress()
    rows = [row(question, pairs) for question, pairs in answers.items()]
    print(table(rows, tuple(rows[0])))
    s.save(rows)


def row(question: tuple[str, int, int], pairs: list[list[tuple[Any, Any]]]) -> dict[str, Any]:
    """One line of the table, from the answers of both processes, by pair and repeat."""
    every = [turn for turns in pairs for turn in turns]
    (base, new), low_high = every[0], interval([[b[0] / a[0] for a, b in turns] for turns in pairs])
    return {
        **dict(zip(("method", "batch", "context"), question)),
        "base_tokens_per_second": median(a[0] for a, _ in every),
        "new_tokens_per_second": median(b[0] for _, b in every),
        **low_high,
        "call_ratio": median(a[1] / b[1] for a, b in every),
        "base_tau": base[2],
        "new_tau": new[2],
        "same_ids": all(a[3] == b[3] for a, b in every),
    }


def interval(ratios: list[list[float]], draws: int = 1000) -> dict[str, float]:
    """The median over pairs of each pair's median, with its bootstrap interval."""
    values, random = np.array(ratios), np.random.default_rng(0)
    pair = random.integers(len(values), size=(draws, len(values), 1))
    turn = random.integers(values.shape[1], size=(draws, len(values), values.shape[1]))
    low, high = np.quantile(np.median(np.median(values[pair, turn], 2), 1), [0.025, 0.975])
    return {"ratio": float(np.median(np.median(values, 1))), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main(parse(Settings, __doc__))
