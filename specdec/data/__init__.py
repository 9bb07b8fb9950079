"""Corpus and held-out prompts."""

from .corpus import corpus
from .prompts import prompts

__all__ = ["corpus", "prompts"]
