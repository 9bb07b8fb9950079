"""Checks of the arguments of ``verify``: shapes and types everywhere, values only on the CPU, where reading them is free."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = 0.02  # allowed deviation of a sum from 1: rounding in half precision adds up to less


def check_shapes(
    logits: Tensor,
    tokens: Tensor,
    size: Tensor,
    accept_u: Tensor,
    bonus_u: Tensor,
    draft: Tensor | None,
    temperature: float,
) -> None:
    """Raise ValueError for shapes and types that do not fit; no values are read."""
    if logits.dim() != 3 or not logits.shape[1] or not logits.shape[2]:
        raise ValueError(
            f"logits has shape {list(logits.shape)}: give [B, N + 1, V], one row more than there are nodes"
        )
    B, R, V = logits.shape
    N = R - 1
    expected = {"tokens": (tokens, [B, N]), "size": (size, [B]), "accept_u": (accept_u, [B, N])}
    expected["bonus_u"] = (bonus_u, [B, R] if bonus_u.dim() == 2 else [B])
    if draft is not None:
        expected["draft"] = (draft, [B, N, V])
    for name, (given, shape) in expected.items():
        if list(given.shape) != shape:
            raise ValueError(f"{name} has shape {list(given.shape)}: logits {[B, R, V]} need {shape}")
    if draft is not None and draft.device != logits.device:
        raise ValueError(f"logits is on {logits.device} and draft on {draft.device}: move them to one device")
    for name, given in {"tokens": tokens, "size": size}.items():
        if given.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} is {given.dtype}: give whole numbers, torch.int64")
    for name, real in {"logits": logits, "accept_u": accept_u, "bonus_u": bonus_u, "draft": draft}.items():
        if real is not None and not real.is_floating_point():
            raise ValueError(f"{name} is {real.dtype}: give floating-point numbers")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}: it must be a finite number >= 0 (0 is greedy)")


def check_numbers(
    tokens: Tensor,
    size: Tensor,
    accept_u: Tensor,
    bonus_u: Tensor,
    *,
    draft: Tensor | None,
    draft_logits: bool,
    vocabulary: int,
    greedy: bool,
) -> None:
    """Raise ValueError for invalid values. Nodes that do not exist are ignored, except for the range of their tokens.

    ``greedy``: random numbers and the draft are ignored.
    """
    N = tokens.shape[1]
    wrong = (size < 0) | (size > N)
    if bool(wrong.any()):
        raise ValueError(
            f"size of row {_row(wrong)} is {int(size[wrong][0])}: give 0 to {N}, the nodes of tokens"
        )
    wrong = (tokens < 0) | (tokens >= vocabulary)
    if bool(wrong.any()):
        raise ValueError(
            f"tokens of row {_row(wrong)} hold {int(tokens[wrong][0])}: give ids below {vocabulary}, the vocabulary of logits; "
            "those of nodes that do not exist may be any id"
        )
    if greedy:
        return
    live = torch.arange(N) < size[:, None]
    asked = torch.arange(N + 1) <= size[:, None] if bonus_u.dim() == 2 else torch.tensor(True)
    for name, u, counts in (("accept_u", accept_u, live), ("bonus_u", bonus_u, asked)):
        wrong = ~((u >= 0) & (u < 1)) & counts
        if bool(wrong.any()):
            raise ValueError(
                f"{name} of row {_row(wrong)} holds {float(u[wrong][0])}: give numbers in [0, 1)"
            )
    if draft is None or not N:
        return
    if draft_logits:
        wrong = ~draft.amax(-1).isfinite() & live
        what = "holds NaN, +inf or nothing but -inf: give logits of a distribution"
    else:
        total = draft.sum(-1, dtype=torch.promote_types(draft.dtype, torch.float32))
        wrong = ~((draft.amin(-1) >= 0) & ((total - 1).abs() <= CLOSE)) & live
        what = "is negative, NaN, or does not add up to 1: give probabilities, or say draft_logits=True"
    if bool(wrong.any()):
        raise ValueError(f"draft of row {_row(wrong)} {what}")


def _row(wrong: Tensor) -> int:
    return int(wrong.nonzero()[0, 0])
