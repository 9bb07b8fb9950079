"""The distance of a lossy verifier's output from the target's distribution, measured on real rounds."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import VerifierInfo
from specdec.decoder import Decoder
from specdec.types import Round


@runtime_checkable
class TokenLaw(Protocol):
    """A verifier that knows the distribution of a token for which one candidate was drawn."""

    def law(self, p: Tensor, q: Tensor, depth: Tensor) -> Tensor:
        """``[R, V]`` for the target's and the draft's distributions ``[R, V]``, at depths ``[R]`` of a block."""
        ...


class Distance:
    """The total variation of every committed token's distribution from the target's, given the text before it.

    Pass it as ``on_round=`` to ``generate``; it may go through several calls. Tokens that were not drafted (of the prefill, after a whole accepted
    block, of plain decoding) count with 0. The sum over a text's tokens, in the mean over texts, bounds the total variation of whole texts from
    above (``text``); ``audit.certify`` gives it exactly for small examples.

    Attributes:
        texts, tokens: texts and committed tokens so far. total: the sum of the tokens' distances. largest: the largest of them.
    Raises:
        ValueError: the verifier is lossy and has no ``law``, or the draft proposes trees.
    """

    def __init__(self, decoder: Decoder):
        self.verifier, self.info = decoder.verifier, VerifierInfo.of(decoder.verifier)
        if not self.info.lossless and not isinstance(self.verifier, TokenLaw):
            raise ValueError(
                f"the distance of {self.info.name} has no closed form (it has no method law): compute it for small examples, with audit.certify"
            )
        self.texts, self.tokens, self.total, self.largest = 0, 0, 0.0, 0.0

    def __call__(self, round: Round) -> None:
        if round.number == 0:
            self.texts += round.context.batch
        self.tokens += int(round.committed.sum())
        proposal, N = round.proposal, round.proposal.nodes
        if self.info.lossless or not N or round.probs is None:
            return  # without probabilities the verifier compared tokens
        if not bool(tree.is_chain(proposal.parents, proposal.size).all()):
            raise ValueError(
                "the draft proposes trees, and law is of one candidate: use a draft that proposes chains"
            )
        n = torch.arange(N)
        # Accepted, and the first rejected one.
        drafted = (n < proposal.size[:, None]) & (n < round.committed[:, None])
        row, depth = drafted.nonzero(as_tuple=True)
        if not len(row):
            return
        at = tuple(i.to(round.probs.device) for i in (row, depth))
        p = round.probs[at].double()
        if proposal.probs is None:
            q = torch.zeros_like(p).scatter_(1, proposal.tokens[at][:, None], 1)
        else:
            q = proposal.distributions()[at].to(p)
        assert isinstance(self.verifier, TokenLaw)
        apart = 0.5 * (self.verifier.law(p, q, depth) - p).abs().sum(-1).cpu()
        self.total += float(apart.sum())
        self.largest = max(self.largest, float(apart.max()))

    @property
    def token(self) -> float:
        """The mean over tokens."""
        return self.total / self.tokens if self.tokens else float("nan")

    @property
    def text(self) -> float:
        """The mean over texts of the sum over a text's tokens; at least the total variation of whole texts, where it is below 1."""
        return self.total / self.texts if self.texts else float("nan")

    def __repr__(self) -> str:
        return (
            f"Distance({self.info.name}: {self.token:.4f} a token, at most {min(1.0, self.text):.4f} a text, {self.tokens} tokens of "
            f"{self.texts} texts)"
        )
