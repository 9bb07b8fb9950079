"""Random compositions: under ``Coupled`` every text is that of plain sampling, no row depends on others, and under ``Rejection`` every token has
the target's distribution."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from more_families import MORE
from scipy.stats import chi2
from tiny import FAMILIES, FLOAT32, tiny

import specdec as sd
from specdec.audit.planted import BonusFromTarget
from specdec.executors import Optimistic, Pipelined, Serial

PACKED = [f for f in FAMILIES if f not in {"falcon", "mpt", "codegen", "gptj", "gpt_neo", *FLOAT32, *MORE}]
FEW, MANY = 16, 200


@cache
def pair(family: str) -> tuple[sd.HFModel, sd.HFModel]:
    """A target, and a model that agrees with it sometimes."""
    model = tiny(family, 1)
    other = tiny(family, 1)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(2)
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=draw, dtype=p.dtype), alpha=0.05)
    return sd.HFModel(model), sd.HFModel(other)


def peaked(prefix: list[int]) -> torch.Tensor:
    return torch.rand(97, generator=torch.Generator().manual_seed(sum(prefix[-2:])), dtype=torch.float64) * 4


def a_draft(pick: random.Random, target: sd.HFModel, small: sd.HFModel, revocable: bool):
    """A draft; ``revocable`` ones can go ahead of verification."""
    models = [small, target, sd.models.Windowed(small, pick.choice([3, 6]), 1)]
    chains = [
        *(sd.drafts.Model(model) for model in models),
        *(sd.drafts.Parallel(model, 96) for model in models[1:]),
        sd.drafts.NGram(),
        sd.drafts.Suffix(),
        sd.drafts.NoDraft(),
        sd.chain_draft(peaked),
    ]
    if revocable:
        return pick.choice(chains)
    widths = tuple(pick.choice([1, 2, 3]) for _ in range(pick.choice([1, 2, 3])))
    magic = sd.drafts.MagicDec(window=pick.choice([2, 5]), sinks=1)
    best = sd.drafts.Parallel(small, 96, tree=sd.drafts.heads.DDTree(pick.choice([3, 7])))
    return pick.choice([*chains, magic, best, *3 * [sd.drafts.Tree(small, widths)]])


@pytest.mark.parametrize(
    "seed", [*range(FEW), *(pytest.param(n, marks=pytest.mark.slow) for n in range(FEW, MANY))]
)
def test_a_random_composition_gives_plain_samplings_texts(seed):
    pick = random.Random(seed)
    target, small = pair(pick.choice(PACKED))
    rows = pick.choice([1, 2, 4])
    prompts = [[pick.randrange(1, 97) for _ in range(pick.randrange(1, 12))] for _ in range(rows)]
    budgets = [pick.randrange(1, 14) for _ in range(rows)]
    sampling = sd.Sampling(
        temperature=[pick.choice([0.0, 0.7, 1.3]) for _ in range(rows)]
        if pick.random() < 0.3
        else pick.choice([0.6, 1.0]),
        top_k=pick.choice([None, None, 5]),
        top_p=pick.choice([None, 0.8]),
    )
    executor = pick.choice(
        [Serial(), Serial(), Optimistic(), Pipelined(micro_batches=pick.choice([1, rows]))]
    )
    eos = pick.choice([(), (3, 50), tuple(range(0, 97, 7))])
    seeds = [pick.randrange(1000) for _ in range(rows)]
    base = sd.decoder(target).verifier(sd.Coupled()).sampling(sampling)
    plain = base.build().generate(prompts, budgets, seed=seeds, eos_token_id=eos)

    draft = a_draft(pick, target, small, isinstance(executor, Optimistic))
    length = {} if isinstance(draft, sd.drafts.Tree) else {"length": pick.choice([1, 2, 4])}
    decoder = base.draft(draft, **length).executor(executor).build()
    out = decoder.generate(prompts, budgets, seed=seeds, eos_token_id=eos)
    assert out.ids == plain.ids, f"{decoder!r}"

    order = pick.sample(range(rows), rows)  # the same rows among others
    if sampling.by_request:
        sampling = replace(sampling, temperature=[sampling.temperature[r] for r in order])
    decoder = base.sampling(sampling).draft(draft, **length).executor(executor).build()
    ask = [[values[r] for r in order] for values in (prompts, budgets, seeds)]
    moved = decoder.generate(*ask[:2], seed=ask[2], eos_token_id=eos)
    assert moved.ids == [plain.ids[r] for r in order], f"{decoder!r}"


def transitions(verifier, seed: int) -> float:
    """The p-value of what followed each token in the texts of a random composition over tables, beside the target's own distributions."""
    pick = random.Random(seed)
    vocabulary = pick.choice([2, 3, 8, 32])
    target, small = (sd.TableModel.random(vocabulary, order=1, seed=s) for s in (seed, seed + 1))
    sampling = sd.Sampling(
        pick.choice([0.7, 1.0, 1.5]), top_k=pick.choice([None, 2]), top_p=pick.choice([None, 0.9])
    )
    widths = tuple(min(vocabulary, pick.choice([1, 2, 3])) for _ in range(pick.choice([1, 2, 3])))
    drafts = [small, sd.drafts.Model(small, sd.Sampling(0.5)), sd.drafts.NGram(), sd.drafts.Suffix()]
    drafts.append(sd.drafts.Parallel(small, vocabulary - 1))
    draft = pick.choice([*drafts, sd.drafts.Tree(small, widths)])
    executor = pick.choice([Serial(), Pipelined(2)])
    base = sd.decoder(target).sampling(sampling).verifier(verifier).executor(executor)
    out = base.draft(draft, pick.choice([1, 3, 5])).generate(
        [[b % vocabulary] for b in range(300)], 16, seed=seed
    )
    seen = torch.zeros(vocabulary, vocabulary, dtype=torch.float64)
    for prompt, ids in zip(out.prompt_ids, out.ids):
        for before, after in pairwise([*prompt, *ids]):
            seen[before, after] += 1
    chances = torch.stack(
        [
            sampling(target.distribution([t]).log()[None, None], sd.Context.of([[t]]))[0, 0]
            for t in range(vocabulary)
        ]
    )
    assert not seen[chances == 0].any()
    statistic, freedom = 0.0, 0
    for counts, wanted in zip(seen, chances * seen.sum(1, keepdim=True)):
        often = wanted >= 5
        cells = [(counts[often], wanted[often]), (counts[~often].sum()[None], wanted[~often].sum()[None])]
        for got, expected in cells:
            if len(got) and expected.sum() >= 5:
                statistic += float(((got - expected) ** 2 / expected).sum())
                freedom += len(got)
        freedom -= 1
    return float(chi2.sf(statistic, max(freedom, 1)))


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 120))]
)
def test_a_random_composition_has_the_targets_distribution(seed):
    assert transitions(sd.Rejection(), seed) > 1e-4


@pytest.mark.slow
def test_the_comparison_sees_a_wrong_bonus_token():
    assert min(transitions(BonusFromTarget(), seed) for seed in range(3, 8)) < 1e-12  # chains
