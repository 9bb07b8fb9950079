"""The blocks of SPIRe's draft on a GPU in half precision, with one launch for the operators between two products (``forward.llama_triton``).

With merged products and one launch for attention, a block is nine launches, and the keys and values of a layer's memory vectors are three.
Operator by operator they are several times as many, and a captured chain waits for each.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specdec.cache.contract import KVStore
from specdec.forward.llama_eager import LlamaEager
from specdec.forward.llama_triton import Launches, LlamaTriton
from specdec.kernels.attention import AttentionPlan
from specdec.kernels.pointwise import Place


class SpireLaunches:
    """For the ``body`` of a ``SpireModel`` that ``LlamaTriton`` suits. Stores hold entries as they are (``KVStore.direct``).

    Args:
        merged: as for ``Launches.of``.
    """

    def __init__(self, body: Any, merged: bool | None = None):
        self.path = LlamaEager(body)
        # Stores number layers from 0, and the draft's mask has the blocks' own windows in it.
        self.path.blocks = [b._replace(layer=i, window=None) for i, b in enumerate(self.path.blocks)]
        self.ops = Launches.of(self.path.blocks, merged)

    @staticmethod
    def of(body: Any) -> SpireLaunches | None:
        """For a body that ``LlamaTriton`` suits where it is now; ``None`` for others."""
        return SpireLaunches(body) if LlamaTriton.suits(body) else None

    def refresh(self) -> None:
        """Make copies of weights, or bring them up to date; not while a step is captured."""
        self.ops = self.ops.refreshed()

    def run(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], store: KVStore, plan: AttentionPlan
    ) -> list[Tensor]:
        """``x [T, E]`` through all blocks, whose keys and values are stored: the input of the first, and the output of each."""
        caught: dict[int, list[Tensor]] = {i: [] for i in range(len(self.path.blocks) + 1)}
        self.path.run(self.ops, x.contiguous(), _angles(rotary), store, plan, False, caught)
        return [found for (found,) in caught.values()]

    def remember(
        self, layer: int, x: Tensor, rotary: tuple[Tensor, Tensor], slots: Tensor, store: KVStore
    ) -> None:
        """Store keys and values of ``x [T, E]`` in flat ``slots [T]`` of a layer."""
        b, direct = self.path.blocks[layer], store.direct
        assert direct is not None
        _, y = self.ops.add_norm(x.contiguous(), None, b.before)
        key, value = (t.view(len(t), -1, b.size) for t in self.ops.products(y, b.key, b.value))
        self.ops.rotate(b, key[:, :0], key, value, _angles(rotary), Place(*direct[layer], slots))


def _angles(rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = (t.squeeze(-2).contiguous() for t in rotary)
    return cos, sin
