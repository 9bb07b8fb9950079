"""Replaying a draft on recorded texts: what it would have drafted from every position, without the noise of its draws.

The draft runs in the library's own rounds. Its draws are forced to follow the text, a verifier writes down the probability with which
each token would have been drawn, and commits one token, so that a block starts at every position. What a round does along a text is then
known exactly (``specdec.audit.tau``).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import at_least
from specdec.builder import decoder
from specdec.capabilities import DraftPart, ModelInfo
from specdec.composition import Composition
from specdec.data.tokens import write
from specdec.drafts.coerce import ModelLike, as_model
from specdec.executors import Serial
from specdec.lab.forced import Forced
from specdec.lab.recorded import Recorded
from specdec.lab.recorder import Recorder
from specdec.lab.replays import Replay, described
from specdec.lab.traces import Trace
from specdec.parts import DraftLike, as_draft
from specdec.protocols import LanguageModel
from specdec.rng import Philox, seeds
from specdec.sampling import Sampling
from specdec.stop_rules import StopRules
from specdec.types import Context

VERSION = 3  # of stored results
CHANCES = ("q", "accept", "high", "most", "entropy")


def replay(
    trace: Trace | str | Path,
    draft: DraftLike,
    k: int | None = None,
    target: ModelLike | None = None,
    sampling: Sampling | None = None,
    name: str | None = None,
    batch: int = 16,
    check: bool = True,
    cache: bool = True,
) -> Replay:
    """What a draft does along recorded texts, exactly.

    Exact are chains, and static trees whose siblings are drawn independently, without replacement (two of a node, or more with a small vocabulary), or
    chosen without randomness. The draft's distributions may depend on
    the text and on where the block started, and on nothing else: not on what was accepted or dropped before, nor on the target's scores.

    Args:
        trace: from ``lab.record``, or its folder. draft: as for ``Builder.draft``. k: the longest path of a block; default: the trace's.
        target: needed by drafts that read the target's cache or activations. It is not computed for a draft that reads only
            activations which ``record(taps=)`` stored.
        sampling: needed where the trace was recorded with processors. name: for tables; default: the draft's.
        batch: texts at a time. check: replay two texts again with other draws and other blocks, to find out whether the draft depends on
            what was accepted or dropped.
        cache: store the result in the trace's folder, and read it from there the next time; for this library's own drafts, whose settings
            and weights can be named. After a change of this library's code, pass ``False`` or remove the folder ``replays``.
    Raises:
        ValueError: the trace is of another target, tokenizer or sampling, or its blocks are shorter than ``k``; the draft needs ``target``, is a
            pool, or does not fit the target; it depends on more than the text; its trees are not static.
    """
    at_least(1, "batch", batch, "give at least 1")
    run = prepared(trace, draft, k, target, sampling)
    trace, k = run.trace, run.k
    shown = name or run.part.info.name
    path = _stored(trace, draft, run.sampling, k) if cache else None
    if path is not None and path.exists():
        with suppress(RuntimeError, EOFError, pickle.UnpicklingError):  # an unreadable file is made again
            return Replay(trace, shown, k, **torch.load(path, weights_only=True))
    texts = run.texts
    if check:
        run.check(texts[:2])
    C, n = len(trace), max(text.rounds for text in trace.texts)
    held: dict[str, Any] = {name: torch.zeros(C, n, k, dtype=torch.float64) for name in CHANCES}
    held |= {name: torch.zeros(C, n, dtype=torch.long) for name in ("size", "proposed")}
    chains = True
    for start in range(0, len(texts), batch):
        at = torch.tensor(texts[start : start + batch])
        made = run(at.tolist())
        for name, whole_of in held.items():
            part_of = vars(made)[name]
            whole_of[at, : part_of.shape[1]] = part_of
        chains &= made.chains
    held["chains"] = torch.tensor(chains)
    if path is not None:
        path.parent.mkdir(exist_ok=True)
        write(path, lambda file: torch.save(held, file))
    return Replay(trace, shown, k, **held)


def prepared(
    trace: Trace | str | Path,
    draft: DraftLike,
    k: int | None = None,
    target: ModelLike | None = None,
    sampling: Sampling | None = None,
    watch: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None,
) -> Run:
    """A draft that is ready to be replayed. Arguments and errors are those of ``replay``; ``watch`` is the recorder's."""
    trace = trace if isinstance(trace, Trace) else Trace(trace)
    if not any(text.rounds for text in trace.texts):
        raise ValueError(f"the trace in {trace.folder} has no texts with rounds: record prompts first")
    part, k = DraftPart.of(as_draft(draft, "draft")), trace.k if k is None else k
    at_least(1, "k", k, "give at least 1")
    if k > trace.k:
        raise ValueError(f"k is {k}, and the trace has blocks of at most {trace.k}: record with k={k}")
    how = trace.sampling(sampling)
    model = None if target is None else as_model(target, "target")
    _check_fit(trace, part, k, model)
    taken = part.follows is None and set(part.info.taps) <= set(trace.taps)
    stands_in = taken and (model is None or bool(part.info.taps))
    return Run(trace, part, how, k, model, stands_in, watch)


def _check_fit(trace: Trace, part: DraftPart, k: int, model: Any) -> None:
    """Raise ValueError for a draft that cannot be replayed on the trace."""
    info, name = part.info, f"draft {part.info.name!r}"
    if info.drafts:
        raise ValueError(f"{name} is a pool: replay its drafts one by one")
    if info.reads_logits:
        raise ValueError(
            f"{name} reads the target's logits, also those after rejected tokens, which a trace does not have: use lab.simulate"
        )
    if part.by_request:
        raise ValueError(
            f"{name} has sampling settings for each request, and texts are numbered from 0 in every batch: give it one for all"
        )
    if model is not None:
        trace.check(model)
        decoder(model).draft(part.draft, k).build()
    elif part.reads_target:
        raise ValueError(f"{name} reads the target: pass target=")
    if info.trees and not trace.meta["trees"]:
        raise ValueError(
            f"{name} proposes trees, and the trace's target does not support them: replay a chain"
        )
    mine = ModelInfo.of(info.model)
    trace.check_tokenizer(mine.tokenizer, name)
    known = mine.tokenizer is not None and trace.meta["tokenizer"] is not None
    if isinstance(info.model, LanguageModel) and not known and info.model.vocab_size != trace.vocab_size:
        raise ValueError(
            f"{name} has a vocabulary of {info.model.vocab_size} and the trace of {trace.vocab_size}, and without both tokenizers nothing shows that "
            "they pad the same one: give both models their tokenizers"
        )
    longest = max(len(text.ids) for text in trace.texts)
    if mine.max_positions is not None and longest > mine.max_positions:
        raise ValueError(
            f"{name} has {mine.max_positions} positions, and a text of the trace {longest}: record shorter prompts"
        )


@dataclass(frozen=True)
class Run:
    """Replays of one draft."""

    trace: Trace
    part: DraftPart
    sampling: Sampling
    k: int
    target: Any
    stands_in: bool
    watch: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None

    @property
    def texts(self) -> list[int]:
        """The texts that have rounds."""
        return [i for i, text in enumerate(self.trace.texts) if text.rounds]

    def __call__(self, texts: list[int], strays: bool = False) -> Recorder:
        """The notes on some texts."""
        trace, k = self.trace, self.k
        some = [trace.texts[i] for i in texts]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(t.ids) for t in some], batch_first=True)
        prompt = torch.tensor([t.prompt for t in some])
        stand_in = Recorded(trace, texts) if self.stands_in else None
        watch = None if strays else self.watch
        recorder = Recorder(trace, texts, ids, prompt, k, stand_in, strays, self.part.info.siblings, watch)
        target: Any = self.target if stand_in is None else stand_in
        draft = self.part.bound(self.target or target, self.sampling)
        how = self.sampling if stand_in is None else Sampling()  # of logits that are not read
        composition = Composition(target, draft, k, how, recorder)
        last = prompt + 1 + recorder.rounds + k
        context = Context.of([t.ids[: t.prompt] for t in some], int(last.max()) + composition.nodes)
        rng = Forced(ids, torch.arange(len(some)), Philox(seeds(0, len(some))), strays)
        with torch.inference_mode():
            for round in Serial().run(composition, context, rng, StopRules(max_length=last)):
                if round.number == int(recorder.rounds.max()):
                    break
        return recorder

    def check(self, texts: list[int]) -> None:
        """Raise ValueError if the draft depends on more than the text.

        In a second run its draws leave the text at varying depths, and some of its nodes are accepted. A token's probability, and whether it
        was proposed at all, may depend on the tokens before it in the text and on the block's start, not on anything that differs.
        """
        one, other = self(texts), self(texts, strays=True)
        starts = one.prompt[:, None] + 1 + torch.arange(one.q.shape[1])
        depth = torch.arange(self.k)
        same = (depth <= (starts % 3)[..., None]) & (one.seen & other.seen)[..., None]
        sizes = [made.size[..., None] > depth for made in (one, other)]
        differs = (one.q - other.q).abs().maximum((one.accept - other.accept).abs()) > 1e-3
        differs = (differs | (sizes[0] != sizes[1])) & same
        if bool(differs.any()):
            c, s, d = differs.nonzero()[0].tolist()
            raise ValueError(
                f"draft {self.part.info.name!r} depends on more than the text: on tokens that it drew and dropped, on what was accepted before, or on the "
                f"number of rounds (text {texts[c]}, block after {s + 1} tokens, depth {d}: the text's token has probability {float(one.q[c, s, d]):.4f} "
                f"in one run and {float(other.q[c, s, d]):.4f} in another): a replay would be wrong; use lab.simulate"
            )


def _stored(trace: Trace, draft: Any, sampling: Sampling, k: int) -> Path | None:
    """Where a replay of a draft is stored; ``None`` if something of the draft cannot be named."""
    try:
        label = described((VERSION, draft, sampling, trace.id, k))
    except TypeError:
        return None
    return trace.folder / "replays" / f"{label}.pt"
