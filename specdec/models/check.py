"""Checks before a model is wrapped, and before a family that is not listed is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import at_least, whole
from specdec.configs import setting
from specdec.forward.families import positions_of, refuse
from specdec.kernels.attention.api import check as check_backend
from specdec.kernels.float8 import DTYPES
from specdec.models.clone import structural_clone
from specdec.types import Context, Proposal

_WINDOWS = ("attention_chunk_size", "sliding_window", "window_size")  # what families call them
_FLOAT32 = {"highest": 2.0**-23, "high": 2.0**-10, "medium": 2.0**-7}
_SLACK = 8.0  # over 107 families in three dtypes, errors were up to 1.5 times what another rounding does

Found = Iterator[tuple[list[int], Tensor]]
Graphs = bool | Literal["auto", "eager", "recorded"]


class Options(TypedDict, total=False):
    """The settings of ``HFModel`` by name, for functions that pass them on."""

    prefill_chunk: int | None
    unlisted: Literal["packed"] | None
    attention: str
    page: int | None
    graphs: Graphs
    compile: bool | Mapping[str, Any]
    invariant: bool
    bf16_weights: bool | None
    kv_dtype: torch.dtype | None
    prefix_cache: int | None


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


def check_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError for what is neither ``None`` nor a tokenizer."""
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(
            f"tokenizer is {tokenizer!r}: give the object, AutoTokenizer.from_pretrained(...), or use from_pretrained of this class"
        )


def check_arguments(
    model: Any,
    tokenizer: Any,
    prefill_chunk: int | None,
    attention: str,
    page: int | None,
    graphs: bool | str,
    compile: bool | Mapping[str, Any],
    invariant: bool,
    bf16_weights: bool | None,
    kv_dtype: torch.dtype | None,
    prefix_cache: int | None,
) -> None:
    """Raise TypeError or ValueError for arguments of ``HFModel`` that are wrong for any model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}: give a transformers model (of a PEFT wrapper, its base_model.model, which has the "
            "adapters, or what merge_and_unload() returns), or use HFModel.from_pretrained"
        )
    check_tokenizer(tokenizer)
    if prefill_chunk is not None:
        at_least(
            1, "prefill_chunk", prefill_chunk, "give a number of tokens, or None for what suits the device"
        )
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
    check_prefix_cache(prefix_cache)
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


def self_check(wrapped: Any, tokens: int = 24) -> float:
    """Compare with the model's own plain forward on random ids, in pieces and with a tree; returns the largest relative error.

    Raises:
        UnsupportedModel: they differ by more than rounding.
    """

    def found(ids: Tensor) -> Found:
        rows = [ids[0].tolist(), ids[1, : tokens // 2].tolist()]
        spare = ids[:, -3:].to(wrapped.device)
        proposal = Proposal(spare, torch.tensor([[-1, 0, 0]] * 2), torch.tensor([3, 3]))
        cache = wrapped.cache(2, tokens + 3)
        wrapped.prefill(cache, Context.of([row[: len(row) // 2] for row in rows]))
        logits = wrapped.score(cache, Context.of(rows), proposal).logits
        for b, row in enumerate(rows):
            a, x, y = spare[b].tolist()
            yield [*row, a, x], logits[b, [0, 1, 2]]
            yield [*row, a, y], logits[b, [0, 1, 3]]

    return _compare(wrapped, tokens, found, "its packed forward differs from its own")


def check_prefix_cache(limit: Any) -> None:
    """Raise TypeError or ValueError for what is no limit of a prefix cache, nor ``None``."""
    if limit is None:
        return
    hint = "give a number of bytes, such as 2**30, or None to keep no prompts"
    at_least(1, "prefix_cache", limit, hint, hint.removeprefix("give a number"))


def check_own(wrapped: Any, tokens: int = 24) -> float:
    """Compare an ``OwnCache`` with the model's forward without a cache: read in pieces, with nodes that are rejected and nodes that stay.

    Returns:
        the largest relative error.
    Raises:
        UnsupportedModel: they differ by more than rounding.
    """
    n, k = tokens // 2, 3

    def found(ids: Tensor) -> Found:
        text, other = ids.tolist()
        cache = wrapped.cache(1, tokens)
        wrapped.prefill(cache, Context.of([text[:n]]))
        for length, chain in (
            (n, other[:k]),
            (n + 1, text[n + 1 : n + 1 + k]),
            (n + 2 + k, []),
            (n + 3 + k, other[:k]),
        ):
            nodes = Proposal.chain(torch.tensor([chain], dtype=torch.long), torch.tensor([len(chain)]))
            context = Context.of([text[:length]], tokens)
            yield text[:length] + chain, wrapped.score(cache, context, nodes.to(wrapped.device)).logits[0]

    return _compare(wrapped, tokens, found, "its forward in pieces differs from the one without a cache")


def narrowed(model: PreTrainedModel, window: int = 8) -> PreTrainedModel | None:
    """The model on the same weights with shorter windows, which a comparison of few tokens reaches; ``None``: it has none that is longer.

    Windows that no text reaches stay: some families then make no mask for them.
    """
    twin, found, longest = structural_clone(model), False, positions_of(model.config)
    settings = {id(m.config): m.config for m in twin.modules() if setting(m, "config") is not None}
    for part in (*twin.modules(), *settings.values()):
        for name in _WINDOWS:
            size = vars(part).get(name)
            if isinstance(size, int) and window < size < (longest or size + 1):
                setattr(part, name, window)
                found = True
    return twin if found else None


def _compare(wrapped: Any, tokens: int, found: Callable[[Tensor], Found], what: str, draws: int = 3) -> float:
    """The largest error of ``found(ids [2, tokens])``, which are texts and their last logits, relative to a text's largest logit.

    The bound is measured: how much do the logits change when the result of every matrix product is rounded once more? A router may choose
    another expert for one rounding and not for the other, so ids are drawn again before a model is refused.
    """
    plain = Plain(wrapped)
    for seed in range(draws):
        ids = torch.randint(0, wrapped.vocab_size, (2, tokens), generator=torch.Generator().manual_seed(seed))
        error, noise = 0.0, _coarsest(wrapped.dtype)
        for text, logits in found(ids):
            right, n = plain(text), len(logits)
            change = plain(text, rounded=True) - right
            scale = right.abs().max()
            error = max(error, float((logits.to(right) - right[-n:]).abs().max() / scale))
            noise = max(noise, float(change[-n:].abs().max() / scale))
        if error < _SLACK * noise:
            return error
    raise refuse(
        wrapped.model.config.model_type,
        f"{what} by {error:.1e} (relative; rounding explains {noise:.1e})",
        other=False,
    )


class Plain:
    """The forward of a wrapped model's own code without a cache, with its own attention and without dropout; the model itself is not changed."""

    def __init__(self, wrapped: Any):
        self.model, self.device = structural_clone(wrapped.model), wrapped.device
        self.products = [m for m in self.model.modules() if isinstance(m, (nn.Embedding, nn.Linear))]
        self.wide = torch.promote_types(wrapped.dtype, torch.float32)

    @torch.no_grad()
    def __call__(self, text: list[int], rounded: bool = False) -> Tensor:
        """``[T, V]`` logits, in float32 at least. ``rounded``: with the result of every product rounded once more."""
        hooks = [m.register_forward_hook(_rounded) for m in self.products if rounded]
        try:
            return (
                self.model(torch.tensor([text], device=self.device), use_cache=False).logits[0].to(self.wide)
            )
        finally:
            for hook in hooks:
                hook.remove()


def _rounded(module: Any, given: Any, out: Any) -> Any:
    """A forward hook: every number of a tensor up or down by the rounding error of its dtype."""
    if not isinstance(out, Tensor):
        return out
    up = torch.arange(out.numel(), device=out.device).mul_(2654435761).bitwise_and_(1 << 16).view(out.shape)
    return torch.where(up == 0, out * (1 - _coarsest(out.dtype)), out * (1 + _coarsest(out.dtype)))


def _coarsest(dtype: torch.dtype) -> float:
    """The relative rounding error of a product. Parts of a float64 model may be computed in float32, and products of float32 in less."""
    eps = torch.finfo(dtype).eps
    return eps if dtype.itemsize < 4 else max(eps, _FLOAT32[torch.get_float32_matmul_precision()])
