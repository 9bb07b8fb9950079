"""Which tokens of chats a draft learns: those that the assistant wrote, in sequences, in blocks, and in losses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from tiny import byte_tokenizer, tiny

from specdec.drafts.heads import DSpark, Eagle3, Medusa
from specdec.lab.assistant import said_and_wrote
from specdec.lab.documents import answered, packed
from specdec.training.forward import Blocks, Drafted, drafted
from specdec.training.losses import ByDepth, CombinedLoss, HardLoss, MixedLoss
from specdec.training.sources import Live, Masked
from specdec.training.states import Batch, States, target_states
from specdec.training.train import Settings, train
from specdec.training.validation import Judge, kept

BASE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s> {% endfor %}"
PROMPT = "{% if add_generation_prompt %}<s>assistant {% endif %}"
# As Qwen3's: only the last answer keeps its reasoning, and has a place for it if it has none.
REASONS = (
    "{% for m in messages %}<s>{{ m.role }} {% set c = m.content %}{% if m.role == 'assistant' %}{% if not loop.last %}"
    "{% set c = c.split('#')[-1] %}{% elif '#' not in c %}()#{% endif %}{% endif %}{{ c }}</s> {% endfor %}"
)
MOVES = (
    "{% set last = messages | map(attribute='role') | list %}{% for m in messages[1:] %}<s>{{ m.role }} {% if m.role == 'user' and "
    "'user' not in last[loop.index + 1:] %}{{ messages[0].content }}{% endif %}{{ m.content }}</s> {% endfor %}"
)
TAGS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "be nice"},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "hm#no"},
    {"role": "user", "content": "no?"},
    {"role": "assistant", "content": "yes"},
]


def chatty(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "wanted"),
    {
        "a prompt": (BASE + PROMPT, "hm#no</s>yes</s>"),
        "none": (BASE, "hm#no</s>yes</s>"),
        "reasoning": (REASONS + PROMPT, "no</s>()#yes</s>"),
        "reasoning, begun": (REASONS + PROMPT.replace("assistant ", "assistant ()"), "no</s>#yes</s>"),
        # As Mistral's, which puts the system's message before the last of the user's.
        "a system that moves": (MOVES + PROMPT, "hm#no</s>yes</s>"),
        "tags": (TAGS, "hm#no</s>yes</s>"),
    }.values(),
)
def test_what_the_assistant_wrote_is_found(template, wanted):
    tokenizer = chatty(template)
    ids, wrote = said_and_wrote(tokenizer, CHAT)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([token for token, mine in zip(ids, wrote) if mine]) == wanted


def test_where_it_cannot_be_found_all_tokens_are_learnt(monkeypatch):
    strict = chatty(
        BASE + "{% if messages[-1].role != 'assistant' %}{{ raise_exception('answer') }}{% endif %}"
    )
    assert said_and_wrote(strict, CHAT)[1] is None
    # The template has no prompt for an answer, and a mark in the answer is not seen either.
    assert said_and_wrote(chatty(BASE.replace("m.content", "m.content | length")), CHAT)[1] is None
    tokenizer = chatty(BASE + PROMPT)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)  # it does not know where tokens are
    assert said_and_wrote(tokenizer, CHAT)[1] is None
    seen = Counter()
    ((ids, learnt),) = answered(tokenizer, [CHAT], 40, 1, seen)
    assert seen == {"chats": 1, "whole": 1}
    assert learnt[0].tolist() == [False] + [True] * 40
    assert torch.equal(ids, next(packed(tokenizer, [CHAT], 40, 1)))


def test_cut_sequences_keep_their_masks():
    tokenizer, seen = chatty(BASE + PROMPT), Counter()
    long = [{"role": "user", "content": "u" * 60}, {"role": "assistant", "content": "ok"}]
    chats = [CHAT, long, "plain", CHAT, long]
    found = list(answered(tokenizer, chats, 20, 99, seen))
    assert seen == {"chats": 4, "whole": 0}
    every = list(packed(tokenizer, chats, 20, 99))
    ids = [part for part, _ in found]
    assert 0 < len(found) < len(every), "sequences without an answer are left out"
    places = [next(n for n, other in enumerate(every) if torch.equal(part, other)) for part in ids]
    assert places == sorted(places)
    learnt = "".join(tokenizer.decode(part[0, 1:][which[0, 1:]]) for part, which in found)
    assert learnt == "hm#no</s>yes</s>ok</s>plain</s>hm#no</s>yes</s>"
    # No block goes on from an answer to the next chat, which may begin with one.
    plain = chatty("{% for m in messages %}{{ m.content }}{% endfor %}")
    answers = [[{"role": "assistant", "content": "abc"}]] * 3
    ((_, which),) = answered(plain, answers, 8, 1, Counter())
    assert which[0].tolist() == [False, True, True] * 3


@pytest.fixture(scope="module")
def target():
    return tiny("llama", dtype=torch.float32)


def masked_batch(target, layers, seed=0):
    """Texts of 41 tokens, of which two spans are learnt."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 97, (2, 41)))
    mask = torch.zeros(2, 41, dtype=torch.bool)
    mask[0, 5:17] = mask[0, 30:33] = mask[1, 20:40] = True
    return target_states(target, tokens, layers)._replace(mask=mask)


def test_blocks_begin_at_tokens_of_the_mask(target):
    head = Eagle3.from_target(target, own_head=False)
    batch = masked_batch(target, head.taps)
    draws = [np.random.default_rng(n) for n in (0, 1)]
    made = drafted(Blocks(4, 10), head, batch, draws)
    assert made.at.shape == (2, 10, 4)
    for text, at in enumerate(made.at[..., 0] + 1):
        assert batch.mask[text, at].all()
        assert len(set(at.tolist())) == 10
    # Too few: all of them, and others that do not count.
    made = drafted(Blocks(4, 18), head, batch, [np.random.default_rng(n) for n in (0, 1)])
    counts = kept(batch, made)
    assert counts[..., 0].sum(1).tolist() == [15, 18]
    inside = batch.mask[torch.arange(2)[:, None, None], made.at + 1]
    assert not counts[~inside].any()
    assert ((~counts[..., :-1]) <= (~counts[..., 1:])).all(), (
        "a block that left the mask does not count again"
    )
    # Without a mask the draws are the plain ones.
    plain = drafted(
        Blocks(4, 10), head, batch._replace(mask=None), [np.random.default_rng(n) for n in (0, 1)]
    )
    wanted = [np.sort(np.random.default_rng(n).choice(36, 10, replace=False)) + 1 for n in (0, 1)]
    assert plain.at[..., 0].tolist() == np.stack(wanted).tolist()


LOSSES = {
    "mixed": (Eagle3, MixedLoss(0.5), {}),
    "hard": (Eagle3, HardLoss(), {}),
    "own": (DSpark, CombinedLoss(0.1, 0.2, 1.8, 1.0), {"block_size": 4, "rank": 4, "blocks": 1}),
    "reduced": (DSpark, CombinedLoss(0.1, 0.2, 1.8, 1.0), {"block_size": 4, "rank": 4, "blocks": 1, "vocabulary": range(50)}),
    "reduced, hard": (Medusa, HardLoss(), {"vocabulary": range(50), "heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize("which", LOSSES)
def test_tokens_outside_of_the_mask_do_not_change_the_loss(which, target):
    kind, each, settings = LOSSES[which]
    head = kind.from_target(target, **settings)
    forward = Blocks(4, 18)
    batch = masked_batch(target, forward.layers(head))
    judge = Judge(head, ByDepth(each, 0.8), head.of_target.logits)
    made = drafted(forward, head, batch, [np.random.default_rng(n) for n in (0, 1)])
    made = made._replace(logits=made.logits.detach().requires_grad_())
    loss = judge(made, batch)
    counts = kept(batch, made)
    (gradient,) = torch.autograd.grad(loss, made.logits)
    assert not gradient[~counts].any()
    assert gradient[counts].any()
    # What is compared with positions that do not count is replaced.
    outside = ~batch.mask
    tokens = torch.where(outside, (batch.tokens + 7) % 97, batch.tokens)
    final = torch.where(outside[:, 1:, None], torch.randn(batch.final.shape), batch.final)
    assert torch.equal(judge(made, Batch(tokens, {}, final, batch.mask)), loss)
    assert not torch.equal(judge(made, batch._replace(mask=None)), loss)
    # The mean of each depth over the positions that count, with the weights of the depths.
    wanted = 0.0
    for n, weight in enumerate(ByDepth(each, 0.8).of(4)):
        at = counts[..., n]
        one = Drafted(
            *(
                x[..., n : n + 1, :][at][:, None] if x.dim() == 4 else x[..., n : n + 1][at][:, None]
                for x in made
                if x is not None
            )
        )
        texts = torch.arange(2)[:, None].expand_as(at)[at]
        rows = Batch(batch.tokens[texts], {}, batch.final[texts])
        wanted = wanted + weight * Judge(head, ByDepth(each), head.of_target.logits)(one, rows)
    assert torch.allclose(loss, wanted, atol=1e-5)
    whole = judge(made, batch._replace(mask=torch.ones_like(batch.mask)))
    assert torch.allclose(whole, judge(made, batch._replace(mask=None)), atol=1e-5)


def test_validation_counts_whole_blocks_of_the_mask(target):
    head = Eagle3.from_target(target, own_head=False)
    batch = masked_batch(target, head.taps)
    judge = Judge(head, ByDepth(MixedLoss(0.5)), head.of_target.logits)

    def said(mask):
        held = Masked(Live(target, batch.tokens, head.taps), mask)
        return judge.validate(head, held, Blocks(4), 1, head.device, torch.float32)

    found = said(batch.mask)
    made = drafted(Blocks(4), head, batch, None)
    whole = kept(batch, made).all(-1)
    assert whole.sum(1).tolist() == [2, 4]
    at = made.at[whole]  # [M, k]
    texts = torch.arange(2)[:, None].expand_as(whole)[whole][:, None]
    a = judge.accepted(made.logits[whole].float(), head.of_target.logits(batch.final[texts, at]))
    assert found["acceptance_2"] == pytest.approx(float(a[:, 1].mean().detach()), abs=1e-5)
    assert found["tau"] == pytest.approx(float(1 + a.cumprod(-1).sum(-1).mean().detach()), abs=1e-5)
    plain = judge.validate(
        head, Live(target, batch.tokens, head.taps), Blocks(4), 1, head.device, torch.float32
    )
    assert said(torch.ones_like(batch.mask)) == pytest.approx(plain, abs=1e-5)
    with pytest.raises(ValueError, match="no block lies wholly in the tokens"):
        said(torch.arange(41).expand(2, -1) % 4 > 0)


def test_a_training_with_a_mask(target, tmp_path):
    """Stored states serve any mask, and a run does not continue with another one."""
    head = Eagle3.from_target(target)
    batch = masked_batch(target, head.taps)
    loss, settings = ByDepth(MixedLoss(0.5)), Settings(steps=2, batch=2, precision=torch.float32)

    def trained(data, **more):
        fresh = Eagle3.from_target(target)
        train(fresh, target, data, loss=loss, forward=Blocks(4, 8), settings=settings, progress=False, **more)
        return fresh.fc.weight

    states = States.write(tmp_path / "states", target, [batch.tokens], list(head.taps), progress=False)
    live = trained(Masked(batch.tokens, batch.mask), checkpoint=tmp_path / "run.pt")
    assert torch.allclose(live, trained(Masked(states, batch.mask)), atol=2e-2)
    assert not torch.equal(live, trained(batch.tokens))
    for data in (Masked(batch.tokens, ~batch.mask), batch.tokens):
        with pytest.raises(ValueError, match="is of another run: its data is"):
            trained(data, checkpoint=tmp_path / "run.pt")
    for mask in (batch.mask[:1], batch.mask.long()):
        with pytest.raises(ValueError, match="give a bool for each token of the 2 sequences"):
            Masked(batch.tokens, mask)
    with pytest.raises(ValueError, match="mask has 40 tokens a sequence, and the data 41"):
        trained(Masked(batch.tokens, batch.mask[:, 1:]))
    with pytest.raises(ValueError, match="data has ids from"):
        trained(Masked(batch.tokens + 90, batch.mask))
