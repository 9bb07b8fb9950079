"""DFlash in transformers' own ``generate``: its proposals and its texts are those of the same weights here."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import tiny
from transformers.generation import candidate_generator

import specdec as sd
from specdec.drafts import Head, heads

GENERATOR = vars(candidate_generator).get("DFlashTokenCandidateGenerator")


@pytest.mark.skipif(GENERATOR is None, reason=f"transformers {transformers.__version__} has no DFlash")
def test_proposals_are_those_of_transformers(tmp_path, monkeypatch):
    model = tiny("llama", num_hidden_layers=6, dtype=torch.float64)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, block_size=5,
        mask_token_id=96, target_layer_ids=[0, 2, 4], layer_types=["full_attention"] * 2, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(4)
    assistant = transformers.MuseGlimmerAssistantModel(config).double().eval()
    for p in assistant.parameters():
        p.data += 0.2 * torch.randn_like(p)
    proposed = []

    def noted(self, input_ids, *args, **named):
        ids, logits = original(self, input_ids, *args, **named)
        proposed.append((input_ids.shape[1], ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    original = GENERATOR.get_candidates
    monkeypatch.setattr(GENERATOR, "get_candidates", noted)
    prompt = torch.tensor([[5, 9, 1, 30, 2, 2, 7, 60, 11]])
    theirs = model.generate(
        prompt,
        assistant_model=assistant,
        speculation_type="dflash",
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
    )
    assistant.save_pretrained(tmp_path)
    head = heads.load(tmp_path, model)
    rounds = []
    decoder = sd.decoder(sd.HFModel(model)).greedy().draft(Head(head), length=4).build()
    ours = decoder.generate([prompt[0].tolist()], 24, on_round=rounds.append)
    assert ours.ids[0] == theirs[0, prompt.shape[1] :].tolist()
    drafted = {
        int(r.context.length[0]): r.proposal.tokens[0, : int(r.proposal.size[0])].tolist()
        for r in rounds
        if r.proposal.nodes
    }
    compared = 0
    for length, ids in proposed:
        if ids and length in drafted:
            size = min(len(ids), len(drafted[length]))
            assert ids[:size] == drafted[length][:size], length
            compared += size
    assert compared > 40
    assert len({tuple(ids) for _, ids in proposed}) > 5
