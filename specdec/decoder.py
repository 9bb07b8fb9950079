"""The composed decoder: prompts in, texts, ids and statistics out. Made by ``builder.decoder(target)...build()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.arm_policy import ArmAssignment, ArmPolicy
from specdec.executors.serial import Serial
from specdec.generation import Generation
from specdec.protocols import Draft, Executor, LanguageModel, Verifier
from specdec.rng import Philox, Rng, seeds
from specdec.sampling import Sampling
from specdec.serving.requests import Finished, Request
from specdec.serving.server import Server, Settings, check
from specdec.stats import Record, Stats
from specdec.stop_rules import StopRules
from specdec.types import Context, Round

Chat = Sequence[Mapping[str, Any]]  # messages {"role": ..., "content": ...}
Prompt = str | Chat | Sequence[int] | Tensor
Prompts = Prompt | Sequence[Prompt]


class StreamChunk(NamedTuple):
    """What one round added to one row: new ids, new text (complete characters only), and why the row ended, if it did."""

    row: int
    ids: list[int]
    text: str | None
    finish: str | None


@dataclass(frozen=True, eq=False)
class Decoder:
    """An immutable composition of parts; ``generate`` and ``stream`` may be called any number of times.

    Attributes:
        target, draft, verifier, executor: the parts. length: longest path drafted a round. sampling: how tokens are drawn. selecting: who chooses
            among the arms of a pool, if the draft is one.
    """

    target: LanguageModel
    draft: Draft[Any]
    length: int
    sampling: Sampling
    verifier: Verifier
    executor: Executor = Serial()
    selecting: ArmPolicy | None = None
    learned: ArmAssignment | None = None

    def begin(self, batch: int) -> ArmAssignment | None:
        """A run's choice among arms, if there is one: a new one, or the one that ``generate`` was given."""
        return self.learned or (None if self.selecting is None else self.selecting.begin(batch))

    def __repr__(self) -> str:
        draft = getattr(self.draft, "name", type(self.draft).__name__)
        return (
            f"Decoder({self.target!r}, draft {draft}, length {self.length}, {self.sampling}, "
            f"{self.verifier}, {self.executor})"
        )

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int | Sequence[int] = 128,
        *,
        seed: int | Sequence[int] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        stopping_criteria: Sequence[Callable[..., Any]] = (),
        progress: bool = False,
        rng: Rng | None = None,
        on_round: Callable[[Round], None] | None = None,
        selection: ArmAssignment | None = None,
    ) -> Generation:
        """Decode a ragged batch.

        Args:
            prompts: one text, a list of texts, a chat (list of ``{"role", "content"}``), a list of chats, ids (a list or a
                tensor ``[L]``) or rows of ids (lists of any lengths, or a tensor ``[B, L]``).
            max_new_tokens: one budget, or one for each row.
            seed: one int (spread over the rows), or one seed a row: then a row's output does not depend on the batch that
                it is in. ``None`` draws from torch's default generator.
            eos_token_id: ids that end a row; ``None`` takes the target's, ``()`` none.
            stop_strings: end a row when its generated text contains one of them. The text keeps it, as in transformers.
            stopping_criteria: transformers ``StoppingCriteria``, asked after every token, inside blocks too.
            progress: show a bar.
            rng: random decisions to use instead of ``seed`` (the certifier's door).
            on_round: called with every round as it happens.
            selection: what a selector has learned so far, from ``begin``: it goes on learning, from one call to the next.
        Returns:
            ``Generation`` with ids, texts and statistics.
        Raises:
            TypeError: an argument of another kind; the message names it.
            ValueError: an empty batch or prompt, a budget below 1 or beyond the model's positions, ids outside the vocabulary.
        """
        rows = self._rows(prompts)
        context, limits = self._prepare(rows, max_new_tokens, eos_token_id, stop_strings, stopping_criteria)
        records: list[Record] = []
        ids: list[list[int]] = [[] for _ in rows]
        with _bar(progress, int((limits.max_length - context.length).sum())) as bar:
            decoder = self if selection is None else self._with(selection, context.batch)
            for round in decoder._run(context, limits, seed, rng):
                records.append(Record.of(round))
                new = round.verdict.tokens.tolist()
                for b, (row, n) in enumerate(zip(records[-1].request, records[-1].kept)):
                    ids[row] += new[b][:n]
                if on_round is not None:
                    on_round(round)
                if bar is not None:
                    bar.update(sum(records[-1].kept))
                    if round.number % 16 == 0:
                        bar.set_postfix_str(f"tau {Stats.of(records).tau:.2f}")
        tokenizer = getattr(self.target, "tokenizer", None)
        return Generation(
            ids=ids,
            texts=[tokenizer.decode(i, skip_special_tokens=True) for i in ids] if tokenizer else None,
            prompt_ids=rows,
            finish=[limits.reasons[b] for b in range(len(rows))],
            stats=Stats.of(records),
            row_stats=Stats.by_request(records, len(rows)),
        )

    def stream(
        self,
        prompts: Prompts,
        max_new_tokens: int | Sequence[int] = 128,
        *,
        seed: int | Sequence[int] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        stopping_criteria: Sequence[Callable[..., Any]] = (),
        on_round: Callable[[Round], None] | None = None,
    ) -> Iterator[StreamChunk]:
        """As ``generate``, but yields a ``StreamChunk`` for each row as soon as a round has committed its tokens."""
        rows = self._rows(prompts)
        context, limits = self._prepare(rows, max_new_tokens, eos_token_id, stop_strings, stopping_criteria)
        return self._pieces(context, limits, seed, on_round)

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
    ) -> Iterator[Finished]:
        """Decode a stream of requests that come and go; yields each as soon as it is finished.

        What a request says does not depend on who else is in flight: it is what ``generate`` says to it alone with the same seed
        (under ``Rejection`` with a selector that learns, its law does not; the tokens may).

        Args:
            requests: in the order of their arrival, taken one at a time: a generator may go on for ever.
            limit: rows in flight at most; further requests wait.
            seed: of requests without one of their own: request i gets the seed of row i of a batch.
            eos_token_id, stop_strings: as for ``generate``.
            clock: what arrivals and times are measured in: ``"wall"`` (seconds) or ``"rounds"`` (prefills take none; with k
                lanes of a pipeline in flight, the round of one is 1/k), which does not depend on the machine.
            capacity: make the target's cache for ``limit`` rows of so many tokens (prompt, budget and a draft's block) at the start, and
                refuse longer requests; ``None``: caches grow as needed.
            on_round: called with every round; a request's prefill is round 0 of a batch of its own. ``round.context.request[b]`` is
                the request's number and ``round.verdict.tokens[b, :round.kept[b]]`` what it just got: how to show partial results.
        Raises:
            ValueError: at once, for a part that cannot take in rows on the way, an executor other than ``Serial`` and
                ``Pipelined``, or a limit, clock or capacity that makes no sense, and for a list of requests out
                of order; on its arrival, for a request out of order, one that ``generate`` would refuse or that needs
                more than ``capacity``.
        """
        settings = Settings(limit, seed, eos_token_id, stop_strings, clock, capacity, on_round)
        check(self, settings)
        return Server(self, requests, settings).run()

    def _with(self, selection: ArmAssignment, batch: int) -> Decoder:
        if not isinstance(selection, ArmAssignment):
            raise TypeError(f"selection is a {type(selection).__name__}: give what decoder.begin(batch) made")
        ours, theirs = self.selecting, selection.how
        parts = ("names", "lengths", "capacities")
        if ours is None or any(getattr(ours, part) != getattr(theirs, part) for part in parts):
            raise ValueError(
                f"selection is of a pool of {', '.join(theirs.names)}, and this decoder's arms differ in number, length or capacity: give one "
                "that decoder.begin(batch) made"
            )
        return replace(self, learned=selection.again(batch))

    def _pieces(
        self,
        context: Context,
        limits: StopRules,
        seed: int | Sequence[int] | None,
        on_round: Callable[[Round], None] | None,
    ) -> Iterator[StreamChunk]:
        tokenizer = getattr(self.target, "tokenizer", None)
        ids: dict[int, list[int]] = {b: [] for b in range(context.batch)}
        shown = dict.fromkeys(ids, 0)
        for round in self._run(context, limits, seed, None):
            if on_round is not None:
                on_round(round)
            for b, row in enumerate(round.context.request.tolist()):
                new = round.verdict.tokens[b, : int(round.kept[b])].tolist()
                ids[row] += new
                finish = limits.reasons.get(row) if bool(round.finished[b]) else None
                text = None
                if tokenizer is not None:
                    whole = tokenizer.decode(ids[row], skip_special_tokens=True)
                    if finish is None:
                        whole = whole.rstrip("\ufffd")  # a character whose last bytes are still to come
                    text, shown[row] = whole[shown[row] :], max(shown[row], len(whole))
                yield StreamChunk(row, new, text, finish)

    @torch.inference_mode()  # as a decorator it is off between the steps, in the consumer's code
    def _run(
        self, context: Context, limits: StopRules, seed: int | Sequence[int] | None, rng: Rng | None
    ) -> Iterator[Round]:
        keyed = Philox(seeds(seed, context.batch)) if rng is None else rng
        yield from self.executor.run(self, context, keyed, limits)

    def _rows(self, prompts: Prompts) -> list[list[int]]:
        """Any form of prompts as rows of ids."""
        if isinstance(prompts, Mapping):
            raise TypeError(
                f"prompts is a {type(prompts).__name__} with keys {sorted(prompts)}: pass its ids, without padding; one chat "
                "is a list of messages"
            )
        if hasattr(prompts, "tolist"):
            prompts = prompts.tolist()
        if isinstance(prompts, (bytes, bytearray)) or not hasattr(prompts, "__len__"):
            raise TypeError(
                f"prompts is a {type(prompts).__name__}: give a text, ids, or a list of prompts (of a generator, list(...); of bytes, "
                "their text)"
            )
        if not isinstance(prompts, str) and len(prompts) == 0:
            raise ValueError("prompts is empty: give at least one prompt")
        batch: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if isinstance(batch[0], (Integral, Mapping)):
            batch = [batch]  # one row of ids, or one chat
        rows = [self._ids(b, prompt) for b, prompt in enumerate(batch)]
        for b, row in enumerate(rows):
            if not row:
                raise ValueError(
                    f"prompt {b} is empty: give at least one token (the tokenizer's BOS token will do)"
                )
            if min(row) < 0 or max(row) >= self.target.vocab_size:
                raise ValueError(
                    f"prompt {b} has an id outside the target's vocabulary of {self.target.vocab_size}: was it made with "
                    "another tokenizer?"
                )
        return rows

    def _ids(self, b: int, prompt: Any) -> list[int]:
        tokenizer = getattr(self.target, "tokenizer", None)
        chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if isinstance(prompt, str) or chat:
            if tokenizer is None:
                raise ValueError(
                    f"prompt {b} is text but the target has no tokenizer: pass ids, or HFModel(model, tokenizer)"
                )
            if isinstance(prompt, str):
                return list(tokenizer(prompt)["input_ids"]) if prompt else []
            if getattr(tokenizer, "chat_template", None) is None:
                raise ValueError(
                    f"prompt {b} is a chat but the tokenizer has no chat template: pass a text, or set tokenizer.chat_template"
                )
            said = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
            return list(tokenizer(said, add_special_tokens=False)["input_ids"])  # the template has its own
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        listed = isinstance(ids, Sequence) and not isinstance(ids, (bytes, bytearray))
        if not listed or not all(isinstance(i, Integral) for i in ids):
            what = type(ids[0]).__name__ if listed else type(ids).__name__
            raise TypeError(f"prompt {b} holds {what}: give text, chat messages, or ids as integers")
        return [int(i) for i in ids]

    def _prepare(
        self,
        rows: list[list[int]],
        max_new_tokens: int | Sequence[int],
        eos_token_id: int | Sequence[int] | None,
        stop_strings: str | Sequence[str],
        criteria: Sequence[Callable[..., Any]],
    ) -> tuple[Context, StopRules]:
        budgets = _listed("max_new_tokens", max_new_tokens, len(rows))
        if len(budgets) != len(rows):
            raise ValueError(
                f"max_new_tokens has {len(budgets)} entries for {len(rows)} prompts: give one, or one for each"
            )
        if min(budgets) < 1:
            raise ValueError(
                f"max_new_tokens is {min(budgets)} for row {budgets.index(min(budgets))}: it must be >= 1"
            )
        for who, model in (
            ("target", self.target),
            *(("draft", getattr(d, "model", None)) for d in getattr(self.draft, "drafts", (self.draft,))),
        ):
            limit = getattr(model, "max_positions", None)
            for b, (row, budget) in enumerate(zip(rows, budgets)):
                if limit is not None and len(row) + budget > limit:
                    raise ValueError(
                        f"prompt {b} has {len(row)} tokens and max_new_tokens is {budget}: {len(row) + budget} positions, but "
                        f"the {who} has {limit}: shorten the prompt"
                        + (f", or ask for at most {limit - len(row)} new tokens" if len(row) < limit else "")
                    )
        eos = getattr(self.target, "eos_token_ids", ()) if eos_token_id is None else eos_token_id
        ends = _listed("eos_token_id", eos, 1)
        if eos_token_id is not None and not all(0 <= e < self.target.vocab_size for e in ends):
            raise ValueError(
                f"eos_token_id is {eos_token_id}: the target's vocabulary has ids 0 to {self.target.vocab_size - 1}"
            )
        several = isinstance(stop_strings, Iterable) and not isinstance(stop_strings, str)
        strings: tuple[Any, ...] = tuple(stop_strings) if several else (stop_strings,)
        if not all(isinstance(s, str) for s in strings):
            raise TypeError(f"stop_strings is {stop_strings!r}: give a text, or a list of texts")
        asked = tuple(criteria) if isinstance(criteria, Iterable) else (None,)
        if not all(callable(criterion) for criterion in asked):
            raise TypeError(
                f"stopping_criteria is {criteria!r}: give a list of functions (ids, scores) -> bool, also of one"
            )
        tokenizer = getattr(self.target, "tokenizer", None)
        if strings and tokenizer is None:
            raise ValueError("stop_strings needs a tokenizer: use HFModel(model, tokenizer), or eos_token_id")
        if any(not s for s in strings):
            raise ValueError("stop_strings contains an empty string: every text contains it; remove it")
        nodes = getattr(self.draft, "nodes", lambda length: length)(self.length)
        longest = max(len(row) + budget for row, budget in zip(rows, budgets))
        context = Context.of(rows, capacity=longest + nodes)
        limits = StopRules(
            max_length=context.length + torch.tensor(budgets),
            eos=tuple(ends),
            stop_strings=strings,
            criteria=asked,
            tokenizer=tokenizer,
        )
        return context, limits


def _listed(name: str, value: Any, rows: int) -> list[int]:
    """Whole numbers as a list: one number ``rows`` times, or a sequence as it is."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) or not isinstance(value, Iterable):
        whole(name, value, ", or a list of them")
        return [int(value)] * rows
    numbers = list(value)
    for number in numbers:
        whole(f"{name}, in a list,", number)
    return [int(number) for number in numbers]


class _bar:
    """A progress bar over tokens, or nothing."""

    def __init__(self, wanted: bool, total: int):
        self.wanted, self.total, self.bar = wanted, total, None

    def __enter__(self) -> Any:
        if self.wanted:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=self.total, unit="tok", desc="decoding")
        return self.bar

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
