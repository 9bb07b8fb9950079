"""Recording a target: texts sampled from it after prompts, the distribution at every position, and activations where asked."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from specdec.arguments import at_least
from specdec.builder import decoder
from specdec.capabilities import DraftInfo, ModelInfo
from specdec.data.tokens import write
from specdec.drafts import NoDraft
from specdec.drafts.coerce import ModelLike, as_model
from specdec.lab.prompt_file import Entry
from specdec.lab.traces import (
    FORMAT,
    Text,
    Trace,
    differing,
    digest,
    identity,
    plain_sampling,
    seal,
    settings_of,
    unseal,
    vocabulary,
)
from specdec.models.hf import HFModel
from specdec.prompts import Prompts, rows_of
from specdec.protocols import LanguageModel
from specdec.sampling import Sampling
from specdec.texts import added
from specdec.types import Round
from specdec.verifiers.rejection import Rejection

Number = tuple[int, int]  # of a prompt, and of a turn


def record(
    target: ModelLike,
    prompts: Prompts | Sequence[Entry],
    folder: str | Path,
    new_tokens: int = 64,
    k: int = 8,
    sampling: Sampling | None = None,
    taps: Sequence[int] = (),
    keep: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    batch: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> Trace:
    """Sample texts from a target and write them, with its distribution at every position, into a folder.

    A call for a folder with the same settings continues it: recorded prompts are skipped, and more prompts are added. Under
    ``accelerate launch`` the prompts are shared among the processes.

    Args:
        target: as for ``specdec.decoder``. prompts: as for ``generate`` (one text in a list), or entries with categories and sources
            (``prompt_file``); each turn of an entry becomes one text, after the target's own answers to the turns before.
        new_tokens: positions of each text at which a round may start. k: the longest block that can be replayed; as many more tokens
            are recorded. A text ends early at an end token.
        sampling: how tokens are drawn; default: at temperature 1.
        taps: layers whose activations are stored, at 4 bytes a number, for drafts that read them.
        keep: how many of the largest probabilities to store at each position; default: all, or 1024 of a vocabulary above 8192.
        eos_token_id, batch, seed: as for ``Decoder.generate``; every text has a seed of its own, which does not depend on the batch.
    Raises:
        ValueError: there are no prompts, or a prompt is empty or too long, or the folder holds a trace of another target, tokenizer, settings
            or prompts; the message names the prompt or the setting. TypeError: an argument has the wrong type.
    Returns:
        the trace of these prompts, with the categories and sources given now; prompts without a source are one source if they are equal.
    """
    model = as_model(target, "target")
    for name, value in {"new_tokens": new_tokens, "k": k, "batch": batch}.items():
        at_least(1, name, value, "give at least 1")
    if isinstance(prompts, str):
        raise TypeError("prompts is one text: give a list of prompts, also of one")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {sampling!r}: give a Sampling object")
    if sampling is not None and sampling.by_request:
        names = " and a ".join(sampling.own)
        raise ValueError(f"sampling has a {names} for each request: record a trace for each")
    if sampling is not None and sampling.grammar is not None:
        raise ValueError("sampling has a grammar, which a trace does not store: leave it out")
    entries = _entries(model, prompts)
    info = ModelInfo.of(model)
    ends = info.eos_token_ids if eos_token_id is None else np.atleast_1d(eos_token_id).tolist()
    kept = (model.vocab_size if model.vocab_size <= 8192 else 1024) if keep is None else keep
    at_least(0, "seed", seed, "give 0 or more")
    if not isinstance(taps, Sequence):
        raise TypeError(f"taps is {taps!r}: give a list of layers, such as [{taps!r}]")
    at_least(1, "keep", kept, f"give 1 to {model.vocab_size}, the size of the vocabulary")
    kept = min(kept, model.vocab_size)
    how = _How(model, sampling or Sampling(), new_tokens, k, tuple(taps), kept, tuple(ends), seed)
    state = PartialState(cpu=info.device is None or info.device.type == "cpu")
    path = Path(folder)
    ids = [entry.ids(info.tokenizer) for entry in entries]
    for entry, row in zip(entries, ids):
        how.check(entry.name, row)
    with state.main_process_first():
        _begin(path, how, info.tokenizer)
    trace = Trace(path)
    held = {text.number: text for text in trace.texts}
    state.wait_for_everyone()
    mine = range(state.process_index, len(entries), state.num_processes)
    numbers = [int(part.folder.name.removeprefix("part-")) for part in trace.parts]
    part = path / f"part-{max(numbers, default=-1) + 1 + state.process_index:03d}"
    work = _work(how, entries, ids, mine, held, info.tokenizer, batch)
    new = sum((i, turn) not in held for i in mine for turn in range(len(entries[i].turns) or 1))
    with tqdm(total=new, unit="text", disable=not (progress and new)) as bar:
        for texts, arrays in work:
            _append(part, texts, arrays)
            bar.update(len(texts))
    state.wait_for_everyone()
    if state.process_index == 0:
        seal(path)
    state.wait_for_everyone()
    wanted: dict[Number, tuple[str, str]] = {}
    for i, entry in enumerate(entries):
        source = entry.source or digest(ids[i])  # equal prompts are one source
        wanted |= {(i, turn): (entry.category, source) for turn in range(len(entry.turns) or 1)}
    return Trace(path, only=wanted)


@dataclass(frozen=True)
class _How:
    """What is recorded, and from which model."""

    target: LanguageModel
    sampling: Sampling
    new_tokens: int
    k: int
    taps: tuple[int, ...]
    kept: int
    ends: tuple[int, ...]
    seed: int

    @property
    def more(self) -> int:
        """Tokens of a continuation."""
        return 1 + self.new_tokens + self.k

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether the target has positions for a prompt and its continuation."""
        limit = ModelInfo.of(self.target).max_positions
        return limit is None or len(ids) + self.more <= limit

    def check(self, name: str, ids: Sequence[int]) -> None:
        """Raise ValueError for a prompt that is empty, leaves no room for the text, or has ids outside the vocabulary."""
        if not len(ids):
            raise ValueError(f"{name} is empty: give at least one token")
        if not 0 <= min(ids) <= max(ids) < self.target.vocab_size:
            raise ValueError(f"{name} has an id outside the target's vocabulary of {self.target.vocab_size}")
        limit, more = ModelInfo.of(self.target).max_positions, self.more
        if limit is not None and not self.fits(ids):
            raise ValueError(
                f"{name} has {len(ids)} tokens, and with {more} new ones they exceed the target's {limit} positions: shorten it to "
                f"{limit - more} tokens, or leave it out"
            )

    def texts(self, rows: list[list[int]], seeds: list[int]) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """Continuations of ``rows``, and the arrays of each."""
        seen: list[dict[str, list[Any]]] = [defaultdict(list) for _ in rows]

        def look(round: Round) -> None:
            if round.probs is None:
                assert round.target_argmax is not None
                V = self.target.vocab_size
                laws = torch.nn.functional.one_hot(round.target_argmax[:, 0], V).float()
            else:
                laws = round.probs[:, 0].float()
            drawn = laws.gather(1, round.verdict.tokens[:, :1].to(laws.device))[:, 0].cpu()
            ids = None
            if self.kept < laws.shape[1]:  # where the laws are, so that only what is kept is copied
                laws, ids = laws.topk(self.kept)
                ids = ids.int().cpu()
            laws = laws.cpu()
            for b, request in enumerate(round.context.request.tolist()):
                to = seen[request]
                to["own"].append(drawn[b])
                to["probs"].append(laws[b])
                if ids is not None:
                    to["ids"].append(ids[b])
                    to["rest"].append((1 - laws[b].double().sum()).clamp(min=0).float())
            if round.scores.fed is not None:
                fed = round.scores.fed
                layers = torch.stack([fed.layers[layer].float().cpu() for layer in self.taps], 1)
                for row in fed.row.unique().tolist():  # positions come in order
                    seen[int(round.context.request[row])]["activations"].append(layers[fed.row == row])

        made = (
            decoder(self.target)
            .sampling(self.sampling)
            .draft(_Taps(self.taps), length=1)
            .verifier(Rejection())  # on a GPU the default leaves no distributions
            .build()
            .generate(rows, self.more, seed=seeds, eos_token_id=self.ends, on_round=look)
        )
        arrays = []
        for one in seen:
            held = {name: torch.stack(part) for name, part in one.items() if name != "activations"}
            if self.taps:  # the last token is never fed
                fed = torch.cat(one["activations"])
                held["activations"] = torch.cat([fed, torch.zeros_like(fed[:1])])
            arrays.append(held)
        return made.ids, arrays


class _Taps(NoDraft):
    """No draft, which reads activations."""

    def __init__(self, taps: tuple[int, ...]):
        object.__setattr__(self, "info", DraftInfo("recorder", taps=taps))


def _entries(model: LanguageModel, prompts: Any) -> list[Entry]:
    """An entry for each prompt.

    Raises:
        TypeError, ValueError: prompts is none of those that ``generate`` takes, and no list with entries; the message names the prompt.
    """
    one = not isinstance(prompts, Sequence)  # a tensor, or what a tokenizer returned
    given: list[Any] = [] if one else list(prompts)
    for number, prompt in enumerate(given):
        if isinstance(prompt, Mapping) and not {"role", "content"} <= set(prompt):
            raise TypeError(
                f"prompt {number} is a {type(prompt).__name__} with keys {sorted(map(str, prompt))}: give its text, its ids, or "
                "lab.prompt_file.Entry((text,), category=..., source=...)"
            )
    plain = prompts if one else [[0] if isinstance(prompt, Entry) else prompt for prompt in given]
    made = []
    for number, row in enumerate(rows_of(model, plain)):
        name, entry = f"prompt {number}", given[number] if number < len(given) else None
        if isinstance(entry, Entry):
            made.append(entry if entry.name else replace(entry, name=name))
        else:
            made.append(Entry((), name=name, given=tuple(row)))
    return made


def _begin(folder: Path, how: _How, tokenizer: Any) -> None:
    """Write the trace's settings, or check that they are those of the folder."""
    if how.taps and not isinstance(how.target, HFModel):
        raise ValueError(
            f"taps is {how.taps}, and the target is a {type(how.target).__name__}: only an HFModel has layers to tap"
        )
    hidden = how.target.model.config.hidden_size if isinstance(how.target, HFModel) else 0
    settings = {
        "format": FORMAT, "target": identity(how.target), "tokenizer": vocabulary(tokenizer), **plain_sampling(how.sampling),
        "new_tokens": how.new_tokens, "k": how.k, "taps": list(how.taps), "kept": how.kept, "ends": list(how.ends), "seed": how.seed,
        "vocab_size": how.target.vocab_size, "hidden": hidden, "trees": how.target.supports_trees,
    }  # fmt: skip
    path = folder / "trace.json"
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"folder {folder} is a file: give a new folder, or one that record wrote")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        meta = {**settings, "id": digest(settings)}
        write(path, lambda file: file.write(json.dumps(meta, indent=1).encode()))
        return
    theirs = settings_of(path)
    other = differing(settings, theirs)
    if other:
        name = other[0]
        raise ValueError(
            f"folder {folder} holds a trace with {name} {theirs.get(name)!r}, not {settings[name]!r}: use another folder"
        )
    unseal(folder)  # what is missing is recorded again


def _work(
    how: _How,
    entries: Sequence[Entry],
    ids: Sequence[list[int]],
    mine: range,
    held: dict[Number, Text],
    tokenizer: Any,
    batch: int,
) -> Iterator[tuple[list[Text], list[dict[str, Tensor]]]]:
    """Batches of new texts and their arrays, first turns first."""
    answers: dict[int, list[str]] = {i: [] for i in mine}
    for turn in range(max((len(entries[i].turns) or 1 for i in mine), default=0)):
        here = [i for i in answers if turn < (len(entries[i].turns) or 1)]
        rows = {i: entries[i].ids(tokenizer, answers[i]) if turn else ids[i] for i in here}
        new = []
        for i in here:
            text = held.get((i, turn))
            if text is None:
                if not how.fits(rows[i]):  # only after long answers: first turns were checked
                    warnings.warn(
                        f"{entries[i].name}: turn {turn + 1} has {len(rows[i])} tokens, too many with the answers before it: it and the turns after "
                        "it are left out",
                        stacklevel=4,
                    )
                    del answers[i]
                    continue
                new.append(i)
            elif text.ids[: text.prompt] != rows[i]:
                raise ValueError(
                    f"{entries[i].name}{f', turn {turn + 1},' if turn else ''} is another one than in the trace: record these prompts in another "
                    "folder"
                )
        for start in range(0, len(new), batch):
            some = new[start : start + batch]
            made, arrays = how.texts([rows[i] for i in some], [how.seed + 1000 * i + turn for i in some])
            texts = []
            for i, more in zip(some, made):
                ended = len(more) < 1 + how.new_tokens + how.k
                rounds = len(more) - 1 if ended else how.new_tokens
                label = entries[i].category, entries[i].source
                texts.append(Text((i, turn), rows[i] + more, len(rows[i]), rounds, ended, *label))
                held[i, turn] = texts[-1]
            yield texts, arrays
        for i in here:
            if i in answers and turn + 1 < len(entries[i].turns):
                text = held[i, turn]
                answers[i].append(added(tokenizer, text.ids[: text.prompt], text.ids[text.prompt :]))


def _append(part: Path, texts: list[Text], arrays: list[dict[str, Tensor]]) -> None:
    """Write texts at the end of a part; its index comes last, so that it lists only texts whose arrays are complete."""
    part.mkdir(exist_ok=True)
    for name in arrays[0]:
        with open(part / f"{name}.bin", "ab") as file:
            for one in arrays:
                file.write(one[name].contiguous().numpy().tobytes())
    with open(part / "texts.jsonl", "a") as file:
        for text in texts:
            file.write(json.dumps(text._asdict()) + "\n")
