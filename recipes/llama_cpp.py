"""specdec beside llama.cpp: the same models, prompts, processor and threads; speed, tokens a round, and whether texts are the same.

    python recipes/llama_cpp.py --server build/bin/llama-server --json docs/results/llama_cpp.json

llama.cpp is its own program, llama-server, built for this processor: in its source, `cmake -B build && cmake --build build --target llama-server`. A server
runs for each method, precision and batch, and waits while others run. Prompts are in its cache before the clock starts, and only decoding is timed, by the
server itself: from a batch's first token to its last. This library is timed in the same way. All run alternately, in changing orders. Speeds are medians; ratio is the geometric mean over paired repeats.

Precisions of llama.cpp: float32 has weights, keys and values in float32, as here. bfloat16 has weights in bfloat16 and, by its default, keys and values
in float16, and also rounds activations. The draft proposes --lengths tokens in both programs, and lookups propose four. The server's options were chosen for speed on
validation prompts: flash attention is off, since llama.cpp is faster without it on a CPU. Its tokens per round include the last round of a text, which may be cut
short; this library leaves such rounds out. The server cannot draw the end token; this library can, and then the text goes on.

With --random, only plain decoding is timed, of a larger model with random weights: reading these then takes most of the time, and Python's overhead matters less.

Pocket models are written as GGUF (pip install gguf). For other models, --gguf takes the files of target and draft, made by llama.cpp's converter, and is
compared as precision file.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import checkout  # noqa: F401
import numpy as np
import torch

import specdec as sd
from specdec.lab.bootstrap import geometric
from specdec.lab.console import progress, short_errors, table
from specdec.lab.gguf_file import write_gguf
from specdec.lab.loading import load
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import pieces, shipped
from specdec.lab.recipe import Recipe
from specdec.lab.runs import Case, Sample, decode, interleave

LOOKUP = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "4"]
"""The fastest lookup of llama.cpp on validation prompts that keeps nothing of other texts."""
SERVER = ["-no-kvu", "-fa", "off", "-cram", "0"]
"""The server's fastest options on these prompts, with one row or many. It keeps prompts in its slots only."""
OURS = "specdec"
TURN = 1000
"""Between the seeds of repeats."""
START_SECONDS = 60.0
"""A server that is not ready by then has failed."""


@dataclass(frozen=True)
class Settings(Recipe):
    server: str = option("llama-server", "the program of llama.cpp", metavar="FILE")
    target: str = option("pocket-target", "pocket model, hub id or folder")
    draft: str = option("pocket-vanilla", "the same for the draft")
    gguf: tuple[str, ...] = option((), "files of target and draft (default: written from the models)")
    random: tuple[int, int] | None = option(
        None, "instead, plain decoding of a target with random weights", metavar=("LAYERS", "WIDTH")
    )
    batches: tuple[int, ...] = option((1, 4, 16), "rows decoded together")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "0 is greedy (default: 0 1)")
    context: int = option(256, "prompt tokens")
    new_tokens: int = option(96, "a row")
    lengths: tuple[int, ...] = option((2, 4), "k, tokens of the draft per round")
    split: Literal["test", "validation"] = option("test", "packages of the prompts")
    repeats: int = option(5, "timed repeats")


@dataclass(frozen=True)
class Server:
    """A running llama-server.

    Attributes:
        url: where it listens. drafts: whether it has a draft model. printed: its log.
    """

    url: str
    drafts: bool
    printed: Path

    @property
    def system(self) -> str:
        """What it says of the processor's instructions, if it is started with ``-lv 4``."""
        lines = self.printed.read_text(errors="replace").splitlines()
        return next((line[line.index("CPU :") :].strip(" |") for line in lines if "CPU :" in line), "")

    @property
    def said(self) -> str:
        """The last lines of its log."""
        return "".join(self.printed.read_text(errors="replace").splitlines(True)[-5:])

    def complete(
        self, rows: list[list[int]], tokens: int, temperature: float, seed: int
    ) -> list[dict[str, Any]]:
        """Its answers to prompts that it begins together, with ``tokens`` and ``timings``.

        Raises:
            SystemExit: it refuses them, or does not answer; with the last lines of its log.
        """
        greedy = {"samplers": ["top_k"], "top_k": 1}
        asked = {"prompt": rows, "n_predict": tokens, "ignore_eos": True, "return_tokens": True, "seed": seed}
        asked |= {"samplers": ["temperature"], "temperature": temperature} if temperature else greedy
        kind = {"Content-Type": "application/json"}
        try:
            with urlopen(
                Request(f"{self.url}/completion", json.dumps(asked).encode(), kind), timeout=600
            ) as answer:
                said = json.load(answer)
        except OSError as error:
            why = error.read().decode(errors="replace") if isinstance(error, HTTPError) else str(error)
            raise SystemExit(f"llama-server does not answer ({why}):\n{self.said}") from None
        return said if isinstance(said, list) else [said]


@contextmanager
def serving(
    s: Settings, precision: str, model: Path, options: Sequence[str], rows: int, folder: Path
) -> Iterator[Server]:
    """A server of a model for ``rows`` requests at a time.

    Raises:
        SystemExit: it ends, or is not ready after a minute; with the last lines of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    each = s.context + s.new_tokens + max(s.lengths) + 8
    threads = [text for name in ("-t", "-tb", "-td", "-tbd") for text in (name, str(s.threads))]
    kinds = [text for name in ("-ctk", "-ctv", "-ctkd", "-ctvd") for text in (name, "f32")]
    command = [s.server, "-m", str(model), *options, *threads, *(kinds if precision == "float32" else ())]
    command += [*SERVER, "--port", str(port), "-np", str(rows), "-c", str(rows * each)]
    progress(f"starting {command[0]} for {rows} rows")
    made = Server(f"http://127.0.0.1:{port}", "-md" in options, folder / f"{port}.log")
    with made.printed.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            late = monotonic() + START_SECONDS
            while not _ready(made.url):
                if process.poll() is not None or monotonic() > late:
                    raise SystemExit(f"{' '.join(command)} did not start:\n{made.said}")
                sleep(0.1)
            yield made
        finally:
            process.kill()


def _ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def theirs(
    server: Server,
    prompts: list[list[int]],
    batch: int,
    temperature: float,
    s: Settings,
    turns: Iterator[int],
) -> Sample:
    """All prompts through a server, in batches, timed by it from a batch's first token to its last.

    Raises:
        SystemExit: a text is too short, prompts were not in the cache, or nothing was drafted.
    """
    tokens, drafted, accepted, seconds, ids = 0, 0, 0, 0.0, list[list[int]]()
    seed = s.seed + TURN * next(turns)
    for i in range(0, len(prompts), batch):
        rows = prompts[i : i + batch]
        server.complete(rows, 0, temperature, seed)
        answers = server.complete(rows, s.new_tokens, temperature, seed + i)
        times = [answer["timings"] for answer in answers]
        if [t["predicted_n"] for t in times] != [s.new_tokens] * len(rows):
            raise SystemExit(
                f"llama-server ends texts before {s.new_tokens} tokens: give fewer --new-tokens or a smaller --context"
            )
        if any(t["cache_n"] < s.context - 1 for t in times):
            raise SystemExit(f"llama-server has lost prompts that it had read:\n{server.said}")
        tokens += sum(t["predicted_n"] - 1 for t in times)
        drafted += sum(t.get("draft_n", 0) for t in times)
        accepted += sum(t.get("draft_n_accepted", 0) for t in times)
        seconds += max(t["predicted_ms"] for t in times) / 1000
        ids += [answer["tokens"] for answer in answers]
    if server.drafts and not drafted:
        raise SystemExit(f"llama-server drafts nothing:\n{server.said}")
    return Sample(tokens, seconds, ids, tokens / (tokens - accepted))


def ours(
    decoder: sd.Decoder, prompts: list[list[int]], batch: int, s: Settings, turns: Iterator[int]
) -> Sample:
    """As ``theirs``, by a decoder of this library."""
    return decode(decoder, prompts, batch, s.new_tokens, s.seed + TURN * next(turns))


def speculation(s: Settings, little: Path) -> dict[str, list[str]]:
    """Options of llama-server by method."""
    if s.random:
        return {"plain": []}
    draft = ["--spec-type", "draft-simple", "-md", str(little), "--spec-draft-n-max"]
    return {"plain": [], "ngram": LOOKUP, **{f"draft, k = {k}": [*draft, str(k)] for k in s.lengths}}


def files(s: Settings, target: Any, draft: Any, tokenizer: Any, folder: Path) -> dict[str, list[Path]]:
    """Target and draft as GGUF, by precision."""
    if s.gguf:
        return {"file": [Path(name) for name in s.gguf]}
    return {
        precision: [
            write_gguf(model, tokenizer, folder / f"{name}-{precision}.gguf", precision == "bfloat16")
            for name, model in (("target", target), ("draft", draft))
        ]
        for precision in ("float32", "bfloat16")
    }


def main(s: Settings) -> list[dict[str, Any]]:
    s.begin()
    if which(s.server) is None:
        raise SystemExit(
            f"--server {s.server}: no such program: give the llama-server of a build of llama.cpp"
        )
    if s.gguf and len(s.gguf) != 2:
        raise SystemExit(f"--gguf: {len(s.gguf)} files: give two, the target's and the draft's")
    if s.gguf and s.random:
        raise SystemExit("--random writes files of its own: leave --gguf out")
    with short_errors(), TemporaryDirectory() as folder, ExitStack() as running:
        model, tokenizer = load(s.target, torch.float32, "cpu")
        small, _ = load(s.draft, torch.float32, "cpu")
        model = model if s.random is None else untrained(s, model)
        entries = shipped(None, s.split)
        prompts = [list(entry.given) for entry in pieces(entries, tokenizer, s.context, 1)][: max(s.batches)]
        made = files(s, model, small, tokenizer, Path(folder))
        with serving(s, "", next(iter(made.values()))[0], ["-lv", "4"], 1, Path(folder)) as server:
            system = server.system
        servers = {
            (batch, method, precision): running.enter_context(
                serving(s, precision, of, options, batch, Path(folder))
            )
            for batch in s.batches
            for precision, (of, little) in made.items()
            for method, options in speculation(s, little).items()
        }
        target = sd.decoder(sd.HFModel(model, tokenizer))
        cases = alternating(s, target, sd.HFModel(small, tokenizer), prompts, servers)
    methods = list(speculation(s, Path()))
    order = sorted(cases, key=lambda case: (case.temperature, case.batch, methods.index(case.method)))
    rows = [row(case, cases) for case in order]
    version = subprocess.run([s.server, "--version"], capture_output=True, text=True).stderr.strip()
    print(f"llama.cpp {version}\n{system}\n")
    print(table(rows, COLUMNS))
    print(
        "\nratio: this library's speed over the row's, by the same method. same_texts: rows with this library's plain greedy text."
    )
    s.save([{"part": "system", "version": version, "processor": system}, *rows])
    return rows


def untrained(s: Settings, like: Any) -> Any:
    """A Llama with the vocabulary of ``like`` and random weights, rounded to bfloat16."""
    assert s.random is not None
    layers, width = s.random
    heads = max(1, width // 64)
    config = deepcopy(like.config)
    config.update({"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": width * 11 // 4})
    config.update({"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width // heads})
    torch.manual_seed(s.seed)
    return type(like)(config).bfloat16().float().eval()


COLUMNS = ("temperature", "batch", "method", "engine", "tau", "tokens_per_second", "ratio_to_plain")
COLUMNS += ("ratio", "ratio_low", "ratio_high", "same_texts")


def alternating(
    s: Settings,
    target: sd.Builder,
    small: sd.HFModel,
    prompts: list[list[int]],
    servers: Mapping[Any, Server],
) -> list[Case]:
    """All cases of both engines, run in turn."""
    cases = []
    for temperature in s.temperatures:
        base = target.sampling(temperature=temperature)
        mine = {"plain": base.build(), "ngram": base.draft(sd.drafts.NGram(), 4).build()}
        mine |= {f"draft, k = {k}": base.draft(small, k).build() for k in s.lengths}
        mine = {"plain": mine["plain"]} if s.random else mine
        for batch in s.batches:
            place = (batch, s.context, temperature)
            for method, decoder in mine.items():
                run = partial(ours, decoder, prompts, batch, s, count())
                cases.append(Case(OURS, method, *place, run))
            for (rows, method, precision), server in servers.items():
                if rows == batch:
                    run = partial(theirs, server, prompts, batch, temperature, s, count())
                    cases.append(Case(f"llama.cpp, {precision}", method, *place, run))
    for case in cases:
        progress(f"{case.engine} {case.method} batch {case.batch}: once, uncounted")
        case.run()
    interleave(cases, s.repeats, progress)
    progress()
    return cases


def row(case: Case, cases: Sequence[Case]) -> dict[str, Any]:
    """The report's row of a case."""
    at = {
        (c.engine, c.method): c for c in cases if (c.batch, c.temperature) == (case.batch, case.temperature)
    }
    made = {"part": "speed", **case.row(at[case.engine, "plain"]), "same_texts": None}
    if not case.temperature:
        texts = at[OURS, "plain"].samples[0].ids
        made["same_texts"] = sum(one == other for one, other in zip(case.samples[0].ids, texts)) / len(texts)
    if case.engine != OURS:
        made["peak_bytes"] = None  # of this process, which does not hold the server
        mine, other = ([sample.speed for sample in c.samples] for c in (at[OURS, case.method], case))
        made |= geometric(np.array(mine) / np.array(other))
    return made


if __name__ == "__main__":
    main(parse(Settings, __doc__))
