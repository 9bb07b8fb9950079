"""Checks before a model is wrapped, and before a family that is not listed is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from transformers import PreTrainedModel

from specdec.arguments import whole
from specdec.forward.families import refuse
from specdec.kernels.attention.api import check as check_backend
from specdec.kernels.float8 import DTYPES
from specdec.models.clone import structural_clone
from specdec.types import Context, Proposal

Graphs = bool | Literal["auto", "eager", "recorded"]


class Options(TypedDict, total=False):
    """The settings of ``HFModel`` by name, for functions that pass them on."""

    prefill_chunk: int
    unlisted: Literal["packed"] | None
    attention: str
    page: int | None
    graphs: Graphs
    compile: bool | Mapping[str, Any]
    invariant: bool
    bf16_weights: bool | None
    kv_dtype: torch.dtype | None


class Loading(Options, total=False):
    """The settings of loading a model by its name: those of ``HFModel``, and of transformers' ``from_pretrained``."""

    dtype: Any
    device_map: Any
    tokenizer: Any
    revision: str
    token: str | bool
    cache_dir: Any
    subfolder: str
    local_files_only: bool
    force_download: bool
    trust_remote_code: bool
    use_safetensors: bool
    attn_implementation: str
    quantization_config: Any
    max_memory: Any
    offload_folder: Any


def check_arguments(
    model: Any,
    tokenizer: Any,
    prefill_chunk: int,
    attention: str,
    page: int | None,
    graphs: bool | str,
    compile: bool | Mapping[str, Any],
    invariant: bool,
    bf16_weights: bool | None,
    kv_dtype: torch.dtype | None,
) -> None:
    """Raise TypeError or ValueError for arguments of ``HFModel`` that are wrong for any model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}: give a transformers model (of a PEFT wrapper, what merge_and_unload() returns), "
            "or use HFModel.from_pretrained"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(
            f"tokenizer is {tokenizer!r}: give the object, AutoTokenizer.from_pretrained(...), or use HFModel.from_pretrained"
        )
    whole("prefill_chunk", prefill_chunk)
    if page is not None:
        whole("page", page, ", or None for slots of every row")
    if not isinstance(compile, (bool, Mapping)):
        raise TypeError(f"compile is {compile!r}: give True, False, or a mapping of torch.compile's options")
    if not (bf16_weights is None or isinstance(bf16_weights, bool)):
        raise TypeError(
            f"bf16_weights is {bf16_weights!r}: give True, False, or None for where they are exact"
        )
    if kv_dtype not in (None, *DTYPES):
        raise ValueError(
            f"kv_dtype is {kv_dtype!r}: give {' or '.join(map(str, DTYPES))}, or None for the model's own dtype"
        )
    if prefill_chunk < 1:
        raise ValueError(f"prefill_chunk is {prefill_chunk}: it must be at least 1")
    if page is not None and page < 1:
        raise ValueError(
            f"page is {page}: give the slots of a page, at least 1, or None for slots of every row"
        )
    if invariant and page is not None and page % 16:
        raise ValueError(f"page is {page}: with invariant=True give a multiple of 16, or None")
    if bf16_weights and graphs not in (False, "auto"):  # "auto" captures nothing on a CPU, where copies are
        raise ValueError(
            "bf16_weights is True but captured steps do not read bfloat16 copies: leave it None, or give graphs=False"
        )
    if compile is not False and (invariant or graphs == "recorded"):
        other = "invariant is True" if invariant else "graphs is 'recorded'"
        raise ValueError(
            f"compile is set and {other}: compiled parts are not bit-invariant and have no operators to record"
        )
    check_backend(attention, "attention")


def self_check(wrapped: Any, tokens: int = 24, seed: int = 0) -> float:
    """Compare with the model's own plain forward on random ids, in pieces and with a tree; returns the largest relative error.

    Raises:
        UnsupportedModel: they differ by more than rounding in the model's dtype, or in float32 where transformers' own attention computes in it.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, wrapped.vocab_size, (2, tokens), generator=draw)
    rows = [ids[0].tolist(), ids[1, : tokens // 2].tolist()]
    spare = ids[:, -3:].to(wrapped.device)
    proposal = Proposal(spare, torch.tensor([[-1, 0, 0]] * 2), torch.tensor([3, 3]))
    cache = wrapped.cache(2, tokens + 3)
    wrapped.prefill(cache, Context.of([row[: len(row) // 2] for row in rows]))
    logits = wrapped.score(cache, Context.of(rows), proposal).logits
    plain, error = structural_clone(wrapped.model), 0.0  # with its own attention, and without dropout
    for b, row in enumerate(rows):
        a, x, y = spare[b].tolist()
        for nodes, path in (((0, 1, 2), [a, x]), ((0, 1, 3), [a, y])):
            with torch.no_grad():
                expected = plain(torch.tensor([row + path], device=wrapped.device)).logits[0, -3:]
            error = max(error, float((logits[b, list(nodes)] - expected).abs().max() / expected.abs().max()))
    eager = (
        plain.config._attn_implementation == "eager"
    )  # its softmax is computed in float32, whatever the dtype
    _refuse_if_off(wrapped, error, eager, "packed forward differs from its own")
    return error


def check_own(wrapped: Any, tokens: int = 24, seed: int = 0) -> float:
    """Compare an ``OwnCache`` with the model's forward without a cache: read in pieces, with nodes that are rejected and nodes that stay.

    Returns:
        the largest relative error.
    Raises:
        UnsupportedModel: they differ by more than rounding.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, wrapped.vocab_size, (2, tokens), generator=draw)
    text, other = ids.tolist()
    plain = structural_clone(wrapped.model)
    cache, error = wrapped.cache(1, tokens), 0.0
    n, k = tokens // 2, 3
    wrapped.prefill(cache, Context.of([text[:n]]))
    for length, chain in (
        (n, other[:k]),
        (n + 1, text[n + 1 : n + 1 + k]),
        (n + 2 + k, []),
        (n + 3 + k, other[:k]),
    ):
        nodes = Proposal.chain(torch.tensor([chain], dtype=torch.long), torch.tensor([len(chain)]))
        logits = wrapped.score(cache, Context.of([text[:length]], tokens), nodes.to(wrapped.device)).logits[0]
        with torch.no_grad():
            whole = torch.tensor([text[:length] + chain], device=wrapped.device)
            expected = plain(whole, use_cache=False).logits[0, -len(logits) :]
        error = max(error, float((logits - expected).abs().max() / expected.abs().max()))
    _refuse_if_off(wrapped, error, True, "forward in pieces differs from the one without a cache")
    return error


def _refuse_if_off(wrapped: Any, error: float, float32: bool, what: str) -> None:
    """``float32``: some of it is computed in float32, whatever the dtype."""
    coarsest = max(torch.finfo(wrapped.dtype).eps, torch.finfo(torch.float32).eps if float32 else 0.0)
    if not error < 64 * coarsest**0.75:
        raise refuse(wrapped.model.config.model_type, f"its {what} by {error:.1e} (relative)")
