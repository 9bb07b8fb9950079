"""Rotating stored keys: a key at position p becomes the same key at position p + n (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.configs import setting
from specdec.forward.families import UnsupportedModel
from specdec.kernels.attention import AttentionPlan
from specdec.kernels.device import to_device
from specdec.models.hf import HFModel

Table = tuple[Tensor, Tensor]


class Rotation:
    """Rotates keys of a model by some positions, after checking on the model itself that this equals moving them.

    Args:
        model: the keys of some tokens are compared at two positions, in all layers: a token that sees only itself has the same
            hidden states at any position, unless positions are learned.
    Raises:
        UnsupportedModel: keys cannot be rotated, because positions are learned or layers rotate differently.
    """

    def __init__(self, model: HFModel):
        body: Any = model.clone.base_model
        self.module = getattr(body, "rotary_emb", None)
        self.limit = model.max_positions
        self._table: Table | None = None
        family = model.clone.config.model_type
        rope = getattr(model.clone.config.get_text_config(), "rope_parameters", None) or {}
        why = None
        if self.module is None:
            why = "its positions are learned or are not rotations"
        elif any(isinstance(one, dict) for one in rope.values()):
            why = "its layers rotate keys differently"
        else:
            there, moved = _keys(model, 3), _keys(model, 14)
            for a, b in zip(there, moved):
                error = float((self(a, [11] * 4) - b).abs().max() / b.abs().max())
                if not error < (1e-3 if a.dtype.itemsize >= 4 else 5e-2):
                    why = f"rotating its keys gives other keys than moving them (relative error {error:.1e})"
        if why is not None:
            raise UnsupportedModel(
                f"positions inside the cache need keys that can be rotated, and those of {family!r} cannot: {why}; use "
                "positions='original'"
            )

    def __call__(self, keys: Tensor, by: Sequence[int]) -> Tensor:
        """``keys [..., B, S, H, D]`` rotated by ``by[b]`` positions towards the end of the text."""
        at = to_device(torch.tensor(list(by)), keys.device)
        return turned(keys, self.table(max(by) + 1, keys), at)

    def table(self, count: int, like: Tensor) -> Table:
        """Cosines and sines ``[at least count, r]`` of 0, 1, ... positions, as far as the model has them; a step uses a few rows."""
        table = self._table
        if table is None or len(table[0]) < count or table[0].device != like.device:
            # At most the model's positions: scalings that depend on the length would change the model's own frequencies.
            size = min(max(2 * count, 1024), self.limit or 2 * count)
            positions = torch.arange(size, device=like.device)[None]
            module: Any = self.module
            with torch.inference_mode(False):
                x = torch.zeros(1, dtype=like.dtype, device=like.device)
                cos, sin = module(x, positions)
                # Some scalings of the context also multiply keys and queries; stored keys have that factor already.
                scaling = setting(module, "attention_scaling") or 1.0
                table = self._table = (cos[0] / scaling, sin[0] / scaling)
        return table


def turned(keys: Tensor, table: Table, by: Tensor) -> Tensor:
    """``keys [..., B, S, H, D]`` rotated by ``by [B]`` positions of a ``Rotation.table``, in operators that can be captured."""
    cos, sin = (part[by][:, None, None] for part in table)  # [B, 1, 1, r]
    r = cos.shape[-1]
    part = keys[..., :r]
    half = torch.cat([-part[..., r // 2 :], part[..., : r // 2]], -1)
    made = part * cos + half * sin
    return made if r == keys.shape[-1] else torch.cat([made, keys[..., r:]], -1)


def _keys(model: HFModel, position: int) -> list[Tensor]:
    """Each layer's keys ``[4, 1, H, D]`` of some tokens at ``position``, each of which sees only itself."""
    store, ids = _Alone(), torch.linspace(0, model.vocab_size - 1, 4).long().to(model.device)
    with torch.inference_mode():
        plan = AttentionPlan(range(4), [0] * 4, [1] * 4, 1)
        model._path.forward(store, plan, ids, torch.full_like(ids, position), False)
    return store.keys


class _Alone(KVStore):
    """Stands in for a cache while tokens are fed that see only themselves, and keeps their keys."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (t[0].transpose(0, 1)[:, None] for t in (key, value))  # [4, 1, H, D]
        self.keys.append(keys)
        return keys, values
