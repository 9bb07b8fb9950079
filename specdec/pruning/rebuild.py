"""A smaller Hugging Face model from a config and its tensors; the original model is only read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Name -> parameter or buffer; tied ones once, under their first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def plain(model: Any, what: str) -> Any:
    """The model without ``torch.compile``'s wrapper, if its weights can be copied.

    Raises:
        TypeError: not a transformers model.
        ValueError: quantized, offloaded, or part of a multimodal model.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{what}: model is a {type(model).__name__}: give a transformers model (of an HFModel its .model, of a PEFT wrapper "
            "what merge_and_unload() returns)"
        )
    if vars(model.config).get("quantization_config") is not None:
        raise ValueError(f"{what}: the weights are quantized: load the model without quantization_config")
    if any(t.is_meta for t in named_tensors(model).values()):
        raise ValueError(f"{what}: some weights are offloaded: load the whole model on one device")
    if model.config.get_text_config() is not model.config:
        raise ValueError(
            f"{what}: {type(model).__name__} holds a language model among others: give that one alone"
        )
    return model


def llama_like(model: Any, what: str) -> Any:
    """``plain``, for models whose blocks have Llama's projections.

    Raises:
        ValueError: another family.
    """
    model = plain(model, what)
    if model.config.model_type not in LLAMA_LIKE:
        raise ValueError(
            f"{what}: {model.config.model_type!r} models are not supported: their blocks are not known to have Llama's "
            f"projections. Supported: {', '.join(LLAMA_LIKE)}; keep_layers and keep_tokens take more families"
        )
    return model


def rebuild(model: Any, config: Any, tensors: Mapping[str, Tensor], what: str, share: bool = False) -> Any:
    """A new model of the class of ``model`` with copies of ``tensors``, in the same mode (training or eval).

    The whole model is on the device of the input embedding, even if the original was spread over several devices.

    Args:
        config: of the new model. tensors: name in the new model -> tensor, for exactly its parameters and buffers.
        what: the caller's name, for messages. share: take the tensors themselves.
    Raises:
        ValueError: names or shapes that are not those of the new model.
    """
    with no_init_weights():
        new = type(model)(config)
    new.tie_weights()
    mine = named_tensors(new)
    # Some rotary embeddings have frequencies for each kind of layer, and layers of a kind may all be gone.
    tensors = {name: t for name, t in tensors.items() if name in mine or ".rotary_emb." not in name}
    wrong = set(mine) ^ set(tensors) or {n for n, t in mine.items() if t.shape != tensors[n].shape}
    if wrong:
        raise ValueError(
            f"{what}: {type(model).__name__} does not follow from its config ({min(wrong)}): modules that were added, tied or "
            "replaced after loading cannot be copied; merge or remove them first"
        )
    where = model.get_input_embeddings().weight.device
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            parameter.data = tensors[name].detach().to(where, copy=not share)
            parameter.requires_grad_(not share)
        for name in dict(new.named_buffers()):
            path, _, own = name.rpartition(".")
            new.get_submodule(path)._buffers[own] = tensors[name].detach().to(where, copy=not share)
    for module in new.modules():
        module._is_hf_initialized = (
            True  # as after from_pretrained, so that these weights are not initialised again
        )
    if vars(model).get("generation_config") is not None:
        new.generation_config = copy.deepcopy(model.generation_config)
    return new.train(model.training)
