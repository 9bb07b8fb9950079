"""Fast paths change the speed alone: with all of them off and with each of them on, every kind of draft gives the same ids and the same rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.drafts import MagicDec, NGram, Spire, Tree
from specdec.drafts.spire import SpireModel
from specdec.kernels.native import build
from specdec.masks import Block, Causal, Sinks, Window
from specdec.models import HFModel, Masked, Windowed

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
        decoder.generate(PROMPTS, [20, 6, 12, 17], seed=4) for _ in range(2)
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
                patch.setattr("specdec.drafts.chain.cpu_chain", lambda *_: None)
                found[draft, temperature] = decoded(draft, temperature, attention="padded")
        return found[draft, temperature]

    return of


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_ids_and_rounds_are_the_same(draft, way, temperature, plain):
    if (draft, way) in REFUSED:
        with pytest.raises(ValueError, match=r"pages|graphs"):
            decoded(draft, temperature, **WAYS[way])
    else:
        assert decoded(draft, temperature, **WAYS[way]) == plain(draft, temperature)
