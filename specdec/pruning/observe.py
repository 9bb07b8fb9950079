"""Statistics of modules' inputs and outputs on a calibration batch, by hooks that last for one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def observe(
    model: Any,
    modules: Sequence[torch.nn.Module],
    statistic: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    length: Tensor | None = None,
) -> Tensor:
    """``statistic(input, output)`` of each module, over the tokens of the batch, stacked: ``[modules, ...]``.

    Args:
        model: a causal LM. It runs once without dropout, gradients and unembedding, and is not changed.
        statistic: called with ``[T, X]`` inputs and ``[T, Y]`` outputs without the padding, in float32 or wider.
        tokens: ``[B, L]`` right-padded. length: ``[B]``; by default all of ``L``.
    Raises:
        ValueError: no tokens, or lengths that do not fit.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens are {list(tokens.shape)}; they must be [B, L], a calibration batch")
    B, L = tokens.shape
    lengths = torch.full((B,), L) if length is None else length.cpu()
    if lengths.shape != (B,) or not B or not L or int(lengths.min()) < 0 or not 0 < int(lengths.max()) <= L:
        raise ValueError(
            f"length is {lengths.tolist()} for tokens {[B, L]}: one number a row, between 0 and {L}, and some tokens"
        )
    # [B, L]; the model is causal, so padding does not change the text's states.
    real = torch.arange(L) < lengths[:, None]
    found: list[Tensor | None] = [None] * len(modules)

    def hook(i: int) -> Callable[[Any, Any, Any, Any], None]:
        def listen(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            made = out if isinstance(out, Tensor) else out[0]
            wide = torch.promote_types(given.dtype, torch.float32)
            at = real.to(given.device)
            found[i] = statistic(*(t.reshape(B, L, -1)[at].to(wide) for t in (given, made)))

        return listen

    modes = [(m, m.training) for m in model.modules()]
    hooks = []
    try:
        for i, module in enumerate(modules):
            hooks.append(module.register_forward_hook(hook(i), with_kwargs=True))
        model.eval()
        with torch.no_grad():
            model.base_model(input_ids=tokens.to(model.get_input_embeddings().weight.device), use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
        for module, training in modes:
            module.training = training
    missed = [i for i, one in enumerate(found) if one is None]
    if missed:
        raise ValueError(
            f"observe: module {missed[0]} was not called: this family keeps its layers otherwise"
        )
    return torch.stack([one.cpu() for one in found if one is not None])
