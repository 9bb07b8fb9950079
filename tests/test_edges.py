"""What a new user types wrong: the message names the argument and the remedy, at once."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec import elsewhere, zoo
from specdec.drafts import coerce
from specdec.models import load

table = sd.TableModel.random(vocab_size=5)
plain = sd.decoder(table).build()


def wide(ids, scores):
    return torch.nn.functional.pad(scores, (0, 1))


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (lambda ids, scores: scores[0], r"<lambda> returned \[5\] in torch.float32: .* \[1, 5\]"),
        (wide, r"wide returned \[1, 6\]"),
        (lambda ids, scores: scores.long(), "torch.int64"),
        (lambda ids, scores: None, "a NoneType"),
    ],
)
def test_what_a_processor_returns_is_checked(processor, says):
    with pytest.raises(TypeError, match=f"processors: .*{says}"):
        sd.decoder(table).sampling(processors=(processor,)).build()
    with pytest.raises(TypeError, match=f"processors: .*{says}"):  # also where nothing was built
        sd.Sampling(processors=(processor,))(torch.zeros(1, 1, 5), sd.Context.of([[0]]))


def test_a_processor_may_change_its_scores_in_place():
    def masks(ids, scores):
        scores[:, ids[0, -1]] = float("-inf")
        return scores

    logits = torch.zeros(1, 2, 5)
    proposal = sd.Proposal.chain(torch.tensor([[3]]), torch.tensor([1]))
    probs = sd.Sampling(processors=(masks,))(logits, sd.Context.of([[0]]), proposal)
    assert probs.eq(0).nonzero().tolist() == [[0, 0, 0], [0, 1, 3]]
    assert logits.eq(0).all()


@pytest.mark.parametrize(
    ("error", "says", "arguments"),
    [
        (TypeError, "rng is 5: give a number as seed=", {"rng": 5}),
        (TypeError, "progress is 'x': give True or False", {"progress": "x"}),
        (TypeError, r"stop_strings is \{'a': 1\}: give a text", {"stop_strings": {"a": 1}}),
        (ValueError, "stop_strings has .* half of a surrogate pair", {"stop_strings": "\ud800"}),
        (ValueError, r"seed is -1: give a number from 0 to 2\^63 - 1", {"seed": -1}),
        (ValueError, "seed is 9223372036854775808", {"seed": 2**63}),
        (ValueError, "seed, in a list, is -2", {"seed": [-2]}),
        (MemoryError, "max_new_tokens is so large .* GiB are free", {"max_new_tokens": 10**13}),
        (MemoryError, "max_new_tokens is so large", {"max_new_tokens": 10**30}),
    ],
)
def test_arguments_of_generate(error, says, arguments):
    with pytest.raises(error, match=says):
        plain.generate([[1]], **{"max_new_tokens": 2, **arguments})


def test_the_largest_seed_is_one():
    assert plain.generate([[1]], 2, seed=[2**63 - 1]).ids == plain.generate([[1]], 2, seed=[2**63 - 1]).ids


def test_prompts_without_order_and_halves_of_characters():
    with pytest.raises(TypeError, match="prompts is a set, which has no order: give a list"):
        plain.generate({1, 2}, 2)
    with pytest.raises(TypeError, match=r"prompts is a dict with keys \['ids'\]"):
        plain.generate({"ids": [1]}, 2)
    decoder = sd.decoder(sd.HFModel(tiny("llama"), byte_tokenizer())).build()
    with pytest.raises(ValueError, match=r"prompt 1 has '\\ud800' at 1, half of a surrogate pair"):
        decoder.generate(["a", "a\ud800"], 2)
    paired = "a\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert paired == "a😀"  # the remedy


@pytest.mark.parametrize("temperature", [1e300, 1e-300, float("inf"), float("-inf")])
def test_a_temperature_is_a_number_by_which_logits_can_be_divided(temperature):
    with pytest.raises(ValueError, match=r"temperature is .*: give 0 \(greedy\), or a number from"):
        sd.Sampling(temperature=temperature)
    with pytest.raises(TypeError, match="temperature is True"):
        sd.Sampling(temperature=True)
    for edge in (1e-30, 1e30):
        probs = sd.Sampling(temperature=edge)(torch.tensor([[[50.0, -50.0, 0.0]]]), sd.Context.of([[0]]))
        assert torch.isfinite(probs).all()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"temperature": 0.7}, r"composed: \.sampling\(temperature=0.7\)"),
        ({"do_sample": True}, r"compose with \.greedy\(\)"),
        ({"generation_config": object()}, r"custom_generate=decoder.as_generate\(\)"),
        ({"streamer": print}, r"iterate over decoder.stream"),
        ({"num_return_sequences": 3}, r"generate\(\[prompt\] \* 3\)"),
        ({"assistant_model": None}, r"\.draft\(assistant\)"),
        (
            {"assistant_tokenizer": None},
            r"\.draft\(sd\.drafts\.Translated\(\(assistant, tokenizer\), target\.tokenizer\)\)",
        ),
        ({"logits_processor": []}, r"\.sampling\(processors="),
        ({"max_length": 9}, "give max_new_tokens"),
        ({"max_tokens": 9}, "here it is max_new_tokens"),
        ({"stop": "a"}, "here it is stop_strings"),
        (
            {"max_new_token": 9},
            r"there are prompts, max_new_tokens, seed, .*attention_mask; did you mean 'max_new_tokens'\?$",
        ),
        ({"attention_mask": [1]}, "attention_mask is given without input_ids"),
        ({"input_ids": [1]}, "prompts and input_ids are both given"),
        ({"prompts": None, "input_ids": 5}, "input_ids is 5: give rows of numbers"),
        ({"prompts": None, "input_ids": [[1]], "attention_mask": 1}, "attention_mask is 1: give rows"),
    ],
)
def test_arguments_of_other_libraries(arguments, says):
    for function in (plain.generate, plain.stream):
        with pytest.raises(TypeError, match=says):
            function(**{"prompts": [[1]], **arguments})


def test_a_mask_has_the_shape_of_its_ids():
    with pytest.raises(ValueError, match=r"attention_mask has rows of \[1\] entries and input_ids of \[2\]"):
        plain.generate(input_ids=[[1, 2]], attention_mask=[[1]])
    some = plain.generate(input_ids=[0, 1, 2], attention_mask=[0, 1, 1], max_new_tokens=3, seed=0)
    assert some.prompt_ids == [[1, 2]]
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        plain.generate(input_ids=[[1, 2]], attention_mask=[[0, 0]])


def test_every_remedy_can_be_written():
    for table_of in (elsewhere.GENERATE, elsewhere.SAMPLING, elsewhere.DRAFT):
        for name in table_of:
            with pytest.raises(TypeError, match=f"f has no argument '{name}': [a-z.]"):
                elsewhere.refuse("f", {name: 2}, table_of, ())


def test_drafts_by_the_names_of_other_libraries():
    base = sd.decoder(table)
    for arguments, says in (
        ({"num_speculative_tokens": 5}, r"here it is length: \.draft\(\.\.\., length=5\)"),
        ({"prompt_lookup_max": 3}, r"NGram\(max_match=3\)"),
        ({"method": "ngram"}, "give the draft itself"),
        (
            {"lenght": 5},
            r"draft has no argument 'lenght': there are draft, length, .*; did you mean 'length'\?",
        ),
        ({"dtype": "float32"}, "draft is in memory already and dtype is for loading"),
    ):
        with pytest.raises(TypeError, match=says):
            base.draft(table, **arguments)
    began = time.perf_counter()
    with pytest.raises(TypeError, match=r"draft is 'ngram', a name of vLLM's: give sd.drafts.NGram\(\)"):
        base.draft("ngram")
    with pytest.raises(TypeError, match=r"draft is 'suffix', a name of vLLM's: give sd.drafts.Suffix\(\)"):
        base.draft("suffix")
    with pytest.raises(TypeError, match="draft is 'eagle3', a name of vLLM's: give the draft itself"):
        base.draft("eagle3")
    assert time.perf_counter() - began < 1
    with pytest.raises(TypeError, match="decoder has no argument 'temperature'"):
        sd.decoder(table, temperature=1)


def test_an_unbuilt_decoder_decodes():
    base = sd.decoder(table).draft(table, length=2)
    assert base.generate([[1]], 9, seed=0).ids == base.build().generate([[1]], 9, seed=0).ids
    pieces = [token for piece in base.stream([[1]], 9, seed=0) for token in piece.ids]
    assert [pieces] == base.generate([[1]], 9, seed=0).ids


def test_where_a_model_of_a_name_goes(monkeypatch):
    asked, ours = [], []

    def load(name, **options):
        asked.append(options)
        return table

    def wrapped(model, tokenizer, name, options):
        ours.append(options)
        return model

    monkeypatch.setattr(coerce, "load", load)
    monkeypatch.setattr(coerce, "_wrapped", wrapped)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folder = zoo.FOLDER / "pocket-tiny"
    sd.decoder(folder)
    sd.decoder(folder, device_map="cpu", dtype="bfloat16", graphs="auto")
    sd.decoder(table).draft(folder)  # the table is on the host
    on_gpu = type("OnGpu", (), {"score": 1, "cache": 1, "device": torch.device("cuda", 1)})()
    sd.decoder(on_gpu).draft(folder, dtype="float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sd.decoder(folder)
    assert [options["device_map"] for options in asked] == ["cuda", "cpu", None, "cuda:1", None]
    assert [options["dtype"] for options in asked] == ["auto", "bfloat16", "auto", "float32", "auto"]
    assert ours == [{}, {"graphs": "auto"}, {}, {}, {}]


def test_options_of_a_pocket_model():
    plain, low, eager = (
        sd.decoder("pocket-tiny", **o)._target for o in ({}, {"dtype": "bfloat16"}, {"graphs": "eager"})
    )
    assert [model.dtype for model in (plain, low, eager)] == [torch.float32, torch.bfloat16, torch.float32]
    assert [model.steps is not None for model in (plain, low, eager)] == [False, False, True]
    assert low.tokenizer is not None
    assert sd.decoder(low).draft("pocket-tiny", dtype="bfloat16").build().draft.model.dtype == torch.bfloat16


def test_a_length_that_no_key_can_name():
    with pytest.raises(ValueError, match=r"length is 10{30}: give at most 65535"):
        sd.decoder(table).draft(table, length=10**30).build()
    assert sd.decoder(table).draft(table, length=2**16 - 1).build().length == 65535


def test_the_repr_of_a_pool_has_its_arms_and_its_selector():
    arms = {"small": table, "none": None}
    assert "pool of small, none chosen by UCB1(" in repr(
        sd.decoder(table).pool(arms, sd.selectors.UCB1()).build()
    )


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(zoo.FOLDER / "pocket-tiny", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("error", "says", "index"),
    [
        (ValueError, "names '../part.safetensors', which is outside its folder", {"weight_map": {"a": "../part.safetensors"}}),
        (ValueError, "names '/part.safetensors', which is outside", {"weight_map": {"a": "/part.safetensors"}}),
        (FileNotFoundError, "names 'gone.safetensors', which is not there", {"weight_map": {"a": "gone.safetensors"}}),
        (ValueError, "names 3, which is outside", {"weight_map": {"a": 3}}),
        (ValueError, "is no index of weights", {"weights": {}}),
        (ValueError, "is no index of weights", [1]),
    ],
)  # fmt: skip
def test_an_index_of_weights(folder, error, says, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=says):
        sd.decoder(folder)


def test_an_index_of_weights_that_is_right(folder):
    from safetensors import safe_open

    with safe_open(folder / "part.safetensors", "pt") as weights:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sd.decoder(folder)


def test_a_name_that_is_no_model_is_refused_at_once(monkeypatch):
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"'what a name' is neither a folder .* looks like 'Qwen/"):
        sd.decoder("what a name")
    with pytest.raises(
        ConnectionError, match=r"'pocket-targt' .* did you mean the pocket model 'pocket-target'"
    ):
        sd.decoder("pocket-targt")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []

    def answer(error):
        def model_info(self, name, **options):
            asked.append(name)
            if error is not None:
                raise error

        monkeypatch.setattr(load.HfApi, "model_info", model_info)

    answer(OSError("no route"))
    with pytest.raises(ConnectionError, match=r"the hub does not answer \(no route\)"):
        sd.decoder("nope")
    response = type("Response", (), {"headers": {}, "request": None, "status_code": 404})()
    answer(RepositoryNotFoundError("404", response=response))
    with pytest.raises(ValueError, match="the hub has no model of this name that you can read"):
        sd.decoder("some/nope")
    answer(None)  # there is one, and transformers loads it

    def from_pretrained(name, **options):
        raise LookupError(name)

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(LookupError, match="some/model"):
        sd.decoder("some/model")
    assert asked == ["nope", "some/nope", "some/model"]
    assert time.perf_counter() - began < 10


def test_from_pretrained_takes_pocket_models():
    model = sd.HFModel.from_pretrained("pocket-tiny")
    assert (model.model.dtype, len(model.tokenizer)) == (torch.float32, 4096)
    assert sd.HFModel.from_pretrained("pocket-tiny", dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"a SPIRe draft, .* give drafts\.Spire"):
        sd.HFModel.from_pretrained("pocket-spire")
    with pytest.raises(ValueError, match=r"a draft head, .* give it to \.draft"):
        sd.HFModel.from_pretrained("pocket-medusa")
