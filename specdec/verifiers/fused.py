"""Rejection verification directly from logits, by fused kernels on a GPU, without computing probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import tree
from specdec.capabilities import VerifierInfo
from specdec.kernels.device import to_device
from specdec.kernels.rejection import chosen, decide, verify
from specdec.rng import ACCEPT, BONUS, Key, Philox, Rng
from specdec.sampling import Sampling
from specdec.types import Context, Proposal, Verdict
from specdec.verifiers.apart import apart
from specdec.verifiers.rejection import Rejection, draw_bonus


@dataclass(frozen=True)
class FusedRejection(Rejection):
    """``Rejection`` that works on the target's logits if sampling has a temperature and nothing else.

    It decides as ``Rejection`` does with the same random numbers, up to the rounding of probabilities;
    ``kernels/rejection/reference.py`` says how rarely they differ. ``Round.probs`` is then ``None``. With other sampling, and for trees, it
    calls ``Rejection``. On the CPU no kernels are fused, and nothing is gained.

    Args:
        trust_declared: as for ``Rejection``.
    """

    @property
    def info(self) -> VerifierInfo:
        kind = type(self)  # a subclass with its own decisions gets no shortcut
        own = kind.__call__ is Rejection.__call__
        return VerifierInfo(
            "fused rejection",
            lossless=True,
            takes_logits=own,
            compares_tokens=own and kind.from_logits is FusedRejection.from_logits,
        )

    def from_logits(
        self, proposal: Proposal, logits: Tensor, sampling: Sampling, context: Context, rng: Rng
    ) -> Verdict:
        """``__call__`` with ``logits [B, N + 1, V]`` and a ``sampling`` whose temperature alone is used.

        Raises:
            ValueError: logits that have NaN, +inf or only -inf.
        """

        def fused(proposal: Proposal, logits: Tensor, context: Context, rng: Rng) -> Verdict:
            return self.from_logits(proposal, logits, sampling, context, rng)

        def plain(proposal: Proposal, logits: Tensor, context: Context, rng: Rng) -> Verdict:
            return self(proposal, sampling(logits, context, proposal), context, rng)

        chain = tree.is_chain(proposal.parents, proposal.size)
        if not bool(chain.any()):
            return plain(proposal, logits, context, rng)
        if not bool(chain.all()):  # a row's rounding must not depend on its batch
            return apart(chain, fused, plain, proposal, logits, context, rng)
        at, N, size, temperature = context.length, proposal.nodes, proposal.size, sampling.temperature
        assert not isinstance(temperature, Sequence)  # ``only_temperature``
        accepts = Key(at[:, None], torch.arange(N), 0, ACCEPT)
        live = to_device(torch.arange(N) < size[:, None], logits.device)
        tokens = torch.where(live, proposal.tokens, 0)
        draft = None if proposal.probs is None else proposal.distributions()
        if type(rng) is Philox and chosen(logits, draft) == "triton":
            uniforms = rng.uniform(accepts), rng.uniform(Key(at[:, None], torch.arange(N + 1), 0, BONUS))
            decision = verify(
                logits, tokens, size, *uniforms, draft=draft, temperature=temperature, backend="triton"
            )
        else:  # by decisions of the ``Rng``, so that the certifier's works, too
            decision = decide(
                logits,
                tokens,
                size,
                lambda ratio: rng.accept(ratio, accepts),
                lambda weights, accepted: draw_bonus(weights, accepted, context, rng, N),
                draft=draft,
                temperature=temperature,
            )
        accepted = decision.accepted
        nodes = torch.arange(N, device=accepted.device)
        path = torch.where(nodes < accepted[:, None], nodes, -1)
        return Verdict.of(proposal, path, accepted, decision.token)
