"""FlashAttention-2 operators by their documented semantics, on any device: what they refuse, and where they surprise.

Sources: ``mha_varlen_fwd`` and ``mha_fwd_kvcache`` in flash_api.cpp of PyTorch and of flash-attn (2.8). Outputs begin as NaN
where the kernels allocate without initialising, keys outside a sequence are not touched, and keys inside that are masked take part
with weight 0 (so a NaN among their values shows). Only ``dtypes`` and the device differ: float64 makes recipes testable.
"""

from __future__ import annotations

from types import ModuleType

import torch

HALVES = (torch.float16, torch.bfloat16)


class Emulation:
    """The operators. ``dtypes``: what is accepted; ``calls``: what was asked, a dict each."""

    def __init__(self, dtypes=HALVES):
        self.dtypes, self.calls = dtypes, []

    # -- PyTorch -------------------------------------------------------------------------------------------------------

    def varlen_attn(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
        window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        heads = key.shape[2] if block_table is not None else key.shape[1]
        if not enable_gqa and query.shape[1] != heads:
            raise ValueError("Expect query and key/value to have the same number of heads")
        where = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
        causal = window_size == (-1, 0)
        out, lse = self._varlen(*where, causal, scale, *window_size, seqused_k, block_table, num_splits)
        return (out, lse) if return_aux is not None and return_aux.lse else out

    def flash_attention_forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None,
        alibi_slopes=None,
    ):  # fmt: skip
        """``aten::_flash_attention_forward`` of torch 2.11: no pages."""
        check(dropout_p == 0 and not return_debug_mask and alibi_slopes is None, "not emulated")
        left, right = (-1 if w is None else w for w in (window_size_left, window_size_right))
        where = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        out, lse = self._varlen(*where, is_causal, scale, left, right, seqused_k, None, None)
        return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def _varlen(
        self, q, k, v, starts_q, starts_k, max_q, max_k, causal, scale, left, right, used, table, splits
    ):
        paged = table is not None
        self._tensors(q, k, v)
        for name, t in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
            self._ints(name, t, (len(starts_q),))
        N, (total, heads, size) = len(starts_q) - 1, q.shape
        check(N > 0, "batch size must be positive")
        shared = k.shape[-2]
        self._heads(heads, shared, size)
        check(size % 8 == 0, "head_size must be a multiple of 8")
        check(q.dim() == 3 and k.dim() == 3 + paged and k.shape[-1] == size, "shapes")
        check(k.shape == v.shape, "v must have the shape of k")
        if used is not None:
            self._ints("seqused_k", used, (N,))
        if paged:
            check(used is not None, "block_table requires seqused_k")
            self._table(table, k, N)
        self.calls.append(
            {"max_q": max_q, "heads": heads, "shared": shared, "sequences": N, "causal": causal}
        )
        if max_q == 1:
            causal = False
        if causal:
            right = 0
        swapped = max_q == 1 and heads > shared and left < 0 and right < 0
        if swapped:
            check(total == N, "shape is invalid for input: one query a sequence is expected")
        left, right = (-1 if w >= max_k else w for w in (left, right))
        out = torch.full_like(q, float("nan"))
        lse = q.new_full((heads, total), float("nan"), dtype=_wide(q.dtype))
        if max_k == 0:
            return out.zero_(), lse.fill_(float("inf"))
        for n in range(N):
            t0, t1 = int(starts_q[n]), int(starts_q[n + 1])
            t1 = min(t1, t0 + max_q)  # others have no block
            begin = int(starts_k[n])
            length = int(used[n]) if used is not None else int(starts_k[n + 1]) - begin
            if paged and splits != 1 and not swapped and n:
                continue  # the combined result of every sequence is written over that of the first
            keys, values = (_slots(b, table, n, begin, length) for b in (k, v))
            out[t0:t1], lse[:, t0:t1] = attend(q[t0:t1], keys, values, scale, left, right)
        return out, lse

    # -- the flash-attn package ----------------------------------------------------------------------------------------

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        check(k is None and v is None and rotary_cos is None and alibi_slopes is None, "not emulated")
        self._tensors(q, k_cache, v_cache)
        N, count, heads, size = q.shape
        rows, capacity, shared, key_size = k_cache.shape
        self._heads(heads, shared, size)
        check(key_size == size and v_cache.shape == k_cache.shape, "shapes")
        for name, t in (("seqlens_k", cache_seqlens), ("cache_batch_idx", cache_batch_idx)):
            if t is not None:
                self._ints(name, t, (N,))
        if cache_leftpad is not None:
            check(block_table is None, "We don't support Paged KV and leftpad_k running at the same time yet")
            self._ints("leftpad_k", cache_leftpad, (N,))
        if block_table is not None:
            self._table(block_table, k_cache, N)
            capacity *= block_table.shape[1]
        check(block_table is not None or cache_batch_idx is not None or rows == N, "batch")
        check(int(cache_seqlens.max()) <= capacity, "reads beyond the cache")
        self.calls.append(
            {"max_q": count, "heads": heads, "shared": shared, "sequences": N, "causal": causal}
        )
        left, right = window_size
        if causal and count > 1:
            right = 0
        left, right = (-1 if w >= capacity else w for w in (left, right))
        out = torch.full_like(q, float("nan"))
        lse = q.new_full((N, heads, count), float("nan"), dtype=_wide(q.dtype))
        for n in range(N):
            low = 0 if cache_leftpad is None else int(cache_leftpad[n])
            row = n if cache_batch_idx is None else int(cache_batch_idx[n])
            length = int(cache_seqlens[n]) - low
            if block_table is None:
                keys, values = (b[row, low : low + length] for b in (k_cache, v_cache))
            else:
                keys, values = (_slots(b, block_table, n, 0, length) for b in (k_cache, v_cache))
            out[n], lse[n] = attend(q[n], keys, values, softmax_scale, left, right, softcap)
        return (out, lse) if return_softmax_lse else out

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        check(dropout_p == 0 and alibi_slopes is None, "not emulated")
        self._tensors(q, k, v)
        N, (total, heads, size) = len(cu_seqlens_q) - 1, q.shape
        self._ints("cu_seqlens_q", cu_seqlens_q, (N + 1,))
        self._ints("cu_seqlens_k", cu_seqlens_k, (N + 1,))
        self._heads(heads, k.shape[-2], size)
        check(k.dim() == (3 if block_table is None else 4) and k.shape == v.shape, "shapes")
        if block_table is not None:
            self._table(block_table, k, N)
        self.calls.append({"max_q": max_seqlen_q, "heads": heads, "sequences": N, "causal": causal})
        left, right = window_size
        if causal and max_seqlen_q > 1:
            right = 0
        left, right = (-1 if w >= max_seqlen_k else w for w in (left, right))
        out = torch.full_like(q, float("nan"))
        lse = q.new_full((heads, total), float("nan"), dtype=_wide(q.dtype))
        for n in range(N):
            t0, t1 = int(cu_seqlens_q[n]), int(cu_seqlens_q[n + 1])
            begin, end = int(cu_seqlens_k[n]), int(cu_seqlens_k[n + 1])
            check(t1 - t0 <= max_seqlen_q and end - begin <= max_seqlen_k, "a sequence is longer than said")
            keys, values = (_slots(b, block_table, n, begin, end - begin) for b in (k, v))
            out[t0:t1], lse[:, t0:t1] = attend(q[t0:t1], keys, values, softmax_scale, left, right, softcap)
        return (out, lse, None) if return_attn_probs else out

    def package(self) -> ModuleType:
        """A module to stand for ``flash_attn``."""
        module = ModuleType("flash_attn")
        module.__version__ = "2.8.3"
        module.flash_attn_with_kvcache = self.flash_attn_with_kvcache
        module.flash_attn_varlen_func = self.flash_attn_varlen_func
        return module

    # -- what they check -----------------------------------------------------------------------------------------------

    def _tensors(self, q, k, v):
        check(q.dtype in self.dtypes, "FlashAttention only support fp16 and bf16 data type")
        check(k.dtype == q.dtype == v.dtype, "query, key and value must have the same dtype")
        for t in (q, k, v):
            check(t.stride(-1) == 1, "Input tensor must have contiguous last dimension")

    def _ints(self, name, t, shape):
        check(t.dtype == torch.int32, f"{name} must have dtype int32")
        check(t.is_contiguous(), f"{name} must be contiguous")
        check(tuple(t.shape) == shape, f"{name} must have shape {shape}")

    def _heads(self, heads, shared, size):
        check(size <= 256, "FlashAttention forward only supports head dimension at most 256")
        check(heads % shared == 0, "Number of heads in key/value must divide number of heads in query")

    def _table(self, table, pool, N):
        check(table.dtype == torch.int32 and table.stride(-1) == 1, "block_table must have dtype int32")
        check(table.shape[0] == N, "block_table must have a row for each sequence")
        check(pool.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")


def check(good, message):
    """TORCH_CHECK."""
    if not good:
        raise RuntimeError(message)


def attend(q, k, v, scale, left, right, softcap=0.0):
    """``q [n, H, D]`` over ``k, v [m, Hkv, D]`` -> ``[n, H, D]`` and lse ``[H, n]``; windows aligned at the bottom right."""
    (n, heads, size), m = q.shape, k.shape[0]
    wide = _wide(q.dtype)
    k, v = (t.to(wide).repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k) * (size**-0.5 if scale is None else scale)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    at, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if right >= 0:
        hidden |= key > at + right
    if left >= 0:
        hidden |= key < at - left
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    blind = hidden.all(-1)
    weights = (scores - lse.masked_fill(blind, 0.0)[..., None]).exp()
    out = torch.einsum("hqk,khd->qhd", weights, v)
    return out.to(q.dtype).masked_fill(blind[:, None, None], 0.0), lse.masked_fill(blind, float("inf"))


def _slots(buffer, table, n, begin, length):
    """``[length, H, D]``: slots in order, or by the pages of sequence n."""
    if table is None:
        check(begin >= 0, "reads before the buffer")
        check(begin + length <= buffer.shape[0], "reads beyond the buffer")
        return buffer[begin : begin + length]
    slot, page = torch.arange(length), buffer.shape[1]
    return buffer[table[n].long()[slot // page], slot % page]


def _wide(dtype):
    """What scores are in: float32, as in the kernels, but for float64."""
    return torch.promote_types(dtype, torch.float32)
