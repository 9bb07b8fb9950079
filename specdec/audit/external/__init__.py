"""Certifies code from elsewhere: a verification function inside a decoder, or a whole ``generate``.

The guide is docs/museum.md. ``lazy`` has the random numbers that foreign code gets, ``mode`` and ``scripted`` put them in the place of torch's,
Python's and numpy's, and ``tape`` has their decisions made by the walk of the certifier.
"""

from specdec.audit.external.function import certify_function, impossible
from specdec.audit.external.probe import takes_uniforms
from specdec.audit.external.tape import CannotWalk
from specdec.audit.external.verifier import External

__all__ = ["CannotWalk", "External", "certify_function", "impossible", "takes_uniforms"]
