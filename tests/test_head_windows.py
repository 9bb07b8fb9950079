"""Heads whose layers have sliding windows: their logits are those of attention that is written out here."""

from __future__ import annotations

import pytest
import torch
from test_head_contract import BUDGETS, PROMPTS, makes
from tiny import tiny
from torch.nn.functional import rms_norm, silu

import specdec as sd
from specdec.drafts import heads
from specdec.drafts.heads import DFlash, DFlash2, DSpark, DynamicTree, Eagle3, Head, PEagle
from specdec.masks import streaming
from specdec.training.anchored import blocks

TEXT = 20
CLOSE = {"rtol": 0, "atol": 1e-6}  # rotary angles are computed in float32


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3))


# -- attention, written out: every query is a row of a table of what it sees -------------------------------------------------------


def turned(x, positions, theta):
    """Rotary positions of ``x [T, H, D]``."""
    size = x.shape[-1]
    rates = theta ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    cos, sin = (f(positions[:, None] * rates).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def projected(attention, x, positions, config, kinds="kv"):
    """Queries, keys or values of ``x [T, inputs]`` as ``[T, H, D]``."""
    made = []
    for kind in kinds:
        found = getattr(attention, f"{kind}_proj")(x).unflatten(-1, (-1, config.head_dim))
        by = getattr(attention, f"{kind}_norm", None)
        if by is not None:
            found = rms_norm(found, found.shape[-1:], by.weight, config.rms_norm_eps)
        turn = kind != "v"
        made.append(turned(found, positions, config.rope_parameters["rope_theta"]) if turn else found)
    return made


def attended(query, key, value, seen):
    """``[T, Hq * D]`` where query t sees the slots ``seen[t]``."""
    group = query.shape[1] // key.shape[1]
    rows = []
    for t, q in enumerate(query):
        slots = [s for s in range(len(key)) if seen[t][s]]
        some = (x[slots].repeat_interleave(group, 1) for x in (key, value))
        k, v = some
        weights = (torch.einsum("hd,shd->hs", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        rows.append(torch.einsum("hs,shd->hd", weights, v).flatten())
    return torch.stack(rows)


def normed(module, x, config):
    return rms_norm(x, x.shape[-1:], module.weight, config.rms_norm_eps)


def gated(block, x):
    return block.mlp.down_proj(silu(block.mlp.gate_proj(x)) * block.mlp.up_proj(x))


def in_block(head, taps, token, anchor, windows, origin, causal, whole):
    """The logits ``[longest, V]`` of a DFlash block at ``anchor``; ``taps [anchor, n * E]``."""
    c, size = head.config, head.block_size
    context = normed(head.hidden_norm, head.fc(taps), c)
    masks = head.mask_embedding(head.embed).expand(size - 1, -1)
    x = torch.cat([head.embed(token[None]), masks])
    past, own = torch.arange(anchor), anchor + torch.arange(size)
    for block, window in zip(head.layers, windows):
        inner = normed(block.input_layernorm, x, c)
        (query,) = projected(block.self_attn, inner, own, c, "q")
        far, near = projected(block.self_attn, context, past, c), projected(block.self_attn, inner, own, c)
        key, value = (torch.cat(pair) for pair in zip(far, near))
        seen = []
        for q in own.tolist():
            lowest = 0 if window is None else anchor - window if origin == "anchor" else q - window + 1
            highest = q if whole or (causal and window is not None) else anchor + size
            seen.append([p >= lowest for p in past.tolist()] + [p <= highest for p in own.tolist()])
        x = x + block.self_attn.o_proj(attended(query, key, value, seen))
        x = x + gated(block, normed(block.post_attention_layernorm, x, c))
    return head.logits(normed(head.norm, x[head.first :], c))


def texts(head, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (1, TEXT), generator=draw)
    layers = {
        tap: torch.randn(1, TEXT - 1, 32, dtype=torch.float64, generator=draw)
        for tap in dict.fromkeys(head.taps)
    }
    return tokens, layers


WINDOWS = {
    "all alike": {"windows": [5, 5, 5]},
    "mixed": {"windows": [6, None, 3]},
    "mixed, both directions": {"windows": [None, 4, 1], "windows_causal": False},
    "from slots": {"windows": [4, None, 7], "windows_from": "slot"},
    "from slots, both directions": {"windows": [4, 4, None], "windows_from": "slot", "windows_causal": False},
    "causal": {"windows": [None] * 3, "causal": True},
    "causal, mixed": {"windows": [6, None, 3], "causal": True, "windows_causal": False},
}


def wrong(given):
    """Every way to compute another function: a window off by one, the other origin, the other direction, layers in another order, none."""
    sizes, origin, causal, whole = given
    for i, size in enumerate(sizes):
        if size is not None:
            for other in (size - 1, size + 1):
                yield [*sizes[:i], other, *sizes[i + 1 :]], origin, causal, whole
    if None in sizes or not causal:
        yield sizes, origin, causal, not whole
    if any(sizes):
        yield sizes, "slot" if origin == "anchor" else "anchor", causal, whole
        yield [None] * len(sizes), origin, causal, whole
        if not whole:
            yield sizes, origin, not causal, whole
    if len(set(sizes)) > 1:
        yield [*sizes[1:], sizes[0]], origin, causal, whole


@pytest.mark.parametrize("name", WINDOWS)
@torch.no_grad()
def test_logits_of_a_block_are_those_of_attention_written_out(target, name):
    settings = WINDOWS[name]
    head = makes(DFlash, blocks=3, block_size=4, **settings)(target)
    usual = {"windows_from": "anchor", "windows_causal": True, "causal": False}
    given = settings["windows"], *(settings.get(name, value) for name, value in usual.items())
    tokens, layers = texts(head)
    taps = torch.cat([layers[tap][0] for tap in head.taps], -1)
    for anchor in (1, 3, 8, 14):
        ours = blocks(head, tokens, layers, 3, torch.tensor([[anchor]]))[0, 0]
        at = head, taps[:anchor], tokens[0, anchor], anchor
        torch.testing.assert_close(ours, in_block(*at, *given), **CLOSE)
        if anchor >= 8:  # a mistake in any of them would be seen
            assert all((ours - in_block(*at, *other)).abs().max() > 1e-3 for other in wrong(given))


def after_pairs(head, taps, tokens, anchor, k, windows, moving):
    """The logits ``[k, V]`` of EAGLE-3 (or, all at once, of P-EAGLE) at ``anchor``, with the tokens of the text; layer by layer over all pairs."""
    c, count = head.config, anchor
    parallel = isinstance(head, PEagle)
    embedded, features = head.embed(tokens[1 : count + 1]), head.fc(taps[:count])
    kept, outputs = {}, None
    for step in range(1 if parallel else k):
        positions = torch.arange(count) if not step else torch.tensor([anchor + step - 1])
        if parallel:
            positions = torch.arange(anchor + k - 1)
            blank = (
                head.fc(head.mask_hidden[0]).expand(k - 1, -1),
                head.mask_embedding(head.embed).expand(k - 1, -1),
            )
            features, embedded = torch.cat([features, blank[0]]), torch.cat([embedded, blank[1]])
        elif step:
            features, embedded = outputs[-1:], head.embed(tokens[anchor + step])[None]
        x = features
        for i, (block, window) in enumerate(zip(head.layers, windows)):
            inner = normed(block.input_layernorm, embedded if not i else x, c)
            if not i:
                inner = torch.cat([inner, normed(block.hidden_norm, features, c)], -1)
            new = projected(block.self_attn, inner, positions, c)
            key, value = kept[i] = [torch.cat(pair) for pair in zip(kept[i], new)] if i in kept else new
            (query,) = projected(block.self_attn, inner, positions, c, "q")
            seen = []
            for q in positions.tolist():
                end = q if moving or q < anchor else anchor - 1
                lowest = 0 if window is None else end - window + 1
                seen.append([lowest <= p <= q or anchor <= p <= q for p in range(len(key))])
            x = x + block.self_attn.o_proj(attended(query, key, value, seen))
            x = x + gated(block, normed(block.post_attention_layernorm, x, c))
        outputs = x if outputs is None else torch.cat([outputs, x])
    return head.logits(normed(head.norm, outputs[anchor - 1 : anchor - 1 + k], c))


@pytest.mark.parametrize("windows", [[4, 4], [5, None], [None, 4]])
@pytest.mark.parametrize("kind", [Eagle3, PEagle])
@torch.no_grad()
def test_logits_after_pairs_are_those_of_attention_written_out(target, kind, windows):
    more = {"depth": 3} if kind is PEagle else {}
    head = makes(kind, (0, 2), blocks=2, head_norms=True, windows=windows, **more)(target)
    tokens, layers = texts(head)
    taps = torch.cat([layers[tap][0] for tap in head.taps], -1)
    moving = kind is PEagle
    for anchor in (1, 4, 12):
        ours = blocks(head, tokens, layers, 3, torch.tensor([[anchor]]))[0, 0]
        at = head, taps, tokens[0], anchor, 3
        torch.testing.assert_close(ours, after_pairs(*at, windows, moving), **CLOSE)
        if anchor == 12:
            assert (ours - after_pairs(*at, windows, not moving)).abs().max() > 1e-4
            for by in (-1, 1):
                other = [None if size is None else size + by for size in windows]
                assert (ours - after_pairs(*at, other, moving)).abs().max() > 1e-4


# -- what decodes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "mask"),
    [
        ({"windows": [3, 6]}, streaming(6 + 4, 0)),
        ({"windows": [5, 4], "windows_from": "slot"}, streaming(5, 0)),
    ],
)
def test_a_mask_as_wide_as_the_widest_window_changes_nothing(target, settings, mask):
    """It gives the cache a constant size; where a window is counted from the anchor, the block's slots come on top."""
    seen = []
    for given in (None, mask):
        head, rounds = makes(DFlash, blocks=2, block_size=4, mask=given, **settings)(target), []
        decoder = sd.decoder(target).draft(Head(head), 3).build()
        decoder.generate(PROMPTS, BUDGETS, seed=0, on_round=rounds.append)
        seen.append([r.proposal.probs for r in rounds if r.proposal.nodes])
    assert len(seen[0]) > 5
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_trees_of_a_head_with_windows_keep_the_output(target):
    base = sd.decoder(target).greedy()
    plain = base.build().generate([[1, 2, 3], [5] * 20], 14).ids
    for head in (
        makes(Eagle3, blocks=2, windows=[3, None])(target),
        makes(DFlash, blocks=2, block_size=4, windows=[3, None])(target),
    ):
        out = base.draft(Head(head, DynamicTree(3, 3, 6)), 3).build().generate([[1, 2, 3], [5] * 20], 14)
        assert out.ids == plain


@pytest.mark.parametrize("kind", [DFlash, DFlash2, DSpark, Eagle3, PEagle])
def test_windows_are_saved_and_loaded(target, tmp_path, kind):
    more = {} if kind in (Eagle3, PEagle) else {"windows_from": "slot", "windows_causal": False}
    head = makes(kind, blocks=2, windows=(17, None), **more)(target)
    head.save_pretrained(tmp_path)
    again = heads.load(tmp_path, target)
    assert again.settings == head.settings
    assert again.sights == head.sights
    assert again.sights[0] is not None
    assert again.sights[1] is None
    tokens, layers = texts(head)
    torch.testing.assert_close(*(blocks(one, tokens, layers, 2) for one in (head, again)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windows": [3]}, "windows has 1 entries and the head 2 blocks"),
        ({"windows": [3, 0]}, "windows has 0: give numbers of positions from 1 on, or None"),
        ({"windows": [3, 2.5]}, r"windows has 2\.5"),
        ({"windows": [True, 3]}, "windows has True"),
        (
            {"windows": [9, 3], "windows_from": "slot"},
            "from 4 on, or None: windows from a slot .* the block's 4 slots",
        ),
        ({"windows_from": "text"}, "windows_from is 'text': give 'anchor' or 'slot'"),
    ],
)
def test_windows_that_are_none_are_refused(target, settings, message):
    with pytest.raises(TypeError, match="windows is 16: give a list"):
        DFlash.from_target(target, blocks=2, block_size=4, windows=16)
    with pytest.raises(TypeError, match="windows_causal is 'no': give True or False"):
        DFlash.from_target(target, blocks=2, block_size=4, windows=[3, 3], windows_causal="no")
    with pytest.raises(ValueError, match=message):
        DFlash.from_target(target, blocks=2, block_size=4, **settings)
    with pytest.raises(ValueError, match="windows has 2: give numbers of positions from 3 on"):
        PEagle.from_target(target, blocks=1, depth=3, windows=[2])
    with pytest.raises(ValueError, match="windows has 2 entries"):
        Eagle3.from_target(target, windows=[2, 2])
