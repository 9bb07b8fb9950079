"""The proposer for vLLM's ``custom_class``, called as vLLM's runner calls it: ids of all requests, and which have new ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

import specdec as sd
from specdec.selectors import UCB1, Hedge, Thompson
from specdec.serving.vllm import Proposer, SelectingProposer

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


class Suffixes(Proposer):
    draft = sd.drafts.Suffix()


class Wrong(sd.drafts.NGram):
    """Proposes what hardly ever follows."""

    def lookup(self, ids, count):
        return (ids[-1:] + 1) % 5


class Selecting(SelectingProposer):
    arms: ClassVar = {"lookup": sd.drafts.NGram(), "wrong": sd.Arm(Wrong(), 2), "none": None}


@pytest.mark.parametrize("kind", [Proposer, Suffixes, Selecting])
def test_vllms_loop_gives_plain_greedy_text(kind):
    """A loop as vLLM's: the target's most probable tokens verify what was proposed."""
    table = sd.TableModel.random(5, order=1, seed=4)
    prompts = [[0, 1], [3]]
    plain = sd.decoder(table).greedy().build().generate(prompts, 30).ids
    proposer, rows, new, proposed = kind(CONFIG), [list(p) for p in prompts], [[], []], 0
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


def decode(proposer, steps, rows):
    """Steps of vLLM over texts that go round in fives, of which every second step exchanges the rows."""
    drafts = {name: [] for name in rows}
    for step in range(steps):
        names = list(rows) if step % 2 else list(rows)[::-1]
        new = {}
        for name in names:
            new[name] = []
            for token in [*drafts[name], None]:
                new[name].append((rows[name][-1] + 1) % 5)
                rows[name].append(new[name][-1])
                if token != new[name][-1]:
                    break
        made = proposer.propose([new[name] for name in names], *laid_out([rows[name] for name in names]))
        drafts = dict(zip(names, made))
    return drafts


def test_a_selector_learns_which_draft_is_accepted():
    class Chosen(SelectingProposer):
        arms: ClassVar = {
            "none": None,
            "suffix": sd.drafts.Suffix(max_match=4),
            "short": sd.Arm(sd.drafts.NGram(), 1),
        }
        selector = UCB1(pool="global")

    proposer = Chosen(CONFIG)
    decode(proposer, 9, {"a": [0, 1, 2, 3, 4, 0, 1], "b": [3, 4, 0, 1, 2, 3]})
    pulls, tokens, _, reward = proposer.state.sums[0].T
    assert pulls.sum() == 2 * 8  # every proposal but the last ones
    assert (pulls[1], tokens[1]) == (pulls.max(), 4 * pulls[1])  # three tokens and the bonus
    assert np.allclose(reward / pulls, np.array([1, 4, 2]) / 4)
    assert proposer.requests == [0, 1] or proposer.requests == [1, 0]


def test_requests_are_known_by_their_ids():
    class Chosen(SelectingProposer):
        arms: ClassVar = {"ngram": sd.drafts.NGram(), "none": None}
        selector = Thompson()
        token_cost = 0.1

    proposer = Chosen(CONFIG)

    def call(*rows, new=None):
        proposer.propose([[row[-1]] for row in rows] if new is None else new, *laid_out(rows))
        return proposer.requests

    assert call([1, 2, 3], [4, 5]) == [0, 1]
    assert call([4, 5, 6], [1, 2, 3, 4]) == [1, 0]
    assert call([1, 2, 3, 4], [4, 5, 6], new=[[], [6]]) == [0, 1]  # not scheduled in this step
    assert call([1, 2, 3, 4, 5]) == [0]
    assert call([1, 2, 3, 4, 5, 6], [4, 5, 6, 7]) == [0, 2]  # the second one had left
    assert call([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]) == [3]  # more tokens than a step can add
    assert set(proposer.open) == {3}
    assert len(proposer.state.keys.find([0, 1, 2, 3])[:3].nonzero()[0]) == 3
    assert call() == []


@pytest.mark.parametrize(
    ("arms", "selector"),
    [
        ({}, UCB1()),
        ({"a": sd.drafts.NGram()}, Hedge()),
        ({"a": None}, type("Two", (UCB1,), {"info": sd.SelectorInfo(arms=2)})()),
    ],
)
def test_selectors_that_cannot_choose_are_refused(arms, selector):
    kind = type("Kind", (SelectingProposer,), {"arms": arms, "selector": selector})
    with pytest.raises(ValueError, match="cannot choose among"):
        kind(CONFIG)
