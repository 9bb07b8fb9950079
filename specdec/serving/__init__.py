"""Serving: streams of requests over any executor."""
