"""Executors: in which order, and on which workers, the parts of a round run."""

from specdec.executors.serial import Serial

__all__ = ["Serial"]
