"""The verdict of a whole round from logits: that from probabilities, by the reference and by the kernels, recorded and read by nobody."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from both_executors import OwnNumbers
from fake_device import META, FakeDevice
from interpreted import interpreted, launches  # noqa: F401 (fixtures)
from tiny import tiny

import specdec as sd
import specdec.kernels.rejection.fused as fused
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead, Serial
from specdec.graphs.capture import CudaGraphs
from specdec.graphs.recorded import Recording, record
from specdec.graphs.whole_round import ACCEPTED, DRAWN, FINITE, NEXT, RoundShape, WholeRound
from specdec.kernels.rejection import chosen, decisions, verify
from specdec.lab.errors import decision_error
from specdec.rng import Philox, seeds
from specdec.verifiers import FusedRejection, Rejection

GPU = find_spec("triton") is not None and torch.cuda.is_available()
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def small_blocks(interpreted, monkeypatch):  # noqa: F811
    """Kernels are chosen, and interpreted with small blocks."""
    monkeypatch.setattr(fused, "chosen", lambda *_: "triton")
    monkeypatch.setattr("specdec.verifiers.fused.chosen", lambda *_: "triton")
    monkeypatch.setattr(fused, "BLOCK", 32)
    monkeypatch.setattr(fused, "PART", 64)


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    """The backend that is chosen."""
    return backend_of(request)


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.slow)])
def slow_backend(request):
    """``backend``, whose kernels run in the slow tier."""
    return backend_of(request)


def backend_of(request):
    if request.param == "triton":
        request.getfixturevalue("small_blocks")
    return request.param


# -- a verdict in the step -----------------------------------------------------------------------------------------------


class Scripted:
    """A model in the step whose logits are given, ``[R, n, V]``."""

    taps, store = (), SimpleNamespace(page=0)

    def __init__(self, logits):
        self.logits, self.vocab_size = logits, logits.shape[-1]

    def feed(self, *_):
        return self.logits.flatten(0, 1)

    def chain(self, given, state):
        return lambda n, _: self.logits[:, n]

    def observe(self, *_):
        pass


BUDGETS = [3, 0, 1]  # of two drafted tokens; beside these rows there is one of padding
R, K, V = 4, 2, 70
slow = pytest.mark.slow


def round_of(verdict, logits, said, temperature=1.0, drawing=None, seed=0, device="cpu"):
    """A round of rows with ``BUDGETS`` on ``logits [R, k + 1, V]`` and the draft's ``said [R, k, V]``."""
    sampling = sd.Sampling(temperature=temperature)
    own = sampling if drawing is None else sd.Sampling(temperature=drawing)
    draft = None if said is None else Scripted(said)
    shape = RoundShape(R, 64, logits.shape[1] - 1, verdict, sampling, own)
    made = WholeRound(Scripted(logits), draft, shape, torch.device(device))
    length = torch.arange(len(BUDGETS)) + 3
    start = torch.stack([length, torch.zeros_like(length), torch.ones_like(length)], 1)
    made.send(length + 1 + torch.tensor(BUDGETS), seeds(seed, len(BUDGETS)), start)
    return made


def drawn(seed, V=V, dtype=torch.float32, k=K, holes=0.3):
    """Logits of a target and of a draft that is like it."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(R, k + 1, V, generator=g) * 2
    said = logits[:, :k] + torch.randn(R, k, V, generator=g)
    for x in (logits, said):
        gone = torch.rand(x.shape, generator=g) < holes
        gone[..., seed % V] = False
        x[gone] = -INF
    return logits.to(dtype), said.to(dtype) if k else None


SETTINGS = [
    ({"temperature": 0.6}, {"V": 97, "dtype": torch.bfloat16}),
    ({"temperature": 1.0}, {}),
    ({"temperature": 1.0, "drawing": 1.4}, {"V": 31, "dtype": torch.float16}),
    ({"temperature": 0.8, "drawing": 0.0}, {"V": 64}),
    ({"temperature": 1.3}, {"k": 0}),
]


def same_verdict(how, what, seed):
    """The result of a round, which both ways of verification give."""
    args = drawn(seed, **what)
    plain, quick = (round_of(verdict, *args, **how, seed=seed).body() for verdict in ("rejection", "fused"))
    assert torch.equal(quick[0], plain[0])
    assert torch.equal(quick[1], plain[1])
    assert bool((quick[0][:, [FINITE, DRAWN]] == 1).all())
    return quick[0]


@pytest.mark.parametrize(("how", "what"), SETTINGS)
def test_the_reference_decides_as_from_probabilities(how, what):
    found = torch.stack([same_verdict(how, what, seed) for seed in range(20)])
    accepted, most = found[:, :3, ACCEPTED], torch.tensor([what.get("k", K), 0, min(1, what.get("k", K))])
    assert torch.equal(accepted.amax(0), most)  # all budgets are used up, and none is exceeded
    assert torch.equal(accepted.amin(0), torch.zeros_like(most))


@pytest.mark.parametrize(
    ("how", "what"), [pytest.param(*both, marks=slow if i else ()) for i, both in enumerate(SETTINGS)]
)
def test_the_kernels_decide_as_from_probabilities(how, what, small_blocks):
    same_verdict(how, what, 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [NAN, pytest.param(INF, marks=slow), pytest.param(-INF, marks=slow)])
def test_rows_whose_logits_are_no_distribution_are_marked_where_they_count(bad, slow_backend):
    logits, said = drawn(3)
    clean = round_of("fused", logits, said).body()[0]
    # Row -> node, and whether it counts in a row of that budget.
    for (b, n), counts in {(0, 2): True, (1, 1): False, (2, 1): True, (2, 2): False}.items():
        wrong = logits.clone()
        wrong[(b, n) if bad == -INF else (b, n, 5)] = bad
        wrong[3, 0] = NAN  # padding
        plain, quick = (round_of(verdict, wrong, said).body()[0] for verdict in ("rejection", "fused"))
        expected = torch.ones(3).long()
        expected[b] = not counts
        assert torch.equal(quick[:3, FINITE], expected)
        assert torch.equal(plain[:3, FINITE], expected)
        assert torch.equal(quick[:3][expected == 1], clean[:3][expected == 1])
        assert bool(((quick[:, NEXT] >= 0) & (quick[:, NEXT] < V)).all())
        assert bool(((quick[:, ACCEPTED] >= 0) & (quick[:, ACCEPTED] <= K)).all())


@pytest.mark.parametrize("point", [False, pytest.param(True, marks=slow)])
def test_decisions_next_to_a_threshold_are_within_rounding(point, interpreted):  # noqa: F811
    """In a larger vocabulary, where running sums are close, by the blocks of a GPU."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 3, 5003, generator=g)
    q = (logits[:, :2] + 0.3 * torch.randn(4, 2, 5003, generator=g)).softmax(-1)
    tokens = q.view(-1, 5003).multinomial(1, generator=g).view(4, 2)
    numbers = (torch.rand(4, n, dtype=torch.float64, generator=g) for n in (2, 3))
    given = (logits, tokens, torch.tensor([2, 0, 1, 2]), *numbers, None if point else q)
    assert decision_error(decisions(*given, backend="triton"), given, "probs", 1.0) <= 1e-5


# -- nothing is read by the host -----------------------------------------------------------------------------------------


def replays(capture, device="cpu"):
    """A captured round reads lengths, budgets, seeds and logits anew in every replay."""
    held, fresh = ([x.to(device) for x in drawn(seed)] for seed in (0, 1))
    made, other = (round_of("fused", *x, seed=seed, device=device) for seed, x in enumerate((held, fresh)))
    replay = capture(made.body)
    for tensor, new in zip(held, fresh):
        tensor.copy_(new)
    other.staged.on["most"][1:3] += 1  # other budgets
    made.state.copy_(other.state)
    made.staged._block.copy_(other.staged._block)
    for mine, theirs in zip(replay()[:2], other.body()[:2]):
        assert torch.equal(mine, theirs)


def test_a_recorded_round_decides_on_what_its_tensors_hold(backend, launches):  # noqa: F811
    replays(record)


@pytest.mark.skipif(not GPU, reason="needs triton and a GPU")
def test_on_a_gpu_a_captured_round_decides_on_what_its_tensors_hold():
    replays(CudaGraphs(torch.device("cuda")), "cuda")
    for how, what in SETTINGS:
        args = drawn(1, **what)
        here = round_of("rejection", *args, **how, seed=1).body()
        there = round_of("fused", *(x if x is None else x.cuda() for x in args), **how, seed=1, device="cuda")
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here[:2], there.body()[:2]))


def test_the_kernels_are_few_operators_and_write_no_tensor_of_the_vocabulary(small_blocks, launches):  # noqa: F811
    args = drawn(0, V=256)
    numbers = torch.full((R, K + 1), 0.5).double()
    names, largest = [], []
    for verdict in ("rejection", "fused"):
        made = round_of(verdict, *args)
        made._uniforms = lambda length, depths, stream: numbers[:, : len(depths)]
        drafted = made._draw(None, torch.full((R,), K))
        with Recording() as recording:
            made._decide(args[0], drafted, made.state[:, 0])
        names.append([str(call[0]) for call in recording.calls])
        largest.append(max(t.numel() for t in recording.kept if isinstance(t, torch.Tensor)))
    plain, quick = names
    launched = [name for name in quick if name.endswith("_kernel")]
    assert launched == ["mass_kernel", "accept_kernel", "residual_kernel", "pick_kernel"]
    assert len(quick) < len(plain) / 2
    assert largest[0] == args[0].numel()
    assert largest[1] < 256


def test_on_a_device_nothing_waits():
    logits, said = drawn(0)
    q, size = said.softmax(-1), torch.tensor([2, 1, 0, 2])
    given = logits, q.argmax(-1), size, *(torch.rand(R, n).double() for n in (K, K + 1)), q
    expected = decisions(*given)
    with FakeDevice() as device:
        there = [t.to(META) for t in given]
        device.waits.clear()
        made = decisions(*there)
        assert not device.waits
        found = [t.cpu() for t in made]
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_decisions_mark_the_rows_that_verify_refuses(temperature, slow_backend):
    logits, said = drawn(5)
    q, size = said.softmax(-1), torch.tensor([2, 2, 1, 0])
    given = q.argmax(-1), size, *(torch.full((R, n), 0.5).double() for n in (K, K + 1)), q
    clean = decisions(logits, *given, temperature=temperature)
    assert all(map(torch.equal, clean, verify(logits, *given, temperature=temperature, backend=slow_backend)))
    wrong = logits.clone()
    wrong[1, 2, 3], wrong[2, 1] = NAN, -INF
    wrong[3, 1] = NAN  # of no node
    made = decisions(wrong, *given, temperature=temperature)
    bad = torch.tensor([False, True, True, False])
    assert torch.equal(made.accepted, torch.where(bad, -1, clean.accepted))
    assert torch.equal(made.token[~bad], clean.token[~bad])
    with pytest.raises(ValueError, match="logits of row 1 have NaN"):
        verify(wrong, *given, temperature=temperature, backend=slow_backend)


# -- decoders ------------------------------------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7, 8, 9], [3], [9, 9, 4, 2, 7, 7, 1]]


@cache
def models(graphs):
    return tuple(sd.HFModel(tiny("llama", seed, torch.float32), graphs=graphs) for seed in (0, 1))


def builder_of(kind, graphs="eager", **how):
    target, small = models(graphs)
    if kind == "spire":
        small = sd.drafts.Spire(SpireModel.from_target(target, 1, window=4), 3, graphs=graphs)
    builder = sd.decoder(target).sampling(**how).verifier(FusedRejection())
    return builder.draft(small, 3) if kind else builder


def same(builder, prompts, budgets):
    """Both executors' texts and counts are equal."""
    made = [
        builder.executor(executor).build().generate(prompts, budgets, seed=3, eos_token_id=())
        for executor in (Serial(), Ahead())
    ]
    assert made[0].ids == made[1].ids
    for name in ("rounds", "drafted", "accepted"):
        assert getattr(made[0].stats, name) == getattr(made[1].stats, name)


CASES = [
    ("model", {}),
    ("spire", {"temperature": 0.6}),
    (None, {}),
    ("model", {"top_k": 5}),
    ("model", {"temperature": 0}),
]


@pytest.mark.parametrize(
    ("kind", "how"), [pytest.param(*case, marks=slow if i > 1 else ()) for i, case in enumerate(CASES)]
)
def test_texts_are_those_of_serial(kind, how):
    same(builder_of(kind, **how), PROMPTS, [13, 9, 17])


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [
        ("model", "eager"),
        *(pytest.param(kind, "recorded", marks=slow) for kind in ("model", "spire", None)),
    ],
)
def test_texts_are_those_of_serial_where_the_kernels_run(kind, graphs, small_blocks, launches):  # noqa: F811
    """Both executors run the kernels."""
    same(builder_of(kind, graphs, temperature=0.8), PROMPTS[:1], [7 if graphs == "eager" else 17])


@pytest.mark.parametrize(
    ("verifier", "how", "quick"),
    [
        (FusedRejection(), {"temperature": 0.5}, True),
        (FusedRejection(), {"temperature": 0}, False),
        (FusedRejection(), {"top_k": 5}, False),
        (Rejection(), {}, False),
        (sd.Coupled(), {}, False),
    ],
)
def test_what_decides_on_logits(verifier, how, quick, monkeypatch):
    called = []

    def seen(*args, temperature):
        called.append(temperature)
        return decisions(*args, temperature=temperature)

    monkeypatch.setattr("specdec.kernels.rejection.decisions", seen)
    decoder = builder_of("model", **how).verifier(verifier).executor(Ahead()).build()
    decoder.generate(PROMPTS[:1], 5, seed=0, eos_token_id=())
    assert set(called) == ({how["temperature"]} if quick else set())


def test_which_backend_is_chosen():
    pytest.importorskip("triton")
    half, wide, narrow = (
        torch.zeros(1, dtype=d) for d in (torch.bfloat16, torch.float64, torch.float8_e4m3fn)
    )

    def there(tensor):
        return SimpleNamespace(is_cuda=True, dtype=tensor.dtype)

    assert chosen(half) == chosen(half, half) == "reference"
    assert chosen(there(half)) == chosen(there(half), there(wide)) == "triton"
    assert chosen(there(wide)) == chosen(there(wide), there(half)) == "reference"
    assert chosen(there(half), there(narrow)) == "reference"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_that_is_no_distribution_is_named(slow_backend, monkeypatch):
    own = WholeRound._decide

    def spoilt(self, logits, *others):
        logits = logits.clone()
        logits[1, 0, 3] = NAN
        return own(self, logits, *others)

    monkeypatch.setattr(WholeRound, "_decide", spoilt)
    said = []
    for verifier in (FusedRejection(), Rejection()):
        decoder = builder_of("model").verifier(verifier).executor(Ahead()).build()
        with pytest.raises(ValueError, match=r"^logits of row 1 have NaN") as refusal:
            decoder.generate(PROMPTS[:2], 9, seed=0, eos_token_id=())
        said.append(str(refusal.value))
    assert said[0] == said[1]


def test_random_numbers_of_ones_own_decide_where_the_kernels_run(small_blocks):
    decoder = builder_of("model").build()
    rng = OwnNumbers(seeds(0, 1))
    plain = decoder.generate(PROMPTS[:1], 5, rng=rng, eos_token_id=())
    assert rng.asked
    assert plain.ids == decoder.generate(PROMPTS[:1], 5, rng=Philox(seeds(0, 1)), eos_token_id=()).ids
