"""SPIRe's parallel training forward: all blocks of k positions at once, in k passes (arXiv 2504.06419, section 3.3, figure 2).

The text is cut into blocks of k tokens. Pass j computes the j-th position of every block, after the memory vectors of the block's
earlier positions; those of positions before the block come from the target. At each position pass j computes what ``drafts.Spire``
computes for the j-th token of the same block: training and inference are the same function. All passes together cost about one
ordinary forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.drafts.spire.model import SpireModel
from specdec.masks import Mask, sees
from specdec.masks.sight import check_length, check_sight


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
        k: positions of a block. phase: where the first block starts; positions before it are only attended to.
        dense: attend through one mask over all positions (the plain reference) instead of a band.
    Returns:
        ``[B, n * k, V]`` of positions ``phase .. phase + n * k - 1``, n whole blocks.
    Raises:
        ValueError: no whole block, a negative phase, missing inputs, a position that the draft's mask shows nothing.
    """
    B, L = tokens.shape
    n = (L - phase) // k
    if phase < 0:
        raise ValueError(f"phase is {phase}: the position of the first block, 0 or later")
    if n < 1:
        raise ValueError(f"tokens has {L} positions: too few for a block of k = {k} at phase {phase}")
    lacking = [layer for layer in model.layers if layer not in inputs]
    if lacking:
        raise ValueError(
            f"inputs lacks layer {lacking[0]}: the draft reads the target's inputs of layers {list(model.layers)}"
        )
    check_length(model.mask, L)
    T, layers = n * k, range(len(model.layers))
    cos, sin = model.rotary(torch.arange(L, device=tokens.device))
    past = [model.keys_values(i, inputs[layer], (cos, sin)) for i, layer in enumerate(model.layers)]
    sight = _Sight(model.mask, k, phase, n, tokens.device)
    dense = dense or model.window is None or model.window < k
    look: list[_Band | _Dense] = [
        _Dense(*kv, sight) if dense else _Band(*kv, sight, model.sinks, model.window or 0) for kv in past
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


class _Sight:
    """What the j-th queries of all blocks see, computed once per j and shared by all layers.

    ``n`` blocks of ``k`` positions, the first of them at ``phase``.
    """

    def __init__(self, mask: Mask, k: int, phase: int, n: int, device: torch.device):
        self.mask, self.k, self.phase, self.n = mask, k, phase, n
        # [n, 1] first position of each block.
        self.start = phase + k * torch.arange(n, device=device)[:, None]
        self._made: dict[Any, Any] = {}

    def of(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of ``make``, cached under ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def near(self, j: int) -> Tensor | None:
        """``[n, j + 1]`` the positions of its own block that each query sees; ``None``: all."""

        def make() -> Tensor | None:
            seen = sees(self.mask, self.start + j, self.start + torch.arange(j + 1, device=self.start.device))
            return None if bool(seen.all()) else seen

        return self.of(("near", j), make)

    def check(self, j: int, *far: Tensor) -> None:
        """Raise ValueError if a query sees nothing, neither in its own block nor in ``far [n, ...]``."""
        near = self.near(j)
        if near is not None:
            check_sight(self.mask, torch.cat([near, *far], 1), (self.start + j)[:, 0])


class _Dense:
    """Attention of all blocks' j-th queries to the past through one mask, and to their own block."""

    def __init__(self, keys: Tensor, values: Tensor, sight: _Sight):
        self.keys, self.values = keys.transpose(1, 2), values.transpose(1, 2)  # [B, H, L, D]
        self.sight = sight

    def at(self, j: int, keys: list[Tensor], values: list[Tensor]):
        sight = self.sight

        def make() -> Tensor:
            position = torch.arange(self.keys.shape[2], device=self.keys.device)
            seen = (position < sight.start) & sees(sight.mask, sight.start + j, position)  # [n, L]
            sight.check(j, seen)
            return seen

        seen, beside = sight.of(("past", j), make), sight.near(j)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # query [B, n, Hq, D]
            q = query.transpose(1, 2) * query.shape[-1] ** -0.5
            group = q.shape[1] // key.shape[2]
            far = q @ _repeat(self.keys, group).transpose(2, 3)
            far = far.masked_fill(~seen, -math.inf)
            near, near_values = _near(q, [*keys, key], [*values, value], group, beside)
            weights = torch.cat([far, near], -1).softmax(-1)
            far, near = weights.split([far.shape[-1], near.shape[-1]], -1)
            out = far @ _repeat(self.values, group) + (near[..., None] * near_values).sum(-2)
            return out.transpose(1, 2)

        return attend


class _Band:
    """The same with a band: neighbouring blocks share a span of the past, so work grows with the mask's reach, not with the text."""

    def __init__(self, keys: Tensor, values: Tensor, sight: _Sight, sinks: int, window: int):
        k, n, phase = sight.k, sight.n, sight.phase
        self.sight, self.sinks, self.window = sight, sinks, window
        self.group = G = max(1, min(n, window // k))  # blocks that share a span
        self.chunks = C = -(-n // G)
        self.span = window - 1 + (G - 1) * k
        last = phase + (C - 1) * G * k + self.span
        stretch = [
            pad(t.transpose(1, 2), (0, 0, window - 1, max(0, last - (window - 1) - t.shape[1])))[
                :, :, phase:
            ].unfold(2, self.span, G * k)[:, :, :C]
            for t in (keys, values)
        ]  # [B, H, C, D, span]: positions first - (window - 1) .. of a chunk whose first block starts at first
        self.keys, self.values = stretch[0], stretch[1].transpose(3, 4)
        self.sink_keys, self.sink_values = keys[:, :sinks].transpose(1, 2), values[:, :sinks].transpose(1, 2)

    def _seen(self, j: int) -> tuple[Tensor, Tensor]:
        """Which positions are seen: ``[C, G, span]`` of the span, and ``[C * G, sinks]`` of the first positions."""
        sight, device = self.sight, self.keys.device
        G, C, k = self.group, self.chunks, sight.k
        start = k * torch.arange(G, device=device)[:, None]  # of each block, relative to its chunk
        offset = torch.arange(self.span, device=device) - (self.window - 1)
        first = sight.phase + G * k * torch.arange(C, device=device)[:, None, None]
        position = first + offset
        within = (offset < start) & (offset > start + j - self.window) & (position >= self.sinks)
        seen = within & sees(sight.mask, first + start + j, position.clamp(min=0))
        block = sight.phase + k * torch.arange(C * G, device=device)[:, None]
        sink = torch.arange(self.sink_keys.shape[2], device=device)
        sunk = (sink < block) & sees(sight.mask, block + j, sink)
        n = sight.n
        sight.check(j, seen.view(C * G, -1)[:n], sunk[:n])
        return seen, sunk

    def at(self, j: int, keys: list[Tensor], values: list[Tensor]):
        sight, G, C, n = self.sight, self.group, self.chunks, self.sight.n
        seen, sunk = sight.of(("past", j), lambda: self._seen(j))
        beside = sight.near(j)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            B, Hq, D = query.shape[0], query.shape[2], query.shape[3]
            q = query.transpose(1, 2) * D**-0.5
            group = Hq // key.shape[2]
            wide = pad(q, (0, 0, 0, C * G - n))
            far = wide.view(B, Hq, C, G, D) @ _repeat(self.keys, group)
            far = far.masked_fill(~seen, -math.inf).view(B, Hq, C * G, self.span)
            sink = (wide @ _repeat(self.sink_keys, group).transpose(2, 3)).masked_fill(~sunk, -math.inf)
            near, near_values = _near(q, [*keys, key], [*values, value], group, beside)
            weights = torch.cat([far[:, :, :n], sink[:, :, :n], near], -1).softmax(-1)
            far, sink, near = weights.split([self.span, sunk.shape[1], near.shape[-1]], -1)
            far = pad(far, (0, 0, 0, C * G - n)).view(B, Hq, C, G, self.span)
            out = (far @ _repeat(self.values, group)).view(B, Hq, C * G, D)[:, :, :n]
            out = out + sink @ _repeat(self.sink_values, group) + (near[..., None] * near_values).sum(-2)
            return out.transpose(1, 2)

        return attend


def _near(
    q: Tensor, keys: list[Tensor], values: list[Tensor], group: int, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores ``[B, Hq, n, m]`` against the block's m positions so far, masked by ``seen [n, m]``, and their values ``[B, Hq, n, m, D]``."""
    k, v = (_repeat(torch.stack(t, 2).permute(0, 3, 1, 2, 4), group) for t in (keys, values))
    scores = (q[..., None, :] * k).sum(-1)
    return scores if seen is None else scores.masked_fill(~seen, -math.inf), v


def _repeat(x: Tensor, group: int) -> Tensor:
    """KV heads repeated for their query heads."""
    return x if group == 1 else x.repeat_interleave(group, 1)
