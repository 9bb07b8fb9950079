"""Memory: what a draft's layers attend to in place of their own inputs."""

from .feedback import FeedbackMemory, SharedMemory, mix

__all__ = ["FeedbackMemory", "SharedMemory", "mix"]
