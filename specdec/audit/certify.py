"""Exact losslessness: enumerates all random outcomes of a decoder, and compares its output's distribution with the target's.

The decoder runs its own ``generate``; only the random numbers are replaced (``walk.py``). Branches are the rows of a batch. The
target's distribution is enumerated over plain prefixes, without the decoder (``plain.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from specdec.audit.adversaries import Everything
from specdec.audit.around import PROMPTS, TOKENS, Refused, decoders, verifier_of
from specdec.audit.enumeration import Enumeration
from specdec.audit.plain import Distribution, Ids, Logits, Numbered, Plain, enumerate_plain, total_variation
from specdec.audit.scope import Scope
from specdec.audit.walk import Branches, Walk
from specdec.capabilities import SelectorInfo
from specdec.decoder import Decoder
from specdec.prompts import rows_of
from specdec.protocols import Verifier
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Verdict

EXACT = 1e-9  # total variation
ROUNDING = 1e-12  # difference of two probabilities


class Difference(NamedTuple):
    """A text whose probability is not the target's: the row of its prompt, its new ids, and both probabilities."""

    row: int
    text: Ids
    decoded: float
    target: float


@dataclass(frozen=True, eq=False)
class Certificate:
    """The result of a certification.

    Attributes:
        total_variation: between the joint distribution of the emitted tokens (truncated at stops) and the target's, the largest over
            the rows; unaccounted mass counts as wrong.
        mass: unaccounted mass, ``|1 - sum of the branches' measures|``, the largest over the rows.
        branches: number of branches that were run. seconds: wall clock.
        distribution, target: for each row, tokens -> probability.
        astray: share of the branches (by measure) whose tokens are not the target's own draws; ``certify_coupled`` only.
        claimed: whether the verifier declares that it is lossless. If not, the total variation is what it loses on this example.
        scope: what was covered, and what was not; ``print(found.scope)``.
        biased_from, worst(): where the distribution is not the target's.
    """

    total_variation: float
    mass: float
    branches: int
    seconds: float
    distribution: tuple[Distribution, ...] = field(default=(), repr=False)
    target: tuple[Distribution, ...] = field(default=(), repr=False)
    astray: float | None = None
    claimed: bool = True
    scope: Scope | None = field(default=None, repr=False)

    @property
    def lossless(self) -> bool:
        """Whether the distribution (for ``certify_coupled`` every path) is the target's up to float64 rounding (1e-9)."""
        return self.total_variation <= EXACT and not self.astray

    @property
    def biased_from(self) -> int | None:
        """The first position of the new ids up to which the beginnings of texts do not have the target's distribution, in any row; ``None``
        if all do."""
        pairs = list(zip(self.distribution, self.target))
        for position in range(max((len(ids) for pair in pairs for one in pair for ids in one), default=0)):
            if any(total_variation(*(_begun(one, position + 1) for one in pair)) > EXACT for pair in pairs):
                return position
        return None

    def worst(self, n: int = 5) -> list[Difference]:
        """The ``n`` texts whose probabilities differ most from the target's, the largest difference first; those of rounding are left out."""
        found = [
            Difference(row, ids, decoded.get(ids, 0.0), target.get(ids, 0.0))
            for row, (decoded, target) in enumerate(zip(self.distribution, self.target))
            for ids in sorted(decoded.keys() | target.keys())
        ]
        found = [one for one in found if abs(one.decoded - one.target) > ROUNDING]
        return sorted(found, key=lambda one: -abs(one.decoded - one.target))[:n]

    def __repr__(self) -> str:
        biased = not self.lossless and self.claimed
        where = f"biased from ids[{self.biased_from}] on, " if biased and self.biased_from is not None else ""
        paths = "" if self.astray is None else f"{self.astray:.1e} astray, "
        kind = "" if self.claimed else "declared lossy, "
        scope = "" if self.scope is None else f"; covered: {', '.join(self.scope.covered)}"
        if self.scope is not None and self.scope.missing:
            scope += f"; not covered: {', '.join(self.scope.missing)}"
        return (
            f"{'NOT LOSSLESS: ' if biased else ''}Certificate({kind}total variation {self.total_variation:.1e}, {where}{paths}{self.mass:.1e} unaccounted, "
            f"{self.branches} branches, {self.seconds:.1f} s{scope})"
        )


def certify(
    decoder: Decoder | Verifier | Callable[..., Verdict],
    prompts: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int | Sequence[int] | None = None,
    *,
    eos_token_id: Sequence[int] = (),
    stopping_criteria: Sequence[Callable[..., Any]] = (),
    sampling: Sampling | None = None,
    logits: Logits | None = None,
    wrap: Callable[[Rng], Rng] = lambda rng: rng,
    batch: int = 2048,
    limit: int = 2_000_000,
    progress: bool = False,
) -> Certificate:
    """The exact distance of a decoder's output from its target's distribution.

    Args:
        decoder: built as usual; or a verifier, or a function ``(proposal, probs, context, rng) -> Verdict``, around which a decoder is
            built: a table of 3 tokens, and a draft whose trees, or chains where the verifier refuses trees, depend on the whole past.
        prompts: as for ``generate``; the branches of all rows share every batch, except under a selector that chooses for rows together
            (``SelectorInfo.joint``, or capacities), where each branch runs alone. By default one of one token, and for a verifier three.
        max_new_tokens: as for ``generate``; by default 3, and 4 for a verifier. eos_token_id, stopping_criteria: as for ``generate``.
        sampling: defines the target's distribution; by default the decoder's.
        logits: ``prefixes -> [R, V]``, the target's logits on plain prefixes; by default its own ``score`` with a fresh cache.
        wrap: wraps the scripted random number generator.
        batch: branches per run. limit: the most branches.
        progress: show a bar of the probability that is enumerated.
    Raises:
        RuntimeError: more than ``limit`` branches, or the output of a row depends on the rest of its batch.
        TypeError: ``decoder`` is neither a built decoder nor a verifier. ValueError: the verifier refuses all proposals that were tried.
    """

    def enumerate_all(built: Decoder, prompts: Sequence[Sequence[int]], tokens: Any) -> Certificate:
        run = _Run(built, rows_of(built.target, prompts), tokens, eos_token_id, stopping_criteria, wrap)
        return _walk(run, run.plain(sampling, logits), None, batch, limit, progress)

    def given(usual: Sequence[Sequence[int]], tokens: int) -> tuple[Sequence[Sequence[int]], Any]:
        return usual if prompts is None else prompts, tokens if max_new_tokens is None else max_new_tokens

    if isinstance(decoder, Decoder):
        return enumerate_all(decoder, *given(((0,),), 3))
    refusal: Refused | None = None
    for around in decoders(verifier_of(decoder)):
        try:
            return enumerate_all(around, *given(PROMPTS, TOKENS))
        except Refused as error:
            refusal = error
    raise ValueError(
        f"the verifier refuses trees, chains and single nodes, lastly with: {refusal}. Give a decoder with a draft that it takes"
    )


def certify_coupled(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]] = ((0,),),
    max_new_tokens: int | Sequence[int] = 3,
    *,
    nodes: int | None = 3,
    eos_token_id: Sequence[int] = (),
    stopping_criteria: Sequence[Callable[..., Any]] = (),
    batch: int = 2048,
    limit: int = 2_000_000,
    progress: bool = False,
) -> Certificate:
    """Certifies ``Coupled`` path by path: for all draws of the target and all proposals, the draws are committed.

    A race keyed by position is a function of the position and the distribution; each of the target's distributions gets a free choice at
    each position, and all choices are enumerated. The draft is replaced by one that proposes every tree of up to ``nodes`` nodes,
    which covers every draft, whatever it has seen; ``nodes=None`` keeps the decoder's own. The other arguments are those of ``certify``.
    """
    if nodes is not None:
        decoder = replace(decoder, draft=Everything(decoder.target.vocab_size, nodes))
    rows = rows_of(decoder.target, prompts)
    run = _Run(decoder, rows, max_new_tokens, eos_token_id, stopping_criteria)
    plain = run.plain()
    return _walk(run, plain, Numbered(plain), batch, limit, progress)


@dataclass(frozen=True)
class _Run:
    """Runs branches of some prompts as the rows of one ``generate``."""

    decoder: Decoder
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int | Sequence[int]
    eos: Sequence[int] = ()
    criteria: Sequence[Callable[..., Any]] = ()
    wrap: Callable[[Rng], Rng] = lambda rng: rng

    @cached_property
    def scope(self) -> Scope:
        return Scope.of(self.decoder, self.prompts, self.budgets, self.ends, self.criteria)

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a row: those given, and those of a grammar."""
        return tuple(dict.fromkeys((*self.eos, *self.decoder.sampling.end_ids(0))))

    @property
    def budgets(self) -> list[int]:
        if isinstance(self.max_new_tokens, int):
            return [self.max_new_tokens] * len(self.prompts)
        return list(self.max_new_tokens)

    def plain(self, sampling: Sampling | None = None, logits: Logits | None = None) -> list[Plain]:
        sampling = sampling or self.decoder.sampling
        return [
            enumerate_plain(self.decoder.target, sampling, prompt, budget, self.ends, self.criteria, logits)
            for prompt, budget in zip(self.prompts, self.budgets)
        ]

    def __call__(self, walk: Walk, owner: np.ndarray) -> list[Ids]:
        """The ids that each branch emits; ``owner`` is each branch's prompt."""
        out = self.decoder.generate(
            [list(self.prompts[row]) for row in owner],
            [self.budgets[row] for row in owner],
            rng=self.wrap(walk.rng()),
            eos_token_id=tuple(self.eos),
            stopping_criteria=tuple(self.criteria),
            on_round=self.scope.watch,
        )
        return [tuple(ids) for ids in out.ids]


def _walk(
    run: _Run, plain: list[Plain], numbered: Numbered | None, batch: int, limit: int, progress: bool
) -> Certificate:
    if not isinstance(progress, bool):
        raise TypeError(f"progress is {progress!r}: give True or False")
    from tqdm.auto import tqdm

    start, walked = perf_counter(), Enumeration(run, run.scope.alone, plain, numbered)
    shown = "{desc}: {percentage:.1f} % of the probability |{bar}| {elapsed}{postfix}"
    with tqdm(total=1.0, desc="certifying", bar_format=shown, disable=not progress) as bar:
        while any(walked.left):
            walked.go_on(batch)
            bar.set_postfix_str(f"{walked.count} branches", refresh=False)
            bar.update(walked.share - bar.n)
            _within(limit, walked.count, walked.share, run, numbered is not None)
    _again(run, numbered, walked.sample[-32:] + walked.sample[: min(8, len(walked.sample))])
    distributions = tuple({ids: fsum(parts) for ids, parts in mass.items()} for mass in walked.masses)
    return Certificate(
        total_variation=max(
            total_variation(distribution, one.distribution) for distribution, one in zip(distributions, plain)
        ),
        mass=max(abs(1 - fsum(distribution.values())) for distribution in distributions),
        branches=walked.count,
        seconds=perf_counter() - start,
        distribution=distributions,
        target=tuple(one.distribution for one in plain),
        astray=None if numbered is None else max(fsum(parts) for parts in walked.astray),
        claimed=run.decoder.verifying.lossless,
        scope=run.scope,
    )


def _within(limit: int, count: int, share: float, run: _Run, coupled: bool) -> None:
    """Raise RuntimeError if ``count`` branches, which have ``share`` of the probability, are more than ``limit``."""
    if count <= limit:
        return
    prompts = "fewer prompts=, " if len(run.prompts) > 1 else ""
    nodes = "fewer nodes=, " if coupled else ""
    raise RuntimeError(
        f"more than {limit} branches, and those so far have {100 * share:.3g} % of the probability: give fewer tokens than "
        f"max_new_tokens={max(run.budgets)}, {prompts}{nodes}a decoder of a smaller vocabulary, a shorter draft or distributions with zeros, "
        "or a larger limit=. Every decision that a verifier or draft asks rng for and does not need, as for a row that is already rejected, "
        "multiplies the branches: ask with a probability of 0 or 1 there"
    )


def _begun(distribution: Distribution, length: int) -> Distribution:
    """The distribution of the first ``length`` ids of each text."""
    begun: Distribution = defaultdict(float)
    for ids, mass in distribution.items():
        begun[ids[:length]] += mass
    return begun


def _again(
    run: _Run, numbered: Numbered | None, sample: list[tuple[Branches, np.ndarray, list[Ids]]]
) -> None:
    """Run some finished branches again in another batch: a row's output must be a function of its own random numbers.

    Where rows are chosen for together, each runs alone again.
    """
    if run.scope.alone and len(sample) > 1:
        for one in sample:
            _again(run, numbered, [one])
        return
    sample = [part for part in sample if len(part[0])]
    if not sample:
        return
    branches = Branches.join([part for part, _, _ in sample])
    owner = np.concatenate([part for _, part, _ in sample])
    before = [ids for _, _, part in sample for ids in part]
    order = np.random.default_rng(0).permutation(len(owner))
    after = run(Walk(branches.select(order), numbered), owner[order])
    for b, ids in zip(order, after):
        if before[b] != ids:
            raise RuntimeError(
                f"the same random numbers gave {list(before[b])} and then, in another batch, {list(ids)}: {_mixing(run)}"
            )


def _mixing(run: _Run) -> str:
    """Why a row's output may depend on its batch, and the remedy."""
    selecting = run.decoder.selecting
    if selecting is not None and not SelectorInfo.of(selecting.selector).joint:
        return (
            f"either the selector {type(selecting.selector).__name__} chooses for a row by other rows, as with pooled statistics (then let it "
            "declare info = sd.SelectorInfo(joint=True)), or another part depends on the batch or keeps state between calls"
        )
    return (
        "some part of the decoder depends on the batch or keeps state between calls, so its distribution cannot be certified: compute a row "
        "from its own tokens, state and keys"
    )
