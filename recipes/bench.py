"""specdec against transformers on the same pair of models: speed, block efficiency, share of the ideal, memory.

A draft with another tokenizer than the target's is ``drafts.Translated`` here, and a second time, as method text, ``drafts.TextMatch``; it is given to
transformers with both tokenizers.

transformers runs plain ``generate``, assisted generation with its default schedule and with a constant number of drafted tokens, and
prompt lookup. It assists one row at a time, so its batches are run row by row. Only decode time counts: from the end of the
first token's round to the end of the last. All methods run alternately; figures are medians within this run.

With --prompts, prompts are taken from the file's categories in turn, and there are rows by category (part: category): tau of every method, and tokens a
second where prompts are decoded one at a time. At batch 1 there is at least one prompt of every category.

share_of_ideal = speed / (tau x rows / (k t_d + t_v)), where t_d and t_v are the seconds of the draft's one-token forward and of the
target's (k+1)-token forward, without sampling and bookkeeping. They are timed after each run that they are compared with, in the order
of a round, so that each finds the processor's cache as the other model left it; the share is the median over repeats.
share_while_full is the same for the rounds in which all rows of the batch are active: t_d and t_v are those of a full batch, and rows
that accept less continue when others have ended.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import checkout  # noqa: F401
import torch

import specdec as sd
from specdec.lab.clock import Forwards, bare_round, sync
from specdec.lab.console import progress, short_errors, table
from specdec.lab.loading import load, share_ids
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import by_turns, entries_from, pieces
from specdec.lab.recipe import Placed
from specdec.lab.runs import Case, Each, Sample, by_category, decode, interleave


@dataclass(frozen=True)
class Settings(Placed):
    target: str = option("pocket-target", "pocket model, hub id or folder")
    draft: str = option("pocket-vanilla", "the same for the draft")
    batches: tuple[int, ...] = option((1, 4, 16), "rows decoded together")
    temperatures: tuple[float, ...] = option((0.0, 1.0), "0 is greedy (default: 0 1)")
    prompts: str | None = option(
        None, "JSON-lines file of prompts (default: the held-out ones)", metavar="FILE"
    )
    context: int = option(512, "prompt tokens")
    new_tokens: int = option(96, "a row")
    length: int = option(4, "k, tokens drafted per round")
    repeats: int = option(3, "timed repeats")


def main(s: Settings) -> None:
    s.begin()
    with short_errors():
        model, tokenizer = load(s.target, s.precision, s.place)
        small, own = load(s.draft, s.precision, model.device)
    for m in (model, small):  # both engines decode the full budget
        m.generation_config.eos_token_id = None
        m.generation_config.pad_token_id = 0
    target = sd.HFModel(model, tokenizer)
    other = not share_ids(own, tokenizer)
    draft = sd.HFModel(small, own if other else tokenizer)
    with short_errors():
        every = pieces(entries_from(s.prompts), tokenizer, s.context, 1)
    kinds = len({entry.category for entry in every}) if s.prompts else 1
    wanted = max(4, kinds)
    used = (by_turns(every) if s.prompts else every)[: max(*s.batches, wanted)]
    ids = [list(entry.given) for entry in used]
    if len(ids) < max(s.batches):
        raise SystemExit(
            f"only {len(ids)} prompts have {s.context} tokens: choose a smaller --context or --batches"
        )

    cases = []
    # With two tokenizers, transformers changes an assistant when it first samples, and then takes no other one with this tokenizer.
    assistants = [deepcopy(small) for _ in ("greedy", "sampled")]
    bare: dict[tuple[int, float], list[Forwards]] = {}
    rounds = {b: bare_round(target, draft, b, s.context + s.new_tokens // 2, s.length) for b in s.batches}
    for temperature in s.temperatures:
        for batch in s.batches:
            some = ids[: max(batch, wanted - wanted % batch)]  # whole batches
            drafting = {"vanilla": draft}
            if other:
                by_text = sd.drafts.TextMatch(draft, tokenizer)
                drafting = {"text": by_text, "vanilla": sd.drafts.Translated(draft, tokenizer)}
            mine = ours(s, target, drafting, some, batch, temperature)
            found = bare[batch, temperature] = []
            mine[-1] = replace(mine[-1], run=partial(beside, mine[-1].run, rounds[batch], found))
            both = {"tokenizer": tokenizer, "assistant_tokenizer": own} if other else {}
            cases += mine + theirs(s, model, assistants[temperature > 0], both, some, batch, temperature)
    interleave(cases, s.repeats, progress)
    progress()

    rows = []
    for case in cases:
        plain_case = find(cases, case.engine, "plain", case)
        share = steady = None
        forwards = bare[case.batch, case.temperature]
        if case.engine == "specdec" and case.method == "vanilla" and case.tau:
            share, steady = shares(case, forwards)
        greedy = find(cases, "specdec", "plain", case)
        same = None if case.temperature else all(s.ids == greedy.samples[0].ids for s in case.samples)
        row = {**case.row(plain_case, share), "share_while_full": steady, "same_ids_as_plain": same}
        rows.append({**row, **profile(case, forwards)})
    shown = ("engine", "method", "k", "batch", "temperature", "tau", "tokens_per_second", "ratio_to_plain")
    print(table(rows, (*shown, "share_of_ideal", "share_while_full", "peak_bytes", "same_ids_as_plain")))
    print("\nmilliseconds of a round while all rows are active, beside bare forwards:")
    parts = [r for r in rows if r["method"] in ("plain", "vanilla") and r.get("draft_ms") is not None]
    print(table(parts, ("method", "batch", "temperature", *STAGES, "bare_draft_ms", "bare_target_ms")))
    print("\nbare forwards, milliseconds (batch, temperature: plain, verify, k draft steps):")
    for (batch, temperature), some in bare.items():
        plain, drafting, verify = (1e3 * median(times) for times in zip(*some))
        print(f"  {batch:>3}, {temperature:g}: {plain:.2f}, {verify:.2f}, {drafting:.2f}")
    for temperature in s.temperatures:
        print(f"\ntemperature {temperature:g}:")
        for batch in s.batches:
            ref = Case("", "", batch, 0, temperature, lambda: None)  # type: ignore[arg-type, return-value]
            mine = find(cases, "specdec", "vanilla", ref).speed
            assisted = max(c.speed for c in cases if c.method == "assisted" and match(c, ref))
            plain_speed = find(cases, "transformers", "plain", ref).speed
            print(
                f"  batch {batch:>2}: vanilla is {mine / assisted:.2f} x the faster assisted generation, "
                f"{mine / plain_speed:.2f} x plain generate"
            )
    if kinds > 1:
        parts = by_category(cases, [entry.category for entry in used])
        rows += parts
        print("\nby category:")
        shown = ("engine", "method", "k", "batch", "temperature", "category", "prompts")
        print(table(parts, (*shown, "tau", "tokens_per_second")))
    s.save(rows)


STAGES = ("draft_ms", "target_ms", "verify_ms", "other_ms")


def beside(run: Callable[[], Sample], forwards: Callable[[], Forwards], found: list[Forwards]) -> Sample:
    """A run, after which the bare forwards are timed into ``found``."""
    sample = run()
    found.append(forwards())
    return sample


def shares(case: Case, forwards: list[Forwards]) -> tuple[float, float | None]:
    """The share of the ideal speed, and that of the rounds in which all rows are active: medians over repeats, each within one repeat."""
    whole, full = [], []
    for sample, bare in zip(case.samples, forwards, strict=True):
        ideal = bare.draft + bare.verify  # seconds of a round
        assert sample.tau is not None
        whole.append(sample.speed * ideal / (sample.tau * case.batch))
        seconds, _, rows = sample.full  # rows times rounds
        if seconds:
            full.append(ideal * rows / case.batch / seconds)
    return median(whole), median(full) if full else None


def profile(case: Case, forwards: list[Forwards]) -> dict[str, float | None]:
    """Mean milliseconds of a round by stage, and of the bare forwards in it."""
    stages = [s.stages for s in case.samples if s.stages]
    out: dict[str, float | None] = dict.fromkeys((*STAGES, "bare_draft_ms", "bare_target_ms"))
    for name in STAGES if stages else ():
        out[name] = median(1e3 * s[name[:-3]] / s["rounds"] for s in stages)
    if stages and case.method in ("plain", "vanilla"):
        plain, drafting, verify = (1e3 * median(times) for times in zip(*forwards))
        drafts = case.method == "vanilla"
        out |= {"bare_draft_ms": drafting * drafts, "bare_target_ms": verify if drafts else plain}
    return out


def ours(
    s: Settings, target: Any, drafting: dict[str, Any], some: list, batch: int, temperature: float
) -> list[Case]:
    """``drafting``: drafts by method; bare forwards follow the last."""
    base = sd.decoder(target).sampling(temperature=temperature)
    decoders = {
        "plain": base.build(),
        "ngram": base.draft(sd.drafts.NGram(), length=s.length).build(),
        **{method: base.draft(draft, length=s.length).build() for method, draft in drafting.items()},
    }
    runs = {method: partial(decode, d, some, batch, s.new_tokens, s.seed) for method, d in decoders.items()}
    k = {method: None if method == "plain" else s.length for method in runs}
    return [Case("specdec", m, batch, s.context, temperature, run, k[m]) for m, run in runs.items()]


def theirs(
    s: Settings, model: Any, small: Any, both: dict[str, Any], some: list, batch: int, temperature: float
) -> list[Case]:
    """``both``: the tokenizers, where the draft has another one."""
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )

    def constant() -> Any:
        return schedule(small, s.length, "constant")

    variants: list[tuple[str, int | str | None, dict[str, Any], Callable[[], Any]]] = [
        ("plain", None, {}, contextlib.nullcontext),
        ("assisted", "default", {"assistant_model": small, **both}, contextlib.nullcontext),
        ("assisted", s.length, {"assistant_model": small, **both}, constant),
        ("prompt_lookup", s.length, {"prompt_lookup_num_tokens": s.length}, contextlib.nullcontext),
    ]
    cases = []
    for method, k, options, context in variants:
        run = partial(
            generate, model, some, batch if method == "plain" else 1, s, {**sampling, **options}, context
        )
        cases.append(Case("transformers", method, batch, s.context, temperature, run, k))
    return cases


def generate(
    model: Any, some: list, rows: int, s: Settings, options: dict[str, Any], context: Callable[[], Any]
) -> Sample:
    """transformers' ``generate``, timed by a stopping criterion that waits for the device and reads the clock."""
    tokens, seconds, ids, each = 0, 0.0, [], list[Each]()
    rounds = 0
    plain = not ({"assistant_model", "prompt_lookup_num_tokens"} & options.keys())
    torch.manual_seed(s.seed)
    for i in range(0, len(some), rows):
        batch = torch.tensor(some[i : i + rows], device=model.device)
        marks: list[tuple[int, float]] = []

        def look(input_ids: torch.Tensor, scores: Any, marks: list = marks, **_: Any) -> torch.Tensor:
            sync()
            marks.append((input_ids.shape[1], perf_counter()))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        with context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=s.new_tokens,
                stopping_criteria=[look],
                **options,
            )
        (first, start), (last, end) = marks[0], marks[-1]
        tokens += (last - first) * len(batch)
        seconds += end - start
        rounds += len(marks) - 1
        ids += out[:, s.context :].tolist()
        alone = end - start if rows == 1 else None
        each += [Each(last - first, last - first if plain else len(marks) - 1, last - first, alone)] * len(
            batch
        )
    return Sample(tokens, seconds, ids, 1.0 if plain else tokens / rounds, each=each)


@contextlib.contextmanager
def schedule(small: Any, count: int, kind: str) -> Any:
    """Make the assistant draft ``count`` tokens every round, and restore its settings afterwards."""
    config = small.generation_config
    kept = {name: getattr(config, name, None) for name in _ASSISTANT}
    try:
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = count, kind
        config.assistant_confidence_threshold = 0.0
        yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)


_ASSISTANT = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def match(case: Case, like: Case) -> bool:
    return (case.batch, case.temperature) == (like.batch, like.temperature)


def find(cases: list[Case], engine: str, method: str, like: Case) -> Case:
    return next(c for c in cases if (c.engine, c.method) == (engine, method) and match(c, like))


if __name__ == "__main__":
    main(parse(Settings, __doc__))
