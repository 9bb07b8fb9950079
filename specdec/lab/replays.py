"""The result of a replay: a draft's exact behaviour along the texts of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.arguments import whole
from specdec.audit.between import between
from specdec.audit.block import block_chances
from specdec.audit.lengths import Drafted, Policy, check_policy, stopping
from specdec.audit.rounds import Efficiency, Rounds, efficiency
from specdec.configs import setting
from specdec.drafts.spire import SpireModel
from specdec.drafts.stops import Stop, Stops
from specdec.lab.traces import Trace, digest, identity
from specdec.masks.text import known
from specdec.models.hf import HFModel
from specdec.models.table import TableModel

Verification = Literal["rejection", "block", "traversal", "k-SEQ", "optimal transport"]
_OFF_THE_TEXT = "depends on siblings that are not in the text"
_NOT_OF_TREES = {
    "block": "it takes chains",
    "traversal": f"how likely a node is accepted {_OFF_THE_TEXT}, the rejected ones before it",
    **dict.fromkeys(
        ("k-SEQ", "optimal transport"),
        f"how many candidates the next token has {_OFF_THE_TEXT}, because equal siblings go on together",
    ),
}


@dataclass(frozen=True, eq=False)
class Replay:
    """A draft on a trace of ``C`` texts.

    Its τ counts every round, also the last one of a text that an end token ended, which may be cut short; the statistics of ``generate`` leave such
    rounds out.

    Attributes:
        name: of the draft. k: the longest path. q, accept: ``[C, n, k]``, see ``lab.recorder.Recorder``; ``n`` is the largest number of rounds, and
            entries past a text's end mean nothing. high, size, proposed, most, entropy, chains: likewise. verifier: the one whose
            rounds ``tau``, ``efficiency`` and ``sums`` count (``under``).
    """

    trace: Trace
    name: str
    k: int
    q: Tensor
    accept: Tensor
    high: Tensor
    most: Tensor
    entropy: Tensor
    size: Tensor
    proposed: Tensor
    chains: Tensor
    verifier: Verification = "rejection"
    exact = True
    lossless = True  # Rejection or block verification

    def __repr__(self) -> str:
        return f"Replay({self.name}, k = {self.k}: tau {self.tau:.3f} on {len(self.trace)} texts)"

    def __len__(self) -> int:
        return len(self.trace)

    @cached_property
    def tau(self) -> float:
        """Tokens a round, bonus included; where chances are bounded, the middle of the bounds."""
        return sum(float(one[0].sum() / one[1].sum()) for one in self.sums()) / 2

    @cached_property
    def p(self) -> Tensor:
        """``[C, n, k]`` the target's probability of the text's token at each depth of each block; 1 past a text's end."""
        own = [self.trace.own(c).double() for c in range(len(self))]
        rows = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=1.0)
        n = self.accept.shape[1]
        rows = torch.nn.functional.pad(rows, (0, max(0, n + self.k - rows.shape[1])), value=1.0)
        return rows[:, 1:].unfold(1, self.k, 1)[:, :n]

    def under(self, verifier: Verification, name: str | None = None) -> Replay:
        """The same draft under another verifier, to be compared with it.

        Args:
            verifier: as for ``chances``, which says what is refused. name: for tables.
        """
        self.chances(verifier)
        return replace(self, verifier=verifier, name=name or f"{self.name}, {verifier}")

    def chances(self, verifier: Verification | None = None) -> Tensor:
        """``[C, n, k]`` the probability, given the text, that a token of a block was accepted if those before it were.

        Args:
            verifier: ``"rejection"``; of chains also ``"block"`` and ``"traversal"``, which agree there, and ``"k-SEQ"`` and ``"optimal
                transport"``, which verify a single candidate as rejection does. Default: the replay's own.
        Raises:
            ValueError: there is no such verifier, or trees were replayed and it is not ``"rejection"``; the message says why.
        """
        verifier = verifier or self.verifier
        if verifier == "rejection":
            return self.accept
        if verifier not in _NOT_OF_TREES:
            names = ", ".join(map(repr, ("rejection", *_NOT_OF_TREES)))
            raise ValueError(
                f"verifier is {verifier!r}: give one of {names}, or decode live with lab.simulate(verifier=...)"
            )
        if not self.chains:
            raise ValueError(
                f"verifier is {verifier!r} and trees were replayed: {_NOT_OF_TREES[verifier]}; give 'rejection', or decode live with "
                "lab.simulate(verifier=...)"
            )
        if verifier in ("k-SEQ", "optimal transport"):
            return self.accept
        return torch.where(self.q > 0, block_chances(self.p, self.q), 0)

    def efficiency(self, k: int | None = None, verifier: Verification | None = None) -> Efficiency:
        """Expected rounds and tokens of each text; where chances are bounded, from the lower bounds.

        Args:
            k: blocks of at most ``k`` tokens, for chain drafts whose tokens do not depend on how many are to come. verifier: as for
                ``chances``.
        """
        return efficiency(self.chances(verifier), self._k(k), self._ended, n=self._rounds, lengths=self.size)

    def sums(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Expected tokens and rounds of each text, ``[2, C]``, for the lower and for the upper bound of τ; equal unless chances are bounded."""
        if torch.equal(self.accept, self.high):
            made = self.efficiency(k)
            both = torch.stack([made.tokens, made.rounds])
            return both, both
        found = between(self.accept, self.high, self._k(k), self._ended, n=self._rounds, lengths=self.size)
        return torch.stack([found.tokens_low, found.rounds_high]), torch.stack(
            [found.tokens_high, found.rounds_low]
        )

    def drafted(self, k: int | None = None) -> Tensor:
        """``[C]`` the expected number of tokens that the blocks of each text propose, for chains, with ``k`` as for ``efficiency``; where chances are bounded, from the lower bounds.

        Raises:
            ValueError: trees were replayed.
        """
        if not self.chains:
            raise ValueError("trees were replayed: only the tokens of chains are counted")
        k = self._k(k)
        begun, _ = Rounds.of(self.chances(), k, self._ended, n=self._rounds, lengths=self.size).begun()
        return (begun * self.proposed.clamp(max=k)).sum(1)

    def _k(self, k: int | None) -> int:
        if k not in (None, self.k) and not self.chains:
            raise ValueError(f"k is {k}, and trees of depth {self.k} were replayed: replay with k={k}")
        if k is not None:
            whole("k", k)
        if k is not None and not 1 <= k <= self.k:
            raise ValueError(
                f"k is {k}, and blocks of up to {self.k} were replayed: give 1 to {self.k}, or replay with a larger k"
            )
        return self.k if k is None else k

    @property
    def _rounds(self) -> Tensor:
        return torch.tensor([text.rounds for text in self.trace.texts])

    @property
    def _ended(self) -> Tensor:
        return torch.tensor([text.ended for text in self.trace.texts])

    def stopping(self, policy: Policy | Stops, name: str | None = None) -> Replay:
        """The same draft with a length for every block, which a policy decides while drafting.

        Args:
            policy: rules, as ``drafts.Model(stop=...)`` takes them; or a function from ``audit.lengths.Drafted``, what the draft knows of each chain, to
                lengths 0 .. k, such as ``lambda seen: lengths.before(seen.most > 0.4)``. name: for tables.
        Raises:
            ValueError: trees were replayed; rules find no probabilities (temperature 0); or the policy anticipates: it looks at a token and then drops it,
                which biases the output.
        """
        if not self.chains:
            raise ValueError("trees were replayed: a policy decides the lengths of chains")
        if not callable(policy) or isinstance(policy, Stop):
            if bool((self.most[self.q > 0] == 1).all()):
                raise ValueError(
                    "tokens were chosen without randomness, so the replay has no probabilities for a rule: replay drafts.Model(model, stop=...)"
                )
            policy = stopping(policy)
        C, n, k = self.q.shape
        ids = torch.zeros(C, n + k, dtype=torch.long)
        for c, text in enumerate(self.trace.texts):
            new = torch.tensor(text.ids[text.prompt + 1 :][: n + k])
            ids[c, : len(new)] = new
        seen = Drafted(ids.unfold(1, k, 1)[:, :n], self.q, self.most, self.entropy)
        lengths = check_policy(policy, seen)
        size, proposed = torch.minimum(self.size, lengths), torch.minimum(self.proposed, lengths)
        return replace(self, size=size, proposed=proposed, name=name or f"{self.name}, stopping")


def described(value: Any) -> str:
    """A name for a draft of this library by its settings and weights.

    Raises:
        TypeError: some part of it has no name, such as a function, or is not this library's: its code may change.
    """
    return digest(_plain(value))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if not type(value).__module__.startswith("specdec."):
        raise TypeError(f"a {type(value).__name__} has no name")
    if isinstance(value, HFModel | SpireModel | TableModel):
        mask = setting(value, "mask")
        if mask is not None and not known(mask):
            raise TypeError(f"{mask!r} has no name")
        return identity(value)
    if is_dataclass(value):
        return [
            type(value).__qualname__,
            *(_plain(getattr(value, f.name)) for f in fields(value) if f.compare),
        ]
    raise TypeError(f"a {type(value).__name__} has no name")
