"""Optimistic drafting: the serial run's output, exactly lossless, and no thread that outlives its run."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.arm_policy import Arm
from specdec.audit import catalogue, llamas
from specdec.audit.adversaries import AdversarialSelector, Adversary, Dropped, Hindsight, Remembers
from specdec.audit.certify import certify, certify_coupled
from specdec.drafts import FunctionDraft
from specdec.executors import Guesses, Optimistic
from specdec.executors.optimistic import OWN, _Attempts
from specdec.rng import Key

PROMPTS = [[5], [7, 8, 9], [1, 2, 3, 4] * 5, [50] * 9, [3, 1], [11, 12] * 5]
BUDGETS = [14, 3, 20, 1, 11, 16]


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = set(threading.enumerate())
    yield
    # A progress bar's own thread stays for the next one.
    assert {t for t in threading.enumerate() if t.name != "tqdm_monitor"} <= before


def spread(prefix):
    return torch.arange(97, dtype=torch.float64).roll(sum(prefix[-2:]) + 3 * len(prefix)) / 20


def drafts_of(target, small):
    return {
        "model": sd.drafts.Model(small),
        "itself": sd.drafts.Model(target),
        "ngram": sd.drafts.NGram(),
        "function": sd.chain_draft(spread),
    }


@pytest.mark.parametrize("threads", [True, False], ids=["thread", "inline"])
@pytest.mark.parametrize("name", ["model", "itself", "ngram", "function"])
def test_equals_serial(target, small, name, threads):
    """Bit for bit under Coupled; greedy under Rejection too."""
    for temperature, verifier in ((1.0, sd.Coupled()), (0.0, sd.Coupled()), (0.0, sd.Rejection())):
        builder = sd.decoder(target).draft(drafts_of(target, small)[name], length=3).verifier(verifier)
        builder = builder.sampling(temperature=temperature)
        serial = builder.build().generate(PROMPTS, BUDGETS, seed=1, eos_token_id=(7, 60))
        counter = Guesses()
        other = builder.executor(Optimistic(threads, counter)).build()
        found = other.generate(PROMPTS, BUDGETS, seed=1, eos_token_id=(7, 60))
        assert found.ids == serial.ids
        assert found.finish == serial.finish
        assert found.stats.acceptance == serial.stats.acceptance or name == "ngram"
        assert found.stats.tokens == serial.stats.tokens
        assert 0 <= counter.held <= counter.accepted <= counter.made
        if name == "itself":
            assert counter.held > 0.9 * counter.accepted > 0


def test_rounds_of_one_row_are_the_serial_runs(target, small):
    """Under Coupled the very proposals are the same, whether drafted ahead or not."""
    builder = sd.decoder(target).draft(small, length=3).verifier(sd.Coupled())

    def rounds(builder):
        seen = []
        builder.build().generate([[5, 6]], 40, seed=3, on_round=seen.append)
        return [
            (r.proposal.tokens[0, : r.proposal.size[0]].tolist(), r.committed.tolist(), r.truncated.tolist())
            for r in seen
        ]

    counter = Guesses()
    assert rounds(builder) == rounds(builder.executor(Optimistic(guesses=counter)))
    assert counter.held > 0


def test_a_kept_block_is_the_serial_runs_under_rejection_too(target):
    """As long as every guess holds, nothing is tried twice and all keys are the serial executor's."""
    distribution = torch.full((97,), -30.0, dtype=torch.float64)

    def sure(prefix):  # nearly certain, so that draws rarely differ
        return distribution.index_fill(0, torch.tensor((prefix[-1] * 7 + 1) % 97), 30.0)

    table = torch.stack([torch.softmax(sure([t]), -1) for t in range(97)])
    builder = sd.decoder(sd.TableModel(table)).draft(FunctionDraft(sure), length=3)
    counter = Guesses()
    found = builder.executor(Optimistic(guesses=counter)).build().generate([[5], [6]], 41, seed=0)
    assert found.ids == builder.build().generate([[5], [6]], 41, seed=0).ids
    assert counter.held == counter.accepted > 10
    assert counter.rate == counter.held / counter.made


def test_seconds_sum_to_the_wall_clock(target, small):
    decoder = sd.decoder(target).draft(small, length=4).executor(Optimistic()).build()
    began, seen = time.perf_counter(), []
    found = decoder.generate(PROMPTS, BUDGETS, seed=0, on_round=seen.append)
    assert sum(found.stats.seconds.values()) == pytest.approx(sum(r.seconds["total"] for r in seen))
    assert sum(found.stats.seconds.values()) <= time.perf_counter() - began
    assert {"draft", "target", "verify", "prefill"} <= set(found.stats.seconds)


def test_selectors_choose_a_round_ahead_within_capacities(target, small):
    arms = {"model": small, "short": Arm(small, 1), "ngram": sd.drafts.NGram(), "none": None}
    capacities = {"model": 2, "short": 1, "ngram": 2}
    for salt in range(3):
        builder = sd.decoder(target).verifier(sd.Coupled())
        plain = builder.build().generate(PROMPTS, BUDGETS, seed=4)
        pool = builder.pool(arms, AdversarialSelector(salt), 3, capacities=capacities).executor(Optimistic())
        rounds = []
        found = pool.build().generate(PROMPTS, BUDGETS, seed=4, on_round=rounds.append)
        assert found.ids == plain.ids
        lengths = torch.tensor([3, 1, 3, 0])
        for round in rounds[1:]:
            taken = torch.bincount(round.arm, minlength=4)
            assert bool((taken[:3] <= torch.tensor([2, 1, 2])).all())
            assert bool((round.proposal.size <= lengths[round.arm]).all())
        assert len({arm for round in rounds[1:] for arm in round.arm.tolist()}) == 4


# -- the distribution -----------------------------------------------------------------------------------------------------------


def small_pair(length=1):
    base = sd.decoder(sd.TableModel.random(2, 1, seed=3)).draft(
        sd.TableModel.random(2, 1, seed=4), length=length
    )
    return base.executor(Optimistic())


@dataclass(frozen=True)
class KeepsZeros(Optimistic):
    """Keeps a block that was drafted ahead only when it begins with token 0."""

    def _keep(self, ready, round):
        ready = super()._keep(ready, round)
        first = ready.drafted.proposal.tokens[:, 0] if ready.drafted.proposal.nodes else ready.guess
        return ready._replace(good=ready.good & (first == 0))


class OneNumber:
    """The guess and the block after it begin with one number."""

    def __init__(self, rng):
        self.rng = rng

    def _key(self, key):
        odd = key.attempt // OWN % 2
        return key._replace(at=key.at + odd, attempt=key.attempt - OWN * odd)

    def categorical(self, probs, key):
        return self.rng.categorical(probs, self._key(key))

    def accept(self, prob, key):
        return self.rng.accept(prob, self._key(key))

    def select(self, rows):
        return type(self)(self.rng.select(rows))


class NoAttempts(OneNumber):
    """A block that is drafted again draws the numbers of the one that was dropped."""

    def _key(self, key):
        return key._replace(attempt=0)


@dataclass(frozen=True, eq=False)
class Regrets(Remembers):
    """Proposes one token from ``distribution``, or nothing when what it drew for this very place before is in ``unwanted``."""

    revocable = True

    def init(self, context, target_cache):
        return Dropped(torch.full((context.batch, 2), -1))

    def propose(self, state, context, budget, rng):
        again = state.token[:, 0] == context.length
        size = budget.clamp(max=1) * ~(again & torch.isin(state.token[:, 1], torch.tensor(self.unwanted)))
        q = self.distribution.expand(context.batch, -1)
        token = rng.categorical(q, Key(context.length))
        drew = torch.where((budget > 0)[:, None], torch.stack([context.length, token], 1), state.token)
        return sd.Proposal.chain(token[:, None], size, q[:, None], "sampled"), Dropped(drew)

    def observe(self, state, round):
        return state


def test_planted_biases_are_seen():
    kept = small_pair().executor(KeepsZeros()).build()
    assert certify(kept, [[0]], 5).total_variation > 1e-3
    assert certify(small_pair().build(), [[0]], 5, wrap=OneNumber).total_variation > 1e-3
    distribution = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    base = sd.decoder(sd.TableModel([0.5, 0.3, 0.2])).draft(Regrets(distribution, (2,)), length=1)
    nosy = base.executor(Optimistic()).build()
    assert certify(nosy, [[0]], 5).lossless
    assert certify(nosy, [[0]], 5, wrap=NoAttempts).total_variation > 1e-3


def test_certified_with_a_cache_that_remembers():
    target, draft = sd.HFModel(llamas.llama(0)), sd.HFModel(llamas.llama(1))
    decoder = sd.decoder(target).draft(draft, length=1).executor(Optimistic()).build()
    found = certify(decoder, [[0, 1], [2]], [4, 3], batch=256)
    assert found.lossless, found


def test_certified_under_coupled():
    decoder = small_pair(2).verifier(sd.Coupled()).build()
    assert certify_coupled(decoder, [[0]], 6, nodes=None).lossless


def test_attempts_name_rows_on_their_own():
    rng, distribution = sd.Philox(torch.arange(6)), torch.rand(6, 4, 50, dtype=torch.float64)
    key = Key(torch.arange(6)[:, None], torch.arange(4), 0)
    attempt = torch.tensor([0, 2, 0, 3, 2, 0])
    mixed = _Attempts(rng, attempt)
    drawn, accepted = mixed.categorical(distribution, key), mixed.accept(distribution[..., 0], key)
    for b in range(6):
        row = torch.tensor([b])
        own = Key(row[:, None], torch.arange(4), 0, attempt=OWN * int(attempt[b]))
        assert torch.equal(drawn[b], sd.Philox(row).categorical(distribution[row], own)[0])
        assert torch.equal(accepted[b], sd.Philox(row).accept(distribution[row, :, 0], own)[0])
    few = mixed.select(torch.tensor([3, 0]))
    assert torch.equal(
        few.categorical(distribution[[3, 0]], Key(torch.tensor([[3], [0]]), torch.arange(4))), drawn[[3, 0]]
    )


# -- how a run ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [2, 4, 5])
def test_an_exception_of_the_draft_is_the_runs(target, call):
    calls = []

    def fails(prefix):
        calls.append(0)
        if len(calls) == call:
            raise KeyError("mine")
        return spread(prefix)

    decoder = sd.decoder(target).draft(sd.chain_draft(fails), length=2).executor(Optimistic()).build()
    began = time.perf_counter()
    with pytest.raises(KeyError, match="mine"):
        decoder.generate([[5]], 20, seed=0)
    assert time.perf_counter() - began < 5


def test_an_exception_of_the_target_or_a_callback_is_the_runs(target, small):
    decoder = sd.decoder(target).draft(small, length=2).executor(Optimistic()).build()

    def stop(round):
        if round.number == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        decoder.generate(PROMPTS, BUDGETS, seed=0, on_round=stop)
    with pytest.raises(ZeroDivisionError):
        decoder.generate(
            PROMPTS, BUDGETS, seed=0, stopping_criteria=[lambda ids, scores: 1 // (ids.shape[1] < 7)]
        )


def test_a_consumer_may_stop_early(target, small):
    decoder = sd.decoder(target).draft(small, length=2).executor(Optimistic()).build()
    stream = decoder.stream(PROMPTS, BUDGETS, seed=0)
    for _ in range(9):
        next(stream)
    stream.close()


def test_what_cannot_be_taken_back_is_refused(target, small):
    base = sd.decoder(target).executor(Optimistic())
    with pytest.raises(
        ValueError, match=r"'adversary' cannot take back .* use drafts.Model, NGram or a function"
    ):
        base.draft(Adversary(catalogue.MENU, trees=False), length=2).build()
    with pytest.raises(ValueError, match=r"'tree' proposes trees, .* executor Serial"):
        base.draft(sd.drafts.Tree(small, (2, 1))).build()
    with pytest.raises(ValueError, match="'magicdec' cannot take back"):
        base.pool({"a": small, "b": sd.drafts.MagicDec()}, AdversarialSelector()).build()
    sly = type("Sly", (Hindsight,), {"propose": lambda *a: _fork(*a)})(catalogue.MENU)
    with pytest.raises(ValueError, match="proposed a tree"):
        catalogue.BASE.draft(sly, length=2).executor(Optimistic()).build().generate([[0]], 9, seed=0)


def _fork(self, state, context, budget, rng):
    two = torch.zeros(context.batch, 2, dtype=torch.long)
    return sd.Proposal(two, two - 1, (2 * budget.clamp(max=1))), state


def test_a_model_with_captured_steps_is_not_run_by_two_threads():
    model = sd.HFModel(tiny("llama", dtype=torch.float32), graphs="eager")
    builder = sd.decoder(model).draft(model, length=2).verifier(sd.Coupled())
    with pytest.raises(ValueError, match="a wrapper of its own"):
        builder.executor(Optimistic()).build()
    plain = builder.build().generate([[5, 6, 7]], 12, seed=0).ids
    assert builder.executor(Optimistic(threads=False)).build().generate([[5, 6, 7]], 12, seed=0).ids == plain
    own = builder.draft(sd.HFModel(model.model), length=2).executor(Optimistic())
    assert own.build().generate([[5, 6, 7]], 12, seed=0).ids == plain
