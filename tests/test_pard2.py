"""PARD-2 against its authors' computation: a language model whose input embeddings also have the target's activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from test_parallel import MASK, PROMPTS, chains_of, small
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec import drafts
from specdec.drafts.heads import Head, Pard2, load
from specdec.drafts.heads.ddtree import DDTree
from specdec.executors import Ahead, Optimistic
from specdec.training.losses import ByDepth, CATLoss, distillation

TAPS, LAYERS = (
    ("final", 2, 0),
    [-1, 2, -4],
)  # of a target with 3 blocks: the head's, and the same as entries of hidden_states


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", seed=1, num_hidden_layers=3).double(), byte_tokenizer())


def head_of(target, family="llama", depth=5, **settings):
    """A head of another width than the target's, that reads its activations, and its language model."""
    model = small(family, hidden_size=24, intermediate_size=40, num_key_value_heads=4)
    head = Pard2.from_model(model, target, TAPS, depth=depth, scale=0.5, **settings)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(3)
        for p in head.fc.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) * 0.3)
    return head, model


@torch.no_grad()
def theirs(target, head, model, text, k, mask=MASK):
    """As the authors' ``pard2_infer``: logits ``[k, V]`` after ``text``, of which the target has read all but the last token."""
    hidden = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([hidden[layer] for layer in LAYERS], -1)
    features = torch.cat([torch.zeros_like(features[:, :1]), features], 1)
    features = torch.cat([features, features[:, -1:].expand(-1, k - 1, -1)], 1)
    embedded = model.get_input_embeddings()(torch.tensor([text + [mask] * (k - 1)]))
    return model(inputs_embeds=embedded + 0.5 * head.fc(features)).logits[0, -k:, :97]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_laws_are_the_authors(target, family, bias):
    (head, model), rounds = head_of(target, family, feature_bias=bias), []
    decoder = sd.decoder(target).draft(Head(head), length=4).build()
    out = decoder.generate(PROMPTS, [20, 14, 17], seed=0, on_round=rounds.append)
    found = list(chains_of(rounds, out))
    assert len(found) > 12
    for text, laws in found:
        wanted = theirs(target, head, model, text, len(laws)).softmax(-1)
        torch.testing.assert_close(laws.double(), wanted, rtol=0, atol=1e-6)


def tokens_of(proposal):
    return [row[:size] for row, size in zip(proposal.tokens.tolist(), proposal.size.tolist())]


def test_a_new_head_drafts_as_its_model_does(target):
    model = small(hidden_size=24, num_key_value_heads=4)
    head = Pard2.from_model(model, target, depth=4)
    drafted = []
    for draft in (Head(head), drafts.Parallel(sd.HFModel(model, byte_tokenizer()))):
        rounds = []
        sd.decoder(target).draft(draft, length=4).build().generate(
            PROMPTS, 12, seed=0, on_round=rounds.append
        )
        drafted.append([tokens_of(r.proposal) for r in rounds])
    assert drafted[0] == drafted[1]


WAYS = {
    "chain": lambda head: Head(head),
    "tree": lambda head: Head(head, DDTree(7)),
    "captured": lambda head: Head(head, graphs="recorded"),
    "window": lambda head: Head(head.masked(sd.masks.streaming(6, 1))),
}


@pytest.mark.parametrize(
    ("way", "executor"),
    [
        *((way, sd.executors.Serial()) for way in WAYS),
        *((way, Optimistic()) for way in WAYS if way != "tree"),  # which goes on from chains
    ],
)
def test_texts_are_those_of_plain_decoding(target, way, executor):
    draft = WAYS[way](head_of(target)[0])
    base = sd.decoder(target).verifier(sd.Coupled())
    out = base.executor(executor).draft(draft, length=4).build().generate(PROMPTS, [20, 14, 17], seed=3)
    assert out.ids == base.build().generate(PROMPTS, [20, 14, 17], seed=3).ids


def test_captured_chains_are_the_others(target):
    head = head_of(target)[0]
    drafted = []
    for graphs in (False, "recorded"):
        rounds = []
        decoder = sd.decoder(target).draft(Head(head, graphs=graphs), length=4).build()
        decoder.generate(PROMPTS, 20, seed=0, on_round=rounds.append)
        drafted.append([tokens_of(r.proposal) for r in rounds])
    assert drafted[0] == drafted[1]


def test_whole_rounds_refuse_it(target):
    model = sd.HFModel(target.model, byte_tokenizer(), graphs="eager")
    head = Head(Pard2.from_model(small(), model, depth=4), graphs="eager")
    with pytest.raises(ValueError, match="also reads each text's first token, before which"):
        sd.decoder(model).draft(head, length=4).executor(Ahead()).build()


# -- checkpoints ------------------------------------------------------------------------------------------------------------


def written(folder, target, model, head, **changed):
    """A checkpoint as the authors' trainer converts it."""
    config = model.config
    config.pard_token = 90
    about = {
        "pard2": True,
        "spd_type": "pard2",
        "pard2_scale": 0.5,
        "pard2_proj_bias": False,
        "pard2_target_dim": head.fc.in_features,
        "pard2_target_layers": LAYERS,
        **changed,
    }
    for name, value in about.items():
        if value is not None:
            setattr(config, name, value)
    model.save_pretrained(folder)
    torch.save({"target_proj.weight": head.fc.weight.detach()}, folder / "warp_model.bin")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_of_the_authors(target, family, tied, tmp_path):
    model = tiny(family, seed=2, hidden_size=24, num_key_value_heads=4, tie_word_embeddings=tied).double()
    made = Pard2.from_model(model, target, TAPS, depth=5, scale=0.5)
    torch.nn.init.normal_(made.fc.weight, std=0.3)
    written(tmp_path, target, model, made)
    head = load(tmp_path, target, depth=5)
    assert (head.taps, head.scale, head.depth, head.settings["mask_token"]) == (TAPS, 0.5, 5, 90)
    rounds = []
    sd.decoder(target).draft(Head(head), 4).build().generate(
        [[5, 9, 61, 3]], 6, seed=0, on_round=rounds.append
    )
    for r in rounds[1:3]:
        text, size = r.context.row(0), int(r.proposal.size[0])
        laws = torch.stack([r.proposal.q(n)[0] for n in range(size)])
        wanted = theirs(target, made, model, text, size, 90).softmax(-1)
        torch.testing.assert_close(laws.double(), wanted, rtol=0, atol=1e-6)
    decoder = sd.decoder(target).greedy().draft(tmp_path, length=4).build()
    assert isinstance(decoder.draft.model, Pard2)
    assert decoder.generate(PROMPTS, 12).ids == sd.decoder(target).greedy().build().generate(PROMPTS, 12).ids
    head.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", target)
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values()))


def test_older_names_are_read(target, tmp_path):
    model = tiny("llama", seed=2).double()
    made = Pard2.from_model(model, target, ("final",), depth=5)
    older = {
        "pard2_scale": None,
        "pard2_target_layers": None,
        "pard2_target_dim": None,
        "pard2_proj_bias": None,
    }
    written(
        tmp_path,
        target,
        model,
        made,
        **older,
        feat_scale=0.25,
        target_layers=[-1],
        kd_alpha=1.0,
        target_feat_mask=0.1,
    )
    head = load(tmp_path, target)
    assert (head.taps, head.scale, head.depth) == (("final",), 0.25, 16)


def test_what_a_checkpoint_lacks_is_named(target, tmp_path):
    model = tiny("llama", seed=2).double()
    written(tmp_path, target, model, Pard2.from_model(model, target, TAPS))
    (tmp_path / "warp_model.bin").unlink()
    with pytest.raises(ValueError, match=r"lacks target_proj\.weight: copy warp_model\.bin"):
        load(tmp_path, target)
    model.config.pard2_target_layers = [-7]
    written(tmp_path, target, model, Pard2.from_model(model, target, ("final",)), pard2_target_layers=[-7])
    with pytest.raises(ValueError, match="pard2_target_layers has -7, and the target has 3 layers"):
        load(tmp_path, target)
    del model.config.pard2_target_layers
    written(tmp_path, target, model, Pard2.from_model(model, target, ("final",)), pard2_target_layers=None)
    assert load(tmp_path, target).taps == ("final",)  # as the authors' converter
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load(tmp_path, target)


def test_the_projection_may_have_another_precision(target, tmp_path):
    model = tiny("llama", seed=2).bfloat16()
    head = Pard2.from_model(tiny("llama", seed=2).double(), target, TAPS)
    written(tmp_path, target, model, head, unsloth_fixed=True)
    made = load(tmp_path, target)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    base = sd.decoder(target).greedy()
    assert base.draft(Head(made), 4).build().generate(PROMPTS, 8).ids == base.build().generate(PROMPTS, 8).ids


def test_other_models_are_refused(target):
    with pytest.raises(ValueError, match="model is a gpt2: give one of llama or qwen3"):
        Pard2.from_model(tiny("gpt2"), target)
    with pytest.raises(ValueError, match="model has a vocabulary of 50 and the target one of 97"):
        Pard2.from_model(tiny("llama", vocab_size=50), target)
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        Pard2.from_model(tiny("llama", hidden_act="gelu"), target)
    with pytest.raises(TypeError, match="model is 'small': give a transformers model"):
        Pard2.from_model("small", target)
    with pytest.raises(TypeError, match="mask_token is that of the models: leave it out"):
        Pard2.from_model(tiny("llama"), target, mask_token=5)
    narrow = Pard2.from_target(target, config={"hidden_size": 16, "head_dim": 4})
    assert narrow.fc.in_features == 32
    with pytest.raises(ValueError, match="own_embedding and own_head are those of the language model"):
        Pard2.from_target(target, own_head=False)


# -- its loss ---------------------------------------------------------------------------------------------------------------


def test_positions_count_as_the_text_before_them_is_probable():
    draw = torch.Generator().manual_seed(0)
    q, p = (torch.randn(2, 3, 4, 11, generator=draw, dtype=torch.float64) for _ in range(2))
    tokens = torch.randint(0, 11, (2, 3, 4), generator=draw)
    total = weight = 0.0
    for b, a in [(b, a) for b in range(2) for a in range(3)]:
        reached = 1.0
        for n in range(4):
            law, token = p[b, a, n].softmax(-1), int(tokens[b, a, n])
            soft = distillation(q[b, a, n], p[b, a, n]) + (law * law.log()).sum()
            total += reached * float(soft - 0.1 * q[b, a, n].log_softmax(-1)[token])
            weight += reached
            reached *= float(law[token])
    assert float(CATLoss()(q, p, tokens)) == pytest.approx(total / weight)
    kept = torch.ones(2, 3, 4, dtype=torch.bool)
    kept[:, 0] = False
    some = CATLoss()(q, p, tokens.where(kept, -100), kept)
    assert float(some) == pytest.approx(float(CATLoss()(q[:, 1:], p[:, 1:], tokens[:, 1:])))
    some = CATLoss()(
        q, p, tokens.where(tokens != tokens[0, 0, 1], -100)
    )  # ids that a reduced vocabulary lacks
    assert torch.isfinite(some)
    with pytest.raises(ValueError, match="give it without ByDepth"):
        ByDepth(CATLoss())
    with pytest.raises(ValueError, match="hard is 0"):
        replace(CATLoss(), hard=0, soft=0)
