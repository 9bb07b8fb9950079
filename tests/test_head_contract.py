"""The contract of draft heads. A new head is tested by a line in ``MADE``.

Besides the library's own there are two of the reader's own here: keys and values that are injected under a full block, and none at all.
"""

from __future__ import annotations

import pytest
import torch
from test_heads import observed, shake
from tiny import tiny
from torch import nn

import specdec as sd
from specdec.audit.certify import certify
from specdec.drafts.heads import (
    MTP,
    DFlash,
    DFlash2,
    Domino,
    DSpark,
    DynamicTree,
    Eagle3,
    Head,
    HeadModel,
    LiLiCorr,
    Medusa,
    Pard2,
    PEagle,
    XPress,
)
from specdec.drafts.heads.layers import Attention, Rotary, config_like
from specdec.drafts.spire import SpireModel
from specdec.masks import streaming
from specdec.training.anchored import blocks, layers_of, steps
from specdec.training.passes import k_pass
from specdec.training.states import target_states


class Injected(HeadModel):
    """A block of slots that see the projected features of the text and each other, in both directions; slot n predicts token n + 1."""

    longest, marginal = 4, True

    def __init__(self, config, taps, **shared):
        super().__init__(config, taps, **shared)
        self.fc = nn.Linear(len(self.taps) * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([Attention(config)])
        self.rotary = Rotary(config)

    def read(self, features, go):
        x = self.fc(torch.cat([features.layers[tap] for tap in self.taps], -1))
        go.store(0, *self.layers[0].keys_values(x, self.rotary(go.positions, x)))

    def step(self, n, memo, token, at):
        if n == 0:
            go = at.slots(0, self.longest, full=True)
            masks = token[..., None].new_zeros(*token.shape, self.longest - 1)
            x = self.embed(torch.cat([token[..., None], masks], -1))
            memo = x + self.layers[0](x, self.rotary(go.positions, x), 0, go)
        return self.logits(memo[..., n, :]), memo


class Bare(HeadModel):
    """One matrix for each of the next tokens, on the final norm's output; it has no keys and values."""

    kv_layers, longest, marginal = 0, 3, True

    def __init__(self, config, taps, **shared):
        super().__init__(config, taps, **shared)
        self.heads = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))

    def read(self, features, go):
        return features.layers["final"]

    def step(self, n, memo, token, at):
        return self.logits(memo + self.heads[n](memo)), memo


class AsHead(HeadModel):
    """SPIRe's draft over the contract: features are injected, and each step leaves memory vectors in place of its own keys and values."""

    def __init__(self, config, taps, spire):
        super().__init__(config, taps)
        self.spire, self.kv_layers = spire, len(taps)

    def read(self, features, go):
        rotary = self.spire.rotary(go.positions)
        for i, tap in enumerate(self.taps):
            go.store(i, *self.spire.keys_values(i, features.layers[tap], rotary))

    def step(self, n, memo, token, at):
        go, x = at.slots(n), self.spire.embed(token)
        rotary = self.spire.rotary(go.positions)
        activations = [x]
        for i in range(self.kv_layers):

            def attend(query, key, value, i=i):
                return go(i, query, key, value).unflatten(-1, query.shape[-2:])

            activations.append(x := self.spire.run(i, x, rotary, attend)[0])
        for i, vector in enumerate(self.spire.memory(activations)):
            go.store(i, *self.spire.keys_values(i, vector, rotary))
        return self.spire.logits(x), None


def makes(cls, taps=(0, 2), **settings):
    return lambda target, **shared: shake(cls.from_target(target, taps, **settings, **shared))


# name -> a head for a target; ``shared`` are arguments of every head
MADE = {
    "eagle3": makes(Eagle3, (0, 2, "final"), blocks=2),
    "injected": makes(Injected),
    "injected, window": makes(Injected, mask=streaming(5, 1)),
    "bare": makes(Bare, ("final",)),
    "dflash": makes(DFlash, blocks=2, block_size=4),
    "dspark": makes(DSpark, blocks=2, block_size=3, rank=5, markov="rnn"),
    "peagle": makes(PEagle, (0, 2, "final"), blocks=2, depth=4),
    "dflash2": makes(DFlash2, blocks=2, block_size=4, rank=5, top_k=6),
    "dflash, sliding": makes(DFlash, blocks=3, block_size=4, windows=[3, None, 6]),
    "mtp": makes(MTP, ("final",)),
    "medusa": makes(Medusa, ("final",), heads=3, blocks=2),
    "domino": makes(Domino, blocks=2, block_size=3, rank=4, state=6),
    "lilicorr": makes(LiLiCorr, blocks=2, block_size=4, top_k=6, heads=4, factors=5),
    "xpress": makes(XPress, blocks=2, block_size=4, rank=5),
    "jetspec": makes(DFlash, blocks=2, block_size=4, causal=True),
    "pard2": makes(Pard2, blocks=2, depth=4, scale=0.5, feature_bias=True),
}
OTHERS = {
    "dflash2, anchor first, window": makes(
        DFlash2,
        blocks=1,
        block_size=3,
        anchor_first=True,
        conv_size=3,
        conv_group=8,
        rank=5,
        mask=streaming(5, 1),
    ),
    "peagle, window": makes(
        PEagle, blocks=1, depth=3, norm_before_fc=True, fc_norm=True, mask=streaming(5, 1)
    ),
    "peagle, mask token": makes(PEagle, blocks=1, depth=3, mask_token=96, own_embedding=True),
    "dflash, anchor first": makes(DFlash, blocks=1, block_size=3, anchor_first=True, mask_token=96),
    "dflash, window": makes(DFlash, blocks=2, block_size=5, mask=streaming(5, 1)),
    "dflash, own ends": makes(DFlash, blocks=1, block_size=4, own_embedding=True, own_head=True),
    "mtp, state first, not normed": makes(
        MTP, (3,), hidden_first=True, norm_output=False, head_norms=True, mask=streaming(5, 1)
    ),
    "mtp, own ends": makes(MTP, ("final",), own_embedding=True, own_head=True),
    "medusa, the target's output": makes(Medusa, (2,), heads=4, own_head=False),
    "dspark, vanilla, window": makes(DSpark, blocks=1, block_size=3, rank=4, mask=streaming(5, 1)),
    "dflash, sliding, from slots": makes(
        DFlash, blocks=2, block_size=5, windows=[7, None], windows_from="slot"
    ),
    "dflash, sliding, window": makes(DFlash, blocks=2, block_size=4, windows=[3, None], mask=streaming(5, 1)),
    "dflash2, sliding, both directions": makes(
        DFlash2, blocks=2, block_size=4, rank=5, top_k=6, windows=[4, 9], windows_causal=False
    ),
    "dspark, sliding": makes(DSpark, blocks=2, block_size=3, rank=4, windows=[None, 2]),
    "eagle3, sliding": makes(Eagle3, (0, 2, "final"), blocks=2, windows=[4, None]),
    "eagle3, sliding, window": makes(Eagle3, blocks=2, windows=[4, 2], mask=streaming(5, 1)),
    "peagle, sliding": makes(PEagle, blocks=2, depth=4, windows=[None, 5]),
    "lilicorr, anchor first, convolutions, window": makes(
        LiLiCorr,
        blocks=1,
        block_size=3,
        anchor_first=True,
        top_k=50,
        inner=6,
        heads=3,
        layers=1,
        factors=4,
        conv_size=2,
        conv_group=8,
        mask=streaming(5, 1),
    ),
    "lilicorr, sliding": makes(
        LiLiCorr, blocks=2, block_size=4, top_k=1, heads=2, factors=3, windows=[3, None]
    ),
    "xpress, anchor first, window": makes(
        XPress, blocks=1, block_size=3, anchor_first=True, rank=4, mlp_ratio=1, mask=streaming(5, 1)
    ),
    "domino, all steps corrected, window": makes(
        Domino, blocks=1, block_size=4, anchor_first=False, rank=4, state=6, prefix=0, mask=streaming(5, 1)
    ),
    "domino, sliding": makes(Domino, blocks=2, block_size=3, rank=4, state=6, windows=[None, 3]),
    "xpress, sliding": makes(XPress, blocks=2, block_size=4, rank=4, windows=[None, 3]),
    "jetspec, sliding, window": makes(
        DFlash, blocks=2, block_size=4, windows=[None, 3], causal=True, mask=streaming(5, 1)
    ),
    "dspark, causal": makes(DSpark, blocks=2, block_size=4, rank=4, causal=True),
    "dspark, gated": makes(
        DSpark, blocks=1, block_size=4, anchor_first=False, rank=4, markov="gated", confidence=False
    ),
}
every_head = pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
PROMPTS, BUDGETS = [[1, 2, 3], [4], [5] * 90], [20, 12, 14]


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3))


@pytest.mark.parametrize("make", (MADE | OTHERS).values(), ids=(MADE | OTHERS).keys())
@torch.no_grad()
def test_what_was_drafted_live_is_what_the_teacher_forced_forward_gives(target, make):
    head, rounds, compared = make(target, vocabulary=range(0, 97, 2)), [], 0
    decoder = sd.decoder(target).draft(Head(head), 3).build()
    out = decoder.generate(PROMPTS, BUDGETS, seed=0, on_round=rounds.append)
    for row, prompt in enumerate(PROMPTS):
        text, known = torch.tensor([prompt + out.ids[row]]), observed(head, rounds, row)
        for r in rounds[1:]:
            rows = r.context.request.tolist()
            size = int(r.proposal.size[rows.index(row)]) if row in rows else 0
            if size:
                b = rows.index(row)
                anchor = int(r.context.length[b]) - 1
                drafted = torch.cat([text[:, : anchor + 1], r.proposal.tokens[b, :size][None]], 1)
                layers = {tap: x[:, :anchor] for tap, x in known.items()}
                made = head.widened(blocks(head, drafted, layers, size, torch.tensor([[anchor]])))[0, 0]
                torch.testing.assert_close(r.proposal.probs[b, :size], made.softmax(-1), rtol=0, atol=1e-10)
                compared += size
    assert compared > 50


@torch.no_grad()
def test_spire_is_a_head(target):
    """The same proposals as ``drafts.Spire``, live, and the same logits as its k passes."""
    spire = SpireModel.from_target(target, 2, sinks=1, window=6)
    nn.init.normal_(spire.memory.weights)
    head = AsHead(config_like(target.model), spire.layers, spire)
    head.mask = spire.mask
    seen = []
    for draft in (sd.drafts.Spire(spire), Head(head)):
        decoder = sd.decoder(target).draft(draft, 3).build()
        seen.append([])
        decoder.generate(PROMPTS, BUDGETS, seed=0, on_round=seen[-1].append)
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one.proposal.size, other.proposal.size)
        if one.proposal.nodes:
            live = torch.arange(one.proposal.nodes) < one.proposal.size[:, None]
            assert torch.equal(one.proposal.tokens[live], other.proposal.tokens[live])
            torch.testing.assert_close(
                one.proposal.probs[live], other.proposal.probs[live], rtol=0, atol=1e-10
            )
    tokens = torch.randint(0, 97, (2, 25), generator=torch.Generator().manual_seed(0))
    inputs = target_states(target.model, tokens, spire.layers).inputs
    made = blocks(head, tokens, inputs, 3, torch.arange(3, 22, 3).expand(2, -1))
    expected = k_pass(spire, tokens[:, :-1], inputs, 3).view(2, 8, 3, -1)
    torch.testing.assert_close(made, expected[:, 1:], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "greedy"),
    [
        pytest.param(make, greedy, id=f"{name}-{greedy}", marks=() if (i + greedy) % 2 else pytest.mark.slow)
        for i, (name, make) in enumerate(MADE.items())
        for greedy in (True, False)
    ],
)
@pytest.mark.slow
def test_output_is_the_targets(target, make, greedy):
    base = sd.decoder(target).verifier(sd.Coupled())
    base = base.greedy() if greedy else base.sampling(temperature=0.7)
    prompts = [[1, 2, 3], [4], [5] * 20]
    plain = base.build().generate(prompts, BUDGETS, seed=3).ids
    head = make(target)
    for executor in (sd.executors.Pipelined(3), sd.executors.Optimistic(threads=False)):
        decoder = base.draft(Head(head), 3).executor(executor).build()
        assert decoder.generate(prompts, BUDGETS, seed=3).ids == plain
    tree = base.draft(Head(head, DynamicTree(3, 3, 6))).build()  # of marginals, too
    streamed = [[], [], []]
    for chunk in tree.stream(prompts, BUDGETS, seed=3):
        streamed[chunk.row] += chunk.ids
    assert streamed == plain


@every_head
@pytest.mark.slow
def test_the_output_has_the_targets_distribution_exactly(make):
    target = sd.HFModel(tiny("llama", seed=4, vocab_size=3))
    decoder = sd.decoder(target).draft(Head(make(target, vocabulary=[0, 2])), length=2).build()
    found = certify(decoder, [[0], [2, 1, 2]], [4, 3])
    assert found.lossless, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DFlash2, LiLiCorr])
def test_a_choice_among_some_tokens_is_exact(kind):
    """Some tokens have q = 0."""
    target = sd.HFModel(tiny("llama", seed=4, vocab_size=4))
    head = makes(kind, blocks=1, block_size=3, top_k=2)(target)
    found = certify(sd.decoder(target).draft(Head(head), length=2).build(), [[0], [2, 1, 3]], [4, 3])
    assert found.lossless, found


@pytest.mark.parametrize(
    "make", [MADE["injected, window"], lambda target: shake(Eagle3.from_target(target, (0, 2)))]
)
def test_anchors_in_any_number_and_order_give_the_same_logits(target, make):
    head = make(target)
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    layers = {
        tap: torch.randn(2, 19, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(tap))
        for tap in head.taps
    }
    with torch.no_grad():
        every = blocks(head, tokens, layers, 3)
        assert every.shape == (2, 16, 3, 97)
        some = torch.tensor([[9, 2], [16, 1]])
        chosen = blocks(head, tokens, layers, 3, some)
    torch.testing.assert_close(chosen, every[torch.arange(2)[:, None], some - 1], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="anchors must be positions from 1 to 17"):
        blocks(head, tokens, layers, 3, torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match="anchors must be positions from 1 to 17"):
        blocks(head, tokens, layers, 3, torch.tensor([[18], [1]]))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_oss"])
def test_states_for_training_are_what_the_target_returns_in_decoding(family):
    model = tiny(family)
    target, depth = sd.HFModel(model), model.config.num_hidden_layers
    head = Injected.from_target(target, (0, 1, depth, "final"))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    layers = layers_of(head, target_states(model, tokens, [0, 1, depth]))
    scores = target.score(target.cache(1, 6), sd.Context.of(tokens[:, :-1].tolist()), taps=[0, 1, depth])
    for tap, x in layers.items():
        live = head.ends.final(scores.fed.layers[depth]) if tap == "final" else scores.fed.layers[tap]
        torch.testing.assert_close(x[0], live, rtol=1e-4, atol=1e-5)  # norms compute in float32


@every_head
def test_every_weight_learns(target, make):
    """Teacher-forced training of all anchors lowers the loss, and reaches every weight."""
    head = make(target).train()
    tokens = torch.randint(0, 97, (4, 24), generator=torch.Generator().manual_seed(0))
    layers = layers_of(
        head, target_states(target.model, tokens, [tap for tap in head.taps if tap != "final"])
    )
    optimiser, losses = torch.optim.Adam(head.parameters(), 0.01), []
    for _ in range(8):
        made = list(steps(head, tokens, layers, 3))
        logits = torch.stack([one.logits for one in made], 2)
        wanted = tokens.unfold(1, 3, 1)[:, 2:]  # [B, A, k]
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), wanted.flatten())
        if head.confident:
            loss = loss - sum(nn.functional.logsigmoid(one.confidence).mean() for one in made)
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in head.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    assert all(p.grad is None for p in target.model.parameters())


def test_a_block_longer_than_the_heads_is_refused(target):
    with pytest.raises(ValueError, match=r"path of 4 tokens .* Bare proposes at most 3"):
        sd.decoder(target).draft(Head(MADE["bare"](target)), 4).build()
    assert sd.decoder(target).draft(Head(MADE["bare"](target))).build().length == 3
    with pytest.raises(ValueError, match="k is 4, and this DFlash proposes at most 3 tokens"):
        blocks(MADE["dflash"](target), torch.zeros(1, 9, dtype=torch.long), {}, 4)


def test_a_head_of_the_readers_own_is_saved_and_loaded_by_its_class(target, tmp_path):
    head = MADE["injected, window"](target)
    head.save_pretrained(tmp_path)
    again = Injected.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values()))
    assert again.mask == head.mask
    with pytest.raises(ValueError, match="holds a 'Injected', which is not one of"):
        Head(tmp_path)
    with pytest.raises(ValueError, match="holds a Injected: load it with that class, not with Bare"):
        Bare.from_pretrained(tmp_path)
