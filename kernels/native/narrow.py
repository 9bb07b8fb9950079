"""bfloat16 copies of float32 weights that are bfloat16 numbers, as a checkpoint's mostly are: half the bytes to read, the same products.

Where the processor has matrix units, each float32 input is multiplied as the sum of three bfloat16 numbers that it is (``split.c``);
elsewhere weights are widened in the vector unit. Either way sums are of float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor

from specdec.kernels.native.build import library, reason
from specdec.kernels.native.ops import linear_takes

CHANGED = "weights of the model were changed or cast after their bfloat16 copies were made: wrap the model again, or leave bf16_weights False"
LOOKED_AT = 256  # numbers of a weight


@dataclass(frozen=True, eq=False)
class _Copy:
    """``made`` from a weight that had counted ``version`` changes; ``some`` of its numbers, every ``step``-th."""

    weight: ReferenceType[Tensor]
    made: Tensor
    version: int
    some: Tensor
    step: int

    def stands(self) -> bool:
        """Whether the weight is still what was copied, as far as a look tells."""
        weight = self.weight()
        if weight is None or weight.dtype != torch.float32 or _version(weight) != self.version:
            return False
        return weight.shape == self.made.shape and torch.equal(_some(weight, self.step), self.some)


# By the weight's id, for as long as somebody reads them: models that share a weight share its copy.
_COPIES: WeakValueDictionary[int, _Copy] = WeakValueDictionary()


class Narrow:
    """Copies of weights ``[O, E]``, by the weight.

    Args:
        weights: of products. They are kept, and ``check`` says whether they are as they were.
    Raises:
        RuntimeError: there are no C kernels. ValueError: a weight is not float32 on the CPU with sizes that are multiples of 16,
            or has numbers that bfloat16 would round.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self._weights: dict[int, tuple[Tensor, _Copy]] = {}
        for weight in weights:
            if id(weight) not in self._weights:
                copy = _COPIES.get(id(weight))
                if copy is None or copy.weight() is not weight or not copy.stands():
                    copy = _COPIES[id(weight)] = _copied(weight)
                self._weights[id(weight)] = weight, copy

    def __reduce__(self) -> Any:  # a copy's weights are other objects
        return Narrow, ([weight for weight, _ in self._weights.values()],)

    def __getitem__(self, weight: Tensor) -> Tensor:
        """The copy of a weight, as ``linear`` reads it: not for other use.

        Raises:
            RuntimeError: it is none of those that were copied, or was cast.
        """
        found = self._weights.get(id(weight))
        if found is None or weight.dtype != torch.float32:
            raise RuntimeError(CHANGED)
        return found[1].made

    @property
    def bytes(self) -> int:
        """Of all copies, beside the weights'."""
        return sum(copy.made.nbytes for _, copy in self._weights.values())

    def check(self) -> None:
        """Raise RuntimeError where a weight is not what was copied: by PyTorch's count of changes, and by a look at some of its numbers.

        (Fused optimisers and writes through ``.data`` are not counted; the look finds them if they changed more than a few numbers.)
        """
        if not all(copy.stands() for _, copy in self._weights.values()):
            raise RuntimeError(CHANGED)


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def _some(weight: Tensor, step: int) -> Tensor:
    return weight.detach().reshape(-1)[::step]


def _copied(weight: Tensor) -> _Copy:
    lib = library()
    if lib is None:
        raise RuntimeError(f"bf16_weights needs the C kernels, and there are none: {reason()}")
    if weight.dtype != torch.float32 or not linear_takes(weight, None):
        raise ValueError(
            f"bf16_weights is True and a weight is {tuple(weight.shape)}, {weight.dtype}, on {weight.device}: it is for float32 models on the "
            "CPU whose sizes are multiples of 16; leave it False, or load the model with dtype=torch.float32"
        )
    made = torch.empty(weight.shape, dtype=torch.bfloat16, device="cpu")
    lib.narrow.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
    if lib.narrow(weight.data_ptr(), made.data_ptr(), *weight.shape):
        raise ValueError(
            f"bf16_weights is True and a weight {tuple(weight.shape)} has numbers that bfloat16 would round: leave it False, or round "
            "them first (model.to(torch.bfloat16).float())"
        )
    step = max(1, weight.numel() // LOOKED_AT) | 1  # odd, so that it does not stay in a column
    return _Copy(ref(weight), made, _version(weight), _some(weight, step).clone(), step)
