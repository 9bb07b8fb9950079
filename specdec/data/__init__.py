"""Corpus and held-out prompts."""

from .corpus import corpus

__all__ = ["corpus"]
