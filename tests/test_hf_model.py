"""HFModel against the plain forward of the same model: every family, every way in which a cache may be used."""

from __future__ import annotations

import pytest
import torch
from forwards import ROWS, TOLERANCE, accept, error, hooks_of, path_to, plain, propose
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, FAMILIES, FLOAT32, slow, tiny

from specdec.models import SUPPORTED, HFModel
from specdec.tree import depths
from specdec.types import Context, Proposal


def lists(context):
    return [context.row(b) for b in range(context.batch)]


def tolerance(family):
    return 3e-5 if family in FLOAT32 else TOLERANCE


def test_every_supported_family_is_tested():
    assert set(CONFIGS) == set(SUPPORTED)


@pytest.mark.parametrize("family", slow(FAMILIES))
def test_every_family_in_every_phase(family):
    model = tiny(family)
    target, tol = HFModel(model, prefill_chunk=20), tolerance(family)
    context = Context.of(ROWS)
    cache = target.cache(4, 64)
    # prefill in pieces, then decode
    target.prefill(cache, context)
    assert cache.length.tolist() == [0, 32, 14, 1]
    assert error(model, ROWS, target.score(cache, context).logits) < tol
    # verify ragged proposals, and take some nodes
    proposal = propose(target, [6, 5, 0, 3])
    logits = target.score(cache, context, proposal).logits
    assert error(model, ROWS, logits, proposal) < tol
    assert logits[2, 1:].abs().max() == 0  # nodes that do not exist
    paths = [[0, 2, 4], [0, 2], [], [0]] if target.supports_trees else [[0, 1, 2], [0, 1], [], [0]]
    verdict = accept(proposal, paths)
    cache.commit(context, verdict)
    assert cache.length.tolist() == [4, 35, 15, 3]
    context = context.append(verdict.tokens, verdict.accepted + 1)
    assert [cache.row(b) for b in range(4)] == [row[:-1] for row in lists(context)]
    # the committed nodes' keys are where they belong; the next proposal sits on top of them
    again = propose(target, [3, 6, 6, 0], seed=1)
    logits = target.score(cache, context, again).logits
    assert error(model, lists(context), logits, again) < tol
    # roll back to a shorter text that ends differently
    back = Context.of([[*row[: max(1, len(row) - 4)], 44] for row in lists(context)])
    assert error(model, lists(back), target.score(cache, back).logits) < tol


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
def test_float64_is_exact_to_float64(family):
    model = tiny(family)
    model.set_attn_implementation("sdpa")
    target = HFModel(model)
    context, proposal = Context.of(ROWS), propose(target, [6, 5, 0, 3])
    logits = target.score(target.cache(4, 64), context, proposal).logits
    assert error(model, ROWS, logits, proposal) < 1e-13


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon", "gpt_neo"])
def test_low_precision_stays_close(family):
    model = tiny(family, dtype=torch.bfloat16)
    target = HFModel(model)
    context, proposal = Context.of(ROWS), propose(target, [6, 5, 0, 3])
    logits = target.score(target.cache(4, 64), context, proposal).logits
    assert logits.dtype == torch.bfloat16
    exact = tiny(family, dtype=torch.float32).float()
    exact.load_state_dict(model.state_dict())
    own = max(
        float((plain(model, r)[-1] - plain(exact, r)[-1]).abs().max() / plain(exact, r)[-1].abs().max())
        for r in ROWS
    )
    assert error(exact, ROWS, logits, proposal) < 3 * own + 0.02


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "falcon", "mpt"])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_pieces_of_a_prompt(family, chunk):
    model = tiny(family)
    target = HFModel(model, prefill_chunk=chunk)
    context, proposal = Context.of(ROWS), propose(target, [0, 6, 2, 6])
    cache, counted = target.cache(4, 64), []
    forward = target._path.forward
    target._path.forward = lambda store, plan, *rest: (
        counted.append(sum(plan.counts)) or forward(store, plan, *rest)
    )
    logits = target.score(cache, context, proposal).logits
    target._path.forward = forward
    assert error(model, ROWS, logits, proposal) < tolerance(family)
    assert sum(counted) == sum(map(len, ROWS)) + 14
    assert max(counted) <= max(chunk, 36)


def test_prefill_makes_no_logits_and_score_only_those_that_are_wanted(llama):
    seen = []
    head = llama.clone.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    try:
        cache, context = llama.cache(4, 64), Context.of(ROWS)
        llama.prefill(cache, context)
        assert seen == []
        llama.score(cache, context)
        llama.score(llama.cache(4, 64), context)
        assert seen == [4, 4]
    finally:
        hook.remove()


@pytest.mark.parametrize("family", ["llama", "gemma2", "codegen", "gpt_neo"])
def test_start_goes_on_where_an_earlier_call_ended(family):
    model = tiny(family)
    target = HFModel(model)
    context, whole = Context.of(ROWS), propose(target, [6, 5, 0, 3])
    cache = target.cache(4, 64)
    expected = target.score(target.cache(4, 64), context, whole).logits
    parts = [target.score(cache, context, None).logits]
    done = 0
    for upto in (1, 3, 6):
        sofar = Proposal(whole.tokens[:, :upto], whole.parents[:, :upto], whole.size.clamp(max=upto))
        parts.append(target.score(cache, context, sofar, start=done).logits)
        done = upto
    torch.testing.assert_close(
        torch.cat(parts, 1), expected, rtol=0, atol=TOLERANCE * float(expected.abs().max())
    )
    assert cache.fed_nodes.tolist() == [6, 5, 0, 3]
    cache.commit(context, accept(whole, [[0], [0], [], [0]]))
    assert cache.length.tolist() == [2, 34, 15, 3]


def test_start_without_the_earlier_nodes_is_refused(llama):
    context, proposal = Context.of(ROWS), propose(llama, [6, 5, 0, 3])
    cache = llama.cache(4, 64)
    llama.score(cache, context)
    with pytest.raises(ValueError, match="row 0 has not been fed the nodes before"):
        llama.score(cache, context, proposal, start=2)
    with pytest.raises(ValueError, match="start is -1"):
        llama.score(cache, context, proposal, start=-1)
    assert llama.score(cache, context, proposal, start=6).logits.shape == (4, 0, 97)


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_only_the_rows_asked_for_are_fed(family):
    model = tiny(family)
    target = HFModel(model)
    context, proposal = Context.of(ROWS), propose(target, [6, 5, 4, 3])
    cache = target.cache(4, 64)
    logits = target.score(cache, context, proposal, rows=torch.tensor([3, 1])).logits
    assert cache.length.tolist() == [0, 33, 0, 2]
    assert cache.fed_nodes.tolist() == [0, 5, 0, 3]
    assert logits[[0, 2]].abs().max() == 0
    for b in (1, 3):
        one = proposal.select(torch.tensor([b]))
        assert error(model, [ROWS[b]], logits[b : b + 1], one) < TOLERANCE
    # the others join later
    logits = target.score(cache, context, proposal, rows=torch.tensor([0, 2])).logits
    for b in (0, 2):
        one = proposal.select(torch.tensor([b]))
        assert error(model, [ROWS[b]], logits[b : b + 1], one) < TOLERANCE
    cache.commit(context, accept(proposal, [[0], [0], [0], [0]]))
    assert cache.length.tolist() == [2, 34, 16, 3]


def test_a_draft_that_never_fed_its_last_node_commits_the_others(llama):
    context = Context.of(ROWS)
    cache = llama.cache(4, 64)
    tokens = torch.arange(12).view(4, 3)
    llama.score(cache, context)
    two = Proposal.chain(tokens[:, :2], torch.tensor([2, 2, 2, 0]))
    llama.score(cache, context, two, start=0)
    three = Proposal.chain(tokens, torch.tensor([3, 3, 3, 0]))
    cache.commit(context, accept(three, [[0, 1, 2], [0], [], []]))
    assert cache.length.tolist() == [3, 34, 15, 2]
    assert cache.row(0) == [5, 0, 1]
    cache.commit(context, accept(three, [[0, 1, 2], [0], [], []]))  # nothing is taken twice
    assert cache.length.tolist() == [3, 34, 15, 2]


def test_rows_that_were_not_scored_commit_nothing(llama):
    context, proposal = Context.of(ROWS), propose(llama, [6, 6, 6, 6])
    cache = llama.cache(4, 64)
    llama.prefill(cache, context)
    cache.commit(context, accept(proposal, [[0, 1]] * 4))
    assert cache.length.tolist() == [0, 32, 14, 1]


# repeated and reordered; gaps filled from the end; the end gone; one left
@pytest.mark.parametrize("order", [[3, 1, 1], [0, 3, 2], [0, 1], [3], [2, 0, 1, 3]])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gptj"])
def test_rows_may_be_selected_reordered_and_repeated(family, order):
    model = tiny(family)
    target = HFModel(model)
    context, proposal = Context.of(ROWS), propose(target, [6, 5, 4, 3])
    cache = target.cache(4, 64)
    target.score(cache, context, proposal)
    assert cache.select(torch.arange(4)) is cache
    rows = torch.tensor(order)
    cache, context, proposal = cache.select(rows), context.select(rows), proposal.select(rows)
    leaf = [0, 2] if target.supports_trees else [0, 1]
    verdict = accept(proposal, [[[0], leaf, [0], []][b] for b in order])
    cache.commit(context, verdict)
    context = context.append(verdict.tokens, verdict.accepted + 1)
    assert [cache.row(b) for b in range(len(order))] == [row[:-1] for row in lists(context)]
    nodes = propose(target, [6] * len(order), seed=2, rows=len(order))
    calls = []
    forward = target._path.forward
    target._path.forward = lambda store, plan, *rest: (
        calls.append(sum(plan.counts)) or forward(store, plan, *rest)
    )
    assert error(model, lists(context), target.score(cache, context, nodes).logits, nodes) < TOLERANCE
    assert calls == [7 * len(order)]  # the bonus token and six nodes of each row: the rest was kept


@pytest.mark.parametrize("family", slow(f for f in FAMILIES if f not in {"gpt_oss", "mixtral"}))
def test_taps_are_the_hidden_states_of_every_fed_position(family):
    model = tiny(family)
    target = HFModel(model, prefill_chunk=9)
    layers = model.config.num_hidden_layers
    context, proposal = Context.of(ROWS), propose(target, [3, 2, 0, 6])
    cache, hooks = target.cache(4, 64), hooks_of(target.clone)
    target.score(cache, Context.of([ROWS[0], ROWS[1][:20], *ROWS[2:]]))
    fed = target.score(cache, context, proposal, taps=(0, 1, layers)).fed
    assert sorted(fed.layers) == [0, 1, layers]
    assert fed.row.tolist() == [0] * 4 + [1] * 15 + [2] + [3] * 7  # the last committed token is fed again
    assert fed.node.tolist() == [-1, 0, 1, 2] + [-1] * 13 + [0, 1] + [-1] + [-1, 0, 1, 2, 3, 4, 5]
    depth = depths(proposal.parents)
    for b, row in enumerate(ROWS):
        for i in (fed.row == b).nonzero()[:, 0].tolist():
            node, position = int(fed.node[i]), int(fed.position[i])
            assert position == len(row) + int(depth[b, node]) if node >= 0 else position < len(row)
        for node in range(-1, int(proposal.size[b])):
            if node >= 0 and node % 2:
                continue
            here = (fed.row == b) & (fed.node == node)
            ids = row + [int(proposal.tokens[b, n]) for n in path_to(proposal.parents[b], node)]
            with torch.no_grad():
                out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
            for layer in (0, 1, layers):
                ours = fed.layers[layer][here]
                if layer == layers:  # transformers gives this one after the final norm
                    ours = final_norm(model)(ours)
                theirs = out[layer][0, fed.position[here]]
                torch.testing.assert_close(
                    ours, theirs, rtol=0, atol=tolerance(family) * float(out[layer].abs().max())
                )
    assert hooks_of(target.clone) == hooks


def final_norm(model):
    body = getattr(model.base_model, "decoder", model.base_model)
    names = ("norm", "final_layer_norm", "final_layernorm", "final_norm", "layer_norm", "ln_f", "norm_f")
    return next(getattr(body, n) for n in names if getattr(body, n, None) is not None)


def test_taps_that_do_not_exist_are_refused(llama):
    with pytest.raises(ValueError, match=r"layer 3 does not exist; this model has 0 \(the embedding\) to 2"):
        llama.score(llama.cache(4, 64), Context.of(ROWS), taps=(3,))


def test_taps_when_nothing_is_fed(llama):
    cache, context = llama.cache(4, 64), Context.of(ROWS)
    llama.score(cache, context, propose(llama, [1, 1, 1, 1]))
    fed = llama.score(cache, context, propose(llama, [1, 1, 1, 1]), start=1, taps=(1,)).fed
    assert fed.layers[1].shape == (0, 32)
    assert fed.row.shape == (0,)


text = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(text, text, st.integers(0, 3)), min_size=1, max_size=4))
def test_a_cache_follows_any_edits_of_the_context(llama, steps):
    """Contexts that have nothing to do with each other, proposals that are committed or dropped: a fresh cache agrees."""
    cache = llama.cache(2, 32)
    for a, b, taken in steps:
        context = Context.of([a, b])
        proposal = propose(llama, [6, taken], rows=2)
        logits = llama.score(cache, context, proposal).logits
        fresh = llama.score(llama.cache(2, 32), context, proposal).logits
        torch.testing.assert_close(logits, fresh, rtol=0, atol=1e-9)
        cache.commit(context, accept(proposal, [[0, 2, 4][:taken], []]))
        assert cache.row(0) == a + [int(proposal.tokens[0, n]) for n in (0, 2, 4)[:taken]]
        assert cache.row(1) == b


def test_sync_keeps_the_longest_prefix_and_never_copies(llama):
    cache, context = llama.cache(4, 64), Context.of(ROWS)
    llama.score(cache, context)
    before = [buffer.data_ptr() for pair in cache.layers for buffer in pair]
    assert cache.sync(context).tolist() == [0, 32, 14, 1]  # the last committed token is always fed
    assert cache.length.tolist() == [1, 33, 15, 2]
    changed = Context.of([[6], [*ROWS[1][:10], 0, *ROWS[1][11:]], [*ROWS[2], 1, 2], [90]])
    assert cache.sync(changed).tolist() == [0, 10, 15, 0]
    assert cache.length.tolist() == [0, 10, 15, 1]
    assert [buffer.data_ptr() for pair in cache.layers for buffer in pair] == before
    with pytest.raises(ValueError, match="3 rows and the cache 4"):
        cache.sync(context.select(torch.tensor([0, 1, 2])))


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon"])
def test_what_unused_slots_hold_does_not_matter(family):
    target = HFModel(tiny(family))
    context, proposal = Context.of(ROWS), propose(target, [6, 5, 0, 3])
    cache = target.cache(4, 64)
    target.prefill(cache, context)
    expected = target.score(cache, context, proposal).logits
    for pair in cache.layers:
        for buffer in pair:
            for b, row in enumerate(ROWS):
                buffer[b, len(row) - 1 :] = 1e4
    again = target.score(cache, context, proposal).logits
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-12)


def test_a_forward_that_fails_leaves_the_token_index_true():
    model = tiny("llama")
    target = HFModel(model, prefill_chunk=8)
    cache, context = target.cache(4, 64), Context.of(ROWS)
    target.score(cache, Context.of([[5], ROWS[1][:12], ROWS[2][:3], [1, 2]]), propose(target, [6, 6, 6, 6]))
    forward, calls = target._path.forward, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args)

    target._path.forward = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        target.score(cache, context)
    target._path.forward = forward
    assert cache.fed_nodes.tolist() == [0, 0, 0, 0]
    assert error(model, ROWS, target.score(cache, context).logits) < TOLERANCE


def test_logits_and_activations_may_be_changed_and_trained_on(llama):
    context, proposal = Context.of(ROWS), propose(llama, [6, 6, 6, 6])
    for start in (None, 3):
        cache = llama.cache(4, 64)
        llama.score(cache, context, proposal)
        scores = llama.score(cache, context, proposal, start=start, taps=(1,))
        weight = torch.ones(32, dtype=torch.float64, requires_grad=True)
        (scores.fed.layers[1] * weight).sum().backward()
        scores.logits[0, 0] = 0
        assert weight.grad.abs().sum() > 0
        assert not scores.logits.is_inference()
