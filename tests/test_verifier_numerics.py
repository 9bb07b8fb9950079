"""Verification at the edges of arithmetic, where real decoders were wrong: extreme numbers, half precision, ties, zeros, large vocabularies.

``Rejection``, ``BlockVerification`` and ``Coupled`` at u = 0 and u = 1 - 2^-53 are in ``check_verifier`` (the rule "support"). Here are the
functions below them, and the fused kernels in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from interpreted import interpreted  # noqa: F401 (a fixture)
from torch import Tensor

import specdec as sd
from specdec.drafts.stateless import Stateless
from specdec.kernels.rejection import verify
from specdec.rng import Key, Philox, pick, race_arrivals, seeds
from specdec.testing.verifier_cases import Extreme
from specdec.types import Context, Proposal
from specdec.verifiers import BlockVerification, FusedRejection, Rejection
from specdec.verifiers.rejection import residual

LARGEST = 1 - 2.0**-53  # below 1
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
INF = float("inf")
VERIFIERS = (Rejection(), BlockVerification(), FusedRejection())


@pytest.fixture(params=["reference", "triton"])
def backend(request, monkeypatch):
    """The name of a backend of ``verify``; Triton's kernels are interpreted, with small blocks."""
    if request.param == "triton":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("needs triton")
        request.getfixturevalue("interpreted")
        import specdec.kernels.rejection.fused as fused

        monkeypatch.setattr(fused, "BLOCK", 16)
        monkeypatch.setattr(fused, "PART", 32)
    return request.param


class Drawn(Stateless):
    """A chain drawn from ``q [V]``, in whatever type it has."""

    name = "drawn"

    def __init__(self, q: Tensor):
        self.q = q

    def propose(self, state, context, budget, rng):
        N = int(budget.max())
        q = self.q.expand(context.batch, N, -1)
        tokens = rng.categorical(q, Key(context.length[:, None], torch.arange(N).expand(context.batch, N)))
        return Proposal.chain(tokens, budget.clone(), q, "sampled"), state


def one_node(p: Tensor, q: Tensor, token: int, rows: int = 4) -> tuple[Proposal, Tensor, Context]:
    """A node that was drawn from ``q [V]``, with ``p [V]`` before and after it."""
    tokens = torch.full((rows, 1), token)
    proposal = Proposal.chain(tokens, torch.ones(rows, dtype=torch.long), q.expand(rows, 1, -1), "sampled")
    return proposal, p.expand(rows, 2, -1), Context.of([[0]] * rows)


# -- half precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_draft_in_half_precision_is_refused_where_it_would_bias_the_text(dtype):
    """Tokens come from q / sum(q), and q itself is divided by: three bfloat16 numbers that sum to 0.999 are off by 6e-4 in one token."""
    target, p = sd.TableModel([0.45, 0.45, 0.1]), torch.tensor([0.45, 0.45, 0.1], dtype=F64)
    logits = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=F64)
    q = logits.softmax(-1).to(dtype)
    drawn, said = q.double() / q.double().sum(), q.double()
    accepted = drawn * (p / said).clamp(max=1)
    law = accepted + (1 - accepted.sum()) * residual(p[None], said[None])[0]
    assert float((law - p).abs().sum() / 2) > 3e-5
    for verifier in VERIFIERS:
        builder = sd.decoder(target).verifier(verifier)
        with pytest.raises(
            ValueError, match=r"node 0 sum to .* in (bfloat16|float16): give .* half precision needs float"
        ):
            sd.certify(builder.draft(Drawn(q), length=1).build())
        wide = q.float() / q.float().sum()
        assert sd.certify(builder.draft(Drawn(wide), length=1).build()).total_variation < 1e-7
        exact = torch.tensor([0.5, 0.25, 0.25], dtype=dtype)
        assert sd.certify(builder.draft(Drawn(exact), length=1).build()).lossless


def test_the_library_itself_draws_and_verifies_in_float32():
    """bfloat16 logits of a model: one softmax in float32 serves the draw, the ratio and the residual."""
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(BF16)
    probs = sd.Sampling()(logits, None)
    assert probs.dtype == F32
    assert torch.equal(probs, logits.float().softmax(-1))
    assert pick(probs.to(BF16), torch.zeros(2, 3, dtype=F64)).shape == (2, 3)
    # torch.multinomial races in bfloat16, where ties go to the lower index; pick adds up in float64.
    half = torch.tensor([0.5, 0.5], dtype=BF16).expand(100_000, 2)
    drawn = Philox(seeds(0, 100_000)).categorical(half, Key(torch.ones(100_000, dtype=torch.long)))
    assert abs(float(drawn.double().mean()) - 0.5) < 0.005


# -- u = 0 and u next to 1 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("u", [0.0, LARGEST])
@pytest.mark.parametrize("kind", ["point", "probs", "logits"])
def test_extreme_numbers_commit_nothing_impossible(backend, kind, u):
    """Every other token has a logit of -inf in the target, and every third in the draft; drafted are possible and impossible ones."""
    V, N, B = 70, 2, 6
    g = torch.Generator().manual_seed(0)
    logits, said = torch.randn(B, N + 1, V, generator=g), torch.randn(B, N, V, generator=g)
    logits[..., ::2] = said[..., 1::3] = -INF
    tokens = torch.tensor([[0, 3], [3, 2], [3, 5], [69, 68], [5, 66], [3, 9]])
    size = torch.tensor([2, 2, 2, 2, 2, 0])
    draft = {"point": None, "probs": said.softmax(-1), "logits": said}[kind]
    us = torch.full((B, N), u, dtype=F64), torch.full((B, N + 1), u, dtype=F64)
    got = verify(logits, tokens, size, *us, draft, draft_logits=kind == "logits", backend=backend)
    for b, (accepted, token) in enumerate(zip(got.accepted.tolist(), got.token.tolist())):
        for n in range(accepted):
            assert logits[b, n, tokens[b, n]] > -INF
        assert logits[b, accepted, token] > -INF
    assert got.accepted[0] == 0  # p = 0 is not accepted, at u = 0 either


@pytest.mark.parametrize("u", [0.0, LARGEST])
def test_a_draft_that_is_the_target_is_accepted_by_every_number(backend, u):
    """Three equal bfloat16 logits, and others: p / q is 1, and if nothing is left the token comes from p."""
    logits = torch.tensor([[1.5, 1.5, 1.5], [0.25, -INF, 3.0], [-4.0, 2.0, 2.0]]).to(BF16)
    logits = logits[:, None].expand(3, 2, 3).contiguous()
    tokens, size = torch.tensor([[2], [2], [1]]), torch.ones(3, dtype=torch.long)
    us = torch.full((3, 1), u, dtype=F64), torch.full((3,), u, dtype=F64)
    got = verify(logits, tokens, size, *us, logits[:, :1], draft_logits=True, backend=backend)
    assert got.accepted.tolist() == [1, 1, 1]
    probs = sd.Sampling()(logits, None)
    for verifier in VERIFIERS[:2]:
        proposal = Proposal.chain(tokens, size, probs[:, :1], "sampled")
        verdict = verifier(proposal, probs, Context.of([[0]] * 3), Extreme(u))
        assert verdict.accepted.tolist() == [1, 1, 1]


@pytest.mark.parametrize("verifier", VERIFIERS[:2], ids=lambda v: v.info.name)
@pytest.mark.parametrize("u", [0.0, LARGEST])
def test_zero_probabilities_and_residuals_are_no_division_by_zero(verifier, u):
    p = torch.tensor([0.0, 0.25, 0.75], dtype=F64)
    for q, token, accepts in (
        ([0.5, 0.25, 0.25], 0, False),  # p = 0
        ([0.0, 0.25, 0.75], 1, True),  # nothing is left of p - q
        ([1.0, 0.0, 0.0], 0, False),  # disjoint
        ([0.0, 0.0, 1.0], 1, True),  # q = 0: it cannot have been drawn, and p / q is infinite
        ([0.0, 1.0, 0.0], 0, False),  # 0 / 0
    ):
        proposal, probs, context = one_node(p, torch.tensor(q, dtype=F64), token)
        verdict = verifier(proposal, probs, context, Extreme(u))
        assert verdict.accepted.tolist() == [int(accepts)] * 4
        assert bool((p[verdict.bonus] > 0).all())


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_subnormal_probabilities_stay_in_the_support(dtype, backend):
    tiny = torch.finfo(dtype).smallest_normal / 4
    p = torch.tensor([1.0, tiny, 0.0, 0.0], dtype=dtype)
    q = torch.tensor([1.0, 0.0, tiny, 0.0], dtype=dtype)
    assert 0 < float(p[1]) < torch.finfo(dtype).smallest_normal
    left = residual(p[None], q[None])[0]
    assert left.tolist() == [0, 1, 0, 0]  # a residual of one subnormal number is a distribution
    for u in (0.0, LARGEST):
        for token in (0, 1, 2):
            proposal, probs, context = one_node(p, q, token)
            for verifier in VERIFIERS[:2]:
                verdict = verifier(proposal, probs, context, Extreme(u))
                assert bool((p[verdict.bonus] > 0).all())
                assert verdict.accepted.tolist() == [int(token < 2)] * 4
    if dtype == F32:
        # exp(-100) is subnormal.
        logits = torch.tensor([0.0, -100.0, -INF, -INF]).expand(2, 2, 4).contiguous()
        us = torch.tensor([[LARGEST], [0.0]], dtype=F64), torch.tensor([LARGEST, 0.0], dtype=F64)
        got = verify(logits, torch.tensor([[2], [2]]), torch.ones(2).long(), *us, backend=backend)
        assert got.accepted.tolist() == [0, 0]
        assert got.token.tolist()[1] == 0


# -- large vocabularies ------------------------------------------------------------------------------------------------


def test_the_last_tokens_of_a_large_vocabulary_are_picked_if_and_only_if_they_are_possible():
    V = 151_936
    flat = torch.rand(V, generator=torch.Generator().manual_seed(0)).log().softmax(-1)
    for zeros in (0, 1, 300):
        probs = flat.clone()
        probs[V - zeros :] = 0
        probs[:7] = 0
        for dtype in (F32, F64):
            u = torch.tensor([0.0, LARGEST], dtype=F64)
            first, last = pick(probs.to(dtype).expand(2, V), u).tolist()
            assert first == 7
            assert last == V - 1 - zeros
    # The float32 sums of a naive implementation end below or above 1.
    assert float(flat.cumsum(0)[-1]) != 1


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)], indirect=True
)
def test_kernels_pick_the_first_and_the_last_possible_token(backend):
    """The quantile is of the sums of all blocks, and a running sum within the last one has to exceed it."""
    V, B = 70, 200 if backend == "reference" else 60  # rows take long to interpret
    logits = 3 * torch.randn(B, 1, V, generator=torch.Generator().manual_seed(0))
    logits[..., 0] = -INF
    logits[..., 50:] = -INF
    none = torch.zeros(B, 0).long(), torch.zeros(B).long(), torch.zeros(B, 0).double()
    for u, wanted in ((0.0, 1), (LARGEST, 49)):
        token = verify(logits, *none, torch.full((B,), u, dtype=F64), backend=backend).token
        assert token.tolist() == [wanted] * B


# -- ties --------------------------------------------------------------------------------------------------------------


def test_equal_logits_go_to_the_first_token_everywhere(backend):
    """Ties within a block of the kernels, between blocks, and with zeros of both signs."""
    V = 70
    logits = torch.full((4, 2, V), -1.0)
    logits[0, :, [5, 6]] = 2.0
    logits[1, :, [15, 16, 69]] = 2.0
    logits[2, :, [33, 64]] = 2.0
    logits[3] = 0.0
    logits[3, :, 0] = -0.0
    first = torch.tensor([5, 15, 33, 0])
    sampling, nothing = sd.Sampling(temperature=0.0), torch.zeros(4, 1).double()
    for tokens, accepts in ((first, 1), (first + 1, 0)):
        got = verify(
            logits,
            tokens[:, None],
            torch.ones(4).long(),
            nothing,
            nothing[:, 0],
            temperature=0.0,
            backend=backend,
        )
        assert got.accepted.tolist() == [accepts] * 4
        assert torch.equal(got.token, first)
        proposal, context = Proposal.chain(tokens[:, None], torch.ones(4).long()), Context.of([[0]] * 4)
        assert torch.equal(sampling.argmax(logits, context)[:, 0], first)
        verdict = Rejection()(proposal, sampling(logits, context, proposal), context, Extreme(LARGEST))
        assert verdict.accepted.tolist() == [accepts] * 4
        assert torch.equal(verdict.bonus, first)


def test_races_have_no_ties_and_no_impossible_winner():
    """Numbers are (k + 1/2) 2^-53, at most 1 - 2^-53: their logarithm is neither 0 nor infinite."""
    arrivals = race_arrivals(torch.ones(500, 64, dtype=F64), seeds(0, 500), torch.arange(500))
    assert bool(((arrivals > 0) & arrivals.isfinite()).all())
    assert all(len(set(row)) == 64 for row in arrivals.tolist())
    probs = torch.tensor([0.0, 1e-310, 0.0, 1.0, 0.0], dtype=F64).expand(500, 5)  # 1 / 1e-310 overflows
    assert Philox(seeds(0, 500)).race(probs, torch.arange(500)).tolist() == [3] * 500
    assert Philox(seeds(0, 3)).race(probs.new_zeros(3, 0, 5), torch.zeros(3, 1).long()).shape == (3, 0)


def test_equal_siblings_are_tried_against_what_is_left():
    """Two equal draws of q are two candidates, and two equal point masses are one: exact, over all numbers."""
    target = sd.TableModel([0.6, 0.3, 0.1])
    twice = sd.decoder(target).draft(sd.drafts.Tree(sd.TableModel([0.9, 0.1, 0.0]), (2,)), length=1)
    found = sd.certify(twice.build())
    assert found.lossless
    assert found.scope.siblings
    p, token = torch.tensor([0.6, 0.3, 0.1], dtype=F64), torch.tensor([[1, 1]])
    proposal = Proposal(token, torch.tensor([[-1, -1]]), torch.tensor([2]))
    for u, accepted in ((0.29, 1), (0.31, 0)):  # the second has p = 0 after the first was rejected
        verdict = Rejection()(proposal, p.expand(1, 3, 3), Context.of([[0]]), Extreme(u))
        assert verdict.accepted.tolist() == [accepted]
        assert verdict.bonus.tolist() != [1] or accepted


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda v: v.info.name)
def test_stops_inside_blocks_cut_after_verification(verifier):
    target, small = sd.TableModel.random(3, 1, seed=0), sd.TableModel.random(3, 1, seed=1)
    decoder = sd.decoder(target).draft(small, length=2).verifier(verifier).build()
    for stops in ({"eos_token_id": (2,)}, {"stopping_criteria": (lambda ids, scores: ids[:, -1] == 1,)}):
        found = sd.certify(decoder, [[0], [1, 2]], [4, 3], **stops)
        assert found.lossless
        assert found.scope.truncated
