"""Foreign code under the certifier: right code is exact, wrong code is seen, and what cannot be walked is refused by name."""

from __future__ import annotations

import random
from math import exp, log
from threading import Thread

import numpy as np
import pytest
import torch

import specdec as sd
from specdec.audit.certify import certify
from specdec.audit.external import CannotWalk, External, certify_function, impossible
from specdec.audit.external.races import winners
from specdec.audit.museum import real
from specdec.audit.plain import enumerate_plain

P, Q = (torch.tensor(x, dtype=torch.float64) for x in ([0.45, 0.45, 0.1], [0.2, 0.3, 0.5]))
TARGET, DRAFT = sd.TableModel(P), sd.TableModel(Q)
ONE = enumerate_plain(TARGET, sd.Sampling(), [0], 1)


def textbook(tokens, q, p):
    for n, x in enumerate(tokens.tolist()):
        if random.random() >= p[n, x] / q[n, x]:
            left = (p[n] - q[n]).clamp(min=0).numpy()
            return [*tokens[:n].tolist(), int(np.random.choice(len(left), p=left / left.sum()))]
    return [*tokens.tolist(), *random.choices(range(p.shape[1]), weights=p[-1].tolist())]


def rows_at_once(tokens, q, p):
    """vLLM's way: all rows, inverse distribution functions and exponential races."""
    B, n = tokens.shape
    rows = torch.arange(B)
    own = (p[:, :n] / q).gather(2, tokens[..., None])[..., 0]
    accepted = (torch.rand(B, n) < own).long().cumprod(1).sum(1)
    at = accepted.clamp(max=n - 1)
    left = torch.where((accepted < n)[:, None], (p[rows, at] - q[rows, at]).clamp(min=0), p[:, -1])
    last = left.div_(torch.empty_like(left).exponential_()).argmax(-1)
    return [[*tokens[b, : accepted[b]].tolist(), int(last[b])] for b in range(B)]


def from_p_after_a_rejection(tokens, q, p):
    n = int((torch.rand(len(tokens)) < (p[:-1] / q).gather(1, tokens[:, None])[:, 0]).long().cumprod(0).sum())
    return [*tokens[:n].tolist(), int(torch.multinomial(p[n], 1))]


def built(f, length=1, target=TARGET, draft=DRAFT, **settings):
    return sd.decoder(target).draft(draft, length=length).verifier(External(f, **settings)).build()


@pytest.mark.parametrize(
    ("f", "settings"), [(real.rule, {}), (textbook, {}), (rows_at_once, {"batched": True})]
)
def test_right_code_is_exact(f, settings):
    assert certify(built(f, 1, **settings), max_new_tokens=3).total_variation < 1e-14
    target, draft = sd.TableModel.random(3, 1, 5, zeros=0.4), sd.TableModel.random(3, 1, 6, zeros=0.4)
    found = certify(built(f, 2, target, draft, **settings), max_new_tokens=[3, 2], prompts=[[0], [1, 2]])
    assert found.lossless


def test_point_masses_and_trees():
    draft = sd.drafts.NGram()
    assert certify(built(real.rule, 2, draft=draft), [[0, 1, 0]], 3).lossless

    def tree_rule(tokens, q, p, parents):
        law, at = p[0].clone(), []
        for n, x in enumerate(tokens.tolist()):
            if parents[n] == (at[-1] if at else -1):
                if torch.rand(()) < law[x] / q[n, x]:
                    at, law = [*at, n], p[n + 1]
                else:
                    law = (law - q[n]).clamp(min=0)
                    law = law / law.sum()
        return [*tokens[at].tolist(), int(torch.multinomial(law, 1))]

    found = certify(built(tree_rule, 2, draft=sd.drafts.Tree(DRAFT, (2,)), trees=True), max_new_tokens=3)
    assert found.lossless


def test_wrong_code_is_seen():
    found = certify(built(from_p_after_a_rejection), max_new_tokens=3)
    assert found.total_variation == pytest.approx(
        0.2 * float(((P - Q).clamp(min=0) / 0.4 - P).abs().sum()), abs=1e-12
    )


def one(function):
    return certify_function(lambda prompt, budget: [function()], ONE).distribution[0]


def law_of(function):
    """The probability that ``function`` holds."""
    return one(lambda: 1 if function() else 0).get((1,), 0.0)


@pytest.mark.parametrize(
    ("function", "chance"),
    [
        (lambda: torch.rand(()) < 0.3, 0.3),
        (lambda: torch.rand(3)[1] >= 0.3, 0.7),
        (lambda: 1 - 2 * torch.rand(()) < 0.5, 0.75),
        (lambda: torch.rand(()).log() > log(0.3), 0.7),
        (lambda: -torch.log1p(-torch.rand(())) < 2, 1 - exp(-2)),
        (lambda: torch.empty(2).exponential_(4.0)[0] < 0.5, 1 - exp(-2)),
        (lambda: torch.empty(2).uniform_(2, 4).clamp(min=1)[0] < 2.5, 0.25),
        (lambda: torch.empty(1).exponential_().log().neg() < 0.5, exp(-exp(-0.5))),
        (lambda: 3 / torch.empty(()).exponential_() < 2, exp(-1.5)),
        (lambda: torch.bernoulli(torch.tensor(0.25)), 0.25),
        (lambda: random.random() < 0.3, 0.3),
        (lambda: random.uniform(1, 3) < 1.5, 0.25),
        (lambda: np.float64(0.3) > np.random.rand(), 0.3),
        (lambda: np.random.uniform(size=3)[2] < 0.3, 0.3),
        (lambda: torch.rand(()) < float("nan"), 0.0),
        (lambda: torch.rand(1).item() < 0.3, 0.3),
        (lambda: (np.array([0.1, 0.3]) > np.random.rand(2))[1], 0.3),
        (lambda: (np.random.rand(2) <= np.array([0.1, 0.3]))[1], 0.3),
        (lambda: torch.distributions.Bernoulli(0.25).sample() == 1, 0.25),
        (lambda: torch.rand(2, 2).tolist()[1][0] < 0.3, 0.3),
        (lambda: (2 - torch.rand(2).div_(4).add_(1)[0]) * 4 < 3.3, 0.3),
        (lambda: sum(u < 0.5 for u in torch.rand(2)) == 2, 0.25),
    ],
)
def test_comparisons(function, chance):
    assert law_of(function) == pytest.approx(chance, abs=1e-12)


def test_one_number_is_one_number():
    def between():
        u = torch.rand(())
        return u < 0.6 and u > 0.5

    assert law_of(between) == pytest.approx(0.1, abs=1e-12)

    def seeded_again():
        torch.manual_seed(3)
        first = torch.rand(()) < 0.6
        torch.manual_seed(3)
        return first and torch.rand(()) > 0.5

    def two_generators():
        a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        return torch.rand(2, generator=a)[1] < 0.6 and torch.rand(2, generator=b)[1] > 0.5

    def two_seeds():
        a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        return torch.rand((), generator=a) < 0.6 and torch.rand((), generator=b) > 0.5

    def of_python():
        random.seed(1)
        first = random.random() < 0.6
        random.seed(1)
        return first and random.random() > 0.5

    assert law_of(seeded_again) == pytest.approx(0.1, abs=1e-12)
    assert law_of(two_generators) == pytest.approx(0.1, abs=1e-12)
    assert law_of(of_python) == pytest.approx(0.1, abs=1e-12)
    assert law_of(two_seeds) == pytest.approx(0.3, abs=1e-12)


def test_inverse_distribution_functions():
    cdf = P.cumsum(0)
    assert one(lambda: int((cdf < torch.rand(())).sum())) == pytest.approx(
        {(0,): 0.45, (1,): 0.45, (2,): 0.1}
    )


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.multinomial(P, 1),
        lambda: (P / torch.empty(3).exponential_()).argmax(),
        lambda: (torch.empty(3).exponential_() / P).argmin(),
        lambda: (P.log() - torch.empty(3).exponential_().log()).argmax(),
        lambda: (P.log() - (-torch.rand(3).clamp(min=1e-20).log()).log()).argmax(),
        lambda: P.clone().div_(torch.empty_like(P).exponential_(1)).argmax(dim=-1, keepdim=True)[0],
        lambda: random.choices([0, 1, 2], weights=[9, 9, 2])[0],
        lambda: np.random.choice(3, p=P.numpy()),
        lambda: torch.multinomial(P, 3)[0],
        lambda: torch.distributions.Categorical(P).sample(),
    ],
)
def test_draws(draw):
    assert one(lambda: int(draw())) == pytest.approx({(0,): 0.45, (1,): 0.45, (2,): 0.1}, abs=1e-12)


def test_several_tokens_without_replacement():
    law = one(lambda: int(torch.multinomial(Q, 2)[1]))
    assert law[2,] == pytest.approx(0.2 * 0.5 / 0.8 + 0.3 * 0.5 / 0.7, abs=1e-12)


def test_two_races_of_the_same_numbers():
    """The closed form against a simulation, and its margins exactly."""
    draw = np.random.default_rng(0)
    for zeros in (False, True):
        q, r = draw.dirichlet([1.0] * 4, 2)
        if zeros:
            q[0], r[2] = 0, 0
        law = winners(q / q.sum(), r / r.sum())
        assert law.sum(0) == pytest.approx(r / r.sum(), abs=1e-12)
        assert law.sum(1) == pytest.approx(q / q.sum(), abs=1e-12)
        E = draw.exponential(size=(200_000, 4))
        counts = np.zeros((4, 4))
        np.add.at(counts, ((q / E).argmax(1), (r / E).argmax(1)), 1 / len(E))
        assert np.abs(counts - law).max() < 5e-3


def test_the_gumbel_noise_of_the_draft_in_the_residual():
    def draws(fresh):
        noise = torch.empty(3, dtype=torch.float64).exponential_()
        x = int((Q / noise).argmax())
        if torch.rand(()) < P[x] / Q[x]:
            return x
        noise = torch.empty_like(noise).exponential_() if fresh else noise
        return int(((P - Q).clamp(min=0) / noise).argmax())

    assert one(lambda: draws(fresh=True)) == pytest.approx({(0,): 0.45, (1,): 0.45, (2,): 0.1}, abs=1e-12)
    assert one(lambda: draws(fresh=False))[0,] == pytest.approx(0.484615, abs=1e-6)


def test_a_generator_that_is_seeded_again_races_again():
    """As torch does: the same noise, so the same token of the same distribution, and J of B2 of another."""

    def twice(other):
        a = int(torch.multinomial(Q, 1, generator=torch.Generator().manual_seed(1)))
        return int(a != int(torch.multinomial(other, 1, generator=torch.Generator().manual_seed(1))))

    assert one(lambda: twice(Q)) == {(0,): pytest.approx(1.0)}
    assert one(lambda: twice(P))[0,] == pytest.approx(float(np.trace(winners(Q.numpy(), P.numpy()))))
    draw = torch.empty(100_000, 3, dtype=torch.float64).exponential_(
        generator=torch.Generator().manual_seed(0)
    )
    seen = ((Q / draw).argmax(1) == (P / draw).argmax(1)).double().mean()
    assert one(lambda: twice(P))[0,] == pytest.approx(float(seen), abs=5e-3)

    def seeded_rule(tokens, q, p):
        torch.manual_seed(1)
        return [int(torch.multinomial(p[0], 1))]

    with pytest.raises(CannotWalk, match="certify the whole generate with certify_function"):
        certify(built(seeded_rule), max_new_tokens=3)


def filled_part():
    q = torch.ones(2)
    q[0].exponential_()
    return 0


def rows_with_their_own_generators():
    q = torch.empty(2, 3).exponential_()
    q[1].exponential_(generator=torch.Generator().manual_seed(1))
    q[0].exponential_(generator=torch.Generator().manual_seed(1))
    a, b = (P / q).argmax(-1)
    return int(a != b)


def test_numbers_drawn_into_a_row_are_those_of_the_whole():
    assert one(rows_with_their_own_generators) == {(0,): pytest.approx(1.0)}


def in_a_thread():
    out = []
    thread = Thread(target=lambda: out.append(float(torch.rand(()))))
    thread.start()
    thread.join()
    return out[0] < 0.5


def imported_earlier(draw=random.random):
    return draw() < 0.5


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: torch.rand(2).prod() < 0.5, "`prod`"),
        (lambda: torch.rand(2)[0] * torch.rand(2)[1] < 0.5, "`mul of two random numbers`"),
        (lambda: torch.rand(2)[0] < torch.rand(2)[1], "`lt of two random numbers`"),
        (lambda: torch.rand(1).max() < 0.5, "`max`"),
        (lambda: float(torch.rand(1)) < 0.5, "`__float__`"),
        (lambda: torch.rand(3).numpy()[0] < 0.5, "`numpy`"),
        (lambda: torch.rand(3).sort()[1][0], "`sort`"),
        (lambda: torch.rand(3).clamp(min=0.1)[0] < 0.5, "`clamp`"),
        (lambda: torch.rand(3).argmax(), "`argmax`"),
        (lambda: torch.rand(3).lt_(0.3)[0], "`lt_`"),
        (lambda: torch.tensor([torch.rand(())])[0] < 0.5, "`__float__`"),
        (lambda: np.array([random.random()])[0] < 0.5, "`numpy's conversion"),
        (lambda: torch.nn.init.uniform_(torch.empty(3))[0] < 0.5, "`uniform_`"),
        (in_a_thread, "an operator that Python does not see"),
        (lambda: torch.randn(3)[0] < 0.5, "`randn`"),
        (lambda: torch.randint(3, (1,)), "`randint`"),
        (lambda: torch.nn.functional.gumbel_softmax(P)[0] < 0.5, "`gumbel_softmax`"),
        (lambda: torch.nn.functional.dropout(P)[0] < 0.5, "`dropout`"),
        (lambda: random.gauss(0, 1) < 0.5, "`random.gauss`"),
        (lambda: np.random.randn() < 0.5, "`numpy.random.randn`"),
        (imported_earlier, "imported earlier"),
        (filled_part, "`exponential_ into a part of another tensor`"),
    ],
)
def test_what_cannot_be_walked_is_refused_by_name(function, name):
    with pytest.raises(CannotWalk, match=name.replace("(", r"\(")):
        one(function)


def test_a_third_race_and_a_number_used_in_two_ways_are_refused():
    def races(*weights, also=False):
        E = torch.empty(3).exponential_()
        if also and E[0] < 1:
            return 0
        return [int((w / E).argmax()) for w in weights][-1]

    assert one(lambda: races(P, Q, P)) == pytest.approx({(0,): 0.45, (1,): 0.45, (2,): 0.1})
    with pytest.raises(CannotWalk, match="a third race"):
        one(lambda: races(P, Q, P + Q**2))
    with pytest.raises(CannotWalk, match="in a race after another use"):
        one(lambda: races(P, also=True))


def test_a_generator_stays_as_it_was():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    law_of(lambda: torch.rand(()) < 0.5 and random.random() < 0.5 and np.random.rand() < 0.5)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))


CALLS = []


def counts_calls(tokens, q, p):
    CALLS.append(1)
    return [int(tokens[0]), 0] if len(CALLS) % 3 else [0]


def first_rows_number(tokens, q, p):
    return [[0]] * len(tokens) if torch.rand(len(tokens))[0] < 0.5 else [[1]] * len(tokens)


@pytest.mark.parametrize(
    ("f", "settings", "error", "message"),
    [
        (lambda t, q, p: [3], {}, ValueError, "returned the token 3, which is not in the vocabulary of 3"),
        (lambda t, q, p: [*t.tolist(), -1], {}, ValueError, "token -1, .* leave padding out"),
        (
            lambda t, q, p: [(int(t[0]) + 1) % 3, 0],
            {},
            ValueError,
            "more than one token that is not on a path",
        ),
        (lambda t, q, p: [*t.tolist(), 0, 0], {}, ValueError, "more than one token"),
        (lambda t, q, p: [], {}, ValueError, r"shape \[0\]: return ids"),
        (lambda t, q, p: p, {}, ValueError, "torch.float64 of shape"),
        (lambda t, q, p: [0], {"batched": True}, ValueError, "returned 1 rows for"),
        (
            lambda t, q, p: [[0]] * int(torch.rand(7)[0] < 2),
            {"batched": True},
            CannotWalk,
            "first dimension must be the rows",
        ),
        (counts_calls, {}, RuntimeError, "depends on its batch or keeps state between calls"),
        (
            first_rows_number,
            {"batched": True},
            RuntimeError,
            "depends on its batch or keeps state between calls",
        ),
    ],
)
def test_bad_functions_are_named(f, settings, error, message):
    with pytest.raises(error, match=message):
        certify(built(f, 1, **settings), [[0], [1]], max_new_tokens=4, batch=64)


def test_a_declared_distribution_and_a_tree_are_refused():
    with pytest.raises(ValueError, match=r"External\(f, trees=True\)"):
        built(textbook, 1, draft=sd.drafts.Tree(DRAFT, (2,))).generate([[0]], 3)
    one = torch.ones(1, 1, dtype=torch.long)
    declared = sd.Proposal.chain(one, one[0], torch.full((1, 1, 3), 1 / 3))
    with pytest.raises(ValueError, match=r"External\(f, trust_declared=True\)"):
        External(textbook).check(declared)
    External(textbook, trust_declared=True).check(declared)


def test_bad_generates_are_named():
    for run, message in (
        (lambda prompt, budget: [0] * 2, "returned 2 tokens with a budget of 1"),
        (lambda prompt, budget: [5], "token 5, which is not in the vocabulary of 3"),
    ):
        with pytest.raises(ValueError, match=message):
            certify_function(run, ONE)
    kept = torch.Generator().manual_seed(0)
    with pytest.raises(RuntimeError, match="keeps state between calls"):
        certify_function(lambda prompt, budget: [int(torch.multinomial(P, 1, generator=kept))], ONE)
    with pytest.raises(RuntimeError, match="more than 2 branches"):
        certify_function(lambda prompt, budget: [int(torch.multinomial(P, 1))], ONE, limit=2)


def test_a_uniform_of_zero_accepts_the_impossible_where_the_test_is_not_strict():
    target = sd.TableModel([0.0, 0.5, 0.5])
    plain = enumerate_plain(target, sd.Sampling(), [0], 1)

    def run(test):
        def one_token(prompt, budget):
            x = int(torch.multinomial(Q, 1))
            if test(torch.rand(()), target.probs[x] / Q[x]):
                return [x]
            return [int(torch.multinomial((target.probs - Q).clamp(min=0), 1))]

        return one_token

    assert impossible(run(lambda u, ratio: u <= ratio), plain) == [(0,)]
    assert impossible(run(lambda u, ratio: ratio >= u), plain) == [(0,)]
    assert impossible(run(lambda u, ratio: not u > ratio), plain) == [(0,)]
    assert impossible(run(lambda u, ratio: 1 - u >= 1 - ratio), plain) == [(0,)]
    assert impossible(run(lambda u, ratio: 1 - u > 1 - ratio), plain) == []
    assert impossible(run(lambda u, ratio: u < ratio), plain) == []
    assert impossible(run(lambda u, ratio: ratio > u), plain) == []
    assert (
        impossible(
            lambda prompt, budget: [int((target.probs / torch.empty(3).exponential_()).argmax())], plain
        )
        == []
    )
    zeros, q = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).double(), torch.tensor([[0.5, 0.5]]).double()
    certain = enumerate_plain(sd.TableModel([0.0, 1.0]), sd.Sampling(), [0], 2)
    assert certify_function(lambda *_: _extended(real.rule(torch.tensor([0]), q, zeros)), certain).lossless
    assert impossible(lambda *_: _extended(real.rule(torch.tensor([0]), q, zeros)), certain) == [(0, 1)]


def _extended(out):
    return [*out.tolist(), 1][:2]


def test_an_external_verifier_decodes():
    """Outside of the certifier the decoder's own generator decides."""
    out = built(textbook, 2).generate([[0]] * 4, 6, seed=[1, 1, 2, 3])
    assert out.ids[0] == out.ids[1]
    assert len({tuple(ids) for ids in out.ids}) > 1
