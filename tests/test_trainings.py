"""Scores of trainings in several reports, put together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec import zoo
from specdec.audit.tau import Efficiency
from specdec.drafts.spire import SpireModel
from specdec.lab.bootstrap import LEAST
from specdec.lab.trainings import together, training
from specdec.lab.variants import started, variants

FILES = np.repeat(np.arange(LEAST), 2)


def scored(tau, files=FILES):
    """Texts of a round each, and ``tau`` tokens, give or take a little by file."""
    rounds = torch.ones(len(files), dtype=torch.float64)
    tokens = tau * rounds * torch.from_numpy(1 + 0.01 * (files - files.mean()))
    return Efficiency(tokens, rounds, torch.ones(len(files), 2), torch.full((len(files), 2), 0.5))


def row(method, seed, tau, tokens=100, texts="a", data="d"):
    return training(scored(tau), FILES, method=method, seed=seed, tokens=tokens, texts=texts, data=data)


def test_taus_are_of_all_seeds_and_leads_by_number_of_tokens():
    rows = [row("spire", 0, 3.0), row("spire", 1, 3.2), row("vanilla", 0, 2.0), row("vanilla", 1, 2.0)]
    rows += [row("spire", 0, 3.3, 400), row("vanilla", 0, 3.0, 400), row("magicdec", None, 3.9)]
    found = together([*rows, rows[0], {"part": "tau"}])  # one is in two reports
    tau = {(r["tokens"], r["method"]): r for r in found if r["part"] == "tau"}
    assert tau[100, "spire"]["tau"] == pytest.approx(3.1)
    assert tau[100, "spire"]["by_seed"] == pytest.approx([3.0, 3.2])
    assert tau[100, "spire"]["low"] < 3.1 < tau[100, "spire"]["high"]
    assert tau[100, "spire"]["ratio_to_vanilla"] == pytest.approx(1.55)
    assert tau[100, "spire"]["ratio_low"] == pytest.approx(1.55)  # paired: files differ alike
    assert (tau[100, "magicdec"]["seeds"], tau[400, "spire"]["seeds"]) == (0, 1)
    assert tau[400, "spire"]["acceptance"] == [0.5, 0.5]
    leads = {(r["tokens"], r["over"]): r for r in found if r["part"] == "lead"}
    assert leads[100, "vanilla"]["by_seed"] == pytest.approx([1.5, 1.6])
    assert leads[400, "vanilla"]["ratio"] == pytest.approx(1.1)
    assert leads[100, "magicdec"]["by_seed"] == []


def test_ratios_are_of_the_seeds_that_both_have():
    rows = [row("spire", 0, 3.0), row("spire", 1, 3.6), row("vanilla", 0, 2.0), row("vanilla", 2, 1.0)]
    found = together([*rows, row("other", 1, 1.8), row("magicdec", None, 3.9)])
    assert [r["tau"] for r in found if r["part"] == "tau" and r["method"] == "spire"] == pytest.approx([3.3])
    assert {r["method"]: r.get("ratio_to_vanilla") for r in found if r["part"] == "tau"} == pytest.approx(
        {
            "spire": 1.5,
            "vanilla": 1.0,
            "other": 1.2,
            "magicdec": 2.6,
        }  # the last two over all seeds of vanilla
    )
    assert {r["over"]: r["ratio"] for r in found if r["part"] == "lead"} == pytest.approx(
        {"vanilla": 1.5, "other": 2.0, "magicdec": 3.3 / 3.9}
    )


def test_scores_that_cannot_be_put_together_are_refused():
    with pytest.raises(ValueError, match="2 sets of texts: score all drafts on the same"):
        together([row("spire", 0, 3.0), row("spire", 1, 3.0, texts="b")])
    with pytest.raises(ValueError, match="of different data: train all drafts on the same"):
        together([row("spire", 0, 3.0), row("vanilla", 0, 2.0, data="e")])
    with pytest.raises(ValueError, match="spire, seed 0, 100 tokens has two scores"):
        together([row("spire", 0, 3.0), row("spire", 0, 3.1)])


def test_one_control_is_as_large_as_the_spire_draft():
    target = zoo.load("pocket-target")[0]
    large = started(variants()["windowed_distilled_large"], target, 0)

    def blocks(model):
        return sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)

    assert blocks(large) == blocks(SpireModel.from_target(target, 2).body)
    assert not torch.equal(large.model.embed_tokens.weight, target.model.embed_tokens.weight)
