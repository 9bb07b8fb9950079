"""Replaying a draft on recorded texts: what it would have drafted from every position, without the noise of its draws.

The draft runs in the library's own rounds. Its draws are forced to follow the text, a verifier writes down the probability with which
each token would have been drawn, and commits one token, so that a block starts at every position. What a round does along a text is then
known exactly (``specdec.audit.tau``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.arguments import whole
from specdec.builder import DraftLike, as_draft
from specdec.capabilities import DraftPart, ModelInfo
from specdec.composition import Composition
from specdec.drafts.coerce import ModelLike, as_model
from specdec.executors import Serial
from specdec.lab.forced import Forced, Recorded, Recorder
from specdec.lab.replays import Replay, described
from specdec.lab.traces import Trace
from specdec.rng import Philox, seeds
from specdec.sampling import Sampling
from specdec.stop_rules import StopRules
from specdec.types import Context

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

    Exact are chains, and static trees whose siblings are drawn independently or chosen without randomness. The result is stored in the trace's
    folder where the draft's settings and weights can be named, and read from there the next time.

    Args:
        trace: from ``lab.record``, or its folder. draft: as for ``Builder.draft``. k: the longest path of a block; default: the trace's.
        target: needed by drafts that read the target's cache or activations. A draft that reads activations only takes the recorded
            ones, if ``record`` was given its taps.
        sampling: needed where the trace was recorded with processors. name: for tables; default: the draft's.
        batch: texts at a time. check: replay two texts again with other draws, to find out whether the draft depends on
            tokens that it drew and dropped. cache: store the result.
    Raises:
        ValueError: the trace is of another target, tokenizer or sampling, or its blocks are shorter than ``k``; the draft needs ``target``; it
            depends on tokens that were dropped (a memory of rejected tokens, or a length that anticipates); its trees are not static.
    """
    trace = trace if isinstance(trace, Trace) else Trace(trace)
    if not any(text.rounds for text in trace.texts):
        raise ValueError(f"the trace in {trace.folder} has no texts with rounds: record prompts first")
    part, k = DraftPart.of(as_draft(draft, "draft")), trace.k if k is None else k
    whole("k", k)
    if k > trace.k:
        raise ValueError(f"k is {k}, and the trace has blocks of at most {trace.k}: record with k={k}")
    how = trace.sampling(sampling)
    model = None if target is None else as_model(target, "target")
    if model is not None:
        trace.check(model)
    trace.check_tokenizer(ModelInfo.of(part.info.model).tokenizer, f"draft {part.info.name!r}")
    stands_in = part.follows is None and set(part.info.taps) <= set(trace.taps)
    if model is None and (not stands_in or part.info.taps):
        raise ValueError(f"draft {part.info.name!r} reads the target: pass target=")
    shown = name or part.info.name
    path = _stored(trace, draft, how, k) if cache else None
    if path is not None and path.exists():
        return Replay(trace, shown, k, **torch.load(path, weights_only=True))
    run = _Run(trace, part, how, k, model, stands_in)
    texts = [i for i, text in enumerate(trace.texts) if text.rounds]
    if check:
        run.check(texts[:2])
    C, n = len(trace), max(text.rounds for text in trace.texts)
    held = {name: torch.zeros(C, n, k, dtype=torch.float64) for name in CHANCES}
    held["size"], chains = torch.zeros(C, n, dtype=torch.long), True
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
        torch.save(held, path)
    return Replay(trace, shown, k, **held)


@dataclass(frozen=True)
class _Run:
    """Replays of one draft."""

    trace: Trace
    part: DraftPart
    sampling: Sampling
    k: int
    target: Any
    stands_in: bool

    def __call__(self, texts: list[int], strays: bool = False) -> Recorder:
        """The notes on some texts."""
        trace, k = self.trace, self.k
        some = [trace.texts[i] for i in texts]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(t.ids) for t in some], batch_first=True)
        prompt = torch.tensor([t.prompt for t in some])
        recorder = Recorder(trace, texts, ids, prompt, k)
        stand_in = Recorded(trace, texts, ids, prompt)
        draft = self.part.bound(self.target or stand_in, self.sampling)
        target = stand_in if self.stands_in else self.target
        composition = Composition(target, draft, k, self.sampling, recorder)
        last = prompt + 1 + recorder.rounds + k
        context = Context.of([t.ids[: t.prompt] for t in some], int(last.max()) + composition.nodes)
        rng = Forced(ids, torch.arange(len(some)), Philox(seeds(0, len(some))), strays)
        with torch.inference_mode():
            for round in Serial().run(composition, context, rng, StopRules(max_length=last)):
                if round.number == int(recorder.rounds.max()):
                    break
        return recorder

    def check(self, texts: list[int]) -> None:
        """Raise ValueError if the draft depends on draws that were dropped.

        In a second run its draws leave the text at varying depths. A token's probability, and whether it was proposed at all, may depend on
        the tokens drawn before it in the block and on nothing else that differs between the runs.
        """
        one, other = self(texts), self(texts, strays=True)
        leaves = one.prompt[:, None] + 1 + torch.arange(one.q.shape[1])  # the blocks' starts
        depth = torch.arange(self.k)
        same = depth <= (leaves % 3)[..., None]
        differs = ((one.q - other.q).abs() > 1e-3) & same
        if bool(differs.any()):
            c, s, d = differs.nonzero()[0].tolist()
            raise ValueError(
                f"draft {self.part.info.name!r} depends on tokens that it drew and dropped (text {texts[c]}, block after {s + 1} tokens, depth {d}: "
                f"probability {float(one.q[c, s, d]):.4f} or {float(other.q[c, s, d]):.4f} by other draws): its acceptance is not a function "
                "of the text; measure it with a live decoder"
            )


def _stored(trace: Trace, draft: Any, sampling: Sampling, k: int) -> Path | None:
    """Where a replay of a draft is stored; ``None`` if something of the draft cannot be named."""
    try:
        label = described((draft, sampling, trace.meta["id"], len(trace), k))
    except TypeError:
        return None
    return trace.folder / "replays" / f"{label}.pt"
