"""The contracts of the parts. They are structural: a part is any object with these methods, and needs no base class.

The first half has the required methods. The second half has the optional ones, for which ``capabilities`` looks once, when a decoder is
built. A part declares its properties (its name, whether it proposes trees, ...) as a value, ``capabilities.DraftInfo`` and the like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from specdec.rng import Rng
from specdec.sampling import Sampling
from specdec.types import Context, Feedback, Proposal, Round, Scores, Verdict

S = TypeVar("S")


class Cache(Protocol):
    """The tokens that a model has consumed: for each row, a prefix of its committed tokens."""

    length: Tensor  # [B] host: slots of each row that hold committed tokens

    def sync(self, context: Context) -> Tensor:
        """Keep the longest prefix that still matches, without copying; returns ``[B]`` how many tokens are held."""
        ...

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Keep the accepted nodes of the last scored proposal. ``context`` is the one they were scored in."""
        ...

    def select(self, rows: Tensor) -> Cache:
        """The cache of some rows; the old object must not be used again."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A model that gives next-token logits for ragged rows and trees of proposed tokens. It declares ``capabilities.ModelInfo``."""

    vocab_size: int
    supports_trees: bool

    def cache(self, batch: int, capacity: int) -> Any:
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens (tree nodes included)."""
        ...

    def prefill(self, cache: Any, context: Context, rows: Tensor | None = None) -> None:
        """Feed all but the last committed token of each row (or of ``rows [R]``), without computing logits."""
        ...

    def score(
        self,
        cache: Any,
        context: Context,
        proposal: Proposal | None = None,
        start: int | None = None,
        rows: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Scores:
        """Logits after the last committed token and after every node; feeds only what the cache lacks.

        Args:
            cache: from ``cache``; nodes stay in it only through ``cache.commit``.
            start: if given, an earlier call for the same context has fed the nodes before ``start``, and the cache holds them. Only nodes
                from ``start`` on are fed and scored, and ``logits[:, 0]`` belongs to node ``start``.
            rows: ``[R]`` the rows to work on (default all); the others are not fed and their logits are zero.
            taps: layers whose activations are wanted at every fed position (``Scores.fed``): row after row, an end of its committed tokens in
                order, each once, then its nodes as stored. The last committed token and what the cache lacked are always there; a model that
                cannot roll back may feed earlier tokens again, so a reader takes the positions that it lacks.
        Returns:
            logits ``[B, N + 1, V]``, or ``[B, N - start, V]`` when ``start`` is given.
        """
        ...


@runtime_checkable
class Draft(Protocol[S]):
    """Proposes continuations. They may depend on everything that the draft has seen, including its own tree so far.

    It declares ``capabilities.DraftInfo``, and may also have the methods of ``Binds``, ``Follows``, ``Joins`` and ``Waits``.
    """

    def init(self, context: Context, target_cache: Any) -> S:
        """The state for these rows, made after the target's prefill (so that it can be a view of the target's cache)."""
        ...

    def propose(self, state: S, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, S]:
        """A tree whose longest path in row ``b`` is at most ``budget[b]`` tokens. Decisions come from ``rng`` only.

        The number of submitted nodes may depend on earlier draws, but never on the value of a node that is dropped.
        """
        ...

    def observe(self, state: S, round: Round) -> S:
        """Called after every round, whether or not this draft was chosen. The round has been committed to the target's cache."""
        ...

    def select(self, state: S, rows: Tensor) -> S:
        """The state of some rows."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """Decides which nodes are accepted, so that committed tokens have the target's distribution.

    It declares ``capabilities.VerifierInfo``, and may also have the methods of ``TakesLogits`` and ``ComparesTokens``.
    """

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        """``probs [B, N + 1, V]`` is the target's distribution after the last committed token and after every node."""
        ...

    def check(self, proposal: Proposal) -> None:
        """Raise ValueError for a proposal that cannot be verified exactly; the message says what is needed."""
        ...

    def for_draft(self, rng: Rng) -> Rng:
        """The random decisions that drafts use under this verifier."""
        ...


class Selector(Protocol[S]):
    """Chooses an arm for each request and learns from the outcome. Arms are numbers, to which the builder assigns drafts.

    It declares ``capabilities.SelectorInfo``, and may also have the method of ``Leaves``.
    """

    def init(self, arms: int) -> S: ...

    def select(self, state: S, context: Context, capacities: Tensor, rng: Rng) -> tuple[Tensor, Tensor, S]:
        """An arm for every row of ``context``, whose ``request`` and ``length`` name the decision.

        Args:
            capacities: ``[arms]`` how many of these rows each arm may take. Together they have room for all rows.
        Returns:
            ``arm [B]`` int64, the probability with which each was chosen ``[B]``, and the state.
        """
        ...

    def update(self, state: S, feedback: Feedback) -> S:
        """Learn from feedback, which may come after further choices."""
        ...


# -- optional methods -------------------------------------------------------------------------------------------------


@runtime_checkable
class KeepsTexts(Protocol):
    """A model that keeps between calls what it has computed of texts."""

    def keep_texts(self, cache: Any, context: Context, rows: Sequence[int]) -> None:
        """Texts have ended: row i of ``context`` is row ``rows[i]`` of the cache, which lacks the last token of the text and may hold accepted tokens beyond it.

        Executors call it on the target, but for a draft that reads activations only if the target notes them (``NotesActivations``), and not under ``Ahead``; ``drafts.Model`` and ``drafts.Tree`` call it on their model.
        """
        ...


@runtime_checkable
class NotesActivations(Protocol):
    """A model that keeps texts with the activations that a draft reads."""

    def note(self, cache: Any, round: Round) -> None:
        """A round ended, of all rows of the cache, which has not let go of any. Executors whose rounds have activations call it after each round, before ``keep_texts``, if the draft reads activations."""
        ...


@runtime_checkable
class Binds(Protocol):
    """A draft that depends on the target or on the sampling."""

    def bind(self, target: Any, sampling: Sampling) -> Any:
        """The draft to use; called once, by ``build``."""
        ...


@runtime_checkable
class Follows(Protocol):
    """A draft that reads the target's cache after ``init``, in ``propose``. It never writes to it.

    In ``observe`` the state may still have the cache of the last round, which rows have left, and whose memory belongs to rows that joined.
    """

    def follow(self, state: Any, target_cache: Any) -> Any:
        """The state, after ``select``, with the target's cache of the same rows."""
        ...


@runtime_checkable
class Joins(Protocol):
    """A draft whose running batch other rows may join, as in continuous batching."""

    def join(self, state: Any, other: Any) -> Any:
        """The state of both batches' rows, in order."""
        ...


@runtime_checkable
class JoinableCache(Protocol):
    """A cache that the rows of another may join."""

    def join(self, other: Any) -> Any:
        """The cache of both batches' rows, in order; the old objects must not be used again."""
        ...


@runtime_checkable
class PooledCache(Protocol):
    """A cache whose memory comes from a pool that several caches share."""

    def beside(self, batch: int, capacity: int) -> Any:
        """An empty cache from the same pool: joining the two copies nothing."""
        ...


@runtime_checkable
class Waits(Protocol):
    """A draft that can read prompts later than in ``init``: in a pool it reads a row when the row is first assigned to it."""

    def empty(self, context: Context) -> Any:
        """As ``init``, without reading anything."""
        ...

    def prepare(self, state: Any, context: Context, rows: Tensor | None) -> Any:
        """Feed unread tokens of ``rows`` (``None``: all)."""
        ...


@runtime_checkable
class Limits(Protocol):
    """A draft that refuses lengths, which ``build`` asks."""

    def check_length(self, length: int) -> None:
        """Raise ValueError, with the remedy, for a path of ``length`` tokens that it cannot propose."""
        ...


@runtime_checkable
class Forgets(Protocol):
    """A draft that keeps its proposal until ``observe``, where another round's may come first: a pool."""

    def forget(self, state: Any) -> Any:
        """The latest proposal is of a round that is observed later: the next round's is not known here."""
        ...


@runtime_checkable
class Stacks(Protocol):
    """A draft with several members, one of which drafts each row."""

    def assign(self, state: Any, member: Tensor) -> Any:
        """``member [B]`` drafts each row from now on; a row with -1 keeps its member."""
        ...

    def read_ahead(self, state: Any, context: Context, rows: Tensor, member: Tensor) -> Any:
        """Let ``member [R]`` read ``rows [R]`` while other members still draft them."""
        ...


@runtime_checkable
class Arms(Protocol):
    """A draft with arms, one of which a selector chooses for each row and round: a pool."""

    def assign(self, state: Any, arm: Tensor) -> Any:
        """``arm [B]`` drafts each row from now on."""
        ...

    def prepare(self, state: Any, context: Context, arm: Tensor) -> Any:
        """Let the arms ``arm [B]`` read unread tokens of their rows."""
        ...

    def spent(self, state: Any) -> tuple[float, ...]:
        """Seconds that each arm spent drafting in the last ``propose``."""
        ...


@runtime_checkable
class TakesLogits(Protocol):
    """A verifier that needs no probabilities where sampling has only a temperature."""

    def from_logits(
        self, proposal: Proposal, logits: Tensor, sampling: Sampling, context: Context, rng: Rng
    ) -> Verdict:
        """As ``__call__``, with the target's logits ``[B, N + 1, V]``."""
        ...


@runtime_checkable
class ComparesTokens(Protocol):
    """A verifier that needs no probabilities at temperature 0."""

    def greedy(self, proposal: Proposal, tokens: Tensor) -> Verdict:
        """As ``__call__``, with the target's most probable tokens ``[B, N + 1]``."""
        ...


@runtime_checkable
class Leaves(Protocol):
    """A selector with a state for each request."""

    def leave(self, state: Any, requests: Tensor) -> Any:
        """The state after these requests are finished."""
        ...


@runtime_checkable
class Holds(Protocol):
    """A selector whose choices may stand for several rounds.

    While they do, the selector is not asked. It gets the feedback of these rounds when it is asked next; rounds in which no row drafts have none. A choice
    ends early when a row leaves or joins.
    """

    def hold(self, state: Any) -> int:
        """How many more rounds the last choice stands; 0: choose again in the next."""
        ...


@runtime_checkable
class Enters(Protocol):
    """A selector that asks how long a request's text may become."""

    def enter(self, state: Any, request: Tensor, length: Tensor) -> Any:
        """The state, with the longest length of each new request's text, prompt included."""
        ...
