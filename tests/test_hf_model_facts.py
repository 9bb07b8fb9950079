"""What HFModel says of a model, and that it leaves the user's model untouched."""

from __future__ import annotations

import copy
import hashlib
import json

import pytest
import torch
from forwards import ROWS, TOLERANCE, accept, error, hooks_of, plain, propose
from tiny import byte_tokenizer, tiny

from specdec.cache.contiguous import KVShape, SlotCache
from specdec.models import HFModel
from specdec.types import Context, Proposal


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
