"""One batch over several processes: ``accelerate launch`` starts them, each decodes a share, and all of them return the whole.

With the models on CPUs, ``accelerate launch --multi_gpu --num_processes 2 script.py`` starts two processes as well (``--cpu`` starts one, or
more through MPI), and ``torchrun --nproc_per_node 2 script.py`` does the same. Every row keeps the seed that it has in one process, and no
draw depends on batch mates, so that the texts are those of one process.

A target and drafts on different devices of *one* process need nothing from here: load each with accelerate's ``device_map``
(``HFModel.from_pretrained(..., device_map="cuda:1")``). Proposals and probabilities are moved to the target's device, activations to
the draft's; lengths, paths and committed tokens live on the host anyway. The moves are tested with a device that is pretended; more
than one real GPU, and processes with a GPU each, have not been run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from specdec.decoder import Decoder
from specdec.generation import Generation
from specdec.prompts import Prompts, prepared, rows_of
from specdec.rng import seeds
from specdec.stats import Stats


def generate(
    decoder: Decoder,
    prompts: Prompts,
    max_new_tokens: int | Sequence[int] = 128,
    *,
    seed: int | Sequence[int] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] = (),
    stopping_criteria: Sequence[Callable[..., Any]] = (),
) -> Generation:
    """As ``decoder.generate``, with the rows spread over the processes of ``accelerate launch``; alone it is ``decoder.generate``.

    Every process calls it with the same arguments and a decoder of its own. Rows are balanced by the lengths of their prompts; a
    process without a row waits for the others. Seeds are those of process 0 (which matters for ``seed=None``).

    A selector of arms learns in each process from that process's rows. Texts are then those of one process under ``Coupled`` and at
    temperature 0; under ``Rejection`` they have the same distribution. Capacities hold in each process.

    Returns:
        The same in every process, in the order of the prompts. ``stats`` are sums; its seconds are those of the process that took
        longest, so that tokens a second are those of all processes together. Waiting for the others is not counted.
    Raises:
        ValueError: as ``decoder.generate``, or the processes were given different prompts.
        RuntimeError: decoding failed in some process (raised in all of them, so that none waits for it).
    """
    settings: dict[str, Any] = {
        "eos_token_id": eos_token_id,
        "stop_strings": stop_strings,
        "stopping_criteria": stopping_criteria,
    }
    where = decoder.device
    state = PartialState(cpu=where is None or where.type == "cpu")  # or it looks for GPUs to talk through
    if state.num_processes == 1:
        return decoder.generate(prompts, max_new_tokens, seed=seed, **settings)
    rows, budgets, wrong = [], [], None
    try:
        rows = rows_of(decoder.target, prompts)
        context, limits = prepared(
            decoder, rows, max_new_tokens, eos_token_id, stop_strings, stopping_criteria
        )
        budgets = (limits.max_length - context.length).tolist()
    except (TypeError, ValueError) as error:
        wrong = error
    # What is wrong with the call in one process is known to all before any of them waits.
    heard: list[bool] = gather_object([wrong is not None])
    if wrong is not None:
        raise wrong
    if any(heard):
        raise ValueError(
            f"process {heard.index(True)} of {len(heard)} was given a call that it refused: give all processes the same"
        )
    _agree(rows, budgets)
    keys = broadcast_object_list([seeds(seed, len(rows)).tolist()])[0]
    mine = shares([len(row) for row in rows], state.num_processes)[state.process_index]
    out, failed = None, None
    if mine:
        part, own = [rows[b] for b in mine], [budgets[b] for b in mine]
        try:
            out = decoder.generate(part, own, seed=[keys[b] for b in mine], **settings)
        except Exception as error:
            failed = error
    told = None if failed is None else f"{type(failed).__name__}: {failed}"
    said: list[tuple[list[int], Generation | None, str | None]] = gather_object([(mine, out, told)])
    for process, (_, _, why) in enumerate(said):
        if why is not None:
            raise RuntimeError(f"process {process} of {len(said)} failed: {why}") from failed
    return joined([(mine, out) for mine, out, _ in said if out is not None])


def shares(lengths: Sequence[int], processes: int) -> list[list[int]]:
    """Which rows each process gets: the longest first, each to the process with the least so far. Ascending within a process."""
    load = [(0, 0)] * processes  # tokens, rows
    out: list[list[int]] = [[] for _ in range(processes)]
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        p = min(range(processes), key=lambda p: load[p])
        out[p].append(b)
        load[p] = (load[p][0] + lengths[b], load[p][1] + 1)
    return [sorted(rows) for rows in out]


def joined(parts: Sequence[tuple[Sequence[int], Generation]]) -> Generation:
    """One result from ``(rows, result)`` of each process, in the order of the rows."""

    def column(name: str) -> list[Any]:
        values = {b: value for rows, part in parts for b, value in zip(rows, vars(part)[name])}
        return [values[b] for b in range(len(values))]

    return Generation(
        ids=column("ids"),
        texts=None if any(part.texts is None for _, part in parts) else column("texts"),
        prompt_ids=column("prompt_ids"),
        finish=column("finish"),
        stats=total([part.stats for _, part in parts]),
        row_stats=column("row_stats"),
    )


def total(stats: Sequence[Stats]) -> Stats:
    """Counts of all; the seconds of the one that took longest."""
    out = Stats()
    for field in fields(Stats):
        if field.name != "seconds":
            values = [vars(one)[field.name] for one in stats]
            setattr(out, field.name, sum(values, start=type(values[0])()))
    out.seconds = max((one.seconds for one in stats), key=lambda seconds: sum(seconds.values())).copy()
    return out


def _agree(rows: list[list[int]], budgets: list[int]) -> None:
    """ValueError when the processes were asked for different things: their results would not fit together."""
    mine = hashlib.sha256(repr((rows, budgets)).encode()).hexdigest()
    if len(set(gather_object([mine]))) > 1:
        raise ValueError(
            "prompts or max_new_tokens differ between the processes: give every process all of them; they are spread here"
        )
