"""Every test process computes on one thread, whatever the command: pytest's workers already keep all cores busy.

Child processes inherit the settings from the environment. A test of threading sets its own number of threads.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"  # read once, when torch and numpy are imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What imports and collection make stays: the garbage collector does not look at it, then or during the tests, and seldom at what tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests and cases in ``slow_tier.txt`` are slow: they take longest, and others of the same part stay in the fast tier."""
    listed = set(_slow(HERE / "slow_tier.txt"))
    if torch.cuda.is_available():  # they are slow in Triton's interpreter
        listed = {one for one in listed if not one.startswith("tests/test_triton_")}
    root = HERE.parent
    files = {item.path for item in items}
    missing = {one for one in listed if root / one.partition("::")[0] in files} - {
        item.nodeid for item in items
    }
    if missing and not any("::" in word for word in config.args):
        raise pytest.UsageError(f"tests/slow_tier.txt names cases that do not exist: {sorted(missing)}")
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    _kernels()


def _slow(names):
    """Ids of tests and cases; the cases of a test are indented below it."""
    if not names.exists():  # a test may be copied elsewhere
        return
    for block in re.split(r"\n(?=\S)", names.read_text().rstrip()):
        test, *cases = block.split("\n")
        yield from [test + case.strip() for case in cases] or [test]


def _kernels():
    """With a compiler but without kernels, the tests of the kernels would be skipped, in this process or in all: that is an error."""
    build = sys.modules.get("specdec.kernels.native.build")
    if build is None or not build._made.cache_info().currsize or os.environ.get("SPECDEC_NATIVE") == "0":
        return  # no test has asked for the kernels, or nobody wants them
    if build.library() is None and build.compiler() is not None:
        raise pytest.UsageError(
            f"there is a C compiler, but no C kernels ({build.reason()}): repair it, or skip their tests with SPECDEC_NATIVE=0"
        )


def _llama(**changes):
    from tiny import byte_tokenizer, tiny

    import specdec as sd

    return sd.HFModel(tiny("llama", 0, **changes), byte_tokenizer())


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture
def untraced(monkeypatch):
    """FlexAttention computes operator by operator; it traces every mask otherwise, which takes most of a test's time."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def streams(tmp_path):
    """The working folder of a recipe that trains: a tokenizer, and a few texts of every domain."""
    from specdec import zoo
    from specdec.data.corpus import DOMAINS
    from specdec.data.prompts import prompts
    from specdec.data.tokens import write_stream
    from specdec.lab.streams import Streams

    (tokenizer := zoo.load("pocket-tiny")[1]).save_pretrained(tmp_path / "work" / "tokenizer")
    for split in ("train", "validation"):
        for domain in DOMAINS:
            path = Streams(work=str(tmp_path / "work")).path(split, domain)
            path.parent.mkdir(exist_ok=True)
            write_stream(path, tokenizer, prompts(domain, n=4, split="validation"))
    return tmp_path / "work"


@pytest.fixture(scope="module")
def target():
    return _llama()


@pytest.fixture(scope="module")
def small():
    """The target without its last layers."""
    return _llama(num_hidden_layers=1)


@pytest.fixture(scope="module")
def llama():
    """A model without a tokenizer."""
    from tiny import tiny

    import specdec as sd

    return sd.HFModel(tiny("llama"))
