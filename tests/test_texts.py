"""Generated text follows its prompt: the space between them, characters split between them, streams, and stop strings."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

import specdec as sd
from specdec import zoo
from specdec.lab.prompt_file import Entry
from specdec.lab.recording import record
from specdec.stop_rules import StopRules
from specdec.texts import LOST, GrowingText, added

WORDS = ("▁the", "▁cat", "▁on")
BYTES = "日🙂".encode()


def llama_like() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space before every word, bytes for characters that it does not know, and a decoder that drops the first space."""
    # Letters a to f: StopStringCriteria tries tokens after "abcdef".
    starts = [word[:n] for word in WORDS for n in range(2, len(word) + 1)]
    names = ["<unk>", "<s>", "</s>", *sorted(set("abcdef".join(WORDS))), *starts]
    names += [f"<0x{value:02X}>" for value in sorted(set(BYTES))]
    merges = [(a, b[-1]) for word in WORDS for a, b in pairwise(word[:n] for n in range(1, len(word) + 1))]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


LLAMA = llama_like()
POCKET = zoo.load("pocket-tiny")[1]
PLAIN = [i for i in range(3, len(LLAMA)) if "0x" not in LLAMA.convert_ids_to_tokens(i)]
BOS = LLAMA.bos_token_id


def ids_of(*names: str) -> list[int]:
    return LLAMA.convert_tokens_to_ids(list(names))


def said(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


def table(probs: torch.Tensor) -> sd.TableModel:
    model = sd.TableModel(probs)
    model.tokenizer = LLAMA
    return model


def words() -> sd.TableModel:
    """the cat on the cat on the ..."""
    probs = torch.eye(len(LLAMA))
    turn = ids_of("▁the", "▁cat", "▁on", "▁the")
    for a, b in pairwise(turn):
        probs[a] = torch.eye(len(LLAMA))[b]
    return table(probs)


def pieces_of_words(seed: int) -> sd.TableModel:
    """Any tokens but special ones and bytes."""
    probs = torch.zeros(len(LLAMA), len(LLAMA))
    probs[:, PLAIN] = torch.rand(len(LLAMA), len(PLAIN), generator=torch.Generator().manual_seed(seed))
    return table(probs / probs.sum(1, keepdim=True))


def test_prompt_and_text_make_up_the_whole():
    prompts = [
        "the cat",
        "the",
        "on the cat on the cat on the cat",
        [BOS],
        [BOS, *ids_of("▁the"), *[BOS] * 40],
    ]
    decoder = sd.decoder(words()).greedy().draft(sd.drafts.NGram(), length=3).build()
    out = decoder.generate(prompts[:3], 5)
    assert out.texts == [" on the cat on the", " cat on the cat on", " on the cat on the"]
    for prompt in (prompts[0], *prompts[3:]):
        out = sd.decoder(pieces_of_words(1)).build().generate(prompt, 8, seed=[3])
        assert said(LLAMA, out.prompt_ids[0]) + out.texts[0] == said(LLAMA, out.prompt_ids[0] + out.ids[0])
    pieces = list(decoder.stream("the cat", 5))
    assert "".join(piece.text for piece in pieces) == " on the cat on the"
    assert pieces[0].text == " on"


def test_stop_strings_begin_with_a_space():
    decoder = sd.decoder(words()).greedy().draft(sd.drafts.NGram(), length=3).build()
    out = decoder.generate("the cat", 9, stop_strings=" on")
    assert (out.texts, out.finish) == ([" on"], ["stop_string"])
    assert decoder.generate("on the cat", 9, stop_strings="the cat").texts == [
        " on the cat"
    ]  # not the prompt's


@pytest.mark.parametrize(
    "stop",
    [
        " on",
        *(pytest.param(stop, marks=pytest.mark.slow) for stop in (" th", "n t", "e c", "e", [" cat", " on"])),
    ],
)
def test_stop_strings_stop_where_those_of_transformers_do(stop):
    ends = StopStringCriteria(LLAMA, stop)
    for seed in range(20):
        plain = sd.decoder(pieces_of_words(seed)).build()
        prompt = "the cat on the cat"
        free = plain.generate(prompt, 40, seed=[seed])
        whole = free.prompt_ids[0] + free.ids[0]
        begin = len(free.prompt_ids[0])
        stops = (n for n in range(begin + 1, len(whole) + 1) if bool(ends(torch.tensor([whole[:n]]), None)))
        out = plain.generate(prompt, 40, seed=[seed], stop_strings=stop)
        assert out.ids[0] == whole[begin : next(stops, len(whole))]
        joined = "".join(piece.text for piece in plain.stream(prompt, 40, seed=[seed], stop_strings=stop))
        assert joined == out.texts[0]


def streamed(tokenizer, prompt, ids, step):
    text = GrowingText(tokenizer, prompt)
    starts = range(0, len(ids), step)
    return [text.more(ids[at : at + step], last=at + step >= len(ids)) for at in starts]


@settings(deadline=None, max_examples=150)
@given(st.data())
@pytest.mark.parametrize("kind", ["byte level", "split characters", "metaspace"])
def test_pieces_make_up_the_text(kind, data):
    tokenizer = LLAMA if kind == "metaspace" else POCKET
    some = st.sampled_from([BOS, *PLAIN]) if kind == "metaspace" else st.integers(0, len(POCKET) - 1)
    if kind == "split characters":
        some = st.sampled_from(POCKET("é日🙂a " + LOST).input_ids)
    prompt = data.draw(st.lists(some, min_size=1, max_size=30))
    ids = data.draw(st.lists(some, min_size=1, max_size=200))
    text = added(tokenizer, prompt, ids)
    pieces = streamed(tokenizer, prompt, ids, data.draw(st.integers(1, 5)))
    assert "".join(pieces) == text
    before, whole = said(tokenizer, prompt), said(tokenizer, prompt + ids)
    assert whole.endswith(text)
    assert whole.removesuffix(text).rstrip(LOST) == before.rstrip(LOST)
    if kind == "metaspace" or not before.endswith(LOST):
        assert before + text == whole
    if kind != "metaspace" and not before.endswith(LOST):
        assert text == said(tokenizer, ids)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_character_split_between_prompt_and_text(split):
    prompt, letter = POCKET("word ").input_ids, POCKET("🙂").input_ids
    if split >= len(letter):
        pytest.skip("the tokenizer has fewer tokens for it")
    before, after = prompt + letter[:split], letter[split:] + POCKET(" end").input_ids
    assert added(POCKET, before, after) == "🙂 end"
    assert "".join(streamed(POCKET, before, after, 1)) == "🙂 end"
    assert added(POCKET, prompt, [*letter, *letter[:split]]) == "🙂" + LOST
    hidden = [POCKET.all_special_ids[0]] * 12
    assert added(POCKET, before + hidden, after) == "🙂 end"


def test_a_lost_character_of_the_prompt_is_not_repeated():
    assert added(POCKET, POCKET("a" + LOST).input_ids, POCKET(" b").input_ids) == " b"
    assert added(POCKET, POCKET(LOST * 20).input_ids, POCKET(LOST).input_ids) == LOST


def test_byte_fallback():
    """Its decoder loses all bytes of a run that are no whole characters."""
    one = ids_of("<0xE6>", "<0x97>", "<0xA5>")
    cat, on = ids_of("▁the", "▁cat"), ids_of("▁on")
    assert added(LLAMA, cat + one, one + on) == "日 on"
    assert added(LLAMA, cat + one[:2], one[2:] + on) == "日 on"
    assert added(LLAMA, cat + one, one[:1] + on) == LOST + " on"
    assert "".join(streamed(LLAMA, cat + one, one[:1] + on, 1)) == LOST + " on"
    assert added(LLAMA, one * 20, on) == " on"
    for n in range(1, 9):
        assert added(LLAMA, cat + one * n, one * 2 + on) == "日日 on"


def test_a_stop_string_is_not_looked_for_in_the_prompt_and_reads_few_ids():
    class Counting:
        all_special_ids = ()

        def __init__(self):
            self.most = 0

        def decode(self, ids, skip_special_tokens):
            self.most = max(self.most, len(ids))
            return LLAMA.decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting()
    rules = StopRules(torch.tensor([9999]), stop_strings=("t on",), tokenizer=tokenizer)
    prompt = ids_of("▁cat", "▁on") * 500
    block = torch.tensor(ids_of("▁the", "▁cat", "▁on"))
    assert rules._scan(list(prompt), len(prompt), block, 3) == (3, "stop_string")
    assert rules._scan(prompt + ids_of("▁the") * 500, len(prompt), block[:2], 2) is None
    assert rules._scan(prompt + ids_of("▁the", "▁cat"), len(prompt), block[2:], 1) == (1, "stop_string")
    assert tokenizer.most < 20


class Forgets:
    def __call__(self, ids, scores):
        return None


def forgets(ids, scores):
    return "no"


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (Forgets(), "Forgets returned None: return a bool, or a bool tensor"),
        (forgets, "forgets returned 'no': return a bool, or a bool tensor"),
    ],
)
def test_a_criterion_that_returns_no_truth_value_is_named(criterion, message):
    with pytest.raises(TypeError, match=message):
        sd.decoder(words()).greedy().build().generate("the cat", 5, stopping_criteria=[criterion])


def test_a_recorded_conversation_keeps_the_space(tmp_path):
    entry = Entry(("the cat", " on"))
    trace = record(words(), [entry], tmp_path / "trace", new_tokens=2, k=1, progress=False)
    first, second = trace.texts
    answer = said(LLAMA, first.ids).removeprefix("the cat")
    assert answer.startswith(" on the")
    assert second.ids[: second.prompt] == LLAMA("the cat" + answer + " on").input_ids
