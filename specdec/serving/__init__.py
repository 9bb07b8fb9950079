"""Serving: streams of requests over any executor, and the order in which they join."""

from specdec.serving.arrivals import Admission, ByKind, InOrder, Waiting

__all__ = ["Admission", "ByKind", "InOrder", "Waiting"]
