"""Whole rounds as captured steps, the next launched before the last one's result is read.

The device keeps every row's length and last tokens, so it needs nothing from the host between rounds. While the host reads a verdict, applies
stops and reports the round, the device works on the next one. The host thus learns a round late that a row has ended: what that round
did for this row is dropped. Rows are independent, and a dropped round has used no random number of another row, so the text is that of ``Serial``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

from specdec.composition import Composition
from specdec.drafts.none import NoDraft
from specdec.drafts.tree import Tree
from specdec.drafts.whole_round import without_steps
from specdec.executors.ahead_joining import AheadScheduler
from specdec.executors.captured_drafts import DRAFTS, drafting_of, samplings
from specdec.executors.round import MicroBatch
from specdec.executors.serial import Serial
from specdec.per_request import PerRequest
from specdec.rng import Philox, Rng
from specdec.sampling import Sampling
from specdec.stop_rules import StopRules
from specdec.types import Context, Round
from specdec.verifiers.coupled import Coupled
from specdec.verifiers.fused import FusedRejection
from specdec.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Ahead:
    """Runs each round as one CUDA graph, launched a round ahead: a draft's chain or tree, or plain decoding.

    It accepts only what the captured step computes: an ``HFModel`` with ``graphs``; a ``drafts.Model`` of such a model
    (also ``Windowed`` or ``Masked``, in constant memory, with masks of the library), a ``drafts.Tree`` of such a model, a ``drafts.Spire`` with
    ``graphs``, a ``drafts.MagicDec`` without a pruner, a ``drafts.Head`` with ``graphs`` that draws from a head of the library, or no draft;
    ``Rejection``, ``FusedRejection`` (from logits, on a GPU by its kernels) or ``Coupled()``; and ``Sampling`` without processors or a grammar, of which each
    request may have its own (but for a ``drafts.Tree``). A head draws chains, a ``StaticTree``, or a ``DynamicTree`` (from ``Eagle3`` or ``MTP``
    without a mask and windows). Trees have at most 64 nodes. Subclasses are
    refused, too, since the step would bypass what they override. ``Round.scores`` has no logits, and ``Round.probs`` is ``None``: the next round has
    overwritten them. With random numbers other than ``Philox``, as in the certifier, it runs ``Serial``.

    Texts, rounds and statistics are those of ``Serial`` with the same verifier, if the models' logits are (a float32 model; the same kernels run with
    other shapes). ``FusedRejection`` and ``Rejection`` round differently, as ``kernels/rejection/reference.py`` says.
    """

    def check(self, composition: Composition) -> None:
        """Raise ValueError for a composition with a part that the step does not compute, or with chains longer than the draft's ``block``."""
        why = _why_not(composition)
        if why is not None:
            raise ValueError(f"Ahead() {why}: use executors.Serial()")

    def check_own(self, sampling: Sampling) -> None:
        """Raise ValueError for a request's own sampling that the step does not compute."""
        if _reads_text(sampling):
            raise ValueError(
                "its sampling has processors or a grammar, which Ahead() does not run: use executors.Serial()"
            )

    def run(self, composition: Composition, context: Context, rng: Rng, limits: StopRules) -> Iterator[Round]:
        if type(rng) is not Philox:
            yield from Serial().run(composition, context, rng, limits)
            return
        scheduler, micro_batch = AheadScheduler(composition), MicroBatch(composition, context, rng)
        request = scheduler.prefill(0, micro_batch, limits)
        yield request.round
        while micro_batch:
            scheduler.clock = perf_counter()  # the consumer's time belongs to no round
            scheduler.go_on(micro_batch, request, limits)
            _, request = scheduler.verify(limits)
            yield request.round


def _why_not(composition: Composition) -> str | None:
    """Why a composition cannot run, or ``None``."""
    target, draft, verifier = composition.target, composition.draft, composition.verifier
    if composition.selecting is not None:
        return "runs one draft, and this is a pool"
    why = without_steps(target)
    if why is not None:
        return f"runs an HFModel with graphs=True, but the target {why}"
    kind = drafting_of(draft)
    if kind is None and type(draft) is not NoDraft:
        return f"runs {' or '.join(f'drafts.{k.__name__}' for k in DRAFTS)}, but the draft is a {type(draft).__name__}"
    why = None if kind is None else kind.why_not(draft, target, composition.length)
    if why is not None:
        return why
    if kind is not None and kind.modules(draft)[1].device != cast(Any, target).device:
        return "needs both models on one device"
    if type(verifier) not in (Rejection, FusedRejection) and verifier != Coupled():
        return f"decides as Rejection(), FusedRejection() or Coupled() do, and the verifier is {verifier!r}"
    sampling, drawing = samplings(composition)
    if _reads_text(sampling) or _reads_text(drawing):
        return "runs Sampling itself, without processors or a grammar"
    if drawing is not sampling and drawing.by_request:
        return "draws with the sampling of the decoder or with one for all requests, and the draft has a list of settings"
    grows = type(draft) is Tree and kind is not None and kind.tree(draft, composition.length) is not None
    if drawing.by_request and grows:
        return "draws siblings with one sampling for all requests, and here each has its own"
    return None


def _reads_text(sampling: Sampling) -> bool:
    """Whether a distribution depends on the text, or on what a subclass does; of requests with settings of their own, on those that have none."""
    own = sampling.settings
    default = {name: one.default if isinstance(one, PerRequest) else one for name, one in own.items()}
    return bool(default["processors"].functions) or default["grammar"] is not None or sampling.overridden
