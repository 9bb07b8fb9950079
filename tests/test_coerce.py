"""What users hand over: names, folders, pairs, SPIRe drafts, trimmed models; and what is refused."""

from __future__ import annotations

import pytest
import torch
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec import drafts, pruning, zoo
from specdec.drafts.spire import SpireModel
from specdec.models import HFModel, TrimmedModel

ROWS = [[5, 6, 7, 8], [9, 2, 30]]


@pytest.fixture(scope="module")
def target():
    return tiny("llama", dtype=torch.float32, num_hidden_layers=3)


@pytest.fixture(scope="module")
def spire_folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spire")
    SpireModel.from_target(target, layers=2, window=8, tokenizer=byte_tokenizer()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [str, lambda folder: folder, SpireModel.from_pretrained, drafts.Spire])
def test_a_spire_draft_is_one_however_it_is_given(target, spire_folder, kind):
    """Its blocks alone are a llama too, and would draft badly without the target's activations."""
    decoder = sd.decoder(HFModel(target)).draft(kind(spire_folder), length=3).build()
    assert type(decoder.draft) is drafts.Spire
    expected = (
        sd.decoder(HFModel(target))
        .draft(drafts.Spire(SpireModel.from_pretrained(spire_folder)), length=3)
        .build()
    )
    assert decoder.generate(ROWS, 12, seed=0).ids == expected.generate(ROWS, 12, seed=0).ids


def test_a_spire_draft_is_no_language_model(spire_folder):
    for give in (drafts.Model, drafts.Tree, sd.decoder):
        with pytest.raises(TypeError, match=r"is a SPIRe draft, .* give drafts.Spire"):
            give(str(spire_folder))
    with pytest.raises(TypeError, match="model is a LlamaForCausalLM: give a SpireModel"):
        drafts.Spire("pocket-vanilla")


def test_names_of_pocket_models_and_pairs():
    decoder = sd.decoder("pocket-target").draft("pocket-tiny").build()
    assert decoder.target.tokenizer is not None
    other = sd.decoder(zoo.load("pocket-target")).draft(zoo.load("pocket-tiny")).build()
    texts = [each.generate("import os\n", 8, seed=0).texts for each in (decoder, other)]
    assert texts[0] == texts[1]
    assert type(sd.decoder("pocket-target").draft("pocket-spire").build().draft) is drafts.Spire


def test_drafts_take_what_the_builder_takes(target):
    small = tiny("llama", seed=1, dtype=torch.float32)
    for draft in (drafts.Model(small), drafts.Tree(small, widths=(2, 1))):
        assert isinstance(draft.model, HFModel)
    with pytest.raises(TypeError, match="widths is 3: give the children"):
        drafts.Tree(small, widths=3)
    for wrong, said in (
        (None, r"draft is None: give drafts.NoDraft\(\)"),
        (lambda prefix: prefix, r"draft is a function: give chain_draft"),
        (3, "draft is a int: give an HFModel"),
        (drafts.NGram, r"draft is the class NGram: give an object, NGram\(...\)"),
    ):
        with pytest.raises(TypeError, match=said):
            sd.decoder(HFModel(target)).draft(wrong)


def test_a_trimmed_model_drafts(target):
    """Greedy text is plain decoding's; pruned tokens are never proposed, and come nevertheless."""
    small = tiny("llama", seed=1, dtype=torch.float32)
    ids = list(range(0, small.config.vocab_size, 2))
    trimmed = pruning.keep_tokens(small, ids)
    seen = []
    decoder = sd.decoder(HFModel(target)).draft(trimmed, length=3).build()
    out = decoder.generate(ROWS, 24, seed=0, on_round=lambda round: seen.append(round.proposal))
    assert isinstance(decoder.draft.model, TrimmedModel)
    proposed = torch.cat([p.tokens[torch.arange(p.nodes) < p.size[:, None]] for p in seen])
    assert len(proposed)
    assert set(proposed.tolist()) <= set(ids)
    assert any(token % 2 for row in out.ids for token in row)
    greedy = sd.decoder(HFModel(target)).greedy()
    assert (
        greedy.draft(trimmed, length=3).build().generate(ROWS, 24).ids
        == greedy.build().generate(ROWS, 24).ids
    )
    logits = decoder.draft.model.score(decoder.draft.model.cache(1, 8), sd.Context.of([[5, 6]])).logits
    assert torch.isinf(logits[0, 0, 1::2]).all()
    assert logits.shape[-1] == small.config.vocab_size


@pytest.mark.parametrize("how", [{"graphs": "eager"}, {"page": 16}, {"attention": "padded"}])
def test_a_trimmed_model_drafts_the_same_by_every_path(target, how):
    small = tiny("llama", dtype=torch.float32, num_hidden_layers=2)
    base = sd.decoder(HFModel(target)).greedy()

    def rounds(draft):
        return base.draft(draft, length=3).build().generate(ROWS, 24).stats.rounds

    for make in (drafts.Model, lambda model: drafts.Tree(model, widths=(2, 1))):
        plain, other = (TrimmedModel(pruning.keep_tokens(small, range(1, 97, 2)), **k) for k in ({}, how))
        assert rounds(make(plain)) == rounds(make(other)) < 48


def test_a_mask_refuses_a_trimmed_model():
    small = TrimmedModel(pruning.keep_tokens(tiny("llama", dtype=torch.float32), range(5)))
    with pytest.raises(TypeError, match=r"model is a TrimmedModel: give an HFModel.*a mask would bypass"):
        sd.models.Windowed(small)
    with pytest.raises(TypeError, match="model is a TrimmedModel: give an HFModel"):
        sd.decoder(small).draft(drafts.MagicDec()).build()


def test_made_up_provenance_is_refused():
    tokens = torch.zeros(1, 1, dtype=torch.long)
    distribution = torch.full((1, 1, 4), 0.25)
    for wrong in ("declare", "Sampled", "drawn"):
        with pytest.raises(ValueError, match=r"provenance is .*: give"):
            sd.Proposal.chain(tokens, torch.tensor([1]), distribution, wrong)


def test_stats_of_several_calls_add_up(target):
    decoder = sd.decoder(HFModel(target)).draft(drafts.NGram(), length=3).build()
    outs = [decoder.generate(ROWS, 12, seed=seed) for seed in (0, 1)]
    both = sum((out.stats for out in outs), sd.Stats())
    for name in ("rounds", "full_rounds", "full_tokens", "tokens", "accepted", "drafted", "prefill_tokens"):
        assert getattr(both, name) == sum(getattr(out.stats, name) for out in outs)
    assert both.reached == outs[0].stats.reached + outs[1].stats.reached
    assert both.seconds["target"] == pytest.approx(sum(out.stats.seconds["target"] for out in outs))
    assert outs[0].stats.tokens == 24  # unchanged
    with pytest.raises(TypeError):
        outs[0].stats + 1


def test_a_stream_tells_of_its_rounds(target):
    decoder = sd.decoder(HFModel(target)).draft(drafts.NGram(), length=3).build()
    rounds = []
    pieces = list(decoder.stream(ROWS, 12, seed=0, on_round=rounds.append))
    assert (
        sum(int(round.committed.sum()) for round in rounds) == sum(len(piece.ids) for piece in pieces) == 24
    )


def test_modules_come_when_they_are_asked_for():
    assert sd.zoo is zoo
    assert sd.masks.Causal is not None
    with pytest.raises(AttributeError, match="module 'specdec' has no attribute 'mask'"):
        sd.mask  # noqa: B018


def test_pocket_models_load_without_bars(capfd):
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    zoo.load("pocket-tiny")
    assert "Loading" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled() == enabled
