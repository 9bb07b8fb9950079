"""``sd.auto``: which draft, how many tokens of it, or none, at which batch, measured on this machine, and a decoder that decides it as it goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from specdec.arguments import at_least, counts
from specdec.arm_policy import Arm
from specdec.builder import Builder
from specdec.capabilities import DraftInfo, DraftPart
from specdec.decoder import Decoder
from specdec.drafts.none import NoDraft
from specdec.executors.serial import Serial
from specdec.lab.auto_runs import DecoderRuns, Half, estimates
from specdec.lab.auto_seconds import measured_seconds, method_rows, round_table
from specdec.lab.clock import shuffled
from specdec.lab.console import Framed, progress, table
from specdec.parts import as_draft
from specdec.prompts import Prompts, rows_of
from specdec.selectors.fixed import Fixed
from specdec.selectors.kinds import ByTemperature, Kind
from specdec.selectors.planner import WAYS, Planner

COLUMNS = ("method", "batch", "tau", "milliseconds", "tokens_per_second", "ratio", "best")


@dataclass(frozen=True, eq=False)
class Auto(Framed):
    """What was measured, and a decoder that acts on it.

    Attributes:
        decoder: chooses for every row, again after 8 to 32 rounds and when a row ends or joins. rows: of every method that keeps one draft and length in the decoder's pool, of ``none`` there, and of plain
            decoding without a pool, at each batch.
        selector: the decoder's. builders: by method, of a decoder that uses no other.
    """

    decoder: Decoder
    rows: list[dict[str, Any]]
    selector: Planner
    builders: Mapping[str, Builder]

    @property
    def best(self) -> dict[int, str]:
        """Batch -> the fastest method, plain decoding included."""
        return {row["batch"]: row["method"] for row in self.rows if row["best"]}

    def fixed(self, batch: int) -> Decoder:
        """A decoder that always uses the method that was fastest at a batch. It has no pool, so it chooses nothing, and does less in a round.

        Raises:
            ValueError: the batch was not measured.
        """
        if batch not in self.best:
            raise ValueError(f"batch {batch} was not measured: give one of {', '.join(map(str, self.best))}")
        return self.builders[self.best[batch]].build()

    def why(self, selection: Any, row: int) -> str:
        """Why a row is decoded as it is now.

        Args:
            selection: from ``decoder.begin(batch)``, which was given to ``decoder.generate(..., selection=selection)``; in ``on_round`` of the same call it
                tells the choice for the next round. row: number of the prompt.
        """
        return self.selector.explain(selection.state, row, selection.how.names)

    def __repr__(self) -> str:
        answers = [self._answer(row) for row in self.rows if row["best"]]
        able = self.decoder.verifying
        note = (
            []
            if able.lossless
            else [f"verifier {able.name!r} is lossy, so texts with a draft are not the target's"]
        )
        return "\n".join([table(self.rows, COLUMNS), *answers, *note])

    def _answer(self, row: Mapping[str, Any]) -> str:
        if not row["k"]:
            pool = max(r["ratio"] for r in self.rows if r["batch"] == row["batch"] and r["method"] != "plain")
            said = f"do not speculate; the decoder's pool has at most {pool:.2f} x plain"
        elif row["ratio"] <= 1 + self.selector.margin:
            said = f"{row['method']} is {row['ratio']:.2f} x plain, too close to call: do not speculate unless a row accepts more"
        else:
            said = f"{row['method']}, {row['ratio']:.2f} x plain"
        return f"batch {row['batch']}: {said}"


def auto(
    base: Builder,
    drafts: Mapping[str, Any],
    prompts: Prompts,
    lengths: int | Sequence[int] | Mapping[str, int | Sequence[int]] = (1, 2, 4),
    batches: int | Sequence[int] = (1, 4, 16),
    new_tokens: int = 64,
    repeats: int = 3,
    margin: float = 0.02,
    seed: int = 0,
    kind: Kind | None = None,
    refilled: bool = False,
) -> Auto:
    """Measure drafts on prompts; ``.decoder`` of the result chooses a draft and a length, or none, for every row.

    Each draft decodes the prompts with each length, at each batch, in turn with plain decoding, and as a part of the pool that the decoder is; with its longest also half of
    each batch. That gives the seconds of its rounds and the chance that a draft's tokens are accepted. ``selectors.Planner`` decides by them, and by what the rows accept as they go on. The output has the target's
    distribution whatever is decided. Decisions follow from the measured table and the tokens, and from no clock, so a seed gives the same output again.

    Args:
        base: the target and sampling, ``sd.decoder(target).sampling(...)``. drafts: by name: whatever ``Builder.draft`` takes.
        prompts: like those to come, of any lengths; batches take them in turn. lengths: of chains to choose from, for all drafts or by name; those that a draft cannot have are left out. A
            draft of trees has its longest path, unless its lengths are given by name: then its trees are cut there.
        batches: rows decoded together; between them seconds are linear, and larger batches are decoded plainly. new_tokens: of each prompt, here; and expected of a request later.
        repeats: runs of each, after one that is not counted. margin: relative gain below which rows are decoded plainly. seed: of the random numbers.
        kind: given a ``Context`` of some rows, the kind of each, anything hashable. Chances are estimated for each kind apart. It is asked once for each request,
            after the prompt and the first new token. By default a request's kind is its temperature, if each has its own.
        refilled: whether a row that ends is replaced by the next request, as in ``serve``. Otherwise a batch gets smaller as its rows end, and a draft that
            some rows accept less than others gains less, because the slowest row decides when all are done.
    Raises:
        TypeError: base is no builder, or drafts no mapping of at least one. ValueError: a draft that is a pool or has sampling settings of its own for each
            request, no length that it can have, another executor, a number below 1, or more temperatures than rows to measure.
    """
    if not isinstance(base, Builder):
        raise TypeError(
            f"base is a {type(base).__name__}: give sd.decoder(target), with sampling() where wanted"
        )
    if not isinstance(drafts, Mapping) or not drafts:
        raise TypeError(f"drafts is {drafts!r}: give a mapping with at least one, {{'name': draft}}")
    plain = base.draft(NoDraft()).build()
    if not isinstance(plain.executor, Serial):
        raise ValueError(
            f"the executor is {plain.executor!r}: rounds are measured under Serial(), and a pool is decoded so"
        )
    at_least(1, "repeats", repeats, "give at least 1")
    at_least(2, "new_tokens", new_tokens, "give at least 2: the prefill gives the first")
    sizes, ids = tuple(sorted(set(counts("batches", batches)))), rows_of(plain.target, prompts)
    arms = _arms(plain, drafts, lengths)
    longest = max(arm.length or 0 for arm in arms.values())
    ways = prod(1 + n for n in Counter(_numbers(arms).values()).values())
    if ways > WAYS:
        raise ValueError(
            f"lengths: {len(arms)} pairs of a draft and a length can be combined in {ways} ways, and each choice tries all: give fewer "
            f"drafts or lengths, for at most {WAYS}"
        )
    at_least(longest + 2, "new_tokens", new_tokens, f"drafts of {longest} tokens need that many")
    one_of_each = [0]  # a request of each temperature
    if isinstance(temperatures := plain.sampling.temperature, tuple):
        kind = kind or ByTemperature(temperatures)
        one_of_each = [temperatures.index(each) for each in dict.fromkeys(temperatures)]
        if len(one_of_each) > repeats * sum(sizes):
            raise ValueError(
                f"there are {len(one_of_each)} temperatures and {repeats * sum(sizes)} rows are measured of each draft: raise repeats"
            )
    for name in plain.sampling.own.keys() - {"temperature"}:
        raise ValueError(
            f"base has a {name} for each request, and rows are measured in turn: give one for all"
        )
    pool = base.pool({"none": None, **arms}, Fixed(0), costs="wall").build()
    assert pool.selecting is not None
    runs = {"plain": DecoderRuns(plain, kind, 0)}
    halves = dict[str, DecoderRuns]()
    by_length = sorted(_numbers(arms).items(), key=lambda item: arms[item[0]].length or 0)
    longest_of = set({number: name for name, number in by_length}.values())  # the last of each draft
    for i, (name, length) in enumerate(zip(pool.selecting.names, pool.selecting.lengths)):
        fixed = replace(pool, selecting=replace(pool.selecting, selector=Fixed(i)))
        runs[name] = DecoderRuns(fixed, kind, length)
        if name in longest_of:
            half = replace(pool, selecting=replace(pool.selecting, selector=Half(i)))
            halves[name] = DecoderRuns(half, kind, length)
    done = 0
    for batch in sizes:
        for repeat in range(-1, repeats):
            turn = range(done, done + batch)
            beside = [(f"half {name}", run) for name, run in halves.items() if batch > 1]
            for name, run in shuffled([*runs.items(), *beside], repeat, batch):
                progress(f"{name}, batch {batch}, repeat {repeat + 1} of {repeats}")
                run.measure(
                    [ids[i % len(ids)] for i in turn],
                    [one_of_each[(i + i // len(ids)) % len(one_of_each)] for i in turn],
                    new_tokens if repeat >= 0 else min(new_tokens, 2 * longest + 4),
                    seed + 1000 * (repeat + 1),
                    repeat >= 0,
                )
            done += batch if repeat >= 0 else 0
    progress()
    return _decided(base, arms, runs, halves, sizes, ids, new_tokens, margin, kind, refilled)


def _arms(plain: Decoder, drafts: Mapping[str, Any], lengths: Any) -> dict[str, Arm]:
    """An arm for every draft and length, beside ``plain`` decoding."""
    made: dict[str, Arm] = {}
    if not isinstance(lengths, Mapping):
        counts("lengths", lengths)
    for name, one in drafts.items():
        draft = as_draft(one, f"draft {name!r}", plain.device, plain.target)
        info = DraftInfo.of(draft)
        if info.drafts:
            raise ValueError(f"draft {name!r} is a pool: give its drafts")
        if DraftPart.of(draft).by_request:
            raise ValueError(f"draft {name!r} has sampling settings for each request: give it one, or none")
        whole = info.longest if info.trees else None
        wanted = lengths.get(name, whole) if isinstance(lengths, Mapping) else whole or lengths
        if wanted is None:
            raise ValueError(f"lengths has none for draft {name!r}: give a number, or several")
        if info.longest is not None and min(counts("lengths", wanted)) > info.longest:
            raise ValueError(
                f"lengths for draft {name!r} are {wanted}: it drafts at most {info.longest} tokens"
            )
        for k in sorted(set(counts("lengths", wanted))):
            if info.longest is None or k <= info.longest:
                made[f"{name}/{k}"] = Arm(draft, k)
    return made


def _numbers(arms: Mapping[str, Arm]) -> dict[str, int]:
    """Of each arm, the number of its draft, as ``Planner`` counts them. A tree that is cut is another draft, since it may be wider, so each of its lengths has chances of its own."""
    keys = {
        name: (id(arm.draft), arm.length if DraftInfo.of(arm.draft).trees else None)
        for name, arm in arms.items()
    }
    order = list(dict.fromkeys(keys.values()))
    return {name: order.index(key) for name, key in keys.items()}


def _decided(
    base: Builder,
    arms: dict[str, Arm],
    runs: dict[str, DecoderRuns],
    halves: dict[str, DecoderRuns],
    sizes: tuple[int, ...],
    ids: list[list[int]],
    new_tokens: int,
    margin: float,
    kind: Kind | None,
    refilled: bool,
) -> Auto:
    """The decoder, and a row for each method and batch."""
    number = _numbers(arms)
    most = max(arm.length or 0 for arm in arms.values())
    rows = [(number[name], runs[name].rows) for name in arms]
    kinds, prior, spread = estimates(rows, len(set(number.values())), most)
    spent = measured_seconds(arms, number, runs, halves, sizes, max(ids, key=len), () if refilled else kinds)
    selector = Planner(
        ((-1, 0), *((number[name], arm.length or 0) for name, arm in arms.items())),
        round_table(spent, sizes),
        prior,
        spread,
        kinds,
        kind,
        margin=margin,
        horizon=new_tokens,
    )
    decoder = base.pool({"none": None, **arms}, selector).build()
    prompts = sum(map(len, ids)) / len(ids) / new_tokens  # tokens of a prompt for each new one
    alone = {name: base.draft(arm.draft, arm.length) for name, arm in arms.items()}
    measured = method_rows(arms, runs, sizes, spent, prompts)
    return Auto(decoder, measured, selector, {"plain": base.draft(NoDraft()), **alone})
