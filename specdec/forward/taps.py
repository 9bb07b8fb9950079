"""Activations of chosen layers at every fed position, through hooks that live for one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor


def blocks_of(model: Any) -> torch.nn.ModuleList:
    """The decoder blocks of a model.

    Raises:
        ValueError: no list of as many modules as the config has layers.
    """
    layers = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
            return module
    raise ValueError(f"taps: no list of {layers} blocks found in a {type(model).__name__}")


def listening(model: Any, taps: Sequence[int]) -> dict[int, list[Tensor]]:
    """An empty list for each tap. Tap ``l`` is the output of block ``l``, counted from 1 (of the last one before the final norm);
    0 is the input of block 1.

    Raises:
        ValueError: a layer that the model does not have.
    """
    blocks = len(blocks_of(model))
    wrong = [tap for tap in taps if not 0 <= tap <= blocks]
    if wrong:
        raise ValueError(
            f"taps: layer {wrong[0]} does not exist; this model has 0 (the embedding) to {blocks}"
        )
    return {tap: [] for tap in taps}


@contextmanager
def tapped(
    model: Any, caught: dict[int, list[Tensor]] | None, unpack: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Adds to ``caught`` what the tapped layers give in each forward in its body, as ``unpack`` packs it: ``[T, E]``.

    Forwards of other threads, whose draft may share the module, are not listened to.
    """
    if not caught:
        yield
        return
    blocks, mine = blocks_of(model), get_ident()

    def before(module: Any, args: Any, kwargs: Any) -> None:
        if get_ident() == mine:
            caught[0].append(unpack(args[0] if args else kwargs["hidden_states"]))

    def after(tap: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            if get_ident() == mine:
                caught[tap].append(unpack(out if isinstance(out, Tensor) else out[0]))

        return hook

    hooks: list[Any] = []
    try:
        for tap in caught:
            if tap == 0:
                hooks.append(blocks[0].register_forward_pre_hook(before, with_kwargs=True))
            else:
                hooks.append(blocks[tap - 1].register_forward_hook(after(tap)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
