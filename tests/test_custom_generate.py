"""``model.generate(custom_generate=decoder.as_generate())`` gives the ids of ``decoder.generate``; what it cannot do is refused by name."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer, tiny
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TypicalLogitsWarper,
    dynamic_module_utils,
    pipeline,
)

import specdec as sd
from specdec.configs import cache_name
from specdec.custom_generate import _sampling

RAGGED = [[5, 6, 7, 8, 9, 10, 11], [40], [7, 8, 7, 8, 7]]
PAD = 96


def batch(rows, side="left"):
    """Ids and mask as a tokenizer pads them."""
    width = max(map(len, rows))
    pads = [[PAD] * (width - len(row)) for row in rows]
    ids = [p + r if side == "left" else r + p for p, r in zip(pads, rows)]
    mask = [
        [0] * len(p) + [1] * len(r) if side == "left" else [1] * len(r) + [0] * len(p)
        for p, r in zip(pads, rows)
    ]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def unpadded(out, rows):
    """New ids of each row of an output of ``generate``, without padding at the end."""
    width = max(map(len, rows))
    made = [row[width:].tolist() for row in out]
    for row in made:
        while row and row[-1] == PAD:
            row.pop()
    return made


def composed(model, **sampling):
    draft = tiny(model.config.model_type, seed=1, dtype=model.dtype)
    return sd.decoder(model).draft(draft, length=3).sampling(**sampling).build()


@pytest.fixture(scope="module")
def llama():
    model = tiny("llama", dtype=torch.float32)
    model.generation_config.pad_token_id = PAD
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neo"])
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(RAGGED, id="ragged"),
        pytest.param([[5, 6, 7], [9, 2, 30]], id="even", marks=pytest.mark.slow),
    ],
)
def test_the_ids_are_the_decoders(family, rows):
    model = tiny(family, dtype=torch.float32)
    model.generation_config.pad_token_id = PAD
    greedy, cool = (
        composed(model, temperature=0),
        composed(model, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01),
    )
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    for decoder, asked in ((greedy, {}), (cool, settings)):
        expected = decoder.generate(rows, 12, seed=3, eos_token_id=()).ids
        ours = decoder.as_generate()
        for side in ("left", "right"):
            given = batch(rows, side)
            out = model.generate(**given, max_new_tokens=12, custom_generate=ours, **asked)
            width = given["input_ids"].shape[1]
            assert out[:, :width].equal(given["input_ids"])
            assert out[:, width:].tolist() == expected  # all rows have 12
        assert ours.last.ids == expected
        assert ours.last.stats.rounds < 36  # it did speculate
    # transformers' own loop gives the same greedy ids, one row at a time
    for row, ids in zip(rows, greedy.generate(rows, 12, eos_token_id=()).ids):
        alone = model.generate(torch.tensor([row]), max_new_tokens=12, do_sample=False)
        assert alone[0, len(row) :].tolist() == ids


def test_a_decoder_without_settings_follows_the_call(llama):
    decoder = composed(llama)
    ours = decoder.as_generate()
    given = batch(RAGGED)
    greedy = llama.generate(**given, max_new_tokens=8, custom_generate=ours)
    assert unpadded(greedy, RAGGED) == composed(llama, temperature=0).generate(RAGGED, 8).ids
    assert ours.decoder is decoder
    one = llama.generate(
        **given, max_new_tokens=8, custom_generate=ours, do_sample=True, top_k=7, seed=[1, 2, 3]
    )
    assert unpadded(one, RAGGED) == composed(llama, top_k=7).generate(RAGGED, 8, seed=[1, 2, 3]).ids
    torch.manual_seed(0)
    drawn = llama.generate(**given, max_new_tokens=8, custom_generate=ours, do_sample=True)
    torch.manual_seed(0)
    again = llama.generate(**given, max_new_tokens=8, custom_generate=ours, do_sample=True)
    assert drawn.equal(again)
    assert not drawn.equal(llama.generate(**given, max_new_tokens=8, custom_generate=ours, do_sample=True))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copied_builder_says_as_much_of_its_sampling(copied):
    builder = sd.decoder(sd.TableModel.random(4))
    assert not copied(builder).build().sampling_is_set
    assert not copied(builder.sampling()).build().sampling_is_set
    for chosen in (builder.sampling(sd.Sampling()), builder.greedy().sampling()):
        assert copied(chosen).build().sampling_is_set


def test_settings_that_contradict_the_decoders_are_refused(llama):
    ours = composed(llama, temperature=0.5).as_generate()
    with pytest.raises(
        ValueError, match=r"built with Sampling\(temperature=0.5.* asks for Sampling\(temperature=0.0"
    ):
        llama.generate(torch.tensor([[1]]), max_new_tokens=2, custom_generate=ours)
    with pytest.raises(ValueError, match="with do_sample=True top_k=50"):
        llama.generate(
            torch.tensor([[1]]), max_new_tokens=2, custom_generate=ours, do_sample=True, temperature=0.5
        )
    llama.generate(
        torch.tensor([[1]]), max_new_tokens=2, custom_generate=ours, do_sample=True, temperature=0.5, top_k=0
    )


def test_settings_that_do_nothing_contradict_nothing(llama):
    """transformers leaves them out of what it passes on."""
    prompt = torch.tensor([[1, 2]])
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    for own, asked in (
        ({"temperature": 0.7, "top_p": 1.0, "min_p": 0.0}, sampled),
        ({"temperature": 0, "top_k": 5, "top_p": 0.9}, {}),
    ):
        decoder = composed(llama, **own)
        out = llama.generate(prompt, max_new_tokens=6, custom_generate=decoder.as_generate(), seed=2, **asked)
        assert out[0, 2:].tolist() == decoder.generate([[1, 2]], 6, seed=2, eos_token_id=()).ids[0]
    with pytest.raises(ValueError, match="give both the same settings"):
        llama.generate(
            prompt,
            max_new_tokens=2,
            custom_generate=composed(llama, temperature=0.7, top_p=0.9).as_generate(),
            **sampled,
        )


def test_a_temperature_of_1_is_a_setting(llama):
    """A decoder that was told what the default is does not follow the call."""
    one, prompt = torch.tensor([[1]]), {"max_new_tokens": 2}
    told = sd.decoder(llama).sampling(sd.Sampling()).build()
    later = composed(llama).with_sampling(sd.Sampling())
    for decoder in (composed(llama, temperature=1.0), told, later):
        ours = decoder.as_generate()
        with pytest.raises(
            ValueError, match=r"built with Sampling\(temperature=1\.0.* asks for Sampling\(temp"
        ):
            llama.generate(one, **prompt, custom_generate=ours)
        llama.generate(one, **prompt, custom_generate=ours, do_sample=True, top_k=0)


def test_processors_and_stops_are_honoured(llama):
    ours, given = composed(llama).as_generate(), batch(RAGGED)

    def both(rows=RAGGED, **asked):
        """Ids from the decoder, and from transformers' own loop for each row alone."""
        out = unpadded(llama.generate(**batch(rows), max_new_tokens=12, custom_generate=ours, **asked), rows)
        own = [
            llama.generate(torch.tensor([row]), max_new_tokens=12, **asked)[0, len(row) :].tolist()
            for row in rows
        ]
        return out, own

    plain = both()[0]
    for asked in (
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[plain[0][0]]]},
        {"suppress_tokens": [plain[0][0], plain[1][0]]},
        {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])},
        {"sequence_bias": {(plain[0][0],): -50.0}},
    ):
        out, own = both(**asked)
        assert out == own != plain, asked
    end = plain[0][4]
    out, own = both(eos_token_id=end)
    assert out == own
    assert out[0] == plain[0][: plain[0].index(end) + 1]
    even = [[5, 6, 7], [9, 2, 30]]
    for asked in ({"min_new_tokens": 9, "eos_token_id": end}, {"min_length": 10, "eos_token_id": end}):
        out, own = both(even, **asked)
        assert out == own
        assert min(map(len, out)) >= 7
        with pytest.raises(
            ValueError,
            match=r"Min\w*LengthLogitsProcessor counts the tokens of the prompt .* one length together",
        ):
            llama.generate(**given, max_new_tokens=12, custom_generate=ours, **asked)
    out, own = both(stopping_criteria=StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] == end]))
    assert out == own
    tokenizer = byte_tokenizer()
    letter = tokenizer.decode([plain[0][3]])
    out, own = both(stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, letter)]))
    assert out == own
    assert len(out[0]) <= 4
    out, _ = both(stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(0.0)]))
    assert [len(row) for row in out] == [1, 1, 1]
    assert unpadded(llama.generate(**given, max_length=10, custom_generate=ours), RAGGED) == [
        row[:3] for row in plain
    ]


def test_processors_in_another_order_stay_processors():
    usual = [TemperatureLogitsWarper(0.5), MinPLogitsWarper(0.1)]
    assert _sampling(list(usual), True, False) == sd.Sampling(temperature=0.5, min_p=0.1)
    for odd in (
        usual[::-1],
        [*usual, TypicalLogitsWarper(0.9)],
        [usual[0], MinPLogitsWarper(0.1, min_tokens_to_keep=2)],
    ):
        made, logits = (
            _sampling(list(odd), True, False),
            torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(1)),
        )
        expected = logits[0]
        for one in odd:
            expected = one(torch.tensor([[0]]), expected)
        torch.testing.assert_close(made(logits, sd.Context.of([[0]]))[0], expected.softmax(-1))


def test_several_sequences_and_dictionaries(llama):
    ours, given = composed(llama).as_generate(), batch(RAGGED)
    out = llama.generate(
        **given,
        max_new_tokens=6,
        custom_generate=ours,
        do_sample=True,
        top_k=0,
        num_return_sequences=2,
        seed=4,
        return_dict_in_generate=True,
    )
    rows = [row for row in RAGGED for _ in range(2)]
    assert unpadded(out.sequences, rows) == composed(llama).generate(rows, 6, seed=4).ids
    config = GenerationConfig(max_new_tokens=6, pad_token_id=PAD)
    assert unpadded(llama.generate(**given, generation_config=config, custom_generate=ours), RAGGED) == [
        row[:6] for row in composed(llama, temperature=0).generate(RAGGED, 6).ids
    ]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"num_beams": 2}, "generate was asked for beam search"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is set"),
        ({"output_hidden_states": True}, "output_hidden_states is set"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor cannot be used"),
        ({"prefix_allowed_tokens_fn": lambda b, ids: [1]}, "PrefixConstrainedLogitsProcessor cannot be used"),
        ({"position_ids": torch.tensor([[5, 6, 7]])}, "position_ids do not count"),
        ({"prompt_lookup_num_tokens": 3}, "generate was asked for assisted generation"),
    ],
)
def test_what_is_not_done_is_refused(llama, asked, says):
    ours = composed(llama).as_generate()
    with pytest.raises(ValueError, match=says):
        llama.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, custom_generate=ours, **asked)


def test_a_model_that_is_not_the_target(llama):
    other = tiny("llama", seed=5, dtype=torch.float32)
    with pytest.raises(ValueError, match="the decoder's target is another LlamaForCausalLM"):
        other.generate(torch.tensor([[1]]), max_new_tokens=2, custom_generate=composed(llama).as_generate())
    with pytest.raises(
        TypeError, match="the target is a TableModel: custom_generate needs a transformers model"
    ):
        sd.decoder(sd.TableModel.random(4)).as_generate()
    name = cache_name(llama)
    past = getattr(llama(torch.tensor([[1, 2]]), use_cache=True), name)
    with pytest.raises(ValueError, match=f"{name} holds tokens"):
        llama.generate(
            torch.tensor([[1, 2, 3]]),
            **{name: past},
            max_new_tokens=2,
            custom_generate=composed(llama).as_generate(),
        )


def test_rows_that_end_apart_need_a_pad_token():
    model = tiny("llama", dtype=torch.float32)
    model.generation_config.pad_token_id = None
    ours = composed(model).as_generate()
    with pytest.raises(ValueError, match="has no pad_token_id: set it"):
        model.generate(
            torch.tensor([[5, 6, 7], [9, 2, 30]]),
            max_new_tokens=9,
            custom_generate=ours,
            stopping_criteria=StoppingCriteriaList([lambda ids, scores, **_: ids[:, 0] == 5]),
        )


def test_a_pipeline_uses_the_decoder(llama):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    ours = composed(llama).as_generate()
    texts = ["hello", "a"]
    made = pipeline("text-generation", model=llama, tokenizer=tokenizer)(
        texts, batch_size=2, max_new_tokens=8, do_sample=False, custom_generate=ours, return_full_text=False
    )
    expected = composed(llama, temperature=0).generate([tokenizer(t)["input_ids"] for t in texts], 8).ids
    assert [m[0]["generated_text"] for m in made] == [
        tokenizer.decode(i, skip_special_tokens=True) for i in expected
    ]


def test_the_folder_for_the_hub(llama, tmp_path, monkeypatch):
    folder = tmp_path / "specdec"
    shutil.copytree(Path(__file__).parents[1] / "hub", folder)
    (folder / "custom_generate/requirements.txt").write_text("torch\n")  # this checkout may not be installed
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    given, draft = batch(RAGGED), tiny("llama", seed=1, dtype=torch.float32)
    expected = composed(llama, temperature=0).generate(RAGGED, 8).ids
    here = {"custom_generate": str(folder), "trust_remote_code": True, "max_new_tokens": 8}
    for asked in ({}, {"assistant_model": draft}, {"assistant_model": draft, "draft_length": 2}):
        assert unpadded(llama.generate(**given, **here, **asked), RAGGED) == expected
    sampled = llama.generate(
        **given, **here, assistant_model=draft, draft_length=3, do_sample=True, top_k=0, seed=5
    )
    assert unpadded(sampled, RAGGED) == composed(llama).generate(RAGGED, 8, seed=5).ids
    row, shown = torch.tensor([RAGGED[0]]), TextIteratorStreamer(byte_tokenizer(), timeout=60)
    out = llama.generate(row, **here, assistant_model=draft, streamer=shown)
    assert "".join(shown) == byte_tokenizer().decode(out[0])
    with pytest.raises(ValueError, match="streamer takes one row and there are 3"):
        llama.generate(**given, **here, streamer=shown)


@pytest.mark.parametrize("how", ["tree", "pool", "coupled in a pipeline"])
def test_any_composition_follows_the_call(llama, how):
    draft = tiny("llama", seed=1, dtype=torch.float32)
    base = sd.decoder(llama)
    builder = {
        "tree": base.draft(sd.drafts.Tree(draft, widths=(2, 1))),
        "pool": base.pool(
            {"model": draft, "ngram": sd.drafts.NGram(), "none": None}, sd.selectors.UCB1(), length=3
        ),
        "coupled in a pipeline": base.draft(draft, length=3)
        .verifier(sd.Coupled())
        .executor(sd.executors.Pipelined(2)),
    }[how]
    ours, asked = builder.as_generate(), {"do_sample": True, "temperature": 0.7, "top_k": 0}
    for settings, sampling in (({}, {"temperature": 0}), (asked, {"temperature": 0.7})):
        out = llama.generate(**batch(RAGGED), max_new_tokens=10, custom_generate=ours, seed=3, **settings)
        expected = builder.sampling(**sampling).generate(RAGGED, 10, seed=3, eos_token_id=()).ids
        assert out[:, max(map(len, RAGGED)) :].tolist() == expected
