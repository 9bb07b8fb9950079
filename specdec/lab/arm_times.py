"""A pool's drafts by name, and the seconds of their rounds, measured alone and alternately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from specdec import zoo
from specdec.arm_policy import Arm
from specdec.builder import decoder as builder
from specdec.cost.arms import ArmCosts, weights
from specdec.drafts import Model, NGram
from specdec.drafts.spire.load import is_spire
from specdec.drafts.stateless import Stateless
from specdec.lab.auto_runs import reading
from specdec.lab.clock import shuffled
from specdec.lab.pipeline import for_some, spread, timed, waited
from specdec.lab.selection import RoundTimes
from specdec.models.hf import HFModel
from specdec.parts import as_draft
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.selectors.fixed import Arms, Fixed, Unlearning
from specdec.types import Context

POOL = ("pocket-140k", "pocket-360k", "pocket-700k", "pocket-900k")
"""The drafts from which selectors choose, the smallest first."""
ARMS = (*POOL, "pocket-spire/2", "ngram/8", "none")
"""The arms of the recipes, with their lengths: chosen by replays on prompts of the validation packages, and frozen."""


def load_pool(names: Sequence[str], length: int = 4, bf16_weights: bool | None = None) -> dict[str, Arm]:
    """Arms by name: pocket models, ``ngram`` (matches of 2 to 4 tokens), and ``none``, which does not speculate; ``NAME/K`` drafts at most K tokens.

    Raises:
        SystemExit: an unknown name, K that is not a whole number above 0, or a model with two lengths (what one arm has read would be
            charged to the other).
    """
    drafts: dict[str, Any] = {"none": None}
    made: dict[str, Arm] = {}
    for arm in names:
        name, _, k = arm.partition("/")
        if name not in (*zoo.names(), "ngram", "none"):
            raise SystemExit(
                f"arm {arm!r}: there is no draft {name!r}: there are {', '.join(zoo.names())}, ngram and none"
            )
        if k and (not k.isdecimal() or int(k) < 1 or name == "none"):
            raise SystemExit(f"arm {arm!r}: give a name, or NAME/K with K tokens to draft, 1 or more")
        if name in drafts and name not in ("ngram", "none"):
            raise SystemExit(f"arm {arm!r}: {name} has another length already; give each model once")
        if name == "ngram":
            drafts[name] = NGram(max_match=4, min_match=2)
        elif name not in drafts:
            model, tokenizer = zoo.load(name)
            spire = is_spire(model)
            drafts[name] = (
                as_draft(model, name)
                if spire
                else Model(HFModel(model, tokenizer, bf16_weights=bf16_weights))
            )
        made[arm] = Arm(drafts[name], None if name == "none" else int(k or length))
    return made


def half_way(
    decoder: Any, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int = 0
) -> list[list[int]]:
    """Prompts with half of ``new_tokens`` after them, by ``decoder``: a round of ``measured`` and ``charges`` has the length that rounds have on average."""
    out = decoder.generate(list(prompts), new_tokens // 2, seed=seed, eos_token_id=())
    return [[*prompt, *ids] for prompt, ids in zip(prompts, out.ids)]


def measured(
    target: Any,
    arms: Mapping[str, Arm],
    prompts: Sequence[Sequence[int]],
    rounds: int = 8,
    repeats: int = 3,
    seed: int = 0,
    sampling: Sampling | None = None,
    pooled: bool = False,
) -> RoundTimes:
    """Fit the seconds of rounds to serial rounds of all prompts, of half and of a quarter of them, and of one, all rows on one arm.

    Models of one size and length share their measurements: a difference between them is noise, which a selector would take for an advantage.
    Verification, with what Python does around it, is fitted to rounds less their drafting: of plain decoding, of models, and of drafts that keep nothing, such as an n-gram. Other drafts
    also read in a round; in a pool, heads read in every round, so the rounds of all arms are fitted. An arm's drafting is what its whole rounds take beyond verification. Reading is timed for drafts with a
    model of their own, on the first prompt. Drafts that read with the target's pass have no such cost; what SPIRe reads when a row comes back to it, at most its window, is left out.

    Args:
        arms: by name, with lengths (``load_pool``); those without a draft do not speculate. prompts: ids; at least 2. rounds: timed rounds of
            a run. repeats: runs of each arm and size, alternating, after one that is not counted. sampling: may have a temperature
            for each prompt. pooled: a pool of all arms, in which heads also read for rows that others draft; by default each draft is used alone.
    Raises:
        ValueError: fewer than 2 prompts, fewer temperatures than prompts, or an arm without a length.
    """
    if len(prompts) < 2:
        raise ValueError(f"there are {len(prompts)} prompts: rounds of two sizes need at least 2")
    lengths = {name: _length(name, arm) for name, arm in arms.items()}
    base = builder(target).sampling(sampling or Sampling())
    alone = {n: (base.draft(a.draft, lengths[n]) if lengths[n] else base).build() for n, a in arms.items()}
    whole = alone
    if pooled:
        whole = {n: base.pool(arms, Fixed(i), stacked=True).build() for i, n in enumerate(arms)}
    shared = {
        name: (weights(arm.draft.model) if isinstance(arm.draft, Model) else name, lengths[name])
        for name, arm in arms.items()
    }
    found, reads = _rounds(whole, alone, shared, prompts, rounds, repeats, seed)
    plain = [n for n, a in arms.items() if a.draft is None or isinstance(a.draft, Model | Stateless)]
    fitted = plain if not pooled and any(lengths[name] for name in plain) else list(arms)
    verify = _verification([(size, one) for name in fitted for size, one in found[shared[name]].items()])
    draft = tuple(
        _drafting(k, found[shared[name]], verify) if k else (0.0, 0.0) for name, k in lengths.items()
    )
    return RoundTimes(draft, verify, tuple(reads[shared[name]] for name in arms))


class _Round(NamedTuple):
    """Medians of a round: seconds of all of it and of its drafting, and tokens that it drafted."""

    whole: float
    draft: float
    drafted: float


def _rounds(
    decoders: Mapping[str, Any],
    alone: Mapping[str, Any],
    shared: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    repeats: int,
    seed: int,
) -> tuple[dict[Any, dict[int, _Round]], dict[Any, float]]:
    """The rounds of each kind of arm, by number of rows, and its seconds of reading a token: runs of all arms in turn, after one that is not counted.

    Args:
        decoders: by arm, for all prompts. alone: those that use the arm's draft without a pool. shared: the kind of each arm; those of one kind share their
            measurements.
    """
    sizes = sorted({1, *(max(1, len(prompts) // part) for part in (1, 2, 4))})
    by_size = {
        name: {size: waited(for_some(one, len(prompts), size)) for size in sizes}
        for name, one in decoders.items()
    }
    runs: dict[Any, dict[int, list[_Round]]] = {}
    reads: dict[Any, list[float]] = {}
    for turn in range(repeats + 1):
        for name, sized in shuffled(by_size.items(), turn):
            for size, decoder in sized.items():
                parts = timed(decoder, spread(prompts, size), rounds, 1, seed + turn)[1]
                if turn:
                    runs.setdefault(shared[name], {}).setdefault(size, []).extend(
                        _Round(here.ended - before.ended, here.draft, here.drafted)
                        for before, here in pairwise(parts)
                    )
            if turn:
                reads.setdefault(shared[name], []).append(reading(alone[name].draft, list(prompts[0])))
    medians = {
        kind: {size: _Round(*map(median, zip(*some))) for size, some in sized.items()}
        for kind, sized in runs.items()
    }
    return medians, {kind: median(some) for kind, some in reads.items()}


def _verification(rounds: Sequence[tuple[int, _Round]]) -> tuple[float, float, float]:
    """Fixed seconds of verification, those of a row and those of a drafted token, from rounds of so many rows."""
    features = [[1, size, one.drafted] for size, one in rounds]
    fixed, row, token = _fitted(features, [one.whole - one.draft for _, one in rounds])
    return fixed, row, token


def _drafting(
    k: int, rounds: Mapping[int, _Round], verify: tuple[float, float, float]
) -> tuple[float, float]:
    """Fixed seconds of drafting a token, and those of a row: what whole rounds, by number of rows, take beyond verification."""
    fixed, row, token = verify
    beyond = [one.whole - (fixed + row * size + token * one.drafted) for size, one in rounds.items()]
    features = [[k, one.drafted] for one in rounds.values()]
    per_step, per_row = _fitted(features, beyond, [one.whole for one in rounds.values()])
    return per_step, per_row


def several(
    target: Any,
    arms: Mapping[str, Arm],
    prompts: Sequence[Sequence[int]],
    used: Sequence[str],
    times: RoundTimes,
    rounds: int = 8,
    repeats: int = 3,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> float:
    """By how much rounds of a pool whose rows use several arms are longer than ``times`` charge, as a factor, beside rounds of each of these arms.

    Args:
        used: name of the arm of each prompt. others: as for ``measured``.
    """
    names = list(arms)
    base = builder(target).sampling(sampling or Sampling())
    plans = {"": tuple(map(names.index, used))}
    plans |= {name: (names.index(name),) * len(prompts) for name in dict.fromkeys(used)}
    decoders = {plan: base.pool(arms, _Given(by), stacked=True).build() for plan, by in plans.items()}
    found: dict[str, list[float]] = {plan: [] for plan in plans}
    for turn in range(repeats + 1):
        for plan, decoder in shuffled(decoders.items(), turn):
            parts = timed(decoder, prompts, rounds, 1, seed + turn)[1]
            for before, here in pairwise(parts) if turn else ():
                spent, verify = times.round(
                    np.array(plans[plan]), np.array(here.each), np.zeros(len(prompts))
                )
                found[plan].append((here.ended - before.ended) / (spent.sum() + verify))
    over = {plan: median(ratios) for plan, ratios in found.items()}
    return over[""] * len(used) / sum(over[name] for name in used)


@dataclass(frozen=True)
class _Given(Unlearning):
    """Request number b has arm ``by_request[b]``."""

    by_request: tuple[int, ...]

    def init(self, arms: int) -> Arms:
        return Arms(arms)

    def select(
        self, state: Arms, context: Context, capacities: Tensor, rng: Rng
    ) -> tuple[Tensor, Tensor, Arms]:
        return torch.tensor(self.by_request)[context.request], torch.ones(context.batch), state


def charges(
    target: Any,
    arms: Mapping[str, Arm],
    prompts: Sequence[Sequence[int]],
    rounds: int = 8,
    repeats: int = 3,
    seed: int = 0,
    sampling: Sampling | None = None,
    pooled: bool = False,
) -> ArmCosts:
    """What a row is charged for a round: the seconds of whole rounds of all prompts, all rows on one arm, and of plain rounds.

    ``verify`` is a row's share of a plain round, and ``draft`` what a round takes beyond a plain one for each token that the arm drafted. So the rows of a
    batch that all use an arm are charged what the batch takes, however verification grows with the tokens (``measured`` fits a line to it).

    Args:
        others: as for ``measured``; models of one size are measured apart.
    Raises:
        ValueError: an arm has no length, or there are fewer temperatures than prompts.
    """
    lengths = {name: _length(name, arm) for name, arm in arms.items()}
    base = builder(target).sampling(sampling or Sampling())
    drafted = [name for name in arms if lengths[name]]
    if pooled:
        pool: dict[str, Any] = {"": Arm(None), **arms}
        whole = {name: base.pool(pool, Fixed(i), stacked=True).build() for i, name in enumerate(pool)}
    else:
        whole = {"": base.build()} | {n: base.draft(arms[n].draft, lengths[n]).build() for n in drafted}
    decoders = {name: whole[name] for name in ("", *drafted)}
    runs: dict[str, list[tuple[float, float]]] = {}
    for turn in range(repeats + 1):
        for name, decoder in shuffled(decoders.items(), turn):
            seconds, found = timed(decoder, prompts, rounds, 1, seed + turn)
            if turn:
                tokens = sum(part.drafted for part in found) / len(found)
                runs.setdefault(name, []).append((seconds, tokens))
    plain = median(seconds for seconds, _ in runs[""])
    extra = dict.fromkeys(arms, 0.0)
    for name in drafted:
        seconds, tokens = (median(column) for column in zip(*runs[name]))
        extra[name] = max(seconds - plain, 0.0) / max(tokens, 1.0)
    return ArmCosts(tuple(extra.values()), plain / len(prompts))


def _length(name: str, arm: Arm) -> int:
    if arm.draft is not None and arm.length is None:
        raise ValueError(f"arm {name!r} has no length: give Arm(draft, length)")
    return 0 if arm.draft is None else arm.length or 0


def _fitted(
    features: Sequence[Sequence[float]], seconds: Sequence[float], whole: Sequence[float] | None = None
) -> list[float]:
    """Coefficients, none negative, of least squares, where the noise's variance is in proportion to the seconds of ``whole`` (default: to those that are fitted)."""
    scale = np.maximum(whole or seconds, 1e-9) ** 0.5
    return nnls(np.array(features) / scale[:, None], np.array(seconds) / scale)[0].tolist()
