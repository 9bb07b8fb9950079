"""Grammars, which say what may be generated: JSON schemas, regular expressions, context-free grammars, or one of your own."""

from specdec.grammars.contract import Grammar
from specdec.grammars.guidance import LLGuidance, json_schema, lark, regex
from specdec.grammars.table import Table
from specdec.grammars.tracker import Tracker

__all__ = ["Grammar", "LLGuidance", "Table", "Tracker", "json_schema", "lark", "regex"]
