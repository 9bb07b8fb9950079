"""C kernels and captured chains of draft heads against their eager operators: they change the speed alone, and nobody's own part is passed by."""

from __future__ import annotations

import copy
import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from tiny import tiny
from torch.nn.utils import prune

import specdec as sd
from specdec.drafts.heads import (
    MTP,
    Chain,
    DDTree,
    DFlash,
    DFlash2,
    Domino,
    DSpark,
    DynamicTree,
    Eagle3,
    Features,
    Head,
    LiLiCorr,
    Medusa,
    PEagle,
    XPress,
    layers,
)
from specdec.drafts.heads.layers import MLP, Block, Norm
from specdec.drafts.heads.slots import SlotAnchors, empty, reading
from specdec.kernels.native import build, library, narrow, reason
from specdec.masks import Causal, Sinks, Window, streaming
from specdec.training.anchored import blocks

needs_c = pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
PROMPTS, BUDGETS = [[5, 6, 7], list(range(20, 60)), [50, 51, 50, 51, 50]], [10, 4, 8]
EVERY = {"blocks": 2, "head_norms": True, "fc_norm": True, "norm_output": True, "norm_before_residual": True}


@torch.no_grad()
def shake(head, seed=1):
    """Weights large enough for the distributions to differ from each other."""
    draw = torch.Generator().manual_seed(seed)
    for p in head.parameters():
        p.add_(torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p) * 0.2)
    return head


def own(b, h, q, kv):
    return kv % 3 == 0


HEADS = {
    "eagle3": (Eagle3, {}, Chain()),
    "eagle3, all flags": (Eagle3, {**EVERY, "vocabulary": range(0, 96, 2)}, Chain()),
    "eagle3, tree": (Eagle3, {"blocks": 2}, DynamicTree(3, 3, 6)),
    "eagle3, window": (Eagle3, {"mask": streaming(6, 2)}, Chain()),
    "eagle3, own mask": (Eagle3, {"mask": Causal() & (Sinks(1) | Window(4) | own)}, Chain()),
    "peagle": (PEagle, {"blocks": 2, "depth": 4}, Chain()),
    "dflash": (DFlash, {"blocks": 2, "block_size": 5}, Chain()),
    "dflash, tree, window": (DFlash, {"blocks": 2, "block_size": 5, "mask": streaming(6, 2)}, DDTree(6)),
    "eagle3, sliding": (Eagle3, {"blocks": 2, "windows": [5, None]}, Chain()),
    "eagle3, sliding, tree": (Eagle3, {"windows": [4], "mask": streaming(6, 2)}, DynamicTree(3, 3, 6)),
    "peagle, sliding": (PEagle, {"blocks": 2, "depth": 4, "windows": [None, 5]}, Chain()),
    "dflash, sliding": (DFlash, {"blocks": 3, "block_size": 5, "windows": [6, None, 3]}, Chain()),
    "dflash, sliding, window": (
        DFlash,
        {"blocks": 2, "block_size": 5, "windows": [5, None], "windows_from": "slot", "mask": streaming(6, 2)},
        Chain(),
    ),
    "dspark, sliding": (
        DSpark,
        {"blocks": 2, "block_size": 4, "rank": 16, "windows": [4, 9], "windows_causal": False},
        Chain(),
    ),
    "dspark": (DSpark, {"blocks": 2, "block_size": 4, "rank": 16, "markov": "gated"}, Chain()),
    "dspark, stop": (DSpark, {"blocks": 1, "block_size": 4, "rank": 16}, Chain(stop=0.4)),
    "dflash2": (DFlash2, {"blocks": 2, "block_size": 5, "rank": 16, "top_k": 6}, Chain()),
    "lilicorr": (LiLiCorr, {"blocks": 2, "block_size": 5, "top_k": 4, "factors": 6}, Chain()),
    "lilicorr, tree": (LiLiCorr, {"blocks": 1, "block_size": 5, "top_k": 4}, DynamicTree(3, 3, 6)),
    "domino": (Domino, {"blocks": 2, "block_size": 4, "rank": 16, "state": 16}, Chain()),
    "domino, tree": (Domino, {"blocks": 1, "block_size": 4, "rank": 16, "state": 8}, DynamicTree(3, 3, 6)),
    "xpress": (XPress, {"blocks": 2, "block_size": 5, "rank": 16}, Chain()),
    "xpress, tree, window": (
        XPress,
        {"blocks": 1, "block_size": 5, "rank": 16, "mask": streaming(6, 2)},
        DynamicTree(3, 3, 6),
    ),
    "jetspec": (DFlash, {"blocks": 2, "block_size": 5, "causal": True}, Chain()),
    "jetspec, tree, window": (
        DFlash,
        {"blocks": 2, "block_size": 5, "causal": True, "windows": [4, None], "mask": streaming(6, 2)},
        DDTree(6),
    ),
}
WAYS = {
    "C": {},
    "C without copies": {"bf16_weights": False},
    "recorded graphs": {"graphs": "recorded"},
    "eager graphs": {"graphs": "eager"},
}


def made(name, target, dtype=torch.float32):
    """A head whose weights bfloat16 can express."""
    kind, settings, tree = HEADS[name]
    head = shake(kind.from_target(target, (0, 2), **settings))
    return head.to(torch.bfloat16).to(dtype), tree


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", 0, torch.bfloat16, **SIZES).float())


def decoded(target, name, temperature, **options):
    head, tree = made(name, target)
    draft = Head(head, tree, **options)
    decoder = sd.decoder(target).draft(draft, length=3).sampling(temperature=temperature).build()
    # Shapes are captured when they are met again.
    out = [decoder.generate(PROMPTS, BUDGETS, seed=4) for _ in range(2 if "graphs" in options else 1)]
    assert all(one.ids == out[0].ids for one in out)
    return (out[-1].ids, out[-1].stats.rounds, out[-1].stats.tau), decoder.draft


@pytest.fixture(scope="module")
def plain(target):
    """By PyTorch's operators."""
    found = {}

    def of(name, temperature):
        if (name, temperature) not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(build, "_made", lambda: (None, "off"))
                found[name, temperature] = decoded(target, name, temperature)[0]
        return found[name, temperature]

    return of


CASES = [
    *((name, "C", 1.0) for name in HEADS),
    *((name, "recorded graphs", 1.0) for name in HEADS),
    *((name, way, 0.0) for name in ("eagle3", "dspark") for way in WAYS),
]


@needs_c
@pytest.mark.parametrize(("name", "way", "temperature"), CASES)
def test_ids_and_rounds_are_the_same(target, name, way, temperature, plain):
    found, draft = decoded(target, name, temperature, **WAYS[way])
    assert found == plain(name, temperature)
    if "graphs" in way:
        captured = draft.tree == Chain() and name != "eagle3, own mask"
        assert bool(draft.programs.captured) == captured, draft.programs
    else:
        parts = draft.model.kernels.parts.values()
        assert parts
        assert all((part.narrow is not None) == (way == "C") for part in parts)


def logits(target, head, parts, rows=3, seed=0):
    """Logits of a few steps after texts that were read in two pieces, and what the slots hold then."""
    draw = torch.Generator().manual_seed(seed)
    numbers = lambda *shape: torch.randn(*shape, generator=draw).to(head.dtype)  # noqa: E731
    ring, device, known = empty(head.shapes, rows, 40, head.mask), torch.device("cpu"), [9, 5, 14][:rows]
    for first, end in (([0] * rows, [4] * rows), ([4] * rows, known)):
        row = np.repeat(np.arange(rows), np.array(end) - np.array(first))
        at = np.concatenate([np.arange(a, b) for a, b in zip(first, end)])
        tokens = torch.randint(0, 96, (2, len(at)), generator=draw)
        features = Features({tap: numbers(len(at), 64) for tap in head.taps}, *tokens)
        kept = head.read(features, reading(ring, row, at, head.mask, device, parts))
    memo = None if kept is None else kept[np.cumsum(np.array(known) - 4) - 1]
    at, out = SlotAnchors(ring, torch.arange(rows), torch.tensor(known), head.mask, device, parts), []
    for n in range(3):
        made, memo = head.step(n, memo, torch.randint(0, 96, (rows,), generator=draw), at)
        out.append(made)
    if isinstance(head, Eagle3) and not isinstance(head, PEagle):  # a level of a tree
        at.under(torch.tensor([[1, 0]] * rows))
        token = torch.randint(0, 96, (rows, 2), generator=draw)
        out.append(head.step(3, memo[:, None].expand(-1, 2, -1), token, at)[0])
    return out, [t for pair in at.ring.layers for t in pair]


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_logits_and_slots_are_those_of_pytorch(target, name, dtype):
    model = target if dtype is torch.float32 else sd.HFModel(tiny("llama", 0, dtype, **SIZES))
    head = Head(made(name, model, dtype)[0]).bind(model, sd.Sampling()).model
    assert head.kernels.parts
    if isinstance(head, DFlash2):
        head.top_k = 96  # no choice, which rounding could change
    eager = copy.deepcopy(head)
    assert eager.kernels is None
    bound = 1e-5 if dtype is torch.float32 else 0.06
    for rows in (1, 3):
        found, expected = (
            logits(model, h, parts, rows) for h, parts in ((head, head.kernels.parts), (eager, {}))
        )
        for ours, theirs in zip(chain.from_iterable(found), chain.from_iterable(expected), strict=True):
            size = theirs.float().norm()
            if isinstance(head, LiLiCorr) and not theirs.isfinite().all():  # -inf beside its candidates
                if dtype is torch.bfloat16:  # rounding chooses other candidates
                    continue
                assert torch.equal(ours.isfinite(), theirs.isfinite())
                ours, theirs = (t.where(t.isfinite(), 0) for t in (ours, theirs))
                # Random weights give cosines near 0, whose errors are those of a cosine of 1.
                size = max(theirs.float().norm(), head.lilicorr.scale)
            assert (ours - theirs).float().norm() <= bound * size


class Doubled(MLP):
    def forward(self, x):
        return 2 * super().forward(x)


class Twice(Block):
    def through(self, x, normed, angles, layer, go):
        return 2 * super().through(x, normed, angles, layer, go)


def replaced(head):
    head.layers[0].mlp = swapped(head.layers[0].mlp, Doubled)


def overridden(head):
    head.layers[1] = swapped(head.layers[1], Twice)


def swapped(module, kind):
    module.__class__ = kind
    return module


def hooked(head):
    head.layers[0].self_attn.register_forward_hook(lambda module, given, out: 2 * out)


def hooked_inside(head):
    head.layers[1].mlp.up_proj.register_forward_pre_hook(lambda module, given: (2 * given[0],))


def pruned(head):
    prune.l1_unstructured(head.layers[0].mlp.up_proj, "weight", 0.5)
    prune.l1_unstructured(head.lm_head, "weight", 0.5)


def rescaled(head):
    for p in head.parameters():
        p.data.mul_(0.5)


def loaded(head):
    head.load_state_dict({name: t * 0.5 for name, t in head.state_dict().items()}, assign=True)


def rounded_no_more(head):
    for p in head.parameters():
        p.data.mul_(1.0001)


def cut(head):  # the layers still declare the sizes that they had
    mlp = head.layers[0].mlp
    for p in (mlp.gate_proj, mlp.up_proj):
        p.weight = torch.nn.Parameter(p.weight[:48].clone())
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, :48].clone())


def biased(head):
    head.layers[1].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(96))


def normed_by_another(head):
    head.layers[0].post_attention_layernorm = Norm(64)  # without a constant of its own


def normed_without_weight(head):
    head.layers[0].post_attention_layernorm = Norm(64, eps=1e-3, elementwise_affine=False)


CHANGES = [
    replaced,
    overridden,
    hooked,
    hooked_inside,
    pruned,
    rescaled,
    loaded,
    rounded_no_more,
    cut,
    biased,
    normed_by_another,
    normed_without_weight,
]


@needs_c
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
@torch.no_grad()
def test_a_part_of_ones_own_is_not_passed_by(target, change, when):
    """Changes before binding, and changes of a bound head before its next text."""
    head = shake(Eagle3.from_target(target, (0, 2), blocks=2)).to(torch.bfloat16).float()
    unchanged = logits(target, head, {})[0]
    if when == "before":
        change(head)
    bound = Head(head).bind(target, sd.Sampling())
    if when == "after":
        change(head)
    bound.init(sd.Context.of([[1, 2]]), None)  # every text begins with it
    found = logits(target, bound.model, bound.model.kernels.parts)[0]
    eager = logits(target, copy.deepcopy(bound.model), {})[0]
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)
    assert (found[2] - unchanged[2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "change",
    [
        overridden,
        hooked,
        *(pytest.param(c, marks=pytest.mark.slow) for c in (replaced, pruned, rescaled, loaded)),
    ],
    ids=lambda c: c.__name__,
)
@torch.no_grad()
def test_captured_chains_are_those_of_the_present_parts(target, change):
    head = shake(Eagle3.from_target(target, (0, 2), blocks=2))
    base = sd.decoder(target).sampling(temperature=1.0)

    def proposed(decoder):
        rounds = []
        decoder.generate(PROMPTS, 16, seed=4, on_round=lambda r: rounds.append(r.proposal))
        return [row[:n] for p in rounds for row, n in zip(p.tokens.tolist(), p.size.tolist())]

    captured = base.draft(Head(head, graphs="recorded"), 3).build()
    before = [proposed(captured) for _ in range(2)]
    made = set(captured.draft.programs.captured)
    assert made
    assert proposed(captured) == before[0]
    assert made <= set(captured.draft.programs.captured)  # nothing changed
    change(head)
    expected = proposed(base.draft(Head(head, graphs=False, bf16_weights=False), 3).build())
    assert proposed(captured) == proposed(captured) == expected != before[0]
    assert captured.draft.programs.captured


@needs_c
@torch.no_grad()
def test_a_bound_head_that_is_called_without_a_text_uses_its_present_weights(target):
    head = made("eagle3", target)[0]
    bound = Head(head).bind(target, sd.Sampling()).model
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    before = bound.logits(x)
    head.lm_head.weight.mul_(2)  # as an optimizer does
    torch.testing.assert_close(bound.logits(x), 2 * before)
    head.lm_head.weight = torch.nn.Parameter(2 * head.lm_head.weight)
    torch.testing.assert_close(bound.logits(x), 4 * before)


@needs_c
@torch.no_grad()
def test_hooks_of_the_target_do_not_see_the_draft(target):
    head = Eagle3.from_target(target, (0, 2), own_head=False)
    calls = []
    hook = target.model.lm_head.register_forward_hook(lambda module, given, out: calls.append(out.shape))
    try:
        Head(head).bind(target, sd.Sampling()).model.logits(torch.ones(3, 64))
    finally:
        hook.remove()
    assert not calls


@needs_c
@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 5, 64), (2, 4, 24), (1, 7)])
@torch.no_grad()
def test_a_few_rows_are_normed_by_the_kernel(shape, monkeypatch):
    norm = shake(Norm(shape[-1], eps=1e-6))
    x, called = 3 * torch.randn(shape), []

    def watched(*given):
        called.append(given)
        return add_norm(*given)

    def plain(norm, x):
        return torch.nn.RMSNorm.forward(norm, x)

    add_norm = layers.add_norm
    monkeypatch.setattr(layers, "add_norm", watched)
    assert torch.equal(norm(x), plain(norm, x))
    assert not called
    with layers.by_kernels(True):
        torch.testing.assert_close(norm(x), plain(norm, x))
        assert len(called) == 1
        many, apart = x.expand(1000, *shape).contiguous(), torch.stack([x, x], -1)[..., 0]
        for other in (x.double(), x.bfloat16(), many, apart):
            alike = norm.to(other.dtype)
            assert torch.equal(alike(other), plain(alike, other))
            norm.float()
        with torch.enable_grad():
            assert norm(x).requires_grad
    assert torch.equal(norm(x), plain(norm, x))
    assert len(called) == 1


READ = {  # the beginnings of the names of weights that products read from copies, and of some that none reads
    "mtp": (MTP, {}, ["layers.0.self_attn.", "layers.0.mlp.", "layers.0.eh_proj."], []),
    "medusa": (Medusa, {"heads": 2}, [], ["lm_heads.", "layers."]),
    "dflash": (DFlash, {"blocks": 1, "block_size": 4}, ["fc.", "layers.0.self_attn.", "layers.0.mlp."], []),
    "dflash2": (
        DFlash2,
        {"blocks": 1, "block_size": 4, "rank": 16, "top_k": 6},
        ["fc.", "layers.0.self_attn.k_proj.", "layers.0.self_attn.v_proj."],
        ["layers.0.self_attn.q_proj.", "layers.0.mlp.", "candidate_selector.", "layers.0.mlp_conv."],
    ),
}


@needs_c
@pytest.mark.parametrize("asked", [None, True])
@pytest.mark.parametrize("name", READ)
def test_only_weights_that_are_read_are_copied(name, asked):
    kind, settings, read, unread = READ[name]
    target = sd.HFModel(tiny("llama", 0, torch.bfloat16, **SIZES).float())
    head = shake(kind.from_target(target, **settings)).to(torch.bfloat16).float()
    decoder = sd.decoder(target).draft(Head(head, bf16_weights=asked), 2).build()
    decoder.generate(PROMPTS, 12, seed=0)
    linears = [f"{n}.weight" for n, m in head.named_modules() if isinstance(m, torch.nn.Linear)]
    copied = {n for n, p in head.named_parameters() if id(p) in narrow._COPIES}
    assert copied == {n for n in linears if n.startswith(tuple(read))}
    assert all(any(n.startswith(begin) for n in linears) for begin in unread)


@needs_c
@torch.no_grad()
def test_copies_that_were_asked_for_are_exact_or_refused(target):
    head = shake(Eagle3.from_target(target, (0, 2)))
    with pytest.raises(ValueError, match="bfloat16 would round"):
        Head(head, bf16_weights=True).bind(target, sd.Sampling())
    with pytest.raises(ValueError, match="no parts in C"):
        Head(head.double(), bf16_weights=True).bind(target, sd.Sampling())
    with pytest.raises(ValueError, match="only one of them"):
        Head(head, bf16_weights=True, graphs="eager")
    bound = Head(head.to(torch.bfloat16).float(), bf16_weights=True).bind(target, sd.Sampling())
    rounded_no_more(head)
    with pytest.raises(RuntimeError, match="bfloat16 would round"):
        bound.init(sd.Context.of([[1, 2]]), None)


@needs_c
def test_gradients_reach_a_bound_head_and_not_its_target(target):
    head = Head(shake(Eagle3.from_target(target, (0, 2), own_head=False))).bind(target, sd.Sampling()).model
    draw = torch.Generator().manual_seed(0)
    layers = {tap: torch.randn(1, 9, 64, generator=draw) for tap in head.taps}
    blocks(head, torch.arange(10)[None], layers, 3).sum().backward()
    assert all(p.grad is not None for p in head.parameters())
    assert all(p.grad is None for p in target.model.parameters())


@needs_c
def test_copies_of_a_bound_head_have_no_kernels_until_they_are_bound(target):
    head = Head(made("eagle3", target)[0]).bind(target, sd.Sampling()).model
    assert head.kernels is not None
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert other.kernels is None
    assert copy.copy(head).kernels is head.kernels


def test_angles_are_those_of_transformers(target):
    head = Eagle3.from_target(target, (0, 2))
    for positions in (torch.tensor([3, 0, 200]), torch.tensor([[5, 1500], [0, 9]])):  # beyond the table
        for like in (
            torch.zeros(1),
            torch.zeros(1, dtype=torch.float64),
            torch.zeros(1, dtype=torch.bfloat16),
        ):
            cos, turn = head.rotary(positions, like)
            flat, sin = (
                t[0].view(*positions.shape, 1, -1) for t in head.rotary.module(like, positions.view(1, -1))
            )
            half = sin.shape[-1] // 2
            assert torch.equal(cos, flat)
            assert torch.equal(turn, torch.cat([-sin[..., :half], sin[..., half:]], -1))


def test_a_recorded_chain_goes_on_beyond_the_angles_that_were_known(target, monkeypatch):
    """A window's memory has a constant size: what was captured in a short text serves a long one."""
    monkeypatch.setattr("specdec.drafts.heads.layers.TABLE", 32)
    base, head = sd.decoder(target).greedy(), shake(Eagle3.from_target(target, (0, 2), mask=streaming(6, 2)))
    decoder = base.draft(Head(head, graphs="recorded"), 3).build()
    outs = [one.generate([[5, 6, 7]], 60) for one in (decoder, base.draft(Head(head), 3).build())]
    assert outs[0].ids == outs[1].ids
    assert outs[0].stats.rounds == outs[1].stats.rounds
    assert decoder.draft.programs.captured


def test_a_head_that_cannot_be_captured_runs_without_graphs(target):
    class Waits(Eagle3):
        def step(self, n, memo, token, at):
            int(token.max())
            return super().step(n, memo, token, at)

    head = shake(Waits.from_target(target, (0, 2)))
    base = sd.decoder(target).greedy()
    expected = base.build().generate(PROMPTS[:2], 12).ids
    decoder = base.draft(Head(head, graphs="recorded"), 3).build()
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        assert decoder.generate(PROMPTS[:2], 12).ids == expected
    assert not decoder.draft.programs.captured
