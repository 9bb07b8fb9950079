"""Drafts with another tokenizer: which tokens are the same text, how a text is written in the other's, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer, tiny
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import specdec as sd
from specdec import zoo
from specdec.audit.certify import certify
from specdec.cost.arms import weights
from specdec.data.tokens import train_tokenizer, train_words
from specdec.drafts import TextMatch, Translated
from specdec.drafts.one_model import readable
from specdec.drafts.translated.codec import Codec
from specdec.drafts.translated.retokenizer import MOST, NOTHING, Retokenizer
from specdec.testing import check_draft
from specdec.types import Context, Verdict

SAMPLE = [
    "import os\n\n\ndef main(argv):\n    return os.path.join(*argv)  # 12345\n\n\nclass Tree:\n    pass\n",
    "The quick brown fox jumps over the lazy dog, and the dog does not care at all about the fox. " * 3,
    "def f(x):\n    if x > 10:\n        return [y for y in range(x) if y % 2]\n    raise ValueError(x)\n" * 2,
    "naïve café — “quotes” 你好 ☃ 🎉 ends\n\ttabs and   spaces  ",
]
LONG = "".join(SAMPLE) * 3


def toy(tokens: str, merges: list[tuple[str, str]] = [], prefix: str = "") -> PreTrainedTokenizerFast:  # noqa: B006
    """Single characters, some pairs of them, and one special token that ends a text; ``prefix`` begins every text."""
    names = [*tokens, *(a + b for a, b in merges), "<e>"]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    backend.decoder = decoders.Fuse()
    if prefix:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="<e> $A", special_tokens=[("<e>", len(names) - 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<e>", bos_token="<e>" if prefix else None
    )


@pytest.fixture(scope="module")
def tokenizers():
    """Byte-level, of words, and characters."""
    return {
        "bytes": train_tokenizer(SAMPLE, 400),
        "more bytes": train_tokenizer(SAMPLE * 2, 600),
        "words": train_words(SAMPLE, 420),
        "characters": byte_tokenizer(),
    }


PAIRS = [("bytes", "words"), ("words", "bytes"), ("bytes", "more bytes"), ("more bytes", "characters"), ("words", "characters")]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_pairs_are_the_same_text(tokenizers, ours, theirs):
    one, other = Codec(tokenizers[ours]), Codec(tokenizers[theirs])
    pairs = Retokenizer(tokenizers[ours], tokenizers[theirs]).pairs
    special = set(tokenizers[ours].all_special_ids)
    ends = {tokenizers[ours].eos_token_id: tokenizers[theirs].eos_token_id}
    assert ends.items() <= pairs.items()
    assert len(set(pairs.values())) == len(pairs) > 30
    for mine, its in pairs.items():
        if mine not in special:
            assert one.text([mine], inside=True) == other.text([its], inside=True) != ""


@pytest.mark.parametrize(("ours", "theirs"), [pair for pair in PAIRS if "characters" not in pair])
def test_the_text_stays_the_same(tokenizers, ours, theirs):
    """Blocks, spaces before the first word, and characters of several tokens."""
    write = Retokenizer(tokenizers[ours], tokenizers[theirs])
    for text in [*SAMPLE, LONG, " a", "  b", "x", "\n\n"]:
        row = tokenizers[ours].encode(text, add_special_tokens=False)
        ids, read = write(np.array(row))
        natural = tokenizers[theirs].encode(tokenizers[ours].decode(row), add_special_tokens=False)
        assert tokenizers[theirs].decode(ids) == tokenizers[theirs].decode(natural)
        assert len(read.ends) > 3 or text != LONG
        assert len(natural) <= len(ids) <= 1.15 * len(natural)


def test_ends_of_a_text_are_paired_once():
    """Ours ends with a token that theirs lacks, and has theirs as another one, as in chats."""
    ours, theirs = toy("ab"), toy("ba")
    ours.add_special_tokens({"eos_token": "<turn>", "additional_special_tokens": ["<e>"]})
    write = Retokenizer(ours, theirs)
    assert write.pairs == {0: 1, 1: 0, ours.eos_token_id: theirs.eos_token_id}
    # A token of chats is in the vocabulary only.
    for tokenizer in (ours, theirs):
        tokenizer.add_tokens([AddedToken("<head>", special=True)])
    write, mine, its = (
        Retokenizer(ours, theirs),
        *(one.convert_tokens_to_ids("<head>") for one in (ours, theirs)),
    )
    assert write.pairs[mine] == its
    assert write(np.array([0, mine, 1]))[0].tolist() == [1, its, 0]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_what_is_written_depends_on_the_ids_alone(tokenizers, ours, theirs, data):
    """Not on the steps in which a text grew, nor on other texts that were read before."""
    write = Retokenizer(tokenizers[ours], tokenizers[theirs])
    size = len(tokenizers[ours])
    text = np.array(tokenizers[ours].encode(LONG, add_special_tokens=False))
    noise = np.array(data.draw(st.lists(st.integers(0, size + 1), min_size=1, max_size=80)))
    read = NOTHING
    for _ in range(data.draw(st.integers(1, 6))):
        n = data.draw(st.integers(1, len(text)))
        row = np.concatenate([text[:n], noise]) if data.draw(st.booleans()) else text[:n]
        ids, read = write(row, read)
        assert ids.tolist() == write(row)[0].tolist()
        assert len(ids)


def test_bytes_of_unfinished_characters(tokenizers):
    """They are paired one by one, and written so; where they have no pair, they are left out until the character is whole."""
    ours, theirs = tokenizers["bytes"], tokenizers["words"]
    write = Retokenizer(ours, theirs)
    whole = ours.encode("a 界", add_special_tokens=False)
    said = [theirs.convert_ids_to_tokens(write(np.array(whole[:n]))[0]) for n in range(2, len(whole) + 1)]
    assert said == [
        ["▁a", "▁"],
        ["▁a", "▁", "<0xE7>"],
        ["▁a", "▁", "<0xE7>", "<0x95>"],
        ["▁a", "▁", "<0xE7>", "<0x95>", "<0x8C>"],
    ]
    write = Retokenizer(theirs, tokenizers["characters"])
    whole = theirs.encode("a 界", add_special_tokens=False)
    text = [tokenizers["characters"].decode(write(np.array(whole[:n]))[0]) for n in range(2, 5)]
    assert text == ["a "] * 3
    lost = theirs.convert_tokens_to_ids("<0xE4>")
    ids, read = write(np.full(3 * MOST, lost))
    assert [end for end, _ in read.ends] == [0, MOST, 2 * MOST]  # not only where a word begins
    assert ids.tolist() == [tokenizers["characters"].bos_token_id]  # never empty


def test_special_tokens():
    """The same name, or a line break, and one beginning."""
    ours, theirs = toy("ab\n", [("a", "b")]), toy("ab\n", prefix="<e>")
    ours.add_special_tokens({"additional_special_tokens": ["<turn>", "<other>"]})
    theirs.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    write, turn = Retokenizer(ours, theirs), theirs.convert_tokens_to_ids("<turn>")
    end, other, line = (
        theirs.eos_token_id,
        ours.convert_tokens_to_ids("<other>"),
        theirs.encode("\n", add_special_tokens=False),
    )
    ab = ours.encode("ab", add_special_tokens=False)
    assert len(ab) == 1
    two = theirs.encode("ab", add_special_tokens=False)
    mine = ours.convert_tokens_to_ids("<turn>")
    for ids, said in (
        ([ours.eos_token_id, *ab], [end, *two]),  # one beginning, not two
        ([mine, *ab, mine], [end, turn, *two, turn]),
        ([other, *ab, other, other, *ab], [end, *two, *line, *two]),
        ([other], [end]),
        ([*ab, ours.eos_token_id, len(ours) + 5], [end, *two, end]),  # what pads a vocabulary is no text
    ):
        assert write(np.array(ids))[0].tolist() == said


def test_a_draft_with_the_same_tokenizer_decodes_as_without():
    """Every token is in the intersection, and each text is written as it was."""
    tokenizer = byte_tokenizer()
    target, small = (sd.HFModel(tiny("llama", num_hidden_layers=n), tokenizer) for n in (2, 2))
    small.model.lm_head.weight.data *= 0.9
    wrapped = Translated(small, tokenizer)
    assert len(wrapped.ours) == wrapped.vocab_size - 1 == 97
    prompts = ["def f(x):", "a", "the fox and the dog"]
    for verifier in (sd.Rejection(), sd.Coupled()):
        for sampling in (sd.Sampling(temperature=0.0), sd.Sampling(temperature=0.7, top_k=20)):
            base = sd.decoder(target).sampling(sampling).verifier(verifier)
            one, other = (base.draft(model, length=3).build() for model in (small, wrapped))
            a, b = (decoder.generate(prompts, [40, 3, 25], seed=3) for decoder in (one, other))
            assert a.ids == b.ids
            assert a.stats.tau == b.stats.tau > 1


@pytest.fixture
def strangers():
    """A target and a draft with four tokens each in common."""
    ours, theirs = toy("abc", [("a", "b")]), toy("cab", [("b", "a"), ("c", "c")])
    target = sd.HFModel(tiny("llama", vocab_size=5, num_hidden_layers=1), ours)
    small = sd.HFModel(tiny("llama", seed=1, vocab_size=6, num_hidden_layers=1), theirs)
    return target, small


@pytest.mark.parametrize("kind", ["chain", "tree", "text"])
def test_nothing_is_lost(strangers, kind):
    """By enumeration of all randomness. The intersection is a, b, c and the end of a text."""
    target, small = strangers
    wrapped = Translated(small, target.tokenizer)
    assert sorted(wrapped.ours.tolist()) == [0, 1, 2, 4]
    draft = {
        "chain": sd.drafts.Model(wrapped),
        "tree": sd.drafts.Tree(wrapped, (2, 1)),
        "text": TextMatch(small, target.tokenizer),
    }[kind]
    decoder = sd.decoder(target).sampling(temperature=0.9).draft(draft, length=2).build()
    found = certify(decoder, prompts=[[0, 3], [2]], max_new_tokens=3)
    assert found.lossless, found
    chances = wrapped.score(wrapped.cache(1, 8), Context.of([[0, 3, 1]])).logits.softmax(-1)
    assert chances[..., 3].item() == chances[..., 5].item() == 0 < chances[..., :3].min().item()


def test_a_cache_that_grew_equals_a_fresh_one(tokenizers):
    """Through steps, accepted nodes, rows that leave and join, and caches that are exchanged; and both equal the model's own logits."""
    ours, theirs = tokenizers["more bytes"], tokenizers["characters"]
    small = sd.HFModel(tiny("llama", seed=1), theirs)
    wrapped = Translated(small, ours)
    rows = [ours.encode(text, add_special_tokens=False) for text in (LONG[:90], SAMPLE[1][:60], LONG[40:130])]
    assert all(len(theirs.encode(text)) > 40 for text in (LONG[:90], SAMPLE[1][:60]))
    size = [4, 3, 5]

    def now() -> Context:
        return Context.of([row[:n] for row, n in zip(rows, size)], capacity=60)

    cache = wrapped.cache(2, 60)
    join = wrapped.cache(1, 60)
    exchanged = 0
    for step in range(8):
        text = now()
        if step == 3:
            wrapped.prefill(join, Context.of([rows[2][: size[2]]], capacity=60))
            cache = cache.join(join)
        if step < 3:
            text = text.select(torch.tensor([0, 1]))
        before = cache.inner
        found = wrapped.score(cache, text).logits
        exchanged += before is not None and cache.inner is not before
        fresh = wrapped.score(wrapped.cache(text.batch, 60), text).logits
        torch.testing.assert_close(found, fresh, rtol=0, atol=1e-12)
        for b in range(text.batch):
            ids = theirs.encode(ours.decode(rows[b][: size[b]]), add_special_tokens=False)
            own = small.score(small.cache(1, len(ids)), Context.of([ids])).logits[0, 0]
            torch.testing.assert_close(found[b, 0, wrapped.ours], own[wrapped.theirs], rtol=0, atol=1e-12)
            assert bool((found[b, 0].exp() == 0).sum() == wrapped.vocab_size - len(wrapped.ours))
        if step == 5:
            cache = cache.select(torch.tensor([1, 0, 2]))
            rows[0], rows[1], size[0], size[1] = rows[1], rows[0], size[1], size[0]
        size = [n + 2 + step % 2 for n in size]
    assert exchanged


def test_what_was_accepted_is_not_read_again(tokenizers):
    ours, theirs = tokenizers["more bytes"], tokenizers["characters"]
    wrapped = Translated(sd.HFModel(tiny("llama", seed=1), theirs), ours)
    one = [ours.encode(letter, add_special_tokens=False)[-1] for letter in "xyz"]
    assert all(i in wrapped.retokenizer.pairs for i in one)
    text, cache = Context.of([one * 3], capacity=20), wrapped.cache(1, 20)
    nodes = sd.Proposal.chain(torch.tensor([one]), torch.tensor([3]))
    wrapped.score(cache, text, nodes)
    cache.commit(
        text, Verdict.of(nodes, torch.tensor([[0, 1, 2]]), torch.tensor([3]), torch.tensor([one[0]]))
    )
    after = text.append(torch.tensor([[*one, one[0]]]), torch.tensor([4]))
    assert cache.sync(after).tolist() == [12]
    other = Context.of([[*one, one[0], one[0], *one]], capacity=20)
    assert cache.sync(other).tolist() == [4]


def test_processors_may_forbid_all_that_the_draft_can_propose(strangers):
    """Then it proposes what is allowed, which it cannot read, and plain decoding's text is kept."""
    target, small = strangers

    def only(ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) != 3, -torch.inf)

    for temperature in (0.0, 1.0):
        base = sd.decoder(target).sampling(temperature=temperature, processors=(only,))
        drafted = base.draft(Translated(small, target.tokenizer), length=3).build()
        assert (
            drafted.generate([[0, 1]], 6, seed=0).ids
            == [[3] * 6]
            == base.build().generate([[0, 1]], 6, seed=0).ids
        )


def test_an_arm_of_a_pool_costs_what_its_model_costs(strangers):
    target, small = strangers
    wrapped = Translated(small, target.tokenizer)
    assert weights(wrapped) == weights(small) > 0
    arms = {"none": None, "other": sd.Arm(wrapped, 2), "lookup": sd.Arm(sd.drafts.NGram(), 2)}
    base = sd.decoder(target).verifier(sd.Coupled())
    plain = base.build().generate([[0, 1], [2], [3, 0]], 15, seed=0)
    assert (
        base.pool(arms, sd.selectors.Random(), 2).build().generate([[0, 1], [2], [3, 0]], 15, seed=0).ids
        == plain.ids
    )


def test_positions_of_the_draft(tokenizers):
    """Learned positions end: the oldest tokens are given up in time, and a block that needs more is refused."""
    ours, theirs = tokenizers["bytes"], tokenizers["characters"]
    target = sd.HFModel(tiny("llama", vocab_size=len(ours), max_position_embeddings=512), ours)
    wrapped = Translated(sd.HFModel(tiny("gpt2", n_positions=64), theirs), ours)
    base = sd.decoder(target).greedy()
    plain = base.build().generate([LONG[:300]], 30)
    assert base.draft(wrapped, length=30).build().generate([LONG[:300]], 30).ids == plain.ids
    with pytest.raises(
        ValueError, match="the proposal has 33 nodes, and of the draft's 64 positions 32 are kept"
    ):
        base.draft(wrapped, length=40).build().generate([LONG[:300]], 60)


def test_ids_that_pad_a_vocabulary_are_no_text(tokenizers):
    ours, theirs = tokenizers["bytes"], tokenizers["words"]
    target = sd.HFModel(tiny("llama", vocab_size=len(ours) + 8), ours)
    wrapped = Translated(sd.HFModel(tiny("llama", seed=1, vocab_size=len(theirs)), theirs), ours)
    text, padded = (
        Context.of([[*row]]) for row in ([40, 41, 42], [40, len(ours) + 7, 41, len(ours) + 3, 42])
    )
    assert wrapped.cache(1, 9).text(readable(padded, wrapped)).row(0) == wrapped.cache(1, 9).text(text).row(0)
    decoder = sd.decoder(target).draft(wrapped, length=3).build()
    assert decoder.generate([padded.row(0)], 20, seed=0).stats.tau >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "tree", "text"])
def test_it_keeps_the_contract_of_a_draft(strangers, kind):
    target, small = strangers
    if kind == "text":
        draft = TextMatch(small, target.tokenizer)
    else:
        wrapped = Translated(small, target.tokenizer)
        draft = sd.drafts.Model(wrapped) if kind == "chain" else sd.drafts.Tree(wrapped, (2, 1))
    found = check_draft(draft, target=target)
    assert not found.not_tried


@pytest.mark.parametrize(
    "executor",
    [
        sd.executors.Serial(),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (sd.executors.Pipelined(2), sd.executors.Optimistic())
        ),
    ],
    ids=["serial", "pipelined", "optimistic"],
)
@pytest.mark.parametrize("kind", [Translated, pytest.param(TextMatch, marks=pytest.mark.slow)])
def test_greedy_and_coupled_texts_are_those_of_plain_decoding(tokenizers, executor, kind):
    """In one batch of long and short rows, with rows that leave, a text that outgrows the draft's positions, and more tokens than the target's."""
    ours, theirs = tokenizers["more bytes"], tokenizers["characters"]
    target = sd.HFModel(tiny("llama", vocab_size=len(ours), max_position_embeddings=512), ours)
    small = sd.HFModel(tiny("llama", seed=1, max_position_embeddings=160), theirs)
    prompts, budgets = [LONG[:500], "x", SAMPLE[1][:40], LONG[:170]], [60, 9, 30, 41]
    draft = kind(small, ours)
    assert kind is TextMatch or f"96 of {len(ours)} tokens" in repr(draft)
    for base in (sd.decoder(target).greedy(), sd.decoder(target).verifier(sd.Coupled())):
        plain = base.build().generate(prompts, budgets, seed=5)
        decoder = base.draft(draft, length=3).executor(executor).build()
        assert decoder.generate(prompts, budgets, seed=5).ids == plain.ids
        if not isinstance(executor, sd.executors.Serial):
            continue
        served = base.draft(draft, length=3).build()
        requests = [sd.Request(p, n, seed=s) for p, n, s in zip(prompts, budgets, (5, 6, 7, 8))]
        done = {one.index: one.ids for one in served.serve(requests, 2, clock="rounds")}
        alone = base.build()
        assert [done[i] for i in range(4)] == [
            alone.generate([p], n, seed=s).ids[0] for p, n, s in zip(prompts, budgets, (5, 6, 7, 8))
        ]


@pytest.mark.parametrize("kind", [Translated, TextMatch])
def test_a_row_does_not_depend_on_its_batch(tokenizers, kind):
    ours, theirs = tokenizers["bytes"], tokenizers["words"]
    target = sd.HFModel(tiny("llama", vocab_size=len(ours)), ours)
    small = sd.HFModel(tiny("llama", seed=1, vocab_size=len(theirs)), theirs)
    decoder = sd.decoder(target).draft(kind(small, ours), length=4).build()
    prompts, seeds = [LONG[:300], "def g(", SAMPLE[3]], [1, 2, 3]
    together = decoder.generate(prompts, [30, 12, 25], seed=seeds)
    for b, (prompt, budget, seed) in enumerate(zip(prompts, [30, 12, 25], seeds)):
        assert decoder.generate([prompt], budget, seed=[seed]).ids[0] == together.ids[b]


class Known(sd.TableModel):
    """Knows a text by heart: the next of its tokens has all probability."""

    def __init__(self, tokenizer, text):
        self.tokenizer, self.ids = tokenizer, tokenizer.encode(text, add_special_tokens=False)
        super().__init__(torch.full([len(tokenizer)], 1 / len(tokenizer)))

    def score(self, cache, context, proposal=None, start=None, rows=None, taps=()):
        scores = super().score(cache, context, proposal, start, rows)
        for b, n in enumerate(context.length.tolist()):
            for i in range(scores.logits.shape[1]):
                scores.logits[b, i, self.ids[n + i + (0 if start is None else start + 1)]] = 100
        return scores


def test_a_text_is_matched_in_the_targets_tokens(tokenizers):
    """A draft that knows what follows proposes it, although its own tokens are characters."""
    ours, text = tokenizers["more bytes"], SAMPLE[1] * 2
    ids = ours.encode(text, add_special_tokens=False)
    draft = TextMatch(Known(tokenizers["characters"], text), ours)
    rng = sd.Philox(torch.tensor([0, 1]))
    state = None
    for n in range(3, 90, 4):
        context = Context.of([ids[:n], ids[: n + 1]], capacity=120)
        state = draft.init(context, None) if state is None else state
        proposal, state = draft.propose(state, context, torch.tensor([8, 2]), rng)
        first, second = (row[:size] for row, size in zip(proposal.tokens.tolist(), proposal.size.tolist()))
        assert first[:4] == ids[n : n + 4]
        assert len(second) <= 2
        assert (
            ours.decode(ids[n + 1 :]).strip().startswith(ours.decode(second).strip())
        )  # its end may be half a token
        assert proposal.probs is None


def test_a_text_that_ends_is_proposed_with_its_end(tokenizers):
    ours, theirs = tokenizers["more bytes"], tokenizers["characters"]
    known = Known(theirs, SAMPLE[1][:60])
    known.ids += [theirs.eos_token_id, *[0] * 40]
    ids = ours.encode(SAMPLE[1][:60], add_special_tokens=False)
    context = Context.of([ids[:-1]], capacity=80)
    draft = TextMatch(known, ours)
    proposal, _ = draft.propose(
        draft.init(context, None), context, torch.tensor([6]), sd.Philox(torch.tensor([0]))
    )
    assert proposal.tokens[0].tolist() == [ids[-1], ours.eos_token_id]


@pytest.mark.parametrize("turn", [1, -1])
def test_a_tokenizer_in_python(tokenizers, turn):
    one, other = (ByT5Tokenizer(), tokenizers["bytes"])[::turn]
    write = Retokenizer(one, other)
    assert len(write.pairs) > 30
    text = SAMPLE[0] + SAMPLE[3].strip()
    assert other.decode(write(np.array(one.encode(text, add_special_tokens=False)))[0]) == text


@pytest.mark.slow
def test_a_trained_draft_with_another_tokenizer_is_accepted():
    """Sampled by its distribution, greedily by its text."""
    target = sd.HFModel(*zoo.load("pocket-target"))
    prompts = [prompt[:900] for prompt in sd.data.prompts("code", n=6, split="validation")]
    taus = {}
    for temperature in (0.0, 1.0):
        base = sd.decoder(target).sampling(temperature=temperature)
        for kind in (Translated, TextMatch):
            decoder = base.draft(kind("pocket-words", target.tokenizer), length=4).build()
            taus[temperature, kind] = decoder.generate(prompts, 48, seed=0).stats.tau
    assert taus[0.0, TextMatch] > 2.2
    assert taus[1.0, Translated] > 1.3
    assert all(tau > 1.2 for tau in taus.values())


@pytest.mark.parametrize("kind", [Translated, TextMatch])
def test_it_is_saved_and_loaded(tmp_path, strangers, kind):
    target, small = strangers
    decoder = sd.decoder(target).draft(kind(small, target.tokenizer), length=2).build()
    decoder.save(tmp_path / "saved")
    again = sd.load(tmp_path / "saved").build()
    assert isinstance(again.draft if kind is TextMatch else again.draft.model, kind)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["decoder.json", "draft", "target"]
    assert again.generate([[0, 3, 1]], 12, seed=1).ids == decoder.generate([[0, 3, 1]], 12, seed=1).ids


def test_damaged_recipes_read_nothing_else(tmp_path, strangers):
    target, small = strangers
    sd.decoder(target).draft(Translated(small, target.tokenizer), length=2).build().save(tmp_path / "saved")
    file = tmp_path / "saved" / "decoder.json"
    recipe = file.read_text()
    assert '"tokenizer": "target"' in recipe
    for name, error, why in (
        ("..", ValueError, "outside its folder"),
        ("", ValueError, "outside its folder"),
        ("nothere", FileNotFoundError, "is not there"),
    ):
        file.write_text(recipe.replace('"tokenizer": "target"', f'"tokenizer": "{name}"'))
        with pytest.raises(error, match=why):
            sd.load(tmp_path / "saved")


def test_bad_input(strangers, tokenizers):
    target, small = strangers
    assert isinstance(Translated((small.model, small.tokenizer), target.tokenizer).model, sd.HFModel)
    with pytest.raises(
        ValueError, match=r"different tokenizers.*or drafts.Translated\(draft, target.tokenizer\)"
    ):
        sd.decoder(target).draft(small).build()
    with pytest.raises(TypeError, match="the target's tokenizer is None: give both tokenizers"):
        Translated(small, None)
    with pytest.raises(TypeError, match="model: its tokenizer is None: give both tokenizers"):
        Translated(sd.TableModel.random(4), target.tokenizer)
    alone = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"x": 0, "y": 1}, [])))
    with pytest.raises(ValueError, match="no token is the same text in the vocabularies of 5 and 2 tokens"):
        Translated(sd.HFModel(tiny("llama", vocab_size=2), alone), target.tokenizer)
    wrapped = Translated(small, target.tokenizer)
    with pytest.raises(TypeError, match="a Translated model, which is for drafts"):
        sd.decoder(wrapped)
    with pytest.raises(ValueError, match="taps: activations at another tokenizer's tokens"):
        wrapped.score(wrapped.cache(1, 4), Context.of([[0]]), taps=(0,))
    with pytest.raises(ValueError, match="the context has 1 rows and the cache 2"):
        wrapped.score(wrapped.cache(2, 4), Context.of([[0]]))
    with pytest.raises(ValueError, match="different tokenizers"):  # not the target's
        sd.decoder(target).draft(Translated(small, tokenizers["bytes"])).build()
