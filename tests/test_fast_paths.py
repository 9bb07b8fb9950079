"""Fast paths change the speed alone: with all of them off and with each of them on, every kind of draft gives the same ids and the same rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts import MagicDec, NGram, Spire, Tree
from specdec.drafts.spire import SpireModel
from specdec.kernels.attention import ExplicitPlan
from specdec.kernels.native import build
from specdec.masks import Block, Causal, Sinks, Window
from specdec.models import HFModel, Masked, Windowed
from specdec.types import Context

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], list(range(20, 60)), [50, 51, 50, 51, 50]]


def third(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv % 3 == 0


MASK = Causal() & (Sinks(1) | Window(4) | third)
DRAFTS = {
    "model": lambda target, small: small,
    "tree": lambda target, small: Tree(small, widths=(2, 2, 1)),
    "n-gram": lambda target, small: NGram(),
    "windowed": lambda target, small: Windowed(small, 6, 1, block=6),
    "masked ring": lambda target, small: Masked(small, Causal() & Block(6), block=6),
    "masked": lambda target, small: Masked(small, MASK),
    "magicdec": lambda target, small: MagicDec(window=8),
    "magicdec masked": lambda target, small: MagicDec(mask=MASK),
    "spire": lambda target, small: spire(target, window=8),
    "spire masked": lambda target, small: spire(target, mask=MASK),
}
WAYS: dict[str, dict[str, Any]] = {
    "C": {},
    "C without copies": {"bf16_weights": False},
    "recorded graphs": {"graphs": "recorded"},
    "eager graphs": {"graphs": "eager"},
    "pages": {"page": 16},
    "decomposed": {"attention": "decomposed"},
}
REFUSED = {("masked", way) for way in ("recorded graphs", "eager graphs", "pages")} | {
    ("magicdec", "pages"),
    ("magicdec masked", "pages"),
    ("magicdec masked", "recorded graphs"),
    ("magicdec masked", "eager graphs"),
}


def spire(target: HFModel, **settings: Any) -> Spire:
    torch.manual_seed(0)
    return Spire(SpireModel.from_target(target, 1, **settings))


def decoded(draft: str, temperature: float, **options: Any) -> Any:
    target, small = (  # weights that bfloat16 can express, of which copies are read where that is possible
        HFModel(tiny("llama", seed, torch.bfloat16, **SIZES).float(), **options) for seed in (0, 3)
    )
    made = DRAFTS[draft](target, small)
    decoder = sd.decoder(target).draft(made, length=4).sampling(temperature=temperature).build()
    out = [
        decoder.generate(PROMPTS, [14, 5, 10, 12], seed=4) for _ in range(2)
    ]  # shapes are captured when they are met again
    assert out[0].ids == out[1].ids
    return out[1].ids, out[1].stats.rounds, out[1].stats.tau


@pytest.fixture(scope="module")
def plain():
    """Everything by PyTorch's operators and padded attention, one ``score`` a token."""
    found: dict[Any, Any] = {}

    def of(draft: str, temperature: float) -> Any:
        if (draft, temperature) not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(build, "_made", lambda: (None, "off"))
                found[draft, temperature] = decoded(draft, temperature, attention="padded")
        return found[draft, temperature]

    return of


@pytest.mark.parametrize(
    ("draft", "way", "temperature"),
    [
        pytest.param(draft, way, temperature, marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow)
        for i, draft in enumerate(DRAFTS)
        for j, way in enumerate(WAYS)
        for k, temperature in enumerate((0.0, 1.0))
    ],
)
def test_ids_and_rounds_are_the_same(draft, way, temperature, plain):
    if (draft, way) in REFUSED:
        with pytest.raises(ValueError, match=r"pages|graphs"):
            decoded(draft, temperature, **WAYS[way])
    else:
        assert decoded(draft, temperature, **WAYS[way]) == plain(draft, temperature)


class EverySecond(HFModel):
    """A query sees itself and every second slot before it."""

    def _pieces(self, cache, packed, limit, wanted):
        for store, piece in super()._pieces(cache, packed, limit, wanted):
            plan = piece.plan
            query = np.concatenate([np.arange(f, f + c) for f, c in zip(plan.first, plan.counts)])[:, None]
            slot = np.arange(plan.capacity)
            seen = (slot <= query) & ((slot % 2 == 0) | (slot == query))
            own = ExplicitPlan(plan.rows, plan.counts, seen, query - slot, plan.slots)
            yield store, piece._replace(plan=own)


@pytest.mark.parametrize("graphs", [False, "eager", "recorded"])
def test_a_subclass_with_its_own_mask_is_not_passed_by(graphs):
    def proposed(kind, bound, **options):
        model = kind(tiny("llama", 0, torch.float32, **SIZES), **options)
        draft = sd.drafts.Model(model, sd.Sampling(), 96)
        draft = draft.bind(model, sd.Sampling()) if bound else draft
        context, rng = Context.of(PROMPTS, capacity=64), sd.Philox(torch.arange(4))
        state = draft.init(context, None)
        for _ in range(3):  # shapes are captured when they are met again
            proposal, state = draft.propose(state, context, torch.tensor([4, 4, 4, 4]), rng)
        return proposal

    masked, plain = proposed(EverySecond, True, graphs=graphs), proposed(EverySecond, False)
    assert torch.equal(masked.tokens, plain.tokens)
    assert (masked.probs - plain.probs).abs().max() < 1e-5
    assert (masked.probs - proposed(HFModel, True).probs).abs().max() > 1e-3  # the mask is seen


def test_captured_steps_do_not_pass_by_a_subclass_with_its_own_mask():
    def logits(kind, **options):
        model = kind(tiny("llama"), **options)
        context = Context.of(PROMPTS, capacity=64)
        cache = model.cache(4, 64)
        model.prefill(cache, context)
        return [model.score(cache, context).logits for _ in range(4)][-1]

    masked = logits(EverySecond)
    for graphs in ("eager", "recorded"):
        assert torch.equal(logits(EverySecond, graphs=graphs), masked)
    assert (logits(HFModel) - masked).abs().max() > 1e-3


@pytest.mark.parametrize("graphs", [False, "eager"])
def test_processors_see_the_nodes_before(graphs):
    model = HFModel(tiny("llama", 0, torch.float32, **SIZES), graphs=graphs)

    def no_repeats(ids, scores):
        return scores.scatter(1, ids, -torch.inf)

    decoder = sd.decoder(model).sampling(temperature=0, processors=(no_repeats,))
    plain = decoder.build().generate(PROMPTS, 12, seed=0, eos_token_id=())
    drafted = decoder.draft(model, length=4).build().generate(PROMPTS, 12, seed=0, eos_token_id=())
    assert plain.ids == drafted.ids
    assert drafted.stats.tau > 4
