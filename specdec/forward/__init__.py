"""Forwards: one call from packed tokens to logits."""
