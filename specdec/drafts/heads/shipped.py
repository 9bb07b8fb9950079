"""The MTP layer that a target ships with its checkpoint: a block of the target's own kind, which transformers leaves out when it loads the model.

transformers' ``MtpModel`` knows the names of these tensors (DeepSeek's and GLM's ``model.layers.{L}.*``, Qwen3-Next's ``mtp.*``) and loads them.
Here its layer runs over a ``contract.Pass``: the block's attention goes there through transformers' ``AttentionInterface``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, __version__
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_layers import MtpModel

from specdec.configs import setting
from specdec.drafts.heads.contract import Pass, Sight
from specdec.models.clone import structural_clone

ATTENTION = "specdec_pass"


def pass_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    go: Any = None,
    shape: tuple[int, ...] = (),
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: ``query [1, Hq, T, D]`` of the T slots of the pass ``go``, of this ``shape`` -> ``[1, T, Hq, Dv]``."""
    if sliding_window is not None or softcap is not None or s_aux is not None:
        raise ValueError(
            "the target's MTP layer has a sliding window, a soft cap on scores or sink logits, which heads do not support: make a new head "
            "with MTP.from_target"
        )
    size = query.shape[-1]
    slots = [t[0].transpose(0, 1).unflatten(0, shape) for t in (query, key, value)]
    out = go(0, slots[0] * ((scaling or size**-0.5) * size**0.5), *slots[1:])
    return out.reshape(1, -1, query.shape[1], value.shape[-1]), None


AttentionInterface.register(ATTENTION, pass_attention)


class ShippedBlock(nn.Module):
    """A layer as ``mtp.PairBlock``, with a block of the kind that the config ``kind`` of a target describes."""

    def __init__(self, kind: Mapping[str, Any]):
        super().__init__()
        self.config = config = AutoConfig.for_model(**kind)
        config.num_mtp_layers = 1  # a newer transformers saves it under a name of its own
        with torch.device("meta"):
            main = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        mtp = MtpModel(main, 1)
        layer: Any = mtp.layers[0]
        rotary = type(main.get_decoder().rotary_emb)
        by_kind = setting(mtp, "has_per_layer_rope")
        if by_kind is None:  # transformers 5.17's MtpModel does not say it
            by_kind = "layer_type" in signature(rotary.forward).parameters
        kinds = {"layer_type": mtp.config.layer_types[0]} if by_kind else {}
        self.norm, layer.post_norm, layer.use_post_norm = layer.post_norm, None, False
        self.layer = layer
        # Not a submodule, whose frequencies would be rounded when the head is put into bf16.
        self.rotary = partial(rotary(config), **kinds)
        probe, nothing = _Probe(), torch.zeros(1, config.hidden_size)
        self.pairs(nothing, nothing, probe)
        self.sizes = probe.sizes

    def pairs(self, embedded: Tensor, state: Tensor, go: Pass, product: Any = None) -> Tensor:
        """As ``mtp.PairBlock.pairs``, but the layer makes its own products."""
        shape = state.shape[:-1]
        positions = go.positions.expand(shape).reshape(1, -1)
        angles = self.rotary(embedded, positions)
        out = self.layer(
            *(t.reshape(1, -1, t.shape[-1]) for t in (embedded, state)),
            *(angles, None, positions, None),  # no mask and no cache
            go=go,
            shape=shape,
        )
        return out.view(state.shape)


class _Probe:
    """A pass of one slot that notes ``sizes``: how many heads keys have, and the sizes of a key and of a value."""

    kernels: Mapping[Any, Any] = {}

    def __init__(self) -> None:
        self.positions, self.sizes = torch.zeros(1, dtype=torch.long), (0, 0, 0)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.sizes = (*key.shape[-2:], value.shape[-1])
        return query.new_zeros(*query.shape[:-2], query.shape[-2] * value.shape[-1])

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        pass

    def narrowed(self, sight: Sight) -> _Probe:
        return self


def shipped(model: Any, folder: str | Path | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a ``ShippedBlock``, from a target's checkpoint.

    Args:
        model: the target. folder: of its checkpoint, or its hub id; ``None``: where it was loaded from.
    Raises:
        ValueError: the checkpoint has no MTP layer, or several, or is quantized; or its place is not known.
    """
    name, clone = type(model).__name__, structural_clone(model)
    config = clone.config.get_text_config()
    source = str(folder or model.config.name_or_path)
    if not source:
        raise ValueError(
            f"target: this {name} was not loaded from a checkpoint: give MTP.from_checkpoint(model, folder)"
        )
    if _quantized(source) if folder else setting(setting(model, "hf_quantizer"), "pre_quantized"):
        raise ValueError(
            f"target: the checkpoint of this {name} is quantized, and heads.MTP does not read its scales: give MTP.from_checkpoint(model, folder), the folder or "
            "hub id of the checkpoint before it was quantized (in bf16, for example); or make a new one with MTP.from_target"
        )
    count = setting(config, "num_mtp_layers", "mtp_num_hidden_layers")
    if count is not None and count != 1:
        raise ValueError(
            f"target: this {name} ships {count} MTP layers, and heads.MTP runs one, again and again: make a new one with MTP.from_target"
        )
    if setting(config, "num_mtp_layers") is None:  # as in Qwen3-Next, whose config does not say it
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    clone.config.name_or_path = source
    clone.config.dtype = clone.dtype  # a model that was made from its config has none
    try:
        if setting(clone, "_weight_conversions") is None:  # nor these, which transformers 5.17 asks for
            clone._weight_conversions = get_model_conversion_mapping(clone)
        mtp = MtpModel.from_pretrained(clone)
    except (AttributeError, OSError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(
            f"target: transformers {__version__} found no MTP layer of this {name} in {source} ({error}): make a new one with MTP.from_target, or "
            "try a newer transformers, which knows the layers of more families"
        ) from error
    layer: Any = mtp.layers[0]
    if layer.post_norm is None:
        raise ValueError(
            f"target: the MTP layer of a {name} has no norm of its own, which heads.MTP does not support"
        )
    tensors = {f"layer.{n}": t for n, t in layer.state_dict().items() if not n.startswith("post_norm.")}
    tensors |= {f"norm.{n}": t for n, t in layer.post_norm.state_dict().items()}
    return config.to_diff_dict(), tensors


def _quantized(source: str) -> bool:
    """Whether the config of a checkpoint says that it is quantized; one without a config says nothing."""
    try:
        return PretrainedConfig.get_config_dict(source)[0].get("quantization_config") is not None
    except OSError:
        return False
