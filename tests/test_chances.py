"""Chances along a committed text against the real decoder, all of whose random outcomes are enumerated.

For every text, the expected rounds, and how often each depth was reached and accepted, are compared with ``efficiency``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from walked import walked

import specdec as sd
from specdec.audit.block import block_chances
from specdec.audit.rounds import Rounds, depths
from specdec.audit.shapes import shape, tree_chances
from specdec.audit.siblings import distinct_chances, point_chances, sibling_chances
from specdec.audit.tau import chances, efficiency
from specdec.rng import Key
from specdec.verifiers import KSeq, OptimalTransport, Traversal

V = 3
TARGET, SMALL = (sd.TableModel.random(V, order, seed=seed) for order, seed in ((2, 0), (1, 1)))
SPARSE = tuple(sd.TableModel.random(V, 1, seed=seed, zeros=0.4) for seed in (5, 6))
FIRST = sd.TableModel(TARGET.probs[1])  # of order 1
PROMPT = [0, 2]


def counted(decoder, n, nodes, eos=()):
    """text -> probability and, given the text, expected numbers: rounds, depths reached, depths accepted, nodes accepted, ``nodes`` of each.

    The text begins with the prefill's token; up to ``n`` follow.
    """
    mass, sums = defaultdict(float), defaultdict(lambda: np.zeros((4, nodes)))
    for one in walked(decoder, PROMPT, n + 1, eos=eos):
        row = np.zeros((4, nodes))
        for did in one.rounds:
            row[0, 0] += 1
            row[1, : did.tried] += 1
            row[2, : len(did.path)] += 1
            row[3, list(did.path)] += 1
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


def apart(found, accept, **settings):
    """The largest difference between counted and computed numbers, over all texts."""
    N = accept.shape[2]
    made = efficiency(accept, cut=True, **settings)
    rounds = Rounds.of(accept, cut=True, **settings)
    nodes = torch.einsum("cs,csv->cv", rounds.begun()[0], rounds.nodes)
    rows = (made.rounds[:, None], made.reached, made.accepted, nodes)
    computed = torch.stack([torch.nn.functional.pad(row, (0, N - row.shape[1])) for row in rows], 1)
    seen = torch.tensor(np.array([numbers for _, numbers in found.values()]))
    return float((seen - computed).abs().max())


RULES = {
    "rejection": (sd.Rejection(), lambda p, q: chances(p, q)),
    "block": (sd.BlockVerification(), block_chances),
}


@cache
def chains(target, draft, verifier, n=4, k=3):
    return counted(sd.decoder(target).draft(draft, length=k).verifier(verifier).build(), n, k)


@pytest.mark.parametrize(
    ("rule", "pair"),
    [
        pytest.param("rejection", (TARGET, SMALL), id="rejection, order 2", marks=pytest.mark.slow),
        pytest.param("rejection", SPARSE, id="rejection, zeros"),
        pytest.param("block", (TARGET, SMALL), id="block, order 2", marks=pytest.mark.slow),
        pytest.param("block", SPARSE, id="block, zeros"),
    ],
)
def test_chains(rule, pair):
    verifier, formula = RULES[rule]
    n, k = 4, 3
    found = chains(*pair, verifier)
    texts = list(found)
    p, q = (own(along(texts, model, n, k), texts) for model in pair)
    assert apart(found, formula(p, q)) < 1e-12
    assert len(texts) > 20
    assert sum(p for p, _ in found.values()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "verifier", [Traversal(), KSeq(), OptimalTransport()], ids=lambda v: type(v).__name__
)
def test_chains_under_verifiers_of_trees(verifier):
    """Traversal is block verification there; with a single candidate, the others are rejection."""
    n, k = 3, 2
    found = chains(TARGET, SMALL, verifier, n, k)
    texts = list(found)
    p, q = (own(along(texts, model, n, k), texts) for model in (TARGET, SMALL))
    formulas = [block_chances(p, q), chances(p, q)]
    mine, other = formulas if isinstance(verifier, Traversal) else reversed(formulas)
    assert apart(found, mine) < 1e-12
    assert apart(found, other) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_texts_that_a_stop_ended(rule):
    """Rounds are right whether a stop or the budget ended the text; proposals of tokens after a stop are on no text."""
    verifier, formula = RULES[rule]
    n, k = 4, 2
    found = counted(sd.decoder(FIRST).draft(SMALL, length=k).verifier(verifier).build(), n, k, eos=(2,))
    texts = [[*text, *[0] * (1 + n - len(text))] for text in found]
    p, q = (own(along(texts, model, n, k), texts) for model in (FIRST, SMALL))
    length = torch.tensor([len(text) - 1 for text in found])
    made = efficiency(formula(p, q), cut=True, n=length)
    seen = torch.tensor(np.array([numbers[0, 0] for _, numbers in found.values()]))
    torch.testing.assert_close(made.rounds, seen, rtol=0, atol=1e-12)
    torch.testing.assert_close(made.tokens, length.double(), rtol=0, atol=1e-12)
    assert len(length.unique()) == n + 1


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
        pytest.param("block", capped_at_the_end, marks=pytest.mark.slow),
        ("block", residual_of_p),
    ],
)
def test_a_wrong_formula_is_seen(rule, wrong):
    n, k = (4, 3) if wrong is capped_at_the_end else (3, 2)  # no shorter text tells it from the right one
    found = chains(TARGET, SMALL, RULES[rule][0], n, k)
    p, q = (own(along(list(found), model, n, k), list(found)) for model in (TARGET, SMALL))
    assert apart(found, wrong(p, q)) > 1e-3


@dataclass(frozen=True, eq=False)
class Static:
    """A tree with fixed ``parents``, level by level. Children are drawn from ``model``, or are its most probable tokens."""

    model: sd.TableModel
    parents: tuple[int, ...]
    how: str = "independent"
    name = "static"
    trees = True

    def nodes(self, length):
        return len(self.parents)

    def init(self, context, target_cache):
        return None

    def propose(self, state, context, budget, rng):
        B, N = context.batch, len(self.parents)
        tokens, parents = torch.zeros(B, N, dtype=torch.long), torch.tensor(self.parents).expand(B, N)
        depth, number = sd.tree.depths(parents)[0].tolist(), sd.tree.sibling_numbers(parents)[0].tolist()
        laws = torch.zeros(B, N, V, dtype=torch.float64)
        for node, parent in enumerate(self.parents):
            last = tokens[:, parent] if parent >= 0 else context.tokens[torch.arange(B), context.length - 1]
            q = self.model.probs[last]
            elders = [v for v in range(node) if self.parents[v] == parent]
            if self.how == "best":
                tokens[:, node] = ranked(q)[:, len(elders)]
                continue
            if self.how == "distinct":
                q = q.scatter(1, tokens[:, elders], 0)
                q = q / q.sum(-1, keepdim=True)
            q = torch.where((depth[node] < budget)[:, None], q, NEVER)  # what is not submitted is not drawn
            tokens[:, node], laws[:, node] = (
                rng.categorical(q, Key(context.length, depth[node], number[node])),
                q,
            )
        size = (torch.tensor(depth) < budget[:, None]).sum(1)
        if self.how == "best":
            return sd.Proposal(tokens, parents, size), None
        return sd.Proposal(tokens, parents, size, laws, "sampled"), None

    def observe(self, state, round):
        return None

    def select(self, state, rows):
        return None


def ranked(q):
    return q.argsort(dim=-1, descending=True, stable=True)


NEVER = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
TREES = {
    "3 siblings": (-1, -1, -1),
    "(2, 1)": tuple(shape((2, 1))),
    "(1, 2)": tuple(shape((1, 2))),
    "children of the second only": (-1, -1, 1),
}


@cache
def trees(parents, how):
    draft, depth = Static(SMALL, parents, how), max(depths(parents, len(parents))) + 1
    return counted(sd.decoder(FIRST).draft(draft, length=depth).build(), 3, len(parents)), depth


def laws(texts, K):
    p, q = (along(texts, model, 3, K) for model in (FIRST, SMALL))
    return p, q, tokens_of(texts, 3, K)


def accept_of(parents, how, p, q, tokens):
    if how != "best":
        return tree_chances(p, q, tokens, parents, replacement=how == "independent")
    made = point_chances(ranked(q), tokens)  # [C, n, K, V]
    number = [sum(parents[u] == parents[v] for u in range(v)) for v in range(len(parents))]
    return torch.stack([made[:, :, d, i] for d, i in zip(depths(parents, len(parents)), number)], -1)


@pytest.mark.parametrize("how", ["independent", "distinct", "best"])
@pytest.mark.parametrize("name", TREES)
def test_static_trees(name, how):
    parents = TREES[name]
    found, depth = trees(parents, how)
    p, q, tokens = laws(list(found), depth)
    accept = accept_of(parents, how, p, q, tokens)
    assert apart(found, accept, parents=parents) < 1e-12
    for wrong in {"independent", "distinct", "best"} - {how}:  # another way of drawing has other chances
        assert apart(found, accept_of(parents, wrong, p, q, tokens), parents=parents) > 1e-3


def in_turn(p, q, token):
    """As if each sibling had the chance of a first one."""
    one = sibling_chances(p, q[..., :1, :], token)
    return one * (1 - one) ** torch.arange(q.shape[-2])


@pytest.mark.parametrize(
    "wrong", [lambda p, q, x: sibling_chances(q[..., 0, :], p[..., None, :].expand_as(q), x), in_turn]
)
def test_a_wrong_formula_of_siblings_is_seen(wrong):
    found, depth = trees((-1, -1, -1), "independent")
    p, q, tokens = (part[:, :, 0] for part in laws(list(found), depth))
    q = q[..., None, :].expand(*q.shape[:-1], 3, V)
    assert apart(found, sibling_chances(p, q, tokens), parents=(-1, -1, -1)) < 1e-12
    assert apart(found, wrong(p, q, tokens), parents=(-1, -1, -1)) > 1e-3


@pytest.mark.parametrize("widths", [(2, 1), (1, 2)])
def test_depths_are_a_chain_where_all_nodes_of_a_depth_have_as_many_children(widths):
    found, depth = trees(tuple(shape(widths)), "independent")
    p, q, tokens = laws(list(found), depth)
    each = [q[:, :, d, None].expand(-1, -1, width, -1) for d, width in enumerate(widths)]
    chain = [sibling_chances(p[:, :, d], each[d], tokens[:, :, d]).sum(-1) for d in range(depth)]
    whole = efficiency(tree_chances(p, q, tokens, shape(widths)), cut=True, parents=shape(widths))
    for a, b in zip(whole, efficiency(torch.stack(chain, -1), cut=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def by_hand(p, q, m, distinct):
    """``[m, V]`` the probability that sibling i is drawn and accepted as x, by every sequence of draws."""
    flow = np.zeros((m, len(p)))

    def go(i, p, q, mass):
        if i == m or q.sum() == 0:
            return
        rest = np.maximum(p - q, 0)
        after = rest / rest.sum() if rest.sum() else p
        for x in np.flatnonzero(q):
            keep = min(1.0, p[x] / q[x])
            flow[i, x] += mass * q[x] * keep
            left = np.where(np.arange(len(q)) == x, 0, q) if distinct else q
            go(i + 1, after, left / left.sum() if left.sum() else left, mass * q[x] * (1 - keep))

    go(0, p, q, 1.0)
    return flow


@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_siblings_by_hand(m, zeros):
    p, q = (sd.TableModel.random(4, 1, seed=seed, zeros=zeros).probs for seed in (3, 4))
    p = torch.cat([p, q])  # equal distributions, too
    q = torch.cat([q, q])
    assert zeros == 0 or bool((p == 0).any())
    for x in range(4):
        token = torch.full((8,), x)
        made = {
            False: sibling_chances(p, q[:, None].expand(-1, m, -1), token),
            True: distinct_chances(p, q, token, m),
        }
        for distinct, chance in made.items():
            flow = torch.tensor(
                np.stack([by_hand(a, b, m, distinct)[:, x] for a, b in zip(p.numpy(), q.numpy())])
            )
            torch.testing.assert_close(chance * p[:, x, None], flow, rtol=0, atol=1e-12)


def test_siblings_of_a_draft_that_is_nearly_certain():
    """What is left after the draft's best token has no digit in 1 - q."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]])
    q = torch.tensor([[0.0, 20.0, 1.2], [0.0, 9.0, 30.0]]).softmax(-1).double()
    for x in range(3):
        chance = distinct_chances(p, q, torch.full((2,), x), 2)
        flow = [by_hand(a, b, 2, True)[:, x] for a, b in zip(p.double().numpy(), q.numpy())]
        torch.testing.assert_close(
            chance * p[:, x, None].double(), torch.tensor(np.stack(flow)), rtol=0, atol=1e-7
        )


def test_siblings_of_several_drafts():
    """Merged chains are drawn from different distributions, and the order matters."""
    p, a, b = (sd.TableModel.random(4, 0, seed=seed).probs for seed in (3, 4, 5))
    token = torch.arange(4)
    p4, both = p.expand(4, 4), torch.stack([a, b]).expand(4, 2, 4)
    made, turned = (sibling_chances(p4, laws, token) for laws in (both, both.flip(1)))
    first, rest = torch.minimum(p, a), (p - a).clamp(min=0)
    second = torch.minimum(rest, rest.sum() * b)
    torch.testing.assert_close(made * p[:, None], torch.stack([first, second], 1), rtol=0, atol=1e-14)
    assert float((made - turned.flip(1)).abs().max()) > 0.01


def test_too_many_passes_are_refused():
    one = torch.full((5000,), 1 / 5000, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"m is 3 for a vocabulary of 5000.*draw siblings independently"):
        distinct_chances(one, one, torch.tensor(0), 3)
    assert distinct_chances(one, one, torch.tensor(0), 2).tolist() == pytest.approx([1, 0], abs=1e-9)


def test_a_tree_with_more_depths_than_distributions_is_refused():
    p, tokens = torch.full((1, 2, 2, V), 1 / V, dtype=torch.float64), torch.zeros(1, 2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="the tree has 3 depths: there are distributions for 2"):
        tree_chances(p, p, tokens, [-1, 0, 1])


def test_an_efficiency_says_what_it_found():
    accept = torch.full((2, 6, 3), 0.5, dtype=torch.float64)
    found = efficiency(accept, 3, n=torch.tensor([6, 6]))
    assert found.acceptance == pytest.approx([0.5] * 3)
    assert (
        repr(found) == f"Efficiency(tau {found.tau:.2f} over 2 texts, acceptance by depth 0.50, 0.50, 0.50)"
    )
    none = torch.zeros(0)
    assert repr(found._replace(reached=none, accepted=none)).endswith("acceptance by depth not known)")
