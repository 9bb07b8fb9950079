"""A decoder as a model of lm-evaluation-harness: ``lm_eval.simple_evaluate(model=DecoderLM(decoder), tasks=[...])``.

Tasks that generate text (``generate_until``) are decoded by the decoder, in batches; log-likelihoods are the target's own forwards, which
speculation does not change. ``pip install lm_eval`` is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.builder import Builder
from specdec.decoder import Decoder
from specdec.models.hf import HFModel
from specdec.models.own_cache import OwnCache
from specdec.prompts import unpadded
from specdec.sampling import Sampling
from specdec.stats import Stats

try:
    from lm_eval.models.huggingface import HFLM
except ImportError as missing:
    raise ImportError("lab.harness needs lm-evaluation-harness: pip install lm_eval") from missing


class DecoderLM(HFLM):
    """The harness's ``HFLM`` of a decoder's target, with ``generate_until`` by the decoder.

    A request's ``do_sample``, ``temperature``, ``top_k``, ``top_p`` and ``min_p`` are its sampling (default: greedy); the decoder's own is not used.

    Args:
        decoder: built or not, of an ``HFModel`` with a tokenizer. seed: of every batch, for requests that sample.
        options: of ``HFLM``, such as ``batch_size`` and ``max_length``.
    Attributes:
        stats: of all texts decoded so far.
    Raises:
        TypeError: the target is no transformers model with a tokenizer.
    """

    def __init__(self, decoder: Decoder | Builder, seed: int = 0, **options: Any):
        decoder = decoder.build() if isinstance(decoder, Builder) else decoder
        target = decoder.target
        if not isinstance(target, (HFModel, OwnCache)) or target.tokenizer is None:
            raise TypeError(
                f"the target is {target!r}: give a decoder of an HFModel with its tokenizer, sd.decoder((model, tokenizer))"
            )
        super().__init__(pretrained=target.model, tokenizer=target.tokenizer, **options)
        self._decoder, self.seed, self.stats = decoder, seed, Stats()

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: Sequence[str],
        attention_mask: Tensor | None = None,
        do_sample: bool | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        **others: Any,
    ) -> Tensor:
        """``[B, L + new]``: ``context [B, L]``, padded on the left, and the new ids.

        Args:
            max_length: of a row, padding included. stop: texts that end a row.
        Raises:
            ValueError: a request asks for something else.
        """
        if others:
            raise ValueError(
                f"a request asks for {', '.join(others)}, which the decoder does not do: leave it out of the task's generation_kwargs"
            )
        sampling = Sampling(temperature if do_sample is not False else 0.0, top_k or None, top_p, min_p)
        if sampling != self._decoder.sampling:
            self._decoder = self._decoder.with_sampling(sampling)
        width = context.shape[1]
        out = self._decoder.generate(
            unpadded(context, attention_mask),
            max_length - width,
            seed=self.seed,
            stop_strings=[s for s in stop if s],
        )
        self.stats += out.stats
        new = max(map(len, out.ids))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (new - len(row)) for row in out.ids])
        return torch.cat([context, ids.to(context)], dim=1)
