"""HFModel against the plain forward of the same model: every family, every way in which a cache may be used."""

from __future__ import annotations

import copy
import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, FLOAT32, byte_tokenizer, tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaModel

from specdec.cache.contiguous import KVShape, SlotCache, free_bytes
from specdec.models import SUPPORTED, HFModel, UnsupportedModel
from specdec.models.hf import self_check
from specdec.tree import depths
from specdec.types import Context, Proposal, Verdict

ROWS = [[5], list(range(3, 36)), [7, 8, 9] * 5, [90, 2]]
TREE = [-1, 0, 0, 1, 2, 4]
# Transformers' eager attention takes its softmax in float32, whatever the model's type.
TOLERANCE = 2e-6


def plain(model, ids):
    """``[n, V]`` logits after every token of ``ids``, by one forward without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def path_to(parents, node):
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = int(parents[node])
    return nodes[::-1]


def error(model, rows, logits, proposal=None, first=-1):
    """Largest relative difference of any logits that ``score`` gave to those of the plain forward."""
    worst = 0.0
    for b, row in enumerate(rows):
        size = 0 if proposal is None else int(proposal.size[b])
        for node in range(first, size):
            if (
                proposal is not None
                and node >= 0
                and node + 1 < size
                and int(proposal.parents[b, node + 1]) == node
            ):
                continue  # its logits are on the way to the next node's
            ids = (
                []
                if proposal is None
                else [int(proposal.tokens[b, n]) for n in path_to(proposal.parents[b], node)]
            )
            expected = plain(model, row + ids)[-len(ids) - 1 :]
            ours = [
                logits[b, n - first]
                for n in [-1, *(path_to(proposal.parents[b], node) if ids else [])]
                if n >= first
            ]
            expected = expected[-len(ours) :]
            worst = max(worst, float((torch.stack(ours) - expected).abs().max() / expected.abs().max()))
    return worst


def propose(target, size, seed=0, rows=4):
    g = torch.Generator().manual_seed(seed)
    N = len(TREE)
    parents = (
        torch.tensor([TREE] * rows) if target.supports_trees else torch.arange(-1, N - 1).expand(rows, N)
    )
    return Proposal(torch.randint(0, 97, (rows, N), generator=g), parents, torch.tensor(size))


def accept(proposal, paths):
    """A verdict that takes these nodes of each row, and the bonus token 11."""
    path = torch.full((len(paths), proposal.nodes), -1)
    for b, nodes in enumerate(paths):
        path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
    return Verdict.of(proposal, path, torch.tensor([len(p) for p in paths]), torch.full((len(paths),), 11))


def lists(context):
    return [context.row(b) for b in range(context.batch)]


@pytest.fixture(scope="module")
def llama():
    return HFModel(tiny("llama"))


def tolerance(family):
    return 3e-5 if family in FLOAT32 else TOLERANCE


def test_every_supported_family_is_tested():
    assert set(FAMILIES) == set(SUPPORTED)


@pytest.mark.parametrize("family", list(FAMILIES))
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


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in {"gpt_oss", "mixtral"}])
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


def hooks_of(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def final_norm(model):
    body = getattr(model.base_model, "decoder", model.base_model)
    names = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")
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


def digest(model):
    h = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        h.update(name.encode() + value.contiguous().numpy().tobytes())
    for name, value in sorted(model.named_buffers()):
        h.update(name.encode() + value.contiguous().numpy().tobytes())
    for config in (model.config.to_dict(), model.generation_config.to_dict()):
        h.update(json.dumps(config, sort_keys=True, default=str).encode())
    h.update(model.config._attn_implementation.encode())
    return h.hexdigest()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neo", "gptj", "mpt"])
def test_the_users_model_is_untouched(family):
    model = tiny(family).train()
    before, storage = digest(model), [p.data_ptr() for p in model.parameters()]
    hooks = hooks_of(model)

    def generate():
        ids = torch.tensor([ROWS[1]])
        model.eval()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        model.train()
        return out.tolist()

    first = generate()
    target = HFModel(model)
    assert generate() == first
    context, cache = Context.of(ROWS), target.cache(4, 64)
    target.score(cache, context, propose(target, [6, 5, 0, 3]), taps=(1,))
    assert generate() == first
    target.score(cache, context)  # in between two of ours
    assert generate() == first
    assert digest(model) == before
    assert [p.data_ptr() for p in model.parameters()] == storage
    assert hooks_of(model) == hooks
    assert model.training
    assert all(m.training for m in model.modules())
    assert target.clone.config is not model.config
    assert {id(p) for p in target.clone.parameters()} == {
        id(p) for p in model.parameters()
    }  # nothing is held twice
    with torch.no_grad():  # later changes of its weights are seen
        for p in model.parameters():
            p.mul_(0.5)
    model.eval()
    assert error(model, ROWS, target.score(target.cache(4, 64), context).logits) < TOLERANCE


def test_the_clone_cannot_be_called_by_mistake(llama):
    with pytest.raises(RuntimeError, match="belongs to an HFModel"):
        llama.clone(torch.tensor([[1, 2]]))


def test_facts_about_a_model():
    model = tiny("qwen2", num_key_value_heads=1)
    target = HFModel(model, byte_tokenizer())
    assert (target.vocab_size, target.max_positions, target.device.type) == (97, 256, "cpu")
    assert target.dtype == torch.float64
    assert target.supports_trees
    assert target.tokenizer.eos_token == "</s>"
    assert "qwen2" in repr(target)
    assert target.bytes_per_token() == 2 * 2 * 8 * 8  # layers, keys and values, head size, bytes
    cache = target.cache(3, 10)
    assert sum(b.nbytes for pair in cache.layers for b in pair) == 30 * target.bytes_per_token()
    for eos, expected in ((None, ()), (3, (3,)), ([3, 5], (3, 5))):
        model.generation_config.eos_token_id = eos
        assert target.eos_token_ids == expected
    assert not HFModel(tiny("mpt")).supports_trees
    assert HFModel(tiny("mpt")).max_positions == 256


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_scaling_that_turns_all_keys_limits_the_positions(kind):
    # beyond the original length, the rotation of every position changes, also of those in the cache
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 24, **factors}
        model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=24)
    else:
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
        model = tiny("llama", rope_parameters=rope, max_position_embeddings=24)
    plain(model, list(range(30)))  # the user's own model is at its long scale now, and stays there
    own = {name: value.clone() for name, value in model.named_buffers()}
    target = HFModel(model)
    assert target.max_positions == 24
    rows = [[5], list(range(20))]
    assert (
        error(copy.deepcopy(model), rows, target.score(target.cache(2, 24), Context.of(rows)).logits)
        < TOLERANCE
    )
    assert own
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, own[name], rtol=0, atol=0)


def test_layers_of_different_shapes_share_no_buffer():
    shapes = [
        KVShape(2, 8, 8, torch.float32, torch.device("cpu")),
        KVShape(1, 8, 4, torch.float64, torch.device("cpu")),
    ]
    cache = SlotCache(shapes, 2, 6)
    assert [(k.shape, v.shape) for k, v in cache.layers] == [
        ((2, 6, 2, 8),) * 2,
        ((2, 6, 1, 8), (2, 6, 1, 4)),
    ]
    for s, (k, v) in zip(shapes, cache.layers):
        assert k.dtype == v.dtype == s.dtype
    for i, pair in enumerate(cache.layers):
        for j, buffer in enumerate(pair):
            buffer.fill_(2 * i + j + 1)
    assert [float(b.unique()) for pair in cache.layers for b in pair] == [1, 2, 3, 4]
    context = Context.of([[1], [2]])
    for b in range(2):
        cache.remember(b, context.tokens[b].numpy(), 0, 1, 3)
    for i, pair in enumerate(cache.layers):
        for j, buffer in enumerate(pair):
            buffer[:, 3] = 10 * i + j + 10
    tokens = Proposal(torch.tensor([[7, 8, 9]] * 2), torch.tensor([[-1, -1, -1]] * 2), torch.tensor([3, 3]))
    cache.commit(context, accept(tokens, [[2], [1]]))
    assert [float(b[0, 1].unique()) for pair in cache.layers for b in pair] == [
        10,
        11,
        20,
        21,
    ]  # node 2 was in slot 3
    assert [float(b[1, 1].unique()) for pair in cache.layers for b in pair] == [1, 2, 3, 4]


# -- bad input -------------------------------------------------------------------------------------------------------------


def test_a_cache_of_less_than_nothing_is_refused():
    model = HFModel(tiny("llama"))
    for batch, capacity, why in ((2, -4, "capacity is -4: give"), (-1, 4, "batch is -1: give")):
        for made in (model, HFModel(tiny("llama"), page=16)):
            with pytest.raises(ValueError, match=why):
                made.cache(batch, capacity)


def test_a_cache_that_would_not_fit_is_refused_before_it_is_made(llama):
    free = free_bytes(torch.device("cpu"))
    per_token = llama.bytes_per_token()
    assert free > 2**20
    tokens = 4 * free // per_token
    with pytest.raises(
        MemoryError, match=r"needs \d+\.\d\d GiB on cpu and \d+\.\d\d GiB are free: batch \d+ would fit"
    ) as caught:
        llama.cache(8, tokens)
    assert "capacity" in str(caught.value)
    llama.cache(8, 16)


def test_no_room_in_the_cache(llama):
    with pytest.raises(ValueError, match=r"row 1 needs 33 slots .* the cache has 32"):
        llama.score(llama.cache(4, 32), Context.of(ROWS))
    with pytest.raises(ValueError, match=r"row 1 needs 39 slots"):
        llama.score(llama.cache(4, 38), Context.of(ROWS), propose(llama, [6, 6, 0, 0]))


def test_proposal_of_another_batch(llama):
    with pytest.raises(ValueError, match="the proposal has 3 rows and the context 4"):
        llama.score(llama.cache(4, 64), Context.of(ROWS), propose(llama, [1, 1, 1], rows=3))


def test_trees_are_refused_where_attention_goes_by_slot(llama):
    target = HFModel(tiny("mpt"))
    with pytest.raises(ValueError, match="mpt takes chains only"):
        target.score(target.cache(4, 64), Context.of(ROWS), propose(llama, [6, 6, 6, 6]))


@pytest.mark.parametrize("family", ["mpt", "llama"])
def test_parents_of_nodes_that_do_not_exist_are_not_looked_at(family):
    """A row is a chain whatever its batch mates are, and whatever lies beyond its nodes."""
    target = HFModel(tiny(family))
    N, size = 4, torch.tensor([4, 0, 2, 1])
    dead = torch.arange(N) >= size[:, None]
    parents = torch.arange(-1, N - 1).repeat(4, 1)
    if target.supports_trees:
        parents[0] = torch.tensor([-1, -1, 0, 0])
    tokens = torch.randint(0, 97, (4, N), generator=torch.Generator().manual_seed(0))

    def scores(parents, tokens):
        proposal = Proposal(tokens, parents, size)
        return target.score(target.cache(4, 64), Context.of(ROWS), proposal).logits

    expected = scores(parents, tokens)
    for parent in (-9, -1, 0, 99):
        assert torch.equal(
            scores(torch.where(dead, parent, parents), torch.where(dead, -1, tokens)), expected
        )


def small(family, **settings):
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, **settings},
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: small("bloom", n_layer=1, n_head=4), "ALiBi"),
        (lambda: tiny("falcon", alibi=True), "ALiBi"),
        (lambda: small("mamba", state_size=4), "recurrent state"),
        (lambda: tiny("gemma3_text", use_bidirectional_attention=True), "both directions"),
        (
            lambda: small("cohere", intermediate_size=48, num_key_value_heads=2, pad_token_id=0),
            r"unlisted='packed'",
        ),
        (
            lambda: AutoModelForSeq2SeqLM.from_config(
                AutoConfig.for_model("t5", vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1)
            ),
            "encoder-decoder",
        ),
        (lambda: LlamaModel(tiny("llama").config), "AutoModelForCausalLM"),
    ],
)
def test_families_that_cannot_run_exactly_are_refused(make, why):
    with pytest.raises(UnsupportedModel, match=why) as caught:
        HFModel(make())
    assert "Supported: apertus, arcee, codegen" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_an_unlisted_family_is_tried_and_compared():
    settings = {
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    model = small("olmo", **settings).eval().double()
    target = HFModel(model, unlisted="packed")
    assert self_check(target) < TOLERANCE
    assert error(model, ROWS[:3], target.score(target.cache(3, 64), Context.of(ROWS[:3])).logits) < TOLERANCE
    broken = copy.deepcopy(model)
    broken.model.rotary_emb.forward = lambda x, position_ids: model.model.rotary_emb(
        x, torch.arange(position_ids.shape[-1])[None]
    )
    with pytest.raises(UnsupportedModel, match="differs from its own"):
        HFModel(broken, unlisted="packed")
    eager = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval().double()
    assert self_check(HFModel(eager, unlisted="packed")) < 1e-5  # its own softmax is in float32
    eager.model.rotary_emb.forward = broken.model.rotary_emb.forward
    with pytest.raises(UnsupportedModel, match="differs from its own"):
        HFModel(eager, unlisted="packed")
    with pytest.raises(ValueError, match="unlisted is 'padded'"):
        HFModel(model, unlisted="padded")


def test_things_that_are_no_model():
    with pytest.raises(TypeError, match=r"HFModel\.from_pretrained"):
        HFModel("gpt2")
    with pytest.raises(ValueError, match="prefill_chunk is 0"):
        HFModel(tiny("llama"), prefill_chunk=0)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer is 'gpt2': give the object"),
        ({"page": "64"}, TypeError, "page is '64': give a whole number, or None"),
        ({"page": 2.5}, TypeError, r"page is 2\.5: give a whole number"),
        ({"prefill_chunk": 1.5}, TypeError, r"prefill_chunk is 1\.5: give a whole number"),
        ({"unlisted": "x"}, ValueError, "unlisted is 'x'"),
        ({"compile": "yes"}, TypeError, "compile is 'yes': give True, False, or a mapping"),
        ({"attention": "torch_flash"}, ValueError, "attention is 'torch_flash' but .*CUDA"),
    ],
)
def test_arguments_that_make_no_sense(arguments, error, says):
    with pytest.raises(error, match=says):
        HFModel(tiny("llama", dtype=torch.float32), **arguments)


@pytest.fixture
def folder(tmp_path):
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_loading_a_folder(folder):
    target = HFModel.from_pretrained(folder)
    assert target.tokenizer is None
    assert target.dtype == torch.float32
    model = tiny("llama", dtype=torch.float32)
    assert error(model, ROWS, target.score(target.cache(4, 64), Context.of(ROWS)).logits) < 3e-5
    byte_tokenizer().save_pretrained(folder)
    loaded = HFModel.from_pretrained(str(folder), dtype=torch.bfloat16, device_map="cpu", prefill_chunk=64)
    assert loaded.dtype == torch.bfloat16
    assert loaded.tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    assert loaded.score(loaded.cache(4, 64), Context.of(ROWS)).logits.shape == (4, 1, 97)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"dtype": "float99"}, ValueError, "dtype is 'float99': give 'auto'"),
        ({"dtype": "zeros"}, ValueError, "dtype is 'zeros'"),
        ({"device": "cpu"}, TypeError, "no argument 'device': name the device in device_map"),
        ({"devise": "cpu"}, TypeError, "no argument 'devise': leave it out"),
        ({"device_map": "cpux"}, ValueError, "device_map"),
    ],
)
def test_arguments_of_loading_are_not_taken_for_damage(folder, arguments, error, says):
    with pytest.raises(error, match=says) as raised:
        HFModel.from_pretrained(folder, **arguments)
    assert "cut off" not in str(raised.value)


@pytest.mark.parametrize("where", ["cuda", {"": "cuda:0"}, torch.device("cuda")], ids=str)
def test_a_gpu_that_is_not_there(folder, where, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device_map is .*PyTorch sees no CUDA device"):
        HFModel.from_pretrained(folder, device_map=where)


def test_a_missing_or_damaged_folder(folder, tmp_path_factory):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        HFModel.from_pretrained(folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        HFModel.from_pretrained(tmp_path_factory.mktemp("empty"))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="may be truncated"):
        HFModel.from_pretrained(folder)
    from safetensors.torch import load_file, save_file

    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config[:50])
    with pytest.raises(ValueError, match="may be truncated"):
        HFModel.from_pretrained(folder)
    (folder / "config.json").write_text(config)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing .*layers\.1\.mlp\.up_proj"):
        HFModel.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        HFModel.from_pretrained(folder)


def test_the_cpus_fast_path_by_name():
    model = tiny("llama", dtype=torch.float32)
    auto, named = HFModel(model), HFModel(model, attention="cpu")
    assert type(named._path.lean) is type(auto._path.lean)
    context = Context.of(ROWS)
    for each in (auto, named):
        each.logits = each.score(each.cache(len(ROWS), 48), context).logits
    assert torch.equal(auto.logits, named.logits)
    assert error(model, ROWS, named.logits) < 1e-4
