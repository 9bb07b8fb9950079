"""The contract of grammars: which tokens may come next, as a function of a state that is never changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

S = TypeVar("S")


@runtime_checkable
class Grammar(Protocol[S]):
    """A language of generated texts, read token by token. The prompt is no part of a text: the first generated token is its first.

    A state may be any object. It belongs to a text and is never changed: ``advance`` returns another one, a copy or a fork of a matcher, say.
    So the nodes of a tree, which share their beginnings, each cost one ``advance``. Every method is called by one thread at a time.
    """

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text. ``allowed`` has them where the text is complete. A row ends there, whatever ``eos_token_id`` says."""
        ...

    def start(self) -> S:
        """The state before the first generated token."""
        ...

    def advance(self, state: S, token: int) -> S:
        """The state after one more token, which ``allowed(state)`` has and which is no end token."""
        ...

    def allowed(self, state: S) -> Tensor:
        """Which tokens may follow: bool ``[V]`` on the host, or the same as bits, int32 ``[W]`` (token ``32 w + i`` is bit ``i`` of word ``w``).

        Tokens beyond its end are not allowed. Only end tokens may follow a text that is complete and cannot go on.
        """
        ...


@runtime_checkable
class ChecksTarget(Protocol):
    """A grammar that is made for a tokenizer."""

    def check(self, vocab_size: int, tokenizer: Any) -> None:
        """Raise ValueError for a target with another vocabulary; ``tokenizer`` may be ``None``."""
        ...


@runtime_checkable
class Forces(Protocol):
    """A grammar that knows what follows, for ``drafts.JumpForward``, which otherwise looks where ``allowed`` has one token only."""

    def forced(self, state: Any) -> Sequence[int]:
        """The tokens that will follow, or will probably, in order: a forced text as the tokenizer spells it, for example. None: ``()``."""
        ...
