"""Whole rounds that draft with the MTP layer that a target ships: equal to the serial ones, recorded on the CPU."""

from __future__ import annotations

import pytest
import torch
from both_executors import batch_of, same_rounds
from test_mtp import SHIPPING, needs_fc, two_layers, with_mtp
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import MTP, Head
from specdec.executors import Ahead
from specdec.verifiers import FusedRejection

PROMPTS, BUDGETS = [[5, 6, 7, 8, 9], [3], [9, 9, 4, 2, 7, 7, 1]], [14, 6, 19]


def shipped(folder, family, graphs, monkeypatch):
    two_layers(monkeypatch)
    model = with_mtp(folder, family, **SHIPPING[family])  # in float32, as its experts need
    target = sd.HFModel(model, graphs=graphs, unlisted="packed")
    return target, MTP.from_checkpoint(target, folder)


@pytest.mark.parametrize(
    ("family", "graphs", "verifier"),
    [
        ("glm4_moe", "eager", sd.Rejection()),
        *(
            pytest.param(family, "recorded", verifier, marks=[pytest.mark.slow, *marks])
            for family, marks in (("glm4_moe", ()), ("mellum", (needs_fc,)))
            for verifier in (sd.Coupled(), FusedRejection())
        ),
    ],
)
def test_texts_and_rounds_are_those_of_serial(tmp_path, family, graphs, verifier, monkeypatch):
    target, head = shipped(tmp_path, family, graphs, monkeypatch)
    builder = sd.decoder(target).draft(Head(head, graphs=graphs), 3).verifier(verifier)
    _, made = same_rounds(builder, PROMPTS, BUDGETS, eos_token_id=())
    assert 5 < made[1].stats.accepted < made[1].stats.drafted
    assert not target.steps.failed


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
def test_random_batches(seed):
    """A layer of the target's own kind, untrained."""
    pick, prompts, budgets = batch_of(seed, shortest=1)
    raw = tiny("llama")
    target = sd.HFModel(raw, graphs="eager")
    head = MTP.from_target(target, shipped=raw.config.to_diff_dict())
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn(p.shape, generator=draw, dtype=torch.float64) * 0.2)
    drawing = pick.choice([None, None, sd.Sampling(temperature=0), sd.Sampling(temperature=1.3)])
    draft = Head(head, sampling=drawing, graphs=pick.choice(["eager", "recorded"]))
    verifier = pick.choice([sd.Rejection(), sd.Coupled(), FusedRejection()])
    builder = sd.decoder(target).sampling(temperature=pick.choice([0, 0.8, 1.0])).verifier(verifier)
    ends = [pick.randrange(97) for _ in range(pick.choice([0, 3, 12]))]
    same_rounds(builder.draft(draft, pick.randint(1, 6)), prompts, budgets, eos_token_id=ends)


def waits(module, args):
    args[0].sum().item()


def test_a_layer_that_cannot_be_captured_leaves_the_texts():
    """It asks the device for a number, as some routers of experts do: a warning says so, and the rounds run without a graph."""
    raw = tiny("llama")
    target = sd.HFModel(raw, graphs="recorded")
    head = MTP.from_target(target, shipped=raw.config.to_diff_dict())
    head.layers[0].layer.register_forward_pre_hook(waits)
    builder = sd.decoder(target).draft(Head(head, graphs=False), 2).greedy()
    expected = builder.build().generate(PROMPTS[:2], 9, seed=3, eos_token_id=()).ids
    decoder = sd.decoder(target).draft(Head(head, graphs="recorded"), 2).greedy().executor(Ahead()).build()
    with pytest.warns(RuntimeWarning, match="cannot be captured, so it runs without a graph"):
        assert decoder.generate(PROMPTS[:2], 9, seed=3, eos_token_id=()).ids == expected
