"""A griffe extension: docstrings of this library as griffe's parser of Google-style docstrings wants them.

Here sections follow each other without a blank line, and short items share a line: ``batch: rows. repeats: runs of each.``
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Raises|Yields):\n)")
_BODY = re.compile(r"^(Args|Attributes|Raises):\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
_ITEM = re.compile(r"(?<=[.);`]) (?=((\w+)(?:, \w+)*): )")
_ERROR = re.compile(r"(?<=\.) (?=(\w+(?:Error|Rule|Model)): )")


def _apart(section: re.Match[str], names: set[str]) -> str:
    """Every item of a section on a line of its own; ``names`` are those of the arguments or the attributes."""
    title, body = section.groups()
    if title == "Raises":
        return f"{title}:\n" + _ERROR.sub("\n    ", body)
    return f"{title}:\n" + _ITEM.sub(lambda item: "\n    " if item[2] in names else " ", body)


class Sections(griffe.Extension):
    """Puts blank lines between sections, and line breaks between items."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            called = obj.parameters if obj.is_function or obj.is_class else ()
            names = {one.name.lstrip("*") for one in called} | set(obj.members)
            text = _BODY.sub(lambda section: _apart(section, names), obj.docstring.value)
            obj.docstring.value = _SECTION.sub("\n\n", text)
