"""Recording a target: texts sampled from it after prompts, the distribution at every position, and activations where asked."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from specdec.arguments import whole
from specdec.builder import decoder
from specdec.capabilities import DraftInfo, ModelInfo
from specdec.data.tokens import write
from specdec.drafts import NoDraft
from specdec.drafts.coerce import ModelLike, as_model
from specdec.lab.prompt_file import Entry
from specdec.lab.traces import FORMAT, Text, Trace, differing, digest, identity, plain_sampling, vocabulary
from specdec.protocols import LanguageModel
from specdec.sampling import Sampling
from specdec.types import Round

Number = tuple[int, int]  # of a prompt, and of a turn


def record(
    target: ModelLike,
    prompts: Sequence[str | Sequence[int] | Entry],
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
        target: as for ``specdec.decoder``. prompts: texts, rows of ids, or entries with categories and sources (``prompt_file``); each turn of
            an entry becomes one text, after the target's own answers to the turns before.
        new_tokens: positions of each text at which a round may start. k: the longest block that can be replayed; as many more tokens
            are recorded. A text ends early at an end token.
        sampling: how tokens are drawn; default: at temperature 1.
        taps: layers whose activations are stored, at 4 bytes a number, for drafts that read them.
        keep: how many of the largest probabilities to store at each position; default: all, or 1024 of a vocabulary above 8192.
        eos_token_id, batch, seed: as for ``Decoder.generate``; every text has a seed of its own, which does not depend on the batch.
    Raises:
        ValueError: there are no prompts, or a prompt is empty or too long, or the folder holds a trace of another target, tokenizer or
            settings; the message names the prompt or the setting.
    """
    model = as_model(target, "target")
    for name, value in {"new_tokens": new_tokens, "k": k, "batch": batch}.items():
        whole(name, value)
    entries = [_entry(i, p) for i, p in enumerate(prompts)]
    if not entries:
        raise ValueError("prompts is empty: give at least one prompt")
    info = ModelInfo.of(model)
    ends = info.eos_token_ids if eos_token_id is None else np.atleast_1d(eos_token_id).tolist()
    kept = (model.vocab_size if model.vocab_size <= 8192 else 1024) if keep is None else keep
    if not 1 <= kept <= model.vocab_size:
        raise ValueError(f"keep is {keep}: give 1 to {model.vocab_size}, the size of the vocabulary")
    how = _How(model, sampling or Sampling(), new_tokens, k, tuple(taps), kept, tuple(ends), seed)
    state = PartialState(cpu=info.device is None or info.device.type == "cpu")
    path = Path(folder)
    ids = [entry if isinstance(entry, list) else entry.ids(info.tokenizer) for entry in entries]
    for i, row in enumerate(ids):
        how.check(_name(entries[i], i), row)
    with state.main_process_first():
        _begin(path, how, info.tokenizer)
    trace = Trace(path)
    for text in trace.texts:
        number, turn = text.number
        if turn == 0 and number < len(ids) and text.ids[: text.prompt] != ids[number]:
            raise ValueError(
                f"prompt {number} is another one than in the trace in {path}: record these prompts in another folder"
            )
    held = {text.number: text for text in trace.texts}
    state.wait_for_everyone()
    mine = range(state.process_index, len(entries), state.num_processes)
    part = path / f"part-{len(trace.parts) + state.process_index:03d}"
    work = _work(how, entries, ids, mine, held, info.tokenizer, batch)
    total = sum(len(e.turns) if isinstance(e, Entry) else 1 for e in (entries[i] for i in mine))
    with tqdm(
        total=total, initial=total - _missing(entries, mine, held), unit="text", disable=not progress
    ) as bar:
        for texts, arrays in work:
            _append(part, texts, arrays)
            bar.update(len(texts))
    state.wait_for_everyone()
    return Trace(path)


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

    def check(self, name: str, ids: Sequence[int]) -> None:
        """Raise ValueError for a prompt that is empty or leaves no room for the text."""
        limit, more = ModelInfo.of(self.target).max_positions, 1 + self.new_tokens + self.k
        if not len(ids):
            raise ValueError(f"{name} is empty: give at least one token")
        if limit is not None and len(ids) + more > limit:
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
                laws = torch.nn.functional.one_hot(round.target_argmax[:, 0], V).float().cpu()
            else:
                laws = round.probs[:, 0].float().cpu()
            drawn = laws.gather(1, round.verdict.tokens[:, :1])[:, 0]
            top = laws.topk(self.kept) if self.kept < laws.shape[1] else None
            for b, request in enumerate(round.context.request.tolist()):
                to = seen[request]
                to["own"].append(drawn[b])
                to["probs"].append(laws[b] if top is None else top.values[b])
                if top is not None:
                    to["ids"].append(top.indices[b].int())
                    to["rest"].append((1 - top.values[b].double().sum()).clamp(min=0).float())
            if round.scores.fed is not None:
                fed = round.scores.fed
                layers = torch.stack([fed.layers[layer].float().cpu() for layer in self.taps], 1)
                for row in fed.row.unique().tolist():  # positions come in order
                    seen[int(round.context.request[row])]["activations"].append(layers[fed.row == row])

        made = (
            decoder(self.target)
            .sampling(self.sampling)
            .draft(_Taps(self.taps), length=1)
            .build()
            .generate(rows, 1 + self.new_tokens + self.k, seed=seeds, eos_token_id=self.ends, on_round=look)
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


def _entry(number: int, prompt: Any) -> Entry | list[int]:
    if isinstance(prompt, Entry):
        return prompt
    if isinstance(prompt, str):
        return Entry((prompt,), source=str(number), name=f"prompt {number}")
    return [int(i) for i in prompt]


def _name(entry: Entry | list[int], number: int) -> str:
    return (isinstance(entry, Entry) and entry.name) or f"prompt {number}"


def _begin(folder: Path, how: _How, tokenizer: Any) -> None:
    """Write the trace's settings, or check that they are those of the folder."""
    hidden = how.target.model.config.hidden_size if how.taps else 0  # type: ignore[attr-defined]
    settings = {
        "format": FORMAT, "target": identity(how.target), "tokenizer": vocabulary(tokenizer), **plain_sampling(how.sampling),
        "new_tokens": how.new_tokens, "k": how.k, "taps": list(how.taps), "kept": how.kept, "ends": list(how.ends), "seed": how.seed,
        "vocab_size": how.target.vocab_size, "hidden": hidden,
    }  # fmt: skip
    path = folder / "trace.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        meta = {**settings, "id": digest(settings)}
        write(path, lambda file: file.write(json.dumps(meta, indent=1).encode()))
        return
    theirs = json.loads(path.read_text())
    other = differing(settings, theirs)
    if other:
        name = other[0]
        raise ValueError(
            f"folder {folder} holds a trace with {name} {theirs.get(name)!r}, not {settings[name]!r}: use another folder"
        )


def _missing(entries: Sequence[Any], mine: range, held: dict[Number, Text]) -> int:
    turns = [(i, t) for i in mine for t in range(len(getattr(entries[i], "turns", (0,))))]
    return sum(number not in held for number in turns)


def _work(
    how: _How,
    entries: Sequence[Entry | list[int]],
    ids: Sequence[list[int]],
    mine: range,
    held: dict[Number, Text],
    tokenizer: Any,
    batch: int,
) -> Iterator[tuple[list[Text], list[dict[str, Tensor]]]]:
    """Batches of new texts and their arrays, first turns first."""
    turns = {i: len(e.turns) if isinstance(e, Entry) else 1 for i, e in ((i, entries[i]) for i in mine)}
    answers: dict[int, list[str]] = {i: [] for i in mine}
    for turn in range(max(turns.values(), default=0)):
        here = [i for i in mine if turn < turns[i]]
        new = [i for i in here if (i, turn) not in held]
        rows = {}
        for i in new:
            entry = entries[i]
            rows[i] = entry.ids(tokenizer, answers[i]) if turn and isinstance(entry, Entry) else ids[i]
            how.check(f"{_name(entry, i)}, turn {turn + 1}", rows[i])
        for start in range(0, len(new), batch):
            some = new[start : start + batch]
            made, arrays = how.texts([rows[i] for i in some], [how.seed + 1000 * i + turn for i in some])
            texts = []
            for i, more in zip(some, made):
                entry, room = entries[i], 1 + how.new_tokens + how.k
                category, source = (
                    (entry.category, entry.source) if isinstance(entry, Entry) else ("all", str(i))
                )
                ended = len(more) < room
                rounds = len(more) - 1 if ended else how.new_tokens
                texts.append(
                    Text((i, turn), rows[i] + more, len(rows[i]), rounds, ended, category, source or str(i))
                )
                held[i, turn] = texts[-1]
            yield texts, arrays
        for i in here:
            text = held[i, turn]
            if turn + 1 < turns[i]:
                answers[i].append(tokenizer.decode(text.ids[text.prompt :], skip_special_tokens=True))


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
