"""Models as GGUF, read back by transformers' own reader, and the comparison with llama.cpp against a server that answers by rule."""

from __future__ import annotations

import json
import sys

import gguf
import pytest
import torch
from recipe_runs import imported, report, written
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec import zoo
from specdec.lab.gguf_file import write_gguf

SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = sys.argv[1:]
if "--version" in options:
    sys.exit("version: 7")
print("system_info: n_threads = 1 | CPU : AVX2 = 1 |", flush=True)
value = lambda name: options[options.index(name) + 1]
assert open(value("-m"), "rb").read(4) == b"GGUF" and value("-t") == "1"
assert "-lv" in options or ("-ctk" in options) == ("float32" in value("-m"))
accepted = {{"ngram-simple": 2, "draft-simple": 4}}[value("--spec-type")] if "--spec-type" in options else 0
if "-md" in options:
    assert open(value("-md"), "rb").read(4) == b"GGUF" and value("--spec-draft-n-max") in "23"
known = {known}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n, answers = asked["n_predict"], []
        assert len(asked["prompt"]) <= int(value("-np")) and asked["samplers"] == ["top_k"]
        for row, prompt in enumerate(asked["prompt"]):
            times = {{"predicted_n": n, "predicted_ms": 500.0 + 500.0 * row, "cache_n": len(prompt) - 1}}
            if accepted:
                times |= {{"draft_n": 6, "draft_n_accepted": {drafts}}}
            answers.append({{"tokens": known[json.dumps(prompt)][:n], "timings": times}})
        body = json.dumps(answers if len(answers) > 1 else answers[0]).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Answers).serve_forever()
"""


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("bfloat16", [False, True])
def test_transformers_reads_the_same_model(tmp_path, bfloat16):
    model, tokenizer = zoo.load("pocket-tiny")
    write_gguf(model, tokenizer, tmp_path / "m.gguf", bfloat16)
    stored = {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if len(t.shape) > 1}
    assert stored == {"BF16" if bfloat16 else "F32"}
    same = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ids = torch.tensor([tokenizer("def add(a, b):\n    return a")["input_ids"]])
    assert torch.equal(logits(same, ids), logits(model.float(), ids))
    texts = ["class Stack:\n    pass  # ünïcode", "x = {1: 'a'}\n\n\n"]
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert [read(text)["input_ids"] for text in texts] == [tokenizer(text)["input_ids"] for text in texts]


def test_grouped_heads_and_a_head_of_its_own(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=4096, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval()
    write_gguf(model, zoo.load("pocket-tiny")[1], tmp_path / "m.gguf")
    same = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(logits(same, ids), logits(model, ids))


def test_what_is_not_written_is_refused(tmp_path):
    tokenizer = zoo.load("pocket-tiny")[1]
    config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    model = LlamaForCausalLM(config)
    config.attention_bias = True
    with pytest.raises(
        ValueError, match=r"with attention_bias True, vocab_size 64 is not .* convert_hf_to_gguf\.py"
    ):
        write_gguf(model, tokenizer, tmp_path / "m.gguf")
    config.attention_bias, config.rope_parameters["rope_type"], config.hidden_act = False, "llama3", "gelu"
    with pytest.raises(
        ValueError, match="a model with hidden_act 'gelu', rope_type 'llama3', vocab_size 64 is not written"
    ):
        write_gguf(model, tokenizer, tmp_path / "m.gguf")


def test_the_comparison(tmp_path, monkeypatch, capsys):
    with imported("llama_cpp") as recipe:
        settings = {
            "batches": (1, 2),
            "temperatures": (0.0,),
            "context": 24,
            "new_tokens": 9,
            "lengths": (3,),
        }
        plain, prompts = {}, []
        entries = recipe.pieces(recipe.shipped(), zoo.load("pocket-tiny")[1], 24, 1)[:2]
        decoder = recipe.sd.decoder("pocket-tiny").greedy().build()
        for entry in entries:
            prompts.append(list(entry.given))
            plain[json.dumps(prompts[-1])] = decoder.generate(prompts[-1], 9, eos_token_id=()).ids[0]
        plain[json.dumps(prompts[1])][4] += 1  # another text
        server = tmp_path / "llama-server"
        server.write_text(SERVER.format(python=sys.executable, known=repr(plain), drafts="accepted"))
        server.chmod(0o755)
        file = tmp_path / "c.json"
        pocket = {"target": "pocket-tiny", "draft": "pocket-140k", "server": str(server)}
        recipe.main(recipe.Settings(**settings, **pocket, repeats=2, json=str(file)))
    rows = [row for row in report(file) if row["part"] == "speed"]
    assert len(rows) == 2 * 3 * 3
    theirs = {(row["batch"], row["method"]): row for row in rows if row["engine"] == "llama.cpp, bfloat16"}
    assert theirs[1, "plain"]["tokens_per_second"] == pytest.approx(
        2 * 8 / (0.5 + 0.5)
    )  # each text by itself
    assert theirs[2, "plain"]["tokens_per_second"] == pytest.approx(2 * 8 / 1.0)
    taus = [theirs[1, m]["tau"] for m in ("plain", "ngram", "draft, k = 3")]
    assert taus == [written(tau) for tau in (1, 16 / 12, 16 / 8)]
    assert {row["same_texts"] for row in rows if row["engine"] == "specdec"} == {1.0}
    assert {row["same_texts"] for row in theirs.values()} == {0.5}
    mine = {(row["batch"], row["method"]): row for row in rows if row["engine"] == "specdec"}
    for place, row in theirs.items():
        over = mine[place]["tokens_per_second"] / row["tokens_per_second"]
        digits = 2e-5 * over  # of four figures, each of six digits
        assert (
            row["ratio_low"] - digits <= over <= row["ratio_high"] + digits
        )  # the median of two, by a constant
    assert "version: 7\nCPU : AVX2 = 1\n" in capsys.readouterr().out


def test_a_larger_target_with_random_weights():
    with imported("llama_cpp") as recipe:
        settings = recipe.Settings(random=(2, 128))
        model = recipe.untrained(settings, zoo.load("pocket-tiny")[0])
    shape = model.config
    assert (shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size) == (2, 128, 352)
    assert (shape.num_attention_heads, shape.head_dim, shape.vocab_size) == (2, 64, 4096)
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in model.parameters())
    assert list(recipe.speculation(settings, None)) == ["plain"]


def test_a_server_that_does_not_start_says_why(tmp_path):
    bad = tmp_path / "llama-server"
    bad.write_text("#!/bin/sh\necho error: unknown model\nexit 1\n")
    bad.chmod(0o755)
    with imported("llama_cpp") as recipe:
        small = {"target": "pocket-tiny", "draft": "pocket-140k", "batches": (1,), "context": 24}
        with pytest.raises(SystemExit, match="unknown model"):
            recipe.main(recipe.Settings(**small, server=str(bad)))
        with pytest.raises(SystemExit, match="no such program: give the llama-server"):
            recipe.main(recipe.Settings(server="no-such-server"))
        with pytest.raises(SystemExit, match="give two, the target"):
            recipe.main(recipe.Settings(server=str(bad), gguf=("a.gguf",)))
        with pytest.raises(SystemExit, match="leave --gguf out"):
            recipe.main(recipe.Settings(server=str(bad), gguf=("a.gguf", "b.gguf"), random=(1, 64)))


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"predicted_n": 3, "cache_n": 23, "draft_n": 1}, "ends texts before 4 tokens"),
        ({"predicted_n": 4, "cache_n": 0, "draft_n": 1}, "lost prompts"),
        ({"predicted_n": 4, "cache_n": 23}, "drafts nothing"),
    ],
)
def test_answers_that_would_compare_something_else(times, said):
    class Stub:
        drafts, said = True, "its log"

        def complete(self, rows, *_):
            return [{"tokens": [1] * 4, "timings": {"predicted_ms": 1.0, **times}} for _ in rows]

    with imported("llama_cpp") as recipe:
        settings = recipe.Settings(context=24, new_tokens=4)
        with pytest.raises(SystemExit, match=said):
            recipe.theirs(Stub(), [[1] * 24], 1, 0.0, settings, iter([0]))
