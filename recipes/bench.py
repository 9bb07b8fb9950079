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
from specdec.lab.prompt_file import Entry, by_turns, entries_from, pieces
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


@dataclass(frozen=True)
class Pair:
    """The target and the draft, and the prompts.

    Attributes:
        kinds: of prompts; 1 for those of the package. translated: whether the draft has another tokenizer than the target.
    """

    target: sd.HFModel
    draft: sd.HFModel
    entries: list[Entry]
    kinds: int
    translated: bool

    @property
    def least(self) -> int:
        """Prompts that each case decodes at least: one of each kind."""
        return max(4, self.kinds)

    @property
    def tokenizers(self) -> dict[str, Any]:
        """What transformers is given of a draft with another tokenizer."""
        both = {"tokenizer": self.target.tokenizer, "assistant_tokenizer": self.draft.tokenizer}
        return both if self.translated else {}

    @property
    def drafts(self) -> dict[str, Any]:
        """Drafts of this library by method; bare forwards follow the last."""
        if not self.translated:
            return {"vanilla": self.draft}
        tokenizer = self.target.tokenizer
        by_text = sd.drafts.TextMatch(self.draft, tokenizer)
        return {"text": by_text, "vanilla": sd.drafts.Translated(self.draft, tokenizer)}


Bare = dict[tuple[int, float], list[Forwards]]
"""By batch and temperature, of each repeat."""


def loaded(s: Settings) -> Pair:
    """The models and the first prompts, with categories in turn where there are any."""
    with short_errors():
        model, tokenizer = load(s.target, s.precision, s.place)
        small, own = load(s.draft, s.precision, model.device)
    for m in (model, small):  # both engines decode the full budget
        m.generation_config.eos_token_id = None
        m.generation_config.pad_token_id = 0
    with short_errors():
        every = pieces(entries_from(s.prompts), tokenizer, s.context, 1)
    kinds = len({entry.category for entry in every}) if s.prompts else 1
    used = (by_turns(every) if s.prompts else every)[: max(*s.batches, 4, kinds)]
    if len(used) < max(s.batches):
        raise SystemExit(
            f"only {len(used)} prompts have {s.context} tokens: choose a smaller --context or --batches"
        )
    other = not share_ids(own, tokenizer)
    return Pair(
        sd.HFModel(model, tokenizer), sd.HFModel(small, own if other else tokenizer), used, kinds, other
    )


def main(s: Settings) -> None:
    s.begin()
    pair = loaded(s)
    cases, bare = alternating(s, pair)
    rows = [row(case, cases, bare[case.batch, case.temperature]) for case in cases]
    shown(s, rows, cases, bare)
    if pair.kinds > 1:
        parts = by_category(cases, [entry.category for entry in pair.entries])
        rows += parts
        print("\nby category:")
        columns = ("engine", "method", "k", "batch", "temperature", "category", "prompts")
        print(table(parts, (*columns, "tau", "tokens_per_second")))
    s.save(rows)


def alternating(s: Settings, pair: Pair) -> tuple[list[Case], Bare]:
    """All cases of both engines, run in turn, and the bare forwards that were timed between them."""
    cases, bare = list[Case](), Bare()
    ids = [list(entry.given) for entry in pair.entries]
    # With two tokenizers, transformers changes an assistant when it first samples, and then takes no other one with this tokenizer.
    assistants = [deepcopy(pair.draft.model) for _ in ("greedy", "sampled")]
    half = s.context + s.new_tokens // 2
    rounds = {b: bare_round(pair.target, pair.draft, b, half, s.length) for b in s.batches}
    for temperature in s.temperatures:
        for batch in s.batches:
            some = ids[: max(batch, pair.least - pair.least % batch)]  # whole batches
            mine = ours(s, pair, some, batch, temperature)
            found = bare[batch, temperature] = []
            mine[-1] = replace(mine[-1], run=partial(beside, mine[-1].run, rounds[batch], found))
            cases += mine + theirs(s, pair, assistants[temperature > 0], some, batch, temperature)
    interleave(cases, s.repeats, progress)
    progress()
    return cases, bare


def row(case: Case, cases: list[Case], forwards: list[Forwards]) -> dict[str, Any]:
    """The report's row of a case."""
    share = steady = None
    if case.engine == "specdec" and case.method == "vanilla" and case.tau:
        share, steady = shares(case, forwards)
    greedy = find(cases, "specdec", "plain", case.batch, case.temperature)
    same = None if case.temperature else all(s.ids == greedy.samples[0].ids for s in case.samples)
    plain = find(cases, case.engine, "plain", case.batch, case.temperature)
    made = {**case.row(plain, share), "share_while_full": steady, "same_ids_as_plain": same}
    return {**made, **profile(case, forwards)}


def shown(s: Settings, rows: list[dict[str, Any]], cases: list[Case], bare: Bare) -> None:
    """Print the tables, and how much faster this library is."""
    columns = ("engine", "method", "k", "batch", "temperature", "tau", "tokens_per_second", "ratio_to_plain")
    print(table(rows, (*columns, "share_of_ideal", "share_while_full", "peak_bytes", "same_ids_as_plain")))
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
            at = (batch, temperature)
            mine = find(cases, "specdec", "vanilla", *at).speed
            plain = find(cases, "transformers", "plain", *at).speed
            assisted = max(
                c.speed for c in cases if c.method == "assisted" and (c.batch, c.temperature) == at
            )
            print(
                f"  batch {batch:>2}: vanilla is {mine / assisted:.2f} x the faster assisted generation, {mine / plain:.2f} x plain generate"
            )


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


def ours(s: Settings, pair: Pair, some: list, batch: int, temperature: float) -> list[Case]:
    """The cases of this library."""
    base = sd.decoder(pair.target).sampling(temperature=temperature)
    decoders = {
        "plain": base.build(),
        "ngram": base.draft(sd.drafts.NGram(), length=s.length).build(),
        **{method: base.draft(draft, length=s.length).build() for method, draft in pair.drafts.items()},
    }
    runs = {method: partial(decode, d, some, batch, s.new_tokens, s.seed) for method, d in decoders.items()}
    k = {method: None if method == "plain" else s.length for method in runs}
    return [Case("specdec", m, batch, s.context, temperature, run, k[m]) for m, run in runs.items()]


def theirs(s: Settings, pair: Pair, small: Any, some: list, batch: int, temperature: float) -> list[Case]:
    """The cases of transformers, with ``small`` as the assistant."""
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )

    def constant() -> Any:
        return schedule(small, s.length, "constant")

    variants: list[tuple[str, int | str | None, dict[str, Any], Callable[[], Any]]] = [
        ("plain", None, {}, contextlib.nullcontext),
        ("assisted", "default", {"assistant_model": small, **pair.tokenizers}, contextlib.nullcontext),
        ("assisted", s.length, {"assistant_model": small, **pair.tokenizers}, constant),
        ("prompt_lookup", s.length, {"prompt_lookup_num_tokens": s.length}, contextlib.nullcontext),
    ]
    cases = []
    for method, k, options, context in variants:
        run = partial(
            generate,
            pair.target.model,
            some,
            batch if method == "plain" else 1,
            s,
            {**sampling, **options},
            context,
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


def find(cases: list[Case], engine: str, method: str, batch: int, temperature: float) -> Case:
    wanted = (engine, method, batch, temperature)
    return next(c for c in cases if (c.engine, c.method, c.batch, c.temperature) == wanted)


if __name__ == "__main__":
    main(parse(Settings, __doc__))
