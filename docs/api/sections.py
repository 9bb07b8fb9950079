"""A griffe extension: sections of a docstring may follow each other without a blank line, as they do in this library."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Raises|Yields):\n)")


class Sections(griffe.Extension):
    """Puts the blank line in that griffe's parser of Google-style docstrings wants."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
