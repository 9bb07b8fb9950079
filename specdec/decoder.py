"""The composed decoder: prompts in, texts, ids and statistics out. Made by ``builder.decoder(target)...build()``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Never

import torch

from specdec.arguments import at_least, function
from specdec.arm_policy import ArmAssignment
from specdec.capabilities import DraftPart, ModelInfo
from specdec.composition import Composition
from specdec.custom_generate import CustomGenerate, Streamer
from specdec.executors.contract import Checks, Executor
from specdec.executors.pipelined import Pipelined
from specdec.executors.serial import Serial
from specdec.generation import Generation
from specdec.kernels.device import own_precision
from specdec.models.hf import HFModel
from specdec.models.own_cache import OwnCache
from specdec.per_request import Failures, PerRequest
from specdec.prompts import Prompts, asked, batches, check_settings, prepared, rows_of, stop_rules
from specdec.protocols import Draft
from specdec.rng import Philox, Rng, seeds
from specdec.sampling import Sampling
from specdec.saved import save
from specdec.serving.arrivals import Admission, InOrder
from specdec.serving.requests import Finished, Request
from specdec.serving.server import Server
from specdec.serving.settings import Settings, check
from specdec.stats import Record, Stats
from specdec.stop_rules import StopRules
from specdec.texts import GrowingText, StreamChunk, added
from specdec.types import Context, Round
from specdec.verifiers import FusedRejection, Rejection


@dataclass(frozen=True, eq=False)
class Decoder(Composition):
    """A composition and its executor; ``generate`` and ``stream`` may be called any number of times.

    Attributes:
        executor: in which order the parts run. unbound: the draft before it was bound to the target and the sampling.
        sampling_is_set: whether somebody chose the sampling; if not, it follows the settings of transformers' ``generate`` (``as_generate``).
            The others are those of ``Composition``.
    """

    executor: Executor = Serial()
    unbound: Draft[Any] | None = None
    sampling_is_set: bool = True

    def __repr__(self) -> str:
        draft = f"draft {self.drafting.info.name}"
        if self.selecting is not None:
            draft = f"pool of {', '.join(self.selecting.names)} chosen by {self.selecting.selector}"
        own = type(self.verifier).__repr__ is not object.__repr__  # a user's class may have none
        verifier = repr(self.verifier) if own else self.verifying.name
        return (
            f"Decoder({self.target!r}, {draft}, length {self.length}, {self.sampling}, "
            f"{verifier}{'' if self.verifying.lossless else ', lossy'}, {self.executor})"
        )

    def generate(
        self,
        prompts: Prompts | None = None,
        max_new_tokens: int | Sequence[int] = 128,
        *,
        seed: int | Sequence[int] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        stopping_criteria: Sequence[Callable[..., Any]] = (),
        batch_size: int | None = None,
        progress: bool = False,
        rng: Rng | None = None,
        on_round: Callable[[Round], None] | None = None,
        selection: ArmAssignment | None = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        **others: Never,
    ) -> Generation:
        """Decode a ragged batch, or many prompts in several batches.

        Args:
            prompts: one text, a list of texts, a chat (list of ``{"role", "content"}``), a list of chats, ids (a list or a
                tensor ``[L]``), rows of ids (lists of any lengths, or a tensor ``[B, L]``), or what a tokenizer returned.
            max_new_tokens: one budget, or one for each row.
            seed: one int (spread over the rows), or one seed for each row, with which a row's output does not depend on
                its batch. ``None`` draws from torch's default generator.
            eos_token_id: ids that end a row; ``None`` takes the target's, ``()`` none.
            stop_strings: end a row when its generated text contains one of them. The text keeps it, as in transformers.
            stopping_criteria: transformers ``StoppingCriteria``, evaluated after every token, also inside blocks.
            batch_size: decode at most so many rows at a time, in the order of the prompts; ``None``: all of them. The texts are those of one batch
                (with a selector that learns, their distribution is), and the selector goes on learning from batch to batch.
            progress: show a bar.
            rng: random decisions to use instead of ``seed`` (used by the certifier).
            on_round: called after every round. Its numbers begin again with each batch; ``round.context.request`` has the rows' numbers.
            selection: the state of a selector from ``begin``, which goes on learning from call to call.
            input_ids, attention_mask: in place of ``prompts``, as in ``generate(**tokenizer(texts, padding=True, return_tensors="pt"))``;
                ids whose mask is 0 are dropped.
            others: arguments of other libraries' ``generate``, which are refused with what to write instead.
        Returns:
            ``Generation`` with ids, texts and statistics.
        Raises:
            TypeError: an argument has the wrong type; the message names it.
            ValueError: the batch or a prompt is empty, a budget is below 1 or beyond the model's positions, ids are outside the vocabulary, or
                ``batch_size`` is below 1 or leaves a batch fewer rows than the executor needs.
            MemoryError: the budgets do not fit the memory.
        """
        rows = rows_of(self.target, asked(Decoder.generate, prompts, input_ids, attention_mask, others))
        if rng is not None and not all(hasattr(rng, name) for name in ("categorical", "accept", "select")):
            raise TypeError(
                f"rng is {rng!r}: give a number as seed=, or an object with the methods of specdec.rng.Rng"
            )
        if isinstance(rng, Philox) and len(rng.seed) != len(rows):
            raise ValueError(
                f"rng has seeds of {len(rng.seed)} rows and there are {len(rows)} prompts: give Philox(specdec.rng.seeds(0, {len(rows)})), or seed="
            )
        if not isinstance(progress, bool):
            raise TypeError(f"progress is {progress!r}: give True or False")
        function("on_round", on_round)
        size = self._batch_size(batch_size, len(rows))
        check_settings(self, len(rows))
        limits = stop_rules(self, rows, max_new_tokens, eos_token_id, stop_strings, stopping_criteria, size)
        if selection is None and size < len(rows):
            selection = self.begin(size)
        records: list[Record] = []
        so_far = Stats()  # for the bar
        ids: list[list[int]] = [[] for _ in rows]
        with _bar(progress, int(limits.max_length.sum()) - sum(map(len, rows))) as bar:
            for round in self._rounds(batches(self, rows, limits, size), limits, seed, rng, selection):
                records.append(Record.of(round))
                new = round.verdict.tokens.tolist()
                for b, (row, n) in enumerate(zip(records[-1].request, records[-1].committed)):
                    ids[row] += new[b][:n]
                if on_round is not None:
                    on_round(round)
                if bar is not None:
                    bar.update(sum(records[-1].committed))
                    so_far.count(records[-1])
                    if round.number % 16 == 0:
                        bar.set_postfix_str(so_far.shown_tau)
            if bar is not None:
                bar.set_postfix_str(so_far.shown_tau)
        tokenizer = ModelInfo.of(self.target).tokenizer
        return Generation(
            ids=ids,
            texts=[added(tokenizer, *row) for row in zip(rows, ids)] if tokenizer else None,
            prompt_ids=rows,
            finish=[limits.reasons[b] for b in range(len(rows))],
            stats=Stats.of(records),
            row_stats=Stats.by_request(records, len(rows)),
            arms=() if self.selecting is None else self.selecting.names,
        )

    def stream(
        self,
        prompts: Prompts | None = None,
        max_new_tokens: int | Sequence[int] = 128,
        *,
        seed: int | Sequence[int] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        stopping_criteria: Sequence[Callable[..., Any]] = (),
        on_round: Callable[[Round], None] | None = None,
        selection: ArmAssignment | None = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        **others: Never,
    ) -> Iterator[StreamChunk]:
        """As ``generate``, but yields a ``StreamChunk`` for each row as soon as a round has committed its tokens."""
        rows = rows_of(self.target, asked(Decoder.stream, prompts, input_ids, attention_mask, others))
        function("on_round", on_round)
        check_settings(self, len(rows))
        context, limits = prepared(self, rows, max_new_tokens, eos_token_id, stop_strings, stopping_criteria)
        decoder = self if selection is None else self._with(selection, context.batch)
        return self._chunks(rows, decoder._rounds(iter([context]), limits, seed), limits, on_round)

    def serve(
        self,
        requests: Iterable[Request],
        limit: int = 16,
        *,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        clock: Literal["wall", "rounds"] = "wall",
        capacity: int | None = None,
        on_round: Callable[[Round], None] | None = None,
        selection: ArmAssignment | None = None,
        errors: Literal["raise", "yield"] = "raise",
        admission: Admission | None = None,
        own_sampling: bool = False,
    ) -> Iterator[Finished]:
        """Decode a stream of requests; yields each as soon as it is finished.

        A request's output does not depend on the other requests in flight: it equals that of ``generate`` for this request alone with the
        same seed. In two cases only the distribution is the same, and the tokens may differ: under ``Rejection`` with a selector that learns, and under
        ``FusedRejection`` with ``own_sampling``.

        Args:
            requests: in the order of their arrival, taken one at a time, so that a generator may be endless. A generator yields ``None`` for "nothing
                now" and is asked again after the next round, or in a millisecond.
            limit: rows in flight at most; further requests wait.
            seed: for requests without one of their own: request i gets the seed of row i of a batch.
            eos_token_id, stop_strings: as for ``generate``.
            clock: the unit of arrivals and times: ``"wall"`` (seconds) or ``"rounds"`` (prefills take none; with k
                micro-batches of a pipeline in flight, the round of one is 1/k), which does not depend on the machine.
            capacity: make the target's cache at the start for ``limit`` rows of this many tokens (prompt, budget and a draft's block), and
                refuse longer requests; ``Ahead`` makes the draft's memory for as many rows after the first prefill. ``None``: caches grow as needed.
            on_round: called after every round; a request's prefill is round 0 of a batch of its own. ``round.context.request[b]`` is
                the request's number and ``round.verdict.tokens[b, :round.committed[b]]`` its new tokens, with which partial results can be shown.
            selection: as for ``generate``. errors: ``"raise"``, or ``"yield"``: a request that ``generate`` would refuse, or whose ``on_chunk``,
                ``cancelled`` or sampling (where ``own_sampling`` is set) raises, is yielded with ``finish="error"`` and its ``error``, and the others go on.
            admission: in which order requests that wait join (``serving.ByKind``); ``None``: first come, first served. The order changes no
                text (as above).
            own_sampling: requests may have a ``sampling`` of their own; those without have the decoder's. Refused with drafts in another process, and
                where the decoder has settings by number; under ``Ahead``, with a ``drafts.Tree``, and of requests with processors or a grammar. Drafts
                use it, too, except those with a ``Sampling`` of their own.
        Raises:
            ValueError: at once, for a part that cannot take in rows during a run, an executor other than ``Serial``, ``Ahead`` and
                ``Pipelined``, an invalid limit, clock, capacity, seed or stop, or a list of requests out of order; on its arrival, for
                a request out of order, one that ``generate`` would refuse, or one that needs more than ``capacity``.
        """
        settings = Settings(
            limit,
            seed,
            eos_token_id,
            stop_strings,
            clock,
            capacity,
            on_round,
            errors,
            InOrder() if admission is None else admission,
            own_sampling,
        )
        check(self, self.executor, settings)
        decoder = self._of_requests(None if errors == "raise" else {}) if own_sampling else self
        decoder = decoder if selection is None else decoder._with(selection, limit)
        return Server(decoder, self.executor, requests, settings).run()

    def _of_requests(self, failures: Failures | None) -> Decoder:
        """The same parts for a stream whose requests have samplings of their own."""
        if self.sampling.overridden:
            raise ValueError(
                f"own_sampling is set and the decoder's sampling is of class {type(self.sampling).__name__}, which would also change requests with a "
                "sampling of their own: give sd.Sampling(...)"
            )
        if self.sampling.own:
            raise ValueError(
                f"own_sampling is set and the decoder's sampling has a list of {' and of '.join(self.sampling.own)}: give single settings, for requests "
                "without a sampling"
            )
        own = {name: PerRequest(default, failures) for name, default in self.sampling.settings.items()}
        return self.with_sampling(replace(self.sampling, **own))  # type: ignore[arg-type]

    def with_sampling(self, sampling: Sampling) -> Decoder:
        """The same parts with another sampling.

        Raises:
            ValueError: a processor keeps state, the grammar is made for another tokenizer, or the executor cannot run it.
        """
        sampling.probe(self.target.vocab_size, self.device or "cpu", ModelInfo.of(self.target).tokenizer)
        part = DraftPart.of(self.draft if self.unbound is None else self.unbound)
        made = replace(self, sampling=sampling, draft=part.bound(self.target, sampling), sampling_is_set=True)
        if isinstance(self.executor, Checks):
            self.executor.check(made)
        return made

    def as_generate(self, streamer: Streamer | None = None) -> CustomGenerate:
        """For transformers: ``model.generate(**batch, custom_generate=decoder.as_generate())`` decodes with this decoder.

        A decoder that was built without ``sampling()`` follows the call's settings (greedy, unless it says ``do_sample=True``); settings that
        contradict the decoder's are refused. docs/howto/transformers.md says what is honoured.

        Args:
            streamer: a transformers streamer (an object with ``put`` and ``end``) for one row. It takes the prompt, then the tokens of each
                round as they are committed, and is ended, also by an error. Give it here only: ``generate(streamer=...)`` alone is never ended.
        Raises:
            TypeError: the target is no transformers model, or the streamer is none.
        """
        if not isinstance(self.target, (HFModel, OwnCache)):
            raise TypeError(
                f"the target is a {type(self.target).__name__}: custom_generate needs a transformers model"
            )
        return CustomGenerate(self, streamer)

    def __call__(
        self, model: Any, input_ids: Any, seed: int | Sequence[int] | None = None, **model_kwargs: Any
    ) -> Any:
        """As ``as_generate()``, so that transformers takes the decoder itself: ``model.generate(**batch, custom_generate=decoder)``."""
        return self.as_generate()(model, input_ids, seed=seed, **model_kwargs)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this decoder to a new folder: ``decoder.json`` with its parts and their settings, and its models. ``sd.load(folder)`` reads it.

        What a selector has learned is not saved.

        Raises:
            FileExistsError: there are files in the folder.
            TypeError: a part is not the library's, or a function; the message names it, and nothing is written.
        """
        usual = self.verifier in (Rejection(), FusedRejection())  # the loading device decides between these
        parts = {
            "target": self.target,
            "draft": self.draft if self.unbound is None else self.unbound,
            "length": self.length,
            "sampling": self.sampling if self.sampling_is_set else None,
            "verifier": None if usual else self.verifier,
            "executor": self.executor,
            "pool": self.selecting,
        }
        save(folder, parts)

    def _with(self, selection: ArmAssignment, batch: int) -> Decoder:
        if not isinstance(selection, ArmAssignment):
            raise TypeError(f"selection is a {type(selection).__name__}: give what decoder.begin(batch) made")
        ours, theirs = self.selecting, selection.how
        if ours is None or ours.arms != theirs.arms:
            raise ValueError(
                f"selection is of a pool of {', '.join(theirs.names)}, and this decoder's arms differ in number, length or capacity: give one "
                "that decoder.begin(batch) made"
            )
        return replace(self, learned=selection.again(batch))

    def _chunks(
        self,
        rows: list[list[int]],
        rounds: Iterator[Round],
        limits: StopRules,
        on_round: Callable[[Round], None] | None,
    ) -> Iterator[StreamChunk]:
        tokenizer = ModelInfo.of(self.target).tokenizer
        texts = None if tokenizer is None else [GrowingText(tokenizer, row) for row in rows]
        for round in rounds:
            if on_round is not None:
                on_round(round)
            for b, row in enumerate(round.context.request.tolist()):
                new = round.verdict.tokens[b, : int(round.committed[b])].tolist()
                finish = limits.reasons.get(row) if bool(round.finished[b]) else None
                text = None if texts is None else texts[row].more(new, last=finish is not None)
                yield StreamChunk(row, new, text, finish)

    def _batch_size(self, batch_size: int | None, rows: int) -> int:
        """The most rows of a batch; raises for a ``batch_size`` that is none, or that leaves micro-batches without rows."""
        if batch_size is None:
            return rows
        at_least(1, "batch_size", batch_size, "give the most rows of a batch", ", or None for all of them")
        fewest = rows // -(-rows // batch_size)
        if isinstance(self.executor, Pipelined) and fewest < rows and self.executor.count(fewest) > fewest:
            raise ValueError(
                f"batch_size is {batch_size}, which makes a batch of {fewest} of the {rows} rows, and the executor has "
                f"{self.executor.micro_batches} micro-batches, each of which needs a row: give a larger batch_size, or fewer micro-batches"
            )
        return batch_size

    def _rounds(
        self,
        contexts: Iterator[Context],
        limits: StopRules,
        seed: int | Sequence[int] | None,
        rng: Rng | None = None,
        selection: ArmAssignment | None = None,
    ) -> Iterator[Round]:
        """The rounds of one batch after another. A row's random numbers and rules are those of its request, whatever its batch."""
        rows = len(limits.max_length)
        keyed = Philox(seeds(seed, rows)) if rng is None else rng
        for context in contexts:
            decoder = self if selection is None else self._with(selection, context.batch)
            own = keyed if context.batch == rows else keyed.select(context.request)
            rounds = self.executor.run(decoder, context, own, limits)
            while True:
                # Off in the consumer's code, and when an unfinished run is closed.
                with torch.inference_mode(), own_precision():
                    round = next(rounds, None)
                if round is None:
                    break
                yield round


@contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Any]:
    """A progress bar over tokens, ``None`` where it is not wanted."""
    if not wanted:
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="tok", desc="decoding") as bar:
        yield bar
