"""One llama-like decoder block, written once over a table of operations, of which eager PyTorch, C and Triton each have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from specdec.configs import setting
from specdec.forward.families import refuse
from specdec.kernels.pointwise import Place

CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
Angles = tuple[Tensor, Tensor]
"""Cosines and sines of positions, in the form that ``Operations.rotate`` of the same table takes."""


class Block(NamedTuple):
    """The parts of one decoder block; norms and projections are the model's own modules."""

    layer: int
    before: Any
    query: Any
    key: Any
    value: Any
    out: Any
    query_norm: Any
    key_norm: Any
    after: Any
    gate: Any
    up: Any
    down: Any
    size: int
    scale: float
    window: int | None

    @property
    def products(self) -> tuple[Any, ...]:
        """All projections."""
        return self.query, self.key, self.value, self.out, self.gate, self.up, self.down


class Operations(Protocol):
    """The operations of a block; ``...`` stands for the tokens' dimensions.

    Attributes:
        stores: whether ``rotate`` can store keys and values itself.
    """

    stores: bool

    def add_norm(self, x: Tensor, more: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        """The sum ``x + more`` (``x`` where there is no ``more``) and its RMS norm. May overwrite ``more``, never ``x``."""
        ...

    def products(self, x: Tensor, *projections: Any) -> list[Tensor]:
        """``x [..., E]`` times each of the projections."""
        ...

    def rotate(
        self, b: Block, query: Tensor, key: Tensor, value: Tensor, angles: Angles, place: Place | None
    ) -> tuple[Tensor, Tensor]:
        """Head norms, where the block has them, and rotary embedding of ``query [..., Hq, D]`` and ``key [..., H, D]``, which may be
        overwritten. With a ``place``, keys and values are stored there and the returned key is unspecified."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up``. May overwrite ``gate``."""
        ...


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def run_block(
    ops: Operations,
    b: Block,
    x: Tensor,
    y: Tensor,
    angles: Angles,
    attend: Attend,
    place: Place | None = None,
) -> tuple[Tensor, Tensor]:
    """One block over ``x [..., E]``, whose norm by ``b.before`` is ``y``.

    Args:
        attend: ``(query [..., Hq, D], key [..., H, D], value [..., H, D]) -> [..., Hq, D]``, of the same tokens, rotated.
        place: where ``ops.rotate`` stores keys and values; ``None`` where ``attend`` does.
    Returns:
        two tensors ``[..., E]`` whose sum is the block's output.
    """
    q, k, v = (t.view(*t.shape[:-1], -1, b.size) for t in ops.products(y, b.query, b.key, b.value))
    q, k = ops.rotate(b, q, k, v, angles, place)
    (out,) = ops.products(attend(q, k, v).flatten(-2), b.out)
    x, y = ops.add_norm(x, out, b.after)
    (more,) = ops.products(ops.silu_mul(*ops.products(y, b.gate, b.up)), b.down)
    return x, more


class Eager:
    """PyTorch's operators on the model's own parameters. They overwrite nothing and have gradients."""

    stores = False

    def add_norm(self, x: Tensor, more: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        x = x if more is None else x + more
        return x, rms_norm(x, norm)

    def products(self, x: Tensor, *projections: Any) -> list[Tensor]:
        return [F.linear(x, p.weight, p.bias) for p in projections]

    def rotate(
        self, b: Block, query: Tensor, key: Tensor, value: Tensor, angles: Angles, place: Place | None
    ) -> tuple[Tensor, Tensor]:
        return rotated(query, b.query_norm, angles), rotated(key, b.key_norm, angles)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


EAGER = Eager()


def rms_norm(x: Tensor, module: Any) -> Tensor:
    """A transformers RMSNorm ``module`` applied to ``x [..., E]``."""
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def eager_angles(cos: Tensor, sin: Tensor) -> Angles:
    """Transformers' cosines and sines ``[..., D]`` as ``Eager.rotate`` takes them: ``rotate_half(q) * sin == roll(q) * turn``, bit for bit."""
    half = sin.shape[-1] // 2
    turn = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    return cos[..., None, :], turn[..., None, :]


def rotated(x: Tensor, norm: Any, angles: Angles) -> Tensor:
    """Rotary embedding of ``x [..., H, D]`` as in transformers' llama, after ``norm`` where there is one."""
    cos, turn = angles
    x = x if norm is None else rms_norm(x, norm)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * turn


def block_of(layer: Any, model: Any) -> Block:
    """The parts of decoder block ``layer`` of a llama-like ``model``.

    Raises:
        UnsupportedModel: the block is not built like llama's.
    """
    try:
        a, m = layer.self_attn, layer.mlp
        products = (a.q_proj, a.k_proj, a.v_proj, a.o_proj), (m.gate_proj, m.up_proj, m.down_proj)
    except AttributeError:
        products = None
    if type(model) not in CLASSES or products is None:
        raise refuse(
            model.config.model_type,
            f"its blocks cannot be copied; {', '.join(c.__name__ for c in CLASSES)} can",
        )
    of_attention, of_mlp = products
    return Block(
        a.layer_idx,
        layer.input_layernorm,
        *of_attention,
        *(setting(a, "q_norm"), setting(a, "k_norm")),
        layer.post_attention_layernorm,
        *of_mlp,
        a.head_dim,
        a.scaling,
        setting(model.config if isinstance(model, MistralForCausalLM) else a, "sliding_window"),
    )
