"""Mistakes of real decoders, each in its smallest case with its exact total variation; the guide is docs/museum.md."""

from specdec.audit.museum.exhibit import Exhibit
from specdec.audit.museum.halls import everything

__all__ = ["Exhibit", "everything"]
