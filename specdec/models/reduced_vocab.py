"""A model with a pruned output vocabulary as a draft (FR-Spec, Zhao et al., arXiv 2502.14856)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from specdec.models.hf import HFModel, Options
from specdec.pruning.vocabulary import Trimmed
from specdec.types import Scores


class TrimmedModel(HFModel):
    """An ``HFModel`` of a model trimmed by ``pruning.keep_tokens``: logits ``[..., V]`` over the whole vocabulary, -inf for pruned ids.

    Pruned ids have q = 0, and the verifier still emits them from the residual. A tree's nodes should have no more children than there are ids.

    Args:
        trimmed: from ``keep_tokens``. tokenizer: the model's own. options: as for ``HFModel``.
    """

    def __init__(self, trimmed: Trimmed, tokenizer: Any = None, **options: Unpack[Options]):
        super().__init__(trimmed.model, tokenizer, **options)
        self.trimmed, self.vocab_size = trimmed, trimmed.vocab_size

    def score(self, *args: Any, **named: Any) -> Scores:
        """As ``HFModel.score``."""
        scores = super().score(*args, **named)
        narrow = scores.logits.shape[-1] == len(self.trimmed.ids)
        return replace(scores, logits=self.trimmed.full(scores.logits)) if narrow else scores
