"""The lab's small parts: options, reports, tables, clocks, runs in turn, processes, errors, workloads."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from time import sleep
from typing import Literal

import numpy as np
import pytest
import torch
from tiny import tiny

import specdec as sd
from specdec.kernels.native import library, reason
from specdec.lab import clock
from specdec.lab.arms import PoolRun, goodput, pool_run
from specdec.lab.clock import Forwards, bare_round, bare_steps, in_turn, middle, shuffled
from specdec.lab.console import progress, table
from specdec.lab.errors import LIMITS, relative, worst
from specdec.lab.options import option, parse
from specdec.lab.processes import apart
from specdec.lab.prompt_file import Entry, by_turns
from specdec.lab.report import command, write
from specdec.lab.runs import Case, Each, Sample, by_category, decode, interleave
from specdec.lab.simulated import BLOCK, acceptance, oracle
from specdec.lab.workload import DISTRIBUTIONS, lengths
from specdec.stats import Stats


def test_the_lab_is_found_from_the_package():
    assert sd.lab.options.parse is parse
    assert {"tau", "steady", "report"} <= set(dir(sd.lab))
    with pytest.raises(AttributeError, match=r"there are .*arms, "):
        sd.lab.nothing  # noqa: B018


# -- options ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    name: str = option("x", "what it is called, 100 %")
    sizes: tuple[int, ...] = option((1, 16), "rows")
    words: tuple[str, ...] = option((), "none or more")
    at: tuple[int, int] | None = option(None, "a point", metavar=("B", "L"))
    rate: float | None = option(None, "of learning")
    flag: bool = option(False, "on or off")
    kind: Literal["a", "b"] = option("a", "of two")
    json: str | None = option(None, "write the rows", metavar="FILE")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--sizes 1 2", {"sizes": (1, 2)}),
        ("--sizes 1,2 3", {"sizes": (1, 2, 3)}),
        ("--words a,b --flag", {"words": ("a", "b"), "flag": True}),
        ("--at 2 64 --rate 0.5 --no-flag", {"at": (2, 64), "rate": 0.5}),
        ("--kind b --json f --name y", {"kind": "b", "json": "f", "name": "y"}),
    ],
)
def test_options_are_the_fields(line, expected):
    assert parse(Settings, None, line.split()) == Settings(**expected)


def test_an_empty_list_is_one():
    assert parse(Settings, None, ["--words", ""]).words == ()


@pytest.mark.parametrize("line", ["--sizes one", "--kind c", "--nothing 1", "--at 2"])
def test_wrong_words_are_named(line, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(Settings, None, line.split())
    assert ended.value.code == 2
    assert line.split()[-1].strip("-") in capsys.readouterr().err or line == "--at 2"


def test_the_help_has_defaults_and_no_others(capsys):
    with pytest.raises(SystemExit):
        parse(Settings, "What it does.\n  As it is.", ["--help"])
    said = capsys.readouterr().out
    assert "What it does.\n  As it is." in said
    assert "rows (default: 1 16)" in said
    assert "100 % (default: x)" in said
    assert said.count("default") == 3  # of kind, too; what is empty has none


def test_a_field_of_another_type_is_refused():
    @dataclass(frozen=True)
    class Wrong:
        one: dict = option(None)

    @dataclass(frozen=True)
    class Without:
        one: tuple[int, ...] = field(default_factory=tuple)

    Wrong.__annotations__["one"] = dict
    Without.__annotations__["one"] = tuple[int, ...]
    with pytest.raises(TypeError, match="options are numbers"):
        parse(Wrong, None, [])
    with pytest.raises(TypeError, match="needs one"):
        parse(Without, None, [])


# -- reports and tables --------------------------------------------------------------------------------------------------------


def test_a_report_is_plain_json_and_says_how_it_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", [str(tmp_path / "recipes/gpu/suite.py"), "--json", str(tmp_path / "x.json"), "--k=2"]
    )
    assert command() == "python recipes/gpu/suite.py --json x.json --k=2"
    file = tmp_path / "new" / "x.json"
    write(file, [{"a": torch.tensor(1.5), "b": float("nan"), "c": (np.int64(3), float("inf"))}], seed=7)
    said = json.loads(file.read_text())
    assert said["rows"] == [{"a": 1.5, "b": None, "c": [3, None]}]
    assert said["meta"]["seed"] == 7
    assert set(said["meta"]) == {
        "command", "date", "commit", "dirty", "versions", "machine", "processor", "generation", "instruction_sets",
        "cores", "threads", "c_kernels", "seed"
    }  # fmt: skip
    assert said["meta"]["threads"]["torch"] == torch.get_num_threads()
    assert str(tmp_path) not in file.read_text()
    assert [f.name for f in file.parent.iterdir()] == ["x.json"]


def test_a_table_is_aligned():
    lines = table([{"a": "x", "b": None, "tokens_per_second": 123.4}, {"a": "long", "tokens_per_second": 1.0}],
                  ("a", "b", "tokens_per_second")).splitlines()  # fmt: skip
    assert lines[0] == "a     b  tokens/s"
    assert lines[2:] == ["x     -       123", "long  -      1.00"]


def test_progress_that_stays_and_progress_that_does_not(capsys):
    progress("gone")  # not a terminal
    progress("kept", stays=True)
    assert capsys.readouterr().err == "kept\n"


# -- clocks and runs -----------------------------------------------------------------------------------------------------------


def test_calls_take_turns_and_warm_up():
    said = []
    calls = [lambda: said.append("a"), lambda: (said.append("b"), sleep(0.01))]
    a, b = in_turn(calls, repeats=3, warmups=1, before=lambda number: said.append(number))
    assert said == [0, "a", 1, "b"] * 4
    assert 0 < a < 0.01 <= b
    assert in_turn([lambda: sleep(0.01)], repeats=2, take=lambda times: len(times)) == [2]


def test_the_middle_of_repeats_leaves_out_the_ends():
    assert middle([3.0]) == 3
    assert middle([1.0, 2.0]) == 1.5
    assert middle([9.0, 1.0, 2.0]) == 2
    assert middle([1.0, 2.0, 4.0, 99.0]) == 3
    assert middle([50.0, *[1.0] * 12, *[2.0] * 6, -50.0]) == 21 / 16  # 20: two at each end
    assert middle([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]]).tolist() == [2, 5]


def test_bare_forwards_leave_the_model_as_it_is():
    model = sd.HFModel(tiny("llama", dtype=torch.float32))
    decoder = sd.decoder(model).greedy().build()
    before = decoder.generate([[1, 2, 3]], 6).ids
    assert all(seconds > 0 for seconds in in_turn(bare_steps(model, 2, 7, (1, 3)), 2))
    assert all(seconds > 0 for seconds in bare_round(model, model, 2, 7, 2, turns=2)())
    assert decoder.generate([[1, 2, 3]], 6).ids == before


def test_bare_forwards_run_in_the_order_of_a_round(monkeypatch):
    said = []
    kinds = {"target": {1: "plain", 4: "verify"}, "draft": {1: "draft"}}
    monkeypatch.setattr(
        clock,
        "bare_steps",
        lambda model, batch, context, tokens: [partial(said.append, kinds[model][n]) for n in tokens],
    )
    timed = bare_round("target", "draft", 2, 7, k=3, turns=2)
    assert said == []
    assert isinstance(timed(), Forwards)
    assert said == ["plain", "draft", "draft", "draft", "verify", "plain"] * 3


def test_a_decode_counts_what_comes_after_the_prefill():
    model = sd.HFModel(tiny("llama", dtype=torch.float32))
    prompts = [[1, 2, 3], [4, 5], [6]]
    plain = decode(sd.decoder(model).greedy().build(), prompts, 2, 6, seed=0)
    fast = decode(sd.decoder(model).greedy().draft(model, 2).build(), prompts, 2, 6, seed=0)
    assert plain.ids == fast.ids
    assert plain.tokens == fast.tokens == 3 * 5
    assert plain.tau == 1
    assert fast.tau == 3
    assert plain.full[2] >= plain.full[1] > 0
    assert plain.stages["rounds"] > 0
    assert plain.speed == plain.tokens / plain.seconds


def test_temperatures_of_requests_are_not_given_to_other_prompts():
    target, prompts = sd.TableModel.random(4, 1, seed=1), [[0], [1], [2]]
    each = sd.Sampling(temperature=[0.0, 1.0, 2.0])
    draft = sd.drafts.Model(sd.TableModel.random(4, 1, seed=2), each)
    for decoder in (
        sd.decoder(target).sampling(each).build(),
        sd.decoder(target).sampling(temperature=1.0).draft(draft, 2).build(),
    ):
        with pytest.raises(ValueError, match="give one for all, or batch=3"):
            decode(decoder, prompts, 2, 4, seed=5)
        made = decode(decoder, prompts, 3, 4, seed=5)
        assert made.ids == decoder.generate(prompts, 4, seed=[5, 6, 7], eos_token_id=()).ids


def test_cases_take_turns_and_make_one_row():
    order = []

    def run(name, tokens):
        order.append(name)
        return Sample(tokens, 2.0, [], 1.5)

    cases = [
        Case("specdec", n, 1, 8, 0.0, lambda n=n, t=t: run(n, t)) for n, t in (("plain", 10), ("fast", 30))
    ]
    interleave(cases, 20, lambda line: None)
    turns = [tuple(order[i : i + 2]) for i in range(0, 40, 2)]
    assert set(turns) == {("plain", "fast"), ("fast", "plain")}  # each once in a turn, in changing order
    row = cases[1].row(cases[0], share=0.9)
    assert (row["ratio_to_plain"], row["tokens_per_second"], row["tau"], row["share_of_ideal"]) == (
        3,
        15,
        1.5,
        0.9,
    )
    assert row["peak_bytes"] is None or row["peak_bytes"] >= 0


def test_rows_by_category_of_prompts_that_are_decoded_alone_or_together():
    """Speeds count all tokens, and are medians."""
    alone = [
        Sample(9, 9.0, [], each=[Each(4, 2, 5, s), Each(3, 3, 3, 1.0), Each(2, 1, 4, 2 * s)])
        for s in (1.0, 2.0, 8.0)
    ]
    together = [Sample(9, 2.0, [], each=[Each(4, 2, 5), Each(3, 3, 3)])]
    cases = [
        Case("specdec", name, batch, 8, 0.0, lambda: None, 4, samples)
        for name, batch, samples in (("one", 1, alone), ("both", 2, together))
    ]
    rows = by_category(cases, ["code", "prose", "code"])
    found = [
        (r["part"], r["method"], r["category"], r["prompts"], r["tau"], r["tokens_per_second"]) for r in rows
    ]
    assert found == [
        ("category", "one", "code", 2, 2.0, 1.5),  # 6 tokens in 3 rounds; 9 in 3, 6 and 24 seconds
        ("category", "one", "prose", 1, 1.0, 3.0),
        ("category", "both", "code", 1, 2.0, None),
        ("category", "both", "prose", 1, 1.0, None),
    ]
    target, prompts = sd.TableModel.random(4, 1, seed=1), [[0], [1], [2]]
    decoder = sd.decoder(target).draft(sd.TableModel.random(4, 1, seed=2), 2).build()
    for batch in (1, 3):
        made = decode(decoder, prompts, batch, 8, seed=5)
        out = decoder.generate(prompts, 8, seed=[5, 6, 7], eos_token_id=())
        counts = [(s.full_tokens, s.full_rounds, s.tokens - s.prefill_tokens) for s in out.row_stats]
        assert [one[:3] for one in made.each] == counts
        assert all((one.seconds is None) == (batch == 3) for one in made.each)
        assert made.tau == sum(e.tokens for e in made.each) / sum(e.rounds for e in made.each)
    case = Case("specdec", "x", 1, 1, 1.0, lambda: None, 2, [decode(decoder, prompts, 1, 8, seed=5)])
    (row,) = by_category([case], ["all"] * 3)
    assert (row["tau"], row["tokens_per_second"]) == (case.tau, pytest.approx(case.speed))


def test_a_few_prompts_are_of_all_categories():
    every = [Entry((text,), category) for text, category in zip("abcdef", ("x", "x", "x", "y", "z", "y"))]
    assert "".join(entry.turns[0] for entry in by_turns(every)) == "adebfc"


def test_another_process_has_another_environment(monkeypatch):
    monkeypatch.setenv("SPECDEC_TEST", "here")
    with apart(SPECDEC_TEST="there") as call:
        assert call(os.getenv, "SPECDEC_TEST") == "there"
        with pytest.raises(ValueError, match="invalid literal"):
            call(int, "x")
    assert os.environ["SPECDEC_TEST"] == "here"


@pytest.mark.skipif(library() is None, reason=f"no C kernels: {reason()}")
def test_steps_without_their_call_of_c_come_back():
    from specdec.kernels.native import step

    own = step._function
    with pytest.raises(RuntimeError, match="stop"), step.without_c():
        assert step._function()(1, 2) == 0
        raise RuntimeError("stop")
    assert step._function is own


# -- pools and worlds ----------------------------------------------------------------------------------------------------------


def test_runs_of_a_pool_count_tokens_and_arms_after_the_prefill():
    target = sd.HFModel(tiny("llama", dtype=torch.float32))
    drafts = {
        "itself": sd.drafts.Model(target),
        "nothing": sd.drafts.Model(sd.HFModel(tiny("llama", 1, torch.float32))),
    }
    prompts = [[1, 2, 3], [4, 5], [6, 7]]
    runs = [pool_run(sd.decoder(target).greedy().draft(d, 2).build(), prompts, 9, 0) for d in drafts.values()]
    assert [run.tokens for run in runs] == [3 * 8] * 2
    assert runs[0].stats.rounds < runs[1].stats.rounds
    chosen = (
        sd.decoder(target).greedy().pool(drafts, sd.selectors.Fixed(1), 2, capacities={"nothing": 2}).build()
    )
    run = pool_run(chosen, prompts, 9, 0)
    assert run.ids == runs[0].ids
    assert run.arms.keys() == {0, 1}
    assert run.arms[1] > run.arms[0]
    assert run.selector_seconds > 0


def test_goodput_is_a_ratio_of_sums_over_workloads():
    def run(tokens, seconds):
        return PoolRun(tokens, seconds, Stats(), Counter(), [])

    mine = [run(100, 1.0 + i % 3) for i in range(6)]
    base = [run(100, 2 * (1.0 + i % 3)) for i in range(6)]
    value, low, high = goodput(mine)
    assert value == pytest.approx(600 / 12)
    assert low < value < high
    assert goodput(mine, base) == pytest.approx((2, 2, 2))  # paired by workload
    assert goodput(mine[:4])[1:] == (None, None)
    with pytest.raises(ValueError, match="base has 5 runs"):
        goodput(mine, base[:5])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_lengths_have_their_mean(name):
    found = lengths(name, 32, 400, 0)
    assert abs(sum(found) / 32 - 400) < 8
    assert 8 <= min(found) <= max(found) <= 1990
    assert found == lengths(name, 32, 400, 0)
    assert name == "equal" or any(lengths(name, 32, 400, seed) != found for seed in (1, 2, 3))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("batch", [1, 2, 3, 9, 15])
@pytest.mark.parametrize("mean", [8, 30, 130, 1990])
def test_lengths_of_few_or_short_rows_have_their_mean(name, batch, mean):
    found = [lengths(name, batch, mean, seed) for seed in range(40)]
    assert all(len(some) == batch and 8 <= min(some) <= max(some) <= 1990 for some in found)
    assert np.mean(found) == pytest.approx(mean, rel=0.04, abs=0.5)
    if name == "one_long" and batch > 1 and mean == 30:
        assert {tuple(sorted(some)) for some in found} == {
            (8,) * (batch - 1) + (30 * batch - 8 * (batch - 1),)
        }


def test_lengths_that_cannot_be_are_refused():
    for says, arguments in (
        ("name is 'long': give one of equal", ("long", 4, 100, 0)),
        ("batch is 0: give at least 1", ("one_long", 0, 100, 0)),
        ("mean is 2000: give 8 to longest, 1990", ("one_long", 4, 2000, 0)),
        ("mean is 7", ("equal", 4, 7, 0)),
    ):
        with pytest.raises(ValueError, match=says):
            lengths(*arguments)


def test_the_simulated_oracle_is_the_best_ratio_of_sums():
    mean = np.array([1.5, 3.0, 5.9])
    a = acceptance(mean)
    assert np.allclose(sum(a**i for i in range(BLOCK + 1)), mean)
    goodput = np.array([[3.0, 1.0, 1.0, 1.0, 1.0]])
    assert oracle(goodput, None) == pytest.approx(3.0)
    both = np.repeat(goodput, 2, 0)
    # One row alone has its best arm; the other takes what costs least: sums of tokens over sums of seconds.
    assert 1.0 < oracle(both, (1, 2, 2, 2, 2)) < 3.0


# -- errors --------------------------------------------------------------------------------------------------------------------


def test_an_error_shows_in_one_head_of_one_query():
    exact = torch.randn(1, 400, 32, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact[0, 7, 3] = 0  # a query that sees nothing
    out = exact.to(torch.bfloat16)
    assert worst(out, exact) < LIMITS[torch.bfloat16] / 4
    out[0, 5, 2] = out[0, 5, 3]
    assert relative(out, exact) < LIMITS[torch.bfloat16] < worst(out, exact)
    for wrong in (float("nan"), 1.0):
        out = exact.clone()
        out[0, 7, 3, 1] = wrong
        assert not worst(out, exact) < LIMITS[torch.bfloat16]


def test_orders_change_from_turn_to_turn_and_place_to_place():
    cases = list(range(5))
    orders = [shuffled(cases, turn, 16) for turn in range(20)]
    assert all(sorted(order) == cases for order in orders)
    assert all(one == other[::-1] for one, other in zip(orders[::2], orders[1::2]))
    assert len(set(map(tuple, orders))) > 15
    assert orders != [shuffled(cases, turn, 4) for turn in range(20)]
    assert orders == [shuffled(iter(cases), turn, 16) for turn in range(20)]
