"""Draft heads on the target's features: the contract that all heads share, and EAGLE-3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contracts.test_drafts import model_of
from tiny import tiny

import specdec as sd
from specdec.drafts.heads import Chain, DDTree, DFlash, DSpark, DynamicTree, Eagle3, Head, slots
from specdec.drafts.heads import draft as draft_file
from specdec.drafts.heads.load import as_head, is_head
from specdec.forward.ends import Ends
from specdec.masks import streaming
from specdec.testing import check_draft
from specdec.training.anchored import blocks

PROMPTS = [[1, 2, 3], [4], [5] * 40, [7, 8, 9, 10, 11, 12, 13, 14, 15]]
BUDGETS = [24, 7, 1, 17]
EVERY = {
    "blocks": 2,
    "fc_norm": True,
    "norm_before_fc": True,
    "norm_output": True,
    "norm_before_residual": True,
    "head_norms": True,
}
SETTINGS = {
    "plain": {},
    "all flags": EVERY,
    "few ids": {"vocabulary": range(0, 97, 2)},
    "no own head": {"own_head": False},
    "own embedding": {"own_embedding": True, "vocabulary": range(0, 97, 2), "own_head": False},
}


@torch.no_grad()
def shake(head, seed=1):
    """Weights large enough for the head's distributions to differ from each other."""
    draw = torch.Generator().manual_seed(seed)
    for p in head.parameters():
        p.add_(torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p) * 0.2)
    return head


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=4))


def observed(head, rounds, row):
    """tap -> ``[1, T, E]``: what the target returned live at the committed positions of a row, whichever round fed them."""
    blocks = head.config.num_target_layers
    found = {}
    for r in rounds:
        rows, fed, verdict = r.context.request.tolist(), r.scores.fed, r.verdict
        for i, (b, position, node) in enumerate(
            zip(fed.row.tolist(), fed.position.tolist(), fed.node.tolist())
        ):
            if rows[b] == row and (node < 0 or node in verdict.path[b, : verdict.accepted[b]].tolist()):
                found[position] = {layer: x[i] for layer, x in fed.layers.items()}
    assert sorted(found) == list(range(len(found)))
    layers = {
        tap: torch.stack([found[p][blocks if tap == "final" else tap] for p in sorted(found)])
        for tap in head.taps
    }
    return {tap: (head.ends.final(x) if tap == "final" else x)[None] for tap, x in layers.items()}


@pytest.mark.parametrize(
    ("settings", "mask"),
    [*((one, None) for one in SETTINGS.values()), (EVERY, streaming(6, 2))],
    ids=[*SETTINGS, "all flags, window"],
)
@torch.no_grad()
def test_what_was_drafted_live_is_what_the_teacher_forced_forward_gives(target, settings, mask):
    """Every node of every round of a ragged batch, rejections included."""
    head = Eagle3.from_target(target, (0, 3, "final"), mask=mask, **settings)
    shake(head)
    rounds = []
    decoder = sd.decoder(target).draft(Head(head), 3).build()
    prompts = [PROMPTS[0], PROMPTS[3], [5] * 90]  # the last is read in two pieces under a window
    out = decoder.generate(prompts, [25, 12, 25], seed=0, on_round=rounds.append)
    compared, rejected = 0, 0
    for b, prompt in enumerate(prompts):
        text = torch.tensor([prompt + out.ids[b]])
        known = observed(head, rounds, b)
        for r in rounds[1:]:
            rows = r.context.request.tolist()
            if b not in rows or not int(r.proposal.size[rows.index(b)]):
                continue
            i = rows.index(b)
            anchor, size = int(r.context.length[i]) - 1, int(r.proposal.size[i])
            drafted = torch.cat([text[:, : anchor + 1], r.proposal.tokens[i, :size][None]], 1)
            layers = {tap: x[:, :anchor] for tap, x in known.items()}
            made = head.widened(blocks(head, drafted, layers, size, torch.tensor([[anchor]])))[0, 0]
            torch.testing.assert_close(r.proposal.probs[i, :size], made.softmax(-1), rtol=0, atol=1e-10)
            compared, rejected = compared + size, rejected + int(r.verdict.accepted[i] < size)
    assert compared > 40
    assert rejected >= 5


def texts(target, draft, greedy, executor=None, length=4, prompts=PROMPTS, budgets=BUDGETS):
    base = sd.decoder(target).verifier(sd.Coupled())
    base = base.greedy() if greedy else base.sampling(temperature=0.7)
    base = base if draft is None else base.draft(draft, length)
    base = base if executor is None else base.executor(executor)
    return base.build().generate(prompts, budgets, seed=3).ids


FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral"]
OTHERS = [
    "gemma",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "mistral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3_moe",
    "starcoder2",
]


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in OTHERS)])
def test_output_is_the_targets_for_every_family(family):
    target = sd.HFModel(tiny(family))
    head = shake(Eagle3.from_target(target, (0, 1, 2, "final")))
    prompts, budgets = [[1, 2, 3], [5] * 12], [9, 5]
    for greedy in (True, False):
        plain = texts(target, None, greedy, prompts=prompts, budgets=budgets)
        for tree in ({}, {"tree": DynamicTree(3, 2, 5)}):
            assert texts(target, Head(head, **tree), greedy, prompts=prompts, budgets=budgets) == plain


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    "executor",
    [
        sd.executors.Pipelined(3),
        sd.executors.Optimistic(),
        sd.executors.Optimistic(threads=False),
    ],
    ids=repr,
)
def test_output_is_the_targets_under_every_executor(target, executor, greedy):
    head = shake(Eagle3.from_target(target, (1, 2, 4), blocks=2))
    plain = texts(target, None, greedy)
    assert texts(target, Head(head), greedy, executor, 3) == plain
    if isinstance(executor, sd.executors.Pipelined):
        assert texts(target, Head(head, DynamicTree(3, 3, 6)), greedy, executor) == plain


def test_a_block_drafted_ahead_is_the_one_that_would_be_drafted(target):
    """Under ``Optimistic`` some blocks are kept, and they were drafted before the features of the block before them existed."""
    counter = sd.executors.Guesses()
    executor = sd.executors.Optimistic(guesses=counter)
    ids = texts(target, Head(Eagle3.from_target(target)), True, executor, 2, [[5] * 9, [3, 1]], [30, 30])
    assert ids == texts(target, None, True, None, 2, [[5] * 9, [3, 1]], [30, 30])
    assert counter.made > 10


TREE, WINDOW = DynamicTree(3, 3, 6), {"mask": streaming(6, 2)}
JOINING = {
    "chain": (Eagle3, {}, Chain()),
    "tree": (Eagle3, {}, TREE),
    "chain, window": (Eagle3, WINDOW, Chain()),
    "tree, window": (Eagle3, WINDOW, TREE),
    "dflash, window": (DFlash, {"block_size": 5, **WINDOW}, DDTree(6)),
    "dspark, stop": (DSpark, {"rank": 5}, Chain(stop=0.4)),
}


@pytest.mark.parametrize(
    ("kind", "settings", "tree"),
    [
        pytest.param(
            *how, id=name, marks=pytest.mark.slow if name in ("chain, window", "tree, window") else ()
        )
        for name, how in JOINING.items()
    ],
)
def test_rows_that_join_and_leave_propose_what_they_propose_alone(target, kind, settings, tree):
    head = shake(kind.from_target(target, blocks=2, **settings))
    decoder = sd.decoder(target).greedy().draft(Head(head, tree), 3).build()
    prompts, budgets = [PROMPTS[0], PROMPTS[1], [5] * 90, PROMPTS[3]] * 2, BUDGETS * 2

    def noted(into):
        def note(r):
            for b, row in enumerate(r.context.request.tolist()):
                n = int(r.proposal.size[b])
                into[row, int(r.context.length[b])] = (
                    r.proposal.tokens[b, :n].tolist(),
                    r.proposal.parents[b, :n].tolist(),
                )

        return note

    together, alone = {}, {}
    requests = [sd.Request(p, n, arrival=float(i)) for i, (p, n) in enumerate(zip(prompts, budgets))]
    list(decoder.serve(requests, limit=3, clock="rounds", on_round=noted(together)))
    for i, (prompt, budget) in enumerate(zip(prompts, budgets)):
        mine = {}
        decoder.generate([prompt], budget, on_round=noted(mine))
        alone |= {(i, length): one for (_, length), one in mine.items()}
    assert together == alone
    assert sum(bool(tokens) for tokens, _ in alone.values()) > 60


def test_trees_keep_the_contract_of_drafts():
    """Budgets, parents, sizes; rows propose the same whoever else is there, and after rounds of other drafts."""
    draft = Head(shake(Eagle3.from_target(model_of("own target"))), DynamicTree(3, 3, 6))
    found = check_draft(draft, model_of("own target"), only=["proposals", "alone", "others"])
    assert not found.not_tried


def test_streamed_text_is_the_targets(target):
    decoder = sd.decoder(target).greedy().draft(shake(Eagle3.from_target(target)), 3).build()
    assert [t for chunk in decoder.stream(PROMPTS[0], 24) for t in chunk.ids] == texts(target, None, True)[0]


@torch.no_grad()
def test_the_dynamic_tree_is_eagles(target):
    """Against a search that computes every path by the teacher-forced forward."""
    head, tree, rounds = (
        shake(Eagle3.from_target(target, (1, 3), vocabulary=range(1, 97, 2)), 2),
        DynamicTree(3, 4, 9),
        [],
    )
    decoder = sd.decoder(target).draft(Head(head, tree), 4).build()
    out = decoder.generate(PROMPTS[:2], [20, 14], seed=0, on_round=rounds.append)
    for row, prompt in enumerate(PROMPTS[:2]):
        text, known = prompt + out.ids[row], observed(head, rounds, row)
        for r in rounds[1:]:
            rows = r.context.request.tolist()
            if row not in rows or not int(r.proposal.size[rows.index(row)]):
                continue
            b = rows.index(row)
            anchor, deepest = int(r.context.length[b]) - 1, min(4, int(r.budget[b]))
            layers = {tap: x[:, :anchor] for tap, x in known.items()}

            def after(path, text=text, anchor=anchor, layers=layers):
                ids = torch.tensor([[*text[: anchor + 1], *path, 0]])
                made = blocks(head, ids, layers, len(path) + 1, torch.tensor([[anchor]]))[
                    0, 0, -1
                ].log_softmax(-1)
                return zip(made.topk(3).values.tolist(), head.ids[made.topk(3).indices].tolist())

            frontier, candidates = [(0.0, ())], []
            for _ in range(deepest):
                level = [
                    (score + more, (*path, token)) for score, path in frontier for more, token in after(path)
                ]
                candidates += level
                frontier = sorted(level, reverse=True)[:3]
            best = {path for _, path in sorted(candidates, reverse=True)[:9]}
            found = []
            for n in range(int(r.proposal.size[b])):
                parent, token = int(r.proposal.parents[b, n]), int(r.proposal.tokens[b, n])
                found.append((*(found[parent] if parent >= 0 else ()), token))
            assert set(found) == best


def test_a_head_is_a_folder(target, tmp_path):
    head = shake(
        Eagle3.from_target(target, (1, "final"), vocabulary=range(0, 97, 3), mask=streaming(5), **EVERY)
    )
    head.save_pretrained(tmp_path)
    assert texts(target, tmp_path, False) == texts(target, Head(head), False)
    again = Eagle3.from_pretrained(tmp_path)
    assert again.taps == (1, "final")
    assert (again.settings, again.mask) == (head.settings, head.mask)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values()))
    proposals = []
    for model in (head, tmp_path):
        seen = []
        decoder = sd.decoder(target).draft(model, 3).build()
        decoder.generate(PROMPTS, 9, seed=1, on_round=seen.append)
        proposals.append([r.proposal.probs for r in seen if r.proposal.nodes])
    assert all(torch.equal(a, b) for a, b in zip(*proposals, strict=True))


def test_bad_heads_are_refused(target, tmp_path):
    head = Eagle3.from_target(target, (1, 2))
    other = sd.HFModel(tiny("llama", seed=9, num_hidden_layers=4))
    with pytest.raises(ValueError, match="made for target"):
        sd.decoder(other).draft(Head(head)).build()
    with pytest.raises(ValueError, match=r"taps: layer 7 does not exist.* 0 \(the embedding\) to 4"):
        Eagle3.from_target(target, (1, 7))
    with pytest.raises(ValueError, match="taps is empty"):
        Eagle3.from_target(target, ())
    with pytest.raises(ValueError, match="reads the target's activations"):
        sd.decoder(sd.TableModel.random(97)).draft(Head(head)).build()
    with pytest.raises(ValueError, match="hidden_size is 64 and the head's 32"):
        sd.decoder(sd.HFModel(tiny("llama", hidden_size=64))).draft(Head(head)).build()
    with pytest.raises(TypeError, match="give a head"):
        Head(target)
    head.save_pretrained(tmp_path)
    tensors = dict(head.state_dict())
    lost = tensors.pop("fc.weight")
    with pytest.raises(ValueError, match=r"lacks the tensor 'fc.weight', \[32, 64\]"):
        head.filled(tensors, "here")
    with pytest.raises(ValueError, match=r"'fc.weight' is \[31, 64\] and must be \[32, 64\]"):
        head.filled({**tensors, "fc.weight": lost[1:]}, "here")
    with pytest.raises(ValueError, match="has a tensor 'more'"):
        head.filled({**tensors, "fc.weight": lost, "more": lost}, "here")
    with pytest.raises(FileNotFoundError, match=r"has no head.json"):
        Head(tmp_path / "elsewhere")


def test_a_vocabulary_is_a_map_of_offsets():
    from specdec.drafts.heads.vocabulary import check_offsets, offsets

    ids = [0, 3, 4, 96]
    map_ = offsets(ids, 97)
    assert map_.tolist() == [0, 2, 2, 93]
    there = torch.zeros(97, dtype=torch.bool)
    there[ids] = True
    check_offsets(map_, 97, there)
    for wrong in (torch.tensor(ids), map_.flip(0), map_ - 1):
        with pytest.raises(ValueError, match="d2t holds no offsets"):
            check_offsets(wrong, 97, there)
    there[5] = True
    with pytest.raises(ValueError, match="d2t holds no offsets"):
        check_offsets(map_, 97, there)
    for wrong in ([], [3, 3], [4, 3], [0, 97]):
        with pytest.raises(ValueError, match="vocabulary"):
            offsets(wrong, 97)


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "gpt_neox", "opt", "phi3", "olmo2", "starcoder2"],
)
def test_the_ends_are_the_targets(family):
    model = tiny(family)
    ends = Ends.of(model)
    ends.check(model)
    with torch.no_grad():
        ids = torch.arange(9)[None]
        final = model.base_model(ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(ends.logits(final), model(ids).logits)


def test_a_model_with_other_ends_is_refused():
    model = tiny("llama")
    forward = model.forward
    model.forward = lambda *args, **kwargs: _doubled(forward(*args, **kwargs))
    with pytest.raises(ValueError, match="does more to its logits"):
        Ends.of(model).check(model)


def _doubled(out):
    out.logits = out.logits * 2
    return out


def test_a_block_keeps_its_slots_where_it_needs_more_of_them(target, monkeypatch):
    """A first block is the one of a ring that had room from the beginning."""
    head = shake(Eagle3.from_target(target))
    draft = Head(head, DynamicTree(4, 7, 40))
    decoder = sd.decoder(target).draft(draft, length=7).build()

    def first():
        rounds = []
        decoder.generate([[1, 2, 3]], 12, seed=0, on_round=rounds.append)
        return [r.proposal.tokens.tolist() for r in rounds]

    found = first()

    def roomy(*words):
        ring = slots.empty(*words)
        return ring.resized(ring.window, 400)

    monkeypatch.setattr(draft_file, "empty", roomy)
    assert first() == found


@pytest.mark.parametrize("local", [False, True])
def test_what_counts_as_a_head_is_loaded_as_one(local, tmp_path, monkeypatch):
    """The name of a pocket head, where no folder has that name; a path is never looked up in the zoo."""
    monkeypatch.chdir(tmp_path)
    if local:
        (tmp_path / "pocket-eagle3").mkdir()
    for name in ("pocket-eagle3", Path("pocket-eagle3")):
        if is_head(name):
            assert isinstance(as_head(name), Eagle3)
        else:
            with pytest.raises(FileNotFoundError, match=r"pocket-eagle3 has no head\.json"):
                as_head(name)
    assert is_head("pocket-eagle3") is not local
    assert not is_head(Path("pocket-eagle3"))
