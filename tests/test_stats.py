"""What a result says of itself: intervals, plots, arms, and a summary when no round counts."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import specdec as sd
from specdec.lab.bootstrap import Clusters, interval
from specdec.lab.live import Live

table, other = sd.TableModel.random(6, seed=0), sd.TableModel.random(6, seed=1)
decoder = sd.decoder(table).draft(other, length=3).build()
PROMPTS = [[b % 6] for b in range(9)]


@pytest.fixture(scope="module")
def out():
    return decoder.generate(PROMPTS, [10 * (b + 1) for b in range(9)], seed=0)


def test_the_interval_is_the_labs_bootstrap_over_texts(out):
    tokens = np.array([s.full_tokens for s in out.row_stats])
    rounds = np.array([s.full_rounds for s in out.row_stats])
    used = rounds > 0
    expected = interval(
        Clusters(np.arange(used.sum()).astype("U4"), 500, 3).ratios(tokens[used], rounds[used])
    )
    found = out.stats.interval(draws=500, seed=3)
    assert found == pytest.approx(expected)
    assert found[0] < out.stats.tau < found[1]
    both = out.stats + out.stats
    assert len(both.texts) == 2 * len(out.stats.texts)
    assert np.diff(both.interval()) < np.diff(out.stats.interval())


def test_few_texts_have_no_interval():
    few = decoder.generate(PROMPTS[:4], 20, seed=0).stats
    with pytest.raises(ValueError, match=r"4 texts have rounds that count, too few .* at least 5 prompts"):
        few.interval()
    (few + few).interval()
    rows = decoder.generate(PROMPTS, 20, seed=0)
    assert sum(rows.row_stats, sd.Stats()).interval() == rows.stats.interval()


def test_a_summary_without_rounds_that_count():
    cut = decoder.generate([[1]], 2, seed=0)
    assert "tau n/a (all rounds cut short)" in repr(cut)
    assert "tau n/a (no round after the prefill)" in repr(decoder.generate([[1]], 1, seed=0))
    assert "tau 1.00" in repr(sd.decoder(table).build().generate([[1]], 9, seed=0))


def test_the_progress_bar_has_no_nan(capsys):
    decoder.generate([[1]], 2, seed=0, progress=True)
    said = capsys.readouterr().err
    assert "tau n/a" in said
    assert "nan" not in said


def test_arms_are_in_the_frame():
    arms = {"small": other, "ngram": sd.drafts.NGram(), "none": None}
    pooled = sd.decoder(table).pool(arms, sd.selectors.Random(), length=3).build()
    out = pooled.generate(PROMPTS, 30, seed=0)
    frame = out.frame()
    columns = [f"rounds_{name}" for name in arms]
    assert frame[columns].sum(axis=1).tolist() == frame["rounds"].tolist()
    assert (frame[columns].sum() > 0).all()
    assert sum(out.stats.arms.values()) == out.stats.rounds
    assert not [name for name in decoder.generate([[1]], 4).rows()[0] if name.startswith("rounds_")]


def test_a_plot_has_the_figures(out, monkeypatch):
    left, right = out.stats.plot().axes
    assert [bar.get_height() for bar in left.patches] == pytest.approx(out.stats.acceptance)
    assert [bar.get_width() for bar in right.patches] == pytest.approx(
        [s for s in out.stats.seconds.values() if s > 0]
    )
    assert left.get_title() == f"tau {out.stats.tau:.2f}"
    monkeypatch.delitem(sys.modules, "specdec.figures")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        out.stats.plot()


@pytest.mark.filterwarnings(
    "ignore:Pickle, copy, and deepcopy:DeprecationWarning"
)  # matplotlib's, from Python 3.12 on
def test_a_notebook_shows_a_plot_without_pyplot(out, monkeypatch):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # IPython warns of one that is not this process's
    formats = InteractiveShell.instance().display_formatter.format
    one = Live([{"method": "a", "batch": 1, "ratio": 1, "ratio_low": 1, "ratio_high": 2, "best": True}], "a")
    for figure in (out.stats.plot(), one.plot()):
        assert formats(figure)[0]["image/png"].startswith(b"\x89PNG")
    pickle.loads(pickle.dumps(out.stats.plot()))
