"""The drafting part of a whole round (``graphs.whole_round``): what a draft does in the captured step, over its own memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdec.cache.ring import Ring
from specdec.cache.slots import Slots
from specdec.cache.static import StaticStore
from specdec.graphs.branches import Growing, Grown, Nodes, TreeShape
from specdec.graphs.programs import Programs
from specdec.graphs.ring_plan import RingPlans
from specdec.graphs.static import Forward, StaticPlan
from specdec.kernels.attention.lowered import Lowered
from specdec.types import Context


class Given(NamedTuple):
    """What the forwards of a round read besides tokens and lengths.

    Attributes:
        on: the round's inputs, ``rows``, ``real`` and ``most`` ``[R]`` among them, and where the target has pages, each row's, ``table [R, P]``
            (``WholeRound``). steps: drafted tokens of each row's longest path.
        longest: the most slots that are read in any row. target: the target's keys and values.
        carry: ``[R, ...]`` what ``observe`` returned in each row's last round.
    """

    on: Mapping[str, Tensor]
    steps: int
    longest: int
    target: StaticStore
    carry: Tensor | None = None

    def within(self, position: Tensor) -> Tensor:
        """``position [R, n]`` of tokens to be fed. Tokens beyond the budget may be beyond the last position that the model has."""
        return torch.minimum(position, (self.on["most"] - 1).clamp(min=0)[:, None])


class Passed(NamedTuple):
    """The target's pass over each row's last committed token and its chain or tree, and the verdict on it.

    Attributes:
        length: ``[R]`` committed tokens before the round. ids: ``[R, steps + 1]`` the tokens that were fed.
        layers: tap -> activations ``[R * (steps + 1), E]``, row after row.
        accepted: ``[R]`` tokens of the chain. bonus: ``[R]`` the token after them.
        path: ``[R, steps]`` of a tree, its accepted nodes, followed by -1. ``ids`` and ``layers`` then have the last committed token and these nodes, and arbitrary
            entries after them. ``None`` for a chain.
    """

    length: Tensor
    ids: Tensor
    layers: Mapping[int, Tensor]
    accepted: Tensor
    bonus: Tensor
    path: Tensor | None = None


class Side(NamedTuple):
    """A model in the step: ``forward`` as ``Packed.forward``, the store of its keys and values, and the size of its vocabulary."""

    forward: Forward
    store: StaticStore
    vocab_size: int

    def feed(
        self,
        given: Given,
        ids: Tensor,
        first: Tensor,
        keep: Tensor | None = None,
        caught: Mapping[int, list[Tensor]] | None = None,
    ) -> Tensor:
        """Logits ``[R * n, V]`` of ``ids [R, n]`` at the positions from ``first [R]`` on, or ``[K, V]`` of the tokens ``keep [K]``, numbered row after row.

        Args:
            caught: as for ``Packed.forward``: a list for each layer whose activations ``[R * n, E]`` are wanted.
        """
        at = first[:, None] + torch.arange(ids.shape[1], device=ids.device)
        return self._pass(given, ids, at, at, None, keep, caught)

    def feed_nodes(
        self,
        given: Given,
        ids: Tensor,
        root: Tensor,
        nodes: Nodes,
        caught: Mapping[int, list[Tensor]] | None = None,
    ) -> Tensor:
        """As ``feed``: all logits of the nodes ``ids [R, n]`` of a tree, whose slots begin at ``root [R]``, the texts' ends."""
        root = root[:, None]
        return self._pass(given, ids, root + nodes.at, root + nodes.depth, nodes, None, caught)

    def _pass(
        self,
        given: Given,
        ids: Tensor,
        at: Tensor,
        position: Tensor,
        nodes: Nodes | None,
        keep: Tensor | None,
        caught: Mapping[int, list[Tensor]] | None,
    ) -> Tensor:
        """Feed ``ids`` at slots ``at`` and ``position``, all ``[R, n]``."""
        on, store, (R, n) = given.on, self.store, ids.shape
        slots = torch.where(on["real"][:, None] > 0, self._slots(given, at), store.spare).flatten()
        starts = torch.arange(R + 1, device=ids.device, dtype=torch.int32) * n
        length = (at[:, -1] + 1).to(torch.int32)
        most = given.longest if store.page else min(given.longest, store.slots)
        root, words, depths = length, None, None
        if nodes is not None:
            root = (at[:, 0] - nodes.at[0]).to(torch.int32)
            words, depths = nodes.words.expand(R, n).flatten(), nodes.depths
        table = on["table"] if store.page else None
        lowered = Lowered(starts, length, on["rows"], root, words, depths, table, None, n, most)
        store.begin()
        # Ids beyond a smaller vocabulary are fed as its last one.
        known = ids.clamp(max=self.vocab_size - 1).flatten()
        plan = StaticPlan(lowered, slots, ordered=True)
        logits = self.forward(store, plan, known, given.within(position).flatten(), keep, caught)
        assert logits is not None
        return logits

    def keep_path(self, given: Given, root: Tensor, path: Tensor) -> None:
        """Move keys and values of the nodes ``path [R, n]``, -1 for none, to the slots from the texts' ends ``root [R]`` on, in order."""
        real = (path >= 0) & (given.on["real"][:, None] > 0)
        order = torch.arange(path.shape[1], device=path.device)
        source, target = (
            torch.where(real, self._slots(given, root[:, None] + at), self.store.spare).flatten()
            for at in (path.clamp(min=0), order)
        )
        self.store.copy(source, self.store, target)

    def _slots(self, given: Given, at: Tensor) -> Tensor:
        """``[R, n]`` the flat numbers of slots ``at [R, n]``."""
        return self.store.numbers(given.on["rows"], given.on["table"] if self.store.page else None, at)


class Drafting(ABC):
    """A draft in the step.

    It is made from a bound draft and its ``memory``. It keeps the memory's tensors only, so that captured steps do not hold back its reuse.

    Attributes:
        rows: the most rows of a step, padding included; ``None``: any number, since padding goes to a spare slot.
        taps: layers of the target whose activations ``observe`` reads, as in ``DraftInfo``.
    """

    rows: int | None = None
    taps: Sequence[int] = ()

    @abstractmethod
    def __init__(self, draft: Any, memory: Any): ...

    @staticmethod
    @abstractmethod
    def why_not(draft: Any, target: Any, length: int) -> str | None:
        """Why a bound ``draft`` cannot draft in a step with ``target``, or ``None``.

        Raises:
            ValueError: no executor can draw chains of ``length`` tokens with it.
        """

    @staticmethod
    @abstractmethod
    def modules(draft: Any) -> tuple[Iterable[nn.Module], object]:
        """The modules that the step runs, and the model that they are of (for ``Programs.check``)."""

    @staticmethod
    @abstractmethod
    def memory(state: Any) -> Slots | None:
        """The keys and values in a draft's state; ``None`` for a draft without any, which is made with ``None``."""

    @staticmethod
    @abstractmethod
    def programs(draft: Any) -> Programs:
        """What keeps the memory, and lends it to the draft's next states."""

    @staticmethod
    def carry(state: Any) -> Tensor | None:
        """What each row of a draft's state takes to its next round besides its text and its memory, ``[B, ...]``; by default nothing."""
        return None

    @staticmethod
    @abstractmethod
    def select(memory: Any, rows: Tensor, context: Context) -> Slots:
        """The memory of the rows ``rows [B']``, whose texts are ``context``; the old object must not be used again."""

    @staticmethod
    def join(memory: Any, other: Any, target_cache: Any) -> Slots:
        """The memory of both batches' rows, these first; ``target_cache`` has them all. Neither may be used again. Of caches, by default."""
        joined: Slots = memory.join(other)
        return joined

    @staticmethod
    def tree(draft: Any, length: int) -> TreeShape | None:
        """The tree that a bound draft proposes where paths have at most ``length`` nodes; ``None``: it proposes chains."""
        return None

    def constants(self, rows: int, device: torch.device, steps: int) -> Any:
        """What ``grow`` needs for ``rows`` rows and paths of ``steps`` nodes, and the host knows beforehand: a step copies nothing from the host."""
        return None

    def grow(self, given: Given, growing: Growing, constants: Any) -> Grown:
        """Draft a tree; ``constants``: as ``constants`` made them."""
        raise NotImplementedError

    @abstractmethod
    def chain(self, given: Given, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        """The forwards of a chain after the texts' ends ``state [R, 3]``: each row's committed length, and its last two tokens.

        Returns:
            ``(n, tokens [R]) -> logits [R, V]``, called with n = 0, 1, ... and the last committed tokens, then those that were drawn.
        """

    def observe(self, given: Given, passed: Passed) -> Tensor | None:
        """Read the target's pass, and return what rows carry to the next round, ``[R, ...]``. By default, nothing is read or carried.

        A round may run again on the same text (captures do that, and rows that have ended): nothing that ``chain`` reads below the text's end
        may be overwritten. What is carried is taken over between rounds.
        """
        return None


class RingDrafting(Drafting):
    """A draft in the step whose state has its memory in a ``ring``, and whose ``programs`` keep it.

    Rows of the memory that the batch does not use are padding, which writes to their own slots.
    """

    def __init__(self, memory: Ring, whole: bool = False):
        self.store = StaticStore(memory)
        self.plans = RingPlans(memory, self.store, whole)
        self.rows = memory._whole[0].shape[1]

    @staticmethod
    def memory(state: Any) -> Ring | None:
        ring: Ring | None = state.ring
        return ring

    @staticmethod
    def programs(draft: Any) -> Programs:
        programs: Programs = draft.programs
        return programs

    @staticmethod
    def select(memory: Ring, rows: Tensor, context: Context) -> Ring:
        return memory.select(rows)

    @staticmethod
    def join(memory: Ring, other: Ring, target_cache: object) -> Ring:
        return memory.followed_by(other)
