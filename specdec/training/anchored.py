"""The teacher-forced forward of a head: blocks from many anchors of whole texts at once, each the function that decoding computes.

With every position as an anchor and one slot a step this is EAGLE-3's training-time test (arXiv 2503.01840, section 3.2); with a few anchors
and a block of slots it is DFlash's training. ``tests/test_heads.py`` compares it with live decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.drafts.heads.contract import Sight
from specdec.drafts.heads.features import Features, Tap
from specdec.drafts.heads.model import HeadModel
from specdec.masks import Mask, sees
from specdec.training.states import Batch


def blocks(
    head: HeadModel, tokens: Tensor, layers: Mapping[Tap, Tensor], k: int, anchors: Tensor | None = None
) -> Tensor:
    """The head's logits for ``k`` tokens after every anchor, where the tokens of the block are the text's: those of ``steps``.

    Returns:
        ``[B, A, k, V]``; entry ``[b, i, n]`` is over ``tokens[b, anchors[b, i] + 1 + n]``, or ``[..., K]`` over a reduced vocabulary.
    """
    return torch.stack([one.logits for one in steps(head, tokens, layers, k, anchors)], 2)


class Step(NamedTuple):
    """One step of all blocks.

    Attributes:
        logits: ``[B, A, V]``, or ``[B, A, K]`` over a reduced vocabulary. confidence: ``[B, A]`` logits, of a head that has one. memo: what the
            head's step returned beside its logits.
    """

    logits: Tensor
    confidence: Tensor | None
    memo: Any


def steps(
    head: HeadModel, tokens: Tensor, layers: Mapping[Tap, Tensor], k: int, anchors: Tensor | None = None
) -> Iterator[Step]:
    """The head's ``k`` steps after every anchor, where the tokens of the block are the text's.

    Args:
        head: bound to its target. tokens: ``[B, L]``. layers: tap -> ``[B, T, E]``, the target's activations at the first T <= L - 1
            positions. anchors: ``[B, A]`` positions from 1 to T; a block of an anchor ``a`` begins with the prediction of
            ``tokens[a + 1]``. ``None``: all for which the text has the whole block, 1 to ``L - 1 - k``.
    Yields:
        Step n, whose logits are over ``tokens[b, anchors[b, i] + 1 + n]``.
    Raises:
        ValueError: no anchors, anchors outside of the text, or a block longer than the head's.
    """
    if head.longest is not None and k > head.longest:
        raise ValueError(f"k is {k}, and this {type(head).__name__} proposes at most {head.longest} tokens")
    B, L = tokens.shape
    T = next(iter(layers.values())).shape[1]
    if anchors is None:
        anchors = torch.arange(1, L - k, device=tokens.device).expand(B, -1)
    if not anchors.numel() or int(anchors.min()) < 1 or int(anchors.max()) > min(T, L - k):
        raise ValueError(
            f"anchors must be positions from 1 to {min(T, L - k)}, of a text of {L} tokens with {T} positions of activations and blocks of {k}"
        )
    lead, features = int(head.leading), Features(layers, tokens[:, :T], tokens[:, 1 : T + 1])
    if lead:
        zeros = {tap: F.pad(x, (0, 0, 1, 0)) for tap, x in layers.items()}
        features = Features(zeros, F.pad(features.tokens, (1, 0)), tokens[:, : T + 1])
    text = _Texts(head.mask, T + lead, tokens.device)
    carry = head.read(features, text)
    at = _TextAnchors(text, anchors + lead)
    row = torch.arange(B, device=tokens.device)[:, None]
    memo: Any = None if carry is None else carry[row, anchors + lead - 1]
    for n in range(k):
        token = tokens[row, anchors + n]
        logits, memo = head.step(n, memo, token, at)
        yield Step(logits, head.confidence(n, memo, token) if head.confident else None, memo)


def rounds(head: HeadModel, said: Sequence[Step], count: int) -> list[Tensor]:
    """Further passes of a head's correction over blocks that ``steps`` computed, without its block: each reads the most probable tokens of the pass before, and the first those of
    the block before it is corrected. That is how XPress iterates in decoding (arXiv 2608.02438).

    Returns:
        ``count`` tensors ``[B, A, k, V]``; no gradient flows through the tokens.
    """
    memo, k = said[0].memo, len(said)
    logits, made = head.uncorrected(memo), []
    nowhere: Any = None  # only the first step computes slots
    for _ in range(count):
        best = logits.detach()[..., : k - 1, :].argmax(-1)
        tokens = best if head.d2t is None else head.ids[best]
        each, now = [said[0].logits], memo
        for n in range(1, k):
            one, now = head.step(n, now, tokens[..., n - 1], nowhere)
            each.append(one)
        logits = torch.stack(each, 2)
        made.append(logits)
    return made


def layers_of(head: HeadModel, batch: Batch) -> dict[Tap, Tensor]:
    """A batch's states as ``blocks`` takes them: ``batch.inputs`` must have the head's taps of layers."""
    return {tap: batch.final if tap == "final" else batch.inputs[tap] for tap in head.taps}


class _Texts:
    """``contract.Pass`` over whole texts: each position sees those up to its own. It keeps the keys and values of each layer."""

    kernels: Mapping[Any, Any] = {}  # gradients are needed

    def __init__(self, mask: Mask | None, length: int, device: torch.device):
        self.mask, self.positions = mask, torch.arange(length, device=device)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen = _shown(mask, self.positions[:, None], self.positions) & (
            self.positions <= self.positions[:, None]
        )

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.kept[layer] = (key, value)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.store(layer, key, value)
        group = query.shape[-2] // key.shape[-2]
        key, value = (t.repeat_interleave(group, -2) for t in (key, value))
        scores = torch.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~self.seen, float("-inf")).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", weights, value).flatten(-2)

    def narrowed(self, sight: Sight) -> _Texts:
        made = copy.copy(self)  # what is kept is shared
        made.seen = self.seen & (self.positions > self.positions[:, None] - sight.window)
        return made


class _TextAnchors:
    """``contract.Anchors`` over texts, ``[B, A]``; it keeps the blocks' own keys and values of each layer."""

    def __init__(self, text: _Texts, anchors: Tensor):
        self.text, self.anchors = text, anchors
        self.offsets = anchors.new_zeros(0)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def count(self, most: int) -> int:
        return most

    def slots(self, first: int, count: int | None = None, full: bool = False) -> _BlockPass:
        wide = 1 if count is None else count
        offsets = torch.arange(first, first + wide, device=self.anchors.device)
        earlier, self.offsets = len(self.offsets), torch.cat([self.offsets, offsets])
        near = torch.ones(wide, len(self.offsets), dtype=torch.bool, device=offsets.device)
        if not full:
            near = near.tril(earlier)
        return _BlockPass(self, offsets, near, earlier, count is None)


class _BlockPass:
    """``contract.Pass`` over the slots of one step of every anchor, ``[B, A]`` or ``[B, A, s]``."""

    kernels: Mapping[Any, Any] = {}

    def __init__(self, at: _TextAnchors, offsets: Tensor, near: Tensor, earlier: int, single: bool):
        self.at, self.offsets, self.earlier, self.single = at, offsets, earlier, single
        query = at.anchors[..., None] + offsets  # [B, A, s]
        self.positions = query[..., 0] if single else query
        past, own = at.text.positions, at.anchors[..., None] + at.offsets  # [T], [B, A, m]
        mask = at.text.mask
        far = (past < at.anchors[..., None, None]) & _shown(mask, query[..., None], past)
        self.seen = torch.cat(
            [
                far.expand(*query.shape, -1),
                (near & _shown(mask, query[..., None], own[..., None, :])).expand(*query.shape, -1),
            ],
            -1,
        )

    def narrowed(self, sight: Sight) -> _BlockPass:
        made, anchors = copy.copy(self), self.at.anchors
        query = anchors[..., None] + self.offsets
        lowest = (anchors[..., None] if sight.fixed else query + 1) - sight.window  # [B, A, s] or [B, A, 1]
        near = self.at.text.positions >= lowest[..., None]
        own = (self.at.offsets <= self.offsets[:, None]) | (not sight.causal)  # [s, m]
        both = [t.expand(*query.shape, -1) for t in (near, own)]
        made.seen = self.seen & torch.cat(both, -1)
        return made

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        new = [t[:, :, None] if self.single else t for t in (key, value)]
        if self.earlier:  # without what this pass stored before
            old = [t[:, :, : self.earlier] for t in self.at.kept[layer]]
            new = [torch.cat(pair, 2) for pair in zip(old, new)]
        self.at.kept[layer] = (new[0], new[1])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.store(layer, key, value)
        query = query[:, :, None] if self.single else query
        group, scale = query.shape[-2] // key.shape[-2], query.shape[-1] ** -0.5
        far, past = (t.repeat_interleave(group, -2) for t in self.at.text.kept[layer])
        near, own = (t.repeat_interleave(group, -2) for t in self.at.kept[layer])
        scores = torch.cat(
            [torch.einsum("bashd,bthd->bahst", query, far), torch.einsum("bashd,bamhd->bahsm", query, near)],
            -1,
        )
        weights = (scores * scale).masked_fill(~self.seen[:, :, None], float("-inf")).softmax(-1)
        of_past, of_own = weights.split([past.shape[1], own.shape[2]], -1)
        out = torch.einsum("bahst,bthd->bashd", of_past, past) + torch.einsum(
            "bahsm,bamhd->bashd", of_own, own
        )
        return (out[:, :, 0] if self.single else out).flatten(-2)


def _shown(mask: Mask | None, query: Tensor, key: Tensor) -> Tensor:
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=query.device)
    return sees(mask, query, torch.minimum(key, query))
