"""Lengths that the draft decides while drafting: lawful ones are replayed exactly, anticipating ones are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_chances import NEVER, PROMPT, RULES, SMALL, TARGET, V, along, apart, counted, own, tokens_of

import specdec as sd
from specdec.audit.certify import certify
from specdec.audit.lengths import Drafted, after, before, check_policy
from specdec.rng import Key

LAWFUL = {
    "as many as there are": lambda seen: torch.full(seen.own.shape[:-1], seen.own.shape[-1]),
    "sure before the draw": lambda seen: before(seen.most > 0.55),
    "little entropy before the draw": lambda seen: before(seen.entropy < 0.9),
    "stops after an unlikely token": lambda seen: after(seen.own > 0.45),
    "stops after a token": lambda seen: after(seen.token != 1),
    "stops after an unlikely text": lambda seen: after(seen.own.cumprod(-1) > 0.3),
    "both": lambda seen: torch.minimum(before(seen.most > 0.4), after(seen.own > 0.3)),
}
ANTICIPATING = {
    "drops an unlikely token": lambda seen: before(seen.own > 0.45),
    "drops a token": lambda seen: before(seen.token != 1),
    "drops an unlikely text": lambda seen: before(seen.own.cumprod(-1) > 0.3),
    "drops a token that is not the most probable": lambda seen: before(seen.own == seen.most),
    "looks one ahead": lambda seen: before(torch.cat([seen.most[..., 1:], seen.most[..., :1]], -1) > 0.5),
    "looks at all": lambda seen: torch.where(seen.own.prod(-1) > 0.05, 2, 1),
    "the best of all lengths": lambda seen: (
        seen.own.cumprod(-1) * torch.arange(1, 1 + seen.own.shape[-1])
    ).argmax(-1),
}


@dataclass(frozen=True, eq=False)
class Stopping:
    """Draws a chain of up to ``K`` tokens from a table, and submits as many of them as a policy says."""

    model: sd.TableModel
    policy: Any
    K: int = 2
    name = "stopping"

    def init(self, context, target_cache):
        return None

    def propose(self, state, context, budget, rng):
        B = context.batch
        tokens, laws = (
            torch.zeros(B, self.K, dtype=torch.long),
            torch.zeros(B, self.K, V, dtype=torch.float64),
        )
        last = context.tokens[torch.arange(B), context.length - 1]
        for j in range(self.K):
            # Beyond it nothing is drawn.
            laws[:, j] = torch.where((j < budget)[:, None], self.model.probs[last], NEVER)
            last = tokens[:, j] = rng.categorical(laws[:, j], Key(context.length, j))
        size = self.policy(Drafted.of(laws, tokens)).minimum(budget)
        return sd.Proposal.chain(tokens, size, laws, "sampled"), None

    def observe(self, state, round):
        return None

    def select(self, state, rows):
        return None


def chains(rows=400, K=4, vocabulary=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q = torch.rand(rows, K, vocabulary, generator=draw, dtype=torch.float64) ** 3
    q /= q.sum(-1, keepdim=True)
    return Drafted.of(q, torch.multinomial(q.flatten(0, 1), 1, generator=draw).view(rows, K))


def decoder(policy, verifier):
    return (
        sd.decoder(sd.TableModel(TARGET.probs[1]))
        .draft(Stopping(SMALL, policy), length=2)
        .verifier(verifier)
        .build()
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LAWFUL)
def test_lawful_policies_are_replayed_exactly(name, rule):
    policy, n, k = LAWFUL[name], 3, 2
    verifier, formula = RULES[rule]
    found = counted(decoder(policy, verifier), n, k)
    texts = list(found)
    target = sd.TableModel(TARGET.probs[1])
    p, q = (along(texts, model, n, k) for model in (target, SMALL))
    seen = Drafted.of(q, tokens_of(texts, n, k))
    lengths = check_policy(policy, seen)
    assert apart(found, formula(own(p, texts), own(q, texts)), lengths=lengths) < 1e-12
    if name != "as many as there are":
        assert apart(found, formula(own(p, texts), own(q, texts)), lengths=(lengths + 1) % 3) > 1e-3


@pytest.mark.parametrize("name", LAWFUL)
def test_lawful_policies_pass_and_lose_nothing(name):
    lengths = check_policy(LAWFUL[name], chains())
    assert lengths.shape == (400,)
    assert name == "as many as there are" or len(lengths.unique()) > 1
    assert certify(decoder(LAWFUL[name], sd.BlockVerification()), [PROMPT], 3).lossless


@pytest.mark.parametrize("name", ANTICIPATING)
def test_anticipating_policies_are_refused(name):
    with pytest.raises(ValueError, match=r"the policy anticipates: chain .* stop after it"):
        check_policy(ANTICIPATING[name], chains())


def test_an_anticipating_policy_is_biased():
    """Which is why it is refused: the same draft is not lossless, under either rule."""
    for verifier in (sd.Rejection(), sd.BlockVerification()):
        found = certify(decoder(ANTICIPATING["drops an unlikely token"], verifier), [PROMPT], 3)
        assert found.total_variation > 0.01


def test_what_is_known_before_the_round_may_decide():
    q = torch.full((10, 3, 4), 0.25)
    seen = Drafted.of(q, torch.zeros(10, 3, dtype=torch.long), torch.arange(10.0)[:, None])
    assert check_policy(lambda seen: seen.known[:, 0].long().clamp(max=3), seen).tolist() == [
        0,
        1,
        2,
        *[3] * 7,
    ]
    blocks = Drafted.of(q.view(2, 5, 3, 4), torch.zeros(2, 5, 3, dtype=torch.long))
    assert check_policy(lambda seen: before(seen.most > 0.2), blocks).tolist() == [[3] * 5] * 2


def test_lengths_that_are_none_are_refused():
    seen = chains(rows=30)
    for policy, message in (
        (lambda seen: seen.own[:, 0], "give whole numbers, 0 to 4"),
        (lambda seen: torch.full((30,), 5), "give whole numbers, 0 to 4"),
        (lambda seen: torch.ones(3, dtype=torch.long), r"shape \[3\] for chains \[30, 4\]"),
        (lambda seen: before(seen.most > seen.most.mean()), "when other chains are left out"),
    ):
        with pytest.raises(ValueError, match=message):
            check_policy(policy, seen)


def test_statistics_of_a_distribution():
    q = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    seen = Drafted.of(q, torch.tensor([[1, 0]]))
    assert seen.own.tolist() == [[0.25, 1.0]]
    assert seen.most.tolist() == [[0.5, 1.0]]
    assert seen.entropy[0].tolist() == pytest.approx([1.5 * 0.6931471805599453, 0])
    assert before(torch.tensor([[True, False, True], [False, True, True]])).tolist() == [1, 0]
    assert after(torch.tensor([[True, False, True], [False, True, True]])).tolist() == [2, 1]
