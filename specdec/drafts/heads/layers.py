"""Parts of heads' bodies: attention through a ``Pass``, the gated MLP, and rotary angles of a llama-like config."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.arguments import whole
from specdec.configs import setting
from specdec.drafts.heads.contract import Pass
from specdec.forward.block import Angles, eager_angles, rotated
from specdec.forward.families import positions_of
from specdec.forward.llama_c import most
from specdec.forward.rotary_table import FIXED
from specdec.kernels.native import library
from specdec.kernels.native.ops import add_norm

TABLE = 1024  # positions whose angles are computed beforehand, at least
_running = threading.local()


@contextmanager
def by_kernels(wanted: bool) -> Iterator[None]:
    """While a head decodes with kernels, in this thread: norms of a few rows use one, too."""
    before = getattr(_running, "kernels", False)
    _running.kernels = wanted and library() is not None
    try:
        yield
    finally:
        _running.kernels = before


class Norm(nn.RMSNorm):
    """PyTorch's RMS norm, with the name that transformers gives its constant."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., E]`` -> ``[..., E]``; by a kernel under ``by_kernels``, for at most ``llama_c.STEP`` rows in float32."""
        if not getattr(_running, "kernels", False) or not self._takes(x):
            return super().forward(x)
        return add_norm(x, None, self.weight, self.variance_epsilon)

    def _takes(self, x: Tensor) -> bool:
        weight = self.weight
        if weight is None or self.eps is None or x.dtype != torch.float32 or weight.dtype != torch.float32:
            return False
        lie = x.is_cpu and weight.is_cpu and x.is_contiguous() and weight.is_contiguous()
        few = x.numel() <= most(x.dtype) * weight.numel() and not torch.is_grad_enabled()
        return lie and few and x.dim() > 0 and weight.shape == x.shape[-1:]

    @property
    def variance_epsilon(self) -> float:
        assert self.eps is not None
        return self.eps


def norm(config: LlamaConfig, size: int | None = None) -> Norm:
    """An RMS norm over the hidden size, or over ``size``."""
    return Norm(size or config.hidden_size, eps=config.rms_norm_eps)


class Attention(nn.Module):
    """Grouped attention over ``inputs`` features; ``head_norms``: whether queries and keys are normed (as in qwen3)."""

    def __init__(self, config: Any, inputs: int | None = None, head_norms: bool = False):
        super().__init__()
        size, width = config.head_dim, inputs or config.hidden_size
        query, key = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n, bias=False) for n in (query, key, key))
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = norm(config, size) if head_norms else None
        self.k_norm = norm(config, size) if head_norms else None
        self.size = size

    def forward(self, x: Tensor, angles: Angles, layer: int, go: Pass) -> Tensor:
        """``x [..., inputs]`` -> ``[..., E]``."""
        query = self.q_proj(x).unflatten(-1, (-1, self.size))
        return self.o_proj(go(layer, _turned(query, self.q_norm, angles), *self.keys_values(x, angles)))

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., H, D]`` of ``x [..., inputs]``."""
        key, value = (p(x).unflatten(-1, (-1, self.size)) for p in (self.k_proj, self.v_proj))
        return _turned(key, self.k_norm, angles), value

    def keep(self, x: Tensor, angles: Angles, layer: int, go: Pass) -> None:
        """Keep the keys and values of ``x [..., inputs]`` as those of ``layer``, without attending."""
        fast = go.kernels.get(self)
        if fast is None or not fast.keep(go, layer, x, angles):
            go.store(layer, *self.keys_values(x, angles))


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        wide = config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(config.hidden_size, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Sublayers(nn.Module):
    """What blocks of several heads share: attention and the gated MLP, each with its residual. A derived class makes the three parts."""

    self_attn: Attention
    mlp: MLP
    post_attention_layernorm: Norm

    def through(self, x: Tensor, normed: Tensor, angles: Angles, layer: int, go: Pass) -> Tensor:
        """``y = x + attention(normed)`` and then ``y + mlp(norm(y))``, for ``x [..., E]`` and ``normed [..., inputs]``."""
        fast = go.kernels.get(self)
        made = None if fast is None else fast.through(go, layer, x, normed, angles)
        if made is not None:
            return made
        x = x + self.self_attn(normed, angles, layer, go)
        return x + self.mlp(self.post_attention_layernorm(x))


class Block(Sublayers):
    """An ordinary llama-like block whose attention goes through a ``Pass``."""

    def __init__(self, config: LlamaConfig, head_norms: bool = False):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(config), norm(config)
        self.self_attn, self.mlp = Attention(config, head_norms=head_norms), MLP(config)

    def forward(self, x: Tensor, angles: Angles, layer: int, go: Pass) -> Tensor:
        """``[..., E]`` -> ``[..., E]``."""
        return self.through(x, self.input_layernorm(x), angles, layer, go)


class Rotary:
    """Cosines and sines of positions; it has no weights."""

    def __init__(self, config: LlamaConfig):
        self._by: dict[torch.device, Any] = {torch.device("cpu"): LlamaRotaryEmbedding(config)}
        self._table: Angles | None = None  # on the CPU, of the positions 0, 1, ...

    def __call__(self, positions: Tensor, like: Tensor) -> Angles:
        """Of positions ``[...]``, in the dtype and on the device of ``like``."""
        flat, shape = positions.reshape(-1), (*positions.shape, 1, -1)
        # A recording (``graphs.recorded``) is replayed at any position: it may not keep the rows that the table has now.
        if like.is_cpu and self.module.rope_type in FIXED and not is_in_torch_dispatch_mode():
            cos, turn = self._rows(flat)
            return cos.to(like.dtype).view(shape), turn.to(like.dtype).view(shape)
        if like.device not in self._by:
            self._by[like.device] = copy.deepcopy(self.module).to(like.device)
        cos, sin = self._by[like.device](like, flat[None])
        return eager_angles(*(t.view(*positions.shape, -1) for t in (cos, sin)))

    @property
    def module(self) -> LlamaRotaryEmbedding:
        return self._by[torch.device("cpu")]

    def _rows(self, positions: Tensor) -> Angles:
        table = self._table
        if table is not None:
            try:
                return table[0].index_select(0, positions), table[1].index_select(0, positions)
            except IndexError:  # beyond the table
                pass
        cos, turn = self._grown(int(positions.max()))
        return cos.index_select(0, positions), turn.index_select(0, positions)

    def _grown(self, last: int) -> Angles:
        every = torch.arange(max(2 * last + 2, TABLE))[None]
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self.module(torch.empty(0), every)
            cos, turn = eager_angles(cos[0], sin[0])
        # A decoder in another thread may replace it: read what was made.
        self._table = made = cos[:, 0], turn[:, 0]
        return made


def config_like(target: Any, **changes: Any) -> LlamaConfig:
    """The config of a llama-like body with the sizes of ``target``, a transformers model of any family."""
    theirs = target.config.get_text_config()
    # Recurrent models have no attention: heads of 64 then.
    heads = setting(theirs, "num_attention_heads") or max(theirs.hidden_size // 64, 1)
    rope = setting(theirs, "rope_parameters")
    wide = setting(theirs, "intermediate_size", "ffn_dim") or 4 * theirs.hidden_size
    rope = rope if isinstance(rope, dict) and "rope_theta" in rope else {"rope_theta": 10000.0}
    if rope.get("rope_type") not in ("linear", "llama3", "yarn"):
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return LlamaConfig(
        **{
            "vocab_size": theirs.vocab_size,
            "hidden_size": theirs.hidden_size,
            "intermediate_size": wide if isinstance(wide, int) else max(wide),
            "num_hidden_layers": 1,
            "num_target_layers": theirs.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": setting(theirs, "num_key_value_heads") or heads,
            "head_dim": setting(theirs, "head_dim") or theirs.hidden_size // heads,
            "rms_norm_eps": setting(theirs, "rms_norm_eps") or 1e-6,
            "max_position_embeddings": positions_of(target.config) or 2**20,
            "rope_parameters": dict(rope),
            "bos_token_id": None,
            "eos_token_id": None,
            **changes,
        }
    )


def _turned(x: Tensor, by: Norm | None, angles: Angles) -> Tensor:
    return rotated(x if by is None else by(x), None, angles)


class MaskEmbedding(nn.Module):
    """The embedding of slots that have no token: that of the id ``mask_token``, or for ``None`` a vector of the head's own.

    Raises:
        ValueError: the id does not exist.
    """

    def __init__(self, config: LlamaConfig, mask_token: int | None):
        super().__init__()
        if mask_token is not None:
            whole("mask_token", mask_token, ", or None for a vector of the head's own")
        if mask_token is not None and not 0 <= mask_token < config.vocab_size:
            raise ValueError(
                f"mask_token is {mask_token}: give an id from 0 to {config.vocab_size - 1}, or None for a vector of the head's own"
            )
        self.weight: nn.Parameter | None = None
        if mask_token is None:
            self.weight = nn.Parameter(torch.randn(1, config.hidden_size) * 0.02)
        self.token: Tensor
        self.register_buffer("token", torch.tensor(mask_token or 0), persistent=False)

    def forward(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """``[E]``; ``embed`` is the head's."""
        return embed(self.token) if self.weight is None else self.weight[0]


def initialise(model: nn.Module, deviation: float = 0.02) -> None:
    """Give all linear layers and embeddings normal weights."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, std=deviation)
