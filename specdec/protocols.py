"""The contracts of the parts. They are structural: a part is any object with these methods, no base class needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from specdec.types import Context, Feedback, Proposal, Round, Scores, Verdict

if TYPE_CHECKING:
    from specdec.decoder import Decoder
    from specdec.rng import Rng
    from specdec.stop_rules import StopRules

S = TypeVar("S")


class Cache(Protocol):
    """A memo of what a model has consumed: for each row, a prefix of its committed tokens."""

    length: Tensor  # [B] host: slots of each row that hold committed tokens

    def sync(self, context: Context) -> Tensor:
        """Keep the longest prefix that still matches; returns ``[B]`` how many tokens are held. Never a copy."""
        ...

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Take the accepted nodes of the last scored proposal into the memo. ``context`` is the one they were scored in."""
        ...

    def select(self, rows: Tensor) -> Cache:
        """The cache of some rows; the old object must not be used any more."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """Anything that gives next-token logits for ragged rows and trees of proposed tokens."""

    vocab_size: int
    supports_trees: bool

    def cache(self, batch: int, capacity: int) -> Any:
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens (tree nodes included)."""
        ...

    def prefill(self, cache: Any, context: Context, rows: Tensor | None = None) -> None:
        """PackedBatch all but the last committed token of each row (or of ``rows [R]``), without computing logits."""
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
            cache: from ``cache``; nodes enter its memo only through ``cache.commit``.
            start: when given, nodes before ``start`` were fed by an earlier call for the same context and are in the cache;
                only nodes from ``start`` on are fed and scored, and ``logits[:, 0]`` belongs to node ``start``.
            rows: ``[R]`` the rows to work on (default all); the others are not fed and their logits are zero.
            taps: layers whose activations are wanted at every fed position (``Scores.fed``).
        Returns:
            logits ``[B, N + 1, V]``, or ``[B, N - start, V]`` when ``start`` is given.
        """
        ...


@runtime_checkable
class Draft(Protocol[S]):
    """Proposes continuations. What it does may depend on anything that it has seen, its own tree so far included.

    Optional: ``name`` (for messages), ``trees`` (True when it proposes more than chains), ``nodes(length)`` (the most nodes of
    a proposal whose longest path is ``length``; default ``length``), ``model`` (a ``LanguageModel`` whose vocabulary, tokenizer,
    device and positions ``build`` compares with the target's), ``bind(target, sampling)`` (called once by ``build``; returns
    the draft to use).

    Optional, for drafts that read their target: ``taps`` (layers whose activations every round's ``scores.fed`` must have), and
    ``follow(state, target_cache)`` (returns the state; called after ``select`` with the target's cache of the same rows, because
    ``cache.select`` gives another object: a draft that looks at the target's cache after ``init`` has it). The target's cache has
    taken a round's commit when ``observe`` is called. It may be read and never written.

    Optional, for several drafts at once (``drafts.Pool``): ``assign(state, arm [B])`` says which arm drafts each row from now on, and
    ``prepare(state, context, arm [B])`` reads what those arms have not read yet; both return the state. ``empty(context)`` is ``init``
    without reading the prompts, for a draft whose ``prepare(state, context, rows)`` reads them later.

    Optional, for requests that join a running batch: ``join(state, other)`` returns the state of both batches' rows, in order.
    Optional, for optimistic drafting: ``revocable = True`` says that ``observe`` may be told of a round that did not happen: the next
    call's context is the truth, and the state repairs itself.
    """

    def init(self, context: Context, target_cache: Any) -> S:
        """State for these rows, after the target's prefill (so that views of its cache are possible)."""
        ...

    def propose(self, state: S, context: Context, budget: Tensor, rng: Rng) -> tuple[Proposal, S]:
        """A tree whose longest path in row ``b`` is at most ``budget[b]`` tokens. Decisions come from ``rng`` only.

        How many nodes are submitted may depend on what was drawn before, never on the value of a node that is dropped.
        """
        ...

    def observe(self, state: S, round: Round) -> S:
        """Called after every round, whether or not this draft was chosen."""
        ...

    def select(self, state: S, rows: Tensor) -> S:
        """The state of some rows."""
        ...


def proposed(draft: Draft[Any], answer: Any) -> tuple[Proposal, Any]:
    """What ``draft.propose`` returned, if it is a proposal and a state; TypeError otherwise."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Proposal):
        return answer
    what = type(answer).__name__
    if isinstance(answer, tuple):
        what = f"({', '.join(type(part).__name__ for part in answer)})"
    name = getattr(draft, "name", type(draft).__name__)
    raise TypeError(f"draft {name!r}: propose() returned {what}: return a pair, (Proposal, state)")


class Verifier(Protocol):
    """Decides which nodes stand, so that what is committed has the target's law.

    Optional: ``from_logits(proposal, logits, sampling, context, rng)``, which is then called with the target's logits instead of
    ``__call__`` with its probabilities, where ``sampling.only_temperature``. Such a round's ``probs`` is ``None``. And
    ``greedy(proposal, tokens)``, in the class that has ``__call__`` (or ``from_logits``): at temperature 0 it is called instead of both, with the
    target's tokens ``[B, N + 1]``, on which its laws lie, and no laws are made.
    """

    name: str
    lossless: bool

    def __call__(self, proposal: Proposal, probs: Tensor, context: Context, rng: Rng) -> Verdict:
        """``probs [B, N + 1, V]`` is the target's law after the last committed token and after every node."""
        ...

    def check(self, proposal: Proposal) -> None:
        """Raise ValueError for a proposal that cannot be verified exactly, saying what would be needed."""
        ...

    def for_draft(self, rng: Rng) -> Rng:
        """The random decisions that a draft is given under this verifier."""
        ...


class Selector(Protocol[S]):
    """Chooses an arm for each request and learns from what came of it. Arms are numbers; what they stand for is the builder's.

    Optional: ``leave(state, requests)`` (these requests are finished; returns the state) and ``full_information`` (True: feedback's
    reward is ``[B, arms]``).
    """

    def init(self, arms: int) -> S: ...

    def select(self, state: S, context: Context, capacities: Tensor, rng: Rng) -> tuple[Tensor, Tensor, S]:
        """An arm for every row of ``context``, whose ``request`` and ``length`` name the decision.

        Args:
            capacities: ``[arms]`` how many of these rows each arm may take; they hold all rows together.
        Returns:
            ``arm [B]`` int64, the probability with which each was chosen ``[B]``, and the state.
        """
        ...

    def update(self, state: S, feedback: Feedback) -> S:
        """Learn; feedback may come after further choices were made."""
        ...


class Executor(Protocol):
    """Runs rounds until every row is done; the only part that knows about time."""

    def run(self, decoder: Decoder, context: Context, rng: Rng, limits: StopRules) -> Iterator[Round]: ...
