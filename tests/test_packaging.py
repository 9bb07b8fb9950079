"""What an installation holds, and what editors and type checkers see of it."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest

import specdec as sd
from specdec import builder
from specdec.drafts.spire import SpireModel
from specdec.models.hf import Options
from specdec.sampling import SamplingSettings

ROOT = Path(__file__).parents[1]
RIGHT = """import specdec as sd
from specdec.kernels import attention, native

target = sd.HFModel(*sd.zoo.load("pocket-target"))
draft = sd.HFModel.from_pretrained(sd.zoo.FOLDER / "pocket-vanilla", dtype="float32", graphs=False)
base: sd.Builder = sd.decoder(target).sampling(temperature=0.8, top_p=0.95)
pool = base.pool({"model": draft, "ngram": sd.drafts.NGram(), "none": None}, sd.selectors.EXP3())
for decoder in (base.draft(draft, length=4).verifier(sd.Coupled()).build(), pool.build()):
    out: sd.Generation = decoder.generate(["import os", "def f("], max_new_tokens=16, seed=0)
    print(out.texts, out.stats.tau, native.reason(), attention.available())
"""
WRONG = """import specdec as sd

base = sd.decoder("pocket-target")
base.sampling(temprature=0.8)
base.sampling(temperature="hot")
base.draft("pocket-tiny", lenght=4)
base.draft(7)
base.build().generate("x", max_tokens=3)
base.build().generate(3.5)
sd.HFModel.from_pretrained("x", graphs="autom")
sd.zoo.laod("pocket-target")
sd.decodr
"""


def public() -> list[str]:
    return [name for name in dir(sd) if not name.startswith("_")]


def test_dir_lists_what_can_be_asked_for():
    assert {*sd.__all__, "zoo", "training", "audit", "masks"} <= set(public())
    for name in public():
        getattr(sd, name)
    with pytest.raises(AttributeError, match="no attribute 'decodr'"):
        _ = sd.decodr


def test_the_import_takes_no_seconds():
    """PyTorch and transformers are imported with the first name that needs them."""
    script = "import sys, specdec; assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_the_decoder_is_the_function_although_a_module_has_its_name():
    """Importing a module makes it an attribute of its package."""
    sd.decoder = sys.modules["specdec.decoder"]
    assert sd.decoder is builder.decoder


def test_editors_are_told_of_the_modules_that_are_imported_later():
    """pyright sees a module of a package only where the package imports it; mypy also where anything else does."""
    source = ast.parse(Path(sd.__file__).read_text())
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    lines = [line for line in block.body if isinstance(line, ast.ImportFrom)]
    told = [line.names[0] for line in lines if line.module == "specdec"]
    assert {line.names[0].asname: line.module for line in lines if line.module != "specdec"} == sd._NAMES
    assert [name.name for name in told] == list(sd._LATER)
    assert [name.asname for name in told] == list(sd._LATER), "`import x as x` is what makes a name public"


@pytest.mark.slow
def test_type_checkers_find_every_name_and_every_mistake(tmp_path):
    """mypy in a fresh environment into which the checkout was put as ``pip install -e`` does it."""
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "editable.pth").write_text(
        f"{ROOT}\n" + "\n".join(p for p in sys.path if p.endswith("-packages"))
    )
    (tmp_path / "right.py").write_text(RIGHT + "".join(f"sd.{name}\n" for name in public()))
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"),
            *("--python-executable", environment / "bin/python"),
            *("--cache-dir", ROOT / ".mypy_cache/user", "right.py", "wrong.py"),
        ],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "MYPYPATH"},
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    mistakes = [f"wrong.py:{number}" for number in range(4, len(WRONG.splitlines()) + 1)]
    assert [":".join(line.split(":")[:2]) for line in errors] == mistakes, done.stdout + done.stderr


def test_settings_by_name_are_the_arguments():
    assert list(SamplingSettings.__annotations__) == [field.name for field in fields(sd.Sampling)]
    named = [p.name for p in inspect.signature(sd.HFModel).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert list(Options.__annotations__) == named
    with pytest.raises(TypeError, match="sampling has no setting 'temprature': there are temperature, "):
        sd.decoder(sd.TableModel.random(3, 1, seed=0)).sampling(temprature=0.8)


def built(tree: Path, out: Path, kind: str) -> Path:
    """What setuptools makes of a source tree."""
    out.mkdir(exist_ok=True)
    script = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    before = set(out.iterdir())
    done = subprocess.run([sys.executable, "-c", script, kind, out], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = set(out.iterdir()) - before
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The checkout's packages, with empty files in place of weights."""
    tree = tmp_path_factory.mktemp("checkout")
    for name in ("specdec", "kernels"):
        shutil.copytree(
            ROOT / name,
            tree / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
        )
    for weights in (ROOT / "specdec").glob("zoo/*/*.safetensors"):
        (tree / weights.relative_to(ROOT)).touch()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    shutil.copy(__file__, tree / "tests")
    return tree


def wanted(tree: Path) -> list[str]:
    files = [*tree.glob("specdec/**/*"), *(tree / "specdec/kernels").glob("**/*")]
    return sorted({str(file.relative_to(tree)) for file in files if file.is_file()})


def in_wheel(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


@pytest.mark.slow
def test_wheel_and_sdist_hold_every_file_once(tree, tmp_path):
    files = wanted(tree)
    assert {"specdec/py.typed", "specdec/kernels/native/step.c", "specdec/zoo/pocket-tiny/config.json"} <= {
        *files
    }
    with tarfile.open(built(tree, tmp_path / "out", "build_sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("specdec_compose-*")
    assert wanted(unpacked) == files
    others = {file.name for file in unpacked.iterdir()}
    assert others == {
        *("specdec", "specdec_compose.egg-info", "pyproject.toml", "setup.cfg"),
        *("LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
    }
    for source in (tree, unpacked):
        assert in_wheel(built(source, tmp_path / "out" / source.name, "build_wheel")) == files
    assert (
        sum(name.endswith("/tokenizer.json") for name in files) == 2
    )  # one for all, and that of pocket-words


def test_an_editable_install_is_one_plain_path(tree, tmp_path):
    """Type checkers follow a path, and not an import hook."""
    wheel = built(tree, tmp_path, "build_editable")
    (path,) = in_wheel(wheel)
    assert path.endswith(".pth")
    assert zipfile.ZipFile(wheel).read(path).decode().strip() == str(tree)


def test_pocket_models_share_a_tokenizer(tmp_path):
    tokenizer = sd.zoo.load("pocket-target")[1]
    for model in (
        sd.HFModel.from_pretrained(sd.zoo.FOLDER / "pocket-tiny"),
        SpireModel.from_pretrained(sd.zoo.FOLDER / "pocket-spire"),
    ):
        assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    copy = tmp_path / "pocket-tiny"
    shutil.copytree(sd.zoo.FOLDER / copy.name, copy)
    assert sd.zoo.load(copy.name, tmp_path)[1].get_vocab() == tokenizer.get_vocab()
    assert sd.HFModel.from_pretrained(copy).tokenizer is None, "nothing says whose folder it is"
    tokenizer.add_tokens("<own>")
    tokenizer.save_pretrained(copy)  # as recipes that train drafts do
    assert "<own>" in sd.zoo.load(copy.name, tmp_path)[1].get_vocab()
    assert "<own>" in sd.HFModel.from_pretrained(copy).tokenizer.get_vocab()


def imported_from(folder: Path, *command: str | Path) -> str:
    """Standard error of Python, which fails, where ``specdec`` is found in ``folder``."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr


def test_a_checkout_without_symbolic_links_says_what_to_do(tmp_path):
    (tmp_path / "specdec").mkdir()
    shutil.copy(ROOT / "specdec/__init__.py", tmp_path / "specdec")
    (tmp_path / "specdec/kernels").write_text("../kernels")
    assert "git config core.symlinks true" in imported_from(tmp_path, "-c", "import specdec")


def test_recipes_refuse_another_project_called_specdec(tmp_path):
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec/__init__.py").write_text('__version__ = "0.2.0"\n')
    said = imported_from(tmp_path, ROOT / "recipes/quickstart.py")
    assert f"finds {tmp_path / 'specdec/__init__.py'}, which belongs to another project" in said
    assert "pip uninstall specdec" in said
