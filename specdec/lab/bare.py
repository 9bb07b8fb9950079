"""Bare steps of decoders, timed alternately: the forwards that a throughput model's constants are fitted to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from specdec import drafts
from specdec.decoder import Decoder
from specdec.drafts.spire.steps import SpireSteps
from specdec.lab.calibrated import Bare, Model
from specdec.lab.captured import ReplayedChain, replay_of_a_chain
from specdec.lab.clock import in_turn, middle
from specdec.lab.prefill import Group
from specdec.types import Context, Proposal


def timed_steps(
    decoders: Mapping[str, Decoder],
    group: Group,
    context: int,
    k: Iterable[int],
    repeats: int,
    model: Model,
    replayed: int = 0,
) -> list[Bare]:
    """Forwards without sampling and bookkeeping, timed alternately: the target's over 1 and k + 1 tokens, each draft's over 1.

    Args:
        decoders: by method; ``group`` holds their prompts. replayed: if a draft has captured its chain of that many tokens, time
            the chain, as its rounds replay it, and divide by its forwards.
    """
    group.use()
    target: Any = decoders["plain"].target
    B = group.context.batch
    tokens = group.context.tokens.clone()
    tokens[:, context] = tokens[:, context - 1]  # an arbitrary token
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
    times = in_turn(steps, repeats, take=list)
    made = []
    for (what, n), step, every in zip(names, steps, times):
        each = np.array(every) / (step.forwards if isinstance(step, ReplayedChain) else 1)
        about = what, B, context, n, model.step(what, B, context, n), float(middle(each))
        made.append(Bare(*about, chains.get(what) is step, tuple(each.tolist())))
    return made


def _draft_step(draft: Any, target_cache: Any, text: Context, prompt: Context) -> Callable[[], Any]:
    """One step of a draft after ``text``."""
    if isinstance(draft, drafts.Spire):
        step = SpireSteps(draft.model, draft.ring(text.batch, text.tokens.shape[1]), text, 2)
        tokens = text.tokens[:, 0].to(draft.model.device)
        return lambda: step(0, tokens)
    if isinstance(draft, drafts.MagicDec):
        view: Any = draft.view
        return view.bare_step(view.of(target_cache), text)
    cache = draft.model.cache(text.batch, text.tokens.shape[1])
    draft.model.score(cache, prompt)  # a draft has fed all but the prompt's last token
    return draft.model.bare_step(cache, text)
