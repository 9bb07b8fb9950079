"""Traces: texts sampled from a target with the target's distribution at every position, in a folder.

A trace names its target, tokenizer and settings by fingerprint. The arrays are memory-mapped. A folder has one or more parts, each
written by one process; a part holds whole texts, and what an interruption cut short does not count. Where a recording came to its end, every
part has a file with the number of its texts, so a part that has lost some is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.configs import setting
from specdec.masks import dense
from specdec.masks.sight import longest
from specdec.masks.text import known
from specdec.models.fingerprint import fingerprint, unwrapped
from specdec.models.table import TableModel
from specdec.sampling import Sampling

FORMAT = 1
WHOLE = "texts.count"  # in a part: how many texts it has
NEEDED = {"id", "vocab_size", "taps", "k", "kept", "hidden", "new_tokens", "target"}  # of the settings
SETTINGS = ("temperature", "top_k", "top_p", "min_p")


class Law(NamedTuple):
    """Distributions of ``n`` next tokens: the ``ids [n, M]`` of the largest probabilities ``probs [n, M]`` and what ``rest [n]`` remains.

    Where nothing was left out, ``ids`` is ``None``, ``M`` is the vocabulary and ``rest`` is zero.
    """

    ids: Tensor | None
    probs: Tensor
    rest: Tensor


class Text(NamedTuple):
    """One text of a trace.

    Attributes:
        number: of the prompt and turn. ids: prompt and continuation. prompt: tokens of the prompt. rounds: positions at which a round may
            start; the first is after one token of the continuation, which the prefill gives. ended: an end token ends the text, and
            all its positions count.
        category, source: of the prompt.
    """

    number: tuple[int, int]
    ids: list[int]
    prompt: int
    rounds: int
    ended: bool
    category: str
    source: str


class Part:
    """The texts that one process wrote into a folder, as memory-mapped arrays.

    Raises:
        ValueError: a file is damaged: it is cut, or it is gone.
    """

    def __init__(self, folder: Path, kept: int, hidden: int, taps: Sequence[int], whole: bool):
        self.folder, self.index = folder, folder / "texts.jsonl"
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "own": (np.float32, ()),
            "probs": (np.float32, (kept,)),
        }
        if not whole:
            shapes |= {"ids": (np.int32, (kept,)), "rest": (np.float32, ())}
        if taps:
            shapes["activations"] = (np.float32, (len(taps), hidden))
        self.shapes = shapes
        self.texts = [_text(self.index, number, line) for number, line in enumerate(_whole_lines(folder), 1)]
        mark = folder / WHOLE
        if mark.exists() and mark.read_text() != str(len(self.texts)):
            raise ValueError(
                f"{self.index} is damaged: it has {len(self.texts)} of {mark.read_text()} texts: record again into this folder, and the others "
                "are added"
            )
        self.new = [len(t.ids) - t.prompt for t in self.texts]
        sizes = {"activations": [len(t.ids) for t in self.texts]}
        self.starts = {
            name: np.concatenate([[0], np.cumsum(sizes.get(name, self.new))]).astype(int) for name in shapes
        }
        for name, (kind, shape) in shapes.items():
            path, need = folder / f"{name}.bin", int(self.starts[name][-1]) * int(np.prod(shape))
            need *= np.dtype(kind).itemsize
            size = path.stat().st_size if path.exists() else 0
            if size < need:
                raise ValueError(
                    f"{path} is damaged: it has {size} bytes, and its texts need {need}: record again, into a new folder"
                )

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        made = {}
        for name, (kind, shape) in self.shapes.items():
            rows = int(self.starts[name][-1])
            path = self.folder / f"{name}.bin"
            made[name] = np.memmap(path, kind, "r", shape=(rows, *shape)) if rows else np.zeros((0, *shape))
        return made

    def take(self, name: str, at: int) -> Tensor:
        """An array of text ``at``, copied into memory."""
        first, last = self.starts[name][at : at + 2]
        return torch.from_numpy(np.array(self.arrays[name][first:last]))


class Trace:
    """Recorded texts of a target; made by ``lab.record``, and reopened by its folder.

    Args:
        folder: of the trace. target: if given, it must be the model that was recorded. only: the numbers of the texts to use, with their categories
            and sources; default: all, with those that were recorded.
    Raises:
        FileNotFoundError: there is no trace. ValueError: it is of another target, or one of its files is damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        target: Any = None,
        only: Mapping[tuple[int, int], tuple[str, str]] | None = None,
    ):
        self.folder, self._only = Path(folder), only
        path = self.folder / "trace.json"
        if not path.exists():
            raise FileNotFoundError(f"folder {folder} holds no trace: make one with lab.record")
        self.meta = settings_of(path)
        self.vocab_size: int = self.meta["vocab_size"]
        self.taps: tuple[int, ...] = tuple(self.meta["taps"])
        self.k: int = self.meta["k"]
        self.whole = self.meta["kept"] == self.vocab_size
        how = (self.meta["kept"], self.meta["hidden"], self.taps, self.whole)
        self.parts = [Part(f, *how) for f in sorted(self.folder.glob("part-*"))]
        at = [(t.number, p, i) for p, part in enumerate(self.parts) for i, t in enumerate(part.texts)]
        self._at = [(p, i) for number, p, i in sorted(at) if only is None or number in only]
        if target is not None:
            self.check(target)

    def __len__(self) -> int:
        return len(self._at)

    def __repr__(self) -> str:
        rounds = sum(t.rounds for t in self.texts)
        sources, categories = len(set(self.sources)), ", ".join(sorted(set(self.categories)))
        kept = "" if self.whole else f", the {self.meta['kept']} largest probabilities"
        return (
            f"Trace({len(self)} texts of {sources} sources, {rounds} positions; categories {categories}; {self.sampling_name}; blocks of at "
            f"most {self.k} tokens{kept})"
        )

    @property
    def sampling_name(self) -> str:
        """How the texts were drawn, for messages."""
        settings = [f"{n}={v}" for n, v in self.meta["settings"].items() if v is not None]
        return ", ".join([*settings, *self.meta["processors"]])

    @cached_property
    def texts(self) -> list[Text]:
        """The texts, in the order of their prompts."""
        found = [self.parts[p].texts[i] for p, i in self._at]
        if self._only is None:
            return found
        labels = [self._only[text.number] for text in found]
        return [
            text._replace(category=category, source=source) for text, (category, source) in zip(found, labels)
        ]

    @cached_property
    def id(self) -> str:
        """A name for the settings and the texts."""
        return digest([self.meta["id"], [text.ids for text in self.texts]])

    @property
    def categories(self) -> list[str]:
        """The category of each text."""
        return [t.category for t in self.texts]

    @property
    def sources(self) -> list[str]:
        """The source of each text; texts of one source are one cluster of a bootstrap."""
        return [t.source for t in self.texts]

    def own(self, text: int) -> Tensor:
        """``[new]`` the target's probability of each token of the continuation of text ``text``."""
        part, at = self._at[text]
        return self.parts[part].take("own", at)

    def law(self, text: int) -> Law:
        """The target's distributions of the continuation of text ``text``."""
        (number, at) = self._at[text]
        part = self.parts[number]
        probs = part.take("probs", at)
        if self.whole:
            return Law(None, probs, torch.zeros(len(probs)))
        return Law(part.take("ids", at).long(), probs, part.take("rest", at))

    def activations(self, text: int) -> Tensor:
        """``[tokens, layers, E]`` the activations at the recorded taps of text ``text``; those of its last token are zero."""
        part, at = self._at[text]
        return self.parts[part].take("activations", at)

    def sampling(self, given: Sampling | None) -> Sampling:
        """How the texts were drawn.

        Raises:
            ValueError: ``given`` is another way, or it is ``None`` and the trace was recorded with processors, which are not stored.
        """
        settings, processors = self.meta["settings"], self.meta["processors"]
        if given is None:
            if processors:
                raise ValueError(
                    f"the trace in {self.folder} was recorded with the processors {', '.join(processors)}: pass sampling= with them"
                )
            return Sampling(**settings)
        if plain_sampling(given) != {"settings": settings, "processors": processors}:
            raise ValueError(
                f"the trace in {self.folder} was recorded with {self.sampling_name}, not {given}"
            )
        return given

    def check(self, target: Any) -> None:
        """Raise ValueError unless ``target`` is the model that was recorded."""
        if identity(target) != self.meta["target"]:
            raise ValueError(
                f"the trace in {self.folder} is of target {self.meta['target']}, and this target is {identity(target)}: record this one in "
                "another folder"
            )

    def check_tokenizer(self, tokenizer: Any, what: str) -> None:
        """Raise ValueError unless a tokenizer has the vocabulary that the texts were recorded with (``None`` passes)."""
        if tokenizer is not None and self.meta["tokenizer"] not in (None, vocabulary(tokenizer)):
            raise ValueError(
                f"the {what} has another tokenizer than the trace in {self.folder}: the tokenizer must be the target's"
            )


def settings_of(path: Path) -> dict[str, Any]:
    """The settings in a ``trace.json``; raises ValueError where it is damaged."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # also of what is not UTF-8
        raise ValueError(f"{path} is damaged ({error}): record again, into a new folder") from None
    if not isinstance(found, dict) or not set(found) >= NEEDED:
        raise ValueError(f"{path} is damaged (settings are missing): record again, into a new folder")
    return found


def _whole_lines(part: Path) -> list[str]:
    index = part / "texts.jsonl"
    lines = index.read_text().splitlines(keepends=True) if index.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _text(index: Path, number: int, line: str) -> Text:
    try:
        row = json.loads(line)
        return Text(tuple(row.pop("number")), **row)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"line {number} of {index} is damaged: it is no text of a trace; record again, into a new folder"
        ) from None


def seal(folder: Path) -> None:
    """Write into every part how many texts it has, where that is not written yet."""
    for part in folder.glob("part-*"):
        if not (part / WHOLE).exists():
            (part / WHOLE).write_text(str(len(_whole_lines(part))))


def unseal(folder: Path) -> None:
    """Take the number of texts from the parts that have lost some, for a recording that adds them."""
    for part in folder.glob("part-*"):
        mark = part / WHOLE
        if mark.exists() and mark.read_text() != str(len(_whole_lines(part))):
            mark.unlink(missing_ok=True)  # another process may be first


NOT_SETTINGS = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Fields of a config that saving or loading a model changes, and that its output does not depend on; its dtype is in its ``repr``."""


def identity(model: Any) -> str:
    """A name for a model's class, settings and weights. A model that is not a transformers or a table model is named by its class alone."""
    inner = unwrapped(model)
    name = type(model).__name__
    if isinstance(inner, TableModel):
        return f"{name}-{hashlib.sha256(inner.probs.numpy().tobytes()).hexdigest()[:16]}"
    if not isinstance(inner, torch.nn.Module):
        return name
    config = setting(inner, "config")
    own = None if config is None else {k: v for k, v in config.to_dict().items() if k not in NOT_SETTINGS}
    settings = [repr(model), _mask_name(setting(model, "mask")), json.dumps(own, sort_keys=True, default=str)]
    return f"{name}-{fingerprint(inner)}-{digest(settings)[:8]}"


def _mask_name(mask: Any) -> str:
    """A mask in words; of one with functions of the user's own also what it shows at the first positions."""
    if mask is None or known(mask):
        return str(mask)
    at = torch.arange(min(longest(mask) or 512, 512))
    return f"{mask} {digest(dense(mask, at, at).nonzero().tolist())}"


def plain_sampling(sampling: Sampling) -> dict[str, Any]:
    """Settings and names of processors, as JSON can express them."""
    settings = {name: value for name, value in vars(sampling).items() if name in SETTINGS}
    named = [described_function(p) for p in sampling.processors]
    grammar = [] if sampling.grammar is None else [repr(sampling.grammar)]
    return {"settings": settings, "processors": named + grammar}


def described_function(part: Any) -> str:
    """A name for a processor; functions that differ only in what they close over have one name."""
    if isinstance(part, FunctionType):
        return part.__qualname__
    settings = ", ".join(f"({name!r}, {_described(value)})" for name, value in sorted(vars(part).items()))
    return f"{type(part).__qualname__} [{settings}]"


def _described(value: Any) -> str:
    """``repr(value)``; a long one is cut, and has the digest of the whole. That of a large tensor leaves out most numbers."""
    if isinstance(value, Tensor) and value.numel() > 1000:
        numbers = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(numbers).hexdigest()[:16]}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}... {digest(text)}"


def vocabulary(tokenizer: Any) -> str | None:
    """A name for a tokenizer's vocabulary."""
    return None if tokenizer is None else digest(sorted(tokenizer.get_vocab().items()))


def digest(value: Any) -> str:
    """16 hexadecimal digits of a value that JSON can express."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The names of entries that differ."""
    return [name for name in ours if ours[name] != theirs.get(name)]
