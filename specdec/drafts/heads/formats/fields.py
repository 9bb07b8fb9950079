"""A config that is read field by field. Fields that are missing, that have a value for which there is no code, or that nobody read are named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
WITHOUT_EFFECT = frozenset(PreTrainedConfig().to_dict()) | frozenset(
    [
        "_name_or_path",
        "auto_map",
        "attention_dropout",
        "initializer_range",
        "max_position_embeddings",
        "max_window_layers",
        "pretraining_tp",
        "torch_dtype",
        "use_cache",
        "cache_implementation",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
        "unsloth_fixed",
        "unsloth_version",
        "vocab_size",
    ]
)
"""Fields that say nothing about what a head computes, or that no head needs."""


class Fields:
    """The fields ``values`` of the config that messages call ``source``, without those of ``ignore``; ``where`` they are, for fields of a field."""

    def __init__(self, source: str, values: Mapping[str, Any], where: str = "", ignore: Collection[str] = ()):
        self.source, self.where, self.ignore = source, where, ignore
        self.values = {name: value for name, value in values.items() if f"{where}{name}" not in ignore}
        self.read: set[str] = set()
        self.nested: list[Fields] = []

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; ``default`` where it is missing or ``None``."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """As ``get``.

        Raises:
            ValueError: the field is missing.
        """
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.source}: the config lacks {self.where}{name}: copy the checkpoint again")
        return value

    def only(self, name: str, *allowed: Any) -> Any:
        """As ``get``, for a field that has code for some values only, of which the first is the default.

        Raises:
            ValueError: it has another value.
        """
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{self.source}: {self.where}{name} is {value!r}, and heads are implemented for {' and '.join(map(repr, allowed))}: use another "
                f"checkpoint, or, if this one was trained as with {allowed[0]!r}, give ignore=({self.where + name!r},)"
            )
        return value

    def inside(self, name: str, needed: bool = False) -> Fields:
        """The fields of a field; none where it is missing."""
        found = self.need(name) if needed else self.get(name, {})
        self.nested.append(Fields(self.source, found, f"{self.where}{name}.", self.ignore))
        return self.nested[-1]

    def skip(self, *names: str) -> None:
        """Fields that change nothing here."""
        self.read.update(names)

    def unread(self) -> Iterator[str]:
        """Fields that have a value and that nobody read."""
        for name, value in self.values.items():
            if name not in self.read | WITHOUT_EFFECT and value not in NEUTRAL:
                yield f"{self.where}{name}"
        for one in self.nested:
            yield from one.unread()
