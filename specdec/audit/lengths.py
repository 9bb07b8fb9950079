"""How long a round's chain is, where the draft decides it while drafting: lengths along a text, and a check that they are lawful.

Along a text every token that was drawn *is* the text's, so a rule "go on or stop" becomes a length for every round's start, for
``efficiency(..., lengths=...)``. This is exact for rules that look at a token only if they submit it. A rule that draws a token, looks at it and
then drops it biases the output (docs/design.md, "Anticipation"), and no replay of it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.stops import Drafted, Stops, as_stops, ends

Policy = Callable[[Drafted], Tensor]


def before(go: Tensor) -> Tensor:
    """``[...]`` lengths, if token j is drawn and submitted where ``go [..., j]`` and all of go before it hold.

    Lawful where ``go[..., j]`` is known before token j is drawn: ``before(seen.most > 0.5)``, ``before(seen.entropy < 2)``.
    """
    return go.long().cumprod(-1).sum(-1)


def after(go: Tensor) -> Tensor:
    """``[...]`` lengths, if token j is submitted whatever it is, and drafting goes on after it where ``go[..., j]`` holds.

    Lawful for what is known when token j was drawn: ``after(seen.own > 0.3)``.
    """
    return before(torch.cat([torch.ones_like(go[..., :1]), go[..., :-1]], -1))


def stopping(stop: Stops) -> Policy:
    """The lengths that rules of ``drafts.stops`` give, each shown what was known when it was asked."""
    stops = as_stops(stop)

    def policy(seen: Drafted) -> Tensor:
        length, on = (
            torch.zeros_like(seen.token[..., 0]),
            torch.ones_like(seen.token[..., 0], dtype=torch.bool),
        )
        for n in range(seen.token.shape[-1]):
            on = on & ~ends(stops, "before", seen.first(n, n + 1))
            length = length + on
            on = on & ~ends(stops, "after", seen.first(n + 1, n + 1))
        return length

    return policy


def check_policy(policy: Policy, seen: Drafted, seed: int = 0) -> Tensor:
    """The lengths ``[...]`` that ``policy`` gives, if it does not anticipate.

    It is run again with other values of what it did not submit, its tokens and all that follows from them, and with parts of the batch
    alone. Its lengths must be the same. A policy that fails is refused for certain; one that passes has been tried on these chains only.

    Args:
        policy: a function from ``Drafted`` to lengths 0 .. K, int64; each a function of its own chain. seen: the chains, as for
            replay. seed: of the other values.
    Raises:
        ValueError: the policy anticipates, its lengths depend on other chains, or they are not lengths.
    """
    chains = seen.each(lambda part: part.flatten(0, -2))
    R, K = chains.own.shape
    lengths: Any = policy(chains)
    if not isinstance(lengths, Tensor):
        raise TypeError(f"the policy gave {lengths!r}: give a tensor of lengths, one a chain")
    if (
        lengths.shape != (R,)
        or lengths.dtype.is_floating_point
        or bool(((lengths < 0) | (lengths > K)).any())
    ):
        raise ValueError(
            f"the policy gave {lengths.dtype} of shape {list(lengths.shape)} for chains [{R}, {K}]: give whole numbers, 0 to {K}, one a chain"
        )
    for first in (0, 1):  # every second chain alone
        some = chains.each(lambda part: part[first::2])  # noqa: B023
        if first < R and not torch.equal(policy(some), lengths[first::2]):
            raise ValueError(
                "the policy gives a chain another length when other chains are left out: a length may depend on its own chain alone"
            )
    draw = torch.Generator().manual_seed(seed)
    for kind in ("likely", "unlikely", "random", "random", "others", "others"):
        changed = policy(_changed(chains, lengths, kind, draw))
        wrong = (changed != lengths).nonzero()[:, 0]
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"the policy anticipates: chain {row} had length {int(lengths[row])}, and it has {int(changed[row])} with other values of the "
                "tokens that were not submitted. A token that was looked at must be submitted: stop after it (lengths.after), or decide "
                "by what is known before it is drawn, such as most or entropy (lengths.before)"
            )
    return lengths.view(seen.own.shape[:-1])


def _changed(seen: Drafted, lengths: Tensor, kind: str, draw: torch.Generator) -> Drafted:
    """The same chains with other values of what was not submitted: tokens from the length on, distributions after it."""
    R, K = seen.own.shape
    place = torch.arange(K)
    dropped, later = place >= lengths[:, None], place > lengths[:, None]
    other = seen.each(lambda part: part[torch.randperm(R, generator=draw)])
    u = torch.rand(3, R, K, generator=draw).to(seen.own)
    most, entropy = {
        "likely": (torch.ones_like(u[0]), torch.zeros_like(u[0])),
        "unlikely": (1e-3 * u[0], 20 + u[1]),
        "random": (u[0], 10 * u[1]),
        "others": (other.most, other.entropy),
    }[kind]
    most = torch.where(later, most, seen.most)
    own = {"likely": most, "unlikely": 1e-6 * most, "random": u[2] * most, "others": other.own.minimum(most)}[
        kind
    ]
    return Drafted(
        torch.where(dropped, other.token, seen.token),
        torch.where(dropped, own, seen.own),
        most,
        torch.where(later, entropy, seen.entropy),
        seen.known,
    )
