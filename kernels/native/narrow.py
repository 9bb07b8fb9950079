"""bfloat16 copies of float32 weights whose values are exact in bfloat16, as in most checkpoints: half the bytes, the same products.

If the processor has matrix units, each float32 input is split exactly into three bfloat16 numbers (``split.c``); otherwise weights
are widened in the vector unit. Sums are float32 in both cases.
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
LOOKED_AT = 256  # values of a weight that are compared


@dataclass(frozen=True, eq=False)
class _Copy:
    """``made`` from a weight at ``version`` (PyTorch's counter of changes); ``some`` of its values, every ``step``-th."""

    weight: ReferenceType[Tensor]
    made: Tensor
    version: int
    some: Tensor
    step: int

    def unchanged(self) -> bool:
        """Whether the weight is unchanged, as far as its version and sampled values show."""
        weight = self.weight()
        if weight is None or weight.dtype != torch.float32 or _version(weight) != self.version:
            return False
        return weight.shape == self.made.shape and torch.equal(_some(weight, self.step), self.some)


# By the weight's id, while in use: models that share a weight share its copy.
_COPIES: WeakValueDictionary[int, _Copy] = WeakValueDictionary()


class Narrow:
    """Copies of weights ``[O, E]``, by the weight.

    Args:
        weights: of products. They are kept, so that ``check`` can detect changes.
    Raises:
        RuntimeError: the C kernels are not available. ValueError: a weight is not float32 on the CPU with sizes that are multiples
            of 16, or has values that bfloat16 would round.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self._weights: dict[int, tuple[Tensor, _Copy]] = {}
        for weight in weights:
            if id(weight) not in self._weights:
                copy = _COPIES.get(id(weight))
                if copy is None or copy.weight() is not weight or not copy.unchanged():
                    copy = _COPIES[id(weight)] = _copied(weight)
                self._weights[id(weight)] = weight, copy

    def __reduce__(self) -> Any:  # a copied model has other weight objects
        return Narrow, ([weight for weight, _ in self._weights.values()],)

    def __getitem__(self, weight: Tensor) -> Tensor:
        """The copy of a weight, in the internal layout of ``linear``.

        Raises:
            RuntimeError: the weight was not copied, or was cast since.
        """
        found = self._weights.get(id(weight))
        if found is None or weight.dtype != torch.float32:
            raise RuntimeError(CHANGED)
        return found[1].made

    @property
    def bytes(self) -> int:
        """Bytes of all copies, in addition to the weights."""
        return sum(copy.made.nbytes for _, copy in self._weights.values())

    def check(self) -> None:
        """Raise RuntimeError if a weight has changed, by PyTorch's counter of changes and by comparing some values.

        (Fused optimisers and writes through ``.data`` are not counted; the comparison detects them if they changed more than a few values.)
        """
        if not all(copy.unchanged() for _, copy in self._weights.values()):
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
    step = max(1, weight.numel() // LOOKED_AT) | 1  # odd, so that samples are from several columns
    return _Copy(ref(weight), made, _version(weight), _some(weight, step).clone(), step)
