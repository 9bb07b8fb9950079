"""What a forward needs of a KV cache: a place for new keys and values, and what its queries then see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec.kernels.native.blocks import Buffers


class KVStore(Protocol):
    """Stores the keys and values of a forward, layer by layer, and returns what each layer's attention reads.

    Caches are stores, and so are stand-ins that return something else than a cache's contents (a prompt beside a ring, one probed token).
    ``tests/contracts/test_kv_store.py`` tests every implementation. A class that derives from ``KVStore`` need only define ``append``.
    """

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``key [1, H, T, D]`` and ``value [1, H, T, Dv]`` into flat ``slots [T]`` of ``layer``.

        Slot ``s`` of row ``b`` has the flat number ``b * slots + s``, slot ``s`` of page ``p`` the number ``p * page + s``. The slots
        of one call differ from each other.

        Returns:
            what attention reads: keys ``[B, S, H, D]`` and values ``[B, S, H, Dv]``, the new entries included.
        """
        ...

    @property
    def direct(self) -> Sequence[tuple[Tensor, Tensor]] | None:
        """Each layer's keys and values ``[B, S, H, D]``, if writing into them is all that ``append`` does, else ``None``. Kernels that
        store keys and values themselves write there."""
        return None

    @property
    def buffers(self) -> Buffers | None:
        """``direct`` as C kernels take it, or ``None`` where they cannot."""
        return None
