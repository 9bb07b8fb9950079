"""What parts declare about themselves, and the only code that reads it.

A part declares its properties with one value, ``info = DraftInfo("mine", trees=True)`` (an attribute or a property). A short part may
leave it out: then its attributes with the names of the value's fields are read, with defaults for the others. ``DraftInfo.of(part)`` returns
the value in both cases, so a part that wraps another forwards it with ``info = property(lambda self: DraftInfo.of(self.inner))``. Optional
methods are the protocols at the end of ``protocols``; ``DraftPart`` looks for those of a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from specdec.protocols import (
    Arms,
    Binds,
    Draft,
    Follows,
    Forgets,
    Joins,
    LanguageModel,
    Limits,
    Stacks,
    Waits,
)
from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal

Siblings = Literal["in turn", "independent", "distinct"]


@dataclass(frozen=True)
class _Info:
    @classmethod
    def of(cls, part: Any) -> Self:
        """What ``part`` declares: its ``info``, or attributes with the names of the fields."""
        declared = getattr(part, "info", None)
        if isinstance(declared, cls):
            return declared
        if callable(declared):
            raise TypeError(
                f"info of {type(part).__name__} is a function or a class: declare a value, info = {cls.__name__}(...), or make the method a "
                "property"
            )
        known = [f.name for f in fields(cls)]
        default = {"name": type(part).__name__} if "name" in known else {}
        return cls(**default | {name: getattr(part, name) for name in known if hasattr(part, name)})


def _same(length: int) -> int:
    return length


@dataclass(frozen=True)
class DraftInfo(_Info):
    """Properties of a draft.

    Args:
        name: for messages. trees: it proposes more than chains.
        nodes: length -> the most nodes of a proposal whose longest path is ``length``. longest: the longest path that it ever
            proposes (``None``: no limit).
        taps: layers of the target whose activations every round's ``scores.fed`` must have.
        revocable: the draft may be called for a text that is never committed. The next call then has the right context, and the state
            repairs itself (``executors.Optimistic``).
        model: the model that drafts, usually a ``LanguageModel``, whose vocabulary, tokenizer, device and positions ``build`` compares with the target's.
        reads_cache: the target itself drafts, reading part of its own cache; ``model`` is ``None``.
        drafts: the drafts behind the arms of a pool. inner: a draft that guesses for ``model``.
        siblings: how the children of a node are drawn, if the draft proposes trees. ``"in turn"``: each after its elder siblings, on which it
            and their number may depend. ``"independent"``: from one distribution, which is settled, as is their number, before any node of
            that depth is drawn. ``"distinct"``: likewise settled, each from that distribution without its elder siblings' tokens.
        sampling: how it draws tokens; ``None``: as the decoder does, or it draws none. reads_logits: it reads every round's ``scores.logits``.
        shortest: the fewest tokens of a prompt (the sinks of a constant-size view, for example).
        once: in a round it calls its model once, for a chain of slots, whatever it proposes.
        rereads: its cache never holds the tokens that it proposes, so it reads the accepted ones in the next round.
    """

    name: str
    trees: bool = False
    nodes: Callable[[int], int] = _same
    longest: int | None = None
    taps: tuple[int, ...] = ()
    revocable: bool = False
    model: Any = None
    reads_cache: bool = False
    drafts: tuple[Draft[Any], ...] = ()
    inner: Draft[Any] | None = None
    siblings: Siblings = "in turn"
    sampling: Sampling | None = None
    reads_logits: bool = False
    shortest: int = 1
    once: bool = False
    rereads: bool = False

    def check_prompts(self, lengths: Iterable[int]) -> None:
        """Raise ValueError for a prompt of fewer than ``shortest`` tokens, with its number."""
        for b, length in enumerate(lengths):
            if length < self.shortest:
                raise ValueError(
                    f"prompt {b} has {length} tokens, and draft {self.name!r} needs {self.shortest} at least: give a longer prompt, or another draft"
                )


@dataclass(frozen=True)
class VerifierInfo(_Info):
    """Properties of a verifier.

    Args:
        name: for messages. lossless: committed tokens have the target's distribution.
        takes_logits: ``from_logits`` decides as ``__call__`` does (``protocols.TakesLogits``).
        compares_tokens: ``greedy`` decides as ``__call__`` does at temperature 0 (``protocols.ComparesTokens``).
        siblings: the kinds of trees that it verifies exactly, of those that ``DraftInfo.siblings`` declares (default: all; none: it takes chains only).

    A class that declares a shortcut does so for its own ``__call__``; a subclass with another one must not inherit it.
    """

    name: str
    lossless: bool = False
    takes_logits: bool = False
    compares_tokens: bool = False
    siblings: tuple[Siblings, ...] = ("in turn", "independent", "distinct")


@dataclass(frozen=True)
class SelectorInfo(_Info):
    """Properties of a selector.

    Args:
        full_information: feedback's reward is ``[B, arms]``, of every arm, chosen or not.
        arms: how many arms it is made for (``None``: any number).
        joint: a row's arm depends on the other rows, of its batch or before, also where capacities leave room.
    """

    full_information: bool = False
    arms: int | None = None
    joint: bool = False


@dataclass(frozen=True)
class ModelInfo(_Info):
    """Properties of a language model beyond its protocol.

    Args:
        device: of the logits (``None``: the host). tokenizer: for texts and chats. max_positions: of a text.
        eos_token_ids: ids that end a text.
        generation_processors, generation_sampling: settings of the generation config that the library does not apply by itself.
        concurrent: several threads may use the model at a time. If not, it must not run at the same time as a model with the same
            ``engine``, the object that runs its forwards.
        longest_chain: the most proposed tokens of a row that ``score`` takes in a chain (``None``: no limit).
    """

    device: torch.device | None = None
    tokenizer: Any = None
    max_positions: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_processors: Mapping[str, Any] = field(default_factory=dict)
    generation_sampling: Mapping[str, Any] = field(default_factory=dict)
    concurrent: bool = True
    engine: object = None
    longest_chain: int | None = None

    def shares_with(self, other: ModelInfo) -> bool:
        """Whether the two models must not run at the same time."""
        return not self.concurrent and self.engine is not None and self.engine is other.engine


def _under(protocol: Any, draft: Any) -> Any:
    """The draft if it has the methods of a protocol, else ``None``. A wrapper may forward them by ``__getattr__``, which ``isinstance``
    ignores from Python 3.12 on."""
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    return draft if all(hasattr(draft, name) for name in methods) else None


@dataclass(frozen=True, eq=False)
class DraftPart:
    """A draft, its ``info``, and for each protocol of optional methods the draft if it has them, else ``None``."""

    draft: Draft[Any]
    info: DraftInfo
    binds: Binds | None
    follows: Follows | None
    joins: Joins | None
    waits: Waits | None
    arms: Arms | None
    stacks: Stacks | None
    limits: Limits | None
    forgets: Forgets | None

    @staticmethod
    def of(draft: Draft[Any]) -> DraftPart:
        return DraftPart(
            draft,
            DraftInfo.of(draft),
            binds=_under(Binds, draft),
            follows=_under(Follows, draft),
            joins=_under(Joins, draft),
            waits=_under(Waits, draft),
            arms=_under(Arms, draft),
            stacks=_under(Stacks, draft),
            limits=_under(Limits, draft),
            forgets=_under(Forgets, draft),
        )

    @cached_property
    def members(self) -> tuple[DraftPart, ...]:
        """The drafts of a pool, or this one."""
        return tuple(map(DraftPart.of, self.info.drafts)) or (self,)

    @cached_property
    def parts(self) -> tuple[DraftPart, ...]:
        """The members, each with the drafts inside it."""
        inner = [() if one.info.inner is None else DraftPart.of(one.info.inner).parts for one in self.members]
        return tuple(part for one, inside in zip(self.members, inner) for part in (one, *inside))

    @property
    def by_request(self) -> bool:
        """Whether it has settings of the requests, which it finds by their numbers."""
        own = [part.info.sampling for part in self.members]
        return any(isinstance(one, Sampling) and one.by_request for one in own)

    @property
    def reads_target(self) -> bool:
        """Whether it reads the target's activations, logits or cache."""
        return bool(self.info.taps) or self.info.reads_logits or self.follows is not None

    def bound(self, target: LanguageModel, sampling: Sampling) -> Draft[Any]:
        """The draft bound to this target and sampling."""
        return self.draft if self.binds is None else self.binds.bind(target, sampling)

    def follow(self, state: Any, target_cache: Any) -> Any:
        """The state; if the draft reads the target's cache, the state with this cache."""
        return state if self.follows is None else self.follows.follow(state, target_cache)

    def propose(self, state: Any, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, Any]:
        """As the draft's ``propose``; raises TypeError unless it returns a proposal and a state."""
        answer: Any = self.draft.propose(state, context, budget, rng)
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Proposal):
            return answer
        what = type(answer).__name__
        if isinstance(answer, tuple):
            what = f"({', '.join(type(part).__name__ for part in answer)})"
        raise TypeError(
            f"draft {self.info.name!r}: propose() returned {what}: return a pair, (Proposal, state)"
        )
