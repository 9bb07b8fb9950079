"""Families that resemble others, each in one short run of its packed (or padded) forward; slower tests of them are in the slow tier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from forwards import TOLERANCE, error
from more_families import MORE
from tiny import FAMILIES, FLOAT32, tiny

import specdec as sd
from specdec.models import HFModel
from specdec.types import Context, Proposal

TEXTS = [list(range(3, 24)), [5], [7, 8, 9] * 2]  # one is longer than every window
PARENTS = torch.tensor([[-1, 0, 0, 2], [-1, 0, -1, -1], [-1, -1, -1, -1]])
SIZES = torch.tensor([4, 2, 0])


@pytest.mark.parametrize("family", [family for family in MORE if family in FAMILIES])
def test_a_family_is_its_own_forward(family):
    """The cache gets part of each text, then the rest and a tree; a tree's branches are compared with texts of their own."""
    model = tiny(family)
    target = HFModel(model, prefill_chunk=16)
    cache = target.cache(3, 32)
    target.prefill(cache, Context.of([text[: len(text) // 2 + 1] for text in TEXTS]))
    tokens = torch.arange(40, 52).view(3, 4)
    proposal = Proposal(tokens, PARENTS, SIZES)
    logits = target.score(cache, Context.of(TEXTS), proposal).logits
    assert error(model, TEXTS, logits, proposal) < (3e-5 if family in FLOAT32 else TOLERANCE)


def test_threads_do_not_get_each_others_plans():
    """StableLM's layers pass nothing on to attention, so it must find the plan of its own thread's forward."""
    models = [HFModel(tiny("stablelm", seed)) for seed in (0, 1)]
    contexts = [Context.of(TEXTS), Context.of([[9, 8, 7, 6], [40] * 11])]

    def score(n):
        return models[n].score(models[n].cache(contexts[n].batch, 32), contexts[n]).logits

    alone = [score(0), score(1)]
    both = Barrier(2, timeout=20)  # each waits in every layer until the other is there

    def wait(*_):
        both.wait()

    for model in models:
        for layer in model.clone.model.layers:
            layer.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(score, (0, 1)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_runs_only_within_a_forward_of_its_model(fails):
    model = HFModel(tiny("nemotron"))
    cache = model.cache(1, 32)
    if fails:
        hook = model.clone.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.score(cache, Context.of([[5, 6]]))
        hook.remove()
    else:
        model.score(cache, Context.of([[5, 6]]))
    with pytest.raises(RuntimeError, match=r"belongs to an HFModel: call HFModel\.score"):
        model.clone(torch.tensor([[5, 6]]))


@pytest.mark.parametrize("family", ["stablelm", "deepseek_v3"])
def test_captured_steps_give_the_same_texts(family):
    """Attention finds its plan in recorded steps, too; keys and values of latent attention have different sizes."""
    model = tiny(family)

    def texts(graphs, page=None):
        target = HFModel(model, graphs=graphs, page=page)
        decoder = sd.decoder(target).draft(target, length=3).verifier(sd.Coupled()).sampling(temperature=0.7)
        return decoder.build().generate([[1, 2, 3], [5] * 12], [9, 14], seed=3).ids

    plain = texts(False)
    assert texts("recorded") == plain
    assert texts("eager", page=8) == plain
