"""bfloat16 copies of float32 weights that are bfloat16 numbers, as a checkpoint's mostly are: half the bytes, and the same products.

Where the processor has matrix units, each float32 input is multiplied as the sum of three bfloat16 numbers that it is (``split.c``);
elsewhere weights are widened in the vector unit. Either way products are exact and sums are of float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.native.build import library, reason
from specdec.kernels.native.ops import linear_takes

CHANGED = "weights of the model were changed after their bfloat16 copies were made: wrap the model again, or leave bf16_weights False"


class Narrow:
    """Copies of weights ``[O, E]``, by the weight.

    Args:
        weights: of products; each is copied once. They are kept, and ``check`` says whether they are as they were.
    Raises:
        RuntimeError: there are no C kernels. ValueError: a weight is not float32 on the CPU with sizes that are multiples of 16,
            or has numbers that bfloat16 would round.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self._weights: dict[int, tuple[Tensor, int, Tensor]] = {}
        for weight in weights:
            if id(weight) not in self._weights:
                self._weights[id(weight)] = weight, _version(weight), _copy(weight)

    def __reduce__(self) -> Any:  # a copy's weights are other objects
        return Narrow, ([weight for weight, _, _ in self._weights.values()],)

    def __getitem__(self, weight: Tensor) -> Tensor:
        return self._weights[id(weight)][2]

    def __contains__(self, weight: Tensor) -> bool:
        return id(weight) in self._weights

    @property
    def bytes(self) -> int:
        """Of all copies."""
        return sum(copy.nbytes for _, _, copy in self._weights.values())

    def check(self) -> None:
        """Raise RuntimeError where PyTorch counted a change of a weight (one through ``.data`` is not counted)."""
        if any(_version(weight) != version for weight, version, _ in self._weights.values()):
            raise RuntimeError(CHANGED)


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def _copy(weight: Tensor) -> Tensor:
    lib = library()
    if lib is None:
        raise RuntimeError(f"bf16_weights needs the C kernels, and there are none: {reason()}")
    if weight.dtype != torch.float32 or not linear_takes(weight, None):
        raise ValueError(
            f"bf16_weights is True and a weight is {tuple(weight.shape)}, {weight.dtype}, on {weight.device}: it is for float32 models on the "
            "CPU whose sizes are multiples of 16; leave it False"
        )
    made = torch.empty(weight.shape, dtype=torch.bfloat16)
    lib.narrow.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
    if lib.narrow(weight.data_ptr(), made.data_ptr(), *weight.shape):
        raise ValueError(
            f"bf16_weights is True and a weight {tuple(weight.shape)} has numbers that bfloat16 would round: leave it False, or round "
            "them first (model.to(torch.bfloat16).float())"
        )
    return made
