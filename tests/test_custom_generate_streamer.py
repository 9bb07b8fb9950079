"""``decoder.as_generate(streamer)`` gives a streamer what transformers' own loop would, and always ends it; decoders and builders are functions."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from tiny import byte_tokenizer, tiny
from tiny_states import stateful
from transformers import StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation import BaseStreamer

import specdec as sd
from specdec.configs import cache_name

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
ASKED = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
TOKENIZER = byte_tokenizer()


class Log(BaseStreamer):
    """What a streamer was given."""

    def __init__(self):
        self.given, self.ends = [], 0

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", dtype=torch.float32)


def composed(model):
    return sd.decoder(model).draft(model, length=3)  # accepts whole blocks


def spoken(read, /, model, **call):
    """The pieces that the usual thread pattern reads. A streamer that is never ended raises ``queue.Empty``."""
    thread = Thread(target=model.generate, args=(IDS,), kwargs={**ASKED, **call})
    thread.start()
    pieces = list(read)
    thread.join()
    return pieces


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_recurrent_models(family):
    model = stateful(family)
    own = model.generate(IDS, **ASKED)
    ours = sd.decoder(model).draft(sd.drafts.NGram()).build().as_generate()
    assert model.generate(IDS, **ASKED, custom_generate=ours).equal(own)
    name = cache_name(model)
    past = model(IDS[:, :3], use_cache=True)[name]
    with pytest.raises(ValueError, match=f"{name} holds tokens"):
        model.generate(IDS, **ASKED, **{name: past}, custom_generate=ours)


@pytest.mark.parametrize("built", [True, False])
def test_the_decoder_and_the_builder_are_functions_too(llama, built):
    builder, rounds = composed(llama), []
    decoder = builder.build() if built else builder
    own = llama.generate(IDS, **ASKED)
    watch = StoppingCriteriaList([lambda ids, scores, **_: rounds.append(scores) or False])
    assert llama.generate(IDS, **ASKED, custom_generate=decoder, stopping_criteria=watch).equal(own)
    assert rounds == [None] * 12  # transformers' own loop gives scores
    sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
    out = llama.generate(IDS, **sampled, seed=5, custom_generate=decoder)
    assert out[0, 7:].tolist() == builder.sampling().generate(IDS, 12, seed=5, eos_token_id=()).ids[0]
    with pytest.raises(TypeError, match="generation_config is missing"):
        decoder("import os", 8)
    with pytest.raises(TypeError, match="the target is a TableModel"):
        sd.decoder(sd.TableModel.random(4))(llama, IDS)


@pytest.mark.parametrize("skip", [True, False])
def test_a_thread_reads_what_transformers_would_give(llama, skip):
    def streamer():
        return TextIteratorStreamer(TOKENIZER, skip_prompt=skip, timeout=60)

    own = streamer()
    expected = spoken(own, model=llama, streamer=own)
    text = TOKENIZER.decode(llama.generate(IDS, **ASKED)[0, 7 if skip else 0 :])
    assert "".join(expected) == text
    ours = streamer()
    function = composed(llama).build().as_generate(ours)
    for _ in range(2):  # a streamer may be used again
        assert spoken(ours, model=llama, custom_generate=function) == expected
    assert function.last.stats.rounds < 6
    if skip:  # a streamer that skips the prompt may be given to both
        assert "".join(spoken(ours, model=llama, custom_generate=function, streamer=ours)) == text


def test_a_streamer_is_given_the_prompt_and_every_token(llama):
    own, ours = Log(), Log()
    out = llama.generate(IDS, **ASKED, streamer=own)
    end = int(out[0, 9])
    llama.generate(IDS, **ASKED, custom_generate=composed(llama).as_generate(streamer=ours))
    assert ours.given == own.given == [IDS.tolist(), *([i] for i in out[0, 7:].tolist())]
    stopped = Log()  # nothing after a stop, though the block went on
    short = llama.generate(
        IDS, **ASKED, eos_token_id=end, custom_generate=composed(llama).as_generate(stopped)
    )
    assert stopped.given == [IDS.tolist(), *([i] for i in short[0, 7:].tolist())]
    assert len(stopped.given) <= 4
    assert own.ends == ours.ends == stopped.ends == 1


def test_a_streamer_is_ended_by_an_error_too(llama):
    def fail(ids, scores, **_):
        if ids.shape[1] == 11:
            raise RuntimeError("a criterion failed")
        return False

    log = Log()
    ours = composed(llama).as_generate(log)
    with pytest.raises(RuntimeError, match="a criterion failed"):
        llama.generate(IDS, **ASKED, custom_generate=ours, stopping_criteria=StoppingCriteriaList([fail]))
    assert log.ends == 1
    assert len(log.given) >= 2  # the rounds before
    with pytest.raises(ValueError, match="generate was asked for beam search"):
        llama.generate(IDS, **ASKED, num_beams=2, custom_generate=ours)
    assert log.ends == 2


def test_several_rows_and_what_is_no_streamer_are_refused(llama):
    for given, more in ((IDS.repeat(2, 1), {}), (IDS, {"do_sample": True, "num_return_sequences": 2})):
        log = Log()
        with pytest.raises(ValueError, match="streamer takes one row and there are 2"):
            llama.generate(given, **{**ASKED, **more}, custom_generate=composed(llama).as_generate(log))
        assert (log.given, log.ends) == ([], 1)
    with pytest.raises(
        TypeError, match="streamer is <built-in function print>: give a transformers streamer"
    ):
        composed(llama).as_generate(print)
    with pytest.raises(TypeError, match=r"streamer is the class TextStreamer: give an object"):
        composed(llama).build().as_generate(TextStreamer)
