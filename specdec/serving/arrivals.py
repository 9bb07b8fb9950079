"""The requests of a stream until they join: taken from their source, held while they wait, and in which order they join."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, Protocol, runtime_checkable

from specdec.arguments import at_least, function
from specdec.serving.requests import Request
from specdec.serving.states import Due, outside


class Waiting(NamedTuple):
    """A request that waits: its kind, and how many later ones have joined before it."""

    kind: Hashable
    passed: int


@runtime_checkable
class Admission(Protocol):
    """In which order requests that wait join the running batch. It decides when a request's text is made, not which text that is."""

    @property
    def held(self) -> int:
        """How many requests that have arrived may be taken from the source and wait."""
        ...

    def kind(self, request: Request) -> Hashable:
        """The kind of a request, asked once for each."""
        ...

    def next(self, waiting: Sequence[Waiting], running: Sequence[Hashable], last: Hashable) -> int:
        """The position in ``waiting`` of the request that joins next.

        Args:
            waiting: at least one, in order of arrival. running: the kinds of the rows in flight.
            last: the kind of the request that joined last; before the first, that of the oldest that waits.
        """
        ...


@dataclass(frozen=True)
class InOrder:
    """First come, first served."""

    held: int = 1

    def kind(self, request: Request) -> None:
        return None

    def next(self, waiting: Sequence[Waiting], running: Sequence[Hashable], last: Hashable) -> int:
        return 0


@dataclass(frozen=True)
class ByKind:
    """Requests of one kind join one after another, so that the rows of a batch are alike: a round pays for every draft that a row of it uses.

    The next one is the oldest that has the kind of the request that joined last, else the kind of most rows in flight, else the oldest of all. One that
    ``patience`` later requests have passed comes before all others, and then its kind goes on; so no request is passed more often.

    Args:
        kind: of a request: its draft, its temperature, or a ``key`` of yours, for example. It is asked once for each; an error that it raises ends the
            stream.
        patience: how many later requests may pass one. Make it many times the rows in flight, or batches stay mixed.
        held: how many waiting requests are looked at.
    Raises:
        TypeError: ``kind`` is not a function, or a number is not whole.
        ValueError: a number is below 1.
    """

    kind: Callable[[Request], Hashable]
    patience: int = 256
    held: int = 256

    def __post_init__(self) -> None:
        function("kind", self.kind)
        for name in ("patience", "held"):
            at_least(1, name, getattr(self, name), "give a number of requests, 1 or more")

    def next(self, waiting: Sequence[Waiting], running: Sequence[Hashable], last: Hashable) -> int:
        if waiting[0].passed >= self.patience:  # an older one has been passed at least as often
            return 0
        oldest: dict[Hashable, int] = {}
        for i, one in enumerate(waiting):
            oldest.setdefault(one.kind, i)
        there = [last, *(kind for kind, _ in Counter(running).most_common())]
        return next((oldest[kind] for kind in there if kind in oldest), 0)


class Arrivals:
    """The source of a stream, and the requests that were taken from it and have not joined.

    Args:
        clock: the time of the stream.
    Attributes:
        early: the one request that was taken before it arrives, if any. waiting: those that have arrived.
    Raises:
        TypeError, ValueError: the requests are not iterable, or a sequence is not in the order of arrival.
    """

    def __init__(self, requests: Iterable[Request], admission: Admission, clock: Callable[[], float]):
        if not isinstance(requests, Iterable):
            raise TypeError(
                f"requests is a {type(requests).__name__}: give a list of Request, or a generator"
            )
        if isinstance(requests, Sequence):  # check all of them before any work is done
            latest = 0.0
            for index, request in enumerate(requests):
                _in_order(index, request, latest)
                latest = latest if request.arrival is None else request.arrival
        self.source: Iterator[Request | None] = iter(requests)
        self.admission, self.clock = admission, clock
        self.ended, self.taken, self.latest = False, 0, 0.0
        self.early: Due | None = None
        self.waiting: list[Due] = []
        self.shown: list[Waiting] = []  # what the admission is shown of each that waits
        self.running: dict[int, Hashable] = {}  # number -> kind
        self.last: Waiting | None = None  # joined last

    @property
    def over(self) -> bool:
        """Whether no request waits and none will come; the source may be asked for one."""
        return not self.waiting and self._peek() is None and self.ended

    def take(self, running: Collection[int]) -> Due | None:
        """The request that joins next, ``None`` if none waits.

        Args:
            running: the numbers of the requests in flight.
        Raises:
            TypeError, ValueError: the source gives what is no request, or one out of order; a kind cannot be hashed; the admission's choice is no
                position in ``waiting``.
        """
        while len(self.waiting) < self.admission.held:
            due = self._peek()
            if due is None or due.arrived > self.clock():
                break
            self.early = None
            self.waiting.append(due)
            self.shown.append(Waiting(self._kind(due), 0))
        if not self.waiting:
            return None
        self.running = {number: kind for number, kind in self.running.items() if number in running}
        kinds, last = list(self.running.values()), self.last or self.shown[0]
        at = outside(lambda: self.admission.next(list(self.shown), kinds, last.kind))
        if not isinstance(at, Integral) or int(at) not in range(len(self.waiting)):
            raise ValueError(
                f"admission chose request {at!r} of {len(self.waiting)} that wait: next() returns a position in waiting"
            )
        at = int(at)
        for i in range(at):
            self.shown[i] = Waiting(self.shown[i].kind, self.shown[i].passed + 1)
        due, self.last = self.waiting.pop(at), self.shown.pop(at)
        self.running[due.number] = self.last.kind
        return due

    def _kind(self, due: Due) -> Hashable:
        kind = outside(partial(self.admission.kind, due.request))
        try:
            hash(kind)
        except TypeError as error:
            raise TypeError(
                f"the kind of request {due.number} is {kind!r}: give what can be hashed, such as a tuple"
            ) from error
        return kind

    def _peek(self) -> Due | None:
        """The next request, ``None`` if there is none yet or no more; at most one is taken from the source ahead of time."""
        if self.early is None and not self.ended:
            request: Any = outside(lambda: next(self.source, self))  # the source is the user's code
            if request is self:
                self.ended = True
            elif request is not None:
                _in_order(self.taken, request, self.latest)
                arrived = max(self.latest, self.clock()) if request.arrival is None else request.arrival
                self.latest = self.latest if request.arrival is None else arrived
                self.early, self.taken = Due(self.taken, request, arrived), self.taken + 1
        return self.early


def _in_order(index: int, request: Any, latest: float) -> None:
    """Raise TypeError for what is no request, ValueError for one that arrives before ``latest``, when the one before it did."""
    if not isinstance(request, Request):
        raise TypeError(f"request {index} is a {type(request).__name__}: give Request(prompt, ...)")
    if request.arrival is not None and request.arrival < latest:
        raise ValueError(
            f"request {index}: its arrival is {request.arrival} and that of the one before it {latest}: give requests in the order of "
            "arrival"
        )
