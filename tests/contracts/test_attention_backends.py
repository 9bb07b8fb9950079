"""Every attention backend keeps the rules of ``kernels.attention.contract``; planted mistakes are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from interpreted import interpreter

from specdec.kernels.attention import BACKENDS, choice, conformance, reference, register
from specdec.kernels.attention.choice import why_not

ANYWHERE = {"reference", "packed", "padded", "decomposed", "cpu"}


@pytest.fixture
def served():
    """Takes a backend through the suite, where this machine has what it needs; Triton's kernels in its interpreter."""

    def run(name: str, dtype: torch.dtype) -> list[str]:
        query, keys, values = conformance.buffers(plan := conformance.plans()["decode"], dtype, "cpu", 4, 16)
        why = why_not(name, query, keys, values, plan)
        if why is not None:
            assert name not in ANYWHERE
            pytest.skip(why)
        return conformance.check(name, "cpu", dtype)

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "triton"])
def test_every_backend_keeps_the_contract(name, dtype, served):
    calls = served(name, dtype)
    assert len(calls) >= 20, calls
    assert any("tree" in call for call in calls)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of NaN that is masked
def test_interpreted_triton_keeps_the_contract(served):
    pytest.importorskip("triton")
    with interpreter():
        assert len(served("triton", torch.float32)) > 40


def planted(**changed):
    """The reference with a mistake in it."""
    own = {
        "refuses": reference.refuses,
        "attend": reference.attend,
        "attend_with_lse": reference.attend_with_lse,
    }
    return SimpleNamespace(**{**own, **changed})


def base_two(*args):
    out, lse = reference.attend_with_lse(*args)
    return out, lse / torch.log(torch.tensor(2.0))


def negated(*args):
    out, lse = reference.attend_with_lse(*args)
    return out, -lse


def bounded(*args):
    """Says a large negative number where a query sees nothing."""
    out, lse = reference.attend_with_lse(*args)
    return out, lse.clamp(min=-1e30)


def without_window(query, keys, values, plan, scale, window=None, *more):
    return reference.attend(query, keys, values, plan, scale, None, *more)


def leaks(query, keys, values, plan, *more):
    """Reads a hidden slot with weight 0."""
    return reference.attend(query, keys, values, plan, *more) + 0 * values[..., :1].sum()


def without_sinks(query, keys, values, plan, scale, window=None, softcap=None, sink_logits=None):
    return reference.attend(query, keys, values, plan, scale, window, softcap)


def one_row(query, keys, values, plan, *more):
    """Takes slots for pages, and rows in the order in which they lie."""
    return reference.attend(query, keys.flip(0), values.flip(0), plan, *more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        ({"attend_with_lse": base_two}, "log-sum-exps are natural"),
        ({"attend_with_lse": negated}, "log-sum-exps are natural, positive in sign"),
        ({"attend_with_lse": bounded}, "-inf for no slots"),
        ({"attend": without_window}, "window: the output"),
        ({"attend": leaks}, "nan that no query sees"),
        ({"attend": without_sinks}, "sink_logits: the output"),
        ({"attend": one_row}, "decode, plain: the output"),
        ({"attend": lambda *args: reference.attend(*args).squeeze(0)}, r"got \[3, 4, 16\]"),
        ({"attend": lambda *args: reference.attend(*args).double()}, "of torch.float64, not"),
        ({"attend": lambda *args: reference.attend(*args).nan_to_num(1) + 1e-3}, "off by 1.0e-03"),
    ],
)
def test_planted_mistakes_are_found(mistake, why, monkeypatch):
    monkeypatch.setattr(choice._backends, "registered", {})
    register("planted", planted())
    assert len(conformance.check("planted")) > 40
    register("planted", planted(**mistake))
    with pytest.raises(AssertionError, match=why):
        conformance.check("planted")


def test_names_of_the_library_are_not_given_away():
    for name in ("auto", "triton"):
        with pytest.raises(ValueError, match="which the library uses: give another one"):
            register(name, reference)


def test_a_backend_that_serves_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(choice._backends, "registered", {})
    register("planted", planted(refuses=lambda *args: "it is a stub"))
    with pytest.raises(ValueError, match="refuses a plain call: it is a stub"):
        conformance.check("planted")
