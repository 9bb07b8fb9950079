"""How long a round's chain is, where the draft decides it while drafting: lengths along a text, and a check that they are lawful.

Along a text every token that was drawn *is* the text's, so a rule "go on or stop" becomes a length for every round's start, for
``efficiency(..., lengths=...)``. This is exact for rules that look at a token only if they submit it. A rule that draws a token, looks at it and
then drops it biases the output (docs/design.md, "Anticipation"), and no replay of it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Drafted(NamedTuple):
    """What a draft knows of a chain of K tokens, drawn one after another.

    Attributes:
        token: ``[..., K]``. own: ``[..., K]``, its probability under the distribution that it was drawn from.
        most, entropy: ``[..., K]``, the largest probability of that distribution and its entropy in nats, both known before the token.
    """

    token: Tensor
    own: Tensor
    most: Tensor
    entropy: Tensor

    @staticmethod
    def of(q: Tensor, token: Tensor) -> Drafted:
        """From distributions ``[..., K, V]`` and tokens ``[..., K]``."""
        own = q.gather(-1, token[..., None])[..., 0]
        return Drafted(token, own, q.amax(-1), torch.special.entr(q).sum(-1))


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
    chains = Drafted(*(part.reshape(-1, part.shape[-1]) for part in seen))
    R, K = chains.own.shape
    lengths = policy(chains)
    if (
        lengths.shape != (R,)
        or lengths.dtype.is_floating_point
        or bool(((lengths < 0) | (lengths > K)).any())
    ):
        raise ValueError(
            f"the policy gave {lengths.dtype} of shape {list(lengths.shape)} for chains [{R}, {K}]: give whole numbers, 0 to {K}, one a chain"
        )
    for rows in (torch.arange(0, R, 2), torch.arange(1, R, 2), torch.arange(min(R, 1))):
        if len(rows) and not torch.equal(policy(Drafted(*(part[rows] for part in chains))), lengths[rows]):
            raise ValueError(
                "the policy gives a chain another length when other chains are left out: a length may depend on its own chain alone"
            )
    draw = torch.Generator().manual_seed(seed)
    for kind in _KINDS:
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


_KINDS = ("likely", "unlikely", "random", "random", "others", "others")


def _changed(seen: Drafted, lengths: Tensor, kind: str, draw: torch.Generator) -> Drafted:
    """The same chains with other values of what was not submitted: tokens from the length on, distributions after it."""
    R, K = seen.own.shape
    place = torch.arange(K)
    dropped, later = place >= lengths[:, None], place > lengths[:, None]
    other = Drafted(*(part[torch.randperm(R, generator=draw)] for part in seen))
    share = torch.rand(R, K, generator=draw).to(seen.own)
    if kind == "likely":
        share, other = (
            torch.ones_like(share),
            other._replace(most=torch.ones_like(share), entropy=torch.zeros_like(share)),
        )
    elif kind == "unlikely":
        share, other = (
            1e-6 * share,
            other._replace(most=1e-3 * torch.ones_like(share), entropy=other.entropy + 20),
        )
    elif kind == "random":
        other = other._replace(most=torch.rand(R, K, generator=draw).to(share), entropy=10 * share)
    most = torch.where(later, other.most, seen.most)
    own = other.own.minimum(most) if kind == "others" else share * most
    return Drafted(
        torch.where(dropped, other.token, seen.token),
        torch.where(dropped, own, seen.own),
        most,
        torch.where(later, other.entropy, seen.entropy),
    )
