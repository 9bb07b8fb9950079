"""A replay does no work for a target that is not computed, and a trace names its processors by all of their numbers."""

from __future__ import annotations

import pytest
import torch

import specdec as sd
from specdec import lab
from specdec.lab.traces import described_function


@pytest.mark.parametrize("read", ["nothing", "draft", "target"])
def test_processors_see_no_made_up_logits(read, tmp_path):
    target, seen = sd.TableModel.random(vocab_size=6, order=1, seed=0), []

    def halved(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.clone())
        return scores / 2

    sampling = sd.Sampling(processors=(halved,))
    trace = lab.record(target, [[0, 1, 0, 1]], tmp_path, 8, 2, sampling, progress=False)
    seen.clear()
    draft = sd.TableModel.random(vocab_size=6, order=1, seed=1) if read == "draft" else sd.drafts.NGram()
    given = {"target": target} if read == "target" else {}
    replay = lab.replay(trace, draft, sampling=sampling, cache=False, **given)
    assert bool(seen) == (read != "nothing")
    assert not any((scores == scores[:, :1]).all() for scores in seen)
    assert 1 <= replay.efficiency(2).tau <= 3


def test_a_processor_with_many_numbers_has_a_short_name_of_its_own():
    class Bias:
        def __init__(self, values):
            self.values = values

    numbers = torch.zeros(5000)
    other = numbers.index_fill(0, torch.tensor([2500]), 1.0)  # where a printed tensor has dots
    assert "..." in repr(numbers)
    assert repr(numbers) == repr(other)
    for values in ((numbers, other), ([0] * 5000, [0] * 4999 + [1])):
        names = [described_function(Bias(value)) for value in values]
        assert names[0] != names[1]
        assert max(map(len, names)) < 400
    assert described_function(Bias(1)).endswith("Bias [('values', 1)]")
