"""Smaller models from some of the layers: the last (SPIRe, Neelam et al., arXiv 2504.06419), the first, evenly spaced ones
(Distil-Whisper, Gandhi et al., arXiv 2311.00430), or those that change their input most (ShortGPT, arXiv 2403.03853).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from specdec.configs import blocks_of
from specdec.pruning.rebuild import named_tensors, plain, rebuild

_PLAIN = (int, float, str, bool, type(None))


def last_layers(layers: int, keep: int) -> list[int]:
    """The last ``keep`` of ``layers``, counted from 0: SPIRe's choice.

    Raises:
        ValueError: ``keep`` is below 1 or above the number of layers.
    """
    _check(layers, keep)
    return list(range(layers - keep, layers))


def first_layers(layers: int, keep: int) -> list[int]:
    """The first ``keep`` of ``layers``: an early exit.

    Raises:
        ValueError: ``keep`` is below 1 or above the number of layers.
    """
    _check(layers, keep)
    return list(range(keep))


def spaced_layers(layers: int, keep: int) -> list[int]:
    """Evenly spaced layers, the first and the last included (only the last if ``keep`` is 1), rounded down as in Distil-Whisper.

    Raises:
        ValueError: ``keep`` is below 1 or above the number of layers.
    """
    _check(layers, keep)
    return [i * (layers - 1) // (keep - 1) for i in range(keep)] if keep > 1 else [layers - 1]


def influential_layers(influence: Tensor, keep: int) -> list[int]:
    """The ``keep`` layers of the highest block influence ``[L]`` (``block_influence``); ties go to the earlier layer.

    Raises:
        ValueError: ``keep`` is below 1 or above the number of layers.
    """
    _check(len(influence), keep)
    return sorted(influence.argsort(descending=True, stable=True)[:keep].tolist())


def keep_layers(model: Any, layers: Sequence[int], *, share: bool = False) -> Any:
    """A model of the same class with some of the layers, embeddings and unembedding included; it shares no memory with ``model`` unless it is to.

    Args:
        model: a transformers causal LM; it is only read. layers: counted from 0, ascending.
        share: take the weights of ``model`` itself instead of copies, for a draft that skips layers of its target (Draft & Verify, Zhang et al., arXiv
            2309.08168) or exits early (LayerSkip, Elhoushi et al., arXiv 2404.16710) and is not trained. They need no gradients, and follow changes in place.
    Raises:
        TypeError: not a transformers model, or ``layers`` is a single number.
        ValueError: layers that do not exist or are out of order, or a family whose layers depend on their index in a way that
            its config cannot express.
    """
    model = plain(model, "keep_layers")
    if not isinstance(layers, Iterable):
        raise TypeError(
            f"layers is {layers!r}: give the numbers of the layers to keep, such as last_layers({len(blocks_of(model))}, {layers!r})"
        )
    old, layers = blocks_of(model), list(layers)
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= len(old):
        raise ValueError(f"layers is {layers}: give ascending numbers from 0 to {len(old) - 1}, each once")
    prefix = next(name for name, module in model.named_modules() if module is old) + "."
    new_number = {str(o): str(n) for n, o in enumerate(layers)}
    tensors = {}
    for name, tensor in named_tensors(model).items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if number in new_number:
                tensors[f"{prefix}{new_number[number]}.{rest}"] = tensor
        else:
            tensors[name] = tensor
    new = rebuild(model, _config(model.config, layers, len(old)), tensors, "keep_layers", share)
    for n, o in enumerate(layers):
        if vars(model.config).get("scale_attn_by_inverse_layer_idx") or _facts(blocks_of(new)[n]) != _facts(
            old[o]
        ):
            raise ValueError(
                f"keep_layers: in {model.config.model_type!r} models a layer's computation depends on its number, and layer {o} "
                f"would not be the same as layer {n}"
            )
    return new


def _config(old: Any, layers: list[int], count: int) -> Any:
    """The config of some layers; per-layer settings follow their layers."""
    config, said = copy.deepcopy(old), vars(old)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers"):
        of_each = said.get(name)
        if of_each is not None and len(of_each) == count:
            setattr(config, name, [of_each[i] for i in layers])
    config.num_hidden_layers = len(layers)
    if "attention_types" in said:  # GPT-Neo makes attention_layers from it
        config.attention_types = [[config.attention_layers, 1]]
    if said.get("max_window_layers") is not None:  # Qwen: from this layer on the window slides
        config.max_window_layers = sum(i < old.max_window_layers for i in layers)
    if said.get("decoder_sparse_step") is not None:  # Qwen's mixtures of experts
        without = {i for i in layers if i in old.mlp_only_layers or (i + 1) % old.decoder_sparse_step}
        config.mlp_only_layers = [n for n, i in enumerate(layers) if i in without]
        config.decoder_sparse_step = 1
    return config


def _facts(block: Any) -> list[tuple[str, str, Any]]:
    """Every plain value that a block computes with, apart from its index."""
    return [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, _PLAIN) and key not in ("layer_idx", "layer_id", "training") and key[0] != "_"
    ]


def _check(layers: int, keep: int) -> None:
    if not 1 <= keep <= layers:
        raise ValueError(f"keep is {keep} and there are {layers} layers: keep at least 1 and at most all")
