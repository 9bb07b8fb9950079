"""One batch over several processes: ``accelerate launch`` starts them, each decodes a share, and all of them return the whole result.

With the models on CPUs, ``accelerate launch --multi_gpu --num_processes 2 script.py`` starts two processes as well (``--cpu`` starts one, or
more through MPI), and ``torchrun --nproc_per_node 2 script.py`` does the same. Every row keeps the seed that it has in one process, and no
draw depends on other rows, so that the texts equal those of one process.

A target and drafts on different devices of *one* process do not need this module: load each with accelerate's ``device_map``
(``HFModel.from_pretrained(..., device_map="cuda:1")``). Proposals and probabilities are moved to the target's device, activations to
the draft's; lengths, paths and committed tokens are on the host anyway. The moves are tested with a simulated device; several real
GPUs, and processes with one GPU each, have not been tried.
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
from specdec.prompts import Prompts, rows_of, stop_rules
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
    batch_size: int | None = None,
    progress: bool = False,
) -> Generation:
    """As ``decoder.generate``, with the rows spread over the processes of ``accelerate launch``; in a single process it equals ``decoder.generate``.

    Every process calls it with the same arguments and its own decoder. Rows are balanced by the lengths of their prompts; a
    process without a row waits for the others. Seeds are those of process 0 (which matters for ``seed=None``).

    A selector of arms learns in each process from that process's rows. Under ``Coupled`` and at temperature 0, texts then equal those
    of one process; under ``Rejection`` they have the same distribution. Capacities hold in each process.

    Args:
        batch_size: the most rows that one process decodes at a time; ``None``: all of its share. progress: show a bar, which process 0 writes, of its own share.
            The others are as for ``decoder.generate``.
    Returns:
        the same result in every process, in the order of the prompts. ``stats`` has sums, and the seconds of the process that took
        longest, so that tokens a second are those of all processes together. Time spent waiting for the others is not counted.
    Raises:
        TypeError, ValueError, MemoryError: as ``decoder.generate``. ValueError: the processes were given different prompts.
        RuntimeError: decoding failed in some process (raised in all of them, so that none waits for it).
    """
    settings: dict[str, Any] = {
        "eos_token_id": eos_token_id,
        "stop_strings": stop_strings,
        "stopping_criteria": stopping_criteria,
    }
    where = decoder.device
    # With models on CPUs, accelerate would otherwise look for GPUs to communicate over.
    state = PartialState(cpu=where is None or where.type == "cpu")
    settings |= {"batch_size": batch_size, "progress": progress}
    if state.num_processes == 1:
        return decoder.generate(prompts, max_new_tokens, seed=seed, **settings)
    rows, budgets, drawn, mine, wrong = [], [], [], [], None
    try:
        rows = rows_of(decoder.target, prompts)
        if not isinstance(progress, bool):
            raise TypeError(f"progress is {progress!r}: give True or False")
        mine = shares([len(row) for row in rows], state.num_processes)[state.process_index]
        size = decoder._batch_size(batch_size, max(len(mine), 1))
        limits = stop_rules(
            decoder, rows, max_new_tokens, eos_token_id, stop_strings, stopping_criteria, size
        )
        for what, many in (
            ("sampling", decoder.sampling.by_request),
            ("the draft", decoder.drafting.by_request),
        ):
            if many:
                raise ValueError(
                    f"{what} has sampling settings for each request, and every process numbers its own: give one for all"
                )
        budgets = [end - len(row) for end, row in zip(limits.max_length.tolist(), rows)]
        drawn = seeds(seed, len(rows)).tolist()
    except Exception as error:
        wrong = error
    # An invalid call in one process is made known to all before any of them waits.
    heard: list[str | None] = gather_object([None if wrong is None else str(wrong)])
    if wrong is not None:
        raise wrong
    for process, why in enumerate(heard):
        if why is not None:
            raise ValueError(f"process {process} of {len(heard)} refused its arguments: {why}")
    _agree(rows, budgets)
    keys = broadcast_object_list([drawn])[0]
    settings["progress"] = progress and state.is_main_process
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
    """The rows of each process, ascending: the longest rows are assigned first, each to the process with the fewest tokens so far."""
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
        arms=parts[0][1].arms,
    )


def total(stats: Sequence[Stats]) -> Stats:
    """Counts of all processes; seconds of the one that took longest."""
    out = Stats()
    for field in fields(Stats):
        if field.name != "seconds":
            values = [vars(one)[field.name] for one in stats]
            flag = isinstance(values[0], bool)
            setattr(out, field.name, all(values) if flag else sum(values, start=type(values[0])()))
    out.seconds = max((one.seconds for one in stats), key=lambda seconds: sum(seconds.values())).copy()
    return out


def _agree(rows: list[list[int]], budgets: list[int]) -> None:
    """Raise ValueError when the processes have different arguments, since their results would not fit together."""
    mine = hashlib.sha256(repr((rows, budgets)).encode()).hexdigest()
    if len(set(gather_object([mine]))) > 1:
        raise ValueError(
            "prompts or max_new_tokens differ between the processes: give every process all of them; they are spread here"
        )
