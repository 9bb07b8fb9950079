"""Heads that propose a block from one pass: against plain references, with DDTree and with a stop before a token is drawn."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from contracts.test_drafts import model_of
from test_head_contract import MADE, makes
from test_heads import PROMPTS, observed, shake, texts
from tiny import tiny
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import specdec as sd
from specdec.audit.certify import certify
from specdec.drafts.heads import (
    Chain,
    DDTree,
    DFlash,
    DFlash2,
    Domino,
    DSpark,
    DynamicTree,
    Eagle3,
    Head,
    LiLiCorr,
    PEagle,
    XPress,
)
from specdec.masks import streaming
from specdec.testing.session import BUDGETS, Session
from specdec.training.anchored import blocks, steps

BLOCK = {
    name: MADE[name]
    for name in ("dflash", "dspark", "peagle", "dflash2", "domino", "lilicorr", "xpress", "jetspec")
}
STOP = Chain(stop=0.5)


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3))


@pytest.fixture(scope="module")
def small():
    return sd.HFModel(tiny("llama", seed=4, vocab_size=3))


def example(head, length=12, seed=0):
    """A text and activations at all its positions."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, head.vocab_size, (1, length), generator=draw)
    return tokens, {
        tap: torch.randn(1, length - 1, 32, dtype=torch.float64, generator=draw) for tap in head.taps
    }


def convolved(weights, name, side, x, normed):
    """DFlash2's convolution, channel by channel; ``x`` itself in heads without."""
    base = weights.get(f"{name}.base_kernel")
    if base is None:
        return x
    delta = (normed @ weights[f"{name}.kernel_projection.weight"].T).unflatten(-1, (2, base.shape[1], -1))
    out, group = torch.zeros_like(x), x.shape[1] // delta.shape[-1]
    for i, c, t in product(range(len(x)), range(x.shape[1]), range(base.shape[1])):
        if i >= t:
            out[i, c] += (base[side, t, c] + delta[i, side, t, c // group]) * x[i - t, c]
    return out


def dflash(head, tokens, layers, a):
    """The outputs of all slots of one block at anchor ``a``, one slot, head and position after the other."""
    weights = dict(head.named_parameters())
    rms = lambda x, name: nn.functional.rms_norm(x, x.shape[-1:], weights[name], 1e-6)  # noqa: E731
    context = torch.cat([layers[tap][0, :a] for tap in head.taps], -1) @ weights["fc.weight"].T
    context = rms(context, "hidden_norm.weight")
    mask_token = head.settings["mask_token"]
    mask = weights["mask_embedding.weight"][0] if mask_token is None else head.embed(torch.tensor(mask_token))
    x = torch.stack([head.embed(tokens[0, a]), *[mask] * (head.block_size - 1)])
    at = torch.arange(a + head.block_size)
    cos, sin = head.rotary.module(x, at[None])
    for n in range(len(head.layers)):
        normed = rms(x, f"layers.{n}.input_layernorm.weight")
        own = convolved(weights, f"layers.{n}.attention_conv", 0, normed, normed)
        both = torch.cat([context, own])

        def of(kind, rows, normed=True, n=n):
            made = (rows @ weights[f"layers.{n}.self_attn.{kind}_proj.weight"].T).unflatten(-1, (-1, 8))
            return rms(made, f"layers.{n}.self_attn.{kind}_norm.weight") if normed else made

        keys, values = of("k", both), of("v", both, normed=False)
        queries = of("q", torch.cat([torch.zeros_like(context), own]))
        queries, keys = (t.transpose(0, 1)[None] for t in (queries, keys))
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        out = []
        for slot in range(head.block_size):
            each = []
            for h in range(4):
                weight = (keys[0, h // 2] @ queries[0, h, a + slot] * 8**-0.5).softmax(-1)
                each.append(weight @ values[:, h // 2])
            out.append(torch.cat(each))
        out = torch.stack(out) @ weights[f"layers.{n}.self_attn.o_proj.weight"].T
        x = x + convolved(weights, f"layers.{n}.attention_conv", 1, out, normed)
        normed = rms(x, f"layers.{n}.post_attention_layernorm.weight")
        gate, up, down = (weights[f"layers.{n}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        own = convolved(weights, f"layers.{n}.mlp_conv", 0, normed, normed)
        out = (nn.functional.silu(own @ gate.T) * (own @ up.T)) @ down.T
        x = x + convolved(weights, f"layers.{n}.mlp_conv", 1, out, normed)
    return rms(x, "norm.weight")


@pytest.mark.parametrize(
    "settings", [{"block_size": 5}, {"block_size": 3, "anchor_first": True, "mask_token": 96}], ids=str
)
@torch.no_grad()
def test_dflash_is_the_papers(target, settings):
    head = makes(DFlash, blocks=2, **settings)(target)
    tokens, layers = example(head)
    k = head.longest
    found = blocks(head, tokens, layers, k, torch.tensor([[7]]))[0, 0]
    expected = head.of_target.logits(dflash(head, tokens, layers, 7))
    torch.testing.assert_close(found, expected[-k:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_dspark_is_deepspecs(target, kind):
    """Logits and confidences of a block, from the outputs of its DFlash and a loop over its tokens."""
    head = makes(DSpark, blocks=1, block_size=4, rank=5, markov=kind)(target)
    tokens, layers = example(head)
    hidden, w = dflash(head, tokens, layers, 6), dict(head.named_parameters())
    state = torch.zeros(5, dtype=torch.float64)
    for k, (logits, said, _) in enumerate(steps(head, tokens, layers, 4, torch.tensor([[6]]))):
        before, h = w["markov_head.markov_w1.weight"][tokens[0, 6 + k]], hidden[k]
        s = before
        if kind == "gated":
            gate = (
                w["markov_head.gate_proj.weight"] @ torch.cat([h, before]) + w["markov_head.gate_proj.bias"]
            )
            s = gate.sigmoid() * before
        if kind == "rnn":
            joint = w["markov_head.joint_proj.weight"] @ torch.cat([state, before, h])
            g, v, o = (joint + w["markov_head.joint_proj.bias"]).split(5)
            state, s = g.sigmoid() * state + (1 - g.sigmoid()) * v.tanh(), o.tanh()
        expected = head.of_target.logits(h) + w["markov_head.markov_w2.weight"] @ s
        torch.testing.assert_close(logits[0, 0], expected, rtol=0, atol=1e-10)
        sure = (
            w["confidence_head.proj.weight"][0] @ torch.cat([h, before]) + w["confidence_head.proj.bias"][0]
        )
        torch.testing.assert_close(said[0, 0], sure, rtol=0, atol=1e-10)


@torch.no_grad()
def test_dflash2_is_the_papers(target):
    """Convolutions channel by channel, and the scores of each slot's candidates one by one."""
    head = makes(DFlash2, blocks=2, block_size=4, conv_size=3, conv_group=8, rank=5, top_k=6)(target)
    tokens, layers = example(head)
    found = blocks(head, tokens, layers, 3, torch.tensor([[7]]))[0, 0]
    hidden, w = dflash(head, tokens, layers, 7)[1:], dict(head.named_parameters())
    expected = torch.full_like(found, float("-inf"))
    for k, h in enumerate(hidden):
        logits = head.of_target.logits(h)
        before = w["candidate_selector.predecessor_codebook"][tokens[0, 7 + k]]
        mixed = before * (w["candidate_selector.hidden_projection.weight"] @ h)
        for b in logits.argsort(descending=True)[:6]:
            expected[k, b] = logits[b] + mixed @ w["candidate_selector.successor_codebook"][b]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    head.train()  # all tokens are candidates, with the same scores
    every = blocks(head, tokens, layers, 3, torch.tensor([[7]]))[0, 0]
    assert every.isfinite().all()
    torch.testing.assert_close(every[found.isfinite()], found[found.isfinite()], rtol=0, atol=1e-10)


def test_a_new_dflash2_begins_as_dflash(target):
    """The convolutions are the identity, so the candidates are those of a DFlash with the same weights."""
    head = DFlash2.from_target(target, (0, 2), blocks=2, block_size=4)
    plain = DFlash.from_target(target, (0, 2), blocks=2, block_size=4)
    mine = head.state_dict()
    plain.load_state_dict({name: mine[name] for name in plain.state_dict()})
    tokens, layers = example(head)
    (one, *_), (two, *_) = (list(steps(h, tokens, layers, 1, torch.tensor([[5]]))) for h in (head, plain))
    torch.testing.assert_close(one.memo.logits[..., 0, :], two.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_domino_is_the_papers(target, first):
    """Against PyTorch's own GRU over the tokens of the block."""
    head = makes(Domino, blocks=2, block_size=4, rank=5, state=7, prefix=1, anchor_first=first)(target)
    tokens, layers = example(head)
    found = blocks(head, tokens, layers, head.longest, torch.tensor([[7]]))[0, 0]
    hidden = dflash(head, tokens, layers, 7)[head.first :]
    gru = nn.GRU(32, 7, bias=False, batch_first=True, dtype=torch.float64)
    mine = head.prefix_gru
    gru.load_state_dict({"weight_ih_l0": mine.of_token.weight, "weight_hh_l0": mine.of_state.weight})
    read = gru(head.embed(tokens[:, 7 : 7 + head.longest]))[0][0]
    correction = head.embed_proj(torch.cat([hidden, read], -1))
    correction[0] = 0
    torch.testing.assert_close(found, head.of_target.logits(hidden) + correction, rtol=0, atol=1e-10)


@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_xpress_is_the_papers(target, first):
    """All slots at once, from the tokens before each, as the refiner is trained."""
    head = makes(XPress, blocks=2, block_size=4, rank=5, mlp_ratio=3, anchor_first=first)(target)
    torch.manual_seed(0)
    torch.nn.init.normal_(head.refiner_head.mix_l)
    tokens, layers = example(head)
    found = blocks(head, tokens, layers, head.longest, torch.tensor([[7]]))[0, 0]
    hidden, w = dflash(head, tokens, layers, 7), dict(head.refiner_head.named_parameters())
    before = tokens[0, 7:11] if first else tokens[0, 6:10]
    parts = (
        hidden @ w["down_h.weight"].T,
        (hidden.mean(0) @ w["down_g.weight"].T).expand(4, -1),
        w["token_embed.weight"][before],
    )
    x = torch.cat(parts, -1) @ w["in_proj.weight"].T
    y = x.clone()
    for j, i, c in product(range(4), range(4), range(5)):
        if i <= j:
            y[j, c] += w["mix_l"][c, j, i] * x[i, c]
    inner = torch.nn.functional.silu(y @ w["mlp_gate.weight"].T) * (y @ w["mlp_up.weight"].T)
    z = y + inner @ w["mlp_down.weight"].T
    expected = head.of_target.logits(hidden) + z @ w["readout.weight"].T
    torch.testing.assert_close(found, expected[head.first :], rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_new_xpress_reads_the_token_before_alone(target):
    """The mixer begins as nothing, so that earlier tokens of the block have no effect."""
    head = XPress.from_target(target, (0, 2), blocks=1, block_size=4)
    tokens, layers = example(head)
    other = tokens.clone()
    other[0, 8] = (other[0, 8] + 1) % 97
    one, two = (blocks(head, t, layers, 3, torch.tensor([[7]]))[0, 0] for t in (tokens, other))
    assert [torch.equal(*pair) for pair in zip(one, two)] == [True, False, True]
    torch.nn.init.normal_(head.refiner_head.mix_l)
    one, two = (blocks(head, t, layers, 3, torch.tensor([[7]]))[0, 0] for t in (tokens, other))
    assert [torch.equal(*pair) for pair in zip(one, two)] == [True, False, False]


@pytest.mark.parametrize("kind", [LiLiCorr, XPress])
@torch.no_grad()
def test_what_a_target_does_to_its_logits_is_not_corrected(kind):
    """These heads were trained on products with the output matrix, without a scale and a soft cap."""
    target = sd.HFModel(tiny("cohere2"))
    head = kind.from_target(target, (0, 1), blocks=1, block_size=4)
    assert head.of_target.scale != 1
    tokens, layers = example(head)
    (one,) = steps(head, tokens, layers, 1, torch.tensor([[7]]))
    hidden = dflash(head, tokens, layers, 7)[1:]
    torch.testing.assert_close(
        one.memo.logits[0, 0], hidden @ head.of_target.output.weight.T, rtol=0, atol=1e-10
    )


@torch.no_grad()
def test_jacobi_iteration_ends_at_the_greedy_chain_of_xpress(target):
    """What engines compute: all slots again from the greedy tokens of the pass before, beginning with the block's own."""
    head = makes(XPress, blocks=2, block_size=5, rank=6)(target)
    torch.manual_seed(0)
    torch.nn.init.normal_(head.refiner_head.mix_l, std=3)
    tokens, layers = example(head)
    a, text = torch.tensor([[7]]), tokens.clone()
    plain = dflash(head, tokens, layers, 7)[1:]
    text[0, 8:12] = head.of_target.logits(plain).argmax(-1)
    passes = []
    for _ in range(4):
        text[0, 8:12] = blocks(head, text, layers, 4, a)[0, 0].argmax(-1)
        passes.append(text[0, 8:12].tolist())
    chain = tokens.clone()
    for n in range(4):
        chain[0, 8 + n] = blocks(head, chain, layers, n + 1, a)[0, 0, n].argmax()
    assert passes[-1] == chain[0, 8:12].tolist()
    assert passes[0] != passes[-1]


@pytest.mark.parametrize("inner", [None, 8])
@torch.no_grad()
def test_lilicorr_is_the_papers(target, inner):
    """Pair by pair: the cosine of one candidate's ``out`` and the next one's ``in``, of a lattice that PyTorch's own attention reads."""
    head = makes(LiLiCorr, blocks=2, block_size=4, top_k=3, inner=inner, heads=4, factors=5, scale=7.0)(
        target
    )
    lattice = head.lilicorr
    torch.manual_seed(0)
    for p in (
        lattice.slot_embedding,
        lattice.rank_embedding,
        lattice.relative_slot_bias,
        lattice.same_slot_bias,
    ):
        torch.nn.init.normal_(p)
    tokens, layers = example(head)
    taps = torch.cat([layers[tap][0, 6] for tap in head.taps])
    anchor = lattice.anchor_norm(lattice.context_proj(head.hidden_norm(head.fc(taps))))
    hidden = dflash(head, tokens, layers, 7)[1:]
    logits = head.of_target.logits(hidden)
    best = logits.argsort(-1, descending=True)[:, :3]
    x = []
    for s, r in product(range(3), range(3)):
        q = logits[s].log_softmax(-1)[best[s]]
        about = torch.stack(
            [q[r], q[r].exp(), q[r] - q[0], torch.tensor(r / 2).double(), torch.tensor(r == 0).double()]
        )
        one = lattice.token_proj(head.embed(best[s, r])) + lattice.pass_hidden_proj(hidden[s])
        one = one + lattice.feature_mlp(lattice.feature_norm(about))
        x.append(one + lattice.slot_embedding[0, 0, s, 0] + lattice.rank_embedding[0, 0, 0, r])
    x, bias = torch.stack(x), torch.zeros(4, 9, 9, dtype=torch.float64)
    for i, j in product(range(9), range(9)):
        bias[:, i, j] = lattice.relative_slot_bias[:, i // 3 - j // 3 + 3]
        if i // 3 == j // 3:
            bias[:, i, j] += lattice.same_slot_bias
    for layer in lattice.layers:
        theirs = torch.nn.MultiheadAttention(x.shape[1], 4, batch_first=True, dtype=torch.float64)
        mine = layer.attn.state_dict()
        theirs.load_state_dict({name.replace("in_proj.", "in_proj_"): t for name, t in mine.items()})
        normed = layer.attn_norm(x)[None]
        x = x + theirs(normed, normed, normed, attn_mask=bias)[0][0]
        x = x + layer.mlp(layer.mlp_norm(x))
    x = lattice.output_norm(x)

    def cosine(one, other):
        return torch.nn.functional.cosine_similarity(one, other, 0)

    factor = [
        torch.nn.functional.silu(lattice.factor_input_proj(torch.cat([one, anchor, one * anchor])))
        for one in x
    ]
    found = blocks(
        head,
        tokens.index_put((torch.tensor([0] * 2), torch.tensor([8, 9])), best[[0, 1], [2, 1]]),
        layers,
        3,
        torch.tensor([[7]]),
    )[0, 0]
    expected = torch.full_like(found, float("-inf"))
    for r in range(3):
        into = [lattice.in_head(factor[3 * s + r]) for s in range(3)]
        outs = lattice.anchor_out_head(anchor), lattice.out_head(factor[2]), lattice.out_head(factor[3 + 1])
        for s in range(3):
            expected[s, best[s, r]] = 7 * cosine(outs[s], into[s])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_lilicorr_in_training_shares_out_what_the_block_gives_to_its_candidates(target):
    head = makes(LiLiCorr, blocks=2, block_size=4, top_k=3, heads=4)(target)
    tokens, layers = example(head)
    found = list(steps(head, tokens, layers, 3, torch.tensor([[7]])))
    best = found[0].memo.candidates[0, 0]
    tokens[0, 8] = best[0, 1]  # a candidate, and a token that is none
    tokens[0, 9] = next(v for v in range(97) if v not in best[1])
    served = [one.logits[0, 0].softmax(-1) for one in steps(head, tokens, layers, 3, torch.tensor([[7]]))]
    trained = [one.logits[0, 0].exp() for one in steps(head.train(), tokens, layers, 3, torch.tensor([[7]]))]
    block = found[0].memo.logits[0, 0].softmax(-1)
    for s in range(3):
        mass = block[s, best[s]].sum()
        torch.testing.assert_close(trained[s][best[s]], served[s][best[s]] * mass, rtol=0, atol=1e-12)
        torch.testing.assert_close(trained[s].sum(), torch.ones((), dtype=torch.float64))
        others = torch.ones(97, dtype=torch.bool).index_fill(0, best[s], False)
        assert torch.equal(trained[s][others].log().isfinite(), torch.ones(94, dtype=torch.bool))
        torch.testing.assert_close(trained[s][others], block[s, others], rtol=0, atol=1e-12)
    # After a token that was no candidate the block's order remains.
    torch.testing.assert_close(
        served[2][best[2]], block[2, best[2]] / block[2, best[2]].sum(), rtol=0, atol=1e-12
    )


@torch.no_grad()
def test_peagle_is_one_causal_pass_over_pairs_and_placeholders(target):
    """Against one pass over the whole sequence: committed pairs, then the placeholders, at successive positions."""
    head, a = BLOCK["peagle"](target), 7
    tokens, layers = example(head)
    taps = torch.cat([layers[tap][:, :a] for tap in head.taps], -1)
    both = torch.cat([head.fused(taps), head.fused(head.mask_hidden).expand(1, 3, -1)], 1)
    mask = head.mask_embedding(head.embed).expand(1, 3, -1)
    out = head.run(both, torch.cat([head.embed(tokens[:, 1 : a + 1]), mask], 1), Causal(a + 3))
    found = blocks(head, tokens, layers, 4, torch.tensor([[a]]))[0, 0]
    torch.testing.assert_close(found, head.logits(head.norm(out))[0, a - 1 :], rtol=0, atol=1e-10)


class Causal:
    """A pass over one whole sequence."""

    def __init__(self, length):
        self.positions, self.kernels = torch.arange(length), {}

    def __call__(self, layer, query, key, value):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
@torch.no_grad()
def test_only_a_marginal_head_ignores_the_tokens_of_its_block(target, make):
    head = make(target)
    tokens, layers = example(head)
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 97
    if isinstance(head, LiLiCorr):  # candidates, which alone have scores
        best = next(steps(head, tokens, layers, 1, torch.tensor([[6]]))).memo.candidates[0, 0]
        tokens[0, 7:10], other[0, 7:10] = best[:, 0], best[:, 1]
    one, two = (blocks(head, t, layers, 3, torch.tensor([[6]]))[0, 0] for t in (tokens, other))
    assert torch.equal(one[0], two[0])
    assert [torch.equal(*pair) for pair in zip(one[1:], two[1:])] == [head.marginal] * 2


@torch.no_grad()
def test_ddtree_has_the_most_probable_prefixes(target):
    """Against all prefixes, of a vocabulary of five ids."""
    head = makes(DFlash, blocks=1, block_size=4, vocabulary=[3, 10, 40, 41, 96])(target)
    rounds = []
    out = (
        sd.decoder(target)
        .draft(Head(head, DDTree(17)), 3)
        .build()
        .generate(PROMPTS[:2], [12, 9], seed=0, on_round=rounds.append)
    )
    compared = 0
    for row, prompt in enumerate(PROMPTS[:2]):
        text, known = prompt + out.ids[row], observed(head, rounds, row)
        for r in rounds[1:]:
            rows = r.context.request.tolist()
            if row not in rows or not int(r.proposal.size[rows.index(row)]):
                continue
            b = rows.index(row)
            anchor, deepest = int(r.context.length[b]) - 1, min(3, int(r.budget[b]))
            layers = {tap: x[:, :anchor] for tap, x in known.items()}
            ids = torch.tensor([[*text[: anchor + 1], 0, 0, 0]])
            law = blocks(head, ids, layers, 3, torch.tensor([[anchor]]))[0, 0].log_softmax(-1)
            every = [
                (sum(float(law[d, c]) for d, c in enumerate(choice)), tuple(head.ids[list(choice)].tolist()))
                for depth in range(1, deepest + 1)
                for choice in product(range(5), repeat=depth)
            ]
            best = [path for _, path in sorted(every, reverse=True)[:17]]
            found = []
            for n in range(int(r.proposal.size[b])):
                parent, token = int(r.proposal.parents[b, n]), int(r.proposal.tokens[b, n])
                found.append((*(found[parent] if parent >= 0 else ()), token))
            assert found == best
            compared += 1
    assert compared > 8


TREES = {
    "dflash, chain": ("dflash", Chain()),
    "dflash, ddtree": ("dflash", DDTree(3)),
    "dspark, stop": ("dspark", STOP),
    "dspark, tree": ("dspark", DynamicTree(2, 2, 3)),
    "jetspec, ddtree": ("jetspec", DDTree(3)),
}


@pytest.mark.parametrize(("name", "tree"), TREES.values(), ids=TREES.keys())
def test_the_output_has_the_targets_distribution_exactly(small, name, tree):
    head = BLOCK[name](small, vocabulary=[0, 2])
    found = certify(sd.decoder(small).draft(Head(head, tree), length=2).build(), [[0], [2, 1, 2]], [4, 3])
    assert found.lossless, found


class Late(Chain):
    """Ends a chain by the confidence after a token: it has seen the token that it drops."""

    def grow(self, head, at, memo, given, context, budget, sampling, rng):
        made = Chain().grow(head, at, memo, given, context, budget, sampling, rng)
        _, memo = head.step(0, memo, given[:, 0], at)
        _, memo = head.step(1, memo, made.tokens[:, 0], at)
        low = head.confidence(1, memo, made.tokens[:, 0]).sigmoid() < self.stop
        size = made.size.where(~low.cpu(), torch.zeros_like(made.size))
        return sd.Proposal(made.tokens, made.parents, size, made.probs, made.provenance)


def test_a_stop_that_has_seen_its_token_is_found(small):
    head = makes(DSpark, blocks=1, block_size=3, rank=5)(small)
    with torch.no_grad():
        head.confidence_head["proj"].weight[:, -5:] *= (
            10  # it depends on the token before more than on anything else
        )
    base = sd.decoder(small)
    right, never, late = (
        certify(base.draft(Head(head, tree), length=1).build(), [[0]], 3)
        for tree in (STOP, Chain(), Late(0.5))
    )
    assert right.lossless
    assert right.branches != never.branches
    assert late.total_variation > 0.01


@torch.no_grad()
def test_a_chain_ends_before_the_first_token_of_low_confidence(target):
    head, rounds, lengths = BLOCK["dspark"](target), [], []
    head.confidence_head["proj"].bias.fill_(-0.5)  # confidences on either side of one half
    base, budgets = sd.decoder(target), [20, 12, 5, 9]
    out = base.draft(Head(head, STOP), 3).build().generate(PROMPTS, budgets, seed=0, on_round=rounds.append)
    for row, prompt in enumerate(PROMPTS):
        text, known = torch.tensor([prompt + out.ids[row]]), observed(head, rounds, row)
        for r in rounds[1:]:
            rows = r.context.request.tolist()
            if row not in rows or not int(r.budget[rows.index(row)]):
                continue
            b = rows.index(row)
            anchor, size = int(r.context.length[b]) - 1, int(r.proposal.size[b])
            asked = min(size + 1, int(r.budget[b]))
            drafted = torch.cat(
                [text[:, : anchor + 1], r.proposal.tokens[b, :size][None], torch.zeros(1, 1).long()], 1
            )
            layers = {tap: x[:, :anchor] for tap, x in known.items()}
            said = [
                float(s.confidence) for s in steps(head, drafted, layers, asked, torch.tensor([[anchor]]))
            ]
            assert all(c >= 0 for c in said[:size])
            assert size == int(r.budget[b]) or said[size] < 0
            lengths.append(size)
    assert set(lengths) == {0, 1, 2, 3}
    assert base.draft(Head(head, Chain(stop=1.0)), 3).build().generate(PROMPTS, 9, seed=0).stats.tau == 1


@pytest.mark.parametrize(("name", "tree"), [("dflash", DDTree(6)), ("dspark", STOP)], ids=["ddtree", "stop"])
def test_ddtree_and_the_stop_keep_the_contract_of_drafts(name, tree):
    """Budgets, parents and sizes, between rounds of other drafts."""
    target = model_of("own target")
    session = Session(Head(BLOCK[name](target), tree), target, sd.Sampling())  # it tests every proposal
    for number, budgets in enumerate([[min(n, 3) for n in row] for row in BUDGETS] * 2):
        session.round(budgets, foreign=number % 3 == 1)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "mixtral"])
def test_output_is_the_targets_for_every_family(family):
    """A chain of every head, with a stop where it has one, and DDTree where it can."""
    target = sd.HFModel(tiny(family))
    heads = [make(target) for make in BLOCK.values()]
    drafts = [Head(head, STOP if head.confident else Chain()) for head in heads]
    drafts += [Head(head, DDTree(5)) for head in heads if head.marginal]
    some = {"length": 3, "prompts": [[1, 2, 3], [5] * 12], "budgets": [7, 4]}
    for greedy in (True, False):
        plain = texts(target, None, greedy, **some)
        assert all(texts(target, draft, greedy, **some) == plain for draft in drafts)


@pytest.mark.parametrize(
    "executor", [sd.executors.Pipelined(3), sd.executors.Optimistic(threads=False)], ids=repr
)
def test_output_is_the_targets_with_a_stop_under_every_executor(target, executor):
    draft = Head(BLOCK["dspark"](target), STOP)
    for greedy in (True, False):
        assert texts(target, draft, greedy, executor, 3) == texts(target, None, greedy)


@pytest.mark.parametrize("name", BLOCK)
def test_the_memory_of_a_window_is_constant(target, name):
    head = BLOCK[name](target, mask=streaming(6, 2))
    sizes = set()
    for capacity in (200, 400):
        context = sd.Context.of([[1, 2]], capacity=capacity)
        sizes.add(Head(head).init(context, None).ring.slots)
    assert len(sizes) == 1
    assert sizes.pop() < 100


@pytest.mark.parametrize("name", BLOCK)
def test_a_head_is_a_folder(target, tmp_path, name):
    head = BLOCK[name](target, mask=streaming(4), vocabulary=range(0, 97, 3))
    head.save_pretrained(tmp_path)
    assert texts(target, tmp_path, False, length=3) == texts(target, Head(head), False, length=3)
    again = type(head).from_pretrained(tmp_path)
    assert again.settings == head.settings
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values()))


def test_the_default_layers_are_z_labs():
    assert DFlash.default_taps(36) == [2, 10, 18, 26, 34]  # 1, 9, 17, 25, 33 counted from 0
    assert DFlash.default_taps(30) == [2, 9, 15, 21, 28]
    assert DFlash.default_taps(4) == [2]
    assert DFlash.default_taps(1) == [1]


def test_bad_settings_are_refused(target):
    with pytest.raises(TypeError, match="DFlash has no argument 'blocksize'"):
        DFlash.from_target(target, blocksize=4)
    with pytest.raises(
        ValueError, match="block_size is 1: a block that predicts a token has at least 2 slots"
    ):
        DFlash.from_target(target, block_size=1)
    with pytest.raises(ValueError, match="mask_token is 97: give an id from 0 to 96"):
        DFlash.from_target(target, mask_token=97)
    with pytest.raises(ValueError, match="mask_token is -1"):
        PEagle.from_target(target, mask_token=-1)
    with pytest.raises(ValueError, match="conv_group is 5: give a divisor of the hidden size, 32"):
        DFlash2.from_target(target, conv_group=5)
    with pytest.raises(ValueError, match="conv_size is 2 and conv_group 0: give both"):
        LiLiCorr.from_target(target, conv_size=2)
    with pytest.raises(
        ValueError, match="conv_size is 2 and conv_group 5: give both, the group a divisor of"
    ):
        LiLiCorr.from_target(target, conv_size=2, conv_group=5)
    with pytest.raises(ValueError, match="heads is 5: give a divisor of the transformer's width, 32"):
        LiLiCorr.from_target(target, heads=5)
    with pytest.raises(ValueError, match="scale is 0: give a finite number above 0"):
        LiLiCorr.from_target(target, scale=0)
    with pytest.raises(ValueError, match="top_k is 0: give at least 1"):
        LiLiCorr.from_target(target, top_k=0)
    with pytest.raises(ValueError, match="state is 0: give at least 1"):
        Domino.from_target(target, state=0)
    with pytest.raises(ValueError, match="prefix is -1: give 0 to correct all steps"):
        Domino.from_target(target, prefix=-1)
    with pytest.raises(ValueError, match="rank is 0: give at least 1"):
        XPress.from_target(target, rank=0)
    with pytest.raises(ValueError, match="depth is 0"):
        PEagle.from_target(target, depth=0)
    with pytest.raises(ValueError, match="markov is 'lstm': give one of 'vanilla', 'gated', 'rnn'"):
        DSpark.from_target(target, markov="lstm")
    with pytest.raises(ValueError, match="rank is 0: give at least 1"):
        DSpark.from_target(target, rank=0)
    with pytest.raises(
        ValueError, match="DDTree takes one distribution for each depth, and those of this Eagle3"
    ):
        Head(Eagle3.from_target(target), DDTree())
    with pytest.raises(ValueError, match=r"stop is 0\.5, and this DFlash estimates no confidence"):
        Head(BLOCK["dflash"](target), STOP)
    with pytest.raises(ValueError, match=r"stop is 1\.5: give a probability"):
        Chain(stop=1.5)
    with pytest.raises(ValueError, match="total is 0"):
        DDTree(0)
    with pytest.raises(ValueError, match=r"path of 4 tokens .* DFlash proposes at most 3"):
        sd.decoder(target).draft(Head(BLOCK["dflash"](target)), 4).build()
    with pytest.raises(RuntimeError, match="no target"):
        shake(DFlash(BLOCK["dflash"](target).config, (0,), blocks=1)).embed(torch.tensor([1]))
