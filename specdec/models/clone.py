"""A structural clone: a second model object on the same storage, so that the user's model is never modified."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.configs import eos_ids, processors, runs_on, sampling, setting


def structural_clone(model: PreTrainedModel) -> Any:
    """A model of the same structure with its own modules and config, on the user's parameters and buffers.

    Rotary frequencies are copied, because dynamic scaling writes them in place.

    Raises:
        ValueError: the weights are packed, and compressed-tensors unpacks them in the first forward.
    """
    if packed_weights(model):
        raise ValueError(
            "model has packed weights, which compressed-tensors replaces in the first forward: call model(torch.tensor([[0]])) "
            "once before, or give the folder or hub id, which is loaded unpacked"
        )
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    shared |= {id(b): b for name, b in model.named_buffers() if "inv_freq" not in name}
    clone = copy.deepcopy(model, shared)
    clone.eval()
    config = clone.config
    config.use_cache = config.output_hidden_states = config.output_attentions = False
    config.return_dict = True
    return clone


def packed_weights(model: Any) -> bool:
    """Whether compressed-tensors will unpack the weights in the first forward, and so replace them."""
    return setting(model, "ct_decompress_hook") is not None


class Wrapper:
    """What a wrapper says of a user's transformers ``model``, of which it runs a private ``clone``."""

    model: PreTrainedModel
    clone: Any

    def weights(self) -> Iterator[torch.Tensor]:
        """Parameters, and buffers but for rotary frequencies, which a forward may write."""
        yield from self.clone.parameters()
        yield from (buffer for name, buffer in self.clone.named_buffers() if "inv_freq" not in name)

    @property
    def device(self) -> torch.device:
        """The device of input ids and logits."""
        return runs_on(self.clone)

    @property
    def dtype(self) -> torch.dtype:
        return self.clone.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text, by the current config of the user's model."""
        return eos_ids(self.model)

    @property
    def generation_processors(self) -> dict[str, Any]:
        """Settings of the generation config that transformers turns into processors and this library does not."""
        return processors(self.model)

    @property
    def generation_sampling(self) -> dict[str, Any]:
        """Sampling settings of the generation config, where they differ from drawing from the softmax of the logits."""
        return sampling(self.model)


def shares(clone: nn.Module, model: nn.Module) -> bool:
    """Whether the parameters of a clone are still all those of the model."""
    return _parameters(clone) == _parameters(model)


def _parameters(module: nn.Module) -> list[int]:
    """Ids of all parameters. ``Module.parameters`` takes several times as long, and each cache asks for them."""
    waiting, found = [module], list[int]()
    while waiting:
        one = waiting.pop()
        found += map(id, one._parameters.values())
        waiting += [part for part in one._modules.values() if part is not None]
    return found
