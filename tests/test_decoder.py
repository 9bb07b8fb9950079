"""The composed decoder against plain decoding: every draft, ragged batches, stops, streams, statistics, progress."""

from __future__ import annotations

import hashlib
import json
from threading import Lock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, LIKE_OTHERS, byte_tokenizer, tiny
from tokenizers import AddedToken
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WatermarkLogitsProcessor,
)

import specdec as sd
from specdec import zoo
from specdec.models import SUPPORTED
from specdec.prompts import stop_rules
from specdec.stop_rules import StopRules

PROMPTS = [
    [5],
    [7, 8, 9],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 2,
    [50] * 9,
    [3, 1],
    [90, 4, 5, 6],
    list(range(17)),
    [11, 12] * 5,
]


BUDGETS = [64, 3, 70, 1, 40, 66, 2, 65]


FEW = [1, 2, 7]  # rows that are enough for a family which other tests of its forward cover


def half_random(prefix):
    g = torch.Generator().manual_seed(hash(tuple(prefix[-2:])) % 2**31)
    return torch.rand(97, generator=g, dtype=torch.float64) * 4


def all_drafts(target, small):
    return {
        "plain": sd.drafts.NoDraft(),
        "model": sd.drafts.Model(small),
        "itself": sd.drafts.Model(target),
        "ngram": sd.drafts.NGram(),
        "tree": sd.drafts.Tree(small, (3, 2, 1)),
        "function": sd.chain_draft(half_random),
    }


SLOWER = {
    "codegen",
    "gemma3_text",
    "gpt_oss",
    "gpt_neox",
    "gptj",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
}  # like others here, too
DRAFTS = ["plain", "model", "itself", "ngram", "tree", "function"]


def greedy_by_transformers(model, prompt, budget, eos=None):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=budget,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def ends_some_rows(plain):
    """An id that ends a row early while another one still gets 64 tokens, and the rows that it leaves."""
    for eos in range(97):
        cut = [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in plain]
        if any(0 < len(c) < len(p) for c, p in zip(cut, plain)) and max(map(len, cut)) >= 64:
            return eos, cut
    raise AssertionError("choose other prompts: no id ends some rows and leaves 64 tokens to others")


@pytest.mark.parametrize(
    ("family", "names", "rows"),
    [
        pytest.param("llama", DRAFTS, range(len(PROMPTS)), id="llama, every draft"),
        *(
            pytest.param(family, ["model", "tree"], FEW, id=family)
            for family in FAMILIES
            if family not in ("llama", *LIKE_OTHERS, *SLOWER)
        ),
        *(
            pytest.param(
                family, DRAFTS, range(len(PROMPTS)), id=f"{family}, every draft", marks=pytest.mark.slow
            )
            for family in FAMILIES
            if family != "llama"
        ),
    ],
)
def test_greedy_equals_transformers_generate(family, names, rows):
    model = tiny(family, 1)
    target, prompts, budgets = sd.HFModel(model), [PROMPTS[b] for b in rows], [BUDGETS[b] for b in rows]
    plain = [greedy_by_transformers(model, p, b) for p, b in zip(prompts, budgets)]
    eos, expected = ends_some_rows(plain)
    row = next(b for b in range(len(plain)) if expected[b] != plain[b])
    assert expected[row] == greedy_by_transformers(model, prompts[row], budgets[row], eos)
    drafts = all_drafts(target, sd.HFModel(tiny(family, 1, **_shallow(family))))
    if not target.supports_trees:
        assert SUPPORTED[family] == "padded, chains only"
        del drafts["tree"]
    for name in [name for name in names if name in drafts]:
        out = sd.decoder(target).draft(drafts[name], length=3).greedy().build()
        got = out.generate(prompts, budgets, eos_token_id=eos)
        assert got.ids == expected, name
        assert [f == "eos" for f in got.finish] == [e[-1] == eos for e in expected]
    assert got.stats.tokens == sum(map(len, expected))


def _shallow(family):
    """The same model cut to fewer layers: a draft that agrees sometimes."""
    key = {"gpt2": "n_layer", "codegen": "n_layer", "gptj": "n_layer", "mpt": "n_layers"}.get(
        family, "num_hidden_layers"
    )
    if family == "gpt_neo":
        return {"num_layers": 1, "attention_types": [[["global"], 1]]}
    if family == "gemma4_text":
        return {"num_hidden_layers": 1, "num_kv_shared_layers": 0, "layer_types": ["full_attention"]}
    if family == "gemma4_unified_text":
        return {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return {key: 1}


@settings(max_examples=12, deadline=None)
@given(
    rows=st.permutations(range(len(PROMPTS))).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: p[:n])),
    name=st.sampled_from(DRAFTS),
    coupled=st.booleans(),
)
def test_a_row_does_not_depend_on_its_batch(target, small, rows, name, coupled):
    decoder = (
        sd.decoder(target)
        .draft(all_drafts(target, small)[name], length=3)
        .verifier(sd.Coupled() if coupled else sd.Rejection())
        .build()
    )
    budgets = [min(b, 24) for b in BUDGETS]
    seeds = [100 + b for b in range(len(PROMPTS))]
    together = decoder.generate(
        [PROMPTS[b] for b in rows], [budgets[b] for b in rows], seed=[seeds[b] for b in rows]
    )
    for i, b in enumerate(rows):
        alone = decoder.generate([PROMPTS[b]], budgets[b], seed=[seeds[b]])
        assert together.ids[i] == alone.ids[0]


class RepeatLess(LogitsProcessor):
    """Stateless: looks at the prefix it is given."""

    def __call__(self, input_ids, scores):
        out = scores.clone()
        for b in range(len(out)):
            out[b, input_ids[b, -6:]] -= 3.0
        return out


class Counts(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.calls


@pytest.mark.parametrize("name", DRAFTS)
def test_processors_see_the_true_prefix_at_every_node(target, small, name):
    decoder = (
        sd.decoder(target)
        .sampling(temperature=0, processors=(RepeatLess(),))
        .draft(all_drafts(target, small)[name], length=3)
        .build()
    )
    out = decoder.generate(PROMPTS[:3], 24)
    for prompt, got in zip(PROMPTS, out.ids):
        expected = tiny("llama", 0).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            logits_processor=[RepeatLess()],
            pad_token_id=0,
        )
        assert got == expected[0, len(prompt) :].tolist()


def test_processors_of_transformers_mean_what_they_mean_there(target, small):
    made = [
        RepetitionPenaltyLogitsProcessor(1.3),
        NoRepeatNGramLogitsProcessor(2),
        SequenceBiasLogitsProcessor([[[5], 2.0], [[7, 8], 3.0]]),
        MinLengthLogitsProcessor(12, 3),
        SuppressTokensLogitsProcessor([1, 2]),
    ]
    expected = tiny("llama", 0).generate(
        torch.tensor([PROMPTS[6]]),
        attention_mask=torch.ones(1, 17, dtype=torch.long),
        max_new_tokens=30,
        do_sample=False,
        logits_processor=[*made],
        pad_token_id=0,
        eos_token_id=3,
    )
    for name, draft in all_drafts(target, small).items():
        decoder = sd.decoder(target).sampling(temperature=0, processors=made).draft(draft, length=3).build()
        assert decoder.generate([PROMPTS[6]], 30, eos_token_id=3).ids[0] == expected[0, 17:].tolist(), name


def test_what_is_given_for_a_draft():
    target = sd.HFModel(*zoo.load("pocket-target"))
    base = sd.decoder(target)
    head, tokenizer = zoo.load("pocket-medusa")
    assert isinstance(base.draft((head, tokenizer)).build().draft, sd.drafts.Head)
    with pytest.raises(
        TypeError, match=r"draft is a list: give one draft; pool.. and specdec.auto take several"
    ):
        base.draft(["pocket-vanilla", "pocket-900k"])
    with pytest.raises(TypeError, match=r"target is a list: give an HFModel"):
        sd.decoder(["pocket-target", "pocket-vanilla"])
    with pytest.raises(TypeError, match=r"give it with its tokenizer, as .model, tokenizer."):
        sd.decoder(target.model, tokenizer=target.tokenizer)


def test_settings_of_sampling_add_up(target):
    half = sd.decoder(target).sampling(top_p=0.9).sampling(temperature=0.5).build().sampling
    assert (half.top_p, half.temperature) == (0.9, 0.5)
    processor = RepetitionPenaltyLogitsProcessor(1.2)
    greedy = sd.decoder(target).greedy().sampling(processors=(processor,)).build().sampling
    assert greedy.greedy
    assert greedy.processors == (processor,)
    whole = sd.decoder(target).greedy().sampling(sd.Sampling(top_k=3)).build().sampling
    assert (whole.temperature, whole.top_k) == (1.0, 3)


def test_stateful_processors_are_refused(target):
    with pytest.raises(ValueError, match="keeps state between calls"):
        sd.decoder(target).sampling(processors=(Counts(),)).build()
    with pytest.raises(ValueError, match="one prompt length for all rows"):
        sd.Sampling(processors=(MinNewTokensLengthLogitsProcessor(3, 5, 2),))


class FromTheFirstCall:
    """Takes the first text that it sees as the prompt, as processors for one call of ``generate`` do."""

    def __init__(self):
        self.start = None

    def __call__(self, ids, scores):
        if self.start is None:
            self.start = ids.shape[1]
        out = scores.clone()
        out[:, (ids.shape[1] - self.start) % 2 :: 2] = -float("inf")
        return out


def from_the_first_call():
    start = None

    def alternating(ids, scores):
        nonlocal start
        start = ids.shape[1] if start is None else start
        out = scores.clone()
        out[:, (ids.shape[1] - start) % 2 :: 2] = -float("inf")
        return out

    return alternating


@pytest.mark.parametrize("make", [FromTheFirstCall, from_the_first_call, lambda: FromTheFirstCall().__call__])
def test_processors_that_remember_their_first_call_are_refused_and_not_touched(target, make):
    one, fresh = make(), make()
    with pytest.raises(ValueError, match="keeps state between calls"):
        sd.decoder(target).sampling(processors=(one,)).build()
    ids, scores = torch.tensor([[1, 2, 3]]), torch.zeros(1, 8)
    assert torch.equal(one(ids, scores), fresh(ids, scores))


class Lazy:
    """Makes a constant when it is first needed."""

    def __init__(self):
        self.bias = None

    def __call__(self, ids, scores):
        if self.bias is None:
            self.bias = torch.arange(scores.shape[-1]) / 100
        return scores + self.bias


def test_a_processor_that_makes_its_constants_late_is_pure(target):
    sd.decoder(target).sampling(processors=(Lazy(),)).build()


def test_a_processor_that_cannot_be_copied_is_refused_by_name(target):
    one = Lazy()
    one.lock = Lock()
    with pytest.raises(TypeError, match=r"processors: Lazy cannot be copied .*give it a __deepcopy__"):
        sd.decoder(target).sampling(processors=(one,)).build()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_never_sees_what_follows_a_token_that_it_forbids(target, small, raises, temperature):
    start = 7

    def grammar(ids, scores):
        if any(token % 2 == 0 for token in ids[0, start:].tolist()):
            if raises:
                raise RuntimeError("not in the grammar")
            return torch.full_like(scores, -float("inf"))
        out = scores.clone()
        out[:, ::2] = -float("inf")
        return out

    prompt = [1, 2, 3, 4, 6, 8, 4]
    base = sd.decoder(target).sampling(temperature=temperature, processors=(grammar,)).verifier(sd.Coupled())
    plain = base.build().generate([prompt], 12, seed=1, eos_token_id=())
    own = sd.Sampling(temperature=temperature)  # without the grammar
    wrong = 0

    def count(round):
        nonlocal wrong
        wrong += int((round.proposal.tokens[0, : int(round.proposal.size[0])] % 2 == 0).sum())

    tree = sd.drafts.Tree(small, (2, 2), sampling=own)
    for draft, k in ((sd.drafts.NGram(min_match=1), 4), (sd.drafts.Model(small, sampling=own), 4), (tree, 2)):
        made = base.draft(draft, length=k).build()
        assert made.generate([prompt], 12, seed=1, eos_token_id=(), on_round=count).ids == plain.ids
    assert wrong


def test_a_watermark_that_is_seeded_by_the_text_is_pure(target):
    mark = WatermarkLogitsProcessor(target.vocab_size, "cpu", seeding_scheme="lefthash")
    sd.decoder(target).sampling(processors=(mark,)).build()


@pytest.mark.parametrize("name", DRAFTS)
def test_stop_strings_and_criteria_inside_blocks(target, small, name):
    base = sd.decoder(target).greedy()
    plain = base.build().generate(PROMPTS, 24)
    stop = plain.texts[0][10:12]
    limit = 17
    decoder = base.draft(all_drafts(target, small)[name], length=4).build()
    out = decoder.generate(PROMPTS, 24, stop_strings=stop)
    for text, got, why in zip(plain.texts, out.texts, out.finish):
        at = text.find(stop)
        assert got == (text if at < 0 else text[: at + len(stop)])
        assert why == ("length" if at < 0 else "stop_string")
    out = decoder.generate(PROMPTS, 24, stopping_criteria=[lambda ids, scores: ids.shape[1] >= limit])
    for prompt, p, got, why in zip(PROMPTS, plain.ids, out.ids, out.finish):
        assert got == p[: max(1, limit - len(prompt))]
        assert why == "criteria"


def test_a_stop_string_may_have_special_tokens_inside():
    """They are not shown, however many there are."""
    tokenizer = byte_tokenizer()
    a, b, hidden = (tokenizer.convert_tokens_to_ids(one) for one in ("a", "b", "<s>"))
    for before, block, stop in (
        ([a, *[hidden] * 9], [hidden, b, b], (2, "stop_string")),
        ([a], [*[hidden] * 9, b], (10, "stop_string")),
        ([hidden], [hidden, b, a], None),
    ):
        rules = StopRules(torch.tensor([99]), stop_strings=("ab",), tokenizer=tokenizer)
        assert rules._scan([b, *before], 1, torch.tensor(block), len(block)) == stop


def test_a_stop_string_that_is_a_special_token_is_its_id(target):
    """As with transformers, which sees it in the text; texts here do not show it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|x|>", special=True)])
    begin, added = tokenizer.convert_tokens_to_ids(["<s>", "<|x|>"])
    assert added not in tokenizer.all_special_ids
    decoder = sd.decoder(sd.HFModel(target.model, tokenizer)).build()
    found = stop_rules(decoder, [[1]], 9, (), ["ab", "<s>", "<|x|>"], (), 1)
    assert (found.eos, found.stop_strings) == ((begin, added), ("ab",))
    assert {begin, added} <= found._special
    with pytest.raises(
        ValueError, match=rf"'a<s>', which contains the special token '<s>'.* eos_token_id={begin}"
    ):
        decoder.generate(["ab"], 9, stop_strings="a<s>")


@pytest.mark.parametrize("name", DRAFTS)
def test_stream_equals_generate(target, small, name):
    decoder = sd.decoder(target).draft(all_drafts(target, small)[name], length=3).build()
    budgets = BUDGETS if name == "model" else [min(b, 20) for b in BUDGETS]
    out = decoder.generate(PROMPTS, budgets, seed=1)
    ids, texts, finish = [[] for _ in PROMPTS], [""] * len(PROMPTS), [None] * len(PROMPTS)
    for piece in decoder.stream(PROMPTS, budgets, seed=1):
        assert not torch.is_inference_mode_enabled()
        ids[piece.row] += piece.ids
        texts[piece.row] += piece.text
        finish[piece.row] = piece.finish or finish[piece.row]
    assert (ids, texts, finish) == (out.ids, out.texts, out.finish)


def test_statistics_of_a_run_that_can_be_counted_by_hand(target):
    out = (
        sd.decoder(target)
        .greedy()
        .draft(sd.drafts.Model(target), length=3)
        .build()
        .generate([[5], [6, 7]], 14)
    )
    # 1 token from the prefill, three full rounds of 4, and one round truncated to the last token
    assert out.stats.tokens == 28
    assert (out.stats.rounds, out.stats.full_rounds) == (8, 6)
    assert out.stats.tau == 4.0
    assert (out.stats.drafted, out.stats.accepted) == (18, 18)
    assert out.stats.acceptance == [1.0, 1.0, 1.0]
    assert [s.tau for s in out.row_stats] == [4.0, 4.0]
    assert {"prefill", "draft", "target", "verify", "other"} == set(out.stats.seconds)
    frame = out.frame()
    assert list(frame["new_tokens"]) == [14, 14]
    assert "tau 4.00" in repr(out)
    assert "<table>" in out._repr_html_()


def test_a_result_is_a_sequence_of_its_rows(target):
    plain = sd.decoder(target).build()
    texts = plain.generate(["ab", "c", "de"], [3, 5, 2], seed=0)
    assert list(texts) == texts.texts == [texts[0], texts[1], texts[-1]]
    assert (len(texts), texts[1:]) == (3, texts.texts[1:])
    assert texts[2] in texts
    ids = sd.decoder(sd.TableModel.random(vocab_size=5)).build().generate([[1], [2, 3]], 4, seed=0)
    assert list(ids) == ids.ids == [ids[0], ids[1]]
    assert [len(row) for row in ids] == [4, 4]
    with pytest.raises(IndexError):
        ids[2]


@pytest.mark.parametrize("draft", ["chain", "tree"])
def test_acceptance_is_conditional_on_reaching_the_position(draft):
    table, other = (sd.TableModel.random(vocab_size=5, order=2, seed=seed) for seed in (0, 1))
    part = sd.drafts.Model(other) if draft == "chain" else sd.drafts.Tree(other, (2, 1, 2))
    rounds = []
    decoder = sd.decoder(table).draft(part, length=3).build()
    stats = decoder.generate([[1]] * 50, 30, seed=0, on_round=rounds.append).stats
    for d in range(3):
        asked = accepted = 0
        for r in rounds[1:]:
            depth = sd.tree.depths(r.proposal.parents)
            for b in range(r.context.batch):
                path = [-1, *r.verdict.path[b].tolist()]
                nodes = range(int(r.proposal.size[b]))
                reached = int(r.verdict.accepted[b]) >= d
                asked += reached and any(
                    depth[b, n] == d and r.proposal.parents[b, n] == path[d] for n in nodes
                )
                accepted += int(r.verdict.accepted[b]) > d
        assert (stats.reached[d], stats.accepted_at[d]) == (asked, accepted)
        assert 0 < stats.acceptance[d] < 1


def test_prompts_in_every_form(target):
    decoder = sd.decoder(target).greedy().build()
    rows = np.array([[1, 2, 3]])
    numbers = decoder.generate(rows, np.int64(5), seed=np.int64(1), eos_token_id=np.int64(96))
    assert numbers.ids == decoder.generate(rows.tolist(), 5, eos_token_id=96).ids
    with pytest.raises(TypeError, match="is a list of messages"):
        decoder.generate({"role": "user", "content": "hi"}, 5)
    texts = decoder.generate(["abc", "defg"], 5)
    target.tokenizer.pad_token = target.tokenizer.eos_token
    for side in ("left", "right"):
        target.tokenizer.padding_side = side
        padded = target.tokenizer(["abc", "defg"], padding=True, return_tensors="pt")
        assert 0 in padded["attention_mask"]
        for out in (decoder.generate(padded, 5), decoder.generate(**padded, max_new_tokens=5)):
            assert (out.ids, out.prompt_ids) == (texts.ids, texts.prompt_ids)
    assert decoder.generate(**target.tokenizer("abc"), max_new_tokens=5).ids == texts.ids[:1]
    with pytest.raises(TypeError, match="as integers"):
        decoder.generate(torch.tensor([[1.0, 2.0]]), 5)
    text = decoder.generate("hello", 5)
    assert text.prompt_ids == [target.tokenizer("hello")["input_ids"]]
    assert decoder.generate(["hello", "you"], 5).ids[0] == text.ids[0]
    ids = text.prompt_ids[0]
    assert decoder.generate(ids, 5).ids == decoder.generate(torch.tensor([ids]), 5).ids == text.ids
    with pytest.raises(ValueError, match="no chat template"):
        decoder.generate([{"role": "user", "content": "hi"}], 5)
    target.tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    try:
        chat = decoder.generate([[{"role": "user", "content": "hi"}]], 5)
        one = decoder.generate([{"role": "user", "content": "hi"}], 5)
        begun = decoder.generate(
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], 5
        )
        with pytest.raises(TypeError, match="prompt 0 is a list of dicts without 'role'"):
            decoder.generate([{"prompt": "hi"}], 5)
    finally:
        target.tokenizer.chat_template = None
    assert chat.prompt_ids == one.prompt_ids == [target.tokenizer("[user]hi[assistant]")["input_ids"]]
    assert begun.prompt_ids == [target.tokenizer("[user]hi[assistant]yes")["input_ids"]]


def test_the_builder_forks(target, small):
    base = sd.decoder(target).greedy()
    a, b = base.draft(small, length=2), base.draft(sd.drafts.NGram(), length=5)
    assert (a.build().length, b.build().length) == (2, 5)
    assert a.build().draft.info.name == "model"
    assert base.build().draft.info.name == "plain"


def fingerprint(model):
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    digest.update(
        json.dumps([model.config.to_dict(), model.generation_config.to_dict()], default=str).encode()
    )
    return digest.hexdigest()


def test_the_users_models_are_untouched():
    model, draft = tiny("llama", 0), tiny("llama", 1)
    before = fingerprint(model), fingerprint(draft)
    expected = greedy_by_transformers(model, [5, 6, 7], 20)
    decoder = sd.decoder(model).draft(draft).greedy().build()
    pieces = decoder.stream([[5, 6, 7]], 20)
    next(pieces)
    assert greedy_by_transformers(model, [5, 6, 7], 20) == expected  # while a run of ours is under way
    list(pieces)
    assert greedy_by_transformers(model, [5, 6, 7], 20) == expected
    assert (fingerprint(model), fingerprint(draft)) == before


def test_padded_vocabularies_of_one_tokenizer():
    tokenizer = byte_tokenizer()
    target = sd.HFModel(tiny("llama", 0), tokenizer)
    for vocab in (104, 97):
        for big, little in ((tiny("llama", 0, vocab_size=104), tiny("llama", 1, vocab_size=vocab)),):
            decoder = sd.decoder(sd.HFModel(big, tokenizer)).draft(sd.HFModel(little, tokenizer), 3).build()
            out = decoder.generate(PROMPTS, 12, seed=0)
            assert all(len(i) == 12 for i in out.ids)
    decoder = sd.decoder(target).draft(sd.HFModel(tiny("llama", 1, vocab_size=104), tokenizer), 3)
    plain = sd.decoder(target).verifier(sd.Coupled()).build().generate(PROMPTS, 12, seed=0)
    assert decoder.verifier(sd.Coupled()).build().generate(PROMPTS, 12, seed=0).ids == plain.ids


def test_plain_decoding_has_tau_1_and_trees_their_own_depth(target):
    assert sd.decoder(target).greedy().build().generate([[1, 2]], 4).stats.tau == 1.0
    tree = sd.decoder(target).greedy().draft(sd.drafts.Tree(target, (2, 1))).build()
    assert tree.length == 2
    assert tree.generate([[1, 2]], 7).stats.tau == 3.0


def test_a_function_is_not_asked_beyond_a_rows_budget(target):
    asked = []
    draft = sd.chain_draft(lambda prefix: asked.append(prefix) or [0.0] * 97)
    sd.decoder(target).draft(draft, length=6).build().generate([[1] * 12, [3]], [3, 15], seed=0)
    # The 13 are 12 tokens and the prefill's; one is drafted, one is bonus.
    assert max(len(prefix) for prefix in asked if prefix[0] == 1) == 13
    assert max(len(prefix) for prefix in asked if prefix[0] == 3) > 7


def test_values_have_short_reprs(target):
    rounds = []
    decoder = sd.decoder(target).draft(sd.drafts.NGram()).build()
    decoder.generate([[1, 2, 1, 2]], 6, on_round=rounds.append)
    assert all(len(repr(value)) < 1200 for value in (rounds[-1], decoder, sd.decoder(target)))
    assert "logits=[1, " in repr(rounds[-1].scores)


def test_the_progress_bar_counts_tokens(target, capsys):
    sd.decoder(target).greedy().build().generate([[1, 2], [3]], 20, progress=True)
    assert "40/40" in capsys.readouterr().err
