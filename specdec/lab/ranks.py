"""How often the token of each rank of a head's marginal distributions is the text's, from which Medusa's static trees are made."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import drafts
from specdec.drafts.heads import HeadModel
from specdec.lab.replaying import prepared
from specdec.lab.traces import Trace
from specdec.models.hf import HFModel
from specdec.sampling import Sampling


def accuracies(
    trace: Trace, head: HeadModel, k: int, target: HFModel, top: int = 10, batch: int = 48
) -> list[list[float]]:
    """Depth -> rank -> the share of blocks whose text has the token of this rank at this depth, as ``StaticTree.of_accuracies`` takes it.

    Args:
        trace: with the activations that the head reads. k: depths. top: ranks. batch: texts at a time.
    Raises:
        ValueError: the head's distributions are not marginal, or as ``lab.replay``.
    """
    if not head.marginal:
        raise ValueError(
            f"the distributions of a {type(head).__name__} depend on the tokens before: ranks of a depth need marginal ones"
        )
    hits, seen = torch.zeros(k, top, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)

    def watch(text: Tensor, start: Tensor, q: Tensor, follows: Tensor) -> None:
        for row, place, laws in zip(text.tolist(), start.tolist(), q.float().cpu()):
            one = trace.texts[row]
            ids = torch.tensor(one.ids[one.prompt + 1 + place :][: len(laws)])
            own = laws[torch.arange(len(ids)), ids]
            rank = (laws[: len(ids)] > own[:, None]).sum(1)
            for depth, r in enumerate(rank.tolist()):
                seen[depth] += 1
                if r < top:
                    hits[depth, r] += 1

    run = prepared(trace, drafts.Head(head, sampling=Sampling()), k, target, watch=watch)
    for at in range(0, len(run.texts), batch):
        run(run.texts[at : at + batch])
    return (hits / seen.clamp(min=1)[:, None]).tolist()
