"""``check_draft``: every rule is broken once or more, by a draft with one mistake, and is named."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec as sd
from specdec.audit.planted import DeclaredArgmax, LooksThenDrops
from specdec.drafts.siblings import Distinct, Independent, TopAndOne
from specdec.rng import ACCEPT, Key
from specdec.testing import BrokenRule, check_draft
from specdec.testing.draft import SUITE

V = 6
MENU = torch.tensor([[0.3, 0.1, 0.2, 0.1, 0.1, 0.2], [0.05, 0.25, 0.1, 0.3, 0.2, 0.1]], dtype=torch.float64)


class Memory(NamedTuple):
    """``seen [B]``: how many nodes of each row were accepted; and the same in a list."""

    seen: Tensor
    log: list[int]


class Right:
    """A chain drawn from one of two distributions, by what was accepted before. The mistakes below are changes of it."""

    name = "right"

    def init(self, context, target_cache):
        return Memory(torch.zeros(context.batch, dtype=torch.long), [0] * context.batch)

    def distribution(self, state, context):
        return MENU[state.seen % 2]

    def keys(self, context, N):
        return Key(context.length[:, None], torch.arange(N).expand(context.batch, N))

    def propose(self, state, context, budget, rng):
        N = int(budget.max())
        q = self.distribution(state, context)[:, None].expand(-1, N, -1)
        tokens = rng.categorical(q, self.keys(context, N))
        return sd.Proposal.chain(tokens, budget.clone(), q, "sampled"), state

    def observe(self, state, round):
        seen = state.seen + round.verdict.accepted
        return Memory(seen, seen.tolist())

    def select(self, state, rows):
        return Memory(state.seen[rows], [state.log[b] for b in rows])

    def join(self, state, other):
        return Memory(torch.cat([state.seen, other.seen]), state.log + other.log)


class Proposes(Right):
    """``change``: the correct proposal -> a wrong one."""

    def __init__(self, change, **declared):
        vars(self).update(change=change, **declared)

    def propose(self, state, context, budget, rng):
        proposal, state = super().propose(state, context, budget, rng)
        return self.change(proposal), state


def longer(p):
    return sd.Proposal.chain(
        torch.cat([p.tokens, p.tokens[:, :1]], 1),
        p.size + 1,
        torch.cat([p.probs, p.probs[:, :1]], 1),
        "sampled",
    )


def star(p):
    return replace(p, parents=torch.full_like(p.parents, -1))


def twins(p):
    """A tree of the chain and its last node once more."""
    if not p.nodes:
        return p
    tokens, probs = (torch.cat([t, t[:, -1:]], 1) for t in (p.tokens, p.probs))
    parents = torch.cat([p.parents, p.parents[:, -1:]], 1)
    full = p.size == p.nodes
    return sd.Proposal(tokens, parents, p.size + full, probs, "sampled")


class Propose(Right):
    """``how``: a whole ``propose``."""

    def __init__(self, how, **declared):
        vars(self).update(how=how, **declared)

    def propose(self, state, context, budget, rng):
        return self.how(self, state, context, budget, rng)


def chain(tokens, budget, q=None):
    size = budget.clamp(max=tokens.shape[1])
    return sd.Proposal.chain(tokens, size, q, None if q is None else "sampled")


def one_key(self, state, context, budget, rng):
    B, N = context.batch, int(budget.max())
    q = MENU[:1].expand(B, N, V)
    tokens = rng.categorical(q, Key(context.length[:, None], torch.zeros(B, N, dtype=torch.long)))
    return chain(tokens, budget, q), state


def keyed_by_position(self, state, context, budget, rng):
    B, N = context.batch, int(budget.max())
    q = MENU[:1].expand(B, N, V)
    return chain(rng.categorical(q, Key(context.length[:, None] + torch.arange(N))), budget, q), state


def verifiers_stream(self, state, context, budget, rng):
    q = MENU[:1].expand(context.batch, -1)
    token = rng.categorical(q, Key(context.length, 0, 0, ACCEPT))
    return chain(token[:, None], budget, q[:, None]), state


def one_key_for_all_rows(self, state, context, budget, rng):
    q = MENU[:1].expand(context.batch, -1)
    return chain(rng.categorical(q, Key(context.length[:, None]))[:, None], budget, q[:, None]), state


def keyed_by_nothing(self, state, context, budget, rng):
    q = MENU[:1].expand(context.batch, -1)
    token = rng.categorical(q, Key(torch.zeros_like(context.length)))
    return chain(token[:, None], budget, q[:, None]), state


def races(self, state, context, budget, rng):
    q = MENU[:1].expand(context.batch, -1)
    return chain(rng.race(q, context.length)[:, None], budget, q[:, None]), state


def global_torch(self, state, context, budget, rng):
    q = MENU[:1].expand(context.batch, -1)
    return chain(torch.multinomial(q, 1), budget, q[:, None]), state


def global_numpy(self, state, context, budget, rng):
    return chain(torch.from_numpy(np.random.randint(0, V, (context.batch, 1))), budget), state


def global_python(self, state, context, budget, rng):
    return chain(torch.tensor([[random.randrange(V)] for _ in range(context.batch)]), budget), state


def own_numbers(self, state, context, budget, rng):
    """A sample from a generator of its own, which is seeded with the text: repeatable, and unknown to the library."""
    q = MENU[:1].expand(context.batch, -1)
    draw = torch.Generator()
    rows = [
        torch.multinomial(q[b], 1, generator=draw.manual_seed(int(n))) for b, n in enumerate(context.length)
    ]
    return chain(torch.stack(rows), budget, q[:, None]), state


def sharper(self, state, context, budget, rng):
    """Draws at a lower temperature than it says."""
    q = MENU[:1].expand(context.batch, -1)
    drawn = q**2 / (q**2).sum(-1, keepdim=True)
    return chain(rng.categorical(drawn, Key(context.length))[:, None], budget, q[:, None]), state


def says_chosen(self, state, context, budget, rng):
    q = MENU[:1].expand(context.batch, -1)
    return chain(rng.categorical(q, Key(context.length))[:, None], budget), state


def drops_the_rare(self, state, context, budget, rng):
    """A node is dropped, and all after it, where its token is 5, which no first alternative is."""
    proposal, state = Right().propose(state, context, budget, rng)
    good = (proposal.tokens != 5).long().cumprod(1).sum(1)
    return replace(proposal, size=torch.minimum(proposal.size, good)), state


def draws_again(self, state, context, budget, rng):
    """Draws a second time where the first draw was 3."""
    q = MENU[:1].expand(context.batch, -1)
    first, second = (rng.categorical(q, Key(context.length, 0, n)) for n in (0, 1))
    return chain(torch.where(first == 3, second, first)[:, None], budget, q[:, None]), state


def follows_a_dropped_node(self, state, context, budget, rng):
    """The first drawn token is dropped always, and another one chosen by it."""
    q = MENU[:1].expand(context.batch, -1)
    return chain(rng.categorical(q, Key(context.length, 7)).sub(2).clamp(min=0)[:, None], budget, None), state


class InPlace(Right):
    def observe(self, state, round):
        state.seen.add_(round.verdict.accepted)
        return state


class InPlaceList(Right):
    def observe(self, state, round):
        for b, n in enumerate(round.verdict.accepted.tolist()):
            state.log[b] += n
        return state._replace(seen=torch.tensor(state.log))


class InPlaceProposing(Right):
    def propose(self, state, context, budget, rng):
        answer = super().propose(state, context, budget, rng)
        state.seen[0] += 1
        return answer


class InPlaceSelecting(Right):
    def select(self, state, rows):
        state.seen.copy_(state.seen.flip(0))
        return Memory(state.seen[rows], state.log)


class Edits(Right):
    def propose(self, state, context, budget, rng):
        answer = super().propose(state, context, budget, rng)
        budget.zero_()
        return answer


@dataclass
class OnSelf(Right):
    """What it remembers is in the draft: another run starts where the last one ended."""

    rounds: list[int] = field(default_factory=list)

    def distribution(self, state, context):
        self.rounds.append(1)
        return MENU[(state.seen + len(self.rounds) // 7) % 2]


class OwnGenerator(Right):
    """Guesses, and says truly that the tokens are point masses; another run has other guesses."""

    def __init__(self):
        self.draw = torch.Generator().manual_seed(0)

    def propose(self, state, context, budget, rng):
        return chain(torch.randint(0, V, (context.batch, 1), generator=self.draw), budget), state


class ByTheLongest(Right):
    def distribution(self, state, context):
        return MENU[(context.length.max() % 2).expand(context.batch)]


class ByTheRow(Right):
    def distribution(self, state, context):
        return MENU[torch.arange(context.batch) % 2]


class ByTheOthersBudgets(Right):
    def propose(self, state, context, budget, rng):
        return super().propose(state, context, torch.minimum(budget, budget.sum() // 3), rng)


class KeepsAll(Right):
    """Its state has all rows still."""

    def distribution(self, state, context):
        return MENU[state.seen[: context.batch] % 2]

    def select(self, state, rows):
        return state

    def observe(self, state, round):
        B = round.context.batch
        return state._replace(seen=torch.cat([state.seen[:B] + round.verdict.accepted, state.seen[B:]]))


class SelectsSorted(Right):
    def select(self, state, rows):
        return super().select(state, rows.sort().values)


class SelectsNothing(Right):
    def select(self, state, rows):
        return Memory(state.seen, state.log)


class JoinsBackwards(Right):
    def join(self, state, other):
        return super().join(other, state)


class OnlyItsOwn(Right):
    """Reads the token of the last node that its budget allows, which another draft's proposal may not have."""

    def observe(self, state, round):
        if int(round.budget.max()):
            round.proposal.tokens[:, int(round.budget.max()) - 1]
        return super().observe(state, round)


class BreaksLate(Right):
    """Ignores budgets in a decoder, in greedy texts or in sampled ones."""

    def __init__(self, greedy=None):
        self.greedy = greedy

    def bind(self, target, sampling):
        return BreaksLate(sampling.greedy)

    def propose(self, state, context, budget, rng):
        far = context.tokens.shape[1] != 64 and self.greedy == self.when  # 64: in the suite's own sessions
        return super().propose(state, context, budget + far, rng)


class BreaksLateGreedy(BreaksLate):
    when = True

    def bind(self, target, sampling):
        return BreaksLateGreedy(sampling.greedy)


class BreaksLateSampled(BreaksLate):
    when = False

    def bind(self, target, sampling):
        return BreaksLateSampled(sampling.greedy)


class LooksAtOneText(Right):
    """Drops a 1 by its value, in one text only."""

    def propose(self, state, context, budget, rng):
        proposal, state = super().propose(state, context, budget, rng)
        here = (context.length == 2) & (context.tokens[:, 0] == 0)
        if proposal.nodes:
            proposal = replace(
                proposal, size=torch.where(here & (proposal.tokens[:, 0] == 1), 0, proposal.size)
            )
        return proposal, state


class NeverCommits(sd.drafts.Model):
    def bind(self, target, sampling):
        return replace(self, sampling=sampling, vocab_size=target.vocab_size)

    def observe(self, state, round):
        return state._replace(proposal=None)


class KeepsInAList(NeverCommits):
    """Has its cache under another name, in a list."""

    def init(self, context, target_cache):
        return {"members": [super().init(context, target_cache)]}

    def propose(self, state, context, budget, rng):
        proposal, inner = super().propose(state["members"][0], context, budget, rng)
        return proposal, {"members": [inner]}

    def observe(self, state, round):
        return {"members": [super().observe(state["members"][0], round)]}

    def select(self, state, rows):
        return {"members": [super().select(state["members"][0], rows)]}

    def join(self, state, other):
        return {"members": [super().join(state["members"][0], other["members"][0])]}


class Nothing:
    name = "nothing"

    def init(self, context, target_cache):
        return None


PLANTED: list[tuple[str, Any]] = [
    ("declaration", Nothing()),
    ("declaration", Proposes(lambda p: p, name="")),
    ("form", Propose(lambda self, s, c, budget, rng: chain(c.tokens[:, :1], budget))),
    ("form", Proposes(lambda p: replace(p, size=p.size.int()))),
    ("form", Proposes(lambda p: replace(p, size=p.size + p.nodes))),
    ("form", Proposes(lambda p: p.select(torch.arange(1)))),
    ("budget", Proposes(longer)),
    ("structure", Proposes(lambda p: replace(p, parents=p.parents + 1))),
    ("structure", Proposes(star)),
    ("nodes", Proposes(twins, trees=True)),
    ("vocabulary", Proposes(lambda p: replace(p, tokens=p.tokens + 3))),
    ("vocabulary", Proposes(lambda p: replace(p, tokens=p.tokens - 1))),
    ("probabilities", Proposes(lambda p: replace(p, probs=p.probs.log()))),
    ("probabilities", Proposes(lambda p: replace(p, probs=p.probs * 1.0001))),
    ("probabilities", Proposes(lambda p: replace(p, probs=p.probs[..., :-1]))),
    ("declaration", Proposes(lambda p: p, siblings="in sequence")),
    ("siblings", Proposes(twins, trees=True, nodes=lambda length: length + 1, siblings="independent")),
    ("siblings", Proposes(twins, trees=True, nodes=lambda length: length + 1, siblings="distinct")),
    ("provenance", DeclaredArgmax(MENU[0])),
    ("provenance", Propose(own_numbers)),
    ("provenance", Propose(sharper)),
    ("provenance", Propose(says_chosen)),
    ("keys", Propose(one_key)),
    ("keys", Propose(keyed_by_position)),
    ("keys", Propose(verifiers_stream)),
    ("keys", Propose(one_key_for_all_rows)),
    ("keys", Propose(keyed_by_nothing)),
    ("keys", Propose(races)),
    ("keys", Propose(global_torch)),
    ("keys", Propose(global_numpy)),
    ("keys", Propose(global_python)),
    ("anticipation", LooksThenDrops(MENU[0], unwanted=1)),
    ("anticipation", Propose(drops_the_rare)),
    ("anticipation", Propose(draws_again)),
    ("provenance", Propose(follows_a_dropped_node)),
    ("state", InPlace()),
    ("state", InPlaceList()),
    ("state", InPlaceProposing()),
    ("state", InPlaceSelecting()),
    ("state", Edits()),
    ("repeatable", OnSelf()),
    ("repeatable", OwnGenerator()),
    ("mates", ByTheLongest()),
    ("mates", ByTheRow()),
    ("mates", ByTheOthersBudgets()),
    ("select", KeepsAll()),
    ("select", SelectsSorted()),
    ("select", SelectsNothing()),
    ("join", JoinsBackwards()),
    ("other drafts", OnlyItsOwn()),
    ("cache", NeverCommits(sd.TableModel.random(V, order=2, seed=1))),
    ("cache", KeepsInAList(sd.TableModel.random(V, order=2, seed=1))),
    ("greedy", BreaksLateGreedy()),
    ("coupled", BreaksLateSampled()),
    ("lossless", LooksAtOneText()),
]


def test_a_right_draft_keeps_every_rule_but_that_of_caches():
    found = check_draft(Right())
    assert set(found.rules) == SUITE.rules.keys() - {"cache"}
    assert found.not_tried == {"consumed": "its state has no cache, which is an object with sync and commit"}
    assert repr(found).startswith(f"Right keeps {len(found.rules)} rules: declaration, form, budget")
    assert repr(found).endswith(
        "\nnot tried: consumed (its state has no cache, which is an object with sync and commit)"
    )


@pytest.mark.parametrize(
    ("rule", "draft"),
    [
        pytest.param(rule, draft, id=f"{n}-{rule}", marks=pytest.mark.slow if n % 2 else ())
        for n, (rule, draft) in enumerate(PLANTED)
    ],
)
@pytest.mark.slow
def test_a_planted_mistake_is_caught_by_its_rule(rule, draft):
    with pytest.raises(BrokenRule) as caught:
        check_draft(draft)
    assert caught.value.rule == rule, caught.value
    said = str(caught.value)
    assert said.startswith(f"{type(draft).__name__} breaks the rule {rule!r}: ")
    assert "Remedy: " in said
    assert said.endswith(SUITE.rules[rule].remedy)


def test_a_cache_is_found_wherever_it_is():
    model = sd.TableModel.random(V, order=2, seed=1)
    with pytest.raises(BrokenRule, match=r"cache, state\['members'\]\[0\]\.cache, holds"):
        check_draft(KeepsInAList(model), only=["consumed"])
    assert check_draft(sd.drafts.Model(model), only=["consumed"]).rules == ("cache",)


@pytest.mark.parametrize("how", [Independent(), Distinct(), TopAndOne()], ids=lambda how: how.kind)
def test_trees_keep_what_they_declare_of_siblings(how):
    model = sd.TableModel.random(V, order=2, seed=1)
    found = check_draft(sd.drafts.Tree(model, (3, 1), siblings=how), only=["proposals", "draws"])
    assert {"siblings", "provenance"} <= set(found.rules)


def test_every_rule_is_broken_by_some_plant():
    assert {rule for rule, _ in PLANTED} == SUITE.rules.keys()


def test_a_state_that_is_changed_in_place_passes_the_certifier():
    """Each run begins with a new state, and uses each state once; so it is the check that has to find it."""
    target = sd.TableModel.random(V, order=1, seed=0, zeros=0.4)
    assert sd.certify(sd.decoder(target).draft(InPlace(), length=1).build()).lossless


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match=r"draft is the class Right: give an object, such as Right\(\)"):
        check_draft(Right)
    with pytest.raises(ValueError, match=r"only is \['draft'\]: give some of declares, proposals"):
        check_draft(Right(), only=["draft"])
    with pytest.raises(ValueError, match=r"only is 'draws'.* in a list"):
        check_draft(Right(), only="draws")
    with pytest.raises(ValueError, match=r"'magicdec' reads its target: give target="):
        check_draft(sd.drafts.MagicDec(window=3))


def test_a_draft_of_another_vocabulary_is_told_to_give_its_target():
    menu = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]], dtype=torch.float64)

    class Three(Right):
        """Made for 3 tokens: it looks up its distribution by the last one."""

        def distribution(self, state, context):
            return menu[context.tokens.gather(1, context.length[:, None] - 1)[:, 0]]

    with pytest.raises(
        BrokenRule, match=r"not made for 6 tokens.*give its own target, check_draft\(draft, target\)"
    ):
        check_draft(Three())
    assert "form" in check_draft(Three(), sd.TableModel.random(3, 1), only=["proposals"]).rules


def test_a_vocabulary_that_cannot_be_enumerated_is_said_not_to_be():
    model = sd.TableModel.random(20, order=1, seed=0)
    found = check_draft(sd.drafts.Model(model), only=["declares", "distribution"])
    assert "vocabulary of 20 has too many texts" in found.not_tried["distribution"]
    assert found.rules == ("declaration",)
