"""Draft heads in comparisons: replays of heads and of their trees, rounds timed in turn, rows and tables."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from doc_tables import tables, wrong
from recipe_runs import report, run
from test_heads import shake
from tiny import tiny

import specdec as sd
from specdec import lab, zoo
from specdec.audit.tau import chances, efficiency
from specdec.drafts.heads import MTP, DDTree, DFlash, DSpark, DynamicTree, Eagle3, Head, Medusa, StaticTree
from specdec.lab import contenders, contest, head_tables, markdown, ranks
from specdec.lab.contenders import Contender, Way
from specdec.lab.loading import draft_part
from specdec.lab.prompt_file import Entry
from specdec.lab.steady import Measured, Run
from specdec.lab.turns import PLAIN, TimedWay, Turns, drafting_ms, taus_of
from specdec.masks import streaming
from specdec.stats import Stats
from specdec.training.anchored import blocks

V, K = 5, 3
TAPS = (1, 2, 3)
KINDS = {
    "eagle3": lambda target: Eagle3.from_target(target, TAPS),
    "dflash": lambda target: DFlash.from_target(target, TAPS, blocks=1, block_size=K + 1),
    "dspark": lambda target: DSpark.from_target(target, TAPS, blocks=1, block_size=K, rank=4),
    "mtp": MTP.from_target,
    "medusa": lambda target: Medusa.from_target(target, heads=K),
}


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", num_hidden_layers=3, vocab_size=V))


@pytest.fixture(scope="module")
def heads(target):
    return {name: shake(make(target)) for name, make in KINDS.items()}


def entries(count, length=9):
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(0, V, (count, length), generator=draw).tolist()
    return [
        Entry((), "even" if i % 2 else "odd", f"source {i % 6}", given=tuple(row))
        for i, row in enumerate(rows)
    ]


def traced(target, ways, folder, temperature=1.0, count=4, new_tokens=9):
    sampling = sd.Sampling(temperature=temperature)
    return contenders.record(target, ways, entries(count), folder, sampling, new_tokens, K)


def chain(name, head):
    return Way(name, "chain", Head(head), K)


def forced(head, trace, target):
    """The teacher-forced forward's logits ``[C, n, K, V]`` after every block start, and the tokens of the text there with their places."""
    tokens = torch.tensor([text.ids for text in trace.texts])
    hidden = target.model(tokens, output_hidden_states=True).hidden_states
    layers = {}
    for tap in head.taps:
        x = trace_of(trace, TAPS[-1] if tap == "final" else tap)[:, :-1].to(head.dtype)
        layers[tap] = head.ends.final(x) if tap == "final" else x
        if tap in (1, "final"):
            expected = hidden[-1 if tap == "final" else tap][:, :-1]
            torch.testing.assert_close(layers[tap], expected, rtol=0, atol=1e-5)
    anchors = (trace.texts[0].prompt + torch.arange(9)).expand(len(tokens), -1)
    place = anchors[..., None] + 1 + torch.arange(K)
    logits = head.widened(blocks(head, tokens, layers, K, anchors))
    return logits, tokens[torch.arange(len(tokens))[:, None, None], place], place


@torch.no_grad()
def test_accuracies_of_ranks_are_those_of_the_teacher_forced_forward(target, heads, tmp_path):
    head = heads["dflash"]
    trace = traced(target, [chain("dflash", head)], tmp_path / "t")
    found = torch.tensor(ranks.accuracies(trace, head, K, target, top=V), dtype=torch.float64)
    logits, wanted, _ = forced(head, trace, target)
    rank = (logits > logits.gather(-1, wanted[..., None])).sum(-1)
    expected = torch.stack([(rank == r).double().mean((0, 1)) for r in range(V)], 1)
    torch.testing.assert_close(found, expected)
    assert len(set(found.flatten().tolist())) > V
    with pytest.raises(ValueError, match="need marginal ones"):
        ranks.accuracies(trace, heads["eagle3"], K, target)


@pytest.mark.parametrize(
    ("name", "mask"),
    [*((name, None) for name in KINDS), ("eagle3", streaming(4, 1)), ("dflash", streaming(4, 1))],
    ids=[*KINDS, "eagle3, window", "dflash, window"],
)
@torch.no_grad()
def test_a_heads_replay_is_its_teacher_forced_forward(target, heads, name, mask, tmp_path):
    """The target's recorded activations stand in for it; the forward of training shares no code with the replay."""
    head = heads[name].masked(mask)
    trace = traced(target, [chain(name, head)], tmp_path / "t")
    (replay,) = contenders.replay(trace, [chain(name, head)], target).values()
    logits, wanted, place = forced(head, trace, target)
    q = logits.softmax(-1).gather(-1, wanted[..., None])[..., 0].double()
    tokens = torch.tensor([text.ids for text in trace.texts])
    p = target.model(tokens).logits.softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    p = p[torch.arange(len(tokens))[:, None, None], place - 1]
    torch.testing.assert_close(replay.accept, chances(p, q), rtol=0, atol=1e-5)
    assert float(replay.tau) == pytest.approx(efficiency(chances(p, q)).tau, abs=1e-4)


def trace_of(trace, tap):
    at = trace.taps.index(tap)
    return torch.stack([trace.activations(i)[:, at] for i in range(len(trace))])


def trees(heads):
    return [
        Way("eagle3", "tree of 5", Head(heads["eagle3"], DynamicTree(top_k=3, depth=K, total=5)), K),
        Way("dspark", "tree of 5", Head(heads["dspark"], DynamicTree(top_k=2, depth=K, total=5)), K),
        Way("dflash", "tree of 6", Head(heads["dflash"], DDTree(6)), K),
        Way("medusa", "static tree", Head(heads["medusa"], StaticTree.of_widths((2, 1, 1))), K),
    ]


def test_greedy_replays_count_the_rounds_of_decoding(target, heads, tmp_path):
    """At temperature 0 nothing is random, so expected rounds are those that decoding takes: of chains, trees and windows."""
    ways = [chain(name, head) for name, head in heads.items()] + trees(heads)
    ways.append(Way("eagle3", "window", Head(heads["eagle3"].masked(streaming(4, 1))), K))
    trace = traced(target, ways, tmp_path / "t", temperature=0.0, count=3)
    accepted = 0.0
    for label, replay in contenders.replay(trace, ways, target, {way.label for way in ways}).items():
        draft = next(way.draft for way in ways if way.label == label)
        live = lab.simulate(trace, draft, target, K, repeats=1).counted
        torch.testing.assert_close(replay.efficiency().rounds, live.rounds, rtol=0, atol=0, msg=label)
        torch.testing.assert_close(replay.efficiency().tokens, live.tokens, rtol=0, atol=0, msg=label)
        accepted += float(live.accepted.sum())
    assert accepted > 12


def test_a_trees_chances_are_whether_it_has_the_texts_token(target, heads, tmp_path):
    """Nodes are points, so a drawn text follows the tree as far as the tree has its tokens; a live decoder agrees in the mean."""
    ways = trees(heads)
    trace = traced(target, ways, tmp_path / "t", count=12)
    for label, replay in contenders.replay(trace, ways, target).items():
        assert not replay.chains
        assert set(replay.accept.unique().tolist()) <= {0.0, 1.0}
        draft = next(way.draft for way in ways if way.label == label)
        live = lab.simulate(trace, draft, target, K, repeats=2, batch=12).counted
        mine = replay.efficiency()
        spread = (live.rounds / 2 - mine.rounds).std() * len(trace) ** 0.5
        assert abs(float(live.rounds.sum() / 2 - mine.rounds.sum())) < 4 * float(spread), label
        assert mine.tau > 1.3  # something was accepted


def test_contenders_are_loaded_and_missing_ones_are_named(tmp_path):
    model = zoo.load("pocket-target")[0]
    target = sd.HFModel(model, zoo.load("pocket-target")[1])
    head = Eagle3.from_target(target)
    head.save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "README.md").write_text("x\n\n**Training.** 5.00 M tokens of 7.0 M tokens\n")
    specs = ["pocket-vanilla", "pocket-spire", f"mine={tmp_path / 'mine'}", "nowhere", "hub=me/nowhere"]
    found, missing = contenders.contenders(specs, target, 6)
    assert missing.pop("hub").startswith("'me/nowhere' is neither a folder nor a pocket model")
    assert missing == {"nowhere": "there is no folder nowhere"}
    assert [(c.name, c.longest, c.tokens_trained) for c in found] == [
        ("pocket-vanilla", 6, 8.7e6), ("pocket-spire", 6, 15e6), ("mine", 6, 5e6)
    ]  # fmt: skip
    assert found[0].parameters == 1_279_104
    assert found[2].parameters == sum(p.numel() for p in head.parameters())
    assert found[0].trees([4]) == []
    assert found[0].windowed(8, 1) is None
    assert [way.nodes for way in found[2].trees([4, 9])] == [4, 9]
    narrow = found[2].windowed(8, 1)
    assert contenders.kept(narrow, 500) < 80 < contenders.kept(found[2].chain, 500) == 500
    name, part = draft_part(f"w=windowed:{tmp_path / 'mine'}", target, 8, 1)
    assert (name, part.model.mask) == ("w", streaming(8, 1))
    name, part = draft_part("r=windowed:fp8:pocket-vanilla", target, 8, 1)
    assert (name, part.model.mask, part.model.kv_dtype) == ("r", streaming(8, 1), torch.float8_e4m3fn)
    assert draft_part("v=pocket-vanilla", target, 8, 1)[1].model.kv_dtype is None
    with pytest.raises(SystemExit, match="eight bits are for causal LMs"):
        draft_part(f"h=fp8:{tmp_path / 'mine'}", target, 8, 1)


def test_heads_without_a_cache_take_no_mask(heads):
    head = heads["eagle3"].masked(None)
    assert head.mask is None
    head.kv_layers = 0
    with pytest.raises(ValueError, match="no keys and values"):
        head.masked(streaming(4, 1))


def timed(name, k, draft, other=0.001):
    seconds = {"draft": draft, "other": other}
    return Measured(name, k, [Run(4, 0.02, 1, replace(Stats(), seconds=seconds))])


def test_equal_drafting_time(target, heads, tmp_path):
    """The longest chain of each draft within the time of the reference's."""
    field = [Contender(name, Head(heads[name]), 10, None, K) for name in ("eagle3", "dspark")]
    trace = traced(target, [one.chain for one in field], tmp_path / "t", count=6)
    chains = [one.chain for one in field]
    replays = contenders.replay(trace, chains, target, {way.label for way in chains})
    measured = {(PLAIN, 0): timed(PLAIN, 0, 0.0, 0.001)}
    measured |= {("eagle3", k): timed("eagle3", k, 0.002 * k, 0.002) for k in (1, 2, 3)}
    measured |= {("dspark", k): timed("dspark", k, 0.0045 + 0.0001 * k, 0.001) for k in (1, 2, 3)}
    assert drafting_ms(measured["eagle3", 2], measured[PLAIN, 0]) == pytest.approx(5.0)
    rows = contest.equal_rows(field, measured, replays, "eagle3", {"context": 9})
    assert [(r["method"], r["over_k"], r["k"]) for r in rows] == [
        ("eagle3", 1, 1), ("dspark", 1, 0), ("eagle3", 2, 2), ("dspark", 2, 3)
    ]  # fmt: skip
    assert rows[1]["tau"] == 1.0
    assert rows[3]["tau"] == pytest.approx(replays["dspark, chain"].tau)
    assert rows[2]["tau"] < replays["eagle3, chain"].tau


RANKS = [[0.5, 0.3], [0.4, 0.2], [0.1, 0.1]]


def trees_of(field):
    """Of all kinds."""
    made = [way for one in field for way in one.trees([5], RANKS)]
    kinds = ["EAGLE-2 tree", "DDTree", "static tree", "EAGLE-2 tree"]
    assert [(way.drafting, way.nodes) for way in made] == [(f"{kind} of 5", 5) for kind in kinds]
    return made


def test_rows_and_their_tables_of_the_documentation(target, heads, tmp_path):
    """Everything that the recipe does, at temperature 1; the Markdown is what the test of the documentation accepts."""
    field = [Contender(name, Head(heads[name]), 10, 5e6, K) for name in ("eagle3", "dflash", "dspark")]
    chains, more = [one.chain for one in field], trees_of(field)
    trace = traced(target, chains + more, tmp_path / "t", count=12)
    replays = contenders.replay(trace, chains + more, target, {way.label for way in chains + more})
    here = {"temperature": 1.0, "context": 9}
    rows = contest.tau_rows(field, replays, "dspark", here) + contest.depth_rows(field, replays, here)
    rows += contest.tree_rows(field, more, replays, here)
    prompts = [entry.given for entry in entries(12)]
    turns = Turns(target, chains + more, prompts, 9, sd.Sampling(), 3, K)
    cases = turns.chosen(replays, 2, ("rejection", "block"))
    assert [(c.way.drafting, c.verifier) for c in cases[1:7]] == [
        ("chain", "rejection"),
        ("chain", "block"),
    ] * 3
    assert {(c.way.method, c.way.drafting, c.verifier) for c in cases[7:]} <= {
        (way.method, way.drafting, "rejection") for way in more
    }
    assert len(cases) == 10  # a method's best tree
    measured = turns.measure(cases, 2, 1)
    rows += contest.speed_rows(field, cases, measured, taus_of(replays, cases, 9), 2, here)
    rows += contest.choice_rows(cases, replays, 2, here)
    taus = [r for r in rows if r["part"] == "tau" and r["domain"] == "all"]
    assert len(taus) == 9
    assert all(r["tau_low"] <= r["tau"] <= r["tau_high"] for r in taus)
    assert {r["ratio"] for r in taus if r["method"] == "dspark"} == {1.0}
    plain = next(r for r in rows if r["part"] == "speed" and r["method"] == PLAIN)
    assert (plain["tau"], plain["ratio_to_plain"], plain["draft_ms"]) == (1.0, 1.0, 0.0)
    made = next(r for r in rows if r["part"] == "speed" and r["verifier"] == "block")
    assert made["tokens_per_second"] == pytest.approx(2e3 * made["tau"] / made["round_ms"])
    (tmp_path / "results").mkdir()
    (tmp_path / "results/h.json").write_text(json.dumps({"rows": rows}))
    page = tmp_path / "page.md"
    page.write_text(head_tables.documented(rows, "h.json"))
    found = list(tables(page))
    assert len(found) == 4
    assert [said for table in found for said in wrong(table, tmp_path)] == []
    page.write_text(page.read_text().replace("| eagle3 | 1.", "| eagle3 | 9."))
    assert [said for table in tables(page) for said in wrong(table, tmp_path)]
    assert "eagle3" in head_tables.shown(rows)
    assert set(head_tables.figures(rows)) == {"heads_tau", "heads_depth", "heads_speed"}


def test_a_cell_that_two_rows_fit_is_refused():
    rows = [{"name": "a", "x": 1.0}, {"name": "a", "x": 2.0}]
    with pytest.raises(ValueError, match="2 rows have"):
        markdown.table(rows, "r.json", {"name": "name"}, [markdown.Column("x", ("x",))], {})


def test_a_slow_moment_chooses_no_length(monkeypatch):
    """The runs of two lengths are in turn, and a middle one of each counts."""
    seen = []

    def steady(decoder, groups, count, turn):
        seen.append((decoder, count, turn))
        return SimpleNamespace(round_seconds=9.0 if seen[-1] == (4, 5, 2) else decoder / 10)

    monkeypatch.setattr("specdec.lab.turns.steady", steady)
    monkeypatch.setattr(Turns, "decoder", lambda self, case: case.k)
    turns = Turns(None, [], [], 9, sd.Sampling(), 10, K)
    near, far = turns._short([TimedWay(None, 4), TimedWay(None, 1)], [])
    assert (near.round_seconds, far.round_seconds) == (0.4, 0.1)
    assert [k for k, _, _ in seen] == [4, 1] * 4
    assert [count for _, count, _ in seen[:3]] == [1, 1, 5]


@pytest.mark.slow
def test_recipe(tmp_path):
    target = sd.HFModel(*zoo.load("pocket-target"))
    Eagle3.from_target(target, own_head=False).save_pretrained(tmp_path / "eagle3")
    DFlash.from_target(target, blocks=1, block_size=3).save_pretrained(tmp_path / "dflash")
    prompts, file, text = tmp_path / "p.jsonl", tmp_path / "h.json", tmp_path / "t.md"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"def f{i}(x):", "category": "code"}) + "\n" for i in range(6))
    )
    toy = "--contexts 24 32 --at 24 --k 3 --trees 4 --batches 1 --repeats 1 --run-tokens 2 --new-tokens 3 --count 33 --window 8"
    said = run(
        "recipes/heads.py", *toy.split(), "--methods", f"eagle3={tmp_path / 'eagle3'}", f"dflash={tmp_path / 'dflash'}", "pocket-vanilla",
        "pocket-nowhere", "--reference", "pocket-vanilla", "--budget", "pocket-vanilla", "--prompts", str(prompts), "--json", str(file), "--markdown", str(text),
        "--plots", str(tmp_path / "figures"),
    )  # fmt: skip
    assert "left out: pocket-nowhere" in said
    rows = report(file)
    parts = {"draft", "choice", "tau", "depth", "tree", "equal_ms", "speed", "window", "outside"}
    assert {r["part"] for r in rows} == parts
    assert [r["method"] for r in rows if r["part"] == "draft"] == ["eagle3", "dflash", "pocket-vanilla"]
    assert {r["temperature"] for r in rows if r["part"] != "draft"} == {0.0, 1.0}
    (tmp_path / "results").mkdir()
    (tmp_path / "results/h.json").write_text(file.read_text())
    assert [said for table in tables(text) for said in wrong(table, tmp_path)] == []
    assert len(list((tmp_path / "figures").glob("*.png"))) == 3
    fewer = [
        "--parts",
        "tau",
        "--temperatures",
        "1",
        "--no-kinds",
        "--methods",
        "pocket-vanilla",
        "--json",
        str(tmp_path / "f.json"),
    ]
    run("recipes/heads.py", *toy.split(), *fewer)
    some = [r for r in report(tmp_path / "f.json") if r["part"] == "tau"]
    assert {r["domain"] for r in some} == {"all"}
    assert {(r["k"], r["context"]) for r in some} == {(k, n) for k in (1, 2, 3) for n in (24, 32)}
