"""What every draft promises, on an exact table. See ``contracts/__init__.py`` for how a draft gets here: by itself.

What hangs on a draft's memory is asked of a tiny random Hugging Face model too, whose cache really remembers. Drafts that read
their target (``taps``, ``follow``) get such a model for a target, and are built from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from contracts import build, modules, parts
from specdec import tree
from specdec.audit.certify import certify
from specdec.audit.planted import DeclaredArgmax, LooksThenDrops
from specdec.capabilities import DraftInfo, DraftPart
from specdec.executors.round import check
from specdec.rng import ACCEPT, BONUS, TARGET, Key, seeds

TARGET_MODEL = sd.TableModel.random(6, order=2, seed=0, zeros=0.2)
SMALL = sd.TableModel.random(6, order=2, seed=1, zeros=0.2)
PROMPTS = [[1], [2, 3, 2, 3, 2], [5, 4, 3, 2, 1, 0, 5, 4], [0, 0, 0]]
BUDGETS = [[4, 4, 4, 4], [3, 0, 1, 2], [0, 0, 0, 0], [1, 5, 2, 0], [2, 2, 2, 2]]  # a line is a round
SETTINGS = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6, "top_k": 3}]
HALF = torch.tensor([0.5, 0.5, 0, 0, 0, 0], dtype=torch.float64)
DRAFTS = parts(sd.drafts, "propose", "observe", "init", "select")


@cache
def model_of(kind: str) -> Any:
    """``SMALL``, or a model with a cache."""
    seed = {"llama": 2, "own target": 3}
    return SMALL if kind == "table" else sd.HFModel(tiny("llama", seed=seed[kind], vocab_size=6))


@cache
def reads_target(cls: type) -> bool:
    """Whether a draft looks at its target's activations or at its cache, and so needs a target that has them."""
    return DraftPart.of(build(cls, model_of("own target"))).reads_target


def kinds(cls: type) -> list[str]:
    """The models to build a draft from."""
    return ["own target"] if reads_target(cls) else ["table", "llama"]


def target_of(draft: Any) -> Any:
    return model_of("own target") if DraftPart.of(draft).reads_target else TARGET_MODEL


every_draft = pytest.mark.parametrize("cls", DRAFTS.values(), ids=DRAFTS.keys())
every_pair = pytest.mark.parametrize(
    ("cls", "kind"),
    [(cls, kind) for cls in DRAFTS.values() for kind in kinds(cls)],
    ids=[f"{name}-{kind}" for name, cls in DRAFTS.items() for kind in kinds(cls)],
)
every_setting = pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"T={s['temperature']}")


class Decision(NamedTuple):
    """One answered question: whose, under which name, and from which distribution."""

    key: tuple[int, ...]
    token: int
    distribution: torch.Tensor


@dataclass
class Recorder:
    """Real keyed decisions, written down; ``swap`` answers some of them otherwise."""

    rng: Any
    rows: list[int]
    log: list[tuple[int, Decision]]
    swap: dict[tuple[int, tuple[int, ...]], int]

    def categorical(self, probs, key):
        answer = self.rng.categorical(probs, key)
        out = answer.reshape(-1).clone()
        for i, (row, name) in enumerate(self._named(key, answer)):
            out[i] = self.swap.get((row, name), int(out[i]))
            self.log.append((row, Decision(name, int(out[i]), probs.reshape(-1, probs.shape[-1])[i])))
        return out.reshape(answer.shape)

    def accept(self, prob, key):
        answer = self.rng.accept(prob, key)
        self.log += [(row, Decision(name, -1, HALF)) for row, name in self._named(key, answer)]
        return answer

    def _named(self, key, answer):
        """(row, key) of each decision."""
        fields = [f.numpy() if isinstance(f, torch.Tensor) else f for f in key]
        *names, flat = (f.reshape(-1) for f in np.broadcast_arrays(*fields, answer.numpy()))
        assert len(flat) == answer.numel(), "a key must have the shape of the decisions that it names"
        per_row = answer[0].numel()
        return [(self.rows[i // per_row], tuple(int(f[i]) for f in names)) for i in range(len(flat))]

    def race(self, probs, position, streams=(0,)):
        raise AssertionError(
            "races are the target's: a draft asks categorical, and Coupled turns that into a race"
        )

    def select(self, rows):
        return Recorder(self.rng.select(rows), [self.rows[b] for b in rows.tolist()], self.log, self.swap)


class Session:
    """A draft among its surroundings, one round at a time, with every budget in the test's hands."""

    def __init__(self, draft, settings, rows=(0, 1, 2, 3), seed=0, swap=None):
        self.sampling, self.target = sd.Sampling(**settings), target_of(draft)
        self.draft = DraftPart.of(draft).bound(self.target, self.sampling)
        self.part = DraftPart.of(self.draft)
        self.context = sd.Context.of([PROMPTS[b] for b in rows], capacity=64, request=torch.tensor(rows))
        self.cache = self.target.cache(len(rows), 64)
        self.rng = sd.Philox(seeds(seed, len(PROMPTS))[list(rows)])
        self.log: list[tuple[int, Decision]] = []
        self.swap = swap or {}
        self.state = None
        self.number = 0

    @property
    def rows(self):
        return self.context.request.tolist()

    @torch.inference_mode()  # as the decoder does
    def round(self, budgets, foreign=False):
        """Draft, verify, commit. ``budgets`` by request; ``foreign``: the round is another draft's."""
        if not self.number:
            self._finish(
                sd.Proposal.none(self.context.batch), torch.zeros(self.context.batch, dtype=torch.long)
            )
        budget = torch.tensor([budgets[b] for b in self.rows])
        self.log.clear()
        proposal = sd.Proposal.none(self.context.batch)
        if not foreign:
            recorder = Recorder(self.rng, self.rows, self.log, self.swap)
            before = self.context.tokens.clone(), self.context.length.clone(), budget.clone()
            proposal, self.state = self.draft.propose(self.state, self.context, budget, recorder)
            assert all(map(torch.equal, before, (self.context.tokens, self.context.length, budget)))
        return self._finish(proposal, budget)

    def _finish(self, proposal, budget):
        context = self.context
        taps = {"taps": self.part.info.taps} if self.part.info.taps else {}
        scores = self.target.score(self.cache, context, proposal if proposal.nodes else None, **taps)
        probs = self.sampling(scores.logits, context, proposal)
        verdict = sd.Rejection(trust_declared=True)(proposal, probs, context, self.rng)
        if not self.number:
            self.state = self.draft.init(context, self.cache)
        self.cache.commit(context, verdict)
        committed = verdict.accepted + 1
        round = sd.Round(
            context=context,
            proposal=proposal,
            scores=scores,
            probs=probs,
            verdict=verdict,
            committed=committed,
            finished=torch.zeros(context.batch, dtype=torch.bool),
            budget=budget,
            truncated=torch.zeros(context.batch, dtype=torch.bool),
            arm=torch.zeros(context.batch, dtype=torch.long),
            arm_prob=torch.ones(context.batch),
            number=self.number,
        )
        self.state = self.draft.observe(self.state, round)
        self.context = context.append(verdict.tokens, committed)
        self.number += 1
        return round

    @torch.inference_mode()
    def keep(self, requests):
        """Rows leave, and the others may change their order."""
        at = torch.tensor([self.rows.index(b) for b in requests])
        self.context, self.rng = self.context.select(at), self.rng.select(at)
        self.cache, self.state = self.cache.select(at), self.draft.select(self.state, at)
        self.state = self.part.follow(self.state, self.cache)


def play(draft, settings, **session):
    """All rounds of ``BUDGETS``, and what each row saw of each."""
    played = Session(draft, settings, **session)
    return [seen(played.round(budgets)) for budgets in BUDGETS]


def seen(round):
    """Request -> (tokens, parents, probs, committed): what exists of a row, without the batch's padding or rounding."""
    out = {}
    for b, request in enumerate(round.context.request.tolist()):
        n = int(round.proposal.size[b])
        probs = (
            None
            if round.proposal.probs is None
            else round.proposal.distributions()[b, :n].double().round(decimals=9).tolist()
        )
        tokens, parents = round.proposal.tokens[b, :n].tolist(), round.proposal.parents[b, :n].tolist()
        out[request] = (
            tokens,
            parents,
            probs or None,
            round.verdict.tokens[b, : int(round.committed[b])].tolist(),
        )
    return out


def contract(draft, proposal, budget):
    """Everything that a proposal must be, for any draft and any budget."""
    B, N = proposal.tokens.shape
    assert proposal.parents.shape == (B, N)
    assert proposal.size.shape == (B,)
    assert proposal.tokens.dtype == proposal.parents.dtype == proposal.size.dtype == torch.long
    assert proposal.parents.device == proposal.size.device == torch.device("cpu")
    live = torch.arange(N) < proposal.size[:, None]
    assert bool((proposal.size >= 0).all())
    assert bool((proposal.size <= N).all())
    tree.check(proposal.parents, proposal.size)
    longest = ((tree.depths(proposal.parents) + 1) * live).amax(1) if N else torch.zeros(B, dtype=torch.long)
    assert bool((longest <= budget).all()), "a path is longer than its budget"
    bound = DraftInfo.of(draft).nodes(int(budget.max()))
    assert int(proposal.size.max()) <= bound, "more nodes than nodes() says"
    assert bound >= N
    if not DraftInfo.of(draft).trees:
        assert bool(tree.is_chain(proposal.parents, proposal.size).all())
    assert bool(((proposal.tokens >= 0) & (proposal.tokens < TARGET_MODEL.vocab_size))[live].all())
    if proposal.probs is None:
        assert proposal.provenance == "point"
    else:
        assert proposal.provenance in ("sampled", "declared")
        q = proposal.distributions()
        assert q.shape == (B, N, TARGET_MODEL.vocab_size)
        assert bool((q >= 0).all())
        total = q[live].double().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)
    check(proposal, budget, TARGET_MODEL.vocab_size)  # and the executor thinks so too


def dropped(proposal, log, rows):
    """Decisions that no submitted node shows; fails unless every sampled node is a decision from exactly its distribution."""
    left = [entry for entry in log if entry[1].token >= 0]  # not the coins
    assert len({(row, d.key) for row, d in log}) == len(log), "a key was used for two decisions"
    streams = {d.key[Key._fields.index("stream")] for _, d in log}
    assert not streams & {ACCEPT, BONUS, TARGET}, "these streams are the verifier's"
    if proposal.provenance == "sampled":
        depth = tree.depths(proposal.parents)
        for b, row in enumerate(rows):
            for n in range(int(proposal.size[b])):
                token, q = int(proposal.tokens[b, n]), proposal.q(n)[b]
                assert q[token] > 0
                for i, (whose, d) in enumerate(left):
                    mine = whose == row and d.token == token and d.key[1] == int(depth[b, n])
                    if mine and torch.equal(d.distribution.to(q), q):
                        del left[i]
                        break
                else:
                    raise AssertionError(
                        f"node {n} of row {row} was not drawn from the distribution that it carries"
                    )
    return left


SHARED = {"coerce", "draw", "siblings", "stateless"}  # what several drafts use


def test_every_module_has_a_part():
    found = {".".join(cls.__module__.split(".")[:3]) for cls in DRAFTS.values()}
    shared = {f"specdec.drafts.{name}" for name in SHARED}
    assert {m.__name__ for m in modules(sd.drafts)} == found | shared, (
        "a module without a class that has the methods"
    )
    assert {"Model", "NGram", "Tree", "FunctionDraft", "NoDraft"} <= DRAFTS.keys()


@every_draft
def test_has_a_name_and_says_whether_it_draws_trees(cls):
    draft = build(cls, model_of(kinds(cls)[0]))
    assert isinstance(DraftInfo.of(draft), DraftInfo)
    assert DraftInfo.of(draft).name
    assert DraftInfo.of(draft).trees in (False, True)


@every_setting
@every_pair
def test_proposals_keep_the_contract_for_every_budget(cls, settings, kind):
    session = Session(build(cls, model_of(kind)), settings)
    for budgets in BUDGETS * 2:
        round = session.round(budgets)
        contract(session.draft, round.proposal, torch.tensor(budgets))


@every_setting
@every_draft
def test_sampled_nodes_carry_the_distribution_that_they_were_drawn_from(cls, settings):
    session = Session(build(cls, model_of(kinds(cls)[0])), settings)
    for budgets in BUDGETS * 2:
        proposal = session.round(budgets).proposal
        dropped(proposal, session.log, session.rows)
        if proposal.provenance == "point" and not session.sampling.greedy:
            assert not session.log, "tokens were drawn, but the proposal says that they were chosen"


@every_setting
@every_draft
def test_what_is_submitted_does_not_depend_on_what_is_dropped(cls, settings):
    anticipation(build(cls, model_of(kinds(cls)[0])), settings)


def anticipation(draft, settings):
    """Answer every dropped decision otherwise: what is submitted must stay as it is."""
    session, unseen = Session(draft, settings), {}
    for budgets in BUDGETS:
        round = session.round(budgets)
        for row, d in dropped(round.proposal, session.log, session.rows):
            others = [t for t in d.distribution.nonzero()[:, 0].tolist() if t != d.token]
            if others:
                unseen[row, d.key] = others[0]
    same = play(draft, settings, swap=unseen) == play(draft, settings)
    assert same, "what is submitted depends on the value of a node that is dropped"


@every_setting
@every_pair
def test_the_same_keys_give_the_same_proposal(cls, settings, kind):
    draft = build(
        cls, model_of(kind)
    )  # one part serves any number of runs: what it remembers is in its state
    once, between, again = (play(draft, settings, seed=seed) for seed in (7, 8, 7))
    assert once == again
    assert (between == once) == (settings["temperature"] == 0)


@every_setting
@every_pair
def test_a_row_proposes_the_same_whoever_else_is_there(cls, settings, kind):
    """Left, alone, or in another order: the state stays aligned with its rows."""
    whole = play(build(cls, model_of(kind)), settings)
    leaving = Session(build(cls, model_of(kind)), settings)
    got = [seen(leaving.round(BUDGETS[0]))]
    leaving.keep([3, 2, 0])
    got.append(seen(leaving.round(BUDGETS[1])))
    leaving.keep([0, 3])
    got += [seen(leaving.round(budgets)) for budgets in BUDGETS[2:]]
    for there, all_of_them in zip(got, whole):
        assert there == {request: all_of_them[request] for request in there}
    for request in range(len(PROMPTS)):
        alone = play(build(cls, model_of(kind)), settings, rows=(request,))
        assert [a[request] for a in alone] == [w[request] for w in whole]


@every_setting
@every_pair
def test_rounds_of_other_drafts_do_no_harm(cls, settings, kind):
    session = Session(build(cls, model_of(kind)), settings)
    for number, budgets in enumerate(BUDGETS * 2):
        round = session.round(budgets, foreign=number % 2 == 1)
        contract(session.draft, round.proposal, torch.tensor(budgets))


def state_of(cls):
    session = Session(build(cls, model_of(kinds(cls)[0])), SETTINGS[1])
    session.round(BUDGETS[0])
    return session.state


KEEPERS = {name: cls for name, cls in DRAFTS.items() if hasattr(state_of(cls), "cache")}


@pytest.mark.parametrize("cls", KEEPERS.values(), ids=KEEPERS.keys())
def test_what_a_draft_has_consumed_it_does_not_consume_again(cls):
    """A cache that follows neither commits nor rows repairs itself, at the price of feeding everything once more."""
    session = Session(build(cls, model_of(kinds(cls)[-1])), SETTINGS[1])
    for budgets, stay in zip(BUDGETS, ([3, 2, 1, 0], [0, 3, 2], [0, 3, 2], [2, 3], [3])):
        session.round(budgets)
        session.keep(stay)
        if min(budgets):
            # New to it are the bonus token, and a last node that nothing was drafted after.
            assert (session.state.cache.sync(session.context) >= session.context.length - 2).all()


def test_some_drafts_have_a_cache_and_some_read_their_target():
    assert {"MagicDec", "Model", "Tree"} <= KEEPERS.keys()
    reading = {name for name, cls in DRAFTS.items() if reads_target(cls)}
    assert {"MagicDec", "Pool", "Spire"} == reading  # a pool may hold such drafts


def texts(target, draft, settings, verifier, budgets, **call):
    base = sd.decoder(target).sampling(**settings).verifier(verifier)
    decoder = (base if draft is None else base.draft(draft, length=4)).build()
    return decoder.generate(PROMPTS, budgets, **call).ids


@pytest.mark.parametrize("budgets", [12, [1, 9, 2, 17]], ids=["even", "ragged"])
@pytest.mark.parametrize("eos", [(), (3,)], ids=["no eos", "eos"])
@every_pair
def test_greedy_output_is_plain_decodings(cls, budgets, eos, kind):
    target, call = target_of(build(cls, model_of(kinds(cls)[0]))), {"seed": 0, "eos_token_id": eos}
    plain = texts(target, None, SETTINGS[0], sd.Rejection(), budgets, **call)
    for model in (model_of(kind), target):
        assert texts(target, build(cls, model), SETTINGS[0], sd.Rejection(), budgets, **call) == plain


@pytest.mark.parametrize("budgets", [12, [1, 9, 2, 17]], ids=["even", "ragged"])
@pytest.mark.parametrize("settings", SETTINGS[1:], ids=lambda s: f"T={s['temperature']}")
@every_pair
def test_coupled_output_is_plain_samplings(cls, settings, budgets, kind):
    seed, target = [11, 12, 13, 14], target_of(build(cls, model_of(kinds(cls)[0])))
    plain = texts(target, None, settings, sd.Coupled(), budgets, seed=seed)
    assert texts(target, build(cls, model_of(kind)), settings, sd.Coupled(), budgets, seed=seed) == plain
    assert texts(target, None, settings, sd.Coupled(), budgets, seed=[1, 2, 3, 4]) != plain


@every_draft
def test_the_output_has_the_targets_distribution_exactly(cls):
    target, small = sd.TableModel.random(3, seed=2, zeros=0.3), sd.TableModel.random(3, seed=3, zeros=0.3)
    if reads_target(cls):
        target = small = sd.HFModel(tiny("llama", seed=4, vocab_size=3))
    decoder = sd.decoder(target).draft(build(cls, small), length=2).build()
    found = certify(decoder, prompts=[[0], [2, 1, 2]], max_new_tokens=[4, 3])
    assert found.lossless, found


def test_the_suite_sees_a_draft_that_looks_before_it_drops():
    draft = LooksThenDrops(HALF, unwanted=1)
    contract(draft, Session(draft, SETTINGS[1]).round(BUDGETS[0]).proposal, torch.tensor(BUDGETS[0]))
    with pytest.raises(AssertionError, match="value of a node that is dropped"):
        anticipation(draft, SETTINGS[1])


def test_the_suite_sees_a_distribution_that_was_not_drawn_from():
    class Lies(DeclaredArgmax):
        def propose(self, state, context, budget, rng):
            rng.categorical(self.distribution.expand(context.batch, 1, -1), Key(context.length[:, None]))
            q = self.distribution.flip(0).expand(context.batch, 1, -1)
            return sd.Proposal.chain(q.argmax(-1), budget.clamp(max=1), q, "sampled"), state

    session = Session(Lies(HALF), SETTINGS[1])
    proposal = session.round(BUDGETS[0]).proposal
    with pytest.raises(AssertionError, match="was not drawn from the distribution"):
        dropped(proposal, session.log, session.rows)


def test_the_suite_sees_a_key_used_twice():
    class Twice(LooksThenDrops):
        def propose(self, state, context, budget, rng):
            rng.categorical(self.distribution.expand(context.batch, -1), Key(context.length))
            return super().propose(state, context, budget, rng)

    session = Session(Twice(HALF, unwanted=5), SETTINGS[1])
    proposal = session.round(BUDGETS[0]).proposal
    with pytest.raises(AssertionError, match="used for two decisions"):
        dropped(proposal, session.log, session.rows)


def test_a_part_that_cannot_be_built_is_told_how():
    class Needy:
        def __init__(self, model, heads):
            pass

    with pytest.raises(
        TypeError, match=r"Needy needs model, heads: give it a static method example\(model\)"
    ):
        build(Needy, SMALL)
