"""bfloat16 copies of float32 weights whose values are exact in bfloat16, as in most checkpoints: half the bytes, the same products.

If the processor has matrix units, each float32 input is split exactly into three bfloat16 numbers (``split.c``); otherwise weights
are widened in the vector unit. Sums are float32 in both cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import addressof, c_uint64
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from specdec.kernels.allocation import ALIGNED, empty
from specdec.kernels.native.build import function, library, reason
from specdec.kernels.native.ops import linear_takes

CHANGED = (
    "weights of the model were cast, replaced, or changed to numbers that bfloat16 would round, after their bfloat16 copies were made: "
    "wrap the model again, with bf16_weights None or False"
)


class _Copy:
    """The copy ``made`` of ``weight``."""

    def __init__(self, weight: Tensor, made: Tensor):
        self.weight, self.made = weight, made
        self.seen = c_uint64()  # the fingerprint of the weight that was copied


# By the weight's id, while in use: models that share a weight share its copy.
_COPIES: WeakValueDictionary[int, _Copy] = WeakValueDictionary()


class Narrow:
    """Copies of weights ``[O, E]``, by the weight. Those that are made together share one piece of memory, which stays until the last of them is gone.

    Args:
        weights: of products. They are kept, so that ``refresh`` can read them again.
    Raises:
        RuntimeError: the C kernels are not available. ValueError: a weight is not float32 on the CPU with sizes that are multiples
            of 16, or has values that bfloat16 would round.
    """

    def __init__(self, weights: Iterable[Tensor]):
        if library() is None:
            raise RuntimeError(f"bf16_weights needs the C kernels, and there are none: {reason()}")
        wanted = {id(weight): weight for weight in weights}
        for weight in wanted.values():
            if not _takes(weight):
                raise ValueError(
                    f"bf16_weights is True and a weight is {tuple(weight.shape)}, {weight.dtype}, on {weight.device}: it is for float32 models "
                    "on the CPU whose sizes are multiples of 16; leave it None, or load the model with dtype=torch.float32"
                )
        found = {key: _COPIES.get(key) for key in wanted}
        self._copies = {
            key: copy for key, copy in found.items() if copy and copy.made.shape == wanted[key].shape
        }
        self._copies |= _unwritten([weight for key, weight in wanted.items() if key not in self._copies])
        for copy in self._copies.values():
            if not _written(copy):
                raise ValueError(
                    f"bf16_weights is True and a weight {tuple(copy.made.shape)} has numbers that bfloat16 would round: leave it None, or round "
                    "them first (model.to(torch.bfloat16).float())"
                )
        _COPIES.update(self._copies)

    @classmethod
    def where_exact(cls, weights: Iterable[Tensor]) -> Narrow | None:
        """Copies, or ``None`` where they cannot be made, exactly and in the available memory."""
        try:
            return cls(weights)
        except (ValueError, RuntimeError, MemoryError):
            return None

    def __reduce__(self) -> Any:  # a copied model has other weight objects
        return _restored, ([copy.weight for copy in self._copies.values()],)

    def __getitem__(self, weight: Tensor) -> Tensor:
        """The copy of a weight, in the internal layout of ``linear``.

        Raises:
            RuntimeError: the weight was not copied, or was cast since.
        """
        found = self._copies.get(id(weight))
        if found is None or weight.dtype != torch.float32:
            raise RuntimeError(CHANGED)
        return found.made

    @property
    def bytes(self) -> int:
        """Bytes of all copies, in addition to the weights."""
        return sum(copy.made.nbytes for copy in self._copies.values())

    def refresh(self) -> bool:
        """Read all weights, and copy those that have changed; False if that is not possible exactly."""
        return all(
            _takes(copy.weight) and copy.weight.shape == copy.made.shape and _written(copy)
            for copy in self._copies.values()
        )


def _restored(weights: list[Tensor]) -> Narrow:
    """Copies of weights that may have changed, which the next ``refresh`` will notice."""
    made = Narrow(())
    made._copies = _unwritten(weights)
    _COPIES.update(made._copies)
    for copy in made._copies.values():
        if _takes(copy.weight):
            _written(copy)
    return made


def _unwritten(weights: list[Tensor]) -> dict[int, _Copy]:
    """Copies that are still to be made, by the weight's id, in one piece of memory, which is read faster than many."""
    sizes = [-(-weight.numel() * 2 // ALIGNED) * ALIGNED for weight in weights]
    parts = empty(sum(sizes)).split(sizes)
    return {
        id(weight): _Copy(weight, part[: weight.numel() * 2].view(torch.bfloat16).view(weight.shape))
        for weight, part in zip(weights, parts)
    }


def _takes(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and linear_takes(weight, None)


def _written(copy: _Copy) -> bool:
    """Whether the copy is now equal to its weight, which bfloat16 may not be able to express."""
    code = function("narrow", "ppllp")(
        copy.weight.data_ptr(), copy.made.data_ptr(), *copy.made.shape, addressof(copy.seen)
    )
    if code == 2:
        raise MemoryError(f"no memory to copy a weight {tuple(copy.made.shape)}")
    return code == 0
