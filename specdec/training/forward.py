"""How a draft's logits are computed over whole sequences: the function that training differentiates and τ is estimated from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from specdec.arguments import at_least
from specdec.masks import Mask, for_model, sees, streaming
from specdec.masks.sight import check_length, check_sight
from specdec.training.anchored import Step, layers_of, rounds, steps
from specdec.training.passes import k_pass
from specdec.training.states import Batch


@dataclass(frozen=True)
class KPass:
    """SPIRe's k passes (``passes.k_pass``) for a ``SpireModel``: blocks of ``k`` positions. Needs the target's inputs."""

    k: int = 4

    def layers(self, draft: Any) -> tuple[int, ...]:
        """The target's layers whose inputs ``Batch.inputs`` must hold."""
        return draft.layers

    def __call__(self, draft: Any, batch: Batch) -> Tensor:
        """Logits ``[B, T, V]`` after the first T positions, T the largest multiple of k."""
        return k_pass(draft, batch.tokens[:, :-1], batch.inputs, self.k)


class Drafted(NamedTuple):
    """What a draft says of blocks of a text.

    ``logits [B, A, k, V]`` of ``k`` depths after ``A`` anchors (``[..., K]`` over a reduced vocabulary); ``at [B, A, k]`` the positions that
    they follow: they are over ``tokens[b, at + 1]``. ``confidence [B, A, k]``: logits of the head's confidence, if it has one. ``block [B, A, k, V]``: logits of a corrected head before the
    correction. ``rounds``: logits ``[B, A, k, V]`` of each of ``Corrected.rounds``.
    """

    logits: Tensor
    at: Tensor
    confidence: Tensor | None = None
    block: Tensor | None = None
    rounds: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Blocks:
    """Teacher-forced blocks of a head (``anchored.steps``): EAGLE-3's training-time test, and the anchors and blocks of DFlash.

    Args:
        k: tokens of a block. anchors: how many positions of a text begin a block in training, drawn at random without repetition;
            ``None``: all. In validation, and in a call without ``draws``, the blocks lie side by side. If the batch has a mask, the
            positions are drawn among those whose next token is in it; where these are too few, others fill up, and count nothing.
    Raises:
        ValueError: a number below 1; in a call: a text that is too short for one block.
    """

    k: int = 5
    anchors: int | None = None

    def __post_init__(self) -> None:
        at_least(1, "k", self.k, "give at least 1")
        if self.anchors is not None:
            at_least(1, "anchors", self.anchors, "give at least 1, or None for all positions")

    def layers(self, draft: Any) -> tuple[int, ...]:
        """As ``KPass.layers``."""
        return tuple(tap for tap in draft.taps if tap != "final")

    def __call__(
        self, draft: Any, batch: Batch, draws: Sequence[np.random.Generator] | None = None
    ) -> Drafted:
        """Blocks of a batch; ``draws``: a generator for each of its texts."""
        anchors = self.places(batch, draws)
        made = list(steps(draft, batch.tokens, layers_of(draft, batch), self.k, anchors))
        return self.of(draft, made, anchors)

    def of(self, draft: Any, made: Sequence[Step], anchors: Tensor) -> Drafted:
        """What the steps ``made`` after ``anchors`` say."""
        sure = [one.confidence for one in made if one.confidence is not None]
        return Drafted(
            torch.stack([one.logits for one in made], 2),
            anchors[..., None] + torch.arange(self.k, device=anchors.device),
            torch.stack(sure, 2) if sure else None,
        )

    def places(self, batch: Batch, draws: Sequence[np.random.Generator] | None = None) -> Tensor:
        """``[B, A]`` the positions after which the blocks of a batch begin, on its device."""
        tokens = batch.tokens
        count = tokens.shape[1] - 1 - self.k  # anchors 1 .. count
        if count < 1:
            raise ValueError(
                f"a text of {tokens.shape[1]} tokens is too short for blocks of k = {self.k}: use longer ones"
            )
        if draws is None:
            anchors = torch.arange(1, count + 1, self.k).expand(len(tokens), -1)
        elif self.anchors is None or self.anchors >= count:
            anchors = torch.arange(1, count + 1).expand(len(tokens), -1)
        else:
            shown = [None] * len(tokens) if batch.mask is None else batch.mask[:, 2 : count + 2].cpu().numpy()
            drawn = [_drawn(one, count, self.anchors, only) for one, only in zip(draws, shown, strict=True)]
            anchors = torch.from_numpy(np.stack(drawn) + 1)
        return anchors.to(tokens.device)


def _drawn(one: np.random.Generator, count: int, wanted: int, shown: Any) -> np.ndarray:
    """``wanted`` of ``count`` places, ascending: as many of those that ``shown [count]`` has as there are."""
    if shown is None:
        return np.sort(one.choice(count, wanted, replace=False))
    inside, outside = np.flatnonzero(shown), np.flatnonzero(~shown)
    drawn = one.choice(inside, min(wanted, len(inside)), replace=False)
    return np.sort(np.concatenate([drawn, outside[: wanted - len(drawn)]]))


@dataclass(frozen=True)
class Corrected(Blocks):
    """``Blocks`` of a head that is ``corrected``, with the logits of its block before they are corrected, for ``block_losses.WithBlock``.

    Args:
        rounds: how many passes the correction makes over its own most probable tokens (``anchored.rounds``), for ``WithBlock(rounds=...)``.
    Raises:
        ValueError: as for ``Blocks``, or fewer rounds than 0.
    """

    rounds: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, "rounds", self.rounds, "give 0 for none")

    def of(self, draft: Any, made: Sequence[Step], anchors: Tensor) -> Drafted:
        """As ``Blocks.of``."""
        block = draft.uncorrected(made[0].memo)[..., : self.k, :]
        again = tuple(rounds(draft, made, self.rounds)) if self.rounds else None
        return super().of(draft, made, anchors)._replace(block=block, rounds=again)


def drafted(forward: Any, draft: Any, batch: Batch, draws: Sequence[np.random.Generator] | None) -> Drafted:
    """What ``forward`` gives, as blocks: logits ``[B, T, V]`` are blocks of ``forward.k`` positions side by side, or of one if it has no k."""
    made = forward(draft, batch, draws) if isinstance(forward, Blocks) else forward(draft, batch)
    if isinstance(made, Drafted):
        return made
    T, k = made.shape[1], getattr(forward, "k", 1)
    at = torch.arange(T, device=made.device).expand(len(made), -1)
    return Drafted(made.unflatten(1, (T // k, k)), at.unflatten(1, (T // k, k)))


@dataclass(frozen=True)
class Parallel:
    """The ordinary forward of a transformers causal LM, with ``mask`` in every layer if it is given.

    Args:
        window, sinks: a query sees the last ``window`` positions, its own included, and the first ``sinks`` (the control "windowed
            vanilla"). mask: another mask instead, a ``masks.Mask`` of positions or a function.
    Raises:
        TypeError: a mask beside a window. ValueError: a mask that ``masks.for_model`` refuses, a window below 1, negative sinks.
    """

    window: int | None = None
    sinks: int = 1
    mask: Any = None
    shown: Mask = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mask is not None and self.window is not None:
            raise TypeError(f"mask is {self.mask!r} and window {self.window}: give one of them")
        plain = streaming(self.window, self.sinks)
        object.__setattr__(self, "shown", plain if self.mask is None else for_model(self.mask))

    def layers(self, draft: Any) -> tuple[int, ...]:
        return ()

    def __call__(self, draft: Any, batch: Batch) -> Tensor:
        """Logits ``[B, L, V]`` after every position."""
        tokens = batch.tokens[:, :-1]
        check_length(self.shown, tokens.shape[1])
        before = draft.config._attn_implementation
        draft.set_attn_implementation("specdec_band")
        try:  # the draft's attention setting is restored below
            made = draft.base_model(input_ids=tokens, use_cache=False, shown=self.shown)
        finally:
            draft.set_attn_implementation(before)
        head = draft.get_output_embeddings()
        return F.linear(made.last_hidden_state, head.weight, head.bias)


def band_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    shown: Mask | None = None,
    block: int = 128,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention under a mask of positions, ``shown``, one block of queries at a time against the keys that it may see.

    Plain matrix products: PyTorch's fused attention has a slow backward on CPUs in bf16. ``query [B, Hq, L, D]``.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(
            "a draft with a soft cap on scores or with sink logits cannot be trained here: use a llama-like one"
        )
    assert shown is not None
    reach = shown.reach
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    L, device = query.shape[2], query.device
    query, key = query * (scaling or query.shape[-1] ** -0.5), key.transpose(2, 3)
    block = block if reach is not None else 256
    outputs = []
    for start in range(0, L, block):
        stop = min(start + block, L)
        low = 0 if reach is None else max(0, start - max(reach.window, 1) + 1)
        at = torch.arange(low, stop, device=device)
        keys, values = key[..., low:stop], value[:, :, low:stop]
        if low and reach is not None and reach.sinks:  # sinks outside the band
            far = min(reach.sinks, low)
            at = torch.cat([torch.arange(far, device=device), at])
            keys, values = torch.cat([key[..., :far], keys], -1), torch.cat([value[:, :, :far], values], 2)
        q = torch.arange(start, stop, device=device)[:, None]
        seen = (at <= q) & sees(shown, q, at)
        if sliding_window is not None:
            seen = seen & (at > q - sliding_window)
        check_sight(shown, seen, q[:, 0])
        weights = (query[:, :, start:stop] @ keys).masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append(weights @ values)
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register("specdec_band", band_attention)
