"""The pocket models that come with the package: small trained models that need no network."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.zoo.files import FOLDER, TOKENIZER, names, read, tokenizer_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["FOLDER", "TOKENIZER", "load", "names", "tokenizer_folder"]


def load(name: str, folder: str | Path = FOLDER) -> tuple[Any, "PreTrainedTokenizerFast"]:
    """A pocket model (float32, CPU, evaluation mode) and its tokenizer: a transformers model, a ``SpireModel``, or a ``HeadModel``.

    They are stored in bf16 and loaded in float32, in which greedy decoding does not depend on the shape of a batch.

    Raises:
        ValueError: an unknown name, or a damaged file. FileNotFoundError: a folder with files missing.
    """
    if (Path(folder) / name / "spire.json").exists():
        from specdec.drafts.spire.load import read_pocket

        return read_pocket(name, folder)
    if (Path(folder) / name / "head.json").exists():
        from specdec.drafts.heads.load import read_pocket as read_head

        return read_head(name, folder)
    return read(name, folder)
