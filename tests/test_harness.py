"""The class for lm-evaluation-harness, against a stub of ``HFLM`` with the part of its interface that it uses (lm_eval 0.4.13)."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
from tiny import byte_tokenizer, tiny

import specdec as sd


class HFLM:
    def __init__(self, pretrained, tokenizer, batch_size=1):
        self.model, self.tokenizer, self.batch_size = pretrained, tokenizer, batch_size

    def generate_until(self, texts, **request):
        """As the harness: pads on the left, calls ``_model_generate`` with ids, mask, stops and the request's settings."""
        stop, most = request.pop("until"), request.pop("max_gen_toks")
        self.tokenizer.padding_side = "left"
        batch = self.tokenizer(texts, padding=True, return_tensors="pt")
        width = batch["input_ids"].shape[1]
        out = self._model_generate(
            context=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            stop=stop,
            max_length=width + most,
            **request,
        )
        assert out[:, :width].equal(batch["input_ids"])
        return [self.tokenizer.decode(row[width:], skip_special_tokens=True) for row in out]


@pytest.fixture
def harness(monkeypatch):
    stub = types.ModuleType("lm_eval.models.huggingface")
    stub.HFLM = HFLM
    for name in ("lm_eval", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", stub)
    monkeypatch.delitem(sys.modules, "specdec.lab.harness", raising=False)
    yield importlib.import_module("specdec.lab.harness")
    sys.modules.pop("specdec.lab.harness", None)


@pytest.fixture(scope="module")
def base():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return sd.decoder((tiny("llama"), tokenizer)).draft((tiny("llama", seed=1), tokenizer), length=3)


TEXTS = ["hello", "a", "one two"]


def test_requests_are_decoded_by_the_decoder(harness, base):
    lm = harness.DecoderLM(base, seed=3, batch_size=3)
    assert lm.batch_size == 3
    greedy = base.greedy().generate(TEXTS, 20)
    assert lm.generate_until(TEXTS, until=[], max_gen_toks=20) == greedy.texts
    assert lm.stats.tokens == 60
    letter = greedy.texts[0][4]
    stopped = base.greedy().generate(TEXTS, 20, stop_strings=letter)
    assert (
        lm.generate_until(TEXTS, until=[letter, ""], max_gen_toks=20, do_sample=False, temperature=0.7)
        == stopped.texts
    )
    assert len(stopped.texts[0]) <= 5
    sampled = base.sampling(temperature=0.5, top_k=9).generate(TEXTS, 20, seed=3)
    asked = {"do_sample": True, "temperature": 0.5, "top_k": 9}
    assert lm.generate_until(TEXTS, until=[], max_gen_toks=20, **asked) == sampled.texts


def test_what_a_request_may_not_ask(harness, base):
    lm = harness.DecoderLM(base)
    with pytest.raises(ValueError, match="asks for num_beams, which the decoder does not do"):
        lm.generate_until(TEXTS, until=[], max_gen_toks=4, num_beams=2)
    for target in (sd.TableModel.random(5), tiny("llama")):
        with pytest.raises(TypeError, match="give a decoder of an HFModel with its tokenizer"):
            harness.DecoderLM(sd.decoder(target))


def test_the_block_of_the_page_runs(harness, monkeypatch, capsys):
    page = Path(__file__).parents[1] / "docs/howto/lm_eval.md"
    asked = []

    def simple_evaluate(model, tasks, limit):
        asked.append((tasks, limit))
        texts = [f"# {n}\n" for n in range(limit)]
        groups = [texts[i : i + model.batch_size] for i in range(0, limit, model.batch_size)]
        said = [text for group in groups for text in model.generate_until(group, until=[], max_gen_toks=12)]
        return {"results": {task: len(said) for task in tasks}}

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", simple_evaluate, raising=False)
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    exec(compile(block, str(page), "exec", dont_inherit=True), {})
    assert asked == [(["gsm8k"], 16)]
    assert re.match(r"\{'gsm8k': 16\}\ntau \d\.\d\d \[", capsys.readouterr().out)


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "specdec.lab.harness", raising=False)
    with pytest.raises(ImportError, match="pip install lm_eval"):
        importlib.import_module("specdec.lab.harness")
