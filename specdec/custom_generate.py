"""A decoder as transformers' ``custom_generate``: ``model.generate(..., custom_generate=decoder.as_generate())``.

transformers prepares ids, processors and stopping criteria and calls a function with them in place of its own loop. Here they are
honoured, or refused by name: padding is dropped, the usual truncations become ``Sampling`` settings, and other processors are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import Cache, LogitsProcessorList, StoppingCriteriaList, TextStreamer
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.logits_process import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria, EosTokenCriteria, MaxLengthCriteria

from specdec.configs import setting
from specdec.forward.families import multimodal
from specdec.generation import Generation
from specdec.prompts import unpadded
from specdec.sampling import Sampling
from specdec.types import Round

_SETTINGS: dict[type, str] = {  # in the order in which both libraries apply them
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_COUNT = (  # processors that count the tokens of the prompt, padding included
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
_CACHES = ("cache", "past_key_values", "cache_params")  # before transformers 5.24 one of the latter two
_OWN = {
    "attention_mask",
    "position_ids",
    *_CACHES,
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "token_type_ids",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@runtime_checkable
class Streamer(Protocol):
    """What transformers' streamers are: ``put`` takes the prompt ``[1, L]`` and then every new id ``[1]``, and ``end`` closes the text."""

    def put(self, value: Tensor) -> Any: ...

    def end(self) -> Any: ...


class CustomGenerate:
    """What ``Decoder.as_generate`` returns; transformers calls it.

    Attributes:
        streamer: takes the tokens of the single row as rounds commit them, or ``None``.
        last: the ``Generation`` of the latest call, with its statistics; ``None`` before the first.
    """

    def __init__(self, decoder: Any, streamer: Streamer | None = None):
        if isinstance(streamer, type):
            raise TypeError(
                f"streamer is the class {streamer.__name__}: give an object, {streamer.__name__}(...)"
            )
        if streamer is not None and not isinstance(streamer, Streamer):
            raise TypeError(
                f"streamer is {streamer!r}: give a transformers streamer, such as TextIteratorStreamer(tokenizer), or an object with put and end"
            )
        self.decoder, self.streamer = decoder, streamer
        self.last: Generation | None = None
        self._bound: tuple[Sampling, Any] = (decoder.sampling, decoder)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        generation_config: Any = None,
        seed: int | Sequence[int] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode a prepared batch.

        Args:
            model: whose ``generate`` was called, the decoder's target. input_ids: ``[B, L]``, padded on either side.
            logits_processor, stopping_criteria: made by transformers, and the caller's own. seed: as for ``Decoder.generate``, passed through
                ``model.generate(..., seed=0)``.
            model_kwargs: ``attention_mask [B, L]`` (0 is padding) and other inputs that transformers prepared.
        Returns:
            ``[B, L + new]`` the ids with their padding, the new ids, and padding after rows that ended; a ``GenerateDecoderOnlyOutput``
            of it under ``return_dict_in_generate``.
        Raises:
            ValueError: the call asks for something that the decoder does not do; the message names it. The streamer is ended in any case.
        """
        try:
            return self._decoded(
                model,
                input_ids,
                logits_processor or LogitsProcessorList(),
                stopping_criteria or StoppingCriteriaList(),
                generation_config,
                seed,
                model_kwargs,
            )
        finally:
            if self.streamer is not None:
                self.streamer.end()

    def _decoded(
        self,
        model: Any,
        input_ids: Tensor,
        processors: Sequence[Any],
        stopping: Sequence[Any],
        config: Any,
        seed: int | Sequence[int] | None,
        model_kwargs: dict[str, Any],
    ) -> Any:
        if config is None:
            raise TypeError(
                "generation_config is missing: call model.generate(..., custom_generate=decoder.as_generate())"
            )
        if model is not self.decoder.target.model:
            if multimodal(model.config):
                raise ValueError(
                    "model is multimodal, and a decoder's target is a language model: call decoder.target.model.generate(...), without images"
                )
            raise ValueError(
                f"the decoder's target is another {type(model).__name__} than the model whose generate was called: compose sd.decoder(model)"
            )
        self._refuse(config, input_ids, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        rows = unpadded(input_ids, mask)
        width = input_ids.shape[1]
        padded = any(len(row) < width for row in rows)
        sampling = _sampling(list(processors), bool(config.do_sample), padded)
        most, eos, criteria = _stops(stopping, config)
        out = self._decoder(sampling).generate(
            rows,
            most - width,
            seed=seed,
            eos_token_id=eos,
            stopping_criteria=criteria,
            on_round=self._streamed(input_ids),
        )
        self.last = out
        ids: Any = torch.cat([input_ids, _block(out.ids, config.pad_token_id, eos).to(input_ids)], dim=1)
        return GenerateDecoderOnlyOutput(sequences=ids) if config.return_dict_in_generate else ids

    def _streamed(self, input_ids: Tensor) -> Callable[[Round], None] | None:
        """Put the prompt into the streamer, and return what puts in the tokens of a round, one at a time as transformers does."""
        streamer = self.streamer
        if streamer is None:
            return None
        if len(input_ids) > 1:
            raise ValueError(
                f"streamer takes one row and there are {len(input_ids)}: give one prompt and one sequence, or use decoder.stream"
            )
        # a streamer that has skipped the prompt of generate(streamer=...) would show this one
        skipped = isinstance(streamer, TextStreamer) and not streamer.next_tokens_are_prompt
        if not skipped:
            streamer.put(input_ids.cpu())

        def put(round: Round) -> None:
            for tokens, count in zip(round.verdict.tokens.tolist(), round.committed.tolist()):
                for token in tokens[:count]:
                    streamer.put(torch.tensor([token]))

        return put

    def _decoder(self, sampling: Sampling) -> Any:
        """The decoder with this sampling; the latest one is kept."""
        own = self.decoder.sampling
        if self.decoder.sampling_is_set and _plain(own) == _plain(sampling):
            sampling = own
        elif self.decoder.sampling_is_set:
            raise ValueError(
                f"the decoder was built with {own} and this call of generate asks for {sampling} (transformers' default is greedy, and "
                "with do_sample=True top_k=50): give both the same settings, or build the decoder without sampling(), and it follows the call"
            )
        if self._bound[0] != sampling:
            self._bound = (sampling, self.decoder.with_sampling(sampling))
        return self._bound[1]

    def _refuse(self, config: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        mode = config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"generate was asked for {mode.value.replace('_', ' ')}, which a decoder does not do: leave out num_beams, penalty_alpha, "
                "prompt_lookup_num_tokens and the like"
            )
        asked = [name for name in _OUTPUTS if setting(config, name)]
        if asked:
            scores = asked[0] in ("output_scores", "output_logits")
            raise ValueError(
                f"{asked[0]} is set and a decoder keeps no such tensors: leave it out"
                + (", and give prompts and ids to sd.log_probs afterwards" if scores else "")
            )
        if input_ids.shape[1] == 0:
            raise ValueError("input_ids is empty: a decoder reads ids; give input_ids, not inputs_embeds")
        unknown = sorted(
            name for name, value in model_kwargs.items() if name not in _OWN and value is not None
        )
        if unknown:
            raise ValueError(
                f"{unknown[0]} is an input of the model and a decoder feeds ids only: leave it out"
            )
        for name in _CACHES:
            cache = model_kwargs.get(name)
            if cache is not None and _holds_tokens(cache):
                raise ValueError(f"{name} holds tokens and a decoder makes its own caches: leave it out")
        positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
        if positions is not None:
            seen = torch.ones_like(input_ids) if mask is None else mask
            if bool(((positions != seen.cumsum(-1) - 1) & (seen != 0)).any()):
                raise ValueError("position_ids do not count the tokens of each row from 0: leave it out")


def _holds_tokens(cache: Any) -> bool:
    if not isinstance(cache, Cache):
        return True
    try:
        return int(cache.get_seq_length()) > 0
    except ValueError:  # all layers are recurrent, and such layers do not count tokens
        return bool(cache.has_previous_state())


def _plain(sampling: Sampling) -> Sampling:
    """The same sampling without its grammar, which is the decoder's, and without settings that do nothing: transformers leaves them out."""
    sampling = replace(sampling, grammar=None)
    if sampling.greedy:
        return replace(sampling, top_k=None, top_p=None, min_p=None)
    return replace(
        sampling,
        top_p=None if sampling.top_p == 1 else sampling.top_p,
        min_p=None if sampling.min_p == 0 else sampling.min_p,
    )


def _sampling(processors: list[Any], do_sample: bool, padded: bool) -> Sampling:
    """The same distribution as transformers' processors, in their order."""
    settings: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    order = list(_SETTINGS)
    while do_sample and processors and type(processors[-1]) in order:
        last = processors[-1]
        keep, fill = setting(last, "min_tokens_to_keep"), setting(last, "filter_value")
        if keep not in (None, 1) or fill not in (None, -float("inf")):
            break
        settings[_SETTINGS[type(last)]] = getattr(last, _SETTINGS[type(last)])
        order = order[: order.index(type(last))]
        processors = processors[:-1]
    return Sampling(**settings, processors=tuple(_processor(one, padded) for one in processors))


def _processor(one: Any, padded: bool) -> Any:
    """A processor for rows without padding."""
    if padded and (isinstance(one, _COUNT) or isinstance(setting(one, "prompt_ignore_length"), int)):
        raise ValueError(
            f"{type(one).__name__} counts the tokens of the prompt and prompts of several lengths are padded: decode rows of one length "
            "together, or give decoder.generate a processor of your own"
        )
    if type(one) is RepetitionPenaltyLogitsProcessor and isinstance(one.prompt_ignore_length, Tensor):
        return RepetitionPenaltyLogitsProcessor(one.penalty)  # it ignored the padding
    if type(one) is MinNewTokensLengthLogitsProcessor:
        return MinLengthLogitsProcessor(
            one.prompt_length_to_skip + one.min_new_tokens, one.eos_token_id, str(one.eos_token_id.device)
        )
    return one


def _stops(criteria: Sequence[Any], config: Any) -> tuple[int, tuple[int, ...], list[Any]]:
    """The most tokens of a row (padding included), the ids that end it, and the other criteria."""
    most, eos, others = config.max_length, [], []
    for one in criteria:
        if type(one) is MaxLengthCriteria:
            most = one.max_length
        elif type(one) is EosTokenCriteria:
            eos += one.eos_token_id.tolist()
        elif isinstance(one, ConfidenceCriteria):
            raise ValueError("ConfidenceCriteria reads scores and a decoder keeps none: leave it out")
        else:
            others.append(one)
    return most, tuple(eos), others


def _block(ids: list[list[int]], pad: int | None, eos: tuple[int, ...]) -> Tensor:
    """``[B, new]`` rows of new ids, padded at the end."""
    width = max(map(len, ids))
    if pad is None:
        pad = eos[0] if eos else None
    if pad is None and any(len(row) < width for row in ids):
        raise ValueError("rows ended at different lengths and generation_config has no pad_token_id: set it")
    return torch.tensor([row + [pad] * (width - len(row)) for row in ids])
