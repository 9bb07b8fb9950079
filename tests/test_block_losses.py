"""Losses of heads that correct a block: by hand, the rounds of a correction, and Domino's curriculum in a training."""

from __future__ import annotations

import math

import pytest
import torch
from test_training import text
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import DFlash2, Domino, DSpark, Eagle3, LiLiCorr, XPress
from specdec.lab.head_kinds import KINDS
from specdec.training.anchored import layers_of
from specdec.training.anchored import rounds as passes
from specdec.training.anchored import steps as head_steps
from specdec.training.block_losses import ChoiceLoss, WithBlock
from specdec.training.forward import Blocks, Corrected
from specdec.training.losses import ABSENT, ByDepth, CombinedLoss, HardLoss, LKLoss, MixedLoss
from specdec.training.states import target_states
from specdec.training.train import Settings, train
from specdec.training.validation import Judge

SMALL = {"blocks": 1, "block_size": 5}
CORRECTED = {
    "dflash2": (DFlash2, {**SMALL, "rank": 8, "conv_group": 4, "top_k": 5}),
    "dspark": (DSpark, {**SMALL, "block_size": 4, "rank": 8, "confidence": False}),
    "domino": (Domino, {**SMALL, "block_size": 4, "rank": 8, "state": 12}),
    "lilicorr": (LiLiCorr, {**SMALL, "inner": 16, "heads": 2, "factors": 8, "top_k": 5}),
    "xpress": (XPress, {**SMALL, "rank": 8}),
    "xpress, few ids": (XPress, {**SMALL, "rank": 8, "own_head": True, "vocabulary": range(0, 97, 2)}),
}
LAST = {"dspark": "markov_head.markov_w2", "domino": "embed_proj.2", "xpress": "refiner_head.readout"}
"""The last matrices of corrections that are added to a block's logits."""


def made(name, target, seed=1):
    kind, settings = CORRECTED[name]
    head = kind.from_target(target, (1, 2, "final"), seed=seed, **settings)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    return head


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=3).float()


def drawn(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("prefix", [False, True])
def test_the_loss_of_a_choice_by_hand(prefix):
    """Against a loop over the positions, of which some lack the text among their candidates and some do not count."""
    logits, block, target = (drawn(2, 3, 4, 9, seed=seed) for seed in range(3))
    best = block.topk(4).indices
    tokens = best[..., 1].clone()
    tokens[0, 0, 2] = block[0, 0, 2].argmin()
    tokens[1, 1, 0] = block[1, 1, 0].argmin()
    tokens[1, 2, 3] = ABSENT
    kept = torch.ones(2, 3, 4, dtype=torch.bool)
    kept[0, 2, 1:] = False
    weights = {"hard": 0.5, "penalty": 0.7, "margin": 0.3, "gap": 1.5}
    total, count = 0.0, 0
    for b in range(2):
        for a in range(3):
            for n in range(4):
                candidates = best[b, a, n].tolist()
                lacking = [int(tokens[b, a, m]) not in best[b, a, m].tolist() for m in range(n + 1)]
                counts = (
                    kept[b, a].all() and not any(lacking) if prefix else kept[b, a, n] and not lacking[-1]
                )
                if not counts:
                    continue
                mine = candidates.index(int(tokens[b, a, n]))
                scores = [float(logits[b, a, n, c]) for c in candidates]
                norm = math.log(sum(map(math.exp, scores)))
                law = [math.exp(score - norm) for score in scores]
                gaps = [
                    max(0.0, float(target[b, a, n, candidates[mine]] - target[b, a, n, c]))
                    for c in candidates
                ]
                lead = scores[mine] - max(score for i, score in enumerate(scores) if i != mine)
                total -= 0.5 * math.log(law[mine])
                total += 0.7 * sum(q * gap for q, gap in zip(law, gaps)) + 0.3 * max(0.0, 1.5 - lead)
                count += 1
    assert count == (13 if prefix else 18)
    loss = ChoiceLoss(4, prefix=prefix, **weights)
    assert float(loss(logits, target, tokens, block, kept)) == pytest.approx(total / count, rel=1e-9)
    assert (loss.needs_target, ChoiceLoss(4).needs_target) == (True, False)


def test_lk_losses_by_hand():
    logits, target = drawn(5, 7), drawn(5, 7, seed=1)
    p, q = target.softmax(-1), logits.softmax(-1)
    a, kl = p.minimum(q).sum(-1), (p * (p / q).log()).sum(-1)
    kept = torch.tensor([True, False, True, True, False])
    w = (-3 * a).exp()
    said = LKLoss()(logits, target, torch.zeros(5), kept)
    torch.testing.assert_close(said, (w * kl + (1 - w) * (1 - a))[kept].mean())
    torch.testing.assert_close(LKLoss(None)(logits, target, torch.zeros(5)), -a.log().mean())
    # Where almost nothing is accepted, the gradient is that of -log q of the target's token.
    far = torch.tensor([[0.0, 40.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (steep,) = torch.autograd.grad(
        LKLoss(None)(far, torch.tensor([[90.0, 0, 0]], dtype=torch.float64), torch.zeros(1)), far
    )
    torch.testing.assert_close(steep, torch.tensor([[-1.0, 1, 0]], dtype=torch.float64))
    # No gradient flows through the weight.
    q = logits.clone().requires_grad_()
    (mine,) = torch.autograd.grad(LKLoss()(q, target, torch.zeros(5)), q)
    other = logits.clone().requires_grad_()
    law = other.softmax(-1)
    value = (w * (p * (p / law).log()).sum(-1) + (1 - w) * (1 - p.minimum(law).sum(-1))).mean()
    torch.testing.assert_close(mine, torch.autograd.grad(value, other)[0])


def test_the_terms_of_a_loss_with_its_block():
    logits, block, target = (drawn(2, 3, 4, 9, seed=seed) for seed in range(3))
    again, tokens = drawn(2, 2, 3, 4, 9, seed=4), torch.randint(9, (2, 3, 4))
    one, two = ByDepth(MixedLoss(), 0.5), ByDepth(HardLoss(), 0.7)
    a, b = float(one(logits, target, tokens)), float(two(block, target, tokens))
    beside = WithBlock(one, two, 0.6)
    assert float(beside(logits, target, tokens, block=block)) == pytest.approx(a + 0.6 * b)
    fading = WithBlock(one, two, 0.8, fades=True)
    for progress, share in ((0.0, 0.8), (0.25, 0.6), (1.0, 0.0)):
        said = fading(logits, target, tokens, block=block, progress=torch.tensor(progress))
        assert float(said) == pytest.approx((1 - share) * a + share * b)
    turns = WithBlock(one, two, 0.6, rounds=0.3)
    more = sum(float(one(x, target, tokens)) for x in again) / 2
    assert float(turns(logits, target, tokens, block=block, rounds=again)) == pytest.approx(
        a + 0.6 * b + 0.3 * more
    )
    assert (beside.reads, fading.reads, turns.reads) == (
        ("block",),
        ("block", "progress"),
        ("block", "rounds"),
    )
    choice = WithBlock(ChoiceLoss(4), two)
    found = float(choice(logits, target, tokens, block=block))
    assert found == pytest.approx(float(ChoiceLoss(4)(logits, target, tokens, block)) + b)
    assert (choice.reads, choice.needs_target, beside.needs_target) == (("block",), False, True)
    sure = WithBlock(ByDepth(CombinedLoss(1, confidence=1)), two)
    assert sure.reads == ("confidence", "accepted", "block")
    given = {"confidence": tokens.double(), "accepted": None}
    alone = float(ByDepth(CombinedLoss(1, confidence=1))(logits, target, tokens, **given))
    assert float(sure(logits, target, tokens, block=block, **given)) == pytest.approx(alone + b)


@pytest.mark.parametrize("name", CORRECTED)
@torch.no_grad()
def test_a_block_is_known_before_it_is_corrected(name, target):
    """Where the last matrix of a correction is 0, nothing is corrected, and each step gives the block's own logits."""
    head, tokens = made(name, target), text(2, 20)
    batch = target_states(target, tokens, [1, 2])
    out = Corrected(3)(head, batch)
    assert out.block.shape == out.logits.shape
    assert Blocks(3)(head, batch).block is None
    for one in head_steps(head, tokens, layers_of(head, batch), 3, out.at[..., 0]):
        torch.testing.assert_close(head.uncorrected(one.memo)[..., :3, :], out.block)
    assert not torch.allclose(out.logits[..., 2, :], out.block[..., 2, :], atol=1e-3)
    kind = name.split(",")[0]
    if kind == "dflash2":
        head.candidate_selector.successor_codebook.zero_()
    elif kind in LAST:
        head.get_submodule(LAST[kind]).weight.zero_()
    else:
        return  # the scores of a lattice replace the logits of its candidates
    torch.testing.assert_close(Corrected(3)(head.train(), batch).logits, out.block)


@pytest.mark.parametrize("name", [name for name in CORRECTED if name != "lilicorr"])
@torch.no_grad()
def test_rounds_end_at_the_chain_that_is_drafted(name, target):
    """Each round adds a depth whose logits are those of the greedy chain: the first begins with the block's own tokens."""
    head, tokens, k = made(name, target).train(), text(2, 14), 4
    batch = target_states(target, tokens, [1, 2])
    at = torch.tensor([[3, 6]]).expand(2, -1)
    said = list(head_steps(head, tokens, layers_of(head, batch), k, at))
    memo, chain, greedy = said[0].memo, [said[0].logits], []
    for n in range(1, k):
        best = chain[-1].argmax(-1)
        greedy.append(best if head.d2t is None else head.ids[best])
        logits, memo = head.step(n, memo, greedy[-1], None)
        chain.append(logits)
    drafted = torch.stack(chain, 2)
    for r, one in enumerate(passes(head, said, k), 1):
        torch.testing.assert_close(one[..., :r, :], drafted[..., :r, :])
    # The steps of training read the text in place of these tokens.
    assert not torch.allclose(drafted, torch.stack([one.logits for one in said], 2))
    out = Corrected(k, rounds=2)(head, batch)
    assert [one.shape for one in out.rounds] == 2 * [out.logits.shape]


@pytest.mark.parametrize("kind", ["dflash2", "domino", "lilicorr", "xpress"])
def test_the_authors_loss_trains_the_block_and_its_correction(kind, target):
    head = KINDS[kind].new(target, k=3, blocks=1)
    loss, forward = KINDS[kind].loss("own", head), KINDS[kind].forward("own", head, 3, 6)
    data, rows = text(24), []
    before = {name: p.clone() for name, p in head.named_parameters()}
    settings = Settings(12, 8, muon_lr=0.02, adam_lr=0.02, validate_every=4, precision=torch.float32)
    report = train(
        head, target, data, loss=loss, forward=forward, settings=settings, validation=data, progress=False,
        on_step=rows.append,
    )  # fmt: skip
    same = [name for name, p in head.named_parameters() if torch.equal(p, before[name])]
    assert same == []
    assert report.curve[-1]["validation_loss"] < report.curve[0]["validation_loss"]
    assert math.isfinite(rows[-1]["loss"])
    decoder = sd.decoder(target).greedy().draft(sd.drafts.Head(head), 3).build()
    assert (
        decoder.generate([1, 2, 3], 8).ids == sd.decoder(target).greedy().build().generate([1, 2, 3], 8).ids
    )


def test_a_curriculum_begins_with_the_block_and_ends_without(target):
    """In a training of four steps of rate 0, the loss of each is the share of its time."""
    head = made("domino", target)
    each, rows = ByDepth(HardLoss()), []
    settings = Settings(4, 4, muon_lr=0, adam_lr=0, precision=torch.float32)
    data = text(4)
    train(
        head, target, data, loss=WithBlock(each, each, fades=True), forward=Corrected(3), settings=settings, progress=False,
        on_step=rows.append,
    )  # fmt: skip
    batch = target_states(target, data, [1, 2])
    with torch.no_grad():
        out = Corrected(3)(head, batch, [None] * 4)
    a, b = (
        float(Judge(head, each, head.ends.logits)(out._replace(logits=x), batch))
        for x in (out.logits, out.block)
    )
    assert abs(a - b) > 1e-3
    for n, row in enumerate(rows):
        assert row["loss"] == pytest.approx((n * a + (4 - n) * b) / 4, abs=1e-4)


def test_the_losses_of_the_authors(target):
    """Their weights, as the docs have them."""
    text = ByDepth(HardLoss(), math.exp(-1 / 4))
    each = ByDepth(CombinedLoss(0.1, 0, 0.9), math.exp(-1 / 4))
    wanted = {
        "domino": WithBlock(text, text, fades=True),
        "dflash2": WithBlock(ChoiceLoss(16), text),
        "lilicorr": WithBlock(ChoiceLoss(8, 0.25, 0.25, prefix=True), text),
        "xpress": WithBlock(each, each, 0.6, rounds=0.3),
    }
    for name, loss in wanted.items():
        kind, head = KINDS[name], KINDS[name].new(target)
        assert kind.loss("own", head) == loss
        rounds = 3 if name == "xpress" else 0
        assert kind.forward("own", head, 7, 9) == Corrected(7, 9, rounds)
        assert kind.forward("mixed", head, 7, 9) == Blocks(7, 9)
        assert kind.loss("mixed", head) == ByDepth(MixedLoss(0.5), math.exp(-1 / 4))


@torch.no_grad()
def test_losses_of_blocks_with_masked_text_and_few_ids(target):
    """Through ``Judge``: the same numbers from the tokens of the head's own ids, and from the tokens that count."""
    from specdec.training.sources import Masked, source_of

    head, tokens = made("xpress, few ids", target).train(), text(4, 20)
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.8
    batch = source_of(Masked(tokens, mask), target, [1, 2]).take(range(4))
    out = Corrected(3, rounds=2)(head, batch)
    each, choice = ByDepth(HardLoss(), 0.5), ChoiceLoss(40, 0.7, 0.4, prefix=True)
    ids, rows = head.ids.tolist(), torch.arange(4)[:, None, None]
    said = tokens[rows, out.at + 1]
    kept = mask[rows, out.at + 1].long().cumprod(-1).bool()
    mine = torch.tensor(
        [[[ids.index(t) if t in ids else ABSENT for t in b] for b in a] for a in said.tolist()]
    )
    mine = mine.where(kept, ABSENT)
    law = target(tokens[:, :-1]).logits[rows, out.at][..., head.ids].float()
    logits, block, *again = (x.float() for x in (out.logits, out.block, *out.rounds))
    for loss in (
        WithBlock(each, each, 0.6, rounds=0.3),
        WithBlock(choice, each),
        WithBlock(each, each, fades=True),
    ):
        more = {"rounds": again} if "rounds" in loss.reads else {}
        more |= {"progress": 0.25} if loss.fades else {}
        found = Judge(head, loss, head.ends.logits)(out, batch, 0.25)
        torch.testing.assert_close(found, loss(logits, law, mine, block=block, kept=kept, **more))
    assert 0 < int(kept.all(-1).sum()) < kept[..., 0].numel()
    assert float(choice(logits, law, mine, block, kept)) != float(choice(logits, law, mine, block))


def test_the_forward_follows_from_the_loss(target):
    head, each = made("xpress", target), ByDepth(HardLoss())
    few = Settings(2, 4, precision=torch.float32)
    train(head, target, text(8), loss=WithBlock(each, each, rounds=0.3), settings=few, progress=False)
    with pytest.raises(ValueError, match=r"which reads rounds: give forward=Corrected\(\.\.\., rounds=3\)"):
        train(
            head, target, text(), loss=WithBlock(each, each, rounds=0.3), forward=Corrected(3), settings=few
        )
    with pytest.raises(
        ValueError, match=r"reads a block before it is corrected, or rounds: give forward=Corrected"
    ):
        train(head, target, text(), loss=WithBlock(each, each), forward=Blocks(3), settings=few)
    lattice = made("lilicorr", target)
    with pytest.raises(ValueError, match="is 8, and this LiLiCorr chooses among 5 candidates"):
        train(lattice, target, text(), loss=WithBlock(ChoiceLoss(8), each), settings=few)
    with pytest.raises(ValueError, match="is 8, and this XPress has no candidates"):
        train(head, target, text(), loss=ChoiceLoss(8), settings=few)


def test_bad_input(target):
    few, each = Settings(1, 2), ByDepth(HardLoss())
    eagle, head = Eagle3.from_target(target, own_head=False), made("xpress", target)
    with pytest.raises(ValueError, match="draft is a Eagle3, which has no block of logits that it corrects"):
        train(eagle, target, text(), loss=WithBlock(each, each), settings=few)
    with pytest.raises(ValueError, match="draft is a Eagle3, which has no block of logits that it corrects"):
        train(eagle, target, text(), forward=Corrected(3), settings=few)
    x = torch.zeros(1, 1, 1, 5)
    with pytest.raises(ValueError, match="reads the logits of a block before it is corrected: give forward"):
        WithBlock(each, each)(x, None, torch.zeros(1, 1, 1).long(), block=None)
    with pytest.raises(ValueError, match="reads rounds: give forward"):
        WithBlock(each, each, rounds=1)(x, None, torch.zeros(1, 1, 1).long(), block=x)
    with pytest.raises(ValueError, match="rounds is -1: give 0 for none"):
        Corrected(3, rounds=-1)
    with pytest.raises(ValueError, match="block reads block, which it does not get here"):
        WithBlock(each, ChoiceLoss(4))
    with pytest.raises(ValueError, match="loss reads progress, which it does not get here"):
        WithBlock(WithBlock(each, each, fades=True), each)
    with pytest.raises(ValueError, match="loss reads confidence, which it does not get here"):
        WithBlock(ByDepth(CombinedLoss(1, confidence=1)), each, rounds=1)

    class Reads:
        reads = ("block",)

        def __call__(self, logits, target_logits, tokens, block):
            return logits.mean()

    with pytest.raises(ValueError, match="loss reads block, which ByDepth does not divide by depth"):
        ByDepth(Reads())
    Reads.reads, head_of = ("rounds",), made("xpress", target)
    with pytest.raises(ValueError, match="which reads a block before it is corrected, or rounds"):
        train(head_of, target, text(), loss=Reads(), forward=Blocks(3), settings=few)
    Reads.reads = ("kept",)
    with pytest.raises(ValueError, match="give a tuple of some of confidence, accepted, block"):
        train(head, target, text(), loss=Reads(), settings=few)
    for wrong in (WithBlock(each, each), ChoiceLoss(4)):
        with pytest.raises(ValueError, match="takes whole blocks: give it without ByDepth"):
            ByDepth(wrong)
    with pytest.raises(ValueError, match="weight is -1: a weight is at least 0"):
        WithBlock(each, each, -1)
    with pytest.raises(ValueError, match="weight is 2: a share that fades is at most 1"):
        WithBlock(each, each, 2, fades=True)
    with pytest.raises(ValueError, match="top_k is 0: give the head's number of candidates"):
        ChoiceLoss(0)
    with pytest.raises(ValueError, match=r"give weights of at least 0, one of them above"):
        ChoiceLoss(4, 0)
    with pytest.raises(ValueError, match="eta is -1: give a number of at least 0"):
        LKLoss(-1)
