"""Activations of chosen layers at every fed position, through hooks that exist for one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor

from specdec.configs import blocks_of


def listening(model: Any, taps: Sequence[int]) -> dict[int, list[Tensor]]:
    """An empty list for each tap. Tap ``l`` is the output of block ``l``, counted from 1 (of the last one before the final norm);
    0 is the input of block 1.

    Raises:
        ValueError: the model does not have such a layer.
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
    """Adds to ``caught`` the tapped layers' outputs of each forward in its body, packed by ``unpack`` to ``[T, E]``.

    Forwards of other threads, whose draft may share the module, are ignored.
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
