"""The lab's training data: token streams, cached states, small models from nothing, bits per byte, workloads."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from tiny import byte_tokenizer, tiny
from transformers import LlamaForCausalLM

from specdec import zoo
from specdec.data.corpus import DOMAINS
from specdec.data.prompts import entries, prompts
from specdec.data.tokens import write_stream
from specdec.lab import states
from specdec.lab.bits import bits_per_byte, xz_bits_per_byte
from specdec.lab.documents import documents, packed
from specdec.lab.pretraining import Pretraining, Sizes, block_attention
from specdec.lab.states import sequences, stream_states, text_states
from specdec.lab.streams import Streams
from specdec.lab.variants import started, variants
from specdec.lab.workload import ByDomain, halves, workload
from specdec.training.muon import quick
from specdec.types import Context


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder with the pocket tokenizer and streams of a few prompts."""
    folder = tmp_path_factory.mktemp("work")
    _, tokenizer = zoo.load("pocket-tiny")
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "shards").mkdir()
    for split in ("train", "validation"):
        for domain in DOMAINS:
            write_stream(Streams(work=str(folder)).path(split, domain), tokenizer, prompts(domain, n=6))
    return str(folder)


def test_streams_that_are_there_are_not_made_again(work):
    streams = Streams(work=work, length=64)
    before = {p: p.stat().st_mtime for p in (streams.path("train", d) for d in DOMAINS)}
    _, tokenizer = zoo.load("pocket-tiny")
    made = list(sequences(tokenizer, streams, "train", 7))
    assert [len(part) for part in made] == [4, 3]
    assert torch.equal(torch.cat(made), streams.batches("train").take(7))
    alone = torch.cat(list(sequences(tokenizer, streams, "train", 3, shares=(0, 0, 1))))
    assert torch.equal(alone[0], streams.batches("train").read(2, 0))
    assert before == {p: p.stat().st_mtime for p in before}


def test_new_streams_get_the_targets_tokenizer(tmp_path, monkeypatch):
    texts = {domain: prompts(domain, n=6) for domain in DOMAINS}
    monkeypatch.setattr(Streams, "documents", lambda self, split: texts)
    _, tokenizer = zoo.load("pocket-tiny")
    streams = Streams(work=str(tmp_path / "new"), length=64)
    assert next(sequences(tokenizer, streams, "train", 1)).shape == (1, 65)
    assert streams.make().get_vocab() == tokenizer.get_vocab()


def test_tokenizers_that_the_shards_cannot_hold_are_refused(tmp_path):
    streams = Streams(work=str(tmp_path / "new"), length=64)
    for change in ({"eos_token": None}, {"words": 2**16}):
        _, tokenizer = zoo.load("pocket-tiny")
        tokenizer.add_tokens([f"<word {i}>" for i in range(change.pop("words", 0))])
        for name, value in change.items():
            setattr(tokenizer, name, value)
        with pytest.raises(
            SystemExit, match=r"an end token and at most 65536 tokens, .*: give another target"
        ):
            next(sequences(tokenizer, streams, "train", 1))
    assert not (tmp_path / "new").exists()


def test_streams_of_another_tokenizer_are_refused(work):
    with pytest.raises(SystemExit, match="made with another tokenizer"):
        next(sequences(byte_tokenizer(), Streams(work=work), "train", 1))


def test_too_little_text_is_named_with_the_remedy(work):
    with pytest.raises(
        SystemExit, match=r"train-code.npy has \d+ tokens, and 200001 are needed: install the pack"
    ):
        Streams(work=work, length=10**5).batches("train")


def test_states_are_made_once_and_for_as_many_sequences_as_are_asked(work):
    target, tokenizer = zoo.load("pocket-tiny")
    streams = Streams(work=work, length=64)
    data = stream_states(target, tokenizer, streams, (1,), 64 * 5, "validation")
    assert (len(data), data.layers) == (5, [1])
    batch = data.take([0, 4])
    assert torch.equal(batch.tokens, streams.batches("validation").take(5)[[0, 4]])
    assert set(batch.inputs) == {1}
    fewer = stream_states(target, tokenizer, streams, (1,), 64 * 2, "validation")
    assert (len(fewer), len(fewer.data)) == (2, 5)


def test_texts_are_packed_and_some_left_out(tmp_path):
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    found = torch.cat(list(packed(tokenizer, ["abcd", "ef", "ghijkl"], 3, 9)))
    ids = [
        i
        for text in ("abcd", "ef", "ghijkl")
        for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    ]
    assert found.tolist() == [ids[n : n + 4] for n in range(0, len(ids) - 3, 3)]
    later = torch.cat(list(packed(tokenizer, ["abcd", "ef", "ghijkl"], 3, 1, skip=2)))
    assert later.tolist() == found[2:3].tolist()
    file = tmp_path / "text.txt"
    file.write_text("some text, " * 40)
    assert list(documents(str(file), "text")) == [file.read_text()]
    data = text_states(tiny("llama"), tokenizer, str(tmp_path), str(file), "text", 16, (0,), 48)
    assert len(data) == 3
    file.write_text("another text, " * 40)  # states of a changed file are recorded again
    later = text_states(tiny("llama"), tokenizer, str(tmp_path), str(file), "text", 16, (0,), 48)
    assert not torch.equal(later.take([0]).tokens, data.take([0]).tokens)
    with pytest.raises(SystemExit, match="has no sequence of 16 tokens after the first 99"):
        text_states(tiny("llama"), tokenizer, str(tmp_path), str(file), "text", 16, (0,), 48, skip=99)


@pytest.mark.slow
def test_a_training_continues_where_it_was(work, tmp_path):
    """With no time left nothing is trained again; the checkpoint and the curve stand."""
    s = Pretraining(
        work=work, vocabulary=4096, length=32, micro_batch=2, batch=2, compile=False, attention="block"
    )
    early = []
    model, seen = s.train(
        "small", Sizes(32, 1, 2, 48), 1.5 / 60, (0.1 / 60, lambda model, info: early.append(info))
    )
    assert seen["step"] >= 1
    assert seen["tokens"] == seen["step"] * 64
    assert len(early) == 1
    assert early[0]["step"] <= seen["step"]
    assert all(math.isfinite(row[key]) for row in seen["curve"] for key in ("train", *DOMAINS))
    again, later = s.train("small", Sizes(32, 1, 2, 48), 0.1 / 60)
    assert later["step"] == seen["step"]
    assert later["curve"] == seen["curve"]
    for a, b in zip(model.parameters(), again.parameters()):
        assert torch.equal(a, b)
    assert model.dtype == quick("cpu")
    assert s.rate(0.0) == 0
    assert s.rate(0.2) == 1
    assert s.rate(1.0) == 0


def test_attention_by_blocks_is_causal_attention():
    query, key, value = (torch.randn(2, 3, 37, 8, dtype=torch.float64) for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    found, _ = block_attention(None, query, key, value, None, 0.3, block=10)
    torch.testing.assert_close(found, exact.transpose(1, 2))


def test_bits_per_byte_are_the_models_cross_entropy():
    model: LlamaForCausalLM
    model, tokenizer = zoo.load("pocket-tiny")
    text = "def f(x):\n    return x\n"
    ids = torch.tensor(
        [
            [
                tokenizer.eos_token_id,
                *tokenizer(text, add_special_tokens=False)["input_ids"],
                tokenizer.eos_token_id,
            ]
        ]
    )
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum")
    assert bits_per_byte(model, tokenizer, [text]) == pytest.approx(
        float(nats) / math.log(2) / len(text), rel=1e-4
    )
    long = [text * 20]
    # Less to see.
    assert bits_per_byte(model, tokenizer, long, window=16) > bits_per_byte(model, tokenizer, long)
    assert xz_bits_per_byte(long) < xz_bits_per_byte([text])


def test_every_variant_starts_from_its_target():
    target = tiny("llama", num_hidden_layers=4)
    rows = variants(layers=2, window=8, k=3)
    assert {"spire", "vanilla", "hard_loss"} <= set(rows)
    for name, variant in rows.items():
        draft = started(variant, target, 0)
        assert sum(p.numel() for p in draft.parameters()) > 0, name
        again = started(variant, target, 0)
        assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters())), name


def test_halves_share_no_source_and_are_balanced():
    sources, groups = list("aaabbcddeeef"), ["x"] * 6 + ["y"] * 6
    found = halves(sources, groups).tolist()
    assert len(set(zip(sources, found))) == len(set(sources))
    assert sum(found[:6]) == sum(found[6:]) == 3
    assert halves(["a", "a"], ["x", "y"]).tolist() == [0, 0]  # a source of two groups stays whole


def test_a_mixed_workload_has_all_domains_and_its_kinds_are_told_from_the_text():
    _, tokenizer = zoo.load("pocket-target")
    work = workload(tokenizer, 12, longest=300, seed=1)
    assert work.domain == [DOMAINS[i % 3] for i in range(12)]
    assert all(1 <= len(row) <= 300 for row in work.rows)
    assert work == workload(tokenizer, 12, longest=300, seed=1)
    starts = {
        split: {tuple(tokenizer(e["text"])["input_ids"][:32]): e["package"] for e in entries(split)}
        for split in ("test", "validation")
    }
    packages = []
    for split, of in starts.items():
        rows = workload(tokenizer, 96, 300, seed=1, split=split).rows
        packages.append({of[tuple(row[:32])] for row in rows})
    assert not packages[0] & packages[1]
    kind = ByDomain(tokenizer)
    assert kind.of(tokenizer("import os\n\n\ndef f(x):\n    return os.path.join(x)\n")["input_ids"]) == "code"
    assert (
        kind.of(tokenizer("This is a sentence about nothing in particular, and so is this one.")["input_ids"])
        == "text"
    )
    context = Context.of(work.rows)
    found = kind(context)
    assert len(found) == 12
    assert set(found) <= {"code", "text", "table"}
    assert len(set(found)) > 1


@pytest.mark.parametrize("gpu", [False, True])
def test_processes_without_a_gpu_know_of_each_other(gpu, monkeypatch, tmp_path):
    """accelerate otherwise looks for GPUs to communicate over, and each process takes itself for the only one."""
    said = []

    class State:
        def __init__(self, cpu=False):
            said.append(cpu)

        def main_process_first(self):
            return nullcontext()

    monkeypatch.setattr(states, "PartialState", State)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(states, "held", lambda folder, target: 5)
    monkeypatch.setattr(states, "States", lambda folder, target: range(5))
    model, tokenizer = tiny("llama"), byte_tokenizer()
    assert len(stream_states(model, tokenizer, Streams(work=str(tmp_path), length=8), (0,), 16)) == 2
    assert len(text_states(model, tokenizer, str(tmp_path), "a.txt", "text", 8, (0,), 24)) == 3
    assert said == [not gpu] * 2
