"""What other libraries call things, and what to write here instead: for the messages of refused arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

_SAMPLING = "it is set when the decoder is composed: .sampling({name}={value}).build()"
_PENALTY = "give .sampling(processors=({class_}({value}),)), with transformers' {class_}"
_RESULT = "the result always has ids, texts, finish, stats and row_stats"
_AFTERWARDS = "; sd.log_probs(decoder, out{sampled}) gives the log-probabilities of its tokens"
_GRAMMAR = ".sampling(grammar=sd.grammars.json_schema(schema, target.tokenizer)); for other languages grammars.regex or grammars.lark"
_GRAMMARS = (
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "json_schema",
    "structured_outputs",
    "response_format",
)
_ONE = "rows are decoded by sampling or greedily; there is no beam search"
_NO_CACHE = "the decoder makes its own caches"
_RAGGED = "rows may have any lengths, and nothing is padded"

GENERATE: dict[str, str] = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), _SAMPLING),
    "do_sample": "compose with .greedy() for the most probable tokens; every temperature above 0 samples",
    "generation_config": "give its budgets and stops to generate and its sampling to .sampling(...); or call "
    "model.generate(..., generation_config=..., custom_generate=decoder.as_generate())",
    "sampling_params": "give its budgets and stops to generate and its sampling to .sampling(...)",
    "streamer": "iterate over decoder.stream(prompts, ...), whose chunks have row, ids, text and finish",
    **dict.fromkeys(
        ("num_return_sequences", "n", "best_of"), "repeat the prompt: generate([prompt] * {value})"
    ),
    "assistant_model": "it is given when the decoder is composed: sd.decoder(target).draft(assistant).build()",
    "prompt_lookup_num_tokens": "it is given when the decoder is composed: .draft(sd.drafts.NGram(), length={value})",
    "assistant_tokenizer": "it is given with the assistant when the decoder is composed: .draft(sd.drafts.Translated((assistant, tokenizer), "
    "target.tokenizer))",
    "assistant_early_exit": "it is given when the decoder is composed: .draft(specdec.pruning.keep_layers(model, range({value}), share=True))",
    "num_assistant_tokens": "it is given when the decoder is composed: .draft(model, length={value})",
    "repetition_penalty": _PENALTY.replace("{class_}", "RepetitionPenaltyLogitsProcessor"),
    "no_repeat_ngram_size": _PENALTY.replace("{class_}", "NoRepeatNGramLogitsProcessor"),
    "min_new_tokens": "give .sampling(processors=(MinLengthLogitsProcessor(prompt tokens + {value}, eos),)), a class of transformers",
    "min_length": "give .sampling(processors=(MinLengthLogitsProcessor({value}, eos),)), a class of transformers",
    **dict.fromkeys(
        ("logits_processor", "logits_processors", "prefix_allowed_tokens_fn"),
        "give functions (ids, scores) -> scores when the decoder is composed: .sampling(processors=(function,))",
    ),
    **dict.fromkeys(_GRAMMARS, f"it is given when the decoder is composed: {_GRAMMAR}"),
    "max_length": "give max_new_tokens, which does not count the prompt",
    "max_tokens": "here it is max_new_tokens",
    "batch_size": "it is an argument of generate; serve(requests, limit={value}) yields the result of each request as soon as it is finished",
    "max_time": "give stopping_criteria=[MaxTimeCriteria({value})], a class of transformers",
    "stop": "here it is stop_strings",
    "stop_token_ids": "here it is eos_token_id, one id or several",
    "ignore_eos": "give eos_token_id=(), and no token ends a row",
    "num_beams": _ONE,
    "num_beam_groups": _ONE,
    "use_beam_search": _ONE,
    "length_penalty": _ONE,
    "early_stopping": _ONE,
    "pad_token_id": _RAGGED,
    "padding": _RAGGED,
    "use_cache": _NO_CACHE,
    "cache_implementation": _NO_CACHE,
    "past_key_values": _NO_CACHE,
    "cache": _NO_CACHE,
    "return_dict_in_generate": _RESULT,
    "output_scores": _RESULT
    + _AFTERWARDS.format(sampled=", sampled=True")
    + ", and on_round sees every round",
    "output_logits": _RESULT + _AFTERWARDS.format(sampled="") + ", and on_round sees every round",
    "logprobs": "give the result to sd.log_probs(decoder, out, top={value})",
    "tokenizer": "give it with the target: sd.decoder((model, tokenizer)), or sd.HFModel(model, tokenizer)",
    "custom_generate": "it is the other way round: model.generate(..., custom_generate=decoder.as_generate())",
    "inputs": "here it is prompts",
    "inputs_embeds": "prompts are texts or ids",
    "position_ids": "positions count the tokens of a row",
}
"""Arguments of ``generate`` in transformers and vLLM."""

SAMPLING: dict[str, str] = {
    "do_sample": "greedy() takes the most probable token, and every temperature above 0 samples",
    "repetition_penalty": "give processors=(RepetitionPenaltyLogitsProcessor({value}),), a class of transformers",
    "no_repeat_ngram_size": "give processors=(NoRepeatNGramLogitsProcessor({value}),), a class of transformers",
    **dict.fromkeys(_GRAMMARS, f"give {_GRAMMAR}"),
    "max_new_tokens": "it is an argument of generate",
    "max_tokens": "it is an argument of generate, max_new_tokens",
    "stop": "it is an argument of generate, stop_strings",
    "seed": "it is an argument of generate",
}
"""Settings of sampling in transformers and vLLM."""

DRAFT: dict[str, str] = {
    **dict.fromkeys(
        ("num_speculative_tokens", "num_assistant_tokens"), "here it is length: .draft(..., length={value})"
    ),
    "prompt_lookup_max": "give .draft(sd.drafts.NGram(max_match={value}))",
    "prompt_lookup_min": "give .draft(sd.drafts.NGram(min_match={value}))",
    "prompt_lookup_num_tokens": "give .draft(sd.drafts.NGram(), length={value})",
    "assistant_early_exit": "give .draft(specdec.pruning.keep_layers(model, range({value}), share=True))",
    "method": "give the draft itself: a model, or one of specdec.drafts",
    "model": "give it as the first argument: .draft({value})",
    "speculative_config": "give the draft and its length: .draft(model, length=4)",
    "draft_tensor_parallel_size": "load the draft with a device_map of its own: .draft(name, device_map=...)",
}
"""Settings of speculation in transformers and vLLM."""

METHODS: dict[str, str] = {
    **dict.fromkeys(("ngram", "[ngram]", "ngram_gpu", "prompt_lookup"), "give sd.drafts.NGram()"),
    "suffix": "give sd.drafts.Suffix()",
    "draft_model": "give the draft model itself: a hub id, a folder, or a model",
    **dict.fromkeys(
        ("eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash"),
        "give the draft itself: the folder or hub id of a head (drafts.heads.load reads it with other settings), or an object of specdec.drafts (dir(sd.drafts) "
        "lists them)",
    ),
}
"""Names of vLLM's methods, where a model's name is expected."""


def refuse(
    function: str,
    named: Mapping[str, Any],
    known: Mapping[str, str],
    own: Iterable[str],
    kind: str = "argument",
) -> NoReturn:
    """Raise TypeError for the first argument of ``named``, with what replaces it here.

    Args:
        function, kind: for the message. known: name -> remedy. own: the arguments that there are.
    """
    name, value = next(iter(named.items()))
    shown = repr(value) if isinstance(value, (int, float, str, bool, type(None))) else "..."
    remedy = known.get(name)
    if remedy is None:
        own = list(own)
        near = "".join(f"; did you mean {one!r}?" for one in get_close_matches(name, own, 1))
        raise TypeError(f"{function} has no {kind} {name!r}: there are {', '.join(own)}{near}")
    raise TypeError(f"{function} has no {kind} {name!r}: {remedy.format(name=name, value=shown)}")
