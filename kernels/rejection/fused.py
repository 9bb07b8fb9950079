"""Verification of chains on logits, by one of several backends.

A step over ``[B, N + 1, V]`` logits reads each once for its row's mass, and the rows at the first rejection twice more; nothing of
that size is written. Trees have no kernel: a node's siblings are tried against the residual of earlier ones, so every rejected node
costs another pass over a row. ``verifiers.Rejection`` does that on probabilities.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from specdec.kernels import interpreted
from specdec.kernels.device import current, to_device
from specdec.kernels.philox.reference import pick
from specdec.kernels.rejection.arguments import check_numbers, check_shapes
from specdec.kernels.rejection.reference import Decision, check, decide

BACKENDS = ("reference", "triton")
BLOCK = 2048  # tokens of one program in the passes over one row
PART = 8192  # and in the pass over all rows
_HALVES = (torch.float32, torch.bfloat16, torch.float16)


def verify(
    logits: Tensor,
    tokens: Tensor,
    size: Tensor,
    accept_u: Tensor,
    bonus_u: Tensor,
    draft: Tensor | None = None,
    *,
    draft_logits: bool = False,
    temperature: float = 1.0,
    backend: str | None = None,
) -> Decision:
    """The number of accepted nodes of each chain, and the next token, as ``reference.py`` defines them: a pure function.

    Args:
        logits: ``[B, N + 1, V]`` of the target after the last committed token and after every node; rows of nodes that do not exist
            are ignored.
        tokens: ``[B, N]`` int64 drafted. size: ``[B]`` int64 how many of them exist.
        accept_u: ``[B, N]`` float64 uniforms in [0, 1): node n is accepted if its uniform is below its ratio. bonus_u: ``[B]``
            quantiles, or ``[B, N + 1]``, one for each number of accepted nodes.
        draft: ``[B, N, V]`` the distributions that the tokens were drawn from; ``None``: point masses. draft_logits: whether
            ``draft`` holds logits, to be divided by the same temperature, instead of probabilities.
        temperature: 0 takes the largest logit (ties: the first) and ignores the random numbers.
        backend: ``"reference"``, ``"triton"``, or ``None``: the one that is ``chosen``.
    Raises:
        ValueError: shapes or types do not fit; logits with NaN, +inf or only -inf; on the CPU also sizes, tokens or uniforms out of
            range and drafts that are not distributions, for existing nodes.
        ImportError: ``backend`` is "triton" and Triton is not installed.
    """
    check_shapes(logits, tokens, size, accept_u, bonus_u, draft, temperature)
    if logits.is_cpu:
        there = (t.cpu() for t in (tokens, size, accept_u, bonus_u))
        check_numbers(
            *there, draft=draft, draft_logits=draft_logits, vocabulary=logits.shape[2], greedy=not temperature
        )
    tokens, size, accept_u, bonus_u = (to_device(t, logits.device) for t in (tokens, size, accept_u, bonus_u))
    made = decisions(
        logits,
        tokens,
        size,
        accept_u,
        bonus_u,
        draft,
        draft_logits=draft_logits,
        temperature=temperature,
        backend=backend,
    )
    check(made.accepted >= 0)
    return made


def decisions(
    logits: Tensor,
    tokens: Tensor,
    size: Tensor,
    accept_u: Tensor,
    bonus_u: Tensor,
    draft: Tensor | None = None,
    *,
    draft_logits: bool = False,
    temperature: float = 1.0,
    backend: str | None = None,
) -> Decision:
    """``verify`` without its checks, on tensors of one device: the host reads no value, so a captured step may contain it.

    Args:
        others: as for ``verify``. Tokens of nodes that do not exist are ids below V, too. backend: ``None`` is ``chosen``.
    Returns:
        Rows whose logits have NaN, +inf or only -inf have ``accepted`` -1, and any number as their token.
    Raises:
        ValueError: the backend does not serve these types. ImportError: it is "triton" and Triton is not installed.
    """
    backend = backend or chosen(logits, draft)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "triton":
        why = supports(logits, draft)
        if why is not None:
            raise ValueError(f"{why}: use backend='reference'")
        with current(logits.device):
            return _triton(logits, tokens, size, accept_u, bonus_u, draft, draft_logits, temperature)

    def quantile(accepted: Tensor) -> Tensor:
        return bonus_u if bonus_u.dim() == 1 else bonus_u.gather(1, accepted[:, None])[:, 0]

    good: list[Tensor] = []
    made = decide(
        logits,
        tokens,
        size,
        lambda ratio: accept_u < ratio,
        lambda weights, accepted: pick(weights, quantile(accepted)),
        draft,
        draft_logits,
        temperature,
        inspect=good.append,
    )
    return made._replace(accepted=torch.where(good[0], made.accepted, -1))


def chosen(logits: Tensor, draft: Tensor | None = None) -> str:
    """The backend of a call that names none: Triton for CUDA tensors of types that it ``supports``, if it is installed."""
    return "triton" if logits.is_cuda and _installed() and supports(logits, draft) is None else "reference"


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def supports(logits: Tensor, draft: Tensor | None = None) -> str | None:
    """Why the kernels cannot serve a call, or ``None``."""
    for name, given in {"logits": logits, "draft": draft}.items():
        if given is not None and given.dtype not in (
            _HALVES if name == "logits" else (*_HALVES, torch.float64)
        ):
            return f"the kernels compute in float32, and {name} are {str(given.dtype).removeprefix('torch.')}"
    return None


def _triton(
    logits: Tensor,
    tokens: Tensor,
    size: Tensor,
    accept_u: Tensor,
    bonus_u: Tensor,
    draft: Tensor | None,
    draft_logits: bool,
    temperature: float,
) -> Decision:
    kernels = interpreted.kernels("rejection", logits.device, "logits", "backend='reference' runs everywhere")
    B, R, V = logits.shape
    device = logits.device
    accepted = torch.empty(B, dtype=torch.long, device=device)
    token = torch.empty(B, dtype=torch.long, device=device)
    if not B:
        return Decision(accepted, token)
    logits = _rows(logits)
    tokens, size, accept_u, bonus_u = (t.contiguous() for t in (tokens, size, accept_u, bonus_u))
    hot, divisor = temperature not in (0, 1), float(temperature or 1)
    splits = -(-V // PART)
    split_pad = 1 << (splits - 1).bit_length()
    node_pad = 1 << (R - 1).bit_length()

    def mass(x: Tensor, extra: int) -> tuple[Tensor, Tensor, Tensor]:
        """Largest values, masses and (if greedy) the indices of the largest: ``[B * rows, splits]``."""
        shape = (B * x.shape[1], splits)
        top, total = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        place = torch.empty(shape if temperature == 0 else (0,), dtype=torch.int32, device=device)
        if shape[0]:
            kernels.mass_kernel[shape](
                x, size, top, total, place, V, x.shape[1], x.stride(0), x.stride(1), splits, divisor,
                EXTRA=extra, HOT=hot, GREEDY=temperature == 0, PART=PART, num_warps=8,
            )  # fmt: skip
        return top, total, place

    top, total, place = mass(logits, 1)
    if temperature == 0:
        kernels.greedy_kernel[(B,)](
            tokens, size, top, total, place, accepted, token, R, splits, NODES=node_pad, SPLITS=split_pad
        )
        return Decision(accepted, token)
    kind, q, qtop, qtotal = 0, logits, top, total  # placeholders for arguments that the kernel does not read
    if draft is not None:
        kind, q = 1 + draft_logits, _rows(draft)
        if draft_logits:
            qtop, qtotal, _ = mass(q, 0)
    blocks = -(-V // BLOCK)
    cut = torch.empty(B, 4, dtype=torch.float32, device=device)
    rest, whole = (torch.empty(B, blocks, dtype=torch.float64, device=device) for _ in range(2))
    where = (
        tokens,
        size,
        accepted,
        cut,
        R,
        logits.stride(0),
        logits.stride(1),
        q.stride(0),
        q.stride(1),
        divisor,
    )
    kernels.accept_kernel[(B,)](
        logits, q, accept_u, top, total, qtop, qtotal, splits, *where,
        NODES=node_pad, SPLITS=split_pad, KIND=kind, HOT=hot,
    )  # fmt: skip
    kernels.residual_kernel[(B, blocks)](
        logits, q, rest, whole, V, blocks, *where, KIND=kind, HOT=hot, BLOCK=BLOCK, num_warps=8
    )
    by_row, by_depth = (bonus_u.stride(0), bonus_u.stride(1)) if bonus_u.dim() == 2 else (1, 0)
    kernels.pick_kernel[(B,)](
        logits, q, rest, whole, bonus_u, token, V, blocks, by_row, by_depth, *where,
        KIND=kind, HOT=hot, BLOCK=BLOCK, BLOCKS=1 << (blocks - 1).bit_length(), num_warps=16,
    )  # fmt: skip
    return Decision(accepted, token)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
