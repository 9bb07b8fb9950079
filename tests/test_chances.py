"""Chances along a committed text against the real decoder, all of whose random outcomes are enumerated.

For every text, the expected rounds, and how often each depth was reached and accepted, are compared with ``efficiency``.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
from walked import walked

import specdec as sd
from specdec.audit.block import block_chances
from specdec.audit.tau import chances, efficiency

V = 3
TARGET, SMALL = (sd.TableModel.random(V, order, seed=seed) for order, seed in ((2, 0), (1, 1)))
SPARSE = tuple(sd.TableModel.random(V, 1, seed=seed, zeros=0.4) for seed in (5, 6))
PROMPT = [0, 2]


def counted(decoder, n, depth):
    """text -> probability and, given the text, ``[1 + 2 depth]`` the expected rounds, reached depths and accepted depths.

    The text is what follows the prefill's token, ``n`` tokens.
    """
    mass, sums = defaultdict(float), defaultdict(lambda: np.zeros(1 + 2 * depth))
    for one in walked(decoder, PROMPT, n + 1):
        row = np.zeros(1 + 2 * depth)
        for at, size, accepted in one.rounds:
            longest = min(size, depth)  # of a chain
            row[0] += 1
            row[1 : 1 + min(accepted + 1, longest)] += 1
            row[1 + depth : 1 + depth + accepted] += 1
            assert at >= 1
        mass[one.ids] += one.probability
        sums[one.ids] += one.probability * row
    return {ids: (mass[ids], sums[ids] / mass[ids]) for ids in mass if mass[ids] > 1e-9}


def along(texts, model, n, K):
    """``[C, n, K, V]`` the distributions of token ``s + j`` along texts (the prefill's token, then n more); ones past the end."""
    out = torch.ones(len(texts), n, K, V, dtype=torch.float64)
    for c, text in enumerate(texts):
        for s in range(n):
            for j in range(min(K, n - s)):
                out[c, s, j] = model.distribution([*PROMPT, *text[: 1 + s + j]])
    return out


def own(laws, texts):
    """``[C, n, K]`` the probabilities of the texts' tokens."""
    return laws.gather(3, tokens_of(texts, *laws.shape[1:3])[..., None])[..., 0]


def tokens_of(texts, n, K):
    padded = torch.nn.functional.pad(torch.tensor(texts)[:, 1:], (0, K))
    return padded.unfold(1, K, 1)[:, :n]


def apart(found, made):
    """The largest difference between counted and computed numbers, over all texts."""
    computed = torch.cat([made.rounds[:, None], made.reached, made.accepted], 1)
    seen = torch.tensor(np.array([numbers for _, numbers in found.values()]))
    return float((seen - computed).abs().max())


RULES = {
    "rejection": (sd.Rejection(), lambda p, q: chances(p, q)),
    "block": (sd.BlockVerification(), block_chances),
}


@cache
def chains(target, draft, verifier):
    return counted(sd.decoder(target).draft(draft, length=3).verifier(verifier).build(), 4, 3)


@pytest.mark.parametrize("pair", [(TARGET, SMALL), SPARSE], ids=["order 2", "zeros"])
@pytest.mark.parametrize("rule", RULES)
def test_chains(rule, pair):
    verifier, formula = RULES[rule]
    n, k = 4, 3
    found = chains(*pair, verifier)
    texts = list(found)
    p, q = (own(along(texts, model, n, k), texts) for model in pair)
    assert apart(found, efficiency(formula(p, q), cut=True)) < 1e-12
    assert len(texts) > 20
    assert sum(p for p, _ in found.values()) == pytest.approx(1, abs=1e-6)


def never_updated(p, q):
    return chances(p, q)


def capped_at_the_end(p, q):
    weight = torch.cat([torch.ones_like(p[..., :1]), (p / q).cumprod(-1)[..., :-1]], -1).clamp(max=1)
    return chances(weight * p, q)


def residual_of_p(p, q):
    """As if the token after a rejection came from max(p - q, 0)."""
    made = block_chances(p, q)
    return torch.minimum(made, chances(p, q) / made.clamp(min=1e-9)).clamp(max=1)


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("rejection", lambda p, q: chances(q, p)),
        ("rejection", block_chances),
        ("rejection", torch.minimum),
        ("block", lambda p, q: block_chances(q, p)),
        ("block", never_updated),
        ("block", capped_at_the_end),
        ("block", residual_of_p),
    ],
)
def test_a_wrong_formula_is_seen(rule, wrong):
    n, k = 4, 3
    found = chains(TARGET, SMALL, RULES[rule][0])
    p, q = (own(along(list(found), model, n, k), list(found)) for model in (TARGET, SMALL))
    assert apart(found, efficiency(wrong(p, q), cut=True)) > 1e-3
