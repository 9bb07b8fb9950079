"""SPIRe's parallel training forward: all blocks of k positions at once, in k passes (arXiv 2504.06419, section 3.3, figure 2).

The text is cut into blocks of k tokens. Pass j computes the j-th position of every block, so that the memory vectors of a block's
earlier positions are there when they are needed; positions before the block come from the target. What pass j computes at a
position is what ``drafts.Spire`` computes for the j-th token of a block that starts there: training and inference are the same
function. All passes together cost about one ordinary forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.drafts.spire.model import SpireModel


def k_pass(
    model: SpireModel,
    tokens: Tensor,
    inputs: Mapping[int, Tensor],
    k: int = 4,
    phase: int = 0,
    dense: bool = False,
) -> Tensor:
    """The draft's logits after every position of every whole block.

    Args:
        tokens: ``[B, L]``. inputs: layer of the target -> ``[B, L, E]``, its input (counted from 0), for ``model.layers``.
        k: positions of a block. phase: where the first block starts; positions before it are only looked back at.
        dense: attend through one mask over all positions (the plain form of the same function) instead of a band.
    Returns:
        ``[B, n * k, V]`` of positions ``phase .. phase + n * k - 1``, n whole blocks.
    Raises:
        ValueError: no whole block, a negative phase, a window shorter than a block, missing inputs.
    """
    B, L = tokens.shape
    n = (L - phase) // k
    if phase < 0:
        raise ValueError(f"phase is {phase}: the position of the first block, 0 or later")
    if n < 1:
        raise ValueError(f"tokens has {L} positions: too few for a block of k = {k} at phase {phase}")
    if model.window is not None and model.window < k:
        raise ValueError(
            f"window is {model.window}: a window shorter than a block of k = {k} cannot be trained in passes"
        )
    lacking = [layer for layer in model.layers if layer not in inputs]
    if lacking:
        raise ValueError(
            f"inputs lacks layer {lacking[0]}: the draft reads the target's inputs of layers {list(model.layers)}"
        )
    T, layers = n * k, range(len(model.layers))
    cos, sin = model.rotary(torch.arange(L, device=tokens.device))
    past = [model.keys_values(i, inputs[layer], (cos, sin)) for i, layer in enumerate(model.layers)]
    look: list[_Band | _Dense] = [
        _Dense(*kv, model.sinks, model.window, k, phase, n)
        if model.window is None or dense
        else _Band(*kv, model.sinks, model.window, k, phase, n)
        for kv in past
    ]
    x0 = model.embed(tokens[:, phase : phase + T]).view(B, n, k, -1)
    turns = [t[phase : phase + T].view(n, k, *t.shape[1:]) for t in (cos, sin)]
    block: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in layers]
    outputs: list[Tensor] = []
    for j in range(k):
        rotary = (turns[0][:, j], turns[1][:, j])
        x = x0[:, :, j]
        activations, own = [x], []
        for i in layers:
            attend = look[i].at(j, *block[i])
            x, key, value = model.run(i, x, rotary, attend)
            activations.append(x)
            own.append((key, value))
        outputs.append(x)
        if j + 1 < k:
            if model.memory is not None:
                memory = model.memory(activations)
                own = [model.keys_values(i, memory[i], rotary) for i in layers]
            for (keys, values), (key, value) in zip(block, own):
                keys.append(key)
                values.append(value)
    return model.logits(torch.stack(outputs, 2).flatten(1, 2))


class _Dense:
    """Attention of all blocks' j-th queries to the past through one mask, and to their own block."""

    def __init__(
        self, keys: Tensor, values: Tensor, sinks: int, window: int | None, k: int, phase: int, n: int
    ):
        self.keys, self.values = keys.transpose(1, 2), values.transpose(1, 2)  # [B, H, L, D]
        self.sinks, self.window, self.k = sinks, window, k
        self.start = phase + k * torch.arange(n, device=keys.device)  # [n] first position of each block

    def at(self, j: int, keys: list[Tensor], values: list[Tensor]):
        position = torch.arange(self.keys.shape[2], device=self.keys.device)
        seen = position < self.start[:, None]  # [n, L]
        if self.window is not None:
            seen &= (position > self.start[:, None] + j - self.window) | (position < self.sinks)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # query [B, n, Hq, D]
            q = query.transpose(1, 2) * query.shape[-1] ** -0.5
            group = q.shape[1] // key.shape[2]
            far = q @ _repeat(self.keys, group).transpose(2, 3)
            far = far.masked_fill(~seen, -math.inf)
            near, near_values = _near(q, [*keys, key], [*values, value], group)
            weights = torch.cat([far, near], -1).softmax(-1)
            far, near = weights.split([far.shape[-1], near.shape[-1]], -1)
            out = far @ _repeat(self.values, group) + (near[..., None] * near_values).sum(-2)
            return out.transpose(1, 2)

        return attend


class _Band:
    """The same, where neighbouring blocks share a stretch of the past: work grows with the window, not with the text."""

    def __init__(self, keys: Tensor, values: Tensor, sinks: int, window: int, k: int, phase: int, n: int):
        self.sinks, self.window, self.k, self.n = sinks, window, k, n
        self.group = G = max(1, min(n, window // k))  # blocks that share a stretch
        self.chunks = C = -(-n // G)
        self.phase, self.span = phase, window - 1 + (G - 1) * k
        last = phase + (C - 1) * G * k + self.span
        stretch = [
            pad(t.transpose(1, 2), (0, 0, window - 1, max(0, last - (window - 1) - t.shape[1])))[
                :, :, phase:
            ].unfold(2, self.span, G * k)[:, :, :C]
            for t in (keys, values)
        ]  # [B, H, C, D, span]: positions first - (window - 1) .. of a chunk whose first block starts at first
        self.keys, self.values = stretch[0], stretch[1].transpose(3, 4)
        self.sink_keys, self.sink_values = keys[:, :sinks].transpose(1, 2), values[:, :sinks].transpose(1, 2)

    def at(self, j: int, keys: list[Tensor], values: list[Tensor]):
        G, C, n, k, device = self.group, self.chunks, self.n, self.k, self.keys.device
        start = k * torch.arange(G, device=device)[:, None]  # of each block, from its chunk's first
        offset = torch.arange(self.span, device=device) - (self.window - 1)
        first = self.phase + G * k * torch.arange(C, device=device)[:, None, None]
        seen = (
            (offset < start) & (offset > start + j - self.window) & (first + offset >= self.sinks)
        )  # [C, G, span]
        block = self.phase + k * torch.arange(C * G, device=device)[:, None]
        sunk = torch.arange(self.sink_keys.shape[2], device=device) < block  # [C * G, sinks]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            B, Hq, D = query.shape[0], query.shape[2], query.shape[3]
            q = query.transpose(1, 2) * D**-0.5
            group = Hq // key.shape[2]
            wide = pad(q, (0, 0, 0, C * G - n))
            far = wide.view(B, Hq, C, G, D) @ _repeat(self.keys, group)
            far = far.masked_fill(~seen, -math.inf).view(B, Hq, C * G, self.span)
            sink = (wide @ _repeat(self.sink_keys, group).transpose(2, 3)).masked_fill(~sunk, -math.inf)
            near, near_values = _near(q, [*keys, key], [*values, value], group)
            weights = torch.cat([far[:, :, :n], sink[:, :, :n], near], -1).softmax(-1)
            far, sink, near = weights.split([self.span, sunk.shape[1], near.shape[-1]], -1)
            far = pad(far, (0, 0, 0, C * G - n)).view(B, Hq, C, G, self.span)
            out = (far @ _repeat(self.values, group)).view(B, Hq, C * G, D)[:, :, :n]
            out = out + sink @ _repeat(self.sink_values, group) + (near[..., None] * near_values).sum(-2)
            return out.transpose(1, 2)

        return attend


def _near(q: Tensor, keys: list[Tensor], values: list[Tensor], group: int) -> tuple[Tensor, Tensor]:
    """Scores ``[B, Hq, n, m]`` against the block's m positions so far, and their values ``[B, Hq, n, m, D]``."""
    k, v = (_repeat(torch.stack(t, 2).permute(0, 3, 1, 2, 4), group) for t in (keys, values))
    return (q[..., None, :] * k).sum(-1), v


def _repeat(x: Tensor, group: int) -> Tensor:
    """KV heads as often as there are query heads a KV head."""
    return x if group == 1 else x.repeat_interleave(group, 1)
