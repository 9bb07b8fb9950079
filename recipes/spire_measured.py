"""Wall clock of SPIRe and its baselines over batch and context on this machine, next to the throughput model with its constants.

Methods: plain decoding; vanilla (a small draft with all of the context); windowed (the same draft with SPIRe's sparse KV, a control
that the paper lacks); with --distilled, a second small draft with all of the context, trained with the target's laws (another control);
MagicDec (the target's weights over a window of its KV); SPIRe. Each at k = 4 and at its own best k.

Clock: from the end of the prefill round until the batch has made --new-tokens tokens a row on average; no row leaves before (that is
what the model describes; a batch that ends row by row has stragglers too). Methods take turns at each grid point, with the same
prompts and seeds; figures are medians over --repeats, or up to four times as many where rounds are short. multiplier = tokens/s over plain
decoding's at the same point.

Best k: a short run at k = 4 and one at the k farthest from it give the acceptance by position and the time of a round; the two k with
the best estimate are measured, and k = 4.

modelled = tau / (round / plain round), with tau as measured (an input of the model, as in the paper) and times from specdec.cost:
FLOP/s, bytes/s and overheads are fitted to bare steps at the corners of the grid, host work around them to the rounds there
(docs/cost.md); on a GPU a draft's bare step is its share of the captured chain. Rows of those points say fitted: true; the summary leaves them out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from _calibrated import Bare, Model, bare_steps, fit
from _captured import captured
from _measure import quiet
from _measured_rows import K, Point, Row, constants, report, summary, table
from _report import write
from _stages import profile
from _steady import Group, Measured, Run, capacity, group, kept, steady

import specdec as sd
from specdec import zoo
from specdec.cost import Method, Shape, Window, magicdec, spire, vanilla
from specdec.data import prompts
from specdec.drafts.spire import SpireModel
from specdec.models import Windowed


@dataclass
class Settings:
    target: str = "pocket-target"
    draft: str = "pocket-vanilla"
    distilled: str = ""
    spire: str = "pocket-spire"
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (128, 256, 512, 1024)
    lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    new_tokens: int = 20
    repeats: int = 5
    temperature: float = 1.0
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    bf16_weights: bool = False
    seed: int = 0
    seconds: float = float("inf")
    joined: bool = False
    graphs: str = ""
    first: tuple[Point, ...] = ()
    replayed: bool | None = None
    profile: tuple[int, int] | None = None
    json: str | None = None
    plots: str | None = None


SHORT = 8.0  # seconds that a point's measurements take at least, if four times the repeats (where there are more than one) are enough for that
LEAST_ROWS = 4  # smaller batches decode several groups of prompts, so that a point is not one prompt's luck
BARE_REPEATS = 7


def main(s: Settings) -> None:
    draw = None
    if s.plots:
        try:
            from _measured_plots import draw
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "matplotlib":
                raise
            raise SystemExit("--plots needs matplotlib: pip install matplotlib") from None
    torch.set_num_threads(s.threads)
    quiet()
    if s.profile:
        batch, context = s.profile
        lab = Lab(replace(s, batches=(batch,), contexts=(context,)))
        groups = lab.open(batch, context)
        for method in lab.methods:
            profile(method, lab.decoder(method, K if method != "plain" else 0), groups, s.new_tokens)
        return
    lab = Lab(s)
    started = perf_counter()
    points = [(b, c) for b in sorted(set(s.batches)) for c in sorted(set(s.contexts))]
    first = list(s.first) or [p for p in points if p[0] in ends(s.batches) and p[1] in ends(s.contexts)]
    points, corners = first + [p for p in points if p not in first], set(first)
    replayed = s.device != "cpu" if s.replayed is None else s.replayed
    found: dict[Point, list[Measured]] = {}
    bare: list[Bare] = []
    rows: list[Row] = []
    calibrated = None
    for done, (batch, context) in enumerate(points, 1):
        if found and perf_counter() - started > s.seconds:
            tell(
                f"--seconds {s.seconds:g} are over: {len(points) - len(found)} of {len(points)} grid points are left out"
            )
            break
        tell(f"[{perf_counter() - started:4.0f} s] {done}/{len(points)}: batch {batch}, context {context}")
        groups = lab.open(batch, context)
        found[batch, context] = lab.measure(groups)
        if (batch, context) in corners:
            decoders = {m: lab.decoder(m, K if m != "plain" else 0) for m in lab.methods}
            lengths = (K, max(lab.lengths))
            bare += bare_steps(
                decoders, groups[0], context, lengths, BARE_REPEATS, lab.model, K if replayed else 0
            )
        del groups
        if calibrated is None and corners <= set(found):
            mids = {(b, c, c + s.new_tokens / 2): found[b, c] for b, c in corners}
            try:
                calibrated = fit(lab.model, bare, mids, apart=not replayed)
            except ValueError as why:  # what was measured stands without a model
                tell(f"no model: {why}")
        rows = [*table(found, corners, calibrated, s.new_tokens), *constants(calibrated, bare)]
        if s.json:
            write(s.json, rows, s.seed)
    tell("")
    rows += summary(rows, perf_counter() - started)
    if s.json:
        write(s.json, rows, s.seed)
    report(rows)
    if draw:
        print("\nplots:", ", ".join(draw(rows, s.plots)))


class Lab:
    """Models, decoders and prompts; the same for every grid point."""

    def __init__(self, s: Settings):
        self.s = s
        self.lengths = sorted({K, *s.lengths})
        longest = capacity(max(s.contexts), s.new_tokens, max(self.lengths))
        target, draft = load(s.target, s), load(s.draft, s)
        distilled = load(s.distilled, s) if s.distilled else None
        loaded = {"target": target, "draft": draft} | ({"distilled draft": distilled} if distilled else {})
        for who, model in loaded.items():
            if model.max_positions is not None and longest > model.max_positions:
                raise SystemExit(
                    f"the {who} has {model.max_positions} positions and a row may come to {longest}: choose a smaller --contexts, "
                    "--new-tokens or --lengths"
                )
        if min(s.lengths) < 1 or s.new_tokens < 1 or s.repeats < 1 or min(s.batches) < 1:
            raise SystemExit("--lengths, --new-tokens, --repeats and --batches must be at least 1")
        block = max(self.lengths)
        small = self.spire(target)
        sinks, window = small.sinks, small.window or max(s.contexts)
        self.target = kept(target, taps=small.layers)
        self.small = {"vanilla": kept(draft), "windowed": kept(Windowed(draft, window, sinks, block=block))}
        if distilled is not None:
            self.small["distilled_vanilla"] = kept(distilled)
        self.drafts = {
            **self.small,
            "magicdec": sd.drafts.MagicDec(window=window, sinks=sinks, block=block),
            "spire": sd.drafts.Spire(
                small, block=block, graphs=s.graphs or False, bf16_weights=s.bf16_weights
            ),
        }
        self.methods = ["plain", *self.drafts]
        slots = Window(sinks + window + block - 1)  # all of a ring is read, whatever of it a query sees
        big, little = Shape.of(target.model), Shape.of(draft.model)
        methods = {"vanilla": vanilla(little), "windowed": Method("windowed", little, slots)}
        if distilled is not None:
            methods["distilled_vanilla"] = vanilla(Shape.of(distilled.model))
        methods["magicdec"] = magicdec(big, slots)
        methods["spire"] = spire(Shape.of(small.body), slots, feedback=small.memory is not None)
        weight = 2 if s.bf16_weights else target.dtype.itemsize
        self.model = Model(big, methods, target.dtype.itemsize, weight)
        self.decoders: dict[tuple[str, int], sd.Decoder] = {}
        every = [target.tokenizer(text)["input_ids"] for text in prompts()]
        if s.joined:
            stream, longest = [i for ids in every for i in ids], max(s.contexts)
            every = [stream[n : n + longest] for n in range(0, len(stream), longest)]
        self.prompts = [ids[: max(s.contexts)] for ids in every if len(ids) >= max(s.contexts)]
        if not self.prompts:
            raise SystemExit(
                f"no prompt has {max(s.contexts)} tokens: choose smaller --contexts (about 1100 is the most), or --joined"
            )

    def spire(self, target: sd.HFModel) -> SpireModel:
        """The trained draft, or an untrained one, whose times are the same."""
        name, dtype = self.s.spire, target.dtype
        if name == "untrained":
            return SpireModel.from_target(target)
        folder = zoo.FOLDER / name
        try:
            made = SpireModel.from_pretrained(folder if folder.is_dir() else Path(name), target, dtype=dtype)
        except FileNotFoundError as missing:
            raise SystemExit(
                f"--spire {name}: {missing}; or --spire untrained, for times without meaningful multipliers"
            ) from None
        return made.to(target.device).eval()

    def decoder(self, method: str, k: int) -> sd.Decoder:
        if (method, k) not in self.decoders:
            base = sd.decoder(self.target).sampling(temperature=self.s.temperature)
            if method != "plain":
                base = base.draft(self.drafts[method], length=k)
            self.decoders[method, k] = base.build()
        return self.decoders[method, k]

    def open(self, batch: int, context: int) -> list[Group]:
        """Prompts of a grid point, fed once for all methods; small batches have several groups of them."""
        room = capacity(context, self.s.new_tokens, max(self.lengths))
        count = max(1, LEAST_ROWS // batch)
        groups = []
        for g in range(count):
            numbers = range(g * batch, (g + 1) * batch)
            texts = [self.prompts[n % len(self.prompts)][:context] for n in numbers]
            seeds = [self.s.seed + n for n in numbers]  # a prompt that comes again has another seed
            groups.append(group(texts, seeds, room, self.target, list(self.small.values())))
        return groups

    def measure(self, groups: list[Group]) -> list[Measured]:
        """All methods in turn: k = 4 and the two k that promise most, after short runs that warm up and say which these are."""
        s = self.s
        far = max(self.lengths, key=lambda k: abs(k - K))
        short = max(1, s.new_tokens // 2)
        cases = [Measured("plain", 0, [])]
        steady(self.decoder("plain", 0), groups, short)
        for method in self.drafts:
            near, off = (
                Measured(method, k, [steady(self.decoder(method, k), groups, short)]) for k in (K, far)
            )
            chosen = {K, *promising(near, off, self.lengths)}
            cases += [Measured(method, k, []) for k in sorted(chosen)]
        began, turn = perf_counter(), 0
        while turn < s.repeats or (s.repeats > 1 and turn < 4 * s.repeats and perf_counter() - began < SHORT):
            turn += 1
            for case in cases:
                tell(f"{case.method}, k = {case.k} ({turn})", over=True)
                case.runs.append(self.run(case, groups))
        for case in cases:  # what captured a shape is no time of a round, unless there is nothing else
            case.runs = [run for run in case.runs if not run.captured] or case.runs
        return cases

    def run(self, case: Measured, groups: list[Group]) -> Run:
        decoder = self.decoder(case.method, case.k)
        parts = (self.target, decoder.draft) if case.k else (self.target,)
        before = captured(*parts)
        run = steady(decoder, groups, self.s.new_tokens)
        return replace(run, captured=any(all(p is not q for q in before) for p in captured(*parts)))


def promising(near: Measured, far: Measured, lengths: Iterable[int], count: int = 2) -> list[int]:
    """The k with the most tokens a second, by the chance of each position to be accepted and a round's time linear in k.

    With k drafted tokens a round makes 1 + a1 + a1 a2 + ... tokens, a_i the share accepted at position i of those that are reached.
    """
    stats = max(near, far, key=lambda m: m.k).runs[0].stats
    slope = 0.0
    if far.k != near.k:
        slope = max(0.0, (far.round_seconds - near.round_seconds) / (far.k - near.k))
    speed = {}
    for k in lengths:
        chance = tau = 1.0
        for a in stats.acceptance[:k]:
            chance *= a
            tau += chance
        # However steep the line, a round of one drafted token is a draft step and a verification at least.
        speed[k] = tau / max(near.round_seconds + slope * (k - near.k), near.round_seconds / (near.k + 1))
    return sorted(speed, key=lambda k: -speed[k])[:count]


def ends(values: Iterable[int]) -> tuple[int, int]:
    some = sorted(values)
    return some[0], some[-1]


def tell(line: str, over: bool = False) -> None:
    """Progress, on stderr; ``over``: a line that the next one replaces."""
    end = "" if over else "\n"
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    if not over or clear:
        print(f"{clear}{line}", end=end, file=sys.stderr, flush=True)


def load(name: str, s: Settings) -> sd.HFModel:
    """A pocket model by name, or anything that transformers can load."""
    dtype = getattr(torch, s.dtype)
    if name in zoo.names():
        model, tokenizer = zoo.load(name)
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(name).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    return sd.HFModel(
        model.to(s.device, dtype), tokenizer, prefill_chunk=512 if s.device == "cpu" else 8192,
        graphs=s.graphs or False, bf16_weights=s.bf16_weights,
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    d = Settings()
    parser.add_argument(
        "--target", default=d.target, help="pocket model, hub id or folder (default: %(default)s)"
    )
    parser.add_argument("--draft", default=d.draft, help="the vanilla draft, likewise (default: %(default)s)")
    parser.add_argument(
        "--distilled",
        default=d.distilled,
        help="a second draft with all of the context, as method distilled_vanilla (default: none)",
    )
    parser.add_argument(
        "--spire",
        default=d.spire,
        help="a SPIRe draft of the target: pocket model or folder; or 'untrained' (default: %(default)s)",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=list(d.batches), help="default: 1 2 4 8 16 32"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=list(d.contexts), help="default: 128 256 512 1024"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(d.lengths),
        help="k among which the best is sought; 4 is always measured (default: 1 2 3 4 6 8)",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=d.new_tokens, help="a row, on average (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=d.repeats, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=d.temperature, help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=d.threads, help="torch threads (default: %(default)s)")
    parser.add_argument("--device", default=d.device, help="cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--dtype", default=d.dtype, choices=["float32", "bfloat16", "float16"], help="default: %(default)s"
    )
    parser.add_argument(
        "--bf16-weights",
        action="store_true",
        help="float32 models' products read bfloat16 copies of their weights (docs/kernels.md), in all methods",
    )
    parser.add_argument("--seed", type=int, default=d.seed)
    parser.add_argument(
        "--seconds",
        type=float,
        default=d.seconds,
        help="begin no grid point after so many; the corners come first (default: no limit)",
    )
    parser.add_argument(
        "--joined", action="store_true", help="join prompts where a context is longer than one of them"
    )
    parser.add_argument(
        "--graphs",
        default=d.graphs,
        choices=["", "auto", "eager"],
        help="CUDA graphs of small steps (auto), or the same steps without capturing them (default: neither)",
    )
    parser.add_argument(
        "--profile",
        type=int,
        nargs=2,
        metavar=("B", "L"),
        help="only print where each method's rounds spend their time at B x L",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON, after every grid point")
    parser.add_argument(
        "--plots", metavar="DIR", help="write heat maps, measured and modelled (needs matplotlib)"
    )
    a = parser.parse_args()
    main(
        Settings(
            target=a.target,
            draft=a.draft,
            distilled=a.distilled,
            spire=a.spire,
            batches=tuple(a.batches),
            contexts=tuple(a.contexts),
            lengths=tuple(a.lengths),
            new_tokens=a.new_tokens,
            repeats=a.repeats,
            temperature=a.temperature,
            threads=a.threads,
            device=a.device,
            dtype=a.dtype,
            bf16_weights=a.bf16_weights,
            seed=a.seed,
            seconds=a.seconds,
            joined=a.joined,
            graphs=a.graphs,
            profile=tuple(a.profile) if a.profile else None,
            json=a.json,
            plots=a.plots,
        )
    )
