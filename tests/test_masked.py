"""Masks drive models: whatever a mask shows is what every layer of a model sees, in a ring or in slots, and no fast path passes it by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_spire import draft_of, inputs_of, rolled_out
from tiny import FAMILIES, LIKE_OTHERS, tiny

import specdec as sd
from specdec import masks
from specdec.cache.ring_cache import RingCache
from specdec.drafts import MagicDec, Spire
from specdec.drafts.spire import SpireModel
from specdec.forward.families import SUPPORTED
from specdec.masks import Block, Causal, Function, Intervals, Sinks, Strided, Tree, Window, streaming
from specdec.masks.text import parse
from specdec.models import HFModel, Masked, Windowed
from specdec.training.forward import Parallel
from specdec.training.passes import k_pass
from specdec.training.states import Batch

PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], list(range(10, 50)), [90]]


def eighth(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """A mask of a user's own: every 8th token of the text."""
    return kv % 8 == 0


OWN = Causal() & (Sinks(2) | Window(5) | eighth)
MASKS = {
    "every 8th token": OWN,
    "block": Causal() & Block(6),
    "stride": Causal() & (Strided(3) | Window(2)),
    "window of a stride": Causal() & Window(9) & (Strided(2) | Window(1)),
    "first tokens": Causal() & (Sinks(3) | Window(1)),
    "intervals": Intervals(lambda q: [(0, 1), (max(q - 3, 1), q + 1)], 256, sinks=1, window=4),
    "function": Function(lambda b, h, q, kv: (kv <= q) & ((q - kv) % 4 != 3) & (kv > q - 8), window=8),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())


def seen_by(mask: Any, length: int) -> torch.Tensor:
    """``[L, L]`` bool, asked about one pair at a time."""
    mask = masks.for_model(mask)
    rows = [
        [bool(masks.sees(mask, torch.tensor(q), torch.tensor(p))) and p <= q for p in range(length)]
        for q in range(length)
    ]
    return torch.tensor(rows)


def plain(model: Any, text: list[int], seen: torch.Tensor) -> torch.Tensor:
    """``[L, V]``: transformers' own forward under a dense mask, within the windows of its layers."""

    def additive(window: int | None) -> torch.Tensor:
        q, p = torch.arange(len(text))[:, None], torch.arange(len(text))
        shown = seen if window is None else seen & (p > q - window)
        return torch.zeros(shown.shape, dtype=model.dtype).masked_fill(~shown, torch.finfo(model.dtype).min)[
            None, None
        ]

    window = getattr(model.config, "sliding_window", None)
    kinds = set(getattr(model.config, "layer_types", None) or ())
    given: Any = additive(
        window
        if model.config.model_type in ("ministral3", "mistral", "starcoder2", "phi3", "mixtral")
        else None
    )
    if kinds:
        given = {kind: additive(window if kind == "sliding_attention" else None) for kind in kinds}
    with torch.inference_mode():
        at = {"position_ids": torch.arange(len(text))[None]} if model.config.model_type == "opt" else {}
        return model(torch.tensor([text]), attention_mask=given, **at).logits[0]


@pytest.fixture(autouse=True)
def softmax_in_the_models_own_type(monkeypatch):
    """Transformers' eager attention takes it in float32, whatever the model's type; ours is not changed by this."""
    own = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None, **_: own(x, dim))


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", num_hidden_layers=3)


def decoded(model: Any, llama: Any, seen: torch.Tensor, rounds: int = 8, block: int = 4) -> None:
    """Rounds of proposals, of which a random part is accepted: every logit is the plain model's under the dense mask."""
    draw = np.random.default_rng(0)
    texts = [list(p) for p in PROMPTS]
    context = sd.Context.of(texts, capacity=120)
    cache = model.cache(len(texts), 120)
    model.prefill(cache, context)
    for _ in range(rounds):
        B, N = len(texts), int(draw.integers(0, block + 1))
        size = torch.from_numpy(draw.integers(0, N + 1, B))
        tokens = torch.from_numpy(draw.integers(0, model.vocab_size, (B, N)))
        proposal = sd.Proposal.chain(tokens, size) if N else None
        logits = model.score(cache, context, proposal).logits
        accepted = torch.from_numpy(draw.integers(0, size.numpy() + 1))
        bonus = torch.from_numpy(draw.integers(0, model.vocab_size, B))
        path = torch.where(torch.arange(N) < accepted[:, None], torch.arange(N), -1)
        verdict = sd.Verdict.of(proposal or sd.Proposal.none(B), path, accepted, bonus)
        for b, text in enumerate(texts):
            whole = text + tokens[b, : int(size[b])].tolist()
            want = plain(llama, whole, seen[: len(whole), : len(whole)])[len(text) - 1 :]
            torch.testing.assert_close(logits[b, : int(size[b]) + 1], want, rtol=1e-9, atol=1e-9)
            text += verdict.tokens[b, : int(accepted[b]) + 1].tolist()
        cache.commit(context, verdict)
        context = context.append(verdict.tokens, accepted + 1)
        assert (cache.sync(context) == context.length - 1).all()  # nothing is fed twice
        if len(texts) > 2 and _ == rounds // 2:  # rows leave
            rows = torch.tensor([2, 0, 1])
            cache, context, texts = cache.select(rows), context.select(rows), [texts[b] for b in rows]


@pytest.mark.parametrize(
    ("mask", "storage"),
    [
        pytest.param(
            mask, storage, id=f"{name}-{storage}", marks=() if (i + j) % 8 == 1 else pytest.mark.slow
        )
        for i, (name, mask) in enumerate(MASKS.items())
        for j, storage in enumerate(("auto", "dense"))
    ],
)
def test_a_masked_model_is_the_plain_one_under_a_dense_mask(llama, mask, storage):
    model = Masked(HFModel(llama, prefill_chunk=16), mask, block=5, storage=storage)
    assert isinstance(model.cache(1, 8), RingCache) == (storage == "auto" and model.mask.reach is not None)
    decoded(model, llama, seen_by(mask, 120))


PACKED = [name for name in FAMILIES if SUPPORTED[name] == "packed"]
EACH = [name for name in PACKED if name not in LIKE_OTHERS]  # with one storage each; both are slow


@pytest.mark.parametrize(
    ("family", "storage"),
    [
        pytest.param(
            name, kind, marks=() if name in EACH and (EACH.index(name) + i) % 2 else pytest.mark.slow
        )
        for name in PACKED
        for i, kind in enumerate(("dense", "ring"))
    ],
)
@pytest.mark.slow
def test_every_packed_family_is_the_plain_one_under_a_dense_mask(family, storage):
    """Soft caps, sink logits, learned positions, experts, windows of their own."""
    own = tiny(family)
    mask = OWN if storage == "dense" else Causal() & (Sinks(1) | Window(6)) & (Strided(2) | Window(3))
    model = Masked(HFModel(own), mask, storage=storage)
    context = sd.Context.of(PROMPTS, capacity=64)
    cache = model.cache(4, 64)
    model.prefill(cache, context)
    logits = model.score(cache, context).logits
    close = {"rtol": 1e-9, "atol": 1e-9} if own.dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    seen = seen_by(mask, 64)
    for b, text in enumerate(PROMPTS):
        torch.testing.assert_close(
            logits[b, 0], plain(own, text, seen[: len(text), : len(text)])[-1], **close
        )
    assert (logits - HFModel(own).score(HFModel(own).cache(4, 64), context).logits).abs().max() > 1e-3


def test_trees_see_their_branch_by_position(llama):
    """A node stands one behind its parent, whatever slot it has; in pieces of a prefill, too."""
    mask = Causal() & (Strided(3) | Window(2))
    for chunk in (512, 5):
        model = Masked(HFModel(llama, prefill_chunk=chunk), mask)
        parents = [[-1, 0, 0, 1, -1, 4], [-1, -1, 1, 2, 3, 3]]
        texts, tokens = [PROMPTS[1], PROMPTS[2]], torch.arange(60, 72).view(2, 6)
        context = sd.Context.of(texts, capacity=60)
        proposal = sd.Proposal(tokens, torch.tensor(parents), torch.tensor([6, 5]))
        logits = model.score(model.cache(2, 60), context, proposal).logits
        seen = seen_by(mask, 60)
        for b, (text, up) in enumerate(zip(texts, parents)):
            for node in range(int(proposal.size[b])):
                path, at = [], node
                while at >= 0:
                    path, at = [int(tokens[b, at]), *path], up[at]
                whole = text + path
                want = plain(llama, whole, seen[: len(whole), : len(whole)])[-1]
                torch.testing.assert_close(logits[b, 1 + node], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("window", "sinks"), [(4, 1), (6, 0), (1, 3)])
def test_windowed_is_masked_to_the_bit(llama, window, sinks):
    mask = Causal() & (Sinks(sinks) | Window(window))
    models = [Windowed(HFModel(llama), window, sinks), Masked(HFModel(llama), mask)]
    context = sd.Context.of(PROMPTS, capacity=64)
    logits = [model.score(model.cache(4, 64), context).logits for model in models]
    assert torch.equal(*logits)
    drafts = [sd.decoder(HFModel(llama)).draft(m, length=3).sampling(temperature=1.0).build() for m in models]
    outs = [d.generate(PROMPTS, 12, seed=3, on_round=None) for d in drafts]
    assert outs[0].ids == outs[1].ids
    assert outs[0].stats.tau == outs[1].stats.tau


# -- no fast path passes a mask by -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [OWN, Causal() & Block(6)], ids=["dense", "ring"])
def test_fast_chains_draft_as_plain_ones(mask):
    """A float32 model that C runs: a draft's whole chain proposes what its own ``score`` says, rows leaving in between."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    small = HFModel(tiny("llama", 1, torch.float32, **sizes))
    model = Masked(small, mask)
    draft = sd.drafts.Model(model).bind(model, sd.Sampling(temperature=0.0))
    context = sd.Context.of(PROMPTS, capacity=64)
    state = draft.init(context, None)
    seen = seen_by(mask, 64)
    for rows in (None, torch.tensor([2, 0, 1]), torch.tensor([1, 0])):
        if rows is not None:
            context, state = context.select(rows), draft.select(state, rows)
        B = context.batch
        proposal, state = draft.propose(state, context, torch.full((B,), 6), sd.Philox(torch.arange(B)))
        for b in range(B):
            text = context.row(b)
            for token in proposal.tokens[b].tolist():
                logits = plain(small.model, text, seen[: len(text), : len(text)])[-1]
                assert token == int(logits.argmax())
                text.append(token)


@pytest.mark.parametrize("graphs", [pytest.param("recorded", marks=pytest.mark.slow), "eager"])
def test_captured_chains_see_by_their_own_mask(llama, graphs):
    """Two masks of one reach over one model: neither replays what was captured for the other."""
    base = HFModel(llama, graphs=graphs)
    texts = {}
    for again in range(2):
        for mask in (
            Causal() & Window(6),
            Causal() & Block(6),
            Causal() & Window(6) & eighth | Causal() & Window(2),
        ):
            model = Masked(base, mask, block=6)
            decoder = (
                sd.decoder(HFModel(tiny("llama", 1))).draft(model, length=4).sampling(temperature=1.0).build()
            )
            slow = sd.decoder(HFModel(tiny("llama", 1))).draft(
                Masked(HFModel(llama), mask, block=6), length=4
            )
            out = decoder.generate(PROMPTS, 14, seed=1)
            want = slow.sampling(temperature=1.0).build().generate(PROMPTS, 14, seed=1)
            assert out.ids == want.ids
            assert out.stats.tau == want.stats.tau
            texts[again, repr(mask)] = out.stats.tau
    assert len(set(texts.values())) > 1


# -- drafts under a mask ------------------------------------------------------------------------------------------------


@every_mask
@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_training_and_inference_of_spire_are_the_same_function(family, mask):
    target = tiny(family, num_hidden_layers=3)
    model = draft_of(target, mask=mask)
    tokens = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    inputs = inputs_of(target, tokens, model.layers)
    for k, phase in ((4, 0), (4, 3), (1, 0), (3, 2)):
        parallel = k_pass(model, tokens, inputs, k, phase)
        torch.testing.assert_close(
            parallel, rolled_out(model, tokens, inputs, k, phase), rtol=1e-10, atol=1e-10
        )
        dense = k_pass(model, tokens, inputs, k, phase, dense=True)
        torch.testing.assert_close(parallel, dense, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_window_shorter_than_a_block_is_trained_as_it_decodes():
    target = tiny("llama", num_hidden_layers=3)
    model = draft_of(target, sinks=1, window=2)
    tokens = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    inputs = inputs_of(target, tokens, model.layers)
    torch.testing.assert_close(
        k_pass(model, tokens, inputs, 4), rolled_out(model, tokens, inputs, 4, 0), rtol=1e-10, atol=1e-10
    )


@every_mask
def test_drafts_under_a_mask_leave_the_text_as_it_is(llama, mask):
    target = HFModel(llama)
    base = sd.decoder(target).sampling(temperature=0.8).verifier(sd.Coupled())
    want = base.build().generate(PROMPTS[:3], [12, 5, 20], seed=2).ids
    small = HFModel(tiny("llama", 1))
    for draft in (
        Masked(small, mask),
        sd.drafts.Tree(Masked(small, mask, storage="dense"), widths=(2, 1)),
        Spire(draft_of(llama, mask=mask)),
        MagicDec(mask=mask),
    ):
        out = base.draft(draft, length=3).build().generate(PROMPTS[:3], [12, 5, 20], seed=2)
        assert out.ids == want


def test_magicdec_under_a_mask_drafts_what_the_masked_view_says(llama):
    """Over the whole text, a mask that shows all of it makes MagicDec the target: every token is accepted."""
    target = HFModel(llama)
    every = Causal() & Function(lambda b, h, q, kv: kv >= 0)
    out = sd.decoder(target).draft(MagicDec(mask=every), length=4).build().generate(PROMPTS[:3], 15)
    assert out.stats.tau == 5


def test_a_spire_draft_with_a_mask_of_ones_own_trains():
    """Sinks, window and every 8th token. The certifier's catalogue has such a draft."""
    target = tiny(
        "llama",
        vocab_size=3,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = draft_of(target, 1, mask=Causal() & (Sinks(1) | Window(2) | eighth))
    tokens = torch.randint(0, 3, (4, 25), generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        with torch.no_grad():
            inputs = inputs_of(target, tokens[:, :-1], model.layers)
        logits = k_pass(model, tokens[:, :-1], inputs, 4)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@every_mask
def test_an_ordinary_model_is_trained_under_a_mask_as_it_decodes(llama, mask):
    tokens = torch.randint(0, 97, (2, 41), generator=torch.Generator().manual_seed(0))
    logits = Parallel(mask=mask)(llama, Batch(tokens, {}, None))  # type: ignore[arg-type]
    seen = seen_by(mask, 40)
    for b in range(2):
        want = plain(llama, tokens[b, :-1].tolist(), seen)
        torch.testing.assert_close(logits[b], want, rtol=1e-9, atol=1e-9)


# -- on disk ------------------------------------------------------------------------------------------------------------


def test_a_draft_brings_its_mask(tmp_path, llama):
    library = Causal() & (Sinks(1) | Window(4) | Strided(8))
    draft_of(llama, mask=library).save_pretrained(tmp_path / "library")
    assert SpireModel.from_pretrained(tmp_path / "library").mask == library
    with pytest.raises(ValueError, match="was saved with its mask: leave mask out"):
        SpireModel.from_pretrained(tmp_path / "library", mask=library)
    draft_of(llama, window=7).save_pretrained(tmp_path / "window")
    assert SpireModel.from_pretrained(tmp_path / "window").mask == streaming(7, 1)
    draft_of(llama, mask=OWN).save_pretrained(tmp_path / "own")
    with pytest.raises(
        ValueError,
        match=r"trained with a mask of the user's own, .*SpireModel.from_pretrained\(folder, mask=",
    ):
        SpireModel.from_pretrained(tmp_path / "own")
    assert SpireModel.from_pretrained(tmp_path / "own", mask=OWN).mask is not None
    sliding = draft_of(tiny("mistral"), 1, mask=library & Window(12))
    sliding.save_pretrained(tmp_path / "sliding")
    loaded = SpireModel.from_pretrained(tmp_path / "sliding")
    # Joined once, however often it is saved.
    assert loaded.mask == sliding.mask == library & Window(12) & Window(8)


@pytest.mark.parametrize(
    "mask", [streaming(64, 1), Causal() & (Block(6) | Strided(3) & Window(9)) | Causal() & Sinks(2)], ids=repr
)
def test_the_librarys_masks_are_read_back_from_their_text(mask):
    again = parse(repr(mask))
    assert repr(again) == repr(mask)
    assert torch.equal(seen_by(again, 30), seen_by(mask, 30))


@pytest.mark.parametrize(
    "text", ["Causal() & eighth", "__import__('os')", "Window(size=", "Causal", "3", "Window(Sinks(2))"]
)
def test_other_text_is_no_mask(text):
    with pytest.raises(ValueError, match="is no mask of the library's"):
        parse(text)


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "error", "what"),
    [
        (Window(4), ValueError, "lets position 0 see position 1, which comes later: join it with Causal"),
        (Causal() & Sinks(3) & Window(9), ValueError, "lets position 11 see nothing: join it"),
        (Causal() & (lambda b, h, q, kv: kv > q - 2 * (h + 1)), ValueError, "argument h, the head"),
        (
            lambda b, h, q, kv: torch.zeros(3)[b] < q,
            ValueError,
            "mask cannot be used: it looks at its argument b",
        ),
        (
            Causal() & Tree(torch.tensor([3]), torch.tensor([[-1]])),
            ValueError,
            "Tree depends on the slots of particular rows",
        ),
        (
            Function(lambda b, h, q, kv: kv <= q, window=4),
            ValueError,
            "declares the reach .* and lets position 4 see",
        ),
        (
            lambda b, h, q, kv: kv if kv <= q else q,
            ValueError,
            "ambiguous .*operations on tensors.* without if",
        ),
        (lambda q, kv: kv <= q, ValueError, r"2 positional .*\(b, h, q_position, kv_position\) -> bool"),
        (lambda b, h, q, kv: torch.ones(3, dtype=torch.bool), ValueError, "expanded size .*that broadcast"),
        (Window, TypeError, "Window is a class"),
        (4, TypeError, "give a mask, such as Causal"),
        ("window", TypeError, "a str is no mask"),
    ],
)
def test_masks_that_no_model_can_see_by_are_refused(llama, mask, error, what):
    for make in (
        lambda: Masked(HFModel(llama), mask),
        lambda: MagicDec(mask=mask),
        lambda: draft_of(llama, mask=mask),
    ):
        with pytest.raises(error, match=what):
            make()


def test_a_mask_that_goes_blind_far_into_the_text_says_where(llama):
    blind = Causal() & (lambda b, h, q, kv: (q < 300) | (q > 340))
    model = Masked(HFModel(tiny("llama", max_position_embeddings=700)), blind)
    cache, context = model.cache(1, 400), sd.Context.of([[1] * 330])
    with pytest.raises(ValueError, match="position 300 see nothing"):
        model.score(cache, context)


def test_what_cannot_be_masked_is_refused(llama):
    with pytest.raises(ValueError, match=r"storage is 'ring' and .* has no reach"):
        Masked(HFModel(llama), OWN, storage="ring")
    with pytest.raises(ValueError, match="storage is 'heap'"):
        Masked(HFModel(llama), OWN, storage="heap")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'gptj' runs padded"):
        Masked(HFModel(tiny("gptj")), OWN)
    with pytest.raises(ValueError, match="pages of 16 tokens"):
        Masked(HFModel(llama, page=16), OWN)
    with pytest.raises(ValueError, match="without graphs"):
        Masked(HFModel(llama, graphs="eager"), OWN)
    with pytest.raises(TypeError, match="has a mask already"):
        Masked(Masked(HFModel(llama), OWN), OWN)

    class Other(HFModel):
        pass

    with pytest.raises(TypeError, match="model is a Other: give an HFModel"):
        Masked(Other(llama), OWN)
    for wrong in (
        lambda: Windowed(HFModel(llama), window=Window(4)),  # type: ignore[arg-type]
        lambda: MagicDec(window=Window(4)),  # type: ignore[arg-type]
        lambda: draft_of(llama, window=Window(4)),
    ):
        with pytest.raises(
            TypeError, match=r"window is Window\(4\): give the number .*models.Masked\(model, mask\)"
        ):
            wrong()
    with pytest.raises(TypeError, match="give mask alone"):
        MagicDec(mask=OWN, window=3)
    with pytest.raises(TypeError, match="give mask alone"):
        draft_of(llama, mask=OWN, window=3)
    with pytest.raises(ValueError, match="positions 'in_cache'"):
        MagicDec(mask=OWN, positions="in_cache")
    with pytest.raises(ValueError, match="give an HFModel"):
        sd.decoder(Masked(HFModel(llama), OWN)).draft(MagicDec()).build()


@pytest.mark.parametrize("bound", [{}, {"sinks": 1, "window": 4}], ids=["the whole text", "a ring"])
def test_a_mask_of_so_many_positions_takes_texts_of_so_many(llama, bound):
    """Texts may use them all, batch mates of other lengths included; a longer one is refused before anything is decoded."""
    mask = Intervals(lambda q: [(0, 1), (max(q - 3, 1), q + 1)], 30, **bound)
    target = HFModel(llama)
    spire = Spire(draft_of(llama, mask=mask))
    masked = Masked(target, mask)
    assert (masked.max_positions, spire.model.max_positions) == (30, 30)
    prompts = [[5, 6, 7], list(range(22))]
    plain = sd.decoder(target).greedy().build().generate(prompts, max_new_tokens=[27, 8]).ids
    for draft in (masked, spire, MagicDec(mask=mask)):
        made = sd.decoder(target).draft(draft).greedy().build()
        assert made.generate(prompts, max_new_tokens=[27, 8]).ids == plain
        with pytest.raises(ValueError, match=r"30 positions|draft has 30"):
            made.generate(prompts, max_new_tokens=12)
    with pytest.raises(ValueError, match="the target has 30: shorten the prompt, or ask for at most 8 new"):
        sd.decoder(masked).build().generate(prompts, max_new_tokens=9)
    with pytest.raises(ValueError, match="is defined for 30 positions and a text has 31"):
        masked.score(masked.cache(1, 40), sd.Context.of([[1] * 31]))
    tokens = torch.zeros(1, 32, dtype=torch.long)
    inputs = {layer: torch.zeros(1, 32, 32, dtype=llama.dtype) for layer in spire.model.layers}
    with pytest.raises(ValueError, match="is defined for 30 positions and a text has 32"):
        k_pass(spire.model, tokens, inputs)
    with pytest.raises(ValueError, match="is defined for 30 positions and a text has 31"):
        Parallel(mask=mask)(llama, Batch(tokens, {}, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", [44, 47])
def test_padding_of_the_passes_may_lie_past_the_positions_of_a_mask(positions):
    llama = tiny("llama", num_hidden_layers=3)
    of = {"sinks": 1, "window": 17}
    mask = Intervals(lambda q: [(0, 1), (max(q - 16, 1), q + 1)], positions, **of)
    tokens = torch.randint(0, 97, (1, positions), generator=torch.Generator().manual_seed(0))
    inputs = inputs_of(llama, tokens, (1, 2))
    same = k_pass(draft_of(llama, **of), tokens, inputs)
    torch.testing.assert_close(k_pass(draft_of(llama, mask=mask), tokens, inputs), same)


class Every(masks.Mask):
    """A mask that is no dataclass."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.inner(b, h, q, kv) & (kv <= q)


def test_a_mask_may_be_a_plain_class(llama):
    mask = Every(Window(5))
    assert repr(mask | Sinks(1)) == "Every(Window(5)) | Sinks(1)"
    assert [type(part) for part in mask.parts()] == [Every, Window]
    text = sd.Context.of(PROMPTS)
    one, other = (Masked(HFModel(llama), m) for m in (mask, Causal() & Window(5)))
    a, b = (m.score(m.cache(4, 60), text).logits for m in (one, other))
    torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="Tree depends on the slots"):
        Masked(HFModel(llama), Every(Tree(torch.tensor([3]), torch.tensor([[-1]]))))


def test_a_mask_alone_is_no_draft(llama):
    with pytest.raises(
        TypeError, match=r"draft is a mask: give the model that uses it, models.Masked\(model, Causal\(\)"
    ):
        sd.decoder(HFModel(llama)).draft(OWN)  # type: ignore[arg-type]
