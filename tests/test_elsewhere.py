"""Remedies for other libraries' arguments: what a message says can be written, is accepted, and does what the argument does there."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from tiny import tiny
from transformers import TemperatureLogitsWarper

import specdec as sd

PROMPT, NEW = [5, 6, 7, 5, 6], 12
MODEL = tiny("llama", 3)
TARGET = sd.HFModel(MODEL)


def text_of(**named):
    """The text of transformers' own generate."""
    ids = torch.tensor([PROMPT])
    out = MODEL.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **named)
    return out[0, len(PROMPT) :].tolist()


PLAIN = text_of(eos_token_id=None)


def remedy(name, value, function="sampling"):
    """The processors that the message names, with the value in place of dots."""
    base = sd.decoder(TARGET)
    call = base.sampling if function == "sampling" else base.build().generate
    with pytest.raises(TypeError, match=f"has no (argument|setting) '{name}'") as raised:
        call(**{name: value})
    if function == "generate":
        assert ".sampling(processors=(" in str(raised.value)
    _, rest = str(raised.value).split("processors=")
    ends = [end for end, letter in enumerate(rest, 1) if letter == ")"]
    whole = next(rest[:end] for end in ends if rest[:end].count("(") == rest[:end].count(")"))
    written = whole.replace("(...", f"({value!r}")
    known = {"n": len(PROMPT), "eos": PLAIN[4], "target": TARGET, "temperature": 0.7, "max_new_tokens": NEW}
    classes = {word: getattr(transformers, word) for word in re.findall(r"[A-Z]\w+(?=\()", written)}
    return eval(written, {**classes, "torch": torch, **known})


@pytest.mark.parametrize("function", ["sampling", "generate"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.7),
        ("no_repeat_ngram_size", 2),
        ("bad_words_ids", [[PLAIN[0]], PLAIN[2:4]]),
        ("suppress_tokens", [PLAIN[0], PLAIN[3]]),
        ("begin_suppress_tokens", [PLAIN[0]]),
        ("sequence_bias", {(PLAIN[0],): -9.0, (11, 12): 3.0}),
        ("min_length", len(PROMPT) + 9),
        ("min_new_tokens", 9),
        ("forced_eos_token_id", 33),
        ("exponential_decay_length_penalty", (0, 40.0)),
    ],
)
def test_the_text_is_that_of_transformers(name, value, function):
    ends = name in ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
    eos = PLAIN[4] if ends else None
    expected = text_of(**{name: value}, eos_token_id=eos)
    processors = remedy(name, value, function)
    decoder = (
        sd.decoder(TARGET).draft(sd.drafts.NGram(), length=3).sampling(temperature=0, processors=processors)
    )
    out = decoder.build().generate([PROMPT], NEW, eos_token_id=() if eos is None else eos)
    assert out.ids[0] == expected
    assert expected != text_of(eos_token_id=eos)


@pytest.mark.parametrize(
    "name", ["enable_thinking", "chat_template_kwargs", "tools", "add_generation_prompt", "chat_template"]
)
def test_settings_of_a_chat_template_are_given_to_it(name):
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(
        TypeError, match=rf"argument '{name}': format the chat yourself: .*apply_chat_template"
    ):
        sd.decoder(TARGET).build().generate(chat, **{name: True})


def test_other_names_of_the_same():
    assert remedy("min_tokens", 9)[0].min_length == len(PROMPT) + 9
    for name, value, entry in (
        ("logit_bias", {5: 2.0}, "SequenceBiasLogitsProcessor({(token,): bias, ...})"),
        ("bad_words", ["x"], "NoBadWordsLogitsProcessor([list of ids, ...])"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"processors=({entry},)")):
            sd.decoder(TARGET).sampling(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "warper"),
    [
        ("typical_p", 0.8, "TypicalLogitsWarper"),
        ("epsilon_cutoff", 0.012, "EpsilonLogitsWarper"),
        ("eta_cutoff", 0.02, "EtaLogitsWarper"),
        ("top_h", 0.5, "TopHLogitsWarper"),
    ],
)
def test_truncations_come_after_the_temperature(name, value, warper):
    logits = torch.randn(1, 1, 97, generator=torch.Generator().manual_seed(0))
    sampling = sd.Sampling(processors=remedy(name, value))
    sampling.probe(97)
    scores = TemperatureLogitsWarper(0.7)(None, logits[0])
    expected = getattr(transformers, warper)(value)(torch.tensor([PROMPT]), scores).softmax(-1)
    found = sampling(logits, sd.Context.of([PROMPT]))[0]
    torch.testing.assert_close(found, expected)
    assert 1 < int((found > 0).sum()) < 97


@pytest.mark.parametrize(("name", "counted"), [("frequency_penalty", [2, 1]), ("presence_penalty", [1, 1])])
def test_penalties_count_generated_tokens(name, counted):
    sampling = sd.Sampling(processors=remedy(name, 0.5))
    sampling.probe(97)
    logits = torch.zeros(1, 1, 97)
    found = sampling.scores(logits, sd.Context.of([[*PROMPT, 8, 9, 8]]), None)[0, 0]
    expected = torch.zeros(97)
    expected[[8, 9]] = -0.5 * torch.tensor(counted)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("diversity_penalty", "no beam search"),
        ("force_words_ids", "no beam search; a grammar says"),
        ("guidance_scale", "guidance reads a second prompt beside each text"),
        ("penalty_alpha", "no contrastive search"),
        ("prompt_logprobs", r"sd\.log_probs\(decoder, \(\[ids\[:1\]\], \[ids\[1:\]\]\), top=2\)"),
        ("output_hidden_states", r"model\(ids, output_hidden_states=True\)"),
        ("encoder_repetition_penalty", r"processors=\(function,\)"),
        ("forced_bos_token_id", "put the token 2 at the end of each prompt"),
    ],
)
def test_what_there_is_not(name, says):
    with pytest.raises(TypeError, match=f"generate has no argument '{name}': .*{says}"):
        sd.decoder(TARGET).build().generate([PROMPT], 2, **{name: 2})
