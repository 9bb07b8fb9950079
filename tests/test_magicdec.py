"""MagicDec: its view holds the target's own KV, its logits are those of the dense definition, and outputs are the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import tiny
from transformers import DynamicCache

import specdec as sd
from specdec.configs import blocks_of, cache_name
from specdec.drafts import MagicDec
from specdec.masks import Causal, Sinks, Strided, Window
from specdec.models import Windowed
from specdec.pruning import H2O, Needs, SnapKV, Uniform
from specdec.rng import seeds

PROMPTS = [list(range(3, 43)), [7], [5, 6, 7] * 7, [9, 8]]
BUDGETS = [60, 6, 41, 80]
SNAP: dict[str, Any] = {"pruner": SnapKV(), "budget": 12, "observation": 4, "refresh": 3}
KINDS = {
    "original": MagicDec(window=6),
    "in cache": MagicDec(window=6, positions="in_cache"),
    "four sinks in cache": MagicDec(window=3, sinks=4, positions="in_cache"),
    "no sinks": MagicDec(window=2, sinks=0),
    "SnapKV": MagicDec(window=6, **SNAP),
    "all of it": MagicDec(window=200),
}
every_kind = pytest.mark.parametrize("draft", KINDS.values(), ids=KINDS.keys())


def target_of(family: str = "llama", **changes: Any) -> sd.HFModel:
    return sd.HFModel(tiny(family, num_hidden_layers=3, **changes))


@pytest.fixture(scope="module")
def target() -> sd.HFModel:
    return target_of()


class Rounds:
    """A draft next to its target, with every accepted token in the test's hands."""

    def __init__(self, target: sd.HFModel, draft: MagicDec, prompts: list[list[int]], seed: int = 0):
        self.target, self.generator = target, torch.Generator().manual_seed(seed)
        self.draft = draft.bind(target, sd.Sampling())
        self.context = sd.Context.of(prompts, capacity=160)
        self.cache = target.cache(len(prompts), 160)
        self.rng = sd.Philox(seeds(seed, len(prompts)))
        target.score(self.cache, self.context)
        self.state = self.draft.init(self.context, self.cache)
        self._commit(sd.Proposal.none(len(prompts)), [0] * len(prompts))

    def propose(self, budget: list[int]) -> sd.Proposal:
        proposal, self.state = self.draft.propose(self.state, self.context, torch.tensor(budget), self.rng)
        return proposal

    def verify(self, proposal: sd.Proposal, accepted: list[int]) -> None:
        self.target.score(self.cache, self.context, proposal if proposal.nodes else None)
        self._commit(proposal, accepted)

    def _commit(self, proposal: sd.Proposal, accepted: list[int]) -> None:
        B, N = proposal.tokens.shape
        took = torch.tensor(accepted)
        path = torch.where(torch.arange(N) < took[:, None], torch.arange(N), -1)
        bonus = torch.randint(1, self.target.vocab_size, (B,), generator=self.generator)
        verdict = sd.Verdict.of(proposal, path, took, bonus)
        self.cache.commit(self.context, verdict)
        round: Any = type("Round", (), {"context": self.context, "proposal": proposal, "verdict": verdict})
        self.state = self.draft.caught_up(self.draft.observe(self.state, round), took + 1)
        self.context = self.context.append(verdict.tokens, took + 1)

    def keep(self, rows: list[int]) -> None:
        at = torch.tensor(rows)
        self.context, self.rng, self.cache = (
            self.context.select(at),
            self.rng.select(at),
            self.cache.select(at),
        )
        self.state = self.draft.follow(self.draft.select(self.state, at), self.cache)


# -- what the view holds -----------------------------------------------------------------------------------------------


def check_view(run: Rounds) -> None:
    """Every visible committed position holds the target's entries, to the bit."""
    view = run.state.cache
    for b, n in enumerate(run.context.length.tolist()):
        n -= 1  # the last committed token is in nobody's cache
        assert view.exact[b] == n == int(run.cache.length[b])
        positions = [p for p in range(n) if p > n - view.window or p < view.sinks]
        for p in positions:
            slot = int(view.slot(torch.tensor(p).numpy()))
            for mine, theirs in zip(view.layers, run.cache.layers):
                turned = p < view.sinks and view.view.rotation is not None
                assert turned or torch.equal(mine[0][b, slot], theirs[0][b, p])
                assert torch.equal(mine[1][b, slot], theirs[1][b, p])


@every_kind
def test_committed_positions_hold_the_targets_entries_and_the_target_is_never_written(target, draft):
    run = Rounds(target, draft, [*PROMPTS[:1], [7, 7, 7, 7], *PROMPTS[2:3], [9, 8, 7, 6]])
    script = [
        [4, 0, 2, 3],
        [0, 0, 0, 0],
        [4, 4, 4, 4],
        [1, 3, 0, 2],
        [0, 4, 1, 0],
        [2, 2, 2, 2],
        [4, 1, 3, 0],
    ]
    for number, accepted in enumerate(script):
        before = [block.clone() for block in run.cache._blocks]
        proposal = run.propose([4] * len(accepted))
        assert all(torch.equal(a, b) for a, b in zip(before, run.cache._blocks))
        run.verify(proposal, accepted)
        check_view(run)
        if number == 3:
            script[4:] = [[line[0], line[3], line[2]] for line in script[4:]]
            run.keep([0, 3, 2])
            check_view(run)
        if number == 5:
            script[6:] = [[line[2], line[0]] for line in script[6:]]
            run.keep([2, 0])
            check_view(run)


@pytest.mark.parametrize("length", [2, 19, 30, 38, 41])
def test_a_view_follows_a_target_that_was_rolled_back(target, length):
    run = Rounds(target, MagicDec(window=6, block=4, **SNAP), [PROMPTS[0], PROMPTS[2]])
    run.verify(run.propose([4, 4]), [4, 1])
    shorter = sd.Context.of([[*run.context.row(0)[:length], 1], run.context.row(1)], capacity=160)
    target.prefill(run.cache, shorter)
    run.state.cache.catch_up()
    run.context = shorter
    check_view(run)
    assert all(int(kept[0].max()) < length for kept in run.state.cache.kept)
    # The latest that was no longer seen.
    assert all(int(kept[1].max()) == 21 - 6 for kept in run.state.cache.kept)
    run.propose([4, 4])


def test_choosing_entries_leaves_the_targets_cache_as_it_is(target):
    run = Rounds(target, MagicDec(window=6, **SNAP), PROMPTS)
    before = [block.clone() for block in run.cache._blocks]
    run.state.cache.choose(SnapKV(), [12] * 3, 4, range(len(PROMPTS)))
    assert all(torch.equal(a, b) for a, b in zip(before, run.cache._blocks))


def test_a_pruner_may_choose_what_the_view_does_not_show(target, monkeypatch):
    view = Rounds(target, MagicDec(window=6, sinks=2, block=4), [PROMPTS[0][:11], PROMPTS[0][:9]]).state.cache
    positions, number = view.candidates([1, 0])
    assert [row[:n] for row, n in zip(positions.tolist(), number.tolist())] == [[2, 3], [2, 3, 4, 5]]
    monkeypatch.setattr(type(view), "shows", lambda self, q, p: (p % 3 == 0) | (p > q - 4))
    positions, number = view.candidates([1, 0])
    assert [row[:n] for row, n in zip(positions.tolist(), number.tolist())] == [[1, 2, 4, 5], [1, 2, 4, 5, 7]]


def test_a_view_does_not_grow_with_the_text(target):
    sizes = set()
    for length in (5, 50, 140):
        view = Rounds(target, MagicDec(window=6, block=4), [[1] * length]).state.cache
        sizes.add(sum(block.numel() for block in view._blocks))
        assert all(k.shape[1] == 1 + 6 + 4 - 1 for k, _ in view.layers)
    assert len(sizes) == 1


# -- what it computes --------------------------------------------------------------------------------------------------


def plain_logits(model: Any, text: list[int], committed: int, masks: list[torch.Tensor]) -> torch.Tensor:
    """``[L, V]`` of a dense forward: full attention below ``committed``, ``masks[layer] [Hq, L, L]`` from there on."""
    L = len(text)
    causal = torch.tril(torch.ones(L, L, dtype=torch.bool))
    handles = []
    for layer, seen in zip(blocks_of(model), masks):
        seen = torch.where((torch.arange(L) < committed)[:, None], causal, seen & causal)
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))[None]

        def hook(module: Any, args: Any, kwargs: Any, mask: torch.Tensor = mask) -> Any:
            return args, {**kwargs, "attention_mask": mask}

        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.inference_mode():
            return model(torch.tensor([text]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()


def windows(L: int, window: int, sinks: int) -> torch.Tensor:
    q, p = torch.arange(L)[:, None], torch.arange(L)
    return (p > q - window) | (p < sinks)


def drafted_logits(run: Rounds, tokens: torch.Tensor) -> torch.Tensor:
    """``[B, N, V]``: the view's logits before each of ``tokens [B, N]``, fed one at a time as a draft does."""
    view, out = run.draft.view, []
    for n in range(tokens.shape[1]):
        sofar = sd.Proposal.chain(tokens[:, :n], torch.full((len(tokens),), n)) if n else None
        out.append(view.score(run.state.cache, run.context, sofar, start=n - 1 if n else None).logits[:, 0])
    return torch.stack(out, 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt", "gemma2"])
def test_logits_are_those_of_a_dense_mask_over_the_targets_states(family):
    # Windows of their own reach beyond the text: the plain forward below has the view's mask only.
    changes = {"sliding_window": 64} if family in ("mistral", "gemma2") else {}
    target = sd.HFModel(tiny(family, **changes))
    model = tiny(family, **changes)
    model.set_attn_implementation("eager" if family == "gemma2" else "sdpa")
    run = Rounds(target, MagicDec(window=5, sinks=2, block=4), [PROMPTS[0], [4, 9], [5, 6, 7] * 3])
    generator = torch.Generator().manual_seed(1)
    for accepted in ([0, 0, 0], [4, 2, 0], [1, 4, 3]):
        tokens = torch.randint(1, 97, (3, 4), generator=generator)
        got = drafted_logits(run, tokens)
        for b in range(3):
            text = run.context.row(b) + tokens[b].tolist()
            C = len(run.context.row(b))
            want = plain_logits(model, text, C - 1, [windows(len(text), 5, 2)[None]] * len(blocks_of(model)))
            # Eager attention rounds its weights to float32.
            atol = 1e-3 if family == "gemma2" else 1e-8
            torch.testing.assert_close(got[b], want[C - 1 : -1], rtol=1e-6, atol=atol)
        run.verify(sd.Proposal.chain(tokens, torch.full((3,), 4)), accepted)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox"])
def test_positions_in_the_cache_put_the_sinks_right_before_the_window(family):
    """The reference asks transformers for the sinks' keys at other positions, and knows nothing of turning keys."""
    target, model = target_of(family), tiny(family, num_hidden_layers=3)
    model.set_attn_implementation("sdpa")
    window, sinks = 5, 2
    draft = MagicDec(window=window, sinks=sinks, positions="in_cache", block=4)
    run = Rounds(target, draft, [PROMPTS[0], [4, 9], [5, 6, 7] * 3])
    generator = torch.Generator().manual_seed(1)
    turned = 0
    for accepted in ([0, 0, 0], [4, 2, 0], [1, 4, 3], [0, 0, 0]):
        tokens = torch.randint(1, 97, (3, 4), generator=generator)
        got = drafted_logits(run, tokens)
        for b in range(3):
            text = run.context.row(b)
            whole = cached(model, text[:-1], 0)
            recent = [(k.clone(), v.clone()) for k, v in whole]  # the target's, then the draft's own
            for n, token in enumerate([text[-1], *tokens[b, :3].tolist()]):
                q = len(text) - 1 + n
                gone = max(0, q - window + 1 - sinks)
                turned += gone > 0
                moved = cached(model, text[: min(sinks, q)], gone)
                past = DynamicCache()
                for layer, ((k, v), (mk, _)) in enumerate(zip(recent, moved)):
                    low = max(sinks, q - window + 1)
                    at = [*range(min(sinks, q)), *range(low, q)]
                    keys, values = k[:, :, at].clone(), v[:, :, at]
                    keys[:, :, : mk.shape[2]] = mk
                    past.update(keys, values, layer)
                with torch.inference_mode():
                    given = {cache_name(model): past, "position_ids": torch.tensor([[q]])}
                    out = model(torch.tensor([[token]]), **given)
                torch.testing.assert_close(got[b, n], out.logits[0, -1], rtol=1e-4, atol=1e-4)
                new = [(one.keys[:, :, -1:], one.values[:, :, -1:]) for one in past.layers]
                recent = [(torch.cat([k, a], 2), torch.cat([v, c], 2)) for (k, v), (a, c) in zip(recent, new)]
        run.verify(sd.Proposal.chain(tokens, torch.full((3,), 4)), accepted)
    assert turned > 20


def cached(model: Any, ids: list[int], shift: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's keys and values ``[1, H, L, D]`` of a text that begins at position ``shift``."""
    with torch.inference_mode():
        positions = torch.arange(len(ids))[None] + shift
        out = model(torch.tensor([ids]), position_ids=positions, use_cache=True)
    return [(one.keys, one.values) for one in getattr(out, cache_name(model)).layers]


class Own:
    """A pruner that keeps other slots in every row, head and layer, and notes when it was asked."""

    needs = Needs(attention=True)

    def __init__(self, layers: int = 3) -> None:
        self.layers, self.calls, self.kept = layers, 0, [torch.empty(0)] * layers

    def __call__(
        self, keys: Any, values: Any, length: Any, budget: int, attention: Any = None
    ) -> torch.Tensor:
        layer = self.calls % self.layers
        self.calls += 1
        assert attention.shape[2] == 2
        kept = SnapKV(kernel=1)(keys, values, length, budget, attention=attention)
        kept[:, 0, -1] = -1  # one less in the first head
        self.kept[layer] = torch.where(kept >= 0, kept + 1, -1)  # positions: the one sink is no candidate
        return kept


def test_chosen_entries_are_seen_by_the_heads_that_they_were_chosen_for(target):
    model = tiny("llama", num_hidden_layers=3)
    model.set_attn_implementation("sdpa")
    own, window, sinks = Own(), 4, 1
    draft = MagicDec(window=window, sinks=sinks, pruner=own, budget=7, observation=2, refresh=2, block=4)
    run = Rounds(target, draft, [PROMPTS[0], PROMPTS[2], [6, 1, 9, 4]])
    generator, layers_differ = torch.Generator().manual_seed(1), False
    for accepted in ([0, 0, 0], [4, 2, 0], [1, 4, 3], [4, 0], [4, 4]):
        B = len(accepted)
        if run.context.batch > B:  # others move up
            own.kept = [kept[[2, 0]] for kept in own.kept]
            run.keep([2, 0])
        tokens = torch.randint(1, 97, (B, 4), generator=generator)
        got = drafted_logits(run, tokens)
        for b in range(B):
            text = run.context.row(b) + tokens[b].tolist()
            C, L = len(run.context.row(b)), len(text)
            masks = []
            for kept in own.kept:
                extra = torch.zeros(2, L, dtype=torch.bool)
                for h in range(2):
                    extra[h, kept[b, h][kept[b, h] >= 0]] = True
                masks.append(windows(L, window, sinks) | extra.repeat_interleave(2, 0)[:, None])
            layers_differ |= not all(torch.equal(masks[0], mask) for mask in masks)
            want = plain_logits(model, text, C - 1, masks)
            torch.testing.assert_close(got[b], want[C - 1 : -1], rtol=1e-7, atol=1e-7)
        run.verify(sd.Proposal.chain(tokens, torch.full((B,), 4)), accepted)
    assert layers_differ
    assert own.calls == 3 * (1 + 2)  # once for the prompt, then after 2 and 4 rounds


def test_the_observers_queries_are_those_of_the_targets_own_forward(target):
    from specdec.drafts.magicdec.observation import observe

    found: list[torch.Tensor] = []
    cache = target.cache(2, 30)
    context = sd.Context.of([PROMPTS[0][:20], PROMPTS[2][:9]])
    score, forward = target.score, target._path.forward

    def watched(store: Any, plan: Any, *rest: Any) -> Any:
        plan.watch = lambda query, *how: found.append(query)
        return forward(store, plan, *rest)

    target._path.forward = watched
    try:
        score(cache, context)
    finally:
        target._path.forward = forward
    again = [one.queries for one in observe(target, cache, [0, 1], 3)]
    assert len(found) == len(again) == 3
    for layer in range(3):
        whole = found[layer][0]  # [Hq, 29, D], row after row
        want = torch.stack([whole[:, 17:20], whole[:, 26:29]])
        torch.testing.assert_close(again[layer], want, rtol=1e-9, atol=1e-9)


# -- what comes out ----------------------------------------------------------------------------------------------------


def texts(
    target: sd.HFModel, draft: Any, settings: dict[str, Any], verifier: Any, rows: list[int], **call: Any
) -> Any:
    base = sd.decoder(target).sampling(**settings).verifier(verifier)
    decoder = (base if draft is None else base.draft(draft, length=4)).build()
    prompts = [(PROMPTS[b] * 4)[: max(4, len(PROMPTS[b]))] for b in rows]
    return decoder.generate(prompts, [BUDGETS[b] for b in rows], **call)


@pytest.mark.parametrize(
    ("draft", "settings"),
    [
        pytest.param(
            draft, {"temperature": t}, id=f"{name}-{t}", marks=() if (i + j) % 16 == 1 else pytest.mark.slow
        )
        for i, (name, draft) in enumerate({**KINDS, "a windowed model": "windowed"}.items())
        for j, t in enumerate((0.0, 0.6))
    ],
)
def test_output_is_plain_decodings_for_ragged_rows_that_end_at_different_rounds(target, draft, settings):
    if draft == "windowed":
        draft = sd.drafts.Model(Windowed(sd.HFModel(tiny("llama", seed=1)), window=6))
    verifier, seed = (sd.Rejection() if not settings["temperature"] else sd.Coupled()), [1, 2, 3, 4]
    plain = texts(target, None, settings, verifier, [0, 1, 2, 3], seed=seed)
    out = texts(target, draft, settings, verifier, [0, 1, 2, 3], seed=seed)
    assert out.ids == plain.ids
    alone = [texts(target, draft, settings, verifier, [b], seed=[seed[b]]) for b in range(4)]
    assert [one.ids[0] for one in alone] == plain.ids
    # Not only the text: what is proposed does not depend on batch mates either.
    assert [one.row_stats[0].tau for one in alone] == [row.tau for row in out.row_stats]


def test_a_view_of_everything_is_never_rejected_and_a_narrow_one_is(target):
    greedy = {"temperature": 0.0}
    every = texts(target, KINDS["all of it"], greedy, sd.Rejection(), [0, 2], seed=0).stats
    narrow = texts(target, KINDS["original"], greedy, sd.Rejection(), [0, 2], seed=0).stats
    assert every.acceptance == [1.0] * 4
    assert narrow.acceptance[0] < 1


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"window": 0}, "window is 0"),
        ({"sinks": -1}, "sinks is -1"),
        ({"block": 0}, "block is 0"),
        ({"positions": "cache"}, "positions is 'cache'"),
        ({"positions": "in_cache", "pruner": SnapKV()}, "the cache has no common positions"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": []}, "budget is 0"),
        ({"observation": 0}, "observation is 0"),
        ({"refresh": 0}, "refresh is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, what):
    with pytest.raises(ValueError, match=what):
        MagicDec(**settings)


def test_a_target_without_kv_is_refused():
    table = sd.TableModel.random(5)
    with pytest.raises(ValueError, match="give an HFModel"):
        sd.decoder(table).draft(MagicDec()).build()
    with pytest.raises(ValueError, match="give an HFModel"):
        sd.decoder(Windowed(target_of(), 4)).draft(MagicDec()).build()
    with pytest.raises(ValueError, match="'gptj' runs padded"):
        sd.decoder(sd.HFModel(tiny("gptj"))).draft(MagicDec()).build()


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_refused_where_keys_would_be_turned(family):
    target = sd.HFModel(tiny(family))
    with pytest.raises(ValueError, match=rf"those of '{family}' cannot: .*use positions='original'"):
        sd.decoder(target).draft(MagicDec(positions="in_cache")).build()
    assert sd.decoder(target).draft(MagicDec()).build()


def test_frequencies_that_follow_the_length_are_left_as_they_are():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = sd.HFModel(tiny("llama", rope_parameters=rope, max_position_embeddings=48))
    context = sd.Context.of([PROMPTS[0]], capacity=48)
    before = target.score(target.cache(1, 48), context).logits
    draft = MagicDec(window=4, sinks=2, positions="in_cache")
    sd.decoder(target).draft(draft).build().generate([PROMPTS[0]], 8, seed=0)
    assert torch.equal(target.score(target.cache(1, 48), context).logits, before)


def test_layers_that_rotate_differently_are_refused():
    with pytest.raises(ValueError, match="its layers rotate keys differently"):
        sd.decoder(sd.HFModel(tiny("gemma3_text"))).draft(MagicDec(positions="in_cache")).build()


def test_keys_that_turn_otherwise_are_found_out_by_trying(target, monkeypatch):
    from specdec.drafts.magicdec.rotation import Rotation

    monkeypatch.setattr(Rotation, "__call__", lambda self, keys, by: keys)
    with pytest.raises(ValueError, match="rotating its keys gives other keys than moving them"):
        sd.decoder(target).draft(MagicDec(positions="in_cache")).build()


def test_rows_shorter_than_the_sinks_are_refused(target):
    decoder = sd.decoder(target).draft(MagicDec(sinks=4)).build()
    with pytest.raises(
        ValueError, match="prompt 1 has 2 tokens, and draft 'magicdec' needs 4 at least: give a longer prompt"
    ):
        decoder.generate([[1, 2, 3, 4], [1, 2]], 4)


def test_chains_longer_than_the_block_and_budgets_for_other_models_are_refused(target):
    with pytest.raises(ValueError, match=r"use MagicDec\(block=4\)"):
        sd.decoder(target).draft(MagicDec(block=3), length=4).build()
    with pytest.raises(ValueError, match="budget has 2 numbers and the target 3 layers"):
        sd.decoder(target).draft(MagicDec(pruner=SnapKV(), budget=[4, 5])).build()


def test_an_executor_that_does_not_tell_of_the_new_cache_is_found_out(target):
    run = Rounds(target, MagicDec(window=4), [[1, 2], [3, 4], [5, 6]])
    at = torch.tensor([0, 2])
    run.context, run.cache, run.state = (
        run.context.select(at),
        run.cache.select(at),
        run.draft.select(run.state, at),
    )
    run.rng = run.rng.select(at)
    with pytest.raises(RuntimeError, match=r"calls draft.follow\(state, cache\)"):
        run.verify(run.propose([2, 2]), [0, 0])


def test_an_unbound_draft_says_so(target):
    context = sd.Context.of([[1, 2]])
    with pytest.raises(RuntimeError, match="has no target yet"):
        MagicDec().init(context, target.cache(1, 4))


@dataclass(frozen=True)
class Returns:
    """A pruner that returns whatever it is told to make of a correct choice."""

    wrong: Callable[[torch.Tensor], Any]
    needs = Needs()

    def __call__(self, keys: Any, values: Any, length: Any, budget: int, attention: Any = None) -> Any:
        return self.wrong(Uniform()(keys, values, length, budget))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda kept: kept.tolist(), "Returns returned a list: return slot numbers, a tensor of torch.long"),
        (lambda kept: kept.float(), "Returns returned a tensor of torch.float32: return slot numbers"),
        (lambda kept: kept.int(), "Returns returned a tensor of torch.int32: return slot numbers"),
        (lambda kept: kept[0], r"Returns returned slots of shape \[2, 4\]: return \[2, 2, K\] for 2 rows and 2 KV heads"),
        (lambda kept: kept[:, :1], r"shape \[2, 1, 4\]: return \[2, 2, K\]"),
        (lambda kept: kept.repeat(1, 1, 2), r"shape \[2, 2, 8\]: return .* K at most the budget of 4"),
        (lambda kept: kept.to("meta"), "Returns returned slots on meta for keys on cpu: return them on the keys' device"),
        (lambda kept: kept + 1, "Returns returned slot 36 for KV head 0 of row 0 and that row uses slots 0 to 35: choose below"),
        (lambda kept: torch.stack([kept[0], kept[1] + 10]), "Returns returned slot 20 for KV head 0 of row 1 and that row uses slots 0 to 16: choose below"),
        (lambda kept: kept - 2, "Returns returned slot -2 for KV head 0 of row 0"),
        (lambda kept: torch.full_like(kept, 3), "Returns returned slot 3 for KV head 0 of row 0 twice: return each slot once"),
    ],
)  # fmt: skip
def test_what_a_pruner_returns_is_checked(target, wrong, message):
    decoder = sd.decoder(target).draft(MagicDec(window=4, pruner=Returns(wrong), budget=4), 2).build()
    with pytest.raises(ValueError, match=message):
        decoder.generate([PROMPTS[0], PROMPTS[2]], 9)


@pytest.mark.slow
def test_chosen_slots_may_be_fewer_and_in_any_order(target):
    plain = texts(target, None, {"temperature": 0.0}, sd.Rejection(), [0, 2], seed=0)
    for change in (
        lambda kept: kept.flip(-1),
        lambda kept: kept[..., :0],
        lambda kept: kept.where(kept > 3, -1),
    ):
        draft = MagicDec(window=4, pruner=Returns(change), budget=6)
        assert texts(target, draft, {"temperature": 0.0}, sd.Rejection(), [0, 2], seed=0).ids == plain.ids


@pytest.mark.parametrize(
    ("pruner", "says"),
    [
        (SnapKV(), r"SnapKV: budget is 4 .*: raise the budget, or observe fewer queries"),
        (H2O(recent=9), "H2O: budget is 4"),
    ],
)
def test_a_budget_that_a_pruner_cannot_keep_is_refused_when_it_is_built(target, pruner, says):
    draft = sd.drafts.MagicDec(window=16, pruner=pruner, budget=4, observation=4)
    with pytest.raises(ValueError, match=says):
        sd.decoder(target).draft(draft).build()


@pytest.mark.parametrize(
    ("pruner", "message"),
    [
        (SnapKV, r"pruner is the class SnapKV: give an instance, SnapKV\(\)"),
        (lambda *given: given, "declares what it reads, such as needs = pruning.Needs"),
        (SnapKV().needs, "declares what it reads, such as needs = pruning.Needs"),
    ],
)
def test_what_is_no_pruner_is_refused(pruner, message):
    with pytest.raises(TypeError, match=message):
        MagicDec(pruner=pruner)


def test_a_pruner_adds_to_masks_with_a_reach(target):
    greedy = {"temperature": 0.0}
    plain = texts(target, None, greedy, sd.Rejection(), [0, 2], seed=0).ids
    for mask in (Causal() & Window(5), Causal() & (Sinks(2) | Window(9) & (Window(3) | Strided(4)))):
        draft = MagicDec(mask=mask, pruner=H2O(), budget=8, observation=4, refresh=3)
        made = texts(target, draft, greedy, sd.Rejection(), [0, 2], seed=0)
        assert made.ids == plain
    endless = MagicDec(mask=Causal() & (Window(3) | Strided(4)), pruner=H2O(), budget=8)
    with pytest.raises(
        ValueError, match=r"^mask is .*, which has no reach, and a pruner .*: join the mask with a window"
    ):
        sd.decoder(target).draft(endless, 3).build()


@pytest.mark.slow
def test_other_pruners_and_budgets_a_layer_fit_in(target):
    plain = texts(target, None, {"temperature": 0.0}, sd.Rejection(), [0, 1, 2, 3], seed=0).ids
    for settings in (
        {"pruner": Uniform(), "budget": 9},
        {"pruner": SnapKV(), "budget": [20, 9, 5], "observation": 2},
    ):
        draft = MagicDec(window=4, **settings)  # type: ignore[arg-type]
        assert texts(target, draft, {"temperature": 0.0}, sd.Rejection(), [0, 1, 2, 3], seed=0).ids == plain
