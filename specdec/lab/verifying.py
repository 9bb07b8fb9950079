"""Several verifiers on the same rounds: which of them accepts more of the same proposals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.arguments import at_least
from specdec.decoder import Decoder
from specdec.protocols import Verifier
from specdec.rng import Philox, seeds
from specdec.types import Round


def accepted_by(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    verifiers: Mapping[str, Verifier],
    new_tokens: int = 64,
    draws: int = 8,
    batch: int = 16,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Tokens and rounds of each prompt, ``[2, prompts]``, if each verifier decided every round of a decoder.

    The decoder decodes as usual, by its own verifier. Every proposal that no stop or budget shortened is verified ``draws`` more times by each of ``verifiers``,
    with fresh random numbers, and the mean of the tokens (bonus included) is counted. Since all see the same trees and distributions, their
    differences have little noise. The rounds start where the decoder's own verifier ended the ones before.

    Raises:
        ValueError: a verifier refuses the proposals, or wants them drawn with its own random numbers (``Coupled``); the decoder's sampling is
            greedy, where all verifiers agree; or a number is below 1.
    """
    for name, value in {"new_tokens": new_tokens, "draws": draws, "batch": batch}.items():
        at_least(1, name, value, "give at least 1")
    if decoder.sampling.by_request or decoder.drafting.by_request:
        raise ValueError(
            "the decoder, or its draft, has sampling settings for each request, and requests are numbered from 0 in every batch: give one for all"
        )
    if decoder.sampling.greedy:
        raise ValueError(
            "the decoder's temperature is 0, where all verifiers accept the same: give a higher one"
        )
    for name, verifier in verifiers.items():
        rng = Philox(seeds(0, 1))
        if verifier.for_draft(rng) is not rng:
            raise ValueError(
                f"verifier {name!r} wants drafts drawn with its own random numbers, so it cannot verify what was drawn for another: use lab.simulate"
            )
    sums = {name: np.zeros((2, len(prompts))) for name in verifiers}
    for start in range(0, len(prompts), batch):

        def look(round: Round, start: int = start) -> None:
            if not round.number:
                return
            whole = (~round.truncated).nonzero()[:, 0]
            rows = start + round.context.request[whole].numpy()
            proposal, context = round.proposal.select(whole), round.context.select(whole)
            if not len(whole):
                return
            if round.probs is None:
                raise ValueError(
                    "the decoder's verifier took the logits, so there are no distributions for others: build it with verifier(Rejection())"
                )
            probs: Any = round.probs[whole.to(round.probs.device)]
            for name, verifier in verifiers.items():
                verifier.check(proposal)
                for draw in range(draws):
                    key = 1_000_003 * (seed + 1) + 10_007 * draw + start
                    rng = Philox(seeds(key, len(prompts))[rows])
                    made = verifier(proposal, probs, context, rng).accepted.numpy() + 1
                    sums[name][0, rows] += made / draws  # each row once
                sums[name][1, rows] += 1

        some = [list(prompt) for prompt in prompts[start : start + batch]]
        each = [seed + start + i for i in range(len(some))]
        decoder.generate(some, new_tokens, seed=each, eos_token_id=(), on_round=look)
    return sums
