"""What other libraries call things, and what to write here instead: for the messages of refused arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

_SAMPLING = "it is set when the decoder is composed: .sampling({name}={value}).build()"
_SECOND_PROMPT = (
    "guidance reads a second prompt beside each text, and a decoder reads one: use transformers' own generate"
)
_PROMPT = ", where n is the number of the prompt's tokens (of several lengths: serve(own_sampling=True), and a sampling in each Request)"
_COUNTS = "lambda ids, scores: scores - {value} * torch.bincount(ids[0, n:], minlength=scores.shape[-1])"
_SHORTEST = "MinLengthLogitsProcessor(n + {value}, eos, device=target.device)"
_WARPED = "TemperatureLogitsWarper(temperature), "
_INSIDE = (
    "a model's own forward gives them: model(ids, {name}=True), with the ids of the prompt and of the result"
)
_RESULT = "the result always has ids, texts, finish, stats and row_stats"
_AFTERWARDS = "; sd.log_probs(decoder, out{sampled}) gives the log-probabilities of its tokens"
_PROCESSORS: dict[str, str] = {
    "repetition_penalty": "RepetitionPenaltyLogitsProcessor({value})",
    "no_repeat_ngram_size": "NoRepeatNGramLogitsProcessor({value})",
    "bad_words_ids": "NoBadWordsLogitsProcessor({value})",
    "bad_words": "NoBadWordsLogitsProcessor([list of ids, ...])",
    "suppress_tokens": "SuppressTokensLogitsProcessor({value}, device=target.device)",
    "begin_suppress_tokens": "SuppressTokensAtBeginLogitsProcessor({value}, n, device=target.device)",
    "sequence_bias": "SequenceBiasLogitsProcessor({value})",
    "logit_bias": "SequenceBiasLogitsProcessor({{(token,): bias, ...}})",
    "min_length": "MinLengthLogitsProcessor({value}, eos, device=target.device)",
    **dict.fromkeys(("min_new_tokens", "min_tokens"), _SHORTEST),
    "forced_eos_token_id": "ForcedEOSTokenLogitsProcessor(n + max_new_tokens, {value}, device=target.device)",
    "exponential_decay_length_penalty": "ExponentialDecayLengthPenalty({value}, eos, n)",
    "remove_invalid_values": "InfNanRemoveLogitsProcessor()",
    "typical_p": _WARPED + "TypicalLogitsWarper({value})",
    "epsilon_cutoff": _WARPED + "EpsilonLogitsWarper({value})",
    "eta_cutoff": _WARPED + "EtaLogitsWarper({value}, device=target.device)",
    "top_h": _WARPED + "TopHLogitsWarper({value})",
    "frequency_penalty": _COUNTS,
    "presence_penalty": _COUNTS.replace("torch.bincount", "(torch.bincount") + " > 0)",
    "encoder_repetition_penalty": "function",
    "encoder_no_repeat_ngram_size": "function",
    "allowed_token_ids": "function",
}
"""Settings that are processors here, by the entries of ``processors``."""


def _processors(begin: str, end: str) -> dict[str, str]:
    """The remedies of ``_PROCESSORS``, each as an argument between ``begin`` and ``end``."""
    made = {}
    for name, entry in _PROCESSORS.items():
        kind = "" if entry.startswith(("lambda", "function")) else ", of transformers' classes"
        kind = ", a function (ids, scores) -> scores" if entry == "function" else kind
        left = ", and leave the decoder's temperature at 1" if entry.startswith(_WARPED) else ""
        n = _PROMPT if "n + " in entry or ", n" in entry or "n:]" in entry else ""
        comma = "" if entry.startswith(_WARPED) else ","
        made[name] = f"give {begin}processors=({entry}{comma}){end}{kind}{left}{n}"
    return made


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

_CHAT = "format the chat yourself: generate(target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, {name}=...), ...)"

GENERATE: dict[str, str] = {
    **{name: _CHAT.format(name=name) for name in ("enable_thinking", "tools", "documents", "chat_template")},
    "add_generation_prompt": _CHAT.replace(", {name}=...", ""),
    "chat_template_kwargs": _CHAT.replace("{name}=...", "**kwargs"),
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
    **_processors(".sampling(", ")"),
    **dict.fromkeys(
        ("logits_processor", "logits_processors", "prefix_allowed_tokens_fn"),
        "give functions (ids, scores) -> scores when the decoder is composed: .sampling(processors=(function,))",
    ),
    **dict.fromkeys(_GRAMMARS, f"it is given when the decoder is composed: {_GRAMMAR}"),
    "max_length": "give max_new_tokens, which does not count the prompt",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "here it is max_new_tokens"),
    "batch_size": "it is an argument of generate; serve(requests, limit={value}) yields the result of each request as soon as it is finished",
    "max_time": "give stopping_criteria=[MaxTimeCriteria({value})], a class of transformers",
    "stop": "here it is stop_strings",
    "stop_token_ids": "give eos_token_id, one id or several; it replaces the model's own end ids, so list these too",
    "ignore_eos": "give eos_token_id=(), and no token ends a row",
    "num_beams": _ONE,
    "num_beam_groups": _ONE,
    "use_beam_search": _ONE,
    "length_penalty": _ONE,
    "early_stopping": _ONE,
    "diversity_penalty": _ONE,
    "constraints": _ONE,
    "force_words_ids": _ONE + "; a grammar says what a text must have: " + _GRAMMAR,
    **dict.fromkeys(("guidance_scale", "negative_prompt_ids"), _SECOND_PROMPT),
    "penalty_alpha": "there is no contrastive search: leave it out",
    "dola_layers": "there is no decoding by contrasting layers: leave it out",
    "renormalize_logits": "the probabilities that tokens are drawn from always sum to 1",
    "forced_bos_token_id": "put the token {value} at the end of each prompt",
    **dict.fromkeys(
        ("decoder_input_ids", "decoder_start_token_id", "encoder_outputs"),
        "targets have no encoder: give all tokens in the prompt",
    ),
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
    **dict.fromkeys(("output_hidden_states", "output_attentions"), _RESULT + "; " + _INSIDE),
    "prompt_logprobs": "give sd.log_probs(decoder, ([ids[:1]], [ids[1:]]), top={value}), with the prompt's ids",
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
    **_processors("", ""),
    **dict.fromkeys(("guidance_scale", "negative_prompt_ids"), _SECOND_PROMPT),
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
    "parallel_drafting": "leave it out: a model whose config has a pard_token drafts in parallel, and of others sd.drafts.Parallel(model, mask_token=...) does",
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
