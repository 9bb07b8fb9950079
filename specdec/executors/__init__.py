"""Executors: in which order, and on which workers, the parts of a round run."""

from specdec.executors.ahead import Ahead
from specdec.executors.optimistic import Guesses, Optimistic
from specdec.executors.pipelined import Pipelined
from specdec.executors.serial import Serial
from specdec.executors.timeline import Timeline
from specdec.executors.tune import Tuned, profile, tune

__all__ = ["Ahead", "Guesses", "Optimistic", "Pipelined", "Serial", "Timeline", "Tuned", "profile", "tune"]
