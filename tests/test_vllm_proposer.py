"""The proposer for vLLM's ``custom_class``, called as vLLM's runner calls it: ids of all requests, and which have new ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import specdec as sd
from specdec.serving.vllm import Proposer

CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=3),
    model_config=SimpleNamespace(max_model_len=40),
)


def laid_out(rows):
    """vLLM's buffers: ``token_ids_cpu [B, L]`` with rubbish behind each request, and their lengths."""
    ids = np.full((len(rows), 48), 77, dtype=np.int32)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    return np.array([len(row) for row in rows], dtype=np.int32), ids


def test_each_request_gets_what_followed_its_last_tokens():
    rows = [[1, 2, 3, 4, 1, 2], [5, 6, 7], [9, 8, 9, 8, 9], [1, 2] * 19 + [1]]
    lengths, ids = laid_out(rows)
    made = Proposer(CONFIG).propose([[2], [7], [], [1]], lengths, ids, slot_mappings=None)
    assert made == [[3, 4, 1], [], [], [2]]  # no match; a prompt that is not read yet; room for one
    assert Proposer(CONFIG).propose([[]] * 4, lengths, ids) == [[]] * 4
    full = laid_out([[1, 2] * 20])
    assert Proposer(CONFIG).propose([[2]], *full) == [[]]
    Proposer(CONFIG).load_model("whatever")


def test_vllms_loop_gives_plain_greedy_text():
    """A loop as vLLM's: the target's most probable tokens verify what was proposed."""
    table = sd.TableModel.random(5, order=1, seed=4)
    prompts = [[0, 1], [3]]
    plain = sd.decoder(table).greedy().build().generate(prompts, 30).ids
    proposer, rows, new, proposed = Proposer(CONFIG), [list(p) for p in prompts], [[], []], 0
    drafts = [[], []]
    while min(len(row) - len(p) for row, p in zip(rows, prompts)) < 30:
        for b, row in enumerate(rows):
            new[b] = []
            for token in [*drafts[b], None]:
                best = int(table.distribution(row).argmax())
                row.append(best)
                new[b].append(best)
                if best != token:
                    break
            del row[39:]
        drafts = proposer.propose(new, *laid_out(rows))
        proposed += sum(map(len, drafts))
    assert [row[len(p) : len(p) + 30] for row, p in zip(rows, prompts)] == plain
    assert proposed > 10


def test_another_draft_is_a_subclass_and_what_vllm_cannot_verify_is_refused():
    table = sd.TableModel.random(5)

    class Long(Proposer):
        draft = sd.drafts.NGram(max_match=5, min_match=3)

    class Sampled(Proposer):
        draft = sd.drafts.Model(table)

    class Reads(Proposer):
        draft = sd.drafts.MagicDec()

    at = laid_out([[1, 2, 3, 1, 2]])
    assert Long(CONFIG).propose([[2]], *at) == [[]]
    with pytest.raises(ValueError, match="draft 'model' proposed sampled tokens or a tree"):
        Sampled(CONFIG).propose([[2]], *at)
    with pytest.raises(ValueError, match=r"draft 'magicdec' reads the target's"):
        Reads(CONFIG)
