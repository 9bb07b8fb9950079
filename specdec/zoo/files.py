"""The files of the pocket models: their names, whether they are complete, and how they are read."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
TOKENIZER = FOLDER / "tokenizer"  # one for all pocket models


def names() -> list[str]:
    """The names that ``read`` takes."""
    return sorted({path.parent.name for kind in ("config", "head") for path in FOLDER.glob(f"*/{kind}.json")})


def tokenizer_folder(model: Path) -> Path | None:
    """The folder with the tokenizer of the model in folder ``model``: the same one, or ``TOKENIZER`` for a pocket model; ``None`` if there is none."""
    if any(model.glob("*token*")):
        return model
    return TOKENIZER if model.resolve().parent == FOLDER.resolve() else None


def read(
    name: str, folder: str | Path = FOLDER, load: Callable[[Path], Any] | None = None
) -> tuple[Any, "PreTrainedTokenizerFast"]:
    """A pocket model (float32, CPU, evaluation mode) and its tokenizer. ``load`` reads the model's folder; ``None`` reads a
    transformers model.

    Raises:
        ValueError: a name that does not exist, or a damaged file. FileNotFoundError: a folder with files missing.
    """
    path = Path(folder) / name
    if not path.is_dir() or Path(name).name != name:
        raise ValueError(f"there is no pocket model {name!r}; there are: {', '.join(names())}")
    beside = tokenizer_folder(path) or TOKENIZER  # copies of pocket models have none of their own
    config = "head.json" if (path / "head.json").exists() else "config.json"
    if load is None and config == "head.json":
        raise ValueError(
            f"pocket model {name!r} is a draft head and no language model: give it to .draft(...)"
        )
    needed = [path / config, path / "model.safetensors"]
    needed += [beside / file for file in ("tokenizer.json", "tokenizer_config.json")]
    missing = [file.name for file in needed if not file.exists()]
    if missing:
        raise FileNotFoundError(
            f"pocket model {name!r} lacks {', '.join(missing)}: reinstall the package, or train it with "
            "recipes/train_pocket.py"
        )
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # the files are small
    try:
        if load is None:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        else:
            model = load(path)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(beside, local_files_only=True)
    except Exception as error:  # safetensors, tokenizers and json each have their own
        raise ValueError(
            f"pocket model {name!r} has a damaged file ({error}): reinstall the package"
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    return model.eval(), tokenizer
