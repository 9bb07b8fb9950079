"""A command line from a frozen dataclass: each field is an option, with its default and its help beside it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from specdec.lab import origin

Settings = TypeVar("Settings")


def option(default: Any, help: str = "", metavar: Any = None) -> Any:
    """A field of a settings dataclass.

    Args:
        help: the option's help text; the default is appended unless the text mentions one. metavar: the name of the value in the help;
            a tuple for an option with several values.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar})


def parse(kind: type[Settings], description: str | None, words: Sequence[str] | None = None) -> Settings:
    """Parse a command line into settings; field ``new_tokens`` is option ``--new-tokens``.

    Fields are ``str``, ``int``, ``float``, ``bool`` (``--flag`` and ``--no-flag``), a ``Literal`` of texts, a ``tuple[int, ...]`` or
    similar (values separated by spaces or commas), a ``tuple[int, int]`` (exactly two values), or one of these or ``None``.

    Args:
        kind: the dataclass; every field has a default. description: printed verbatim in the help. words: default: ``sys.argv[1:]``.
    Raises:
        SystemExit: after ``--help``, and for unknown options or invalid values, which the message names.
        TypeError: a field has another type.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = get_type_hints(kind)
    lists = set()
    for one in fields(kind):  # type: ignore[arg-type]
        how = _how(one, hints[one.name])
        if how.get("nargs") == "+":
            lists.add(one.name)
        parser.add_argument("--" + one.name.replace("_", "-"), **how)
    given = vars(parser.parse_args(words))
    if words is None:
        origin.code()  # a report names the commit at the start of its script
    for name, value in given.items():
        if name in lists and isinstance(value, list):
            given[name] = tuple(item for part in value for item in part)
        elif isinstance(value, list):
            given[name] = tuple(value)
    return kind(**given)


def _how(one: Field[Any], hint: Any) -> dict[str, Any]:
    """Arguments of ``add_argument`` for a field."""
    if one.default is MISSING:
        raise TypeError(f"field {one.name} has no default: every option needs one")
    said = {key: value for key, value in one.metadata.items() if value}
    said["help"] = _help(said.get("help", ""), one.default)
    if get_origin(hint) is UnionType:
        hint = next(part for part in get_args(hint) if part is not NoneType)
    how: dict[str, Any] = {"default": one.default, **said}
    if get_origin(hint) is Literal:
        return how | {"type": str, "choices": get_args(hint)}
    if hint is bool:
        return how | {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is not tuple:
        if hint not in (str, int, float):
            raise TypeError(
                f"field {one.name} is a {hint}: options are numbers, texts, flags, or tuples of these"
            )
        return how | {"type": hint}
    of, *rest = get_args(hint)
    if rest == [Ellipsis]:
        return how | {"nargs": "+", "type": _separated(of)}
    return how | {"nargs": 1 + len(rest), "type": of}


def _help(text: str, default: Any) -> str:
    if "default" not in text and default not in (None, "", False, ()):
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{text} (default: {shown})".strip()
    return text.replace("%", "%%")


def _separated(of: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read(word: str) -> list[Any]:
        return [of(part) for part in word.split(",") if part]

    read.__name__ = getattr(of, "__name__", "value")  # for argparse's message
    return read
