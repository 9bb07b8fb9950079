"""The library's own contract tests for parts of anybody's, in pytest or a notebook."""

from specdec.audit.certify import Certificate, certify, certify_coupled
from specdec.testing.draft import check_draft
from specdec.testing.rules import BrokenRule, Kept
from specdec.testing.verifier import check_verifier

__all__ = ["BrokenRule", "Certificate", "Kept", "certify", "certify_coupled", "check_draft", "check_verifier"]
