"""What tests of captured steps share: rounds of scores, sampling, and decoders of tiny models."""

from __future__ import annotations

import torch
from tiny import tiny

import specdec as sd
from specdec.drafts.spire import SpireModel
from specdec.sampling import Sampling

SCRIPT = (
    "chain ragged tree none two tree none two chain back ragged leave chain tree none two chain tree none two"
)


def rounds(model, seed=0):
    """Logits of verified chains (ragged, after a rollback, with two new tokens a row), of trees and plain steps; a row leaves."""
    draw = torch.Generator().manual_seed(seed)
    text = [torch.randint(0, 97, (n,), generator=draw).tolist() for n in (20, 3, 9)]
    cache, out = model.cache(3, 64), []
    model.prefill(cache, sd.Context.of(text, 64))
    for step in SCRIPT.split():
        if step == "leave":
            cache, text = cache.select(torch.tensor([0, 2])), [text[0], text[2]]
        if step == "back":
            text[0] = [*text[0][:-4], 1]
        if step == "two":
            text = [row + torch.randint(0, 97, (1,), generator=draw).tolist() for row in text]
        B, N = len(text), 3
        size = torch.tensor([3, 0, 2])[:B] if step == "ragged" else torch.full((B,), N)
        parents = torch.tensor([[-1, 0, 0]] * B) if step == "tree" else torch.arange(-1, N - 1).expand(B, N)
        proposal = sd.Proposal(torch.randint(0, 97, (B, N), generator=draw), parents, size)
        out.append(model.score(cache, sd.Context.of(text, 64), None if step == "none" else proposal).logits)
        text = [row + torch.randint(0, 97, (1,), generator=draw).tolist() for row in text]
    return out


def same(a, b, tolerance):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.shape == y.shape
        assert float((x - y).abs().max()) <= tolerance * max(1.0, float(y.abs().max()))


LAWS = [Sampling(0), Sampling(0.7), Sampling(1.0, top_k=5), Sampling(1.3, top_p=0.8, min_p=0.01)]


DRAFTS = {
    "none": None,
    "model": lambda target, small, graphs: small,
    "tree": lambda target, small, graphs: sd.drafts.Tree(small, (2, 1, 1)),
    "ngram": lambda target, small, graphs: sd.drafts.NGram(),
    "magicdec": lambda target, small, graphs: sd.drafts.MagicDec(window=8, block=3),
    "spire": lambda target, small, graphs: sd.drafts.Spire(small, block=3, graphs=graphs),
}


def builder_of(draft, graphs=False, on=lambda model: model):
    """A decoder of tiny models, which ``on`` puts somewhere."""
    target, small = (tiny("llama", seed, torch.float32, num_hidden_layers=1) for seed in (0, 1))
    if draft == "spire":
        small = SpireModel.from_target(target, layers=1, window=8)
        small.body = on(small.body)
        small = SpireModel(small.body, small.layers, window=8)
    else:
        small = sd.HFModel(on(small), graphs=graphs)
    target = sd.HFModel(on(target), graphs=graphs)
    builder = sd.decoder(target)
    return builder if DRAFTS[draft] is None else builder.draft(DRAFTS[draft](target, small, graphs), 3)
