"""Every draft of the package keeps the rules of ``specdec.testing.check_draft``. A new one gets here by itself.

Drafts with a model are tried on an exact table and on a tiny random Hugging Face model, whose cache really remembers. Drafts that read
their target (``taps``, ``follow``) get such a model for a target, and are built from it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tiny import tiny

import specdec as sd
from contracts import build, modules, parts
from specdec.capabilities import DraftPart
from specdec.testing import check_draft
from specdec.testing.draft import SETTINGS, SUITE

TARGET = sd.TableModel.random(6, order=2, seed=0, zeros=0.2)
DRAFTS = parts(sd.drafts, "propose", "observe", "init", "select")
del DRAFTS["TextMatch"]  # needs two tokenizers: tests/test_translated.py checks its contract
SHARED = {"coerce", "draw", "hub", "one_model", "siblings", "stateless", "stops"}  # what several drafts use
SHARED |= {"translated"}  # which needs two tokenizers
SHARED |= {"tree_round", "whole_round", "windowed_round"}  # what an executor uses
KEEPERS = {"Cascade", "Model", "Paced", "Tree"}  # have a cache in their state
READERS = {"Head", "MagicDec", "Pool", "Recycling", "Spire"}  # a pool may hold such drafts


@cache
def model_of(kind: str) -> Any:
    """A table, or a model with a cache."""
    if kind == "table":
        return sd.TableModel.random(6, order=2, seed=1, zeros=0.2)
    return sd.HFModel(tiny("llama", seed={"llama": 2, "own target": 3}[kind], vocab_size=6))


@cache
def reads_target(cls: type) -> bool:
    """Whether a draft looks at its target's activations, logits or cache, and so is tried on a target that has them all."""
    return DraftPart.of(build(cls, model_of("own target"))).reads_target


def kinds(cls: type, test: str) -> list[str]:
    """The models to build a draft from."""
    if reads_target(cls):
        return ["own target"]
    return ["table"] if test == "anticipation" else ["table", "llama"]  # decisions do not hang on a cache


SAMPLINGS = {"all": SETTINGS, "two": SETTINGS[::2], "third": SETTINGS[1:2]}
CASES = [
    pytest.param(
        *(cls, kind, test, SAMPLINGS[some]),
        id=f"{name}-{kind}-{test}-{some}",
        marks=pytest.mark.slow if some == "third" or (name, kind) == ("FunctionDraft", "llama") else (),
    )
    for test in SUITE.names
    if test != "distribution"
    for name, cls in DRAFTS.items()
    for kind in kinds(cls, test)
    for some in (["all"] if kind == "table" else ["two", "third"])
]


@pytest.mark.parametrize(("cls", "kind", "test", "samplings"), CASES)
def test_every_draft_keeps_the_rules(cls, kind, test, samplings):
    target = model_of(kind) if kind == "own target" else TARGET
    found = check_draft(build(cls, model_of(kind)), target, samplings=samplings, only=[test])
    if test == "consumed" and cls.__name__ in KEEPERS:
        assert found.rules == ("cache",)
    if test == "joins" and (kind == "table" or cls.__name__ in ("Spire", "MagicDec")):
        assert found.rules == ("join",)


@pytest.mark.parametrize("cls", DRAFTS.values(), ids=DRAFTS.keys())
def test_the_output_has_the_targets_distribution_exactly(cls):
    target, small = sd.TableModel.random(3, seed=2, zeros=0.3), sd.TableModel.random(3, seed=3, zeros=0.3)
    if reads_target(cls):
        target = small = sd.HFModel(tiny("llama", seed=4, vocab_size=3))
    assert check_draft(build(cls, small), target, only=["distribution"]).rules == ("lossless",)


def test_every_module_has_a_part():
    found = {".".join(cls.__module__.split(".")[:3]) for cls in DRAFTS.values()}
    shared = {f"specdec.drafts.{name}" for name in SHARED}
    assert {m.__name__ for m in modules(sd.drafts)} - shared == found, (
        "a module without a class that has the methods"
    )
    assert {"Model", "NGram", "Tree", "FunctionDraft", "NoDraft"} <= DRAFTS.keys()


def test_some_drafts_read_their_target():
    assert {name for name, cls in DRAFTS.items() if reads_target(cls)} == READERS
    assert DRAFTS.keys() >= KEEPERS


def test_a_part_that_cannot_be_built_is_told_how():
    class Needy:
        def __init__(self, model, heads):
            pass

    with pytest.raises(
        TypeError, match=r"Needy needs model, heads: give it a static method example\(model\)"
    ):
        build(Needy, TARGET)
