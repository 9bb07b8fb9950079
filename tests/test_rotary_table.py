"""The table of cosines and sines beside the rotary module itself, in eager and in captured steps."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import specdec as sd
from specdec.executors import Ahead, Serial
from specdec.forward import rotary_table
from specdec.forward.block import Eager, eager_angles
from specdec.forward.llama_triton import LlamaTriton
from specdec.forward.rotary_table import RotaryTable
from specdec.graphs.recorded import Recording
from specdec.graphs.ring_chain import RingPlan
from specdec.graphs.static import StaticPlan
from specdec.kernels.attention import AttentionPlan, ExplicitPlan
from specdec.kernels.attention.lowered import Lowered, RingSight

ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
every_rope = pytest.mark.parametrize("rope", ROPES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def model_with(rope="default", dtype=torch.float32, **more):
    """Its frequencies are in float32, as those of a loaded model."""
    rope = {"rope_type": rope, "rope_theta": 1e4, **ROPES.get(rope, {"factor": 2.0})}
    model = tiny("llama", 0, dtype, rope_parameters=rope, **more)
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model


def plan_of(positions):
    """Rows of one token, whose slot is its position."""
    return AttentionPlan(range(len(positions)), positions, [1] * len(positions), max(positions) + 1)


def own(model, positions, dtype):
    return [t[0] for t in model.model.rotary_emb(torch.empty(0, dtype=dtype), torch.tensor([positions]))]


POSITIONS = [0], [255], list(range(7)), [3, 255, 0, 3, 128, 64, 65], list(range(100, 233))


@every_dtype
@every_rope
def test_rows_are_the_modules_values(rope, dtype):
    """Bit for bit, for any number of positions and in the order of these."""
    model = model_with(rope, dtype)
    assert (model.model.rotary_emb.attention_scaling == 1) == (rope != "yarn")
    path, table = LlamaTriton(model), RotaryTable(model.model, 256)
    path.check()
    assert path.table.rows.dtype is dtype
    assert path.table.rows.shape == (2, 256, 8)
    for positions in POSITIONS:
        at, expected, plan = torch.tensor(positions), own(model, positions, dtype), plan_of(positions)
        with Recording() as recorded:
            made = path.angles(model.lm_head.weight, at, plan)
        assert kernels(recorded) == ["aten.index_select.default"]
        for x, c, y in zip(made, table.at(at, model.lm_head.weight), expected):
            assert x.dtype is dtype
            assert x.is_contiguous()
            assert torch.equal(x, y)
            assert c.dtype is torch.float32
            assert c.is_contiguous()
            assert torch.equal(c, y.float())


@every_dtype
def test_tables_of_several_pieces(dtype, monkeypatch):
    model = model_with("llama3", dtype, max_position_embeddings=300)
    monkeypatch.setattr(rotary_table, "TABLE", 100)
    for limit, most in (
        (300, 512),
        (None, 1024),
        (3, 256),
    ):  # a power of two, as many as there is room for, the least
        monkeypatch.setattr(rotary_table, "BYTES", 1024 * 2 * 8 * dtype.itemsize)
        table = RotaryTable(model.model, limit)
        table.hold(model.lm_head.weight)
        expected = own(model, list(range(most)), dtype)
        assert torch.equal(table.rows, torch.stack(expected))


def test_the_table_of_a_step_in_c_grows(monkeypatch):
    model = model_with(max_position_embeddings=100)
    monkeypatch.setattr(rotary_table, "TABLE", 16)
    table = RotaryTable(model.model, 100)
    lengths = []
    for positions in ([3], [15, 2], [16], [7], [99], [100, 3], [5]):  # one is beyond the model's positions
        made = table.at(torch.tensor(positions), model.lm_head.weight)
        assert all(map(torch.equal, made, own(model, positions, torch.float32)))
        lengths.append(table.rows.shape[1])
    assert lengths == [16, 16, 34, 34, 100, 100, 100]


@pytest.mark.parametrize("kind", ["beyond", "explicit", "ring", "ring, short", "static", "static, beyond"])
def test_positions_that_the_host_cannot_bound_go_to_the_module(kind, monkeypatch):
    model = model_with()
    path = LlamaTriton(model)
    if kind == "ring, short":
        monkeypatch.setattr(rotary_table, "BYTES", 128 * 2 * 8 * 4)
    path.check()
    position, inside = 400, kind in ("ring", "static")
    T = torch.zeros(1, dtype=torch.int32)

    def static(length):
        return StaticPlan(Lowered(T, T, T, T, None, None, None, None, 1, length), T.long(), ordered=True)

    ring = RingPlan(RingSight(T, 1, 7, 8, 2**31 - 1), T.long())
    plan = {
        "beyond": lambda: plan_of([position]),
        "explicit": lambda: ExplicitPlan([0], [1], torch.ones(1, 8, dtype=torch.bool).numpy()),
        "ring": lambda: ring,
        "ring, short": lambda: ring,
        "static": lambda: static(256),
        "static, beyond": lambda: static(512),
    }[kind]()
    at = torch.tensor([255 if inside else position])
    with Recording() as recorded:
        made = path.angles(model.lm_head.weight, at, plan)
    assert all(map(torch.equal, made, own(model, at.tolist(), torch.float32)))
    assert ("aten.index_select.default" in kernels(recorded)) == inside
    if kind == "ring":  # tokens that nothing reads may lie beyond a text's end
        beyond = path.angles(model.lm_head.weight, torch.tensor([position]), plan)
        assert all(map(torch.equal, beyond, made))


def test_other_kinds_have_no_table():
    model = model_with("dynamic")
    path, table = LlamaTriton(model), RotaryTable(model.model, 256)
    path.check()
    assert path.table.rows is None
    expected = own(model, [3, 1], torch.float32)
    at = torch.tensor([3, 1])
    for made in (path.angles(model.lm_head.weight, at, plan_of([3, 1])), table.at(at, model.lm_head.weight)):
        assert all(map(torch.equal, made, expected))
    assert table.rows is None
    gemma = sd.HFModel(tiny("gemma3_text"))
    table = RotaryTable(gemma.clone.model, 256)
    table.hold(gemma.clone.lm_head.weight)
    assert table.rows is None  # frequencies for each kind of layer
    assert gemma._path.lean is None


def test_where_memory_is_short_there_is_none(monkeypatch):
    model = model_with()
    path = LlamaTriton(model)

    def short(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(RotaryTable, "make", short)
    path.check()
    made = path.angles(model.lm_head.weight, torch.tensor([5]), plan_of([5]))
    assert path.table.rows is None
    assert all(map(torch.equal, made, own(model, [5], torch.float32)))


# -- captured steps ----------------------------------------------------------------------------------------------------


class Plain(Eager):
    merged = None

    def refreshed(self):
        return self


class StandIn(LlamaTriton):
    """As ``LlamaTriton``, with PyTorch's operators for Triton's, so that steps can be recorded."""

    def __init__(self, model):
        super().__init__(model, merged=False)
        self.ops = Plain()

    def angles(self, x, positions, plan):
        return eager_angles(*super().angles(x, positions, plan))


def wrapped_as(kind, model, **options):
    wrapped = sd.HFModel(model, graphs="recorded", **options)
    wrapped._path.lean = kind(wrapped.clone)
    wrapped.steps.forward = wrapped._path.forward
    return wrapped


class ByModule(StandIn):
    def check(self):
        """Makes no table."""


def kernels(recorded):
    """The operators that compute something."""
    return [str(func) for func, _, _, places in recorded.calls if places]


@pytest.mark.parametrize("executor", [Serial(), Ahead()], ids=repr)
def test_captured_rounds_up_to_the_last_slot(executor, monkeypatch):
    """A table as short as the memory: a gather beyond it raises an error."""
    monkeypatch.setattr(rotary_table, "SHORTEST", 1)
    made, calls = [], []
    for kind in (ByModule, StandIn):
        models = [model_with(max_position_embeddings=64), model_with("linear", max_position_embeddings=64)]
        target, small = (wrapped_as(kind, model) for model in models)
        computed = []
        target.clone.model.rotary_emb.register_forward_hook(lambda *_, calls=computed: calls.append(0))
        builder = sd.decoder(target).draft(small, 3).sampling(temperature=0.7).executor(executor)
        result = builder.build().generate([[5, 6, 7], [3] * 9], (57, 50), seed=1, eos_token_id=())
        assert target.steps.captured
        assert {cache.whole[0].shape[2] for cache in target.steps._storages} == {64}
        made.append(result.ids)
        calls.append(len(computed))
    assert made[0] == made[1]
    assert calls[1] < 5 < calls[0]  # a look at the cache's shapes, and the table


@every_dtype
def test_a_captured_step_has_one_operator_for_its_positions(dtype):
    """Instead of those of the module, each of which would be a launch on a GPU."""
    counts, body, at = [], model_with(dtype=dtype).model, torch.zeros(1, 4, dtype=torch.long)
    with Recording() as module, torch.inference_mode():
        body.rotary_emb(body.norm.weight, at)
    for kind in (ByModule, StandIn):
        wrapped = wrapped_as(kind, model_with(dtype=dtype))
        cache, context = wrapped.cache(1, 16), sd.Context.of([[5, 6, 7]], 16)
        for _ in range(3):
            wrapped.score(cache, context)
        (program, *_) = wrapped.steps.captured
        with Recording() as recorded, torch.inference_mode():
            program.body()
        counts.append(len(kernels(recorded)))
    assert counts[0] - counts[1] == len(kernels(module)) - 1 > 4
