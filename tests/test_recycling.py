"""Token recycling: what is kept of the target's logits, and the trees that are made of it."""

from __future__ import annotations

import pytest
import torch

import specdec as sd
from specdec import lab
from specdec.drafts import Recycling
from specdec.drafts.heads import StaticTree
from specdec.executors import Optimistic, Pipelined

V = 6
TARGET = sd.TableModel.random(V, order=1, seed=0)
PROMPTS = [[0, 1, 2], [3], [4, 5, 4, 5, 4]]
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))


def test_a_prompt_tells_what_follows_its_tokens():
    context = sd.Context.of([[1, 2, 1, 3, 1, 2, 4], [5]])
    state = Recycling(TREE).init(context, None)
    assert state.followers == ({2: [4, 1], 1: [2, 3], 3: [1]}, {})


def test_the_tree_is_made_of_followers():
    context = sd.Context.of([[1, 2, 1, 3, 1, 2, 4, 1], [5], [2, 2]])
    draft = Recycling(TREE)
    proposal, _ = draft.propose(draft.init(context, None), context, torch.tensor([2, 2, 1]), None)
    rows = [
        list(zip(tokens[:size], parents[:size]))
        for tokens, parents, size in zip(
            proposal.tokens.tolist(), proposal.parents.tolist(), proposal.size.tolist()
        )
    ]
    assert rows == [[(2, -1), (3, -1), (4, 0), (1, 0), (1, 1)], [], [(2, -1)]]


def test_what_the_target_expects_after_each_token_is_kept():
    """After a round the followers of every token that was read are the target's best ones, those of rejected nodes, too."""
    seen = []

    class Watched(Recycling):
        def observe(self, state, round):
            new = super().observe(state, round)
            for b, followers in enumerate(new.followers):
                read = [
                    round.context.row(b)[-1],
                    *round.proposal.tokens[b, : round.proposal.size[b]].tolist(),
                ]
                for token in read:
                    best = TARGET.probs[token].topk(draft.tree.ranks).indices.tolist()
                    assert followers[token] == best
                seen.append(len(read))
            return new

    draft = Watched(TREE)
    sd.decoder(TARGET).draft(draft, length=2).generate(PROMPTS, 20, seed=0)
    assert max(seen) == 6


def test_it_guesses_what_a_target_without_memory_always_says():
    """A table of order 1 says the same after the same token, so once all tokens were read a greedy chain is always right."""
    out = (
        sd.decoder(TARGET)
        .greedy()
        .draft(Recycling(StaticTree.of_widths((1,) * 4)), length=4)
        .generate([[0]], 200)
    )
    assert out.stats.tau > 4.5


@pytest.mark.parametrize("executor", [Optimistic(), Pipelined(2)], ids=repr)
def test_texts_are_plain_samplings(executor):
    base = sd.decoder(TARGET).verifier(sd.Coupled())
    tree = StaticTree.of_widths((1, 1)) if isinstance(executor, Optimistic) else TREE
    out = base.draft(Recycling(tree), length=2).executor(executor).generate(PROMPTS, [30, 5, 20], seed=3)
    assert out.ids == base.generate(PROMPTS, [30, 5, 20], seed=3).ids


def test_an_arm_of_a_pool_learns_from_all_rounds():
    base = sd.decoder(TARGET).verifier(sd.Coupled())
    arms = {"recycling": Recycling(TREE), "lookup": sd.drafts.NGram(), "none": None}
    out = base.pool(arms, sd.selectors.Random(), length=2).generate(PROMPTS, 30, seed=3)
    assert out.ids == base.generate(PROMPTS, 30, seed=3).ids


def test_where_logits_do_not_go_it_is_refused():
    """A drafting process gets no logits, and a replay has no rejected tokens."""
    builder = sd.decoder(TARGET).draft(Recycling(TREE), length=2).executor(Pipelined(2, workers="processes"))
    with pytest.raises(ValueError, match="'recycling' reads the target"):
        builder.build()
    with pytest.raises(TypeError, match=r"tree is a tuple: give a StaticTree"):
        Recycling((3, 2, 1))


def test_a_replay_would_be_wrong_and_is_refused(tmp_path):
    trace = lab.record(TARGET, PROMPTS, tmp_path, new_tokens=16, k=2, eos_token_id=(), progress=False)
    with pytest.raises(ValueError, match=r"'recycling' reads the target's logits, .*: use lab\.simulate"):
        lab.replay(trace, Recycling(StaticTree.of_widths((1, 1))), 2, target=TARGET)


def test_a_pool_never_shows_a_proposal_beside_the_logits_of_another():
    """Under ``Optimistic`` the next block is drafted before the round of the last one is observed."""
    chain = Recycling(StaticTree.of_widths((1, 1, 1)))
    arms = {"none": None, "recycling": chain, "other": Recycling(StaticTree.of_widths((1, 1)))}
    base = sd.decoder(TARGET).pool(arms, sd.selectors.Random(), length=3).verifier(sd.Coupled())
    made = [
        base.executor(e).generate(PROMPTS, [40, 9, 33], seed=1).ids
        for e in (sd.executors.Serial(), Optimistic())
    ]
    assert made[0] == made[1]
