"""Medusa's heads, and the static tree over marginal distributions."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from contracts.test_drafts import model_of
from test_heads import FAMILIES, shake, texts
from tiny import tiny
from torch import nn

import specdec as sd
from specdec.audit.certify import certify
from specdec.drafts.heads import DDTree, Eagle3, Head, Medusa, StaticTree
from specdec.masks import streaming
from specdec.testing import check_draft
from specdec.training.anchored import blocks


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3))


def example(head, length=12):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, head.vocab_size, (1, length), generator=draw)
    return tokens, {"final": torch.randn(1, length - 1, 32, dtype=torch.float64, generator=draw)}


@pytest.mark.parametrize("own_head", [True, False])
@torch.no_grad()
def test_the_heads_are_the_papers(target, own_head):
    ids = list(range(0, 97, 2))
    head = shake(Medusa.from_target(target, heads=3, blocks=2, own_head=own_head, vocabulary=ids))
    tokens, layers = example(head)
    found, w = blocks(head, tokens, layers, 3), dict(head.named_parameters())
    for a, j in product(range(1, 9), range(3)):
        x = layers["final"][0, a - 1]
        for r in range(2):
            name = f"layers.{j}.{r}.linear"
            x = x + nn.functional.silu(w[f"{name}.weight"] @ x + w[f"{name}.bias"])
        matrix = w[f"lm_heads.{j}.weight"] if own_head else target.model.lm_head.weight[ids]
        torch.testing.assert_close(found[0, a - 1, j], matrix @ x, rtol=0, atol=1e-10)


def test_a_new_head_has_the_targets_matrices_and_returns_its_state(target):
    ids = [1, 5, 90]
    head = Medusa.from_target(target, heads=2, vocabulary=ids)
    assert all(torch.equal(m.weight, target.model.lm_head.weight[ids]) for m in head.lm_heads)
    assert head.lm_heads[0].weight is not head.lm_heads[1].weight
    x = torch.randn(4, 32, dtype=torch.float64)
    assert torch.equal(head.layers[1](x), x)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_targets_for_every_family(family):
    target = sd.HFModel(tiny(family))
    head = shake(Medusa.from_target(target, heads=3))
    prompts, budgets = [[1, 2, 3], [5] * 12], [9, 5]
    for greedy in (True, False):
        plain = texts(target, None, greedy, prompts=prompts, budgets=budgets)
        for tree in ({}, {"tree": StaticTree.of_widths((3, 2, 1))}):
            draft = Head(head, **tree)
            assert texts(target, draft, greedy, length=3, prompts=prompts, budgets=budgets) == plain


def test_a_head_is_a_folder(target, tmp_path):
    head = shake(Medusa.from_target(target, heads=3, vocabulary=range(0, 97, 3)))
    head.save_pretrained(tmp_path)
    again = Medusa.from_pretrained(tmp_path)
    assert again.settings == head.settings
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values()))
    assert texts(target, tmp_path, False, length=3) == texts(target, None, False)


@torch.no_grad()
def test_the_static_tree_has_the_best_tokens_of_each_depth(target):
    head = shake(Medusa.from_target(target, heads=3, vocabulary=range(1, 97, 2)), 2)
    tree, rounds = StaticTree(((0,), (2,), (0, 1), (2, 0), (0, 1, 3))), []
    draft = Head(head, tree)
    assert (tree.longest, [tree.nodes(n) for n in range(5)]) == (3, [0, 2, 4, 5, 5])
    out = (
        sd.decoder(target).draft(draft, 3).build().generate([[1, 2, 3], [4]], [20, 9], on_round=rounds.append)
    )
    compared = 0
    for row, prompt in enumerate([[1, 2, 3], [4]]):
        text = prompt + out.ids[row]
        states = target.model.model(torch.tensor([text])).last_hidden_state
        for r in rounds[1:]:
            rows = r.context.request.tolist()
            b = rows.index(row) if row in rows else -1
            if b < 0 or not int(r.proposal.size[b]):
                continue
            a, size = int(r.context.length[b]) - 1, int(r.proposal.size[b])
            ids = torch.tensor([[*text[: a + 1], 0, 0, 0]])
            laws = blocks(head, ids, {"final": states[:, :a]}, 3, torch.tensor([[a]]))[0, 0]
            best = head.ids[laws.argsort(descending=True)]
            expected = [int(best[len(path) - 1, path[-1]]) for path in tree.paths[:size]]
            assert r.proposal.tokens[b, :size].tolist() == expected
            assert r.proposal.parents[b, :size].tolist() == [-1, -1, 0, 1, 2][:size]
            assert size == tree.nodes(min(3, int(r.budget[b])))
            compared += size
    assert compared > 20


def test_the_best_static_tree_is_the_best_of_all():
    shares = [[0.6, 0.1, 0.2], [0.5, 0.3], [0.4, 0.35, 0.1]]
    every = {}
    for depth in (1, 2, 3):
        for path in product(*(range(len(each)) for each in shares[:depth])):
            every[path] = torch.tensor([shares[d][r] for d, r in enumerate(path)], dtype=torch.float64).prod()
    for total in (1, 4, 9, 100):
        best = sorted(every, key=every.__getitem__, reverse=True)[:total]
        assert sum(every[path] for path in StaticTree.of_accuracies(shares, total).paths) == pytest.approx(
            float(sum(every[path] for path in best))
        )
    assert StaticTree.of_widths((2, 1)).paths == ((0,), (1,), (0, 0), (1, 0))


@pytest.mark.parametrize("tree", [StaticTree.of_widths((2, 1)), StaticTree(((1,), (1, 1), (0,))), DDTree(3)])
def test_trees_have_the_targets_distribution_exactly(tree):
    small = sd.HFModel(tiny("llama", seed=4, vocab_size=3))
    head = shake(Medusa.from_target(small, heads=2, vocabulary=[0, 2]))
    found = certify(sd.decoder(small).draft(Head(head, tree), length=2).build(), [[0], [2, 1, 2]], [4, 3])
    assert found.lossless, found


@pytest.mark.slow
def test_the_static_tree_keeps_the_contract_of_drafts():
    head = shake(Medusa.from_target(model_of("own target"), heads=5))
    draft = Head(head, StaticTree.of_widths((3, 2, 1, 1)))
    found = check_draft(draft, model_of("own target"), only=["proposals", "alone", "others"])
    assert not found.not_tried


@pytest.mark.parametrize(
    "executor", [sd.executors.Pipelined(3), sd.executors.Optimistic(threads=False)], ids=repr
)
def test_output_is_the_targets_under_every_executor(target, executor):
    head = shake(Medusa.from_target(target, heads=4))
    for greedy in (True, False):
        assert texts(target, Head(head), greedy, executor, 2) == texts(target, None, greedy)


def test_bad_input_is_refused(target):
    head = Medusa.from_target(target, heads=3, vocabulary=[0, 1, 2])
    with pytest.raises(ValueError, match="heads is 0: each head proposes one token"):
        Medusa.from_target(target, heads=0)
    with pytest.raises(ValueError, match="blocks is 0"):
        Medusa.from_target(target, blocks=0)
    with pytest.raises(ValueError, match=r"taps is \[0, 2\]: Medusa reads one layer"):
        Medusa.from_target(target, (0, 2))
    with pytest.raises(TypeError, match="own_embedding is given, and Medusa reads one state"):
        Medusa.from_target(target, own_embedding=True)
    with pytest.raises(TypeError, match="mask is given"):
        Medusa.from_target(target, mask=streaming(5))
    with pytest.raises(ValueError, match=r"path of 4 tokens .* Medusa proposes at most 3"):
        sd.decoder(target).draft(Head(head), 4).build().generate([[1, 2]], 9)
    with pytest.raises(ValueError, match="k is 4, and this Medusa proposes at most 3"):
        blocks(head, torch.zeros(1, 9, dtype=torch.long), {}, 4)
    with pytest.raises(
        ValueError, match="StaticTree takes one distribution for each depth, and those of this Eagle3"
    ):
        Head(Eagle3.from_target(target), StaticTree.of_widths((2,)))
    with pytest.raises(ValueError, match="a rank of 3, and this Medusa proposes 3 ids"):
        Head(head, StaticTree.of_widths((4,)))
    for wrong in ((), ((),), ((0,), (0,)), ((-1,),)):
        with pytest.raises(ValueError, match="give at least one node, each once"):
            StaticTree(wrong)
    with pytest.raises(ValueError, match=r"has \(1, 0\) without its parent \(1,\)"):
        StaticTree(((0,), (1, 0)))
    with pytest.raises(TypeError, match="give the ranks on each node's path"):
        StaticTree((3, 2))
    with pytest.raises(TypeError, match=r"a rank, is 0\.5"):
        StaticTree(((0.5,),))
    with pytest.raises(ValueError, match="widths, of a depth, is 0"):
        StaticTree.of_widths((2, 0))
    with pytest.raises(ValueError, match="total is 0"):
        StaticTree.of_accuracies([[0.5]], 0)
    with pytest.raises(ValueError, match="accuracies is empty"):
        StaticTree.of_accuracies([], 3)
    for share in (float("nan"), -0.1, 1.5):
        with pytest.raises(ValueError, match=r"accuracies has .*, from 0 to 1"):
            StaticTree.of_accuracies([[0.5], [share]], 3)
    with pytest.raises(TypeError, match="widths is 3: give the children of a node by depth"):
        StaticTree.of_widths(3)
    with pytest.raises(ValueError, match="widths is empty"):
        StaticTree.of_widths(())
