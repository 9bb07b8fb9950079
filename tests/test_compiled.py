"""torch.compile as an option of HFModel: the same numbers, the user's modules as they were."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec import drafts
from specdec.graphs.recorded import record, watch
from specdec.models import HFModel

ROWS = [[5, 6, 7, 8] * 3, [9, 2]]
TRACED = {"backend": "aot_eager"}  # all of the compiler but its code generation


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "falcon"])
def test_compiled_parts_change_no_text(family):
    model = tiny(family)
    plain, compiled = HFModel(model), HFModel(model, compile=TRACED)
    assert any(part._compiled_call_impl is not None for part in compiled.clone.modules())
    assert all(part._compiled_call_impl is None for part in (*model.modules(), *plain.clone.modules()))
    texts = [
        sd.decoder(each).draft(drafts.NGram(), 3).build().generate(ROWS, 24, seed=0).ids
        for each in (plain, compiled)
    ]
    assert texts[0] == texts[1]


def test_the_compiled_parts_run(monkeypatch):
    seen = []

    def backend(graph, inputs):
        seen.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    model = HFModel(tiny("llama"), compile={"backend": backend})
    sd.decoder(model).build().generate(ROWS, 4, seed=0)
    assert seen
    assert all(seen)


@pytest.mark.parametrize("see", [watch, record])
def test_what_was_compiled_stays_compiled_when_a_step_is_looked_at(see):
    """As before a capture, which is to record the compiled kernels."""
    runs = []

    def backend(graph, inputs):
        def run(*values):
            runs.append(len(values))
            return graph.forward(*values)

        return run

    torch._dynamo.reset()
    layer = torch.compile(torch.nn.Linear(4, 4), backend=backend, dynamic=False)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        layer(x)
        see(lambda: layer(x))
        assert len(runs) == 1
        layer(x)
    assert len(runs) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's compiler imports them
def test_the_compilers_own_code_gives_the_same_text():
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=1)
    texts = [
        sd.decoder(HFModel(model, compile=how, graphs=graphs)).build().generate(ROWS, 12, seed=0).ids
        for how, graphs in ((False, False), (True, False), (True, "eager"))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_what_cannot_be_compiled_is_said():
    with pytest.raises(
        ValueError,
        match="compile is set but GPT2LMHeadModel has no module whose class ends in RMSNorm or MLP",
    ):
        model = tiny("gpt2")
        for block in model.transformer.h:
            block.mlp = torch.nn.Identity()
        HFModel(model, compile=True)
    with pytest.raises(ValueError, match="compile is set and invariant is True"):
        HFModel(tiny("llama", dtype=torch.float32), compile=True, invariant=True)
    with pytest.raises(ValueError, match="compile is set and graphs is 'recorded'"):
        HFModel(tiny("llama"), compile=True, graphs="recorded")
