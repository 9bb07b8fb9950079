"""Arguments, settings and compositions that a decoder refuses, each with its name and a remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import byte_tokenizer, tiny
from tiny_states import stateful
from transformers import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import specdec as sd
from specdec import lab
from specdec.drafts import heads
from specdec.drafts.spire import SpireModel
from specdec.models import OwnCache


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: d.generate([], 5), "prompts is empty"),
        (lambda d: d.generate("", 5), "prompt 0 is empty"),
        (lambda d: d.generate([[1], []], 5), "prompt 1 is empty"),
        (lambda d: d.generate([[1, 97]], 5), "outside the target's vocabulary"),
        (lambda d: d.generate([[1] * 250], 20), "ask for at most 6 new tokens"),
        (lambda d: d.generate([[1]], 0), "give at least 1"),
        (lambda d: d.generate([[1], [2]], [5]), "1 entries for 2 prompts"),
        (lambda d: d.generate([[1], [2]], 5, seed=[1]), "1 entries for 2 rows"),
        (lambda d: d.generate([[1]], 5, stop_strings=[""]), "empty string"),
        (lambda d: d.generate([[1] * 256], 20), "but the target has 256: shorten the prompt$"),
        (lambda d: d.generate([[1]], 5, eos_token_id=97), "eos_token_id is 97: .* ids 0 to 96"),
        (lambda d: d.generate([[1]], 5, eos_token_id=[1, -1]), r"eos_token_id is \[1, -1\]"),
        (
            lambda d: d.generate([[1], [2]], 5, rng=sd.Philox(torch.tensor([7]))),
            "seeds of 1 rows and there are 2",
        ),
    ],
)
def test_bad_calls(target, call, says):
    decoder = sd.decoder(target).build()
    with pytest.raises(ValueError, match=says):
        call(decoder)


@pytest.mark.parametrize(
    ("prompts", "arguments", "says"),
    [
        (b"import", {}, "prompts is a bytes: give a text"),
        ([b"import"], {}, "prompt 0 holds bytes: give text"),
        (None, {}, "prompts is a NoneType"),
        ((text for text in "ab"), {}, r"prompts is a generator: .*list\(\.\.\.\)"),
        ("a", {"max_new_tokens": 5.0}, r"max_new_tokens is 5\.0: give a whole number, or a list"),
        ("a", {"max_new_tokens": "8"}, "max_new_tokens is '8'"),
        ("a", {"max_new_tokens": [5.0]}, r"max_new_tokens, in a list, is 5\.0"),
        ("a", {"seed": "x"}, "seed is 'x': give a whole number"),
        ("a", {"seed": 1.5}, r"seed is 1\.5"),
        ("a", {"seed": [1.5]}, r"seed, in a list, is 1\.5"),
        ("a", {"eos_token_id": "x"}, "eos_token_id is 'x': give a whole number"),
        ("a", {"stop_strings": 3}, "stop_strings is 3: give a text"),
        ("a", {"stop_strings": [3]}, r"stop_strings is \[3\]"),
        ("a", {"stopping_criteria": len}, "stopping_criteria is <built-in function len>: give a list"),
        ("a", {"stopping_criteria": [3]}, r"stopping_criteria is \[3\]"),
        ("a", {"selection": 3}, r"selection is a int: give what decoder.begin\(batch\) made"),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_kind(target, prompts, arguments, says):
    with pytest.raises(TypeError, match=says):
        sd.decoder(target).build().generate(prompts, **{"max_new_tokens": 5, **arguments})


def test_numbers_of_numpy_and_torch_are_numbers(target):
    decoder = sd.decoder(target).build()
    ids = decoder.generate([[1], [2]], [3, 4], seed=[5, 6], eos_token_id=[7]).ids
    for make in (np.array, torch.tensor):
        same = decoder.generate(make([[1], [2]]), make([3, 4]), seed=make([5, 6]), eos_token_id=make([7]))
        assert same.ids == ids
    assert decoder.generate("a", np.int64(3), seed=np.int64(5)).ids == decoder.generate("a", 3, seed=5).ids
    out = decoder.generate([[1], [2]], 3, seed=1)
    scored = [sd.log_probs(decoder, out, batch_size=n)[1].tolist() for n in (1, np.int64(1))]
    assert scored[0] == scored[1]
    for kind, family in ((sd.HFModel, "llama"), (OwnCache, "lfm2")):
        one, other = (
            sd.decoder(kind(stateful(family) if kind is OwnCache else tiny(family), prefill_chunk=n))
            for n in (2, np.int64(2))
        )
        assert one.generate([[1, 2, 3]], 3, seed=0).ids == other.generate([[1, 2, 3]], 3, seed=0).ids


@pytest.mark.filterwarnings(
    "ignore:.*script_method. is deprecated:DeprecationWarning"
)  # as PyTorch imports its compiler
def test_a_head_is_made_for_a_compiled_model(target):
    """``torch.compile`` only wraps it, until it is called."""
    head = heads.Eagle3.from_target(torch.compile(target.model))
    assert head.target == heads.Eagle3.from_target(target).target


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda t: sd.decoder(t).draft(sd.drafts.Model(t, sampling=0.5)).build(), TypeError, r"sampling of a draft is 0.5: give a sd.Sampling"),
        (lambda t: heads.Eagle3.from_target("pocket-target"), TypeError, r"target is 'pocket-target': .*HFModel.from_pretrained"),
        (lambda t: heads.Eagle3.from_target(sd.TableModel.random(3)), TypeError, "target is a TableModel: give an HFModel"),
        (lambda t: heads.Eagle3.from_target(t, seed="x"), TypeError, "seed is 'x': give a whole number"),
        (lambda t: heads.Eagle3.from_target(t, 3), TypeError, r"taps is 3: give a list of layers, such as \[3\]"),
        (lambda t: SpireModel.from_target(t, "1"), TypeError, "layers is '1': give how many of the last blocks"),
        (lambda t: SpireModel.from_target(t, 1.5), TypeError, "layers is 1.5: give how many"),
        (lambda t: lab.record(t, [[1]], "unused", taps=1), TypeError, r"taps is 1: give a list of layers, such as \[1\]"),
        (lambda t: lab.record(t, [[1]], "unused", seed="a"), TypeError, "seed is 'a': give a whole number"),
        (lambda t: heads.DFlash.from_target(t, mask_token=1.5), TypeError, "mask_token is 1.5: give a whole number, or None"),
        (lambda t: sd.drafts.Head(heads.Medusa.from_target(t), None), TypeError, r"tree is None: give heads.Chain\(\)"),
        (lambda t: sd.drafts.Head(heads.Medusa.from_target(t), heads.DDTree), TypeError, "tree is <class"),
        (lambda t: sd.drafts.TextMatch(t, t), TypeError, "tokenizer is a HFModel: give the tokenizer itself"),
        (lambda t: OwnCache(stateful("lfm2"), "gpt2"), TypeError, "tokenizer is 'gpt2': give the object"),
        (lambda t: sd.selectors.Thompson(spread=float("inf")), ValueError, "spread is inf: give a number above 0, and a finite one"),
        (lambda t: sd.executors.Pipelined(2, timeline=True), TypeError, r"timeline is True: give a Timeline\(\)"),
        (lambda t: sd.executors.Optimistic(guesses="x"), TypeError, r"guesses is 'x': give a Guesses\(\)"),
        (lambda t: sd.TableModel.random(vocab_size=-1), ValueError, "vocab_size is -1: give at least 1"),
        (lambda t: sd.TableModel.random(3, seed="x"), TypeError, "seed is 'x': give a whole number"),
    ],
)  # fmt: skip
def test_parts_refuse_what_they_cannot_use(target, make, error, says):
    with pytest.raises(error, match=says):
        make(target)


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"min_p": 2.0}, "min_p is 2.0"),
    ],
)
def test_bad_sampling(target, settings_, says):
    with pytest.raises(ValueError, match=says):
        sd.decoder(target).sampling(**settings_)


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"temperature": "0.5"}, "temperature is '0.5': give a number"),
        ({"temperature": None}, "temperature is None"),
        ({"top_p": "0.9"}, "top_p is '0.9'"),
        ({"processors": len}, r"processors=\(processor,\)"),
        ({"processors": [3]}, "processors has 3"),
        ({"processors": [NoRepeatNGramLogitsProcessor]}, "processors has <class"),
        ({"sampling": 0.7}, "sampling is 0.7: give a Sampling object"),
        ({"temprature": 1.0}, "sampling has no setting 'temprature': there are temperature, top_k"),
        ({"repetition_penalty": 1.2}, r"processors=\(RepetitionPenaltyLogitsProcessor\(1\.2\),\)"),
        ({"do_sample": False}, r"greedy\(\)"),
    ],
)
def test_sampling_settings_of_the_wrong_kind(target, settings_, says):
    with pytest.raises(TypeError, match=says):
        sd.decoder(target).sampling(**settings_)


class Half:
    name = "half"

    def check(self, proposal):
        pass


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda base: base.verifier("rejection"), "verifier is 'rejection' without __call__, check, for_draft"),
        (lambda base: base.verifier(Half()), "verifier is a Half without __call__, for_draft"),
        (lambda base: base.executor("serial"), "executor is 'serial' without run: give one of specdec.executors, or an object with run"),
        (
            lambda base: base.draft(type("Mine", (), {"propose": None, "init": None})()).build(),
            "draft is a Mine without observe, select",
        ),
        (lambda base: base.draft(sd.drafts.NGram(), length="4").build(), "length is '4': give a whole number"),
        (lambda base: base.draft(sd.drafts.NGram(), length=2.5).build(), r"length is 2\.5: give a whole number"),
    ],
)  # fmt: skip
def test_parts_that_lack_a_part_are_refused_at_build(target, make, says):
    with pytest.raises(TypeError, match=says):
        make(sd.decoder(target))


def test_bad_compositions(target):
    with pytest.raises(ValueError, match="length is 0"):
        sd.decoder(target).draft(sd.drafts.NGram(), length=0).build()
    with pytest.raises(ValueError, match="vocabulary has 97 entries and the draft's 50"):
        sd.decoder(tiny("llama")).draft(tiny("llama", vocab_size=50)).build()
    other = byte_tokenizer()
    other.add_tokens(["new"])
    with pytest.raises(ValueError, match="different tokenizers"):
        sd.decoder(target).draft(sd.HFModel(tiny("llama", vocab_size=98), other)).build()
    with pytest.raises(ValueError, match="takes chains only"):
        sd.decoder(tiny("mpt")).draft(sd.drafts.Tree(sd.HFModel(tiny("mpt")))).build()
    with pytest.raises(ValueError, match="the draft on meta"):
        sd.decoder(tiny("llama")).draft(tiny("llama").to("meta")).build()
    with pytest.raises(ValueError, match="no tokenizer"):
        sd.decoder(tiny("llama")).build().generate("hello", 4)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        sd.decoder(tiny("llama")).build().generate([[1]], 4, stop_strings="x")
    with pytest.raises(TypeError, match="target is a int"):
        sd.decoder(3)
    with pytest.raises(TypeError, match="verifier is the class Coupled"):
        sd.decoder(target).verifier(sd.Coupled)
    with pytest.raises(TypeError, match="draft is the class NGram"):
        sd.decoder(target).draft(sd.drafts.NGram)
    with pytest.raises(ValueError, match="without both tokenizers"):
        sd.decoder(target).draft(tiny("llama", vocab_size=50)).build()
    with pytest.raises(ValueError, match="at most as many children"):
        sd.decoder(target).draft(sd.drafts.Tree(target, (200,))).build()


def test_settings_of_the_generation_config_are_not_dropped_in_silence():
    model = tiny("llama", 0)
    model.generation_config.repetition_penalty = 1.3
    with pytest.warns(UserWarning, match="repetition_penalty"):
        sd.decoder(model).build()
    sd.decoder(model).sampling(processors=[RepetitionPenaltyLogitsProcessor(1.3)]).build()


def test_how_the_generation_config_samples_is_not_dropped_in_silence():
    model = tiny("llama", 0)
    for name, value in {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}.items():
        setattr(model.generation_config, name, value)
    with pytest.warns(UserWarning, match=r"call sampling\(temperature=0\.6, top_k=20, top_p=0\.9\)"):
        sd.decoder(model).build()
    sd.decoder(model).sampling(temperature=1.0).build()  # warnings are errors here: it was said how
    sd.decoder(model).greedy().build()
    model.generation_config.do_sample = False
    sd.decoder(model).build()
    for name, value in {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}.items():
        setattr(model.generation_config, name, value)
    sd.decoder(model).build()


def test_a_model_that_was_changed_under_the_wrapper():
    model = tiny("llama", 0)
    decoder = sd.decoder(model).build()
    decoder.generate([[1]], 2)
    model.float()
    with pytest.raises(RuntimeError, match="make a new HFModel"):
        decoder.generate([[1]], 2)
    model = tiny("llama", 0)
    decoder = sd.decoder(model).build()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="make a new HFModel"):
        decoder.generate([[1]], 2)


@pytest.mark.parametrize("seed", [[1, 2], torch.tensor(1), torch.tensor([1.0])])
def test_seeds_of_a_generator_are_a_tensor(seed):
    with pytest.raises(TypeError, match=r"seed is .*: give an int64 tensor \[B\]"):
        sd.Philox(seed)


def test_build_refuses_lengths_that_a_draft_cannot_propose(target):
    model = sd.HFModel(tiny(vocab=97))
    heads = sd.drafts.heads.Medusa.from_target(model, heads=3)
    base = sd.decoder(model)
    with pytest.raises(ValueError, match=r"of 4 tokens .*: use draft\(\.\.\., length=3\)"):
        base.draft(sd.drafts.Head(heads), length=4).build()
    with pytest.raises(ValueError, match=r"of 17 tokens .*: use MagicDec\(block=17\)"):
        base.draft(sd.drafts.MagicDec(), length=17).build()
    arms = {"heads": sd.Arm(sd.drafts.Head(heads), 4), "plain": None}
    with pytest.raises(ValueError, match="of 4 tokens"):
        base.pool(arms, sd.selectors.Fixed(0))
    assert base.draft(sd.drafts.Head(heads)).build().length == 3


def test_costs_and_rewards_of_a_pool_are_checked(target):
    arms = {"a": sd.drafts.NGram(), "none": None}
    base, selector = sd.decoder(target), sd.selectors.UCB1()
    with pytest.raises(ValueError, match="costs is 'modeled': give 'modelled', 'wall', or an ArmCosts"):
        base.pool(arms, selector, costs="modeled")
    with pytest.raises(TypeError, match=r"reward is 0\.5"):
        base.pool(arms, selector, reward=0.5)


def test_an_arm_is_no_longer_than_its_drafts_paths(target):
    tree = sd.drafts.Tree(target, (2, 2))
    pool = sd.decoder(target).pool(
        {"tree": tree, "gram": sd.drafts.NGram(), "none": None}, sd.selectors.UCB1()
    )
    assert pool.build().selecting.lengths == (2, 4, 0)
