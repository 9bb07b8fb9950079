"""A subclass of ``Sampling`` decides, whatever shortcut there is for ``Sampling`` itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead
from specdec.verifiers import FusedRejection

FEW = 10


@dataclass(frozen=True)
class OwnProbabilities(sd.Sampling):
    def __call__(self, logits, context, proposal=None, first=-1):
        probs = super().__call__(logits, context, proposal, first) + 1e-3
        probs[..., FEW:] = 0
        return probs / probs.sum(-1, keepdim=True)


@dataclass(frozen=True)
class OwnScores(sd.Sampling):
    def scores(self, logits, context, proposal, first=-1):
        scores = super().scores(logits, context, proposal, first).clone()
        scores[..., FEW:] = -torch.inf
        return scores


OWN = pytest.mark.parametrize("kind", [OwnProbabilities, OwnScores])


def builder_of(draft, graphs, kind, temperature):
    target = sd.HFModel(tiny("llama"), graphs=graphs)
    builder = sd.decoder(target).sampling(kind(temperature))
    if draft == "model":
        return builder.draft(sd.HFModel(tiny("llama", seed=1), graphs=graphs), 3)
    if draft == "spire":
        model = SpireModel.from_target(target, 1, window=4)
        return builder.draft(sd.drafts.Spire(model, 3, graphs=graphs), 3)
    return builder


@OWN
@pytest.mark.parametrize("verifier", [sd.Rejection(), FusedRejection(), sd.Coupled()], ids=repr)
@pytest.mark.parametrize(
    ("draft", "graphs", "temperature"),
    [
        *((None, False, 0.0), (None, False, 1.0), ("model", "eager", 1.0)),
        pytest.param("model", "eager", 0.0, marks=pytest.mark.slow),
        *(pytest.param("spire", "recorded", t, marks=pytest.mark.slow) for t in (0.0, 1.0)),
    ],
)
def test_it_says_what_is_committed_and_drafted(draft, graphs, verifier, temperature, kind):
    drafted = set()

    def look(round):
        live = torch.arange(round.proposal.nodes) < round.proposal.size[:, None]
        drafted.update(round.proposal.tokens[live].tolist())

    decoder = builder_of(draft, graphs, kind, temperature).verifier(verifier).build()
    out = decoder.generate([[1, 2, 3], [4]], 12, seed=0, eos_token_id=(), on_round=look)
    assert max(token for row in out.ids for token in row) < FEW
    assert bool(drafted) == bool(draft)
    assert max(drafted, default=0) < FEW


@OWN
def test_whole_rounds_refuse_it(kind):
    with pytest.raises(ValueError, match=r"runs Sampling itself.*use executors.Serial"):
        builder_of("model", "eager", kind, 1.0).executor(Ahead()).build()
