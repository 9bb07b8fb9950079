"""The library's own contract tests, for parts of your own, in pytest or a notebook.

Each ``check_...`` tries the rules of one kind of part. If a rule is broken, it raises ``BrokenRule``, an ``AssertionError`` that names the rule
and the remedy. Otherwise it returns ``Kept``, which lists the rules that are kept and what was not tried. ``certify`` computes the
distribution of the output of a whole decoder; given a verifier, it builds a decoder around it.
"""

from specdec.audit.certify import Certificate, certify, certify_coupled
from specdec.testing.backend import check_backend
from specdec.testing.draft import check_draft
from specdec.testing.mask import check_mask
from specdec.testing.pruner import check_pruner
from specdec.testing.rules import BrokenRule, Kept
from specdec.testing.selector import check_selector
from specdec.testing.verifier import check_verifier

__all__ = [
    "BrokenRule",
    "Certificate",
    "Kept",
    "certify",
    "certify_coupled",
    "check_backend",
    "check_draft",
    "check_mask",
    "check_pruner",
    "check_selector",
    "check_verifier",
]
