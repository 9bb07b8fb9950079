"""Verification on logits: the plain reference against ``Rejection``, the kernels against both, and the verifier built on them.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from interpreted import interpreted  # noqa: F401 (a fixture)
from tiny import byte_tokenizer, tiny
from torch import Tensor
from without_a_gpu import compiled

import specdec as sd
from specdec import drafts
from specdec.audit.certify import certify
from specdec.kernels import rejection
from specdec.kernels.rejection import verify
from specdec.lab.errors import decision_error
from specdec.rng import ACCEPT, BONUS, Key, Philox, seeds
from specdec.selectors import UCB1
from specdec.selectors.rewards import block_divergence
from specdec.types import Context, Proposal
from specdec.verifiers import FusedRejection, Rejection

TRITON = importlib.util.find_spec("triton") is not None
KERNELS = Path(rejection.__file__).with_name("triton_kernels.py")
GPU = TRITON and torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not TRITON, reason="needs triton")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def case(B, N, V, dtype=F32, seed=0, holes=0.0, kind="probs", temperature=1.0):
    """Logits, a proposal for ragged rows with what it was drawn from, and the decisions' numbers."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, N + 1, V, generator=g, dtype=F64) * 2
    said = logits[:, :N] + torch.randn(B, N, V, generator=g, dtype=F64)
    if holes:
        gone = torch.rand(B, N + 1, V, generator=g) < holes
        gone[..., seed % V] = False
        logits[gone] = float("-inf")
        gone = torch.rand(B, N, V, generator=g) < holes
        gone[..., (seed + 1) % V] = False
        said[gone] = float("-inf")
    logits, said = logits.to(dtype), said.to(dtype)
    q = sd.Sampling(temperature=temperature or 1.0)(said, None) if N else said.float()
    tokens = q.reshape(-1, V).multinomial(1, generator=g).view(B, N) if N else torch.zeros(B, 0).long()
    size = torch.randint(0, N + 1, (B,), generator=g)
    size[-1] = N
    if kind == "point":
        tokens = torch.where(torch.rand(B, N, generator=g) < 0.5, logits[:, :N].argmax(-1), tokens)
    proposal = Proposal.chain(tokens, size, None if kind == "point" else q)
    context, rng = Context.of([[0] * (1 + b % 3) for b in range(B)]), Philox(seeds(seed, B))
    draft = {"point": None, "probs": q, "logits": said}[kind]
    return logits, proposal, draft, context, rng


def numbers(context: Context, rng: Philox, N: int) -> tuple[Tensor, Tensor]:
    at = context.length[:, None]
    return rng.uniform(Key(at, torch.arange(N), 0, ACCEPT)), rng.uniform(
        Key(at, torch.arange(N + 1), 0, BONUS)
    )


def margin(logits, proposal, accept_u, bonus_u, temperature):
    """``[B]`` how far the nearest number is from a threshold of its decision, in float64."""
    B = len(proposal.tokens)
    if temperature == 0:
        return torch.full((B,), 1.0)
    p = (logits.double() / temperature).softmax(-1)
    out = torch.full((B,), 1.0, dtype=F64)
    for b in range(B):
        n = 0
        while True:
            if n == int(proposal.size[b]):
                distribution = p[b, n]
                break
            x = proposal.tokens[b, n]
            q = (
                torch.zeros_like(p[b, n]).index_fill(0, x, 1)
                if proposal.probs is None
                else proposal.q(n)[b].double()
            )
            ratio = p[b, n, x] / q[x]
            out[b] = min(out[b], (accept_u[b, n] - ratio).abs())
            if accept_u[b, n] >= ratio:
                distribution = (p[b, n] - q).clamp(min=0)
                break
            n += 1
        cdf = distribution.cumsum(0)
        out[b] = min(out[b], (cdf / cdf[-1] - bonus_u[b, n]).abs().min())
    return out


def agrees(backend, B, N, V, dtype=F32, seed=0, holes=0.0, kind="probs", temperature=1.0):
    """The backend's decisions are ``Rejection``'s, except next to a threshold. Returns how many rows were exempt."""
    logits, proposal, draft, context, rng = case(B, N, V, dtype, seed, holes, kind, temperature)
    us = numbers(context, rng, N)
    probs = sd.Sampling(temperature=temperature)(logits, context, proposal)
    expected = Rejection()(proposal, probs, context, rng)
    got = verify(
        logits,
        proposal.tokens,
        proposal.size,
        *us,
        draft,
        draft_logits=kind == "logits",
        temperature=temperature,
        backend=backend,
    )
    close = margin(logits, proposal, *us, temperature) < (1e-13 if dtype == F64 else 1e-5)
    same = (got.accepted.cpu() == expected.accepted) & (got.token.cpu() == expected.bonus)
    assert bool((same | close).all())
    return int(close.sum())


KINDS = pytest.mark.parametrize("kind", ["point", "probs", "logits"])


@KINDS
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_the_reference_decides_as_rejection_does(dtype, temperature, kind):
    for seed, (B, N, V) in enumerate([(50, 4, 97), (40, 1, 3), (9, 0, 50), (20, 7, 500), (1, 3, 2)]):
        exempt = agrees("reference", B, N, V, dtype, seed, 0.3 * (seed % 2), kind, temperature)
        assert exempt <= (0 if dtype == F64 else 1 + B // 10)


def test_a_draft_that_is_the_target_leaves_nothing_and_draws_from_the_target():
    """p = q to 0.01%: next to no number rejects, and one that does falls back on p."""
    logits = torch.randn(6, 3, 20, dtype=F64)
    q = logits[:, :2].softmax(-1)
    tokens, size = q.argmax(-1), torch.full((6,), 2)
    u, bonus = torch.full((6, 2), 0.99995, dtype=F64), torch.rand(6, dtype=F64)
    got = verify(logits, tokens, size, u, bonus, q.clone() * 1.0001)
    assert got.accepted.tolist() == [0] * 6
    assert torch.equal(got.token, sd.rng.pick(logits[:, 0].softmax(-1), bonus))


def test_bad_input_is_refused():
    logits, tokens, size = torch.zeros(2, 3, 5), torch.zeros(2, 2).long(), torch.tensor([2, 1])
    u, bonus = torch.zeros(2, 2).double(), torch.zeros(2).double()
    with pytest.raises(ValueError, match="accept_u has shape"):
        verify(logits, tokens, size, u[:, :1], bonus)
    with pytest.raises(ValueError, match="draft has shape"):
        verify(logits, tokens, size, u, bonus, torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="logits is on cpu and draft on meta: move them"):
        verify(logits, tokens, size, u, bonus, torch.zeros(2, 2, 5, device="meta"))
    with pytest.raises(ValueError, match="bonus_u has shape"):
        verify(logits, tokens, size, u, bonus[:1])
    with pytest.raises(ValueError, match="temperature is -1"):
        verify(logits, tokens, size, u, bonus, temperature=-1)
    with pytest.raises(ValueError, match="choose one of reference, triton"):
        verify(logits, tokens, size, u, bonus, backend="cuda")
    with pytest.raises(ValueError, match="logits are float64: use backend='reference'"):
        verify(logits.double(), tokens, size, u, bonus, backend="triton")
    for shape in ((3, 5), (2, 0, 5), (2, 3, 0)):
        with pytest.raises(ValueError, match=r"logits has shape .*: give \[B, N \+ 1, V\]"):
            verify(torch.zeros(shape), tokens, size, u, bonus)
    with pytest.raises(ValueError, match=r"tokens is torch\.float32: give whole numbers"):
        verify(logits, tokens.float(), size, u, bonus)
    with pytest.raises(ValueError, match=r"size is torch\.float64: give whole numbers"):
        verify(logits, tokens, size.double(), u, bonus)
    with pytest.raises(ValueError, match=r"accept_u is torch\.int64: give floating-point"):
        verify(logits, tokens, size, u.long(), bonus)
    with pytest.raises(ValueError, match=r"logits is torch\.int64: give floating-point"):
        verify(logits.long(), tokens, size, u, bonus)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_cannot_be_are_refused_where_they_count(temperature):
    """Row 1 has one node of two: what its other node has is not looked at, and greedily neither numbers nor drafts."""
    nan = float("nan")
    good = {
        "tokens": torch.zeros(2, 2).long(),
        "size": torch.tensor([2, 1]),
        "accept_u": torch.zeros(2, 2).double(),
        "bonus_u": torch.zeros(2, 3).double(),
        "draft": torch.full((2, 2, 5), 0.2),
    }
    logits = torch.zeros(2, 3, 5)

    def tried(name, at, value, **options):
        wrong = {**good, name: good[name].clone()}
        wrong[name][at] = value
        return verify(logits, **wrong, temperature=temperature, **options)

    plain = verify(logits, **good, temperature=temperature)
    for value in (3, -1):
        with pytest.raises(ValueError, match=f"size of row 1 is {value}: give 0 to 2"):
            tried("size", 1, value)
    for value in (5, -1):
        with pytest.raises(ValueError, match=f"tokens of row 1 hold {value}: give ids below 5"):
            tried("tokens", (1, 0), value)
    bad = [
        *(("accept_u", (1, 0), x, "accept_u of row 1 holds .*numbers in") for x in (1.0, -0.1, nan)),
        *(("bonus_u", (1, 1), x, "bonus_u of row 1 holds .*numbers in") for x in (1.0, -0.1, nan)),
        *(("draft", (1, 0), x, "draft of row 1 is negative, NaN, or") for x in (0.6, nan, -0.2)),
        ("draft", (1, 0), torch.tensor([-0.2, 0.6, 0.2, 0.2, 0.2]), "draft of row 1 is negative"),
    ]
    for name, at, value, why in bad:
        if temperature == 0:
            made = tried(name, at, value)
        else:
            with pytest.raises(ValueError, match=why):
                tried(name, at, value)
        beyond = (1, at[1] + 1)
        made = tried(name, beyond, value)
        assert torch.equal(made.accepted, plain.accepted)
        assert torch.equal(made.token, plain.token)
    if temperature:
        for value in (nan, float("inf"), -float("inf")):
            with pytest.raises(ValueError, match="draft of row 1 holds NaN"):
                tried("draft", (1, 0), value, draft_logits=True)
            tried("draft", (1, 1), value, draft_logits=True)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_that_run_nowhere_here_say_so():
    logits, tokens, size = torch.zeros(2, 3, 5), torch.zeros(2, 2).long(), torch.tensor([2, 1])
    u, bonus = torch.zeros(2, 2).double(), torch.zeros(2).double()
    with pytest.raises(ValueError, match=r"logits is on 'cpu' .*TRITON_INTERPRET=1.*backend='reference'"):
        verify(logits, tokens, size, u, bonus, backend="triton")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution_are_refused_where_they_count(bad, temperature):
    refuses("reference", bad, temperature)


def refuses(backend, bad, temperature):
    logits, tokens, size = torch.zeros(3, 3, 70), torch.zeros(3, 2).long(), torch.tensor([2, 2, 1])
    u, bonus = torch.zeros(3, 2).double(), torch.zeros(3).double()
    logits[2, 2] = bad  # of a node that does not exist
    verify(logits, tokens, size, u, bonus, temperature=temperature, backend=backend)
    for row in (0, 2):
        wrong = logits.clone()
        wrong[1, row, 66] = bad
        with pytest.raises(ValueError, match="logits of row 1 have NaN"):
            verify(wrong, tokens, size, u, bonus, temperature=temperature, backend=backend)
    logits[0, 0] = float("-inf")
    with pytest.raises(ValueError, match="logits of row 0 have NaN"):
        verify(logits, tokens, size, u, bonus, temperature=temperature, backend=backend)


# -- the verifier ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("draft", ["model", "point", "tree"])
def test_it_is_lossless(draft, temperature):
    target, other = (sd.TableModel.random(3, 1, seed=s, zeros=0.2) for s in (1, 2))
    made = {
        "model": drafts.Model(other),
        "point": drafts.NGram(),
        "tree": drafts.Tree(other, widths=(2, 1)),
    }[draft]
    decoder = sd.decoder(target).draft(made, length=2).sampling(temperature=temperature)
    found = certify(decoder.verifier(FusedRejection()).build(), max_new_tokens=3)
    assert found.lossless


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 5}], ids=str)
def test_it_decodes_as_rejection_does(settings):
    models = (tiny("llama", seed, dtype=torch.float32) for seed in (0, 1))
    target, small = (sd.HFModel(made, byte_tokenizer()) for made in models)
    builder = sd.decoder(target).draft(drafts.Model(small), length=4).sampling(**settings)
    prompts, outputs = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5, 6]], []
    for verifier in (Rejection(), FusedRejection()):
        outputs.append(builder.verifier(verifier).build().generate(prompts, 24, seed=3))
    assert outputs[0].ids == outputs[1].ids


def test_rounds_without_probabilities_say_so():
    target = sd.TableModel.random(4, 1, seed=1)
    builder = sd.decoder(target).draft(drafts.Model(sd.TableModel.random(4, 1, seed=2)), length=2)
    for sampling, there in ((sd.Sampling(top_k=2), True), (sd.Sampling(), False)):
        rounds = []
        decoder = builder.sampling(sampling).verifier(FusedRejection()).build()
        decoder.generate([[0]], 6, seed=0, on_round=rounds.append)
        assert all((r.probs is not None) == there for r in rounds)
    with pytest.raises(ValueError, match=r"FusedRejection.*verifier\(verifiers\.Rejection\(\)\)"):
        block_divergence(rounds[1])


def test_the_reward_that_needs_probabilities_names_the_verifier_that_computes_them():
    target, arms = sd.TableModel.random(4, 1, seed=1), {"draft": sd.TableModel.random(4, 1, seed=2)}
    builder = sd.decoder(target).pool(arms, UCB1(), length=2, reward=block_divergence)
    with pytest.raises(ValueError, match=r"FusedRejection.*verifier\(verifiers\.Rejection\(\)\)"):
        builder.verifier(FusedRejection()).build().generate([[0]], 6, seed=0)
    greedy = builder.verifier(FusedRejection()).greedy()
    for usable in (builder.verifier(Rejection()), greedy):
        usable.build().generate([[0]], 6, seed=0)


# -- the kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreted")
@KINDS
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_interpreted_kernels_decide_as_rejection_does(kind, temperature, monkeypatch):
    import specdec.kernels.rejection.fused as fused

    monkeypatch.setattr(fused, "BLOCK", 32)
    monkeypatch.setattr(fused, "PART", 64)
    shapes = [(3, 3, 70, F32), (2, 0, 64, F32), (2, 4, 100, BF16), (2, 1, 31, F16)]
    for seed, (B, N, V, dtype) in enumerate(shapes):
        agrees("triton", B, N, V, dtype, seed, 0.3 * (seed % 2), kind, temperature)


@pytest.mark.usefixtures("interpreted")
def test_interpreted_kernels_take_strided_logits_and_one_quantile_a_row(monkeypatch):
    import specdec.kernels.rejection.fused as fused

    monkeypatch.setattr(fused, "BLOCK", 32)
    logits, proposal, draft, context, rng = case(3, 2, 50, seed=8)
    u, bonus = numbers(context, rng, 2)
    at = (proposal.tokens, proposal.size, u)
    plain = verify(logits, *at, bonus[:, 1], draft, backend="reference")
    wide = torch.zeros(5, 3, 80)
    wide[:3, :, 7:57] = logits.transpose(0, 1)
    views = [
        wide[:3, :, 7:57].transpose(0, 1),
        logits.transpose(1, 2).contiguous().transpose(1, 2),
    ]
    for view in views:
        assert torch.equal(view, logits)
        got = verify(view, *at, bonus[:, 1], draft, backend="triton")
        assert torch.equal(got.accepted, plain.accepted)
        assert torch.equal(got.token, plain.token)


@pytest.mark.usefixtures("interpreted")
def test_interpreted_kernels_draw_from_the_target_where_nothing_is_left(monkeypatch):
    import specdec.kernels.rejection.fused as fused

    monkeypatch.setattr(fused, "BLOCK", 32)
    logits = torch.randn(2, 2, 70, generator=torch.Generator().manual_seed(0))
    q = logits[:, :1].softmax(-1)
    args = (
        q.argmax(-1),
        torch.ones(2).long(),
        torch.full((2, 1), 0.995).double(),  # above 1 / 1.01
        torch.tensor([0.3, 0.9]).double(),
    )
    got, plain = (verify(logits, *args, q * 1.01, backend=name) for name in ("triton", "reference"))
    assert got.accepted.tolist() == [0, 0]
    assert torch.equal(got.token, plain.token)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interpreted_kernels_refuse_logits_that_are_no_distribution(temperature, monkeypatch):
    import specdec.kernels.rejection.fused as fused

    monkeypatch.setattr(fused, "BLOCK", 64)
    for bad in (float("nan"), float("inf")):
        refuses("triton", bad, temperature)


@pytest.mark.skipif(not GPU, reason="needs triton and a GPU")
@KINDS
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_on_a_gpu_the_kernels_decide_as_the_reference_does(kind, temperature):
    for seed, (B, N, V, dtype) in enumerate([(8, 5, 50_000, F32), (3, 0, 2048, BF16), (5, 3, 151_936, BF16)]):
        logits, proposal, draft, context, rng = case(B, N, V, dtype, seed, 0.1, kind, temperature)
        args = (logits, proposal.tokens, proposal.size, *numbers(context, rng, N), draft)
        how = {"draft_logits": kind == "logits", "temperature": temperature}
        got = verify(*(None if a is None else a.cuda() for a in args), **how, backend="triton")
        assert decision_error(got, args, kind, temperature) <= 1e-5


@KINDS
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_an_error_of_decisions_is_how_far_a_number_is_from_its_interval(kind, temperature):
    """Next to nothing for the reference's, more for any other decision of its rows."""
    logits, proposal, draft, context, rng = case(6, 3, 5000, BF16, 4, 0.1, kind, temperature)
    args = (logits, proposal.tokens, proposal.size, *numbers(context, rng, 3), draft)
    made = verify(*args, draft_logits=kind == "logits", temperature=temperature)
    assert decision_error(made, args, kind, temperature) <= 1e-5
    for row in range(6):
        token, accepted = made.token.clone(), made.accepted.clone()
        token[row] = (token[row] + 2500) % 5000
        accepted[row] = accepted[row] + 1 if accepted[row] < proposal.size[row] else accepted[row] - 1
        for wrong in (made._replace(token=token), made._replace(accepted=accepted)):
            assert decision_error(wrong, args, kind, temperature) > 1e-4


COMPILE = """
    TYPES = dict(Q="*fp32", U="*fp64", REST="*fp64", WHOLE="*fp64", PLACE="*i32", divisor="fp32")
    TYPES |= dict.fromkeys(["TOP", "TOTAL", "QTOP", "QTOTAL", "CUT"], "*fp32")
    TYPES |= dict.fromkeys(["TOKENS", "SIZE", "ACCEPTED", "TOKEN"], "*i64")

    def one(kernel, arch, logits, warps, **const):
        build(kernel, arch, {**TYPES, "X": "*" + logits}, ("V", "sb", "sr", "qb", "qr"), warps, **const)

    for arch in (80, 90):
        for logits in ("bf16", "fp32"):
            for greedy in (False, True):
                one(k.mass_kernel, arch, logits, 8, EXTRA=1, HOT=not greedy, GREEDY=greedy, PART=8192)
        one(k.mass_kernel, arch, "fp16", 8, EXTRA=1, HOT=True, GREEDY=False, PART=8192, R=1, splits=1)
        one(k.greedy_kernel, arch, "bf16", 4, NODES=8, SPLITS=32)
        for kind in (0, 1, 2):
            one(k.accept_kernel, arch, "bf16", 4, NODES=8, SPLITS=32, KIND=kind, HOT=True)
            one(k.residual_kernel, arch, "bf16", 8, KIND=kind, HOT=True, BLOCK=2048)
            for hot in (False, True):
                one(k.pick_kernel, arch, "bf16", 16, KIND=kind, HOT=hot, BLOCK=2048, BLOCKS=128)
        for hot in (False, True):  # a captured round of a float32 target: probabilities, and a quantile a depth
            one(k.accept_kernel, arch, "fp32", 4, NODES=8, SPLITS=32, KIND=1, HOT=hot)
            one(k.residual_kernel, arch, "fp32", 8, KIND=1, HOT=hot, BLOCK=2048)
            one(k.pick_kernel, arch, "fp32", 16, KIND=1, HOT=hot, BLOCK=2048, BLOCKS=128, un=1)
        single = dict(R=1, splits=1)
        one(k.accept_kernel, arch, "fp32", 4, NODES=1, SPLITS=1, KIND=0, HOT=False, **single)
        one(k.pick_kernel, arch, "fp32", 16, KIND=0, HOT=False, BLOCK=2048, BLOCKS=1, R=1, blocks=1, ub=1)
"""


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_kernels_compile_for_gpus_without_spilling(tmp_path):
    said = compiled(COMPILE, KERNELS, tmp_path)
    assert said.count("pick_kernel") == 18
