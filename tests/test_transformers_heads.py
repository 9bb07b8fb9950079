"""DFlash and MTP in transformers' own ``generate``: its proposals and its texts are those of the same weights here."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import tiny
from transformers.generation import candidate_generator

import specdec as sd
from specdec.drafts import Head, heads

GENERATOR = vars(candidate_generator).get("DFlashTokenCandidateGenerator")
MTP = vars(candidate_generator).get("MTPCandidateGenerator")


def listen(monkeypatch, kind):
    """``(length, ids)`` of every proposal that a generator of transformers will make after a text of so many tokens."""
    proposed, original = [], kind.get_candidates

    def noted(self, input_ids, *args, **named):
        ids, logits = original(self, input_ids, *args, **named)
        proposed.append((input_ids.shape[1], ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    monkeypatch.setattr(kind, "get_candidates", noted)
    return proposed


def compared(model, head, length, prompt, proposed, least):
    """Our greedy text; its proposals must be those of transformers wherever both have one, in ``least`` tokens and more."""
    rounds = []
    decoder = (
        sd.decoder(sd.HFModel(model, unlisted="packed")).greedy().draft(Head(head), length=length).build()
    )
    out = decoder.generate([prompt[0].tolist()], 24, on_round=rounds.append)
    drafted = {
        int(r.context.length[0]): r.proposal.tokens[0, : int(r.proposal.size[0])].tolist()
        for r in rounds
        if r.proposal.nodes
    }
    count = 0
    for at, ids in proposed:
        size = min(len(ids), len(drafted.get(at, ())))
        assert ids[:size] == drafted.get(at, [])[:size], at
        count += size
    assert count >= least
    assert len({tuple(ids) for _, ids in proposed}) > 5
    return out.ids[0]


@pytest.mark.skipif(
    GENERATOR is None or not hasattr(transformers, "MuseGlimmerAssistantModel"),
    reason=f"transformers {transformers.__version__} has no DFlash",
)
@pytest.mark.parametrize("sliding", [0, 1, 2])
def test_proposals_are_those_of_transformers(tmp_path, monkeypatch, sliding):
    model = tiny("llama", num_hidden_layers=6, dtype=torch.float64)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, block_size=5,
        mask_token_id=96, target_layer_ids=[0, 2, 4], layer_types=["sliding_attention"] * sliding + ["full_attention"] * (2 - sliding),
        sliding_window=6, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(4)
    assistant = transformers.MuseGlimmerAssistantModel(config).double().eval()
    for p in assistant.parameters():
        p.data += 0.2 * torch.randn_like(p)
    proposed = listen(monkeypatch, GENERATOR)
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
    assert theirs[0, prompt.shape[1] :].tolist() == compared(model, head, 4, prompt, proposed, least=40)


@pytest.mark.skipif(MTP is None, reason=f"transformers {transformers.__version__} has no MTP")
def test_mtp_drafts_what_transformers_drafts(tmp_path, monkeypatch):
    from test_mtp import READS_FC, SHIPPING, two_layers, with_mtp  # which needs MTP, too

    family = "mellum" if READS_FC else "glm4_moe"
    two_layers(monkeypatch)
    model = with_mtp(tmp_path, family, **SHIPPING[family])
    head = heads.MTP.from_checkpoint(model)
    proposed = listen(monkeypatch, MTP)
    prompt = torch.tensor([[5, 9, 1, 30, 2, 2, 7, 60, 11]])
    theirs = model.generate(prompt, use_mtp=True, max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert theirs[0, prompt.shape[1] :].tolist() == compared(model, head, 1, prompt, proposed, least=10)
