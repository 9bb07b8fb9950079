"""A replay does no work for the distributions of a target that is not computed."""

from __future__ import annotations

import pytest
import torch

import specdec as sd
from specdec import lab


@pytest.mark.parametrize("given", [False, True], ids=["stand-in", "target"])
def test_processors_see_no_made_up_logits(given, tmp_path):
    target, seen = sd.TableModel.random(vocab_size=6, order=1, seed=0), []

    def halved(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.clone())
        return scores / 2

    sampling = sd.Sampling(processors=(halved,))
    trace = lab.record(target, [[0, 1, 0, 1]], tmp_path, 8, 2, sampling, progress=False)
    seen.clear()
    draft = sd.drafts.NGram() if not given else sd.TableModel.random(vocab_size=6, order=1, seed=1)
    replay = lab.replay(trace, draft, sampling=sampling, cache=False)
    assert bool(seen) == given  # a draft with distributions has them processed
    assert not any((scores == scores[:, :1]).all() for scores in seen)
    assert 1 <= replay.efficiency(2).tau <= 3
