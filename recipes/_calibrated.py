"""The throughput model with a machine's own constants: bare steps timed at some grid points, and rounds predicted at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from _captured import replay_of_a_chain
from _steady import Group, Measured, clocked

import specdec as sd
from specdec.cost import AUTOREGRESSIVE, Fitted, Host, Load, Method, Round, Shape, Step, calibrate
from specdec.cost.calibrate import CACHED
from specdec.drafts.spire.steps import SpireSteps
from specdec.types import Context, Proposal


class Bare(NamedTuple):
    """A timed step: ``what`` is a method's draft step, or the target's (``"target"``)."""

    what: str
    batch: int
    context: int
    tokens: int
    step: Step
    seconds: float
    replayed: bool = False  # a forward's share of a captured chain, draws included


@dataclass(frozen=True)
class Model:
    """Shapes of what was measured, and from them the steps of a round.

    Attributes:
        methods: without plain decoding. bytes: of a cached value. weight_bytes: of a weight.
    """

    target: Shape
    methods: Mapping[str, Method]
    bytes: int
    weight_bytes: int

    def round(self, method: str, batch: int, context: float, k: int) -> Round:
        load = Load(batch, context, max(k, 1), self.weight_bytes, self.bytes).full
        return self.methods.get(method, AUTOREGRESSIVE).round(self.target, load)

    def seconds(
        self, machine: Fitted, method: str, batch: int, context: float, k: int
    ) -> tuple[float, float]:
        """Of a round's steps: of those that draft, and of the others.

        The target, and a draft's first step, come once a round and find in the cache what all of the round leaves there; later
        steps of a draft follow themselves.
        """
        one = self.round(method, batch, context, k)
        if one.draft is None or not k:
            return 0.0, machine.time(one.target)
        around = one.verify.bytes + one.draft.bytes
        if self.methods[method].draft == self.target:  # which drafts with its own weights
            around -= sum(w.bytes for w in one.draft.work if w.name not in CACHED)
        drafting = machine.time(one.draft, around) + (k - 1) * machine.time(one.draft)
        refresh = machine.time(one.refresh) if one.refresh else 0.0
        return drafting, machine.time(one.verify, around) + refresh


class Around(NamedTuple):
    """A method's host work: while it drafts k tokens, and in the rest of a round."""

    draft: Host
    rest: Host


@dataclass(frozen=True)
class Calibrated:
    """A model with constants."""

    model: Model
    machine: Fitted
    hosts: Mapping[str, Around]

    def seconds(self, method: str, batch: int, context: float, k: int) -> float:
        """Of a round."""
        host = self.hosts[method]
        drafting = host.draft.seconds(batch, k) if k else 0.0
        return (
            sum(self.model.seconds(self.machine, method, batch, context, k))
            + drafting
            + host.rest.seconds(batch, k + 1)
        )

    def multiplier(self, method: str, batch: int, context: float, k: int, tau: float) -> float:
        """Tokens a second over plain decoding's; ``tau`` is an input."""
        plain = self.seconds("plain", batch, context, 0)
        return tau * plain / self.seconds(method, batch, context, k)


def bare_steps(
    decoders: Mapping[str, sd.Decoder],
    group: Group,
    context: int,
    k: Iterable[int],
    repeats: int,
    model: Model,
    replayed: int = 0,
) -> list[Bare]:
    """Forwards alone (no sampling, no bookkeeping), all in turn: the target's over 1 and k + 1 tokens, each draft's over 1.

    Args:
        decoders: by method; ``group`` is what they are about to decode. replayed: of a draft that has captured its chain of so many
            tokens, that chain is timed and divided by its forwards: that is what its rounds do.
    """
    group.use()
    target = decoders["plain"].target
    B = group.context.batch
    tokens = group.context.tokens.clone()
    tokens[:, context] = tokens[:, context - 1]  # any token will do
    text = Context(tokens, group.context.length + 1, group.context.prompt_length, group.context.request)
    chains = {
        method: replay_of_a_chain(decoder.draft, B, replayed)
        for method, decoder in decoders.items()
        if replayed and method != "plain"
    }
    names: list[tuple[str, int]] = []
    steps: list[Callable[[], Any]] = []
    with torch.inference_mode():
        cache = target.cache(B, tokens.shape[1])
        cache.matched(group.context)
        for n in sorted({1, *(length + 1 for length in k)}):
            nodes = Proposal.chain(tokens[:, : n - 1], torch.full((B,), n - 1)) if n > 1 else None
            names.append(("target", n))
            steps.append(target.bare_step(cache, text, nodes))
        for method, decoder in decoders.items():
            if method != "plain":
                names.append((method, 1))
                steps.append(chains.get(method) or _draft_step(decoder.draft, cache, text, group.context))
    seconds = clocked(steps, repeats)
    return [
        Bare(
            what,
            B,
            context,
            n,
            _step(model, what, B, context, n),
            s / getattr(step, "forwards", 1),
            chains.get(what) is step,
        )
        for (what, n), step, s in zip(names, steps, seconds)
    ]


def _draft_step(draft: Any, target_cache: Any, text: Context, prompt: Context) -> Callable[[], Any]:
    """One step of a draft after ``text``."""
    if isinstance(draft, sd.drafts.Spire):
        step = SpireSteps(draft.model, draft.ring(text.batch, text.tokens.shape[1]), text, 2)
        tokens = text.tokens[:, 0].to(draft.model.device)
        return lambda: step(0, tokens)
    if isinstance(draft, sd.drafts.MagicDec):
        return draft.view.bare_step(draft.view.of(target_cache), text)
    cache = draft.model.cache(text.batch, text.tokens.shape[1])
    draft.model.score(cache, prompt)  # a draft has fed all but the prompt's last token
    return draft.model.bare_step(cache, text)


def _step(model: Model, what: str, batch: int, context: int, tokens: int) -> Step:
    if what != "target":
        draft = model.round(what, batch, context, 1).draft
        assert draft is not None
        return draft
    one = model.round(next(iter(model.methods)), batch, context, max(tokens - 1, 1))
    return one.verify if tokens > 1 else one.target


def fit(
    model: Model,
    bare: Iterable[Bare],
    rounds: Mapping[tuple[int, int, float], Iterable[Measured]],
    apart: bool = True,
) -> Calibrated:
    """Constants from bare steps, and then each method's host work from what its rounds took beyond them.

    Args:
        rounds: measured at ``(batch, context, mean context while decoding)``. apart: host work while drafting is told from the rest; not
            on a device that works while the host goes on, where only the whole round's seconds are the device's.
    """
    machine = calibrate([(b.step, b.seconds) for b in bare], "this machine", cached_apart=True, cache=True)
    drafting: dict[str, list[tuple[int, int, float, float]]] = {}
    rest: dict[str, list[tuple[int, int, float, float]]] = {}
    for (batch, _, context), some in rounds.items():
        for m in some:
            drawn, others = model.seconds(machine, m.method, batch, context, m.k)
            if not apart:
                rest.setdefault(m.method, []).append((batch, m.k + 1, m.round_seconds, drawn + others))
                continue
            if m.k:
                drafting.setdefault(m.method, []).append((batch, m.k, m.stage("draft"), drawn))
            left = m.round_seconds - (m.stage("draft") if m.k else 0.0)
            rest.setdefault(m.method, []).append((batch, m.k + 1, left, others))
    hosts = {
        method: Around(Host.fit(drafting[method]) if method in drafting else Host(), Host.fit(samples))
        for method, samples in rest.items()
    }
    return Calibrated(model, machine, hosts)
