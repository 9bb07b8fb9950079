"""The shapes of keys and values of each layer, found by feeding one token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.cache.slots import KVShape
from specdec.forward.contract import Runner
from specdec.kernels.attention import AttentionPlan
from specdec.kernels.device import own_precision
from specdec.kernels.float8 import rounded


class Probe(KVStore):
    """Stands in for a cache while one token is fed, and records what each layer would store, rounded to ``dtype`` if there is one.

    Attributes:
        shapes: layer -> shapes of its keys and values.
    """

    def __init__(self, slots: int = 1, dtype: torch.dtype | None = None) -> None:
        self.slots, self.dtype = slots, dtype
        self.shapes: dict[int, KVShape] = {}

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As ``KVStore.append``, of one token."""
        dtype = self.dtype or key.dtype
        self.shapes[layer] = KVShape(key.shape[1], key.shape[3], value.shape[3], dtype, key.device)
        spare = (0, 0, 0, 0, 0, self.slots - 1)  # a page has all its slots
        keys, values = (rounded(F.pad(t.transpose(1, 2), spare), dtype) for t in (key, value))
        return keys, values


def kv_shapes(
    path: Runner, page: int | None, device: torch.device, dtype: torch.dtype | None = None
) -> list[KVShape]:
    """The shapes of each layer's keys and values, which are kept in ``dtype`` (default: as they are made).

    Raises:
        LookupError: some layers store no keys and values.
    """
    probe = Probe(page or 1, dtype)
    if page is None:
        plan = AttentionPlan([0], [0], [1], 1 + path.spare)
    else:
        plan = AttentionPlan([0], [0], [1], page, table=[[0]], page=page)
    token = torch.zeros(1, dtype=torch.long, device=device)
    with torch.inference_mode(), own_precision():
        path.forward(probe, plan, token, token, False)
    if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
        raise LookupError(f"only layers {sorted(probe.shapes)} keep keys and values")
    return [probe.shapes[i] for i in range(len(probe.shapes))]
