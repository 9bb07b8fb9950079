"""Chains that end by rules, live and in replays, and chains whose lengths follow the rounds before."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from test_chances import FIRST, SMALL, along, apart, counted, own, tokens_of
from test_chances import RULES as VERIFIERS
from tiny import tiny
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import specdec as sd
from specdec import lab
from specdec.audit.lengths import Drafted, check_policy, stopping
from specdec.capabilities import DraftPart
from specdec.drafts import Head, MagicDec, Model, NGram, Paced, Spire, Tree
from specdec.drafts.heads import Chain, Eagle3
from specdec.drafts.spire import SpireModel
from specdec.drafts.stops import Confidence, Entropy, MaxProb, PathProb, Rule
from specdec.executors import Ahead
from specdec.models import Windowed

RULES = {
    "own": Confidence(0.45),
    "most": MaxProb(0.55),
    "entropy": Entropy(0.647),
    "two": (Rule("after", lambda seen: seen.token[..., -1] == 1), MaxProb(0.5)),
    "path": PathProb(0.5),
    "before": Rule("before", lambda seen: seen.own.prod(-1) < 0.5),
}
PROMPTS, BUDGETS = [[5], [7, 8, 9], [1, 2, 3, 4] * 3, [20, 1]], [9, 7, 3, 8]
AFTER, BEFORE = Confidence(0.4), (MaxProb(0.35), Confidence(0.1))


@cache
def model(seed, **options):
    """A llama with distributions of all kinds."""
    return sd.HFModel(tiny("llama", seed, vocab_size=23, initializer_range=0.1), **options)


@pytest.mark.parametrize("verifier", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_the_rounds_of_its_replay_exactly(name, verifier):
    n = k = 2
    how, formula = VERIFIERS[verifier]
    decoder = sd.decoder(FIRST).draft(Model(SMALL, stop=RULES[name]), k).verifier(how).build()
    found = counted(decoder, n, k)
    texts = list(found)
    p, q = (along(texts, one, n, k) for one in (FIRST, SMALL))
    lengths = check_policy(stopping(RULES[name]), Drafted.of(q, tokens_of(texts, n, k)))
    assert len(lengths.unique()) > 1
    assert apart(found, formula(own(p, texts), own(q, texts)), lengths=lengths) < 1e-12


def test_a_rule_sees_what_is_known():
    shapes = []

    def look(seen):
        shapes.append([part.shape[-1] for part in seen[:4]])
        return torch.zeros(2, dtype=torch.bool)

    draft, context = (
        Model(SMALL, stop=(Rule("before", look), Rule("after", look))),
        sd.Context.of([[0], [1, 2]]),
    )
    draft.propose(draft.init(context, None), context, torch.tensor([2, 2]), sd.Philox(torch.arange(2)))
    stopping(draft.stop)(Drafted.of(torch.full((2, 2, 3), 1 / 3), torch.zeros(2, 2, dtype=torch.long)))
    assert shapes == [[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 2, 2], [2, 2, 2, 2]] * 2


def test_replays_take_rules(tmp_path):
    settings = {"new_tokens": 4, "k": 3, "eos_token_id": (), "progress": False}
    trace = lab.record(model(0), [row * 3 for row in PROMPTS[:2]], tmp_path / "t", **settings)
    whole = lab.replay(trace, model(1), 3)
    for stop in (0.3, BEFORE):
        replay, live = whole.stopping(stop), lab.replay(trace, Model(model(1), stop=stop), 3)
        assert torch.equal(replay.size, live.size)
        assert replay.tau == live.tau < whole.tau
    greedy = lab.record(model(0), PROMPTS[:1], tmp_path / "g", sampling=sd.Sampling(0), **settings)
    with pytest.raises(ValueError, match="without randomness"):
        lab.replay(greedy, model(0), 3).stopping(0.3)


@pytest.mark.parametrize("temperature", [0, 1])
def test_replays_count_the_tokens_that_are_drafted(temperature, tmp_path):
    settings = {"new_tokens": 8, "k": 3, "eos_token_id": (), "progress": False}
    prompts = [row * 3 for row in PROMPTS]
    trace = lab.record(model(0), prompts, tmp_path / "t", sampling=sd.Sampling(temperature), **settings)
    for k, stop in ((3, None), (2, None), (3, Confidence(0.3))):
        replay = lab.replay(trace, Model(model(1), stop=stop), 3)
        if stop is None:
            torch.testing.assert_close(replay.drafted(k), k * replay.efficiency(k).rounds)
            continue
        drafted = torch.zeros(len(prompts), dtype=torch.float64)
        for c, start in ((c, s) for c in range(len(prompts)) for s in range(8)):
            begun = begins(replay, c, start)
            drafted[c] += begun * replay.proposed[c, start]
        torch.testing.assert_close(replay.drafted(), drafted)
        assert float(drafted.sum()) < 3 * float(replay.efficiency().rounds.sum())
    with pytest.raises(ValueError, match="only the tokens of chains"):
        lab.replay(trace, Tree(model(1), (2, 1)), 2).drafted()


def begins(replay, c, start):
    """The probability that a block starts there, by the block before it."""
    if not start:
        return 1.0
    total = 0.0
    for before in range(max(0, start - replay.k - 1), start):
        chances = [float(x) for x in replay.accept[c, before, : int(replay.size[c, before])]]
        took = start - before - 1
        if took <= len(chances):
            stays = 1 - chances[took] if took < len(chances) else 1.0
            total += begins(replay, c, before) * torch.tensor(chances[:took]).prod().item() * stays
    return total


def test_a_number_ends_chains_where_transformers_does():
    sizes = set()
    for prompt in PROMPTS:
        draft, context = Model(model(1), sd.Sampling(0), stop=0.2), sd.Context.of([prompt], capacity=32)
        state, rng = draft.init(context, None), sd.Philox(torch.arange(1))
        proposal, _ = draft.propose(state, context, torch.tensor([6]), rng)
        theirs = copy.deepcopy(model(1).model)
        config = theirs.generation_config
        config.update(num_assistant_tokens=6, assistant_confidence_threshold=0.2, max_length=64, min_length=0)
        ids = torch.tensor([prompt])
        candidates, _ = AssistedCandidateGenerator(ids, theirs, config, {}).get_candidates(ids)
        assert candidates[0, len(prompt) :].tolist() == proposal.tokens[0].tolist()
        sizes.add(proposal.nodes)
    assert len(sizes) > 1


def draft_of(name, stop):
    target, small = model(0), model(1)
    return {
        "model": lambda: Model(small, stop=stop),
        "pages": lambda: Model(model(1, page=4), stop=stop),
        "graphs": lambda: Model(model(1, graphs="recorded"), stop=stop),
        "windowed": lambda: Model(Windowed(small, 6, 1), stop=stop),
        "spire": lambda: Spire(SpireModel.from_target(target.model, 1, window=4), stop=stop),
        "magicdec": lambda: MagicDec(window=5, stop=stop),
        "head": lambda: Head(Eagle3.from_target(target.model, (0, 1, "final")), Chain(rules=stop)),
        "paced": lambda: Paced(Model(small, stop=stop), 1),
        "paced view": lambda: Paced(MagicDec(window=5, stop=stop), 1),
    }[name]()


NAMES = ["model", "pages", "graphs", "windowed", "spire", "magicdec", "head", "paced", "paced view"]


@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [
        pytest.param(name, mode, kind, marks=() if (i + j + k) % 12 == 0 else pytest.mark.slow)
        for i, name in enumerate(NAMES)
        for j, mode in enumerate(("greedy", "coupled", "sampled", "mixed"))
        for k, kind in enumerate(("after", "before"))
    ],
)
def test_texts_and_rounds_are_those_of_each_row_alone(name, mode, kind):
    stop, verifier = (
        AFTER if kind == "after" else BEFORE,
        sd.Coupled() if mode == "coupled" else sd.Rejection(),
    )
    warm = {"greedy": 0, "coupled": 1, "sampled": 1, "mixed": [0, 0.5, 1, 0]}[mode]
    base, rounds = sd.decoder(model(0)).sampling(temperature=warm).verifier(verifier), []
    decoder, settings = base.draft(draft_of(name, stop), 5).build(), {"eos_token_id": ()}
    out = decoder.generate(PROMPTS, BUDGETS, seed=[0, 1, 2, 3], on_round=rounds.append, **settings)
    if mode in ("greedy", "coupled"):
        assert out.ids == base.build().generate(PROMPTS, BUDGETS, seed=[0, 1, 2, 3], **settings).ids
    for b, prompt in enumerate(PROMPTS):
        one = (
            decoder
            if mode != "mixed"
            else base.sampling(temperature=warm[b]).draft(draft_of(name, stop), 5).build()
        )
        alone = one.generate([prompt], BUDGETS[b], seed=[b], **settings)
        assert (out.ids[b], out.row_stats[b]) == (alone.ids[0], alone.row_stats[0])
    assert any(bool((r.proposal.size < r.budget).any()) for r in rounds[1:])
    if mode != "mixed":
        requests = [sd.Request(p, n, at) for p, n, at in zip(PROMPTS, BUDGETS, (0, 0, 1, 2))]
        served = decoder.serve(requests, 2, clock="rounds", seed=0, **settings)
        alone = decoder.generate(PROMPTS, BUDGETS, seed=0, **settings)
        assert all((s.ids, s.stats) == (alone.ids[s.index], alone.row_stats[s.index]) for s in served)


def test_captured_rounds_refuse_rules_and_captured_chains_are_not_used():
    target, small = model(0, graphs="eager"), model(1, graphs="eager")
    spire, head = (
        SpireModel.from_target(target.model, 1, window=4),
        Eagle3.from_target(target.model, (0, 1, "final")),
    )
    for make in (
        lambda stop: Model(small, stop=stop),
        lambda stop: Model(Windowed(small, 6, 1), stop=stop),
        lambda stop: Spire(spire, stop=stop, graphs="eager"),
        lambda stop: MagicDec(window=5, stop=stop),
        lambda stop: Head(head, Chain(rules=stop), graphs="eager"),
    ):
        sd.decoder(target).draft(make(()), 3).executor(Ahead()).build()
        with pytest.raises(
            ValueError,
            match=r"Ahead\(\) runs chains without a stop(, DynamicTree and StaticTree)?, but the draft's",
        ):
            sd.decoder(target).draft(make(Confidence()), 3).executor(Ahead()).build()
    assert [Model(small, stop=s).bind(target, sd.Sampling()).captured is None for s in (0, 0.2)] == [
        False,
        True,
    ]


def test_pools_tell_rules_apart():
    arms = {name: Model(model(1), stop=stop) for name, stop in (("a", 0.2), ("b", 0.3), ("c", 0.2))}
    pool = sd.decoder(model(0)).pool(
        {**arms, "d": model(1), "e": model(2)}, sd.selectors.UCB1(), stacked=True
    )
    assert [type(part).__name__ for part in pool.build().draft.drafts] == ["Model", "Model", "Stacked"]


@pytest.mark.parametrize("most", [99, 7])
def test_a_pace_is_that_of_transformers_within_the_budget(most):
    theirs, schedule = (
        AssistedCandidateGenerator.__new__(AssistedCandidateGenerator),
        {"num_assistant_tokens_schedule": "heuristic"},
    )
    theirs.assistant_generation_config = SimpleNamespace(**schedule, assistant_confidence_threshold=None)
    draft, draw, theirs.num_assistant_tokens = Paced(NGram(), 3), torch.Generator().manual_seed(0), 3
    state = draft.init(sd.Context.of([[0]]), None)
    for _ in range(60):
        size = int(torch.randint(0, int(state.length) + 1, (1,), generator=draw))
        accepted = max(0, size - int(torch.randint(0, 2, (1,), generator=draw)))
        proposal = sd.Proposal.chain(torch.zeros(1, size, dtype=torch.long), torch.tensor([size]))
        verdict = SimpleNamespace(accepted=torch.tensor([accepted]))
        state = draft.observe(
            state, SimpleNamespace(proposal=proposal, verdict=verdict, budget=torch.tensor([most]))
        )
        if size:
            theirs.update_candidate_strategy(None, torch.zeros(1, size + 1, 2), accepted)
        theirs.num_assistant_tokens = min(theirs.num_assistant_tokens, most)
        assert int(state.length) == theirs.num_assistant_tokens


def test_a_paced_draft_has_the_optional_methods_of_its_draft():
    class Plain:
        info, init, propose, observe, select = sd.DraftInfo("plain"), None, None, None, None

    for inner in (Model(SMALL), NGram(), MagicDec(window=4), Plain()):
        one, other = (DraftPart.of(draft) for draft in (Paced(inner), inner))
        for name in ("waits", "follows", "joins", "limits", "forgets"):
            assert (getattr(one, name) is None) == (getattr(other, name) is None)
    with pytest.raises(ValueError, match="draft is 'tree', a pool or of trees"):
        Paced(Tree(SMALL))
    with pytest.raises(ValueError, match="first is 0"):
        Paced(NGram(), 0)


def test_what_is_no_rule_is_refused():
    for stop, error, message in (
        (1.5, ValueError, "stop is 1.5: give a probability"),
        ("0.4", TypeError, "stop is '0.4': give a number, or rules"),
        (Entropy, TypeError, "Entropy'>, which is no rule"),
        (lambda seen: seen, TypeError, "which is no rule: give an object of drafts.stops"),
    ):
        with pytest.raises(error, match=message):
            Model(SMALL, stop=stop)
    with pytest.raises(ValueError, match="give one bool for each chain"):
        sd.decoder(FIRST).draft(Model(SMALL, stop=Rule("after", lambda seen: seen.own < 1))).generate(
            [[0, 2]], 4
        )


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Rule("befor", lambda seen: seen), ValueError, "when is 'befor': give 'before' or 'after'"),
        (lambda: Rule("after", None), TypeError, "rule is None: give a function"),
        (lambda: Chain(stop=MaxProb(0.4)), TypeError, "are given as rules="),
    ],
)
def test_what_is_no_rule_is_named(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
